"""Packing weights, and rounding them straight through, on whatever device they are: on a CUDA GPU one kernel for all
formats (encode_triton.py), elsewhere the oracle (numerics/); the bits are the same. Everything that packs comes here.
"""

from dataclasses import replace
from functools import partial
from typing import Any

import torch
from torch import Tensor

from vblackwell.errors import ConfigurationError
from vblackwell.kernels.fp4 import layout
from vblackwell.kernels.runtime.registry import runs_triton
from vblackwell.numerics import fp4, separation
from vblackwell.numerics.formats import Format, check_search, format_named
from vblackwell.numerics.packed import PackedTensor
from vblackwell.numerics.round_trip import round_trip as round_trip_by_torch


def quantize(
    tensor: Tensor,
    format: str = "nvfp4",
    scale_search: str = "mse",
    *,
    tensor_scale: Tensor | None = None,
    block_size: int | None = None,
    name: str = "tensor",
) -> PackedTensor:
    """Packs ``tensor`` (any shape; blocks run along the last dimension). Waits for the device.

    Args:
        tensor: float32, bfloat16 or float16; finite; not empty. Errors call it ``name``.
        format, scale_search, block_size: as for ``FP4Codec``.
        tensor_scale: nvfp4's, 0-dimensional fp32, e.g. from ``numerics.fp4.joint_tensor_scale``; default: the tensor's
            own.

    Raises ConfigurationError for a wrong dtype, no elements, inf or NaN, a tensor scale that does not fit.
    """
    encoder = None
    if runs_triton("fp4_encode", tensor, 0):
        from vblackwell.kernels.fp4.encode_triton import encode as encoder
    how: dict[str, Any] = {"tensor_scale": tensor_scale, "block_size": block_size, "name": name}
    return fp4.quantize(tensor, format, scale_search, encoder=encoder, **how)


def separate(tensor: Tensor, scale_search: str = "mse", **options: Any) -> PackedTensor:
    """``tensor`` in two parts (numerics/separation.py), any shape and size; ``options``, and what is refused, as for
    `quantize`."""
    if not runs_triton("fp4_encode", tensor, 0):
        return separation.separate(tensor, scale_search, **options)
    from vblackwell.kernels.fp4.encode_triton import encode

    return fp4.quantize(tensor, "nvfp4", scale_search, encoder=partial(encode, parts=True), **options)


def round_trip(w_NK: Tensor, form: Format, dtype: torch.dtype) -> Tensor:
    """(N, K) weights rounded to ``form`` with `max` scales and back, as ``dtype``; NaN throughout where one is not
    finite. Reads no value on the host."""
    if not runs_triton("fp4_round_trip", w_NK, 0):
        return round_trip_by_torch(w_NK, form, dtype)
    from vblackwell.kernels.fp4.encode_triton import round_trip

    return round_trip(w_NK, form, dtype)


class FP4Codec:
    """Encodes and decodes one format: 'nvfp4', 'mxfp4', 'nf4', 'int4' or 'int8'.

    ``scale_search`` is 'mse' (least squared error) or 'max' (the plain published scale); ``block_size`` for int4 (32,
    128) and int8 (``None``: the row; or any even number). Raises ConfigurationError for what is not known.
    """

    def __init__(self, format: str = "nvfp4", scale_search: str = "mse", *, block_size: int | None = None) -> None:
        self.form = format_named(format, block_size)
        self.scale_search = check_search(scale_search)

    def encode(self, w: Tensor) -> tuple[Tensor, PackedTensor]:
        """Codes of a tensor of any shape, and what they are decoded with; raises as ``quantize``."""
        packed = quantize(w, self.form.name, self.scale_search, block_size=self.form.block_size)
        return packed.codes, packed

    def decode(self, codes: Tensor, scale: PackedTensor) -> Tensor:
        """The tensor that ``encode`` packed, in its shape and dtype; ConfigurationError for ``scale`` of another
        format, CorruptData where codes and scales do not fit.
        """
        if scale.form != self.form:
            given, own = (f"{form.name} (block {form.block_size})" for form in (scale.form, self.form))
            wrong = f"codes of {given} given to a codec of {own}"
            raise ConfigurationError(f"{wrong}: decode with FP4Codec({scale.form.name!r})")
        packed = replace(scale, codes=codes)
        packed.check()
        return packed.dequantize()


def tiles(packed: PackedTensor) -> tuple[Tensor, Tensor, Tensor, Tensor | None] | None:
    """Tiled codes, scales, tensor scale and fine codes of a canonical nvfp4 or mxfp4 weight; None where `layout` has to
    make them, or to say why it does not. Raises as `layout.live_exponents` and `layout.check_fine`. Waits for the
    device."""
    codes, scales, unit, fine = packed.codes, packed.block_scales, packed.tensor_scale, packed.fine
    if packed.format not in ("nvfp4", "mxfp4") or not runs_triton("fp4_tile", unit, 0):
        return None
    top = layout.live_exponents(codes, scales)[1] if packed.format == "mxfp4" else None
    if top is not None:
        unit = unit * 2.0 ** layout.mxfp4_exponent(top)
    elif not bool((scales < 0x7F).all()):  # NaN or negative
        return None
    if fine is not None:
        layout.check_fine(codes, fine)
    from vblackwell.kernels.fp4.tile_triton import tile

    codes, scales, fine = tile(codes, scales, packed.n, packed.k, top, fine)
    return codes, scales, unit, fine
