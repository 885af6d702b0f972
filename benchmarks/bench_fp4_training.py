"""What FP4 costs in loss: training with ``--use-fp4`` beside bf16, and a trained model before and after packing.

``python benchmarks/bench_fp4_training.py --out FOLDER --csv results.csv``; on a GPU
``--device cuda --jobs 2 --steps 800 --batch-size 32 --seq-length 256``. Two runs of the package's own trainer on the
default corpus, from one seed and over the same batches: bf16 compute, and bf16 compute with weights rounded to nvfp4 in
the forward. Then the bf16 run's model is packed into every format and its validation loss taken again. The losses of
packed models are computed in fp32, so that a difference is the weights' alone. Rows are appended to the CSV.

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
import time
from dataclasses import dataclass
from pathlib import Path
from typing import Any

sys.path.insert(0, str(Path(__file__).resolve().parents[1]))

import torch
from torch import nn

from benchmarks.lib.training_runs import run_folder, train_all
from vblackwell.data.corpus import prepare_data
from vblackwell.data.dataset import PackedDataset, evaluation_batches
from vblackwell.generate.load import load_decoder
from vblackwell.nn.convert.linears import convert_linears
from vblackwell.nn.linear.fused_fp4 import FusedFP4Linear
from vblackwell.numerics.sqnr import decibels, noise_and_signal
from vblackwell.train.metrics import METRICS_NAME, read_metrics
from vblackwell.train.runfolder import FINAL
from vblackwell.train.sources import resolve

FORMATS = (
    ("nvfp4", "mse"), ("nvfp4", "max"), ("mxfp4", "mse"), ("mxfp4", "max"),
    ("nf4", "mse"), ("int4", "mse"), ("int8", "mse"),
)  # fmt: skip
NVFP4_FLOOR = 0.01  # validation loss after packing may be this much larger, relatively
WINDOW = 50  # steps that a training loss is averaged over
RECIPE = ("batch_size", "seq_length", "learning_rate", "eval_every", "vocab_size")  # flags that replace the preset's
COLUMNS = (
    "kind", "step", "bf16_train", "bf16_val", "fp4_train", "fp4_val", "format", "loss", "sqnr_db", "bits",
    "preset", "steps", "tokens_per_step", "seed", "machine", "torch",
)  # fmt: skip


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


def run_flags(args: argparse.Namespace, use_fp4: bool) -> dict[str, Any]:
    """The settings of ``vb train --config PRESET`` in bf16, with or without ``--use-fp4``."""
    flags = {"config": args.preset, "precision": "bf16", "use_fp4": use_fp4, "seed": args.seed, "device": args.device}
    flags["data"] = None if args.data is None else str(args.data)
    given = {name: getattr(args, name) for name in RECIPE if getattr(args, name) is not None}
    if args.steps is not None:
        given["max_steps"] = args.steps
    return flags | given | {"placement": "resident", "sample_tokens": 0, "tensorboard": False}


def run_both(out: Path, args: argparse.Namespace) -> dict[str, Path]:
    """Train both ways; the run folders by name."""
    failed = train_all({"bf16": run_flags(args, False), "fp4": run_flags(args, True)}, out, args.jobs)
    for name, reason in failed.items():
        if reason is not None:
            raise SystemExit(f"the {name} run failed: {reason}")
    return {name: out / run_folder(name) for name in failed}


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
    """Mean loss over the first ``sequences`` held-out windows, rounded up to whole batches of 8."""
    device = next(model.parameters()).device
    total, count = torch.zeros((), dtype=torch.float64, device=device), 0
    for input_ids_BS, targets_BS in evaluation_batches(dataset, 8, -(-sequences // 8)):
        total += model(input_ids_BS.to(device), targets_BS.to(device)).double() * len(input_ids_BS)
        count += len(input_ids_BS)
    return float(total) / count


def packed_model(folder: Path, form: str, search: str, dataset: PackedDataset, sequences: int, device: str) -> Packed:
    """The model in ``folder`` with its linears packed (head, embedding and norms kept), measured."""
    model = load_decoder(folder, "cpu", torch.float32).eval()  # packed there: small layers are many small launches
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
    loss = validation_loss(model.to(device), dataset, sequences)
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
    began = time.perf_counter()
    config = resolve(run_flags(args, False))
    corpus = prepare_data(
        args.data, None, config.vocab_size, lambda text, share: None
    )  # once, before two runs ask for it
    prepared = time.perf_counter()
    folders = run_both(out, args)
    trained_at = time.perf_counter()
    rows = curves(folders)
    dataset = PackedDataset(corpus, config.seq_length, "validation", config.seed)
    sequences = min(args.sequences, len(dataset))
    before = {
        name: validation_loss(load_decoder(path / FINAL, args.device, torch.float32).eval(), dataset, sequences)
        for name, path in folders.items()
    }
    bf16, fp4 = (folders[name] / FINAL for name in ("bf16", "fp4"))
    results = [packed_model(bf16, *form, dataset, sequences, args.device) for form in FORMATS]
    trained = [packed_model(fp4, "nvfp4", search, dataset, sequences, args.device) for search in ("max", "mse")]
    end = time.perf_counter()
    print(f"\ndata {prepared - began:.1f} s, two runs {trained_at - prepared:.1f} s, packing {end - trained_at:.1f} s")
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
    shared = {
        "preset": args.preset, "steps": config.max_steps, "tokens_per_step": config.tokens_per_step, "seed": args.seed,
        "machine": machine_of(args.device), "torch": torch.__version__,
    }  # fmt: skip
    return [row | shared for row in table]


def machine_of(device: str) -> str:
    """What ran it: the GPU's name, or the processor's architecture."""
    return torch.cuda.get_device_name(device) if device == "cuda" else platform.machine()


def append_csv(path: Path, table: list[dict[str, object]]) -> None:
    """Add the rows; the header where the file is new."""
    new = not path.exists()
    with path.open("a", newline="") as file:
        writer = csv.DictWriter(file, COLUMNS, lineterminator="\n")
        if new:
            writer.writeheader()
        for row in table:
            writer.writerow(
                {name: round(value, 6) if isinstance(value, float) else value for name, value in row.items()}
            )


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--preset", default="tiny")
    parser.add_argument("--steps", type=int, default=None, help="default: the preset's")
    for name, kind in zip(RECIPE, (int, int, float, int, int), strict=True):
        parser.add_argument("--" + name.replace("_", "-"), type=kind, default=None, help="default: the preset's")
    parser.add_argument("--data", type=Path, default=None, help="text; default: the standard library's sources")
    parser.add_argument("--device", default="cpu", choices=("cpu", "cuda"))
    parser.add_argument("--jobs", type=int, default=1, help="runs at a time")
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
        append_csv(args.csv, table)


if __name__ == "__main__":
    main()
