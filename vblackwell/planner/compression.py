"""Whether a disk level holds its bytes compressed: decided by what a step takes with and without, from measured rates alone.

A disk is one, and a level's threads are several: each compresses the piece that it is about to write, or turns back the one that it
has read, while others wait for the disk. So a byte of the values takes the longer of two times, 1/(r d) at the disk, for a disk of d
bytes/s and a ratio r, and 1/c in the codec, for a rate c of all threads, and a part of the shorter one, which is not hidden behind it: more
where the threads outnumber the cores, because who comes back from the disk then waits for a core.
Where the CPU also updates groups, the codec takes its cores for the time that it works; where there is no GPU all lanes are one after
another anyway, and it is in the disk's time.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, field, replace

from vblackwell.offload.layout.lane_work import LanePlan, LaneRates, LaneTimes

# Of the shorter of both times: benchmarks/bench_compressed_disk.py measures it, docs/precision.md has what it found on two cores.
NOT_HIDDEN = 0.5
NOT_HIDDEN_WITH_CORES = 0.25  # with a core for each of the level's threads and some to spare
MOST_TAKEN = 0.5  # of the cores, by the codec beside updates: a scheduler gives both their turn


@dataclass(frozen=True)
class CodecSpeed:
    """A lossless codec on one kind of bytes.

    Attributes:
        ratio: bytes before over bytes after, at least 1.
        compress, decompress: of the bytes before, a second, with all of a level's threads at work.
    """

    ratio: float
    compress: float
    decompress: float


def not_hidden(cores: int, threads: int) -> float:
    """The part of the shorter time that a disk level of ``threads`` does not hide behind the longer."""
    return NOT_HIDDEN_WITH_CORES if cores > threads else NOT_HIDDEN


@dataclass(frozen=True)
class DiskSpeed:
    """A disk level as measured.

    Attributes:
        read, write: bytes/s of the disk. source: what was measured, for people.
        codec: by kind of bytes; empty where compressing is no choice, and ``refused`` says why.
        codec_source: what the codec was measured on.
        not_hidden: the part of the shorter of both times that is not hidden behind the other, see `not_hidden`.
        asked: 'lossless' or 'none' where the user has decided, else None.
    """

    read: float
    write: float
    source: str
    codec: Mapping[str, CodecSpeed] = field(default_factory=dict)
    codec_source: str = ""
    asked: str | None = None
    refused: str = ""
    not_hidden: float = NOT_HIDDEN


@dataclass(frozen=True)
class Compression:
    """What was decided for a plan's disk level.

    Attributes:
        used: whether its bytes are compressed. asked: by the user, not by numbers.
        ratio, compress, decompress: of the bytes that the plan has there; 1 and 0 where nothing is known of a codec.
        read, write: of the disk itself. plain_seconds, packed_seconds: a step without and with; None where it was not to be known.
        source: what was measured. refused: why there was nothing to choose.
    """

    used: bool
    read: float
    write: float
    plain_seconds: float
    packed_seconds: float | None = None
    ratio: float = 1.0
    compress: float = 0.0
    decompress: float = 0.0
    source: str = ""
    asked: bool = False
    refused: str = ""

    def __str__(self) -> str:
        disk = f"the disk reads {self.read / 1e9:.2f} and writes {self.write / 1e9:.2f} GB/s"
        how = "compressed" if self.used else "plain"
        if self.packed_seconds is None:
            why = "as asked" if self.asked else self.refused
            return f"disk level {how}, {why}; {disk} ({self.source})"
        return (
            f"disk level {how}{', as asked' if self.asked else ''}: {_digits(self.packed_seconds)} a step with lossless compression, "
            f"{_digits(self.plain_seconds)} without; ratio {self.ratio:.2f}, packs {self.compress / 1e9:.2f} and unpacks "
            f"{self.decompress / 1e9:.2f} GB/s, {disk} ({self.source})"
        )


def _digits(seconds: float) -> str:
    """Four of them: what is compared may be close."""
    return f"{seconds * 1e3:.4g} ms" if seconds < 1 else f"{seconds:.4g} s"


_KINDS = {
    "master": "float32 weights", "remainder": "remainders", "exp_avg": "first moments", "exp_avg_sq": "second moments",
    "exp_avg_codes": "8-bit first moments", "exp_avg_sq_codes": "8-bit second moments",
    "exp_avg_scales": "first moments", "exp_avg_sq_scales": "second moments",
}  # fmt: skip


def kinds_on(level: int, bytes_by_level: Mapping[str, Sequence[int]], weight_type: str) -> dict[str, int]:
    """Bytes of one level by what they are, as `DiskSpeed.codec` names it.

    Args:
        bytes_by_level: of each kind of range, as the offload runtime places a model. What is no weight and no state is left out.
        weight_type: of the weights that compute, e.g. 'bfloat16'.
    """
    found: dict[str, int] = {}
    for kind, row in bytes_by_level.items():
        name = f"{weight_type} weights" if kind == "weight" else _KINDS.get(kind)
        if name is not None and level < len(row) and row[level]:
            found[name] = found.get(name, 0) + row[level]
    return found


def mixed(codec: Mapping[str, CodecSpeed], num_bytes: Mapping[str, int]) -> CodecSpeed:
    """The codec on bytes of several kinds together: bytes and seconds add up.

    Args:
        num_bytes: by kind; each is in ``codec``.
    """
    total = sum(num_bytes.values())
    held = sum(count / codec[kind].ratio for kind, count in num_bytes.items())
    seconds = [
        sum(count / getattr(codec[kind], way) for kind, count in num_bytes.items())
        for way in ("compress", "decompress")
    ]
    return CodecSpeed(total / held, total / seconds[0], total / seconds[1])


def packed_rates(rates: LaneRates, codec: CodecSpeed, hides_not: float = NOT_HIDDEN) -> LaneRates:
    """``rates`` as values pass the disk in compressed form, bytes of the values a second; ``hides_not`` as `DiskSpeed.not_hidden`."""

    def through(disk: float, speed: float) -> float:
        shorter, longer = sorted((1 / (codec.ratio * disk), 1 / speed))
        return 1 / (longer + hides_not * shorter)

    return replace(
        rates,
        disk_read=through(rates.disk_read, codec.decompress),
        disk_write=through(rates.disk_write, codec.compress),
    )


def uses_disk(lanes: LanePlan) -> bool:
    """Whether a step has anything to do with a disk."""
    return any(group.disk_read or group.disk_write or group.weights_on_disk for group in lanes.groups)


def decide(
    lanes: LanePlan, rates: LaneRates, num_bytes: Mapping[str, int], disk: DiskSpeed, times: Callable[[LaneRates], LaneTimes],
    *, spare_cores: bool = True,
) -> tuple[Compression, LaneRates]:  # fmt: skip
    """Whether the disk level of a plan is compressed, and the rates that its step then has.

    Compressing is chosen where a step is then shorter: a disk that is hidden behind compute stays plain.

    Args:
        lanes: uses the disk. rates: of the machine; those of its disk are replaced by the measured ones.
        num_bytes: on the disk, by the kinds of ``disk.codec``.
        times: of a step of ``lanes`` by rates.
        spare_cores: False where lanes share the CPU's cores by turns, so that the codec's time is in the disk's already.
    """
    plain = replace(rates, disk_read=disk.read, disk_write=disk.write)
    without = times(plain)
    known = Compression(False, disk.read, disk.write, without.step_seconds, source=disk.source, refused=disk.refused)
    if disk.asked == "none":
        return replace(known, asked=True), plain
    if not disk.codec:
        return known, plain
    codec = mixed(disk.codec, num_bytes)
    packed = packed_rates(plain, codec, disk.not_hidden)
    with_codec = times(packed)
    if spare_cores and any(group.at_home for group in lanes.groups):
        packed = replace(packed, cpu=packed.cpu * (1 - _taken(lanes, codec, with_codec)))
        with_codec = times(packed)
    used = disk.asked == "lossless" or with_codec.step_seconds < without.step_seconds
    found = replace(
        known, used=used, packed_seconds=with_codec.step_seconds, ratio=codec.ratio, compress=codec.compress,
        decompress=codec.decompress, asked=disk.asked is not None, source=f"{disk.source}; {disk.codec_source}",
    )  # fmt: skip
    return found, packed if used else plain


def _taken(lanes: LanePlan, codec: CodecSpeed, times: LaneTimes) -> float:
    """The share of a step in which the codec has the cores."""
    written = sum(group.disk_write for group in lanes.groups)
    read = max(0.0, times.disk_bytes - written)
    return min(MOST_TAKEN, (written / codec.compress + read / codec.decompress) / times.step_seconds)
