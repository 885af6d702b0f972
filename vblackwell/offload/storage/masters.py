"""The fp32 truth of compute weights that are narrower, and how it is read and written.

Two forms. *whole*: an fp32 range next to the compute weights. *split*, for bf16 alone: the weight is the truth rounded
to nearest with ties away from zero, ``(bits + 0x8000) >> 16``, and a signed 16-bit remainder holds the rest, so that
``bits(truth) = (bits(weight) << 16) + remainder`` exactly. (Ties to even would need a 17th bit.) Split, weight and
truth together take 4 bytes an element instead of 6, and an update on the GPU brings only the 2 of the remainder.

A group whose masters are 'stochastic' (`Formats`) has neither: its bf16 weight is the truth, rounded at random by the
update, and widened to fp32 where the truth is asked for.

Both forms are worked on through ``opened``: the group's stored ranges by kind, as `open_weights` gives them.
"""

from __future__ import annotations

from collections.abc import Container, Sequence

import torch

from vblackwell.errors import Unsupported
from vblackwell.offload.layout.groups import Group, Slot
from vblackwell.offload.storage.storage import Storage

FORMS = ("master", "remainder")
TRAINED_DTYPES = (torch.float32, torch.bfloat16, torch.float16)
CHUNK = 1 << 22  # elements that are split at a time
Opened = dict[str, torch.Tensor]


def refuse_untrainable(name: str, dtype: torch.dtype) -> None:
    """
    Raises:
        Unsupported: the parameter ``name`` of this compute type cannot be trained exactly: AdamW's arithmetic is fp32.
    """
    if dtype not in TRAINED_DTYPES:
        raise Unsupported(
            f"{name!r} is {str(dtype).removeprefix('torch.')}, and AdamW of a model in a stack computes in fp32: give "
            "compute_dtype=torch.float32, make the model fp32 by .float(), or freeze the parameter by "
            "requires_grad_(False)"
        )


def refuse_unprepared(name: str, groups: Sequence[Group], storage: Storage, on_level0: Container[Group]) -> None:
    """``groups`` of the model ``name`` are to get optimizer states.

    Args:
        on_level0: groups that are updated there, as those with packed moments must be.

    Raises:
        Unsupported: some were frozen when the model was offloaded, and were not prepared for training, or cannot be
            trained.
    """
    for group in groups:
        for slot in group.trainable():
            refuse_untrainable(slot.name, slot.dtype)
        if group.needs_master and not any((group, form) in storage for form in FORMS):
            raise Unsupported(
                f"parameters of {name!r} that were frozen when it was offloaded have no fp32 master: release and "
                "enable again"
            )
        if group.formats.packed and group not in on_level0:
            raise Unsupported(
                f"parameters of {name!r} that were frozen when it was offloaded have no place on level 0 for their "
                f"{group.formats.states} states: release and enable again"
            )


def round_from_fp32(source: torch.Tensor, out: torch.Tensor, scratch: torch.Tensor | None = None) -> None:
    """``out`` = ``source`` rounded to nearest: ties away from zero for bf16, to even (torch's conversion) otherwise.

    Adding 0x8000 to the bits of a finite fp32 and cutting the low half rounds its magnitude; a carry moves into the
    exponent as it should, and past the largest bf16 gives infinity. Both are dense and of
    one layout; ``scratch`` is int32 of at least their length.
    """
    if out.dtype != torch.bfloat16:
        out.copy_(source)
        return
    source, out = in_memory_order(source), in_memory_order(out)
    if scratch is None:
        scratch = torch.empty(source.shape, dtype=torch.int32, device=source.device)
    bits = torch.add(source.view(torch.int32), 0x8000, out=scratch[: source.numel()])
    out.view(torch.int16).copy_(bits.view(torch.int16)[1::2])  # the high halves, on a little-endian machine
    wrong = source.isnan()
    if bool(wrong.any()):  # a NaN with a full low half wraps to a zero: the GPU's own is one
        out.masked_fill_(wrong, float("nan"))


def in_memory_order(tensor: torch.Tensor) -> torch.Tensor:
    """A dense tensor as one dimension, whatever the order of its strides."""
    return tensor.as_strided((tensor.numel(),), (1,), tensor.storage_offset())


