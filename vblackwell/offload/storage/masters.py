"""Parameters as plain fp32, in and out of the forms in which their group stores them: truths and moments.

The truth of a narrower weight is *whole*, an fp32 range, or, for bf16, *split*: the weight is the truth rounded with
ties away from zero, ``(bits + 0x8000) >> 16``, and a signed 16-bit remainder completes it: ``bits(truth) =
(bits(weight) << 16) + remainder`` (ties to even would need a 17th bit). 'stochastic' bf16 weights are their own truth.

Of 8-bit moments ``exp_avg_sq`` is kept as its root. Writing looks first for a scale of each block under which every
value *is* a code's, so a run goes on from its checkpoint as if it had not stopped (squares below 2^-126 lose bits).
"""

from collections.abc import Container, Iterator, Mapping, Sequence
from functools import cache

import torch
from torch import Tensor

from vblackwell.errors import Unsupported
from vblackwell.kernels.optimizer import adamw, cpu
from vblackwell.kernels.optimizer.adamw8 import SCALE_BLOCK, SMALLEST, decode_moments
from vblackwell.offload.layout.groups import CODES, MOMENTS, PACKED_MOMENTS, SCALES, Group, Slot, refuse_untrainable
from vblackwell.offload.storage.storage import Storage

FORMS = ("master", "remainder")
SPLIT_CHUNK = 1 << 22  # elements that are split at a time: on a GPU each takes launches and a search for NaN
Opened = dict[str, Tensor]


def refuse_unprepared(name: str, groups: Sequence[Group], storage: Storage, on_level0: Container[Group]) -> None:
    """Raise Unsupported where ``groups`` cannot get optimizer states: a type that is not trained, or frozen, and so not
    prepared, when the model was offloaded. Those with packed moments must be ``on_level0``.
    """
    for group in groups:
        lacks = ""
        for slot in group.trainable():
            refuse_untrainable(slot.name, slot.dtype)
        if group.needs_master and not any((group, form) in storage for form in FORMS):
            lacks = "no fp32 master"
        elif group.formats.packed and group not in on_level0:
            lacks = f"no place on level 0 for their {group.formats.states} states"
        if lacks:
            frozen = f"parameters of {name!r} that were frozen when it was offloaded"
            raise Unsupported(f"{frozen} have {lacks}: release and enable again")


def round_from_fp32(source: Tensor, out: Tensor) -> None:
    """``out`` = ``source`` rounded to nearest: ties away from zero for bf16, to even (torch's conversion) otherwise.
    A carry moves into the exponent; past the largest bf16 it gives infinity. Both are dense and of one layout.
    """
    if out.dtype != torch.bfloat16:
        out.copy_(source)
        return
    source, out = in_memory_order(source), in_memory_order(out)
    bits = source.view(torch.int32)
    out.view(torch.int16).copy_((bits + 0x8000).view(torch.int16)[1::2])  # the high halves, on a little-endian machine
    adamw.keep_nan(bits, out)


def in_memory_order(tensor: Tensor) -> Tensor:
    """A dense tensor as one dimension, whatever the order of its strides."""
    return tensor.as_strided((tensor.numel(),), (1,), tensor.storage_offset())


def open_weights(storage: Storage, group: Group, *, load: bool = True) -> Opened:
    """The stored compute weights of ``group`` and what completes them to the truth (worker thread)."""
    kinds = [kind for kind in ("weight", *FORMS) if (group, kind) in storage]
    return {kind: storage.open(group, kind, load=load) for kind in kinds}


def store_weights(storage: Storage, group: Group, opened: Opened) -> None:
    """What `open_weights` gave was written to."""
    for kind, flat in opened.items():
        storage.store(group, kind, flat)


def read_truth(slot: Slot, opened: Opened) -> Tensor:
    """The parameter at full precision, in its shape and stride; an alias of ``opened`` unless joined or widened."""
    if slot.dtype.is_floating_point and "master" in opened:
        return slot.view_fp32(opened["master"])
    if slot.dtype == torch.bfloat16 and "remainder" in opened:
        weight, remainder = slot.flat(opened["weight"]), slot.flat(opened["remainder"], torch.int16)
        bits = torch.empty(weight.shape, dtype=torch.int32, device=weight.device)
        return adamw.join(weight, remainder, bits).as_strided(slot.shape, slot.stride)
    weight = slot.view(opened["weight"])
    return weight.float() if slot.group.formats.stochastic else weight


