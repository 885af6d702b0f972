"""What 8-bit optimizer states and stochastic masters cost in loss: training with them beside exact AdamW.

``python benchmarks/bench_formats.py --steps 400 --every 50``; on a GPU with ``--device cuda --jobs 6``. Runs of the package's own
trainer on the default corpus, from one seed and over the same batches: exact states, 8-bit moments, and 8-bit moments with bf16 weights
that have no master, in bf16 compute; then exact states and 8-bit moments in fp32 compute. One more exact run begins at another seed: what
differs less than those two do may be chance. Losses do not depend on where the bytes live (`tests/offload/test_formats.py`), so all runs
are resident, without a GPU too.

Prints a table of mean training losses, one of validation losses, the bytes that each format keeps, from the stack's own books, and last
each format's final validation loss over its exact run's, beside what another seed does. With ``--csv`` that table is appended to a file.
Everything is written under ``--out`` (default: a temporary folder that is removed); started again there, runs go on from their checkpoints.
"""

from __future__ import annotations

import argparse
import csv
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
from training_runs import run_folder, train_all

from vblackwell.data.corpus import prepare_data
from vblackwell.train.metrics import METRICS_NAME, read_metrics
from vblackwell.train.runfolder import REPORT

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
    parser.add_argument("--data", type=Path, default=None, help="text; default: the standard library's sources")
    parser.add_argument("--device", default="cpu", choices=("cpu", "cuda"))
    parser.add_argument("--jobs", type=int, default=1, help="runs at a time")
    parser.add_argument("--csv", type=Path, default=None)
    parser.add_argument("--only", nargs="*", default=None, help="names of runs; default: all")
    parser.add_argument("--out", type=Path, default=None, help="folder of the runs; default: a temporary one")
    options = parser.parse_args()
    print(
        f"torch {torch.__version__}, Python {platform.python_version()}, {torch.get_num_threads()} threads; {options}"
    )
    with tempfile.TemporaryDirectory() as temporary:
        folder = options.out or Path(temporary)
        chosen = [run for run in RUNS if options.only is None or run.name in options.only]
        prepare_data(options.data, None, options.vocab_size)  # once, before several runs ask for it
        failed = train_all({run.name: flags_of(run, options) for run in chosen}, folder, options.jobs)
        found = {name: read_run(folder / run_folder(name)) for name, reason in failed.items() if reason is None}
    if found:
        report(found, options.every)
        rows = summary(found)
        print_summary(rows)
        if options.csv:
            append_csv(options.csv, rows, options)
    for name, reason in failed.items():
        if reason is not None:
            print(f"{name}: FAILED, {reason}")
    if any(failed.values()):
        raise SystemExit(1)


def flags_of(run: Run, options: argparse.Namespace) -> dict[str, Any]:
    """The run's settings, as fields of `TrainConfig`."""
    return {
        "config": options.config, "architecture": options.architecture, "vocab_size": options.vocab_size,
        "batch_size": options.batch_size, "seq_length": options.seq_length, "learning_rate": options.learning_rate,
        "max_steps": options.steps, "eval_every": options.every, "checkpoint_every": 200, "device": options.device,
        "data": None if options.data is None else str(options.data),
        "placement": "resident", "fast_memory": "1GiB", "sample_tokens": 0, "tensorboard": False, **run.settings,
    }  # fmt: skip


def read_run(out: Path) -> Trained:
    """Losses and bytes of the finished run in ``out``."""
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


def summary(found: dict[str, Trained]) -> list[dict[str, Any]]:
    """A row a run: its last validation loss, over that of the exact run in its compute type, and the bytes it keeps."""
    rows = []
    for name, run in found.items():
        exact = found.get(f"{name.split()[0]} exact")
        last = max(run.validation)
        change = None if exact is None or exact is run else 100 * (run.validation[last] / exact.validation[last] - 1)
        kept = sum(run.kept_bytes.values())
        rows.append(
            {"run": name, "step": last, "validation": run.validation[last], "change_percent": change, "bytes": kept}
        )
    return rows


def print_summary(rows: list[dict[str, Any]]) -> None:
    print("\n| run | validation loss | over the exact run |\n|---|---|---|")
    for row in rows:
        change = "" if row["change_percent"] is None else f"{row['change_percent']:+.2f} %"
        print(f"| {row['run']} | {row['validation']:.4f} | {change} |")


def append_csv(path: Path, rows: list[dict[str, Any]], options: argparse.Namespace) -> None:
    """Add the rows; the header where the file is new."""
    machine = torch.cuda.get_device_name() if options.device == "cuda" else platform.machine()
    shared = {"steps": options.steps, "batch_size": options.batch_size, "seq_length": options.seq_length}
    shared |= {"config": options.config, "architecture": options.architecture, "machine": machine}
    new = not path.exists()
    with path.open("a", newline="") as file:
        writer = csv.DictWriter(file, [*rows[0], *shared, "torch"], lineterminator="\n")
        if new:
            writer.writeheader()
        writer.writerows(row | shared | {"torch": torch.__version__} for row in rows)


if __name__ == "__main__":
    main()
