"""What 8-bit optimizer states and stochastic masters cost in loss: training with them beside exact AdamW.

``python benchmarks/bench_formats.py --steps 400 --every 50``. Runs of the package's own trainer on the default corpus, from one seed and
over the same batches: exact states, 8-bit moments, and 8-bit moments with bf16 weights that have no master, in bf16 compute; then exact
states and 8-bit moments in fp32 compute. One more exact run begins at another seed: what differs less than those two do may be chance.
Losses do not depend on where the bytes live (`tests/offload/test_formats.py`), so all runs are resident, without a GPU too.

Prints a table of mean training losses, one of validation losses, and the bytes that each format keeps, from the stack's own books.
Everything is written under ``--out`` (default: a temporary folder that is removed); started again there, runs go on from their checkpoints.
"""

from __future__ import annotations

import argparse
import json
import platform
import statistics
import sys
import tempfile
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

sys.path.insert(0, str(Path(__file__).resolve().parents[1]))

import torch

from vblackwell.train.config import TrainConfig
from vblackwell.train.metrics import METRICS_NAME, read_metrics
from vblackwell.train.run import train
from vblackwell.train.runfolder import REPORT
from vblackwell.train.sources import resolve

SMALL = "{num_layers: 4, hidden_size: 64, intermediate_size: 192, num_heads: 2}"


@dataclass(frozen=True)
class Run:
    """One training run.

    Attributes:
        name: of its column and its folder.
        settings: what sets it apart, as fields of `TrainConfig`.
    """

    name: str
    settings: dict[str, Any] = field(default_factory=dict)


EIGHT = {"optimizer_states": "8bit"}
RUNS = (
    Run("bf16 exact", {"precision": "bf16"}),
    Run("bf16 8bit", {"precision": "bf16", **EIGHT}),
    Run("bf16 8bit stochastic", {"precision": "bf16", "masters": "stochastic", **EIGHT}),
    Run("fp32 exact", {"precision": "fp32"}),
    Run("fp32 8bit", {"precision": "fp32", **EIGHT}),
    Run("fp32 exact, other seed", {"precision": "fp32", "seed": 1}),
)


def main() -> None:
    """Read the command line, train, print."""
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("--steps", type=int, default=400, help="optimizer steps of each run")
    parser.add_argument("--every", type=int, default=50, help="steps between the table's rows")
    parser.add_argument("--config", default="tiny", help="preset")
    parser.add_argument("--architecture", default=SMALL, help="sizes that differ from the preset's; '{}' for none")
    parser.add_argument("--vocab-size", type=int, default=1024)
    parser.add_argument("--batch-size", type=int, default=8)
    parser.add_argument("--seq-length", type=int, default=128)
    parser.add_argument("--learning-rate", type=float, default=3e-3)
    parser.add_argument("--device", default="cpu", choices=("cpu", "cuda"))
    parser.add_argument("--only", nargs="*", default=None, help="names of runs; default: all")
    parser.add_argument("--out", type=Path, default=None, help="folder of the runs; default: a temporary one")
    options = parser.parse_args()
    print(
        f"torch {torch.__version__}, Python {platform.python_version()}, {torch.get_num_threads()} threads; {options}"
    )
    with tempfile.TemporaryDirectory() as temporary:
        folder = options.out or Path(temporary)
        chosen = [run for run in RUNS if options.only is None or run.name in options.only]
        found = {
            run.name: trained(run, folder / run.name.replace(" ", "-").replace(",", ""), options) for run in chosen
        }
    report(found, options.every)


def trained(run: Run, out: Path, options: argparse.Namespace) -> Trained:
    """Train (or go on, or find it finished); its losses and bytes."""
    given = {
        "config": options.config, "architecture": options.architecture, "vocab_size": options.vocab_size,
        "batch_size": options.batch_size, "seq_length": options.seq_length, "learning_rate": options.learning_rate,
        "max_steps": options.steps, "eval_every": options.every, "checkpoint_every": 200, "device": options.device,
        "placement": "resident", "fast_memory": "1GiB", "sample_tokens": 0, "tensorboard": False, "out": str(out),
        "resume": (out / METRICS_NAME).exists(), **run.settings,
    }  # fmt: skip
    config: TrainConfig = resolve(given)
    code = train(config)
    if code:
        raise SystemExit(code)
    lines = read_metrics(out / METRICS_NAME)
    losses, validation = (
        {line["step"]: line[key] for line in lines if line.get(key) is not None} for key in ("loss", "val_loss")
    )
    kinds = json.loads((out / REPORT).read_text(encoding="utf-8"))["bytes_by_kind_and_level"]
    return Trained(losses, validation, {kind: sum(levels) for kind, levels in kinds.items()})


@dataclass(frozen=True)
class Trained:
    """What a run gave.

    Attributes:
        losses: by step.
        validation: by step.
        kept_bytes: by kind of range.
    """

    losses: dict[int, float]
    validation: dict[int, float]
    kept_bytes: dict[str, int]


def report(found: dict[str, Trained], every: int) -> None:
    """Print the tables."""
    names = list(found)
    last = max(max(run.losses) for run in found.values())
    print(f"\nTraining loss, mean of the {every} steps up to\n")
    print("| step | " + " | ".join(names) + " |\n|---" + "|---" * len(names) + "|")
    for step in range(every, last + 1, every):
        row = [statistics.mean(run.losses[at] for at in range(step - every + 1, step + 1)) for run in found.values()]
        print(f"| {step} | " + " | ".join(f"{value:.4f}" for value in row) + " |")
    print("\nValidation loss\n")
    print("| step | " + " | ".join(names) + " |\n|---" + "|---" * len(names) + "|")
    for step in sorted(set.intersection(*(set(run.validation) for run in found.values()))):
        print(f"| {step} | " + " | ".join(f"{run.validation[step]:.4f}" for run in found.values()) + " |")
    print("\nBytes kept between steps, in KiB\n")
    kinds = list(dict.fromkeys(kind for run in found.values() for kind in run.kept_bytes))
    print("| | " + " | ".join(kinds) + " | together |\n|---" + "|---" * (len(kinds) + 1) + "|")
    for name, run in found.items():
        cells = [f"{run.kept_bytes[kind] / 1024:.0f}" if kind in run.kept_bytes else "" for kind in kinds]
        print(f"| {name} | " + " | ".join(cells) + f" | {sum(run.kept_bytes.values()) / 1024:.0f} |")


if __name__ == "__main__":
    main()