@torch.no_grad()
def write_truth(slot: Slot, source: Tensor, opened: Opened) -> None:
    """Make the parameter ``source`` (its shape, any float type), in all forms that ``opened`` has."""
    weight = opened["weight"]
    if slot.dtype.is_floating_point and "master" in opened:
        slot.view_fp32(opened["master"]).copy_(source)
    remainder = None
    if slot.dtype == torch.bfloat16 and "remainder" in opened:
        remainder = slot.flat(opened["remainder"], torch.int16)
    if source.dtype == slot.dtype:
        slot.view(weight).copy_(source)
        if remainder is not None:
            remainder.zero_()
        return
    wide = source
    if source.dtype != torch.float32 or source.stride() != slot.stride or source.device != weight.device:
        wide = torch.empty_strided(slot.shape, slot.stride, dtype=torch.float32, device=weight.device).copy_(source)
    wide, weight = in_memory_order(wide), slot.flat(weight)
    if remainder is None:
        round_from_fp32(wide, weight)
        return
    if wide.device.type == "cpu" and cpu.split(wide, weight, remainder):
        return
    scratch = torch.empty(min(len(wide), SPLIT_CHUNK), dtype=torch.int32, device=wide.device)
    for start in range(0, len(wide), SPLIT_CHUNK):  # so that a large parameter needs no temporaries of its size
        part = slice(start, start + SPLIT_CHUNK)
        bits = wide[part].view(torch.int32)
        adamw.split(bits, weight[part], remainder[part], scratch[: len(bits)])


def write_parameters(storage: Storage, slots: Sequence[Slot], source: Tensor | None = None) -> None:
    """Make a CPU tensor, or the stored weights, the truth of one group's ``slots`` (worker thread)."""
    group = slots[0].group
    opened = open_weights(storage, group)
    for slot in slots:
        stored = slot.view(opened["weight"])
        write_truth(slot, stored.clone(memory_format=torch.preserve_format) if source is None else source, opened)
    if source is not None or len(opened) > 1:
        store_weights(storage, group, opened)


CHUNK = 1 << 18  # elements worked on at a time: a multiple of `SCALE_BLOCK`
_PROBE = 8  # elements of a block
# The update's scale is the largest moment over the largest code, and the product of both may be a few places off.
_LAST_PLACES = (0, 1, -1, 2, -2)
_SIGN = 128  # of codes of exp_avg
# Largest codes that the largest of a block may have: random rounding takes exp_avg's down by one about once in a
# million blocks.
_TOP_CODES = {"exp_avg": (127, 126), "exp_avg_sq": (255,)}


def moment_parts(slot: Slot, opened: Mapping[str, Tensor]) -> dict[str, Tensor]:
    """``slot``'s share of its group's moments, flat and typed, by kind; aliases of the uint8 ranges ``opened``."""
    if not slot.group.formats.packed:
        return {kind: slot.flat_fp32(opened[kind]) for kind in MOMENTS}
    first, n = slot.offset // slot.dtype.itemsize, slot.num_elements
    block, count = first // SCALE_BLOCK, -(-n // SCALE_BLOCK)
    found = {kind: opened[kind][first : first + n] for kind in CODES}
    found |= {kind: opened[kind][4 * block : 4 * (block + count)].view(torch.float32) for kind in SCALES}
    return {kind: found[kind] for kind in PACKED_MOMENTS}


def read_moments(slot: Slot, parts: Mapping[str, Tensor]) -> dict[str, Tensor]:
    """``exp_avg`` and ``exp_avg_sq`` in fp32: copies in the parameter's shape and stride, where ``parts`` are."""
    device = parts[slot.group.formats.moments[0]].device
    found = {kind: torch.empty_strided(slot.shape, slot.stride, dtype=torch.float32, device=device) for kind in MOMENTS}
    flat = [tensor.as_strided((slot.num_elements,), (1,)) for tensor in found.values()]
    if not slot.group.formats.packed:
        for target, kind in zip(flat, MOMENTS, strict=True):
            target.copy_(parts[kind])
        return found
    for elements, blocks in _chunks(slot.num_elements):
        m, root_v = decode_moments(*(parts[kind][blocks if kind in SCALES else elements] for kind in PACKED_MOMENTS))
        flat[0][elements] = m
        flat[1][elements] = root_v * root_v
    return found


