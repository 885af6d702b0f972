"""Whether a plan's disk level is compressed: by given rates, where the bytes saved beat the codec's time, and nowhere else."""

from __future__ import annotations

import math
from dataclasses import replace

import pytest

from vblackwell.offload.layout.lanes import GroupWork, LanePlan, LaneRates, LaneTimes, simulate
from vblackwell.planner.compression import (
    CodecSpeed,
    Compression,
    DiskSpeed,
    decide,
    kinds_on,
    mixed,
    not_hidden,
    packed_rates,
    uses_disk,
)

G = 1 << 30
RATES = LaneRates(50e9, 50e9, 40e9, 40e9, 1e9, 4e12)
HELD = {"moments": 1}


def disk(rate: float, codec: CodecSpeed | None, **more) -> DiskSpeed:
    return DiskSpeed(rate, rate, "measured at /x", {} if codec is None else {"moments": codec}, "of y", **more)


def lanes(compute: float, at_home: bool = False) -> LanePlan:
    """Two groups of a GiB of states each on a disk, and so many seconds of compute."""
    group = GroupWork(G // 12, G // 6, compute / 4, compute / 4, at_home=at_home, disk_read=G, disk_write=G)
    return LanePlan((group, group), G, G)


@pytest.mark.parametrize(("rate", "used"), [(0.3e9, True), (1.9e9, True), (2.1e9, False), (6e9, False), (50e9, False)])
def test_a_slow_disk_is_worth_it_and_a_fast_one_is_not(rate, used):
    """A codec of 3 GB/s in and out that saves a third, as eight threads of a server: ahead below 2 GB/s, by hand."""
    plan = lanes(compute=0.01)
    found, rates = decide(plan, RATES, HELD, disk(rate, CodecSpeed(1.5, 3e9, 3e9)), lambda each: simulate(plan, each))
    assert found.used is used and (found.packed_seconds < found.plain_seconds) is used
    assert simulate(plan, rates).step_seconds == min(found.packed_seconds, found.plain_seconds)
    assert (rates.disk_read > rate) is used and (found.read, found.write) == (rate, rate)


def test_at_the_boundary_it_stays_plain():
    """A step of the same length to the last bit is plain; of the next shorter one it is not."""

    def decided(packed_seconds: float) -> Compression:
        def times(rates: LaneRates) -> LaneTimes:
            return LaneTimes(4.0 if rates.disk_read == 1e9 else packed_seconds, 0, 0, {})

        found, rates = decide(lanes(0.0), RATES, HELD, disk(1e9, CodecSpeed(2.0, 4e9, 4e9)), times)
        assert (rates.disk_read == 1e9) is not found.used
        return found

    assert (
        not decided(4.0).used and decided(math.nextafter(4.0, 0.0)).used and not decided(math.nextafter(4.0, 5.0)).used
    )


def test_the_longer_time_counts_and_half_of_the_shorter():
    found = packed_rates(replace(RATES, disk_read=1e9, disk_write=1e9), CodecSpeed(2.0, 1e9, 4e9))
    assert found.disk_write == pytest.approx(1 / (1 / 1e9 + 0.5 / 2e9))  # packing is the longer
    assert found.disk_read == pytest.approx(1 / (1 / 2e9 + 0.5 / 4e9))  # the disk is
    spare = packed_rates(replace(RATES, disk_read=1e9, disk_write=1e9), CodecSpeed(2.0, 1e9, 4e9), not_hidden(16, 8))
    assert spare.disk_read == pytest.approx(1 / (1 / 2e9 + 0.25 / 4e9)) and not_hidden(8, 8) == 0.5
    free = packed_rates(RATES, CodecSpeed(2.0, 1e9, 4e9))  # a disk without end leaves the codec
    assert (free.disk_write, free.disk_read) == pytest.approx((1e9, 4e9), rel=1e-12)


def test_a_disk_that_is_hidden_stays_plain():
    """Compute of ten seconds beside four of the disk: whatever is saved, no step is shorter."""
    plan = lanes(compute=10.0)
    found, _ = decide(plan, RATES, HELD, disk(1e9, CodecSpeed(4.0, 1e15, 1e15)), lambda each: simulate(plan, each))
    assert found.packed_seconds == found.plain_seconds and not found.used


def test_the_codec_takes_cores_from_updates_at_home():
    """Where the CPU's updates are the longest lane, the codec makes a step longer, which without a GPU is in the disk's time."""
    codec = CodecSpeed(1.1, 40e9, 40e9)
    plan = lanes(compute=0.0, at_home=True)
    slow = replace(RATES, cpu=0.02e9)
    shared, _ = decide(plan, slow, HELD, disk(2e9, codec), lambda each: simulate(plan, each))
    alone, _ = decide(plan, slow, HELD, disk(2e9, codec), lambda each: simulate(plan, each), spare_cores=False)
    assert shared.packed_seconds > shared.plain_seconds and not shared.used
    assert alone.packed_seconds <= alone.plain_seconds == shared.plain_seconds


def test_bytes_of_several_kinds_add_up():
    codec = {"a": CodecSpeed(2.0, 4.0, 8.0), "b": CodecSpeed(1.0, 1.0, 2.0)}
    found = mixed(codec, {"a": 300, "b": 100})
    assert (found.ratio, found.compress, found.decompress) == (400 / 250, 400 / 175, 400 / 87.5)
    table = {
        "weight": [1, 2, 3], "remainder": [0, 0, 4], "exp_avg": [9, 9, 0], "exp_avg_scales": [0, 0, 5], "exp_avg_codes": [0, 0, 6],
        "gradient": [0, 0, 7], "ring": [8, 0],
    }  # fmt: skip
    held = {"bfloat16 weights": 3, "remainders": 4, "first moments": 5, "8-bit first moments": 6}
    assert kinds_on(2, table, "bfloat16") == held and kinds_on(3, table, "bfloat16") == {}


def test_what_the_user_says_and_what_is_not_known():
    codec, plan = CodecSpeed(1.5, 3e9, 3e9), lanes(compute=0.01)

    def found(rate: float, codec: CodecSpeed | None, **more):
        return decide(plan, RATES, HELD, disk(rate, codec, **more), lambda each: simulate(plan, each))[0]

    plain = found(0.3e9, None, asked="none")
    assert not plain.used and str(plain).startswith(
        "disk level plain, as asked; the disk reads 0.30 and writes 0.30 GB/s"
    )
    packed = found(50e9, codec, asked="lossless")
    assert packed.used and packed.packed_seconds > packed.plain_seconds and "compressed, as asked: " in str(packed)
    unknown = found(0.3e9, None, refused="zstandard is missing")
    assert not unknown.used and "plain, zstandard is missing;" in str(unknown)
    text = str(found(0.3e9, codec))
    assert text.startswith("disk level compressed: ") and " s a step with lossless compression, " in text
    for part in (
        "ratio 1.50",
        "packs 3.00 and unpacks 3.00 GB/s",
        "reads 0.30 and writes 0.30 GB/s",
        "(measured at /x; of y)",
    ):
        assert part in text, text
    assert uses_disk(plan) and not uses_disk(LanePlan((GroupWork(1, 2, 0.1, 0.1),), G, G))
