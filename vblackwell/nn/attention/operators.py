"""How backends run that are not the own kernel: `run_sdpa` and `run_math` anywhere, `operator` where nothing is traced.

Legend: B batch, N query heads, K key heads, S queries, T keys, H head width.
"""

from collections.abc import Callable
from typing import Any

import torch
from torch import Tensor
from torch.nn import functional
from torch.nn.attention import SDPBackend, sdpa_kernel

from vblackwell.kernels.attention import op
from vblackwell.kernels.attention.reference import attention_reference
from vblackwell.nn.attention.request import AttentionRequest, Variant

Run = Callable[[Tensor, Tensor, Tensor, Variant], Tensor]
# PyTorch's operators by themselves, which are private; a release that has other ones runs them through `run_sdpa`.
_TORCH: Any = torch
_OPERATORS = ("flash_attention", "efficient_attention", "cudnn_attention", "flash_attention_for_cpu")
ROW = 16  # elements: 'efficient' reads a bias whose rows are at multiples of 32 bytes
HAS_OPERATORS = all(hasattr(torch, f"_scaled_dot_product_{name}") for name in _OPERATORS)


def run_math(q: Tensor, k: Tensor, v: Tensor, variant: Variant) -> Tensor:
    mask, causal, bottom_right, window, scale, softcap, slopes_N, dropout = variant
    left, right = op.bounds(causal, window)
    sees: dict[str, Any] = {"mask": mask, "left": left, "right": right, "bottom_right": bottom_right}
    softcap = softcap or 0.0
    return attention_reference(q, k, v, **sees, scale=scale, softcap=softcap, slopes_N=slopes_N, dropout=dropout)


def run_sdpa(backend: SDPBackend, q: Tensor, k: Tensor, v: Tensor, variant: Variant) -> Tensor:
    mask = variant.mask
    assert variant.window is None, "bounds become a mask in `operator` alone"
    if mask is not None:
        mask = mask if mask.dtype == torch.bool else mask.to(q.dtype)
        mask = mask[(None,) * (4 - mask.dim())]  # the CPU's flash takes two or four dimensions
        if mask.shape[-1] != k.shape[2]:  # 'efficient' reads consecutive keys: it takes no stride of zero
            mask = mask.expand(*mask.shape[:-1], k.shape[2]).contiguous()
    grouped: dict[str, Any] = {}
    if q.shape[1] != k.shape[1]:  # a branch, because sizes may be symbols under torch.compile
        if backend == SDPBackend.EFFICIENT_ATTENTION:
            k, v = _repeated(k, q.shape[1]), _repeated(v, q.shape[1])
        else:
            grouped["enable_gqa"] = True
    how = {"scale": variant.scale, **grouped}
    with sdpa_kernel(backend):
        return functional.scaled_dot_product_attention(q, k, v, mask, variant.dropout, variant.causal, **how)