@torch.no_grad()
def write_moments(slot: Slot, parts: Mapping[str, Tensor], state: Mapping[str, Tensor]) -> None:
    """The reverse of `read_moments`; ``state``: tensors of the parameter's shape, any stride, float type and device."""
    for kind in MOMENTS:
        wide = torch.empty_strided(slot.shape, slot.stride, dtype=torch.float32).copy_(state[kind])
        wide = wide.as_strided((slot.num_elements,), (1,))
        if not slot.group.formats.packed:
            parts[kind].copy_(wide)
            continue
        for elements, blocks in _chunks(slot.num_elements):
            codes, scales = quantised(wide[elements], kind)
            parts[f"{kind}_codes"][elements] = codes.to(parts[f"{kind}_codes"].device)
            parts[f"{kind}_scales"][blocks] = scales.to(parts[f"{kind}_scales"].device)


def _chunks(num_elements: int) -> Iterator[tuple[slice, slice]]:
    """Slices of elements and of their scales."""
    for start in range(0, num_elements, CHUNK):
        stop = min(start + CHUNK, num_elements)
        yield slice(start, stop), slice(start // SCALE_BLOCK, -(-stop // SCALE_BLOCK))


def quantised(values: Tensor, kind: str) -> tuple[Tensor, Tensor]:
    """uint8 codes (n,) and fp32 scales (ceil(n / 256),) of finite ``values`` (n,), fp32 on the CPU, of a moment."""
    n, table = len(values), _values(kind)
    padded = values.new_zeros(-(-n // SCALE_BLOCK) * SCALE_BLOCK)
    padded[:n] = values.abs()
    target = padded.view(-1, SCALE_BLOCK)
    # A correctly rounded root: torch's own in fp32 may be one last place off where a vector library does it.
    roots = target.double().sqrt().float() if kind == "exp_avg_sq" else target
    largest = roots.amax(1)
    codes, scales = roots.new_zeros(roots.shape, dtype=torch.uint8), roots.new_zeros(len(roots))
    left = (largest >= SMALLEST).nonzero().flatten()
    for top in _TOP_CODES[kind]:
        for places in _LAST_PLACES:
            scale = ((largest / table[top]).view(torch.int32) + places).view(torch.float32)
            # A few elements tell for most blocks that come from elsewhere.
            fits = left[_tried(roots[left, :_PROBE], target[left, :_PROBE], scale[left], kind)[1]]
            found, exact = _tried(roots[fits], target[fits], scale[fits], kind)
            fits = fits[exact]
            codes[fits], scales[fits] = found[exact], scale[fits]
            left = left[scales[left] == 0]
    scales[left] = largest[left] / table[_TOP_CODES[kind][0]]
    codes[left] = _nearest(roots[left] / scales[left, None], kind)
    flat = codes.view(-1)[:n]
    if kind == "exp_avg":
        flat += (_SIGN * values.signbit()).to(torch.uint8)
    return flat, scales


def _tried(roots: Tensor, target: Tensor, scale: Tensor, kind: str) -> tuple[Tensor, Tensor]:
    """Codes of (blocks, elements) to scales, and for each block whether reading them gives ``target`` again."""
    codes = _nearest(roots / scale[:, None], kind)
    found = _values(kind)[codes.int()] * scale[:, None]
    return codes, ((found * found if kind == "exp_avg_sq" else found) == target).all(1)


def _nearest(ratios: Tensor, kind: str) -> Tensor:
    """Codes of ``ratios`` >= 0 to a scale; for exp_avg_sq, which is divided by, only zero is kept as zero."""
    found = torch.bucketize(ratios, _midpoints(kind)).to(torch.uint8)
    return found if kind == "exp_avg" else torch.where((found == 0) & (ratios > 0), 1, found)


@cache
def _values(kind: str) -> Tensor:
    """What the codes of ``kind``, without a sign, are worth at scale 1."""
    codes, one = torch.arange(256, device="cpu").to(torch.uint8), torch.ones(1, dtype=torch.float32, device="cpu")
    m, root_v = decode_moments(codes, one, codes, one)
    return m[:_SIGN].clone() if kind == "exp_avg" else root_v


@cache
def _midpoints(kind: str) -> Tensor:
    values = _values(kind)
    return (values[1:] + values[:-1]) / 2
