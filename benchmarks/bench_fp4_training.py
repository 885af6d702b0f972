"""What FP4 costs in loss: training with ``--use-fp4`` beside bf16, and a trained model before and after packing.

``python benchmarks/bench_fp4_training.py --out FOLDER --csv results.csv``. Two runs of the package's own trainer on the
default corpus, from one seed and over the same batches: bf16 compute, and bf16 compute with weights rounded to nvfp4 in
the forward. Then the bf16 run's model is packed into every format and its validation loss taken again. The losses of
packed models are computed in fp32, so that a difference is the weights' alone.

Everything is written under ``--out`` (default: a temporary folder that is removed), the caches of tokenizer and tokens included.
Started again on the same folder, the script goes on from the runs' checkpoints.
"""

from __future__ import annotations

import argparse
import csv
import os
import platform
import statistics
import sys
import tempfile
from dataclasses import dataclass
from pathlib import Path

sys.path.insert(0, str(Path(__file__).resolve().parents[1]))

import torch
from torch import nn

from vblackwell.infer.load import load_decoder
from vblackwell.nn.convert import convert_linears
from vblackwell.nn.linear import FusedFP4Linear
from vblackwell.numerics.sqnr import decibels, noise_and_signal
from vblackwell.train.config import TrainConfig
from vblackwell.train.data import prepare_data
from vblackwell.train.dataset import PackedDataset, evaluation_batches
from vblackwell.train.metrics import METRICS_NAME, read_metrics
from vblackwell.train.run import train
from vblackwell.train.runfolder import FINAL
from vblackwell.train.sources import resolve

FORMATS = (
    ("nvfp4", "mse"), ("nvfp4", "max"), ("mxfp4", "mse"), ("mxfp4", "max"),
    ("nf4", "mse"), ("int4", "mse"), ("int8", "mse"),
)  # fmt: skip
NVFP4_FLOOR = 0.01  # validation loss after packing may be this much larger, relatively
WINDOW = 50  # steps that a training loss is averaged over


@dataclass(frozen=True)
class Packed:
    """A model after packing.

    Attributes:
        loss: mean cross entropy over the held-out windows.
        sqnr_db: over all packed weights together.
        bits: held per packed weight.
    """

    name: str
    loss: float
    sqnr_db: float
    bits: float


def run_config(folder: Path, args: argparse.Namespace, use_fp4: bool) -> TrainConfig:
    """The settings of ``vb train --config PRESET`` in bf16, with or without ``--use-fp4``."""
    flags = {"config": args.preset, "precision": "bf16", "use_fp4": use_fp4, "seed": args.seed, "out": str(folder)}
    if args.steps is not None:
        flags["max_steps"] = args.steps
    return resolve(flags | {"sample_tokens": 0, "tensorboard": False, "resume": folder.exists()})


def run_both(out: Path, args: argparse.Namespace) -> dict[str, Path]:
    """Train both ways; the run folders by name."""
    folders = {"bf16": out / "bf16", "fp4": out / "fp4"}
    for name, folder in folders.items():
        print(f"-- {name}", flush=True)
        code = train(run_config(folder, args, name == "fp4"))
        if code:
            raise SystemExit(code)
    return folders


def curves(folders: dict[str, Path]) -> list[dict[str, float]]:
    """Validation loss, and training loss over the window of steps before it, of both runs at every step with a validation."""
    lines = {name: {line["step"]: line for line in read_metrics(path / METRICS_NAME)} for name, path in folders.items()}
    rows = []
    for step in (step for step, line in lines["bf16"].items() if "val_loss" in line):
        row: dict[str, float] = {"step": step}
        for name, by_step in lines.items():
            window = [by_step[s]["loss"] for s in range(max(1, step - WINDOW + 1), step + 1)]
            row[f"{name}_train"], row[f"{name}_val"] = statistics.fmean(window), by_step[step]["val_loss"]
        rows.append(row)
    return rows


