"""Which attention backend runs: asked of torch for the run's real shapes, and narrowed where the run demands it.

``--use-flash-attn`` must not end in the slow path unnoticed, and torch chooses silently; so the choice is looked up
beforehand and told. Deterministic runs leave cuDNN and the memory-efficient kernel out: neither has a deterministic backward.
"""

from __future__ import annotations

from contextlib import AbstractContextManager, nullcontext

import torch
from torch.nn.attention import SDPBackend, sdpa_kernel

from vblackwell.errors import Unsupported

FUSED = [SDPBackend.CUDNN_ATTENTION, SDPBackend.FLASH_ATTENTION, SDPBackend.EFFICIENT_ATTENTION]


def attention_backends(*, use_flash_attn: bool, deterministic: bool) -> AbstractContextManager[object]:
    """A context in which scaled_dot_product_attention may only use what the flags allow."""
    if deterministic:
        return sdpa_kernel([SDPBackend.FLASH_ATTENTION] + ([] if use_flash_attn else [SDPBackend.MATH]))
    return sdpa_kernel(FUSED) if use_flash_attn else nullcontext()


def chosen_backend(
    num_heads: int, num_kv_heads: int, head_dim: int, seq_length: int, dtype: torch.dtype, device: torch.device
) -> str:
    """What torch takes for a causal head shape in the current context: 'flash', 'cudnn', 'efficient' or 'math'.

    Raises:
        Unsupported: none that is allowed takes this shape and type.
    """
    query = torch.empty(1, num_heads, seq_length, head_dim, dtype=dtype, device=device, requires_grad=True)
    key = torch.empty(1, num_kv_heads, seq_length, head_dim, dtype=dtype, device=device, requires_grad=True)
    try:
        choice = torch._fused_sdp_choice(  # pyright: ignore[reportPrivateImportUsage]
            query, key, key, None, 0.0, True, enable_gqa=num_heads != num_kv_heads
        )
    except RuntimeError as error:  # "No viable backend": some devices raise, others answer with a number of no backend
        raise _refused(num_heads, head_dim, dtype, device) from error
    names = {
        SDPBackend.CUDNN_ATTENTION.value: "cudnn", SDPBackend.FLASH_ATTENTION.value: "flash",
        SDPBackend.EFFICIENT_ATTENTION.value: "efficient", SDPBackend.MATH.value: "math",
    }  # fmt: skip
    if choice not in names:
        raise _refused(num_heads, head_dim, dtype, device)
    return names[choice]


def _refused(num_heads: int, head_dim: int, dtype: torch.dtype, device: torch.device) -> Unsupported:
    return Unsupported(
        f"--use-flash-attn: no fused attention takes {num_heads} heads of {head_dim} in {dtype} on {device}: leave "
        "the flag out, or add "
        "--mixed-precision"
    )
