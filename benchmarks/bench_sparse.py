"""Sparse activity: rounds in which only the groups with the largest gradients train, beside dense training of the same steps.

``python benchmarks/bench_sparse.py`` streams `tiny` through a level 0 of ``--fast-memory``, on a GPU with ``--device cuda --preset
small``. A round begins with one backward of everything, by which `select_top_k_gradients` chooses ``--fraction`` of the groups; these are
prefetched, and stepped by ``optimizer.step(only=...)`` for ``--round-steps`` steps, in which nothing else asks for gradients. Prints, for
dense and sparse training of equal steps and for sparse training of equal time, each when it is known: validation loss, seconds a step
(until the last update has ended), bytes over the links, peak of each level. ``--fractions`` takes several.
"""

from __future__ import annotations

import argparse
import gc
import platform
import sys
import time
from dataclasses import dataclass
from pathlib import Path
from typing import Any

sys.path.insert(0, str(Path(__file__).resolve().parents[1]))

import torch
from torch import nn

from vblackwell.data.corpus import prepare_data
from vblackwell.data.dataset import BatchStream, Corpus, PackedDataset, evaluation_batches
from vblackwell.memory.cache.stack import VGPUStack
from vblackwell.nn.decoder.decoder import Decoder
from vblackwell.nn.decoder.presets import find_preset
from vblackwell.offload.api import enable_vgpu_stack_optimization, offload_of, release
from vblackwell.offload.gradient_norms import group_key, select_top_k_gradients
from vblackwell.offload.optimizer import VGPUAdamW
from vblackwell.units import MiB, parse_bytes


@dataclass(frozen=True)
class Result:
    """One run."""

    name: str
    steps: int
    loss: float
    seconds_per_step: float
    link_mib_per_step: float
    peaks_mib: tuple[float, ...]
    touched: float


def run(
    name: str, fraction: float | None, corpus: Corpus, args: argparse.Namespace, seconds: float | None = None
) -> Result:
    """``fraction`` None is dense; ``seconds`` ends the run by time instead of by steps."""
    shape = find_preset(args.preset).decoder_config(corpus.vocab_size, args.seq_length)
    model: nn.Module = Decoder(shape, seed=0, device="cpu")
    device = "cuda:0" if args.device == "cuda" else "arena"
    need = 24 * sum(parameter.numel() for parameter in model.parameters()) / MiB + 64
    levels = [{"device": device, "capacity_mb": args.fast_memory / MiB}, {"device": "cpu", "capacity_mb": need}]
    stack = VGPUStack({"levels": levels})
    enable_vgpu_stack_optimization(model, stack, placement="streamed")
    optimizer = VGPUAdamW(model.parameters(), lr=args.learning_rate, betas=(0.9, 0.95), max_grad_norm=1.0)
    stream = BatchStream(PackedDataset(corpus, args.seq_length), args.batch_size)
    engine: Any = offload_of(model)
    groups = {group_key(engine, group): [slot.param for slot in group.slots] for group in engine.groups}
    trained: set[str] = set()
    keys: list[Any] = []
    step, began = 0, time.perf_counter()
    while (step < args.steps) if seconds is None else (time.perf_counter() - began < seconds):
        first = fraction is not None and step % args.round_steps == 0
        if first:
            ask(groups, set(groups))
        inputs, targets = (tensor.to(args.device) for tensor in stream.next())
        model(inputs, targets).backward()
        if first and fraction is not None:
            keys = select_top_k_gradients(model, fraction)
            trained |= set(keys)
        optimizer.step(only=keys if fraction is not None else None)
        optimizer.zero_grad()
        if first:
            ask(groups, set(keys))
            stack.prefetch(keys)
        step += 1
    engine.finish()
    if args.device == "cuda":
        torch.cuda.synchronize()
    took = time.perf_counter() - began
    stats = stack.get_stats()
    ask(groups, set(groups))
    release(model)
    stack.close()
    loss = validation_loss(model.to(args.device), corpus, args)
    links, peaks = (
        sum(link["bytes"] for link in stats["links"]),
        tuple(level["peak_bytes"] / MiB for level in stats["levels"]),
    )
    share = len(trained) / len(groups) if fraction is not None else 1.0
    return Result(name, step, loss, took / step, links / step / MiB, peaks, share)


def ask(groups: dict[str, list[nn.Parameter]], wanted: set[str]) -> None:
    """Only parameters of ``wanted`` groups ask for gradients."""
    for key, parameters in groups.items():
        for parameter in parameters:
            parameter.requires_grad_(key in wanted)


@torch.no_grad()
def validation_loss(model: nn.Module, corpus: Corpus, args: argparse.Namespace) -> float:
    total, count = 0.0, 0
    for inputs, targets in evaluation_batches(
        PackedDataset(corpus, args.seq_length, "validation"), 8, args.sequences // 8
    ):
        total += float(model(inputs.to(args.device), targets.to(args.device))) * len(inputs)
        count += len(inputs)
    return total / count


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--preset", default="tiny")
    parser.add_argument("--device", default="cpu", choices=("cpu", "cuda"))
    parser.add_argument("--fractions", default="0.1,0.3")
    parser.add_argument("--steps", type=int, default=100)
    parser.add_argument("--round-steps", type=int, default=10)
    parser.add_argument("--batch-size", type=int, default=4)
    parser.add_argument("--seq-length", type=int, default=128)
    parser.add_argument("--learning-rate", type=float, default=2e-3)
    parser.add_argument("--fast-memory", type=parse_bytes, default=parse_bytes("16MiB"))
    parser.add_argument("--sequences", type=int, default=64)
    args = parser.parse_args()
    torch.manual_seed(0)
    print(f"torch {torch.__version__}, {args.preset} on {args.device}, {platform.machine()}", flush=True)
    corpus = prepare_data(None)
    print(
        f"{'':<22} {'steps':>5} {'val loss':>9} {'ms a step':>10} {'MiB a step':>11}  peaks of levels, MiB  groups ever trained",
        flush=True,
    )
    run(
        "warm-up", 0.5, corpus, argparse.Namespace(**vars(args) | {"steps": 3})
    )  # kernels are compiled, threads started
    dense = tell(run("dense", None, corpus, args))
    for fraction in (float(word) for word in args.fractions.split(",")):
        tell(run(f"{100 * fraction:g} % of the groups", fraction, corpus, args))
        gc.collect()
        tell(run(f"{100 * fraction:g} %, equal time", fraction, corpus, args, dense.seconds_per_step * dense.steps))
        gc.collect()


def tell(each: Result) -> Result:
    peaks = ", ".join(f"{peak:.1f}" for peak in each.peaks_mib)
    print(
        f"{each.name:<22} {each.steps:>5} {each.loss:>9.4f} {1000 * each.seconds_per_step:>10.1f} {each.link_mib_per_step:>11.1f}  "
        f"{peaks:>20}  {100 * each.touched:.0f} %",
        flush=True,
    )
    return each


if __name__ == "__main__":
    main()
