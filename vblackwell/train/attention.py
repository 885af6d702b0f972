"""Which attention backend runs: looked up beforehand for the run's real shapes, told, and narrowed where the run demands it.

With ``--use-flash-attn`` the dispatcher (nn/attention/backends.py) names a fused backend, the decoder runs that one or raises, and where
there is none the run is refused: it must not end in the slow path unnoticed. Without the flag torch chooses. Deterministic runs leave
cuDNN and the memory-efficient kernel out: neither has a deterministic backward.
"""

from __future__ import annotations

from contextlib import AbstractContextManager, nullcontext

import torch
from torch.nn.attention import SDPBackend, sdpa_kernel

from vblackwell.errors import Unsupported
from vblackwell.nn.attention import backends as dispatcher

FUSED = [SDPBackend.CUDNN_ATTENTION, SDPBackend.FLASH_ATTENTION, SDPBackend.EFFICIENT_ATTENTION]


def attention_backends(*, use_flash_attn: bool, deterministic: bool) -> AbstractContextManager[object]:
    """A context in which scaled_dot_product_attention may only use what the flags allow."""
    if deterministic:
        return sdpa_kernel([SDPBackend.FLASH_ATTENTION] + ([] if use_flash_attn else [SDPBackend.MATH]))
    return sdpa_kernel(FUSED) if use_flash_attn else nullcontext()


def fused_backend(
    num_heads: int, num_kv_heads: int, head_dim: int, seq_length: int, dtype: torch.dtype, device: torch.device, *,
    deterministic: bool = False,
) -> str:  # fmt: skip
    """The dispatcher's choice for causal training of this shape among the fused backends: the fastest measured here, or the stated order's.

    FlexAttention, which compiles, is not among them.

    Raises:
        Unsupported: all refuse; the message has their reasons.
    """
    capability = torch.cuda.get_device_capability(device) if device.type == "cuda" else (0, 0)
    request = dispatcher.AttentionRequest(
        device.type, capability, dtype, num_heads, num_kv_heads, seq_length, seq_length, head_dim, causal=True,
        gradient=True, deterministic=deterministic, gpu=device.index,
    )  # fmt: skip
    names = ("triton", "cudnn", "flash", "efficient")
    reasons = {name: why for name, why in dispatcher.attention_backends(request).items() if name in names}
    for name, why in reasons.items():
        if not why:
            return name
    said = " | ".join(f"{name}: {'; '.join(why)}" for name, why in reasons.items())
    raise Unsupported(f"{_refused(num_heads, head_dim, dtype, device)}. {said}")


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
        "the flag out, or add --mixed-precision"
    )
