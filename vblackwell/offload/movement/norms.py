"""The 2-norm of a gradient, with the same bits on GPU and CPU and for gradients of either width."""

from __future__ import annotations

import torch

from vblackwell.kernels.optimizer.adamw import BLOCK, norm_of, square_sums


def gradient_norm(gradient: torch.Tensor) -> torch.Tensor:
    """The norm of a flat bf16, fp16 or fp32 ``gradient``, an fp32 scalar where it is; no synchronisation."""
    sums = torch.empty(-(-gradient.numel() // BLOCK), dtype=torch.float32, device=gradient.device)
    square_sums(gradient, sums)
    return norm_of([sums])


def norm_of_norms(norms: list[torch.Tensor], device: torch.device) -> torch.Tensor:
    """The 2-norm of scalar ``norms`` in their order, summed on ``device``: CPU and GPU add in different orders."""
    return torch.linalg.vector_norm(
        torch.stack([norm.to(device, non_blocking=device.type == "cuda") for norm in norms])
    )
