"""Is a plan right about compressing a disk level? What it foretells beside the level itself, on disks of several rates.

``python benchmarks/bench_compressed_disk.py --disk DIR`` writes and reads a group's bytes (bf16 weights alone, as a frozen base has them;
and weights, remainders of masters and both moments, as training has them) through a plain disk level and through one that compresses
every piece, in turns, the median of some rounds each. Slower disks are made of the real one: a call holds the disk, as others wait, until
its bytes have taken their time (``--rates``, GB/s; ``0`` leaves the disk as it is; ``--memory`` has RAM in the slower disks' place). The
codec's rates are measured as a plan measures them, in RAM, and the disk's are the plain level's: what
`vblackwell.planner.compression` makes
of both, and the decision that follows, stand beside what the compressed level took. Last: how many decisions were those of the stopwatch,
and how far off the forecasts were.
"""

from __future__ import annotations

import argparse
import functools
import os
import statistics
import sys
import time
from collections.abc import Callable, Sequence
from dataclasses import astuple
from pathlib import Path

sys.path.insert(0, str(Path(__file__).resolve().parents[1]))

import torch
from held_disk import AlwaysCompressed, HeldDisk
from torch import Tensor

from vblackwell.memory.codec_speed import codec_speed
from vblackwell.memory.disk import PIECE_BYTES, THREADS, DiskLevel
from vblackwell.memory.slab import map_slab
from vblackwell.offload.layout.lanes import LaneRates
from vblackwell.planner.compression import CodecSpeed, mixed, not_hidden, packed_rates
from vblackwell.train.disk_speed import ELEMENTS, bytes_like
from vblackwell.units import MiB

SETS: dict[str, dict[str, int]] = {  # pieces of each kind
    "bf16 weights": {"bfloat16 weights": 12},
    "weights and states": {"bfloat16 weights": 2, "remainders": 2, "first moments": 4, "second moments": 4},
}


def pieces_of(values: dict[str, Tensor], counts: dict[str, int]) -> Tensor:
    """One extent's bytes: pieces of the kinds, one after the other."""
    parts = []
    for kind, count in counts.items():
        flat = values[kind].view(torch.uint8)
        parts += [flat[:PIECE_BYTES].repeat(-(-PIECE_BYTES // flat.numel()))[:PIECE_BYTES]] * count
    joined = torch.cat(parts)
    aligned = map_slab(joined.numel())
    aligned.copy_(joined)
    return aligned


def measure_codec(values: dict[str, Tensor], found: list[dict[str, CodecSpeed]]) -> None:
    """Once more, among the rounds of what it is held against: others' load comes and goes."""
    found.append({kind: CodecSpeed(*codec_speed([each], limit_seconds=0)) for kind, each in values.items()})


def median_of(speeds: Sequence[CodecSpeed]) -> CodecSpeed:
    """Of each number."""
    return CodecSpeed(*(statistics.median(column) for column in zip(*map(astuple, speeds), strict=True)))


def seconds_of(
    levels: Sequence[DiskLevel], source: Tensor, count: int, rounds: int, between: Callable[[], None]
) -> list[tuple[float, float]]:  # fmt: skip
    """To write and to read ``count`` extents like ``source`` that are begun together, for each level, in turns; seconds of one extent."""
    found: list[list[tuple[float, float]]] = [[] for _ in levels]
    back = [map_slab(source.numel()) for _ in range(count)]
    extents = [[level.allocate(source.numel()) for _ in range(count)] for level in levels]
    for number in range(rounds + 1):
        between()
        for level, own, times in zip(levels, extents, found, strict=True):
            began = time.perf_counter()
            for transfer in [level.write(extent, source) for extent in own]:
                transfer.wait()
            middle = time.perf_counter()
            for transfer in [level.read(extent, out) for extent, out in zip(own, back, strict=True)]:
                transfer.wait()
            ended = time.perf_counter()
            assert all(torch.equal(source, out) for out in back), "the level gave other bytes back"
            if number:
                times.append(((middle - began) / count, (ended - middle) / count))
    return [tuple(statistics.median(way) for way in zip(*times, strict=True)) for times in found]  # type: ignore[misc]


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--disk", required=True, help="folder on a disk")
    parser.add_argument("--rates", default="0.1,0.3,1,0", help="GB/s that the disk is held to; 0: as it is")
    parser.add_argument(
        "--extents", type=int, default=4, help="begun together, as steps that wait for the disk have them"
    )
    parser.add_argument("--rounds", type=int, default=3)
    parser.add_argument(
        "--memory", action="store_true", help="RAM in the place of the disks with a rate: others use the real one"
    )
    args = parser.parse_args()
    weights = torch.randn(ELEMENTS, generator=torch.Generator().manual_seed(0)) * 0.02
    kinds = sorted({kind for counts in SETS.values() for kind in counts})
    values = bytes_like(kinds, weights)
    print(
        f"{'what':<19} {'disk':>5} {'plain s':>8} {'packed s':>9} {'foretold s':>10} {'off by':>7}  packed is faster: foretold, was"
    )
    right, errors, hidden = [], [], []
    for what, counts in SETS.items():
        source = pieces_of(values, counts)
        size = source.numel()
        for rate in map(float, args.rates.split(",")):
            measured: list[dict[str, CodecSpeed]] = []
            capacity = args.extents * (size + 64 * MiB)
            memory = capacity if args.memory else None
            levels = [
                kind(args.disk, capacity, calls=HeldDisk(rate * 1e9, memory) if rate else None)
                for kind in (DiskLevel, AlwaysCompressed)
            ]
            between = functools.partial(measure_codec, {kind: values[kind] for kind in counts}, measured)
            (plain_write, plain_read), packed = seconds_of(levels, source, args.extents, args.rounds, between)
            codec = {kind: median_of([each[kind] for each in measured]) for kind in counts}
            for level in levels:
                level.close()
            disk = LaneRates(1, 1, 1, 1, 1, 1, disk_read=size / plain_read, disk_write=size / plain_write)
            held = {kind: count * PIECE_BYTES for kind, count in counts.items()}
            all_kinds = mixed(codec, held)
            through = packed_rates(disk, all_kinds, not_hidden(len(os.sched_getaffinity(0)), THREADS))
            ways = (
                (plain_write / all_kinds.ratio, size / all_kinds.compress),
                (plain_read / all_kinds.ratio, size / all_kinds.decompress),
            )
            hidden.append((sum(packed) - sum(map(max, ways))) / sum(map(min, ways)))
            foretold, plain, took = (
                size / through.disk_write + size / through.disk_read,
                plain_write + plain_read,
                sum(packed),
            )
            right.append((foretold < plain) == (took < plain))
            errors.append(abs(foretold / took - 1))
            print(
                f"{what:<19} {rate or 'as is':>5} {plain:>8.3f} {took:>9.3f} {foretold:>10.3f} {foretold / took - 1:>+7.0%}  "
                f"{'yes' if foretold < plain else 'no'}, {'yes' if took < plain else 'no'} (x {plain / took:.2f}), "
                f"not hidden {hidden[-1]:.2f}",
                flush=True,
            )
    print(
        f"{sum(right)} of {len(right)} decisions are the stopwatch's; forecasts off by {statistics.median(errors):.0%} (median)"
    )


if __name__ == "__main__":
    main()
