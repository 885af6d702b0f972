"""Tables of the rotary position embedding (Su et al., RoFormer, arXiv:2104.09864), in the half-split layout of Hugging Face's Llama.

Cosines and sines are computed anew in every forward, in fp32, once for all layers: a few microseconds, against tables
that would be cast by ``model.to(bf16)``, be lost under ``to_empty`` and turn into inference tensors if the first call
happened under ``inference_mode``. ``kernels/pointwise/rows.py`` applies them.

Legend: B batch, S sequence, H head width.
"""

from __future__ import annotations

import torch
from torch import Tensor


def rotary_tables_at(positions_BS: Tensor, head_dim: int, theta: float) -> tuple[Tensor, Tensor]:
    """Cosine and sine, each (B, S, H) in fp32, of the positions given."""
    with torch.no_grad():
        angles = positions_BS.to(torch.float32)[..., None] * _frequencies(head_dim, theta, positions_BS.device)
        angles_BSH = torch.cat((angles, angles), dim=-1)
        return angles_BSH.cos(), angles_BSH.sin()


def _frequencies(head_dim: int, theta: float, device: torch.device) -> Tensor:
    exponents = torch.arange(0, head_dim, 2, dtype=torch.float32, device=device) / head_dim
    return 1.0 / (theta**exponents)


def rotary_tables(start: int, length: int, head_dim: int, theta: float, device: torch.device) -> tuple[Tensor, Tensor]:
    """Cosine and sine, each (S, H) in fp32, of positions ``start`` to ``start + length``."""
    with torch.no_grad():
        positions = torch.arange(start, start + length, dtype=torch.float32, device=device)
        angles = positions[:, None] * _frequencies(head_dim, theta, device)
        angles_SH = torch.cat((angles, angles), dim=-1)
        return angles_SH.cos(), angles_SH.sin()
