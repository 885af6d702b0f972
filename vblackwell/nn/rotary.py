"""Rotary position embedding (Su et al., RoFormer, arXiv:2104.09864), in the half-split layout of Hugging Face's Llama.

Cosines and sines are computed anew in every forward, in fp32, once for all layers: a few microseconds, against tables that
would be cast by ``model.to(bf16)``, be lost under ``to_empty`` and turn into inference tensors if the first call happened
under ``inference_mode``.

Legend: B batch, S sequence, N heads, H head width.
"""

from __future__ import annotations

import torch
from torch import Tensor


def rotary_tables(
    start: int, length: int, head_dim: int, theta: float, device: torch.device, dtype: torch.dtype
) -> tuple[Tensor, Tensor]:
    """Cosine and sine, each (S, H), of positions ``start`` to ``start + length``; computed in fp32, returned in ``dtype``."""
    with torch.no_grad():
        exponents = torch.arange(0, head_dim, 2, dtype=torch.float32, device=device) / head_dim
        frequencies = 1.0 / (theta**exponents)
        positions = torch.arange(start, start + length, dtype=torch.float32, device=device)
        angles = positions[:, None] * frequencies
        angles_SH = torch.cat((angles, angles), dim=-1)
        return angles_SH.cos().to(dtype), angles_SH.sin().to(dtype)


def rotate(x_BNSH: Tensor, cos_SH: Tensor, sin_SH: Tensor) -> Tensor:
    """``x_BNSH`` with each pair (h, h + H/2) turned by its position's angle."""
    left, right = x_BNSH.chunk(2, dim=-1)
    return x_BNSH * cos_SH + torch.cat((-right, left), dim=-1) * sin_SH