def _repeated(x_BKTH: Tensor, heads: int) -> Tensor:
    """Every key head once for each of its query heads, for 'efficient', which cannot share them."""
    return x_BKTH.repeat_interleave(heads // x_BKTH.shape[1], dim=1)


def _rows(q: Tensor, keys: int, multiple: int, *lead: int) -> Tensor:
    """Memory for a bias (..., T) in the queries' type, rows at multiples of ``multiple`` elements."""
    padded = -(-keys // multiple) * multiple
    if padded == keys:
        return q.new_empty((*lead, keys))
    return q.new_zeros((*lead, padded))[..., :keys]  # what pads a row is read, multiplied by zero: it must be finite


def _bias(mask: Tensor, q: Tensor, keys: int, multiple: int) -> Tensor:
    """``mask`` as numbers to add, (1 or B, 1 or N, 1 or S, T), rows at multiples of ``multiple`` elements."""
    mask = mask[(None,) * (4 - mask.dim())] if mask.dim() < 4 else mask
    for dim in range(3):
        if mask.stride(dim) == 0 and mask.shape[dim] > 1:
            mask = mask.narrow(dim, 0, 1)  # of an expanded mask what is there
    if mask.dtype == q.dtype and mask.shape[3] == keys:
        *steps, last = mask.stride()
        if last == 1 and not mask.data_ptr() % 32 and not any(step % multiple for step in steps):
            return mask
    bias = _rows(q, keys, multiple, *mask.shape[:3])
    if mask.dtype == torch.bool:
        return torch.log(mask.expand(bias.shape), out=bias)  # of 1 it is 0, of 0 -inf: in one launch
    return bias.copy_(mask)


def _bounds_bias(q: Tensor, keys: int, left: int | None, right: int | None, offset: int) -> Tensor:
    """Bounds, as device.py has them, as numbers to add, (S, T)."""
    hidden = q.new_full((q.shape[2], -(-keys // ROW) * ROW), -torch.inf)
    parts = [] if right is None else [hidden.triu(offset + right + 1)]
    parts += [] if left is None else [hidden.tril(offset - left - 1)]
    return (parts[0] if len(parts) == 1 else parts[0].add_(parts[1]))[:, :keys]


def operator(name: str, r: AttentionRequest, how: Variant) -> Run | None:
    """What backend ``name`` runs for such requests where nothing is traced, of ``how`` without its tensors; None: what
    it runs anywhere.

    PyTorch's are called without `sdpa_kernel`, which takes 20 us and turns switches that all threads see.
    """
    scale, causal, dropout, learns = how.scale, how.causal, how.dropout, r.gradient
    if name == "triton":
        own = op.dense_at_once(learns, r.queries, r.keys, r.head**-0.5 if scale is None else scale, how)
        return lambda q, k, v, now: own(q, k, v, now.mask, now.alibi_slopes_N)
    if HAS_OPERATORS and name == "cudnn" and r.mask == "none":
        run = _TORCH._scaled_dot_product_cudnn_attention
        return lambda q, k, v, now: run(q, k, v, None, learns, dropout, causal, scale=scale)[0]
    if HAS_OPERATORS and name == "flash" and r.device == "cpu" and r.mask == "none":
        run = _TORCH._scaled_dot_product_flash_attention_for_cpu
        return lambda q, k, v, now: run(q, k, v, dropout, causal, scale=scale)[0]
    if HAS_OPERATORS and name == "flash" and r.device == "cuda" and r.head % 8 == 0:  # else PyTorch pads it
        run = _TORCH._scaled_dot_product_flash_attention
        return lambda q, k, v, now: run(q, k, v, dropout, causal, scale=scale)[0]
    if HAS_OPERATORS and name == "cudnn":  # it reads a bias as it is, and takes no bounds
        run = _TORCH._scaled_dot_product_cudnn_attention

        def cudnn(q: Tensor, k: Tensor, v: Tensor, now: Variant) -> Tensor:
            assert now.mask is not None
            return run(q, k, v, _bias(now.mask, q, r.keys, 1), learns, dropout, False, scale=scale)[0]

        return cudnn
    if HAS_OPERATORS and name == "efficient" and not r.mask_gradient:
        run = _TORCH._scaled_dot_product_efficient_attention
        seen = (*op.bounds(causal, how.window), r.keys - r.queries if how.bottom_right else 0)

        def efficient(q: Tensor, k: Tensor, v: Tensor, now: Variant) -> Tensor:
            if r.heads != r.kv_heads:
                k, v = _repeated(k, r.heads), _repeated(v, r.heads)
            bias = None if now.mask is None else _bias(now.mask, q, r.keys, ROW)
            if r.bounded:
                bounds = _bounds_bias(q, r.keys, *seen)
                rows = None if bias is None else _rows(q, r.keys, ROW, *bias.shape[:2], r.queries)
                bias = bounds if bias is None else torch.add(bias, bounds, out=rows)
            bias = None if bias is None else bias.expand(r.batch, r.heads, r.queries, r.keys)
            return run(q, k, v, bias, learns, dropout, causal and not r.bounded, scale=scale)[0]

        return efficient
    return None
