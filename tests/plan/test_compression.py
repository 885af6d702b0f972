"""Whether a plan's disk level is compressed: by given rates, where the bytes saved beat the codec's time, and nowhere else."""

from __future__ import annotations

import math
from dataclasses import replace

import pytest

from vblackwell.plan.compression import CodecSpeed, DiskSpeed, decide, kinds_on, mixed, packed_rates, uses_disk
from vblackwell.plan.lanes import GroupWork, LanePlan, LaneRates, LaneTimes, simulate

G = 1 << 30
RATES = LaneRates(50e9, 50e9, 40e9, 40e9, 1e9, 4e12)
HELD = {"moments": 1}


def disk(rate: float, codec: CodecSpeed | None, threads: int = 8, **more) -> DiskSpeed:
    return DiskSpeed(rate, rate, "measured at /x", {} if codec is None else {"moments": codec}, threads, "of y", **more)


def lanes(compute: float, at_home: bool = False) -> LanePlan:
    """Two groups of a GiB of states each on a disk, and so many seconds of compute."""
    group = GroupWork(G // 12, G // 6, compute / 4, compute / 4, at_home=at_home, disk_read=G, disk_write=G)
    return LanePlan((group, group), G, G)


def by_disk_alone(rates: LaneRates) -> LaneTimes:
    """A step that reads and writes 2 GiB and does nothing else."""
    return LaneTimes(2 * G / rates.disk_read + 2 * G / rates.disk_write, 0, 0, {}, 4 * G)


@pytest.mark.parametrize(("rate", "used"), [(0.3e9, True), (1.7e9, True), (6e9, False), (50e9, False)])
def test_a_slow_disk_is_worth_it_and_a_fast_one_is_not(rate, used):
    """A codec of 3 GB/s in and out that saves a third, as eight threads of a server: ahead below some 2.6 GB/s."""
    plan = lanes(compute=0.01)
    found, rates = decide(plan, RATES, HELD, disk(rate, CodecSpeed(1.5, 3e9, 3e9)), lambda each: simulate(plan, each))
    assert found.used is used and (found.packed_seconds < found.plain_seconds) is used
    assert simulate(plan, rates).step_seconds == min(found.packed_seconds, found.plain_seconds)
    assert (rates.disk_read > rate) is used and (found.read, found.write) == (rate, rate)


def test_at_the_boundary_it_stays_plain():
    """One thread, half the bytes, and a codec of exactly twice the disk's rate: both ways take the same time to the last bit."""
    same = CodecSpeed(2.0, 2.0 * G, 2.0 * G)
    assert packed_rates(RATES, same, 1).disk_read == same.decompress  # an infinite disk leaves the codec alone
    found, rates = decide(lanes(0.0), RATES, HELD, disk(G, same, threads=1), by_disk_alone)
    assert found.packed_seconds == found.plain_seconds == 4.0 and not found.used and rates.disk_read == G
    better = CodecSpeed(2.0, 2.0 * G, math.nextafter(2.0 * G, math.inf) * (1 + 1e-12))
    found, rates = decide(lanes(0.0), RATES, HELD, disk(G, better, threads=1), by_disk_alone)
    assert found.packed_seconds < 4.0 and found.used and rates.disk_read > G == rates.disk_write


def test_threads_that_keep_up_pass_the_disk_at_its_rate_times_the_ratio():
    found = packed_rates(replace(RATES, disk_read=1e9, disk_write=1e9), CodecSpeed(1.5, 1e9, 1e12), 4)
    assert found.disk_read == 1.5e9
    assert found.disk_write == pytest.approx(
        1 / (1 / 1e9 + 1 / 6e9)
    )  # a thread packs, and then waits for a quarter of the disk


def test_a_disk_that_is_hidden_stays_plain():
    """Compute of ten seconds beside four of the disk: whatever is saved, no step is shorter."""
    plan = lanes(compute=10.0)
    found, _ = decide(plan, RATES, HELD, disk(1e9, CodecSpeed(4.0, 1e15, 1e15)), lambda each: simulate(plan, each))
    assert found.packed_seconds == found.plain_seconds and not found.used


def test_the_codec_takes_cores_from_updates_at_home():
    """Where the CPU's updates are the longest lane, the codec makes a step longer, which without a GPU is in the disk's time."""
    codec = CodecSpeed(1.1, 8e9, 8e9)
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
