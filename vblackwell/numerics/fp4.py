"""Encoder: a tensor in, a packed tensor out. Pure torch, bit-exact, and the oracle for the kernel on GPUs
(kernels/fp4/encode.py), whose `quantize` is the public one.

Work goes in tiles, because a layer may be quantised on a GPU with little free memory: all that is allocated, the result
included, stays under 0.35 of the tensor (on the CPU under that or 4 MiB more than the result, whichever is more).
"""

import math
from collections.abc import Callable, Sequence

import torch
from torch import Tensor

from vblackwell.errors import ConfigurationError
from vblackwell.numerics.formats import E4M3_MAX, Format, check_search, format_named
from vblackwell.numerics.packed import PackedTensor, pack_nibbles, padded_tile, tiles
from vblackwell.numerics.round_trip import max_tensor_scale
from vblackwell.numerics.rounding import decode_scales, max_scale, round_elements
from vblackwell.numerics.search import best_e4m3, best_e8m0, best_fraction

_FLOAT32_MAX = torch.finfo(torch.float32).max
_CPU_TILE_ELEMENTS = 1 << 16  # temporaries of 3.5 MiB: half in the cache, and few enough calls
_GPU_TILE_ELEMENTS = (1 << 12, 1 << 24)
_TILE_BYTES_PER_ELEMENT = 56  # temporaries of the search and the fp64 rounding together
_EXTRA_MEMORY = 0.33  # of the tensor's size: packed tensors and temporaries
_MSE_HEADROOM = 4 * E4M3_MAX  # the best scale of the largest block may be up to amax / 4
# (matrix, format, search, tensor scale, floor of its log2) to codes and block scales, and perhaps fine codes.
Encoder = Callable[[Tensor, Format, str, Tensor, int], tuple[Tensor, ...]]


def quantize(
    tensor: Tensor,
    format: str = "nvfp4",
    scale_search: str = "mse",
    *,
    tensor_scale: Tensor | None = None,
    block_size: int | None = None,
    name: str = "tensor",
    encoder: Encoder | None = None,
) -> PackedTensor:
    """Packs ``tensor`` (any shape; blocks run along the last dimension).

    Args:
        tensor: float32, bfloat16 or float16; finite; not empty. Errors call it ``name``.
        format, scale_search, block_size: as for `kernels.fp4.encode.FP4Codec`.
        tensor_scale: nvfp4's, 0-dimensional fp32, e.g. from ``joint_tensor_scale``; default: the tensor's own.
        encoder: another of the same bits.

    Raises ConfigurationError for a wrong dtype, no elements, inf or NaN, a tensor scale that does not fit.
    """
    form = format_named(format, block_size)
    check_search(scale_search)
    w = tensor.detach()
    amax = _amax(w, form, name)
    if tensor_scale is None:
        tensor_scale = _tensor_scale([amax], form, scale_search)
    else:
        if form.name != "nvfp4":
            raise ConfigurationError(f"{form.name} has no tensor scale: leave tensor_scale out")
        value = float(tensor_scale) if tensor_scale.numel() == 1 and tensor_scale.dtype == torch.float32 else math.nan
        if not 2.0**-126 <= value < math.inf:
            wanted = "give one float32 that is a normal positive number, e.g. from joint_tensor_scale"
            raise ConfigurationError(f"tensor_scale is {tensor_scale}: {wanted}")
        if scale_search == "mse" and math.frexp(value)[0] != 0.5:
            raise ConfigurationError(f"tensor_scale is {value}: scale_search='mse' wants a power of two, or use 'max'")
        tensor_scale = tensor_scale.detach().reshape(()).to(w.device)
    n, k = math.prod(w.shape[:-1]), w.shape[-1] if w.ndim else 1
    w_NK = w.reshape(n, k)
    exponent = math.frexp(float(tensor_scale))[1] - 1 if form.name == "nvfp4" else 0
    codes, block_scales, *fine = (encoder or _encode)(w_NK, form, scale_search, tensor_scale, exponent)
    return PackedTensor(form, tuple(w.shape), w.dtype, codes, block_scales, tensor_scale, *fine)


def joint_tensor_scale(
    tensors: Sequence[Tensor], format: str = "nvfp4", scale_search: str = "mse", *, names: Sequence[str] | None = None
) -> Tensor:
    """One tensor scale for projections that a runtime fuses (query/key/value, gate/up); on the first tensor's device.
    Raises ConfigurationError as ``quantize``, or for no tensors; ``names`` are what it calls them.
    """
    form = format_named(format)
    if not tensors:
        raise ConfigurationError("joint_tensor_scale needs at least one tensor")
    names = names or [f"tensors[{i}]" for i in range(len(tensors))]
    amax = [_amax(w.detach(), form, name).to(tensors[0].device) for w, name in zip(tensors, names, strict=True)]
    return _tensor_scale(amax, form, check_search(scale_search))