def join(weight: torch.Tensor, remainder: torch.Tensor) -> torch.Tensor:
    """The fp32 truth of a split master, in new memory. Both are flat, bf16 and int16."""
    bits = weight.view(torch.int16).to(torch.int32).bitwise_left_shift_(16).add_(remainder)
    return bits.view(torch.float32)


def split(truth: torch.Tensor, weight: torch.Tensor, remainder: torch.Tensor) -> None:
    """The reverse of `join`: writes both halves of the flat fp32 ``truth``."""
    for start in range(0, truth.numel(), CHUNK):  # so that a large parameter needs no temporaries of its size
        part, high, low = (flat[start : start + CHUNK] for flat in (truth, weight, remainder))
        round_from_fp32(part, high)
        bits = high.view(torch.int16).to(torch.int32).bitwise_left_shift_(16)
        low.copy_(part.view(torch.int32) - bits)  # within 16 bits, by how the weight was rounded


def open_weights(storage: Storage, group: Group, *, load: bool = True) -> Opened:
    """The stored compute weights of ``group`` and what completes them to the truth (worker thread)."""
    kinds = [kind for kind in ("weight", *FORMS) if (group, kind) in storage]
    return {kind: storage.open(group, kind, load=load) for kind in kinds}


def close_weights(storage: Storage, group: Group, opened: Opened, *, store: bool) -> None:
    """End of `open_weights`."""
    for kind, flat in opened.items():
        storage.close_range(group, kind, flat, store=store)


def read_truth(slot: Slot, opened: Opened) -> torch.Tensor:
    """The parameter at full precision, in its shape and stride; an alias of ``opened`` unless joined or widened."""
    if slot.dtype.is_floating_point and "master" in opened:
        return slot.view_fp32(opened["master"])
    if slot.dtype == torch.bfloat16 and "remainder" in opened:
        return join(slot.flat(opened["weight"]), slot.flat(opened["remainder"], torch.int16)).as_strided(
            slot.shape, slot.stride
        )
    weight = slot.view(opened["weight"])
    return weight.float() if slot.group.formats.stochastic else weight


@torch.no_grad()
def write_truth(slot: Slot, source: torch.Tensor, opened: Opened) -> None:
    """Make the parameter ``source`` (its shape, any float type), in all forms that ``opened`` has."""
    weight = opened["weight"]
    if slot.dtype.is_floating_point and "master" in opened:
        slot.view_fp32(opened["master"]).copy_(source)
    split_too = slot.dtype == torch.bfloat16 and "remainder" in opened
    if source.dtype == slot.dtype:
        slot.view(weight).copy_(source)
        if split_too:
            slot.flat(opened["remainder"], torch.int16).zero_()
        return
    wide = source
    if source.dtype != torch.float32 or source.stride() != slot.stride or source.device != weight.device:
        wide = torch.empty_strided(slot.shape, slot.stride, dtype=torch.float32, device=weight.device).copy_(source)
    wide = in_memory_order(wide)
    if split_too:
        split(wide, slot.flat(weight), slot.flat(opened["remainder"], torch.int16))
    else:
        round_from_fp32(wide, slot.flat(weight))


def write_masters(storage: Storage, group: Group, changed: Sequence[Slot]) -> None:
    """The stored weights of ``changed`` were replaced: make them the truth (worker thread)."""
    opened = open_weights(storage, group)
    for slot in changed:
        write_truth(slot, slot.view(opened["weight"]).clone(memory_format=torch.preserve_format), opened)
    close_weights(storage, group, opened, store=len(opened) > 1)


def write_parameter(storage: Storage, slot: Slot, source: torch.Tensor) -> None:
    """Replace a slot's weight, and its master, by the CPU tensor ``source`` (worker thread)."""
    opened = open_weights(storage, slot.group)
    write_truth(slot, source, opened)
    close_weights(storage, slot.group, opened, store=True)


def read_weight(storage: Storage, slot: Slot) -> torch.Tensor:
    """A copy of a slot's compute weight on the CPU (worker thread, or a caller that has waited for it)."""
    weight = storage.open(slot.group, "weight")
    copied = slot.view(weight).clone(memory_format=torch.preserve_format)
    storage.close_range(slot.group, "weight", weight, store=False)
    return copied
