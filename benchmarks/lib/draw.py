"""What benchmarks of drawn cases share: sizes by integers alone, which a seed makes the same on any machine, and the
lines of a draw's worst and median ratio.
"""

from __future__ import annotations

import random
import statistics
from collections.abc import Sequence

from benchmarks.lib.results import goal_line

Goal = tuple[float | None, float | None]  # floor and aim


def size_between(draw: random.Random, low: int, high: int) -> int:
    """From ``low`` to ``high``, as likely in each octave."""
    octaves = max(1, (-(-high // low) - 1).bit_length())
    start = low << draw.randrange(octaves)
    return draw.randint(start, min(2 * start, high))


def odd_or_round_size(draw: random.Random, low: int, high: int, odd: float) -> int:
    """From ``low`` to ``high``: odd with this probability, else, from 64 on, a multiple of 64."""
    size = size_between(draw, low, high)
    if draw.random() < odd:
        return min(size | 1, (high - 1) | 1)
    return size if size < 64 else min((size + 32) // 64 * 64, high)


def worst_and_median(words: str, ratios: Sequence[float], worst: Goal, median: Goal | None = None) -> list[str]:
    """A line of the worst of ``ratios``, and one of their median where there is a goal for it."""
    if not ratios:
        return [f"{words}: no case"]
    lines = [goal_line(f"{words}, worst of {len(ratios)}", min(ratios), *worst)]
    return lines if median is None else [*lines, goal_line("... the median", statistics.median(ratios), *median)]