def _amax(w: Tensor, form: Format, name: str) -> Tensor:
    """Largest magnitude as 0-dimensional fp32, after refusing what cannot be encoded."""
    if w.dtype not in (torch.float32, torch.bfloat16, torch.float16):
        known = "float32, bfloat16 and float16; convert it with .float() first"
        raise ConfigurationError(f"{name} is {w.dtype}: {form.name} encodes {known}")
    if w.numel() == 0:
        raise ConfigurationError(f"{name} of shape {tuple(w.shape)} is empty: there is nothing to encode")
    if w.device.type == "meta":
        raise ConfigurationError(f"{name} is on the meta device and has no values: materialise it before quantising")
    low, high = torch.aminmax(w)
    amax = torch.maximum(low.abs(), high.abs()).to(torch.float32)
    if not torch.isfinite(amax):
        bad = f"{w.numel() - int(torch.isfinite(w).sum())} inf or NaN elements of {w.numel()}"
        remedy = "repair the weights (an overflow in training?) before quantising"
        raise ConfigurationError(f"{name} has {bad}, which {form.name} cannot hold: {remedy}")
    return amax


def _tensor_scale(amax: Sequence[Tensor], form: Format, scale_search: str) -> Tensor:
    """nvfp4: amax / (6 * 448), or the power of two with headroom for the search. At least 2^-126: never subnormal."""
    largest = torch.stack(list(amax)).amax()
    if form.name != "nvfp4" or scale_search == "max" or float(largest) == 0:
        return max_tensor_scale(largest, form)
    mantissa, exponent = math.frexp(float(largest) / _MSE_HEADROOM)
    return torch.full_like(largest, 2.0 ** max(-126, exponent - (mantissa == 0.5)))


def _encode(
    w_NK: Tensor, form: Format, scale_search: str, tensor_scale: Tensor, exponent: int
) -> tuple[Tensor, Tensor]:
    (n, k), device = w_NK.shape, w_NK.device
    block, budget = form.block_of(k), _CPU_TILE_ELEMENTS
    codes = torch.empty(form.codes_shape(n, k), dtype=form.codes_dtype, device=device)
    block_scales = torch.empty(form.scales_shape(n, k), dtype=form.scale_dtype, device=device)
    if device.type != "cpu":
        free_bytes = int(_EXTRA_MEMORY * w_NK.nbytes) - codes.nbytes - block_scales.nbytes
        low, high = _GPU_TILE_ELEMENTS
        budget = min(high, max(low, free_bytes // _TILE_BYTES_PER_ELEMENT))
    for rows, columns, coded, blocks in tiles(form, n, k, budget):
        blocks_BE = padded_tile(w_NK[rows, columns], (blocks.stop - blocks.start) * block).reshape(-1, block)
        scales, tile_codes = _encode_blocks(blocks_BE, form, scale_search, tensor_scale, exponent)
        if form.bits == 4:
            tile_codes = pack_nibbles(tile_codes)
        codes[rows, coded] = tile_codes.view(-1, coded.stop - coded.start)
        block_scales[rows, blocks] = scales.view(-1, blocks.stop - blocks.start)
    return codes, block_scales


def _encode_blocks(
    w_BE: Tensor, form: Format, scale_search: str, tensor_scale: Tensor, exponent: int
) -> tuple[Tensor, Tensor]:
    """(block scales (B,), unpacked codes (B, E)) of blocks; ``exponent`` is floor(log2 tensor_scale)."""
    ts = tensor_scale.to(torch.float64)
    if scale_search == "max":
        scales = max_scale(w_BE.abs().amax(1).to(torch.float64), ts, form)
    elif form.name == "nvfp4":
        # In units of the tensor scale, a power of two: exact, but for elements far below any scale's reach.
        a_EB = w_BE.t().to(torch.float32).abs().mul_(2.0**-exponent).contiguous()
        limit = _FLOAT32_MAX * 2.0**-exponent if exponent > 115 else None
        scales = best_e4m3(a_EB, limit)
    elif form.name == "mxfp4":
        scales = best_e8m0(w_BE.t().to(torch.float64).abs().contiguous(), _FLOAT32_MAX)
    else:
        scales = best_fraction(w_BE.to(torch.float64), form)
    product = decode_scales(scales, form).to(torch.float64) * ts
    return scales, round_elements(w_BE.to(torch.float64), product, form)
