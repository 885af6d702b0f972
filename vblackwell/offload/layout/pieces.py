"""Stretches of a group's elements that fit a buffer: what optimizer states move in.

Element ``i`` of a uniform group is element ``i`` of each of its ranges, so one stretch names the same parameters everywhere. It is cut
at a parameter's start or a multiple of the `Formats.cut` of its group behind it: there arithmetic rounds as on the whole, and
no block of elements that share a scale is divided.
"""

from __future__ import annotations

from dataclasses import dataclass, field

from vblackwell.offload.layout.groups import Group, Slot

Part = tuple[Slot, int, int]


@dataclass(frozen=True)
class Piece:
    """Elements ``start`` to ``stop`` of a group; ``parts`` once somebody has asked for them (`parts_of`)."""

    start: int
    stop: int
    parts: list[Part] = field(default_factory=list, compare=False, repr=False)

    def __len__(self) -> int:
        return self.stop - self.start


def first_element(slot: Slot) -> int:
    """Where ``slot`` starts in a uniform group, in elements."""
    return slot.offset // slot.dtype.itemsize


def num_elements(group: Group) -> int:
    """Elements of a uniform group, gaps included."""
    return group.num_bytes // group.slots[0].dtype.itemsize


def pieces_of(group: Group, most_elements: int) -> list[Piece]:
    """All elements of a uniform ``group`` in stretches of at most ``most_elements`` (>= two cuts), as few as cutting there allows."""
    assert most_elements >= 2 * group.formats.cut, most_elements
    total = num_elements(group)
    found: list[Piece] = []
    start = 0
    while start < total:
        stop = min(start + most_elements, total)
        if stop < total:
            stop = _cut_before(group, stop)
        found.append(Piece(start, stop))
        start = stop
    return found


def _cut_before(group: Group, limit: int) -> int:
    """The last place at or before ``limit`` where a cut is allowed."""
    slot = max((slot for slot in group.slots if first_element(slot) <= limit), key=first_element)
    inside = min(limit - first_element(slot), slot.num_elements)
    return first_element(slot) + inside // group.formats.cut * group.formats.cut


def parts_of(group: Group, piece: Piece) -> list[Part]:
    """``(slot, first, last)``: the parameters' shares of ``piece`` of ``group``, as element numbers in the group."""
    if not piece.parts:
        for slot in group.slots:
            start = max(piece.start, first_element(slot))
            stop = min(piece.stop, first_element(slot) + slot.num_elements)
            if start < stop:
                piece.parts.append((slot, start, stop))
    return piece.parts