@torch.no_grad()
def validation_loss(model: nn.Module, dataset: PackedDataset, sequences: int) -> float:
    """Mean loss over the first ``sequences`` held-out windows."""
    total = count = 0
    for input_ids_BS, targets_BS in evaluation_batches(dataset, 8, -(-sequences // 8)):
        total += float(model(input_ids_BS, targets_BS)) * len(input_ids_BS)
        count += len(input_ids_BS)
    return total / count


def packed_model(folder: Path, form: str, search: str, dataset: PackedDataset, sequences: int) -> Packed:
    """The model in ``folder`` with its linears packed (head, embedding and norms kept), measured."""
    model = load_decoder(folder).eval()
    convert_linears(model, format=form, scale_search=search, use_fp4=False)
    noise = signal = 0.0
    held = weights = 0
    for module in model.modules():
        if isinstance(module, FusedFP4Linear):
            before = module.weight
            assert before is not None
            packed = module.quantize().packed
            assert packed is not None
            more_noise, more_signal = noise_and_signal(before.detach(), packed.dequantize(torch.float32))
            noise, signal = noise + more_noise, signal + more_signal
            held, weights = held + packed.nbytes, weights + before.numel()
    loss = validation_loss(model, dataset, sequences)
    return Packed(f"{form} {search}", loss, decibels(noise, signal), 8 * held / weights)


def print_curves(rows: list[dict[str, float]]) -> None:
    print(
        f"\nstep   bf16: train  validation   fp4: train  validation   validation fp4 / bf16   (train: mean of {WINDOW})"
    )
    for row in rows:
        print(
            f"{row['step']:>4} {row['bf16_train']:>12.4f} {row['bf16_val']:>11.4f} {row['fp4_train']:>12.4f} "
            f"{row['fp4_val']:>11.4f} {row['fp4_val'] / row['bf16_val']:>23.4f}"
        )


def print_packed(title: str, before: float, results: list[Packed]) -> None:
    print(f"\n{title}\nformat      validation loss   change      SQNR   bits a weight\nfp32{before:>23.4f}")
    for result in results:
        change = 100 * (result.loss / before - 1)
        print(f"{result.name:<10}{result.loss:>17.4f} {change:>+7.2f} % {result.sqnr_db:>6.2f} dB {result.bits:>15.3f}")


def measure(out: Path, args: argparse.Namespace) -> list[dict[str, object]]:
    """Everything, printed; rows for the CSV."""
    folders = run_both(out, args)
    rows = curves(folders)
    config = run_config(folders["bf16"], args, False)
    corpus = prepare_data(None, None, config.vocab_size, lambda text, share: None)
    dataset = PackedDataset(corpus, config.seq_length, "validation", config.seed)
    sequences = min(args.sequences, len(dataset))
    before = {
        name: validation_loss(load_decoder(path / FINAL).eval(), dataset, sequences) for name, path in folders.items()
    }
    results = [packed_model(folders["bf16"] / FINAL, *form, dataset, sequences) for form in FORMATS]
    trained = [packed_model(folders["fp4"] / FINAL, "nvfp4", search, dataset, sequences) for search in ("max", "mse")]
    print_curves(rows)
    print_packed(f"the bf16 run's model, packed; {sequences} held-out windows", before["bf16"], results)
    print_packed("the --use-fp4 run's model: its fp32 masters, and packed", before["fp4"], trained)
    change = results[0].loss / before["bf16"] - 1
    verdict = "within" if change <= NVFP4_FLOOR else "NOT within"
    print(f"\nnvfp4 mse: {100 * change:+.2f} %, {verdict} {100 * NVFP4_FLOOR:g} %")
    table: list[dict[str, object]] = [{"kind": "curve", **row} for row in rows]
    for run, found in (("bf16", results), ("fp4", trained)):
        table.append({"kind": f"{run} run", "format": "fp32", "loss": before[run]})
        table += [
            {"kind": f"{run} run", "format": each.name, "loss": each.loss, "sqnr_db": each.sqnr_db, "bits": each.bits}
            for each in found
        ]
    return table


def write_csv(path: Path, table: list[dict[str, object]]) -> None:
    names = list(dict.fromkeys(name for row in table for name in row))
    with path.open("w", newline="") as file:
        writer = csv.DictWriter(file, names, lineterminator="\n")
        writer.writeheader()
        for row in table:
            writer.writerow(
                {name: round(value, 6) if isinstance(value, float) else value for name, value in row.items()}
            )


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--preset", default="tiny")
    parser.add_argument("--steps", type=int, default=None, help="default: the preset's")
    parser.add_argument("--seed", type=int, default=0)
    parser.add_argument("--sequences", type=int, default=512, help="held-out windows of the losses of packed models")
    parser.add_argument("--out", type=Path, default=None, help="folder for the runs and caches; default: temporary")
    parser.add_argument("--csv", type=Path, default=None)
    args = parser.parse_args()
    print(
        f"torch {torch.__version__}, Python {platform.python_version()}, {torch.get_num_threads()} threads, {platform.machine()}"
    )
    with tempfile.TemporaryDirectory(prefix="vblackwell-fp4-") as scratch:
        out = (args.out or Path(scratch)).resolve()
        out.mkdir(parents=True, exist_ok=True)
        os.environ["XDG_CACHE_HOME"] = str(out / "cache")
        table = measure(out, args)
    if args.csv:
        write_csv(args.csv, table)


if __name__ == "__main__":
    main()
