"""nvfp4 weights packed on a GPU: the bits of the oracle (numerics/search.py) and of layout.py, each in one pass over
the weight.

The oracle's hundreds of passes over a tile took 25 s for 6.7B weights on an H200, most of it launches, and torch's
expressions of the tiled layout cost seconds while such a folder is opened. Elsewhere, on the CPU and for other formats,
those run.
"""

from __future__ import annotations

from torch import Tensor

from vblackwell.kernels.runtime.registry import runs_triton
from vblackwell.numerics.formats import Format
from vblackwell.numerics.packed import PackedTensor

LARGEST_EXPONENT = 115  # of the tensor scale: beyond, a decoded value may leave fp32, which the oracle looks at
SMALLEST_EXPONENT = -126


def nvfp4_encoder(w_NK: Tensor, form: Format, scale_search: str, exponent: int) -> tuple[Tensor, Tensor] | None:
    """Codes (N, Kp / 2) and block scales (N, Kp / 16) as `quantize` makes them; None where the oracle has to.

    Args:
        w_NK: finite.
        exponent: the tensor scale is two to its power.
    """
    if (form.name, scale_search) != ("nvfp4", "mse") or not SMALLEST_EXPONENT <= exponent <= LARGEST_EXPONENT:
        return None
    if not runs_triton("nvfp4_encode", w_NK, 0):
        return None
    from vblackwell.kernels.fp4.encode_triton import encode

    return encode(w_NK, exponent)


def nvfp4_tiles(packed: PackedTensor) -> tuple[Tensor, Tensor] | None:
    """Tiled codes and scales of a canonical nvfp4 weight; None where `layout.to_tiled` has to, or has to refuse. Waits
    for the device.
    """
    if packed.format != "nvfp4" or not runs_triton("nvfp4_tile", packed.tensor_scale, 0):
        return None
    if not bool((packed.block_scales < 0x7F).all()):  # what is NaN or negative the layout refuses
        return None
    from vblackwell.kernels.fp4.encode_triton import tile

    return tile(packed.codes, packed.block_scales, packed.n, packed.k)
