"""Updates on level 0: a group's optimizer states come up, AdamW runs there, and everything goes home again.

Weights and gradient are on level 0 already when the update runs behind the group's backward; then only what AdamW keeps beside them
passes through: for bf16 weights with split masters 10 bytes a parameter in and 12 out (FACTS: an update on the CPU is what makes offloaded
training slow). An update that comes later brings weights and gradient the same way.

Groups with 8-bit moments (`formats`) are updated here with and without a GPU: `adamw8_piece` gives both the same bits.

States pass in pieces through a ring of buffers that is taken once. The order is that of three queues (in, update, out) and their
marks (`QueuedLane`, `lane_queues`); the host waits for nothing but a disk.
"""

from __future__ import annotations

from abc import ABC, abstractmethod
from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass, field

import torch

from vblackwell.kernels.optimizer.adamw import AdamWStep, adamw_piece
from vblackwell.kernels.optimizer.adamw8 import SCALE_BLOCK, adamw8_piece
from vblackwell.memory.cache.stack import Reservation, VGPUStack
from vblackwell.memory.level import Transfer
from vblackwell.offload.layout.formats import CUT, MOMENTS, PACKED_MOMENTS, SCALES, element_type, range_bytes
from vblackwell.offload.layout.groups import Group, Slot
from vblackwell.offload.layout.pieces import Piece, first_element, parts_of
from vblackwell.offload.storage.ranges import Homes

ALIGNMENT = 512
WIDEST_ELEMENT = 16  # bytes of one element in a buffer at most: weight, remainder, moments, fp32 gradient
WIDEST_PACKED_ELEMENT = 11  # with moments of 8 bits
MOST_KINDS = 8
SMALLEST_BUFFER = 3 * CUT * WIDEST_ELEMENT
STATE_KINDS = ("remainder", *MOMENTS, *PACKED_MOMENTS)


@dataclass(eq=False)
class LaneJob:
    """One update of a group on level 0.

    Attributes:
        numbers: what to update, with AdamW's numbers; the group's other parameters go through unchanged.
        weight: the group's flat compute weights on level 0, there after ``last_load`` at the latest, changed in place; None: they come
            from home.
        gradient: the group's flat gradient on level 0 in compute type; None: it comes from home.
        gradient_kind: which range at home holds it then, or, beside a ``gradient`` on level 0, the sum of earlier micro-batches; None: no
            range does.
        factor: fp32 scalar that gradients are multiplied by; None for 1.
        sources, targets: ranges that are read and written, by kind; the targets are the group's own, or take their place at the step.
        last_load: the newest copy of the group's compute weights to level 0; what it reads is not written before it is over.
    """

    group: Group
    numbers: dict[Slot, AdamWStep]
    sources: dict[str, Reservation]
    targets: dict[str, Reservation]
    weight: torch.Tensor | None = None
    gradient: torch.Tensor | None = None
    gradient_kind: str | None = None
    factor: torch.Tensor | None = None
    last_load: Transfer | None = None


@dataclass(eq=False)
class LaneEnd:
    """When an update is over: ``computed`` on level 0, ``stored`` in the home ranges too."""

    computed: Transfer
    stored: Transfer


@dataclass(eq=False)
class Buffer:
    """One place of the ring, and how what is in it is laid out."""

    memory: torch.Tensor
    places: Mapping[str, slice] = field(default_factory=dict)

    @property
    def views(self) -> dict[str, torch.Tensor]:
        """What is in it, by kind."""
        return {kind: self.memory[place] for kind, place in self.places.items()}


def state_kinds(group: Group, homes: Homes) -> list[str]:
    """What AdamW keeps at home beside the compute weight."""
    return [kind for kind in STATE_KINDS if (group, kind) in homes]


def smallest_buffer(group: Group) -> int:
    """Bytes of a buffer that holds two stretches of ``group`` that cannot be cut."""
    packed = 2 * group.formats.cut * WIDEST_PACKED_ELEMENT + MOST_KINDS * ALIGNMENT
    return packed if group.formats.packed else SMALLEST_BUFFER


def bytes_of(group: Group, kind: str, num_elements: int) -> int:
    """Bytes of so many elements of a range of ``kind``, from a multiple of 256 on."""
    return range_bytes(kind, num_elements, group.slots[0].dtype.itemsize)


def cut(flat: torch.Tensor, group: Group, kind: str, piece: Piece) -> torch.Tensor:
    """The bytes of ``piece`` in a group's flat range of ``kind``."""
    return flat[bytes_of(group, kind, piece.start) : bytes_of(group, kind, piece.stop)]


def typed(flat: torch.Tensor, group: Group, kind: str) -> torch.Tensor:
    """Bytes of a range of ``kind`` as its elements."""
    return flat.view(element_type(kind, group.slots[0].dtype))


