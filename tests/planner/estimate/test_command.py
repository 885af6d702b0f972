"""Advice: what is said, in which order, and what is not."""

from __future__ import annotations

from vblackwell.planner.estimate.command import Way, advise
from vblackwell.planner.estimate.result import both_units
from vblackwell.units import GiB, MiB

NOW = Way("", 10 * GiB, 1e-4, 1e9)


def said(*others: Way, for_memory: bool = True) -> list[str]:
    return [str(each) for each in advise(NOW, others, 10_000, for_memory=for_memory)]


def test_savings_and_costs_are_numbers():
    found = said(Way("--gradient-checkpointing", 6 * GiB, 1.3e-4))
    assert found == [
        "--gradient-checkpointing: saves 4.00 GiB of the GPU (peak 6.00 GiB); costs 30% more time "
        "(300 ms in 10,000 tokens)"
    ]
    found = said(Way("bf16", 9 * GiB, 0.5e-4, also="narrow products"), Way("fused", 11 * GiB, 0.9e-4))
    assert found == [
        "bf16: saves 1.00 GiB of the GPU (peak 9.00 GiB) and 50% of the time; costs narrow products",
        "fused: saves 10% of the time; costs 1.00 GiB of the GPU",
    ]


def test_what_saves_nothing_noticeable_is_not_said():
    assert (
        said(Way("same", 10 * GiB, 1e-4), Way("a little", 10 * GiB - 100 * MiB, 0.99e-4), Way("worse", 11 * GiB, 2e-4))
        == []
    )


def test_what_is_missing_comes_first():
    small, fast = Way("small", 2 * GiB, 2e-4), Way("fast", 9 * GiB, 0.5e-4)
    assert [line.split(":")[0] for line in said(fast, small)] == ["small", "fast"]
    assert [line.split(":")[0] for line in said(small, fast, for_memory=False)] == ["fast", "small"]


def test_where_the_speed_is_not_known_operations_are_the_cost():
    now = Way("", 10 * GiB, None, 3e9)
    (found,) = advise(now, [Way("again", 5 * GiB, None, 4e9)], 1000, for_memory=True)
    assert found.saved_time is None and str(found) == (
        "again: saves 5.00 GiB of the GPU (peak 5.00 GiB); costs 33% more operations"
    )
    (free,) = advise(now, [Way("free", 5 * GiB, None, 3e9)], 1000, for_memory=True)
    assert str(free).endswith("costs nothing that was measured")


def test_both_units_from_one_gb_on():
    assert [both_units(size) for size in (66_560, 10**9, 64_200_000_000)] == [
        "65.0 KiB",
        "954 MiB (1.0 GB)",
        "59.8 GiB (64.2 GB)",
    ]
