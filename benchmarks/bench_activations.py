"""Boundary activations in host memory: GPU memory and time of a checkpointed step, with and without, in turns in one run.

    python benchmarks/bench_activations.py [--layers N] [--hidden N] [--batch N] [--length N] [--rounds N] [--csv FILE]

The model is our decoder in bf16, its weights stay on the GPU, and a step is forward and backward; gradients are dropped as they
come, as those of a streamed model leave. ``left`` is what the peak fell by, over the bytes of all boundaries.
The losses of all systems are compared before anything is printed. Needs a GPU; results are appended to
`benchmarks/results/activations.csv`.
"""

from __future__ import annotations

import argparse
import contextlib
import csv
import statistics
import time
from datetime import UTC, datetime
from pathlib import Path
from typing import Any

import torch

from vblackwell.machine.facts import list_gpus
from vblackwell.memory.cache.stack import VGPUStack
from vblackwell.nn.decoder.decoder import Decoder, DecoderConfig
from vblackwell.offload.movement.activations import ActivationStore
from vblackwell.units import GiB, MiB, format_bytes

CSV = Path(__file__).parent / "results" / "activations.csv"


def step(model: Decoder, tokens: torch.Tensor, store: ActivationStore | None) -> tuple[float, int, torch.Tensor]:
    """Seconds, peak of allocated bytes, and loss of one forward and backward."""
    torch.cuda.synchronize()
    torch.cuda.reset_peak_memory_stats()
    start = time.perf_counter()
    with contextlib.nullcontext() if store is None else store.forward_of(model):
        loss = model(tokens[:, :-1], tokens[:, 1:])
    loss.backward()
    torch.cuda.synchronize()
    seconds = time.perf_counter() - start
    peak = torch.cuda.max_memory_allocated()
    return seconds, peak, loss.detach()


def drop_gradient(param: torch.Tensor) -> None:
    param.grad = None


def traffic(stack: VGPUStack) -> tuple[int, int, float]:
    """Bytes out of the GPU, bytes into it, and seconds that it waited, so far."""
    stats = stack.get_stats()
    gpu = stats["levels"][0]["device"]
    out = sum(link["bytes"] for link in stats["links"] if link["source"] == gpu)
    back = sum(link["bytes"] for link in stats["links"] if link["destination"] == gpu)
    return out, back, stats["stall_seconds"]


def measure(args: argparse.Namespace, stack: VGPUStack) -> list[dict[str, Any]]:
    config = DecoderConfig(
        vocab_size=32000,
        hidden_size=args.hidden,
        intermediate_size=args.hidden * 27 // 10 // 64 * 64,
        num_layers=args.layers,
        num_heads=args.hidden // 128,
        num_kv_heads=args.hidden // 128,
        max_position=args.length,
    )
    model = Decoder(config, device="cuda", dtype=torch.bfloat16)
    model.gradient_checkpointing = True
    for param in model.parameters():
        param.register_post_accumulate_grad_hook(drop_gradient)
    boundary = args.batch * args.length * args.hidden * 2
    systems: dict[str, ActivationStore | None] = {
        "on the GPU": None,
        "the same": None,  # how far two runs of one thing differ
        "host": ActivationStore(stack, "none-kept"),
        "host, 4 kept": ActivationStore(stack, "four-kept", keep_bytes=4 * boundary),
    }
    generator = torch.Generator("cuda").manual_seed(0)
    taken: dict[str, list[tuple[float, int]]] = {name: [] for name in systems}
    moved = {name: (0, 0, 0.0) for name in systems}
    for number in range(args.rounds + 2):
        tokens = torch.randint(32000, (args.batch, args.length + 1), generator=generator, device="cuda")
        losses = []
        turn = number % len(systems)  # none of them always comes after the same other
        for name, store in [*systems.items()][turn:] + [*systems.items()][:turn]:
            before = traffic(stack)
            seconds, peak, loss = step(model, tokens, store)
            losses.append(loss)
            if number >= 2:  # the first steps take host memory and tune kernels
                taken[name].append((seconds, peak))
                moved[name] = tuple(now - then for now, then in zip(traffic(stack), before, strict=True))  # type: ignore[assignment]
        assert all(torch.equal(loss, losses[0]) for loss in losses), [loss.item() for loss in losses]
    rows = []
    plain_seconds = statistics.median(seconds for seconds, _ in taken["on the GPU"])
    plain_peak = max(peak for _, peak in taken["on the GPU"])
    for name, store in systems.items():
        seconds = statistics.median(seconds for seconds, _ in taken[name])
        peak = max(peak for _, peak in taken[name])
        out, back, stalled = moved[name]
        rows.append(
            {
                "system": name, "hidden": args.hidden, "layers": args.layers, "batch": args.batch, "length": args.length,
                "milliseconds": round(1e3 * seconds, 2), "over_plain": round(seconds / plain_seconds, 4), "peak_bytes": peak,
                "left": round((plain_peak - peak) / (args.layers * boundary), 3), "out_bytes": out, "back_bytes": back,
                "stall_milliseconds": round(1e3 * stalled, 2),
                "host_bytes": 0 if store is None else store.summary()["host_bytes"],
            }
        )  # fmt: skip
        if store is not None:
            store.close()
    return rows


def main() -> None:
    parser = argparse.ArgumentParser(description=(__doc__ or "").splitlines()[0])
    for name, default in (("layers", 8), ("hidden", 2560), ("batch", 8), ("length", 2048), ("rounds", 7)):
        parser.add_argument(f"--{name}", type=int, default=default)
    parser.add_argument("--csv", type=Path, default=CSV, help="where to append the results")
    args = parser.parse_args()
    needed = 2 * (args.layers + 2) * args.batch * args.length * args.hidden * 2 * 9 // 8
    levels = [{"capacity_mb": GiB / MiB, "device": "cuda:0"}, {"capacity_mb": needed / MiB, "device": "cpu"}]
    with VGPUStack({"levels": levels}) as stack:
        rows = measure(args, stack)
    gpu = list_gpus()[0]
    about = {
        "date": datetime.now(UTC).isoformat(timespec="seconds"),
        "gpu": gpu.name,
        "driver": gpu.driver_version,
        "torch": torch.__version__,
    }
    print(", ".join(f"{key} {value}" for key, value in about.items()))
    print(f"decoder {args.hidden} x {args.layers}, batch {args.batch} x {args.length}, losses equal")
    print(f"{'':14}{'ms':>9}{'ratio':>8}{'peak':>11}{'left':>8}{'out':>11}{'back':>11}{'stall ms':>10}{'host':>11}")
    for row in rows:
        sizes = {key: format_bytes(row[f"{key}_bytes"]) for key in ("peak", "out", "back", "host")}
        print(
            f"{row['system']:14}{row['milliseconds']:>9.2f}{row['over_plain']:>8.3f}{sizes['peak']:>11}{row['left']:>8.1%}"
            f"{sizes['out']:>11}{sizes['back']:>11}{row['stall_milliseconds']:>10.2f}{sizes['host']:>11}"
        )
    fresh = not args.csv.exists()
    with args.csv.open("a", newline="") as file:
        writer = csv.DictWriter(file, list(about | rows[0]))
        if fresh:
            writer.writeheader()
        writer.writerows(about | row for row in rows)


if __name__ == "__main__":
    main()