def stretch(values: torch.Tensor, kind: str, start: int, stop: int) -> torch.Tensor:
    """Elements ``start`` (a multiple of 256) to ``stop`` of `typed` bytes; of scales, those that they share."""
    return values[start // SCALE_BLOCK : -(-stop // SCALE_BLOCK)] if kind in SCALES else values[start:stop]


def update_part(
    slot: Slot, part: Mapping[str, torch.Tensor], gradient: torch.Tensor, numbers: AdamWStep, *,
    previous: torch.Tensor | None = None, factor: torch.Tensor | None = None, offset: int = 0,
) -> None:  # fmt: skip
    """AdamW in place on a part of a parameter, in the formats of its group.

    Args:
        part: ``weight``, ``remainder`` if there is one, and the moments, each (n,) in its range's type; scales (ceil(n / 256),).
        gradient: (n,) in compute type or fp32.
        previous: (n,), the sum of gradients of earlier micro-batches; None for 0.
        factor: fp32 scalar that the sum is multiplied by; None for 1.
        offset: the part's first element within the parameter.
    """
    formats = slot.group.formats
    weight, remainder = part["weight"], part.get("remainder")
    if formats.packed:
        codes1, scales1, codes2, scales2 = (part[kind] for kind in PACKED_MOMENTS)
        adamw8_piece(
            weight, remainder, codes1, scales1, codes2, scales2, gradient, numbers, previous=previous, factor=factor,
            seed=formats.seed_of(slot.name), offset=offset,
        )  # fmt: skip
    else:
        exp_avg, exp_avg_sq = (part[kind] for kind in MOMENTS)
        adamw_piece(weight, remainder, exp_avg, exp_avg_sq, gradient, numbers, previous=previous, factor=factor)


class Lane(ABC):
    """Runs `LaneJob`s in the order of submission.

    Args:
        memory: level-0 bytes that the ring is cut from, at least `smallest_buffer` of every group.
        num_buffers: places of the ring.
    """

    def __init__(self, stack: VGPUStack, homes: Homes, memory: torch.Tensor, num_buffers: int) -> None:
        size = memory.numel() // num_buffers // ALIGNMENT * ALIGNMENT
        assert size >= SMALLEST_BUFFER, (memory.numel(), num_buffers)
        self._stack = stack
        self._homes = homes
        self._ring = [Buffer(memory[index * size : (index + 1) * size]) for index in range(num_buffers)]

    @abstractmethod
    def submit(self, job: LaneJob) -> LaneEnd:
        """Queue ``job``. What it reads on level 0 must be ordered behind the current stream.

        The caller keeps the gradient until the update is ``computed``, the weights until it is ``stored``.
        """

    def pump(self) -> None:  # noqa: B027 (optional)
        """Bring up what the next updates will need, as far as the ring has room. Never blocks."""

    def expect(self, groups: Iterable[Group]) -> None:  # noqa: B027
        """The groups whose updates come next, in order; their states at home do not change before. Only a prediction."""

    def order_loads(self, end: LaneEnd) -> None:
        """Let weights that are loaded from now on be those that ``end`` stores."""
        end.stored.wait()

    def drain(self) -> None:  # noqa: B027
        """Return when everything submitted is stored."""

    def loads_of(self, job: LaneJob) -> list[str]:
        """The kinds that come from home."""
        found = self.states_of(job.group)
        if job.weight is None:
            found.append("weight")
        if job.gradient_kind is not None:
            found.append(job.gradient_kind)
        return found

    def states_of(self, group: Group) -> list[str]:
        """What AdamW keeps of ``group`` beside the compute weight, and not on level 0."""
        return state_kinds(group, self._homes)

    def most_elements(self, group: Group, kinds: Sequence[str]) -> int:
        """Elements of which all ``kinds`` fit one buffer."""
        room = self._ring[0].memory.numel() - ALIGNMENT * len(kinds)
        elements = room // sum(bytes_of(group, kind, SCALE_BLOCK) for kind in kinds) * SCALE_BLOCK
        return elements - elements % group.formats.cut

    @staticmethod
    def layout(group: Group, kinds: Sequence[str], piece: Piece) -> dict[str, slice]:
        """The part of a buffer that each kind gets, in bytes."""
        start, found = 0, {}
        for kind in kinds:
            num_bytes = bytes_of(group, kind, len(piece))
            found[kind] = slice(start, start + num_bytes)
            start += -(-num_bytes // ALIGNMENT) * ALIGNMENT
        return found

    @staticmethod
    def arithmetic(job: LaneJob, piece: Piece, arrived: dict[str, torch.Tensor]) -> dict[str, torch.Tensor]:
        """AdamW on one piece that has ``arrived``, by kind; returns what is to be stored."""
        group = job.group
        found = dict(arrived)
        if job.weight is not None:
            found["weight"] = cut(job.weight, group, "weight", piece)
        at_home = None if job.gradient_kind is None else typed(found.pop(job.gradient_kind), group, job.gradient_kind)
        fresh = None if job.gradient is None else typed(cut(job.gradient, group, "gradient", piece), group, "gradient")
        gradient, previous = (at_home, None) if fresh is None else (fresh, at_home)
        assert gradient is not None, "a gradient is on level 0 or at home"
        elements = {kind: typed(flat, group, kind) for kind, flat in found.items()}
        for slot, start, stop in parts_of(group, piece):
            if slot not in job.numbers:
                continue
            own = slice(start - piece.start, stop - piece.start)
            part = {kind: stretch(values, kind, own.start, own.stop) for kind, values in elements.items()}
            update_part(
                slot, part, gradient[own], job.numbers[slot], previous=None if previous is None else previous[own],
                factor=job.factor, offset=start - first_element(slot),
            )  # fmt: skip
        return found
