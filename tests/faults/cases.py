"""All cases of the campaign."""

from __future__ import annotations

from tests.faults import damage, disks, folders, kills, malice, memory, mutations, numbers, pairs, signals

CASES = [
    *kills.CASES,
    *disks.CASES,
    *damage.CASES,
    *signals.CASES,
    *pairs.CASES,
    *folders.CASES,
    *memory.CASES,
    *numbers.CASES,
    *malice.CASES,
    *mutations.CASES,
]
