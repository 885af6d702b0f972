"""Which type the forward and backward compute in.

bf16 has fp32's range and needs no loss scaling, so it is taken wherever the device multiplies in it; fp16 with a
scaler is for GPUs before Ampere. Masters and optimizer states stay fp32 in every case.
"""

from __future__ import annotations

from dataclasses import dataclass

import torch


@dataclass(frozen=True)
class Precision:
    """The compute type and what follows from it.

    Attributes:
        compute_dtype: None for the weights' own fp32.
        needs_scaler: whether small gradients would vanish without loss scaling.
    """

    compute_dtype: torch.dtype | None
    needs_scaler: bool

    @property
    def name(self) -> str:
        return str(self.compute_dtype or torch.float32).removeprefix("torch.")


def has_bf16(device: torch.device) -> bool:
    """Whether ``device`` computes in bf16 itself (compute capability 8.0; every CPU torch runs on)."""
    return device.type != "cuda" or torch.cuda.get_device_capability(device) >= (8, 0)


def choose_precision(precision: str, mixed_precision: bool, device: torch.device) -> Precision:
    """What ``--precision`` and ``--mixed-precision`` mean on ``device``."""
    if precision == "auto":
        precision = ("bf16" if has_bf16(device) else "fp16") if mixed_precision else "fp32"
    dtype = {"fp32": None, "bf16": torch.bfloat16, "fp16": torch.float16}[precision]
    return Precision(dtype, needs_scaler=dtype is torch.float16)
