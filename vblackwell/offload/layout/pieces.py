"""Where a group may be cut: intervals of elements for updates on level 0, rows of a leaf that it cannot hold whole.

Element ``i`` of a uniform group is element ``i`` of each of its ranges, so one piece names the same parameters
everywhere. It starts at a parameter's start or a multiple of `Formats.cut` elements after it: there arithmetic rounds
as on the whole, and no block of elements that share a scale is divided.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass, field

from torch import nn

from vblackwell.offload.layout.formats import CUT, range_bytes
from vblackwell.offload.layout.groups import ALIGNMENT, Group, Site, Slot

Part = tuple[Slot, int, int]

MAX_KINDS = 8  # in one buffer
WIDEST_ELEMENT = 16  # bytes of one element in a buffer at most: weight, remainder, moments, fp32 gradient
WIDEST_PACKED_ELEMENT = 11  # with moments of 8 bits
MIN_BUFFER_BYTES = 3 * CUT * WIDEST_ELEMENT

ROW_MULTIPLE = 16  # rows of a slice, so that every slice starts as aligned as the whole does
SLICES_AT_ONCE = 4  # two of weights, of which one loads ahead, and two of gradients


@dataclass(frozen=True)
class Piece:
    """Elements ``start`` to ``stop`` of a group; ``parts`` is filled by the first call of `parts_of`."""

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


def bytes_of(group: Group, kind: str, num_elements: int) -> int:
    """Bytes of so many elements of a range of ``kind``, from a multiple of 256 on."""
    return range_bytes(kind, num_elements, group.slots[0].dtype.itemsize)


def smallest_buffer(group: Group) -> int:
    """Bytes of a buffer that holds two cuts of ``group``."""
    packed = 2 * group.formats.cut * WIDEST_PACKED_ELEMENT + MAX_KINDS * ALIGNMENT
    return packed if group.formats.packed else MIN_BUFFER_BYTES


def pieces_of(group: Group, max_elements: int) -> list[Piece]:
    """A uniform ``group`` in as few pieces as possible of at most ``max_elements`` (at least two cuts)."""
    assert max_elements >= 2 * group.formats.cut, max_elements
    total = num_elements(group)
    found: list[Piece] = []
    start = 0
    while start < total:
        stop = min(start + max_elements, total)
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


def sliceable(group: Group, sites: Sequence[Site]) -> bool:
    """Whether only plain embeddings, and linear layers without bias, need ``group``, each nothing but it."""
    users = [site for site in sites if group in site.groups]
    return len(group.slots) == 1 and all(
        site.groups == [group]
        and (
            (type(site.module) is nn.Linear and site.module.bias is None)
            or (
                type(site.module) is nn.Embedding
                and site.module.max_norm is None
                and not (site.module.scale_grad_by_freq or site.module.sparse)
            )
        )
        for site in users
    )


def rows_per_slice(group: Group, free_bytes: int) -> int:
    """Rows of which `SLICES_AT_ONCE` slices fit ``free_bytes``; 0 if not even the smallest slice does."""
    slot = group.slots[0]
    row_bytes = slot.shape[1] * slot.dtype.itemsize
    return min(slot.shape[0], free_bytes // SLICES_AT_ONCE // row_bytes // ROW_MULTIPLE * ROW_MULTIPLE)
