"""One parameter's moments as plain fp32, in and out of the form in which its group keeps them (`Formats`).

Reading 8-bit states is one product an element, and for ``exp_avg_sq`` one more, for what is kept is its root. Writing
picks each block's scale and the nearest codes. It looks first for a scale under which every value *is* a code's: what
was read here is written back to the same values, so a run goes on from its checkpoint as if it had not stopped.
(Squares below 2^-126 lose bits, of gradients under 1e-19, and are not written back to the same values.) Values from
elsewhere are rounded to nearest, always the same way: random rounding is right in the mean of a thousand updates, and a
checkpoint is read once.
"""

from __future__ import annotations

from collections.abc import Iterator, Mapping
from functools import cache

import torch
from torch import Tensor

from vblackwell.kernels.optimizer.adamw8 import SCALE_BLOCK, SMALLEST, decode_moments
from vblackwell.offload.layout.groups import CODES, MOMENTS, PACKED_MOMENTS, SCALES, Slot

CHUNK = 1 << 18  # elements at a time: a multiple of `SCALE_BLOCK`
_PROBE = 8  # elements of a block
# The update's own scale is the largest moment over the largest code, and the product of both may be a few last places
# off.
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
    """Codes and scales of ``values``.

    Args:
        values: (n,) fp32 on the CPU, finite; not negative for exp_avg_sq.
        kind: 'exp_avg' or 'exp_avg_sq'.

    Returns:
        (n,) uint8 and (ceil(n / 256),) fp32.
    """
    n, table = len(values), _values(kind)
    padded = torch.zeros(-(-n // SCALE_BLOCK) * SCALE_BLOCK)
    padded[:n] = values.abs()
    target = padded.view(-1, SCALE_BLOCK)
    # A correctly rounded root: torch's own in fp32 may be one last place off where a vector library does it.
    roots = target.double().sqrt().float() if kind == "exp_avg_sq" else target
    largest = roots.amax(1)
    codes, scales = torch.zeros(roots.shape, dtype=torch.uint8), torch.zeros(len(roots))
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
    codes = torch.arange(256).to(torch.uint8)
    m, root_v = decode_moments(codes, torch.ones(1), codes, torch.ones(1))
    return m[:_SIGN].clone() if kind == "exp_avg" else root_v


@cache
def _midpoints(kind: str) -> Tensor:
    values = _values(kind)
    return (values[1:] + values[:-1]) / 2
