"""nvfp4's encoder on a GPU: the bits of the search by squared error in numerics/search.py, in one kernel.

The oracle's hundreds of passes over a tile took 25 s for 6.7B weights on an H200, most of it launches; this reads the weight once.
`quantize(..., encoder=nvfp4_encoder)` calls it where it can run and the oracle elsewhere: on the CPU, for other formats, and for tensor
scales so large that a decoded value may leave fp32.
"""

from __future__ import annotations

from torch import Tensor

from vblackwell.kernels.runtime.fused import runs_triton
from vblackwell.numerics.formats import Format

LARGEST_EXPONENT = 115  # of the tensor scale: beyond, the oracle looks at what overflows
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
