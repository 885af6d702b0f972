"""How a step's memory grows and shrinks: bytes by category and what the allocator holds, at moments of a trace's last
step.
"""

from __future__ import annotations

from dataclasses import dataclass

from vblackwell.trace.allocator import Block, CachingAllocator
from vblackwell.trace.trace import CATEGORIES, PHASES, Trace


@dataclass(frozen=True)
class Timeline:
    """Moments of the last step, in order; of every stretch of it the one at which most is allocated.

    Attributes:
        bytes_by_category: of `CATEGORIES`, one value a moment.
        reserved: what the allocator holds at each.
        phases: (name, from, to) as shares of the step's allocations; neighbours of one name are one.
    """

    bytes_by_category: dict[str, tuple[int, ...]]
    reserved: tuple[int, ...]
    phases: tuple[tuple[str, float, float], ...]

    def allocated(self, moment: int) -> int:
        """All categories together."""
        return sum(values[moment] for values in self.bytes_by_category.values())


def timeline(trace: Trace, moments: int = 240, expandable: bool = False) -> Timeline:
    """The last step of ``trace`` at ``moments`` moments, or as many as it has events."""
    last = max((step for _, step, _ in trace.marks), default=0)
    starts = [index for index, step, _ in trace.marks if step == last]
    begin, end = (min(starts), len(trace.events)) if starts else (0, len(trace.events))
    # What is freed after the last phase is the end of the run, not of a step.
    ends = [index for index, _, phase in trace.marks if phase == "setup" and index > begin]
    end = min([end, *ends])
    count = max(1, min(moments, end - begin))
    allocator = CachingAllocator(None, expandable)
    blocks: dict[int, Block | None] = {}
    live: dict[str, int] = {category: 0 for category in CATEGORIES}
    best: list[tuple[int, dict[str, int], int]] = [(-1, {}, 0)] * count
    for position, event in enumerate(trace.events[:end]):
        index = event if event >= 0 else ~event
        if event >= 0:
            blocks[event] = allocator.malloc(trace.sizes[event])
        else:
            allocator.free(blocks.pop(index))
        live[trace.categories[index]] += trace.sizes[index] if event >= 0 else -trace.sizes[index]
        if position >= begin:
            place = (position - begin) * count // max(1, end - begin)
            total = sum(live.values())
            if total > best[place][0]:
                best[place] = (total, dict(live), allocator.reserved)
    return Timeline(
        {category: tuple(found.get(category, 0) for _, found, _ in best) for category in CATEGORIES},
        tuple(reserved for _, _, reserved in best),
        _phases(trace, begin, end, last),
    )


def _phases(trace: Trace, begin: int, end: int, step: int) -> tuple[tuple[str, float, float], ...]:
    marks = [(index, phase) for index, of, phase in trace.marks if of == step and phase != "setup" and index < end]
    found: list[tuple[str, float, float]] = []
    length = max(1, end - begin)
    for number, (index, phase) in enumerate(marks):
        assert phase in PHASES
        until = marks[number + 1][0] if number + 1 < len(marks) else end
        found.append((phase.replace("loss_backward", "loss"), (index - begin) / length, (until - begin) / length))
    merged: list[tuple[str, float, float]] = []
    for name, start, stop in found:
        if merged and merged[-1][0] == name:
            merged[-1] = (name, merged[-1][1], stop)
        else:
            merged.append((name, start, stop))
    return tuple(merged)
