"""Launches of w4a8: mxfp4 weights as E4M3, rows of x rounded to E4M3, one product on FP8 tensor cores in one kernel.

``cuda/w4a8_wgmma.cu`` decodes weights in registers, so that they are read at 4.5 bits and never written; ``fp4_cuda.run_prepare_e4m3``
writes them out for PyTorch's FP8 matmul instead. Rows of x come to the kernel in its own order by ``round_rows``.

``M`` rows, ``N`` out features, ``K`` in features.
"""

from __future__ import annotations

from dataclasses import dataclass

import torch
from torch import Tensor

from vblackwell.kernels.fp4_plan import ceil_div
from vblackwell.kernels.nvrtc import kernel
from vblackwell.kernels.reference import ACTIVATIONS

W4A8_FILES = (
    "ptx.cuh", "decode.cuh", "wgmma.cuh", "barrier.cuh", "ring.cuh", "epilogue.cuh", "round_row.cuh", "w4a8_wgmma.cu",
)  # fmt: skip
_TOKENS = 128  # rows of x a block takes
_MOST_ROWS = 0  # up to which one kernel was measured to be faster: it was not measured yet


@dataclass(frozen=True)
class W4a8Plan:
    """How ``w4a8_wgmma`` covers a shape.

    Attributes:
        groups: warpgroups, 64 weight rows each.
        stages: 128 columns of x each, in shared memory.
        prefetch: windows of weights a warp has in flight.
    """

    groups: int = 2
    stages: int = 6
    prefetch: int = 6

    @property
    def threads(self) -> int:
        return 128 * (self.groups + 1)

    @property
    def registers(self) -> int:
        """Of a consumer thread, when the copying warpgroup keeps 40 of what the block gets at launch."""
        at_launch = min(255, 65536 // self.threads) // 8 * 8
        return min(240, (at_launch * (self.groups + 1) - 40) // self.groups // 8 * 8)

    def macros(self, k: int, out32: bool = False) -> dict[str, int]:
        return {
            "E4M3": 1, "FP16": 0, "OUT32": int(out32), "TOKENS": _TOKENS, "GROUPS": self.groups, "STAGES": self.stages,
            "PREFETCH": self.prefetch, "REGISTERS": self.registers, "KEPT": min(8, ceil_div(k, 2048)),
        }  # fmt: skip

    def grid(self, m: int, n: int) -> tuple[int, int, int]:
        """Blocks that share weights are neighbours."""
        return ceil_div(m, _TOKENS), 1, ceil_div(n, 64 * self.groups)

    def image_bytes(self, m: int, k: int) -> int:
        """Of x in the kernel's order."""
        return ceil_div(m, _TOKENS) * ceil_div(k, 128) * _TOKENS * 128

    def shared_bytes(self) -> int:
        main = self.stages * _TOKENS * 128 + 4 * self.groups * self.prefetch * 640
        return max(main, _TOKENS * (64 * self.groups + 4) * 4) + 16 * self.stages


def one_kernel_wins(m: int, n: int, k: int) -> bool:
    """Whether ``run_w4a8`` was measured to be faster than writing the weight out for PyTorch's FP8 matmul."""
    return m <= _MOST_ROWS


def run_w4a8(
    plan: W4a8Plan,
    x_MK: Tensor,
    codes: Tensor,
    block_scales: Tensor,
    tensor_scale: Tensor,
    row_top: Tensor,
    bias: Tensor | None,
    activation: str,
    n: int,
    out_dtype: torch.dtype = torch.bfloat16,
) -> Tensor:
    """``round_rows``, then ``w4a8_wgmma``, for contiguous bf16 rows; K and N are multiples of 16. ``out_dtype``: bf16 or fp32.

    Rows become what `w4a8.quantize_rows` says; products are summed in fp32 with a rounding of the tensor cores' every 128 columns.
    """
    m, k = x_MK.shape
    device, macros = x_MK.device, plan.macros(k, out_dtype == torch.float32)
    if x_MK.data_ptr() % 16:
        x_MK = x_MK.clone()
    image = torch.empty(plan.image_bytes(m, k), dtype=torch.uint8, device=device)
    scale_M = torch.empty(m, dtype=torch.float32, device=device)
    y_MN = torch.empty(m, n, dtype=out_dtype, device=device)
    kernel(W4A8_FILES, "round_rows", macros, device).launch((m, 1, 1), 256, 64, (x_MK, image, scale_M, m, k))
    act = ACTIVATIONS.index(activation)
    args = (image, scale_M, codes, block_scales, tensor_scale, row_top, bias, y_MN, m, n, k, act)
    kernel(W4A8_FILES, "w4a8_wgmma", macros, device).launch(plan.grid(m, n), plan.threads, plan.shared_bytes(), args)
    return y_MN
