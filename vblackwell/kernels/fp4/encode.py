"""nvfp4 weights packed on a GPU, in one pass: the bits of the oracles (numerics/search.py, layout.py)."""

from torch import Tensor

from vblackwell.kernels.runtime.registry import runs_triton
from vblackwell.numerics.formats import Format
from vblackwell.numerics.packed import PackedTensor

LARGEST_EXPONENT = 115  # of the tensor scale: beyond, a decoded value may leave fp32: left to the oracle
SMALLEST_EXPONENT = -126


def nvfp4_encoder(w_NK: Tensor, form: Format, scale_search: str, exponent: int) -> tuple[Tensor, Tensor] | None:
    """Codes (N, Kp / 2) and block scales (N, Kp / 16) as `quantize` makes them of finite weights and a tensor scale of
    two to the power ``exponent``; None where the oracle has to."""
    if (form.name, scale_search) != ("nvfp4", "mse") or not SMALLEST_EXPONENT <= exponent <= LARGEST_EXPONENT:
        return None
    if not runs_triton("nvfp4_encode", w_NK, 0):
        return None
    from vblackwell.kernels.fp4.encode_triton import encode

    return encode(w_NK, exponent)


def nvfp4_tiles(packed: PackedTensor) -> tuple[Tensor, Tensor] | None:
    """Tiled codes and scales of a canonical nvfp4 weight; None where `layout.to_tiled` has to. Waits for the device."""
    if packed.format != "nvfp4" or not runs_triton("nvfp4_tile", packed.tensor_scale, 0):
        return None
    if not bool((packed.block_scales < 0x7F).all()):  # what is NaN or negative the layout refuses
        return None
    from vblackwell.kernels.fp4.encode_triton import tile

    return tile(packed.codes, packed.block_scales, packed.n, packed.k)
