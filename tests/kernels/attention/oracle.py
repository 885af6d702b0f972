"""Cases of the attention kernels, and the float64 answers to them."""

from __future__ import annotations

from collections.abc import Iterator
from contextlib import contextmanager
from typing import Any
from unittest import mock

import torch
from torch import Tensor

from vblackwell.kernels.attention.op import bounds
from vblackwell.kernels.attention.plan import AttentionPlan
from vblackwell.kernels.attention.reference import attention_reference

DEVICE = "cuda" if torch.cuda.is_available() else "cpu"


def normal(*shape: int, dtype: torch.dtype = torch.float32, seed: int = 0) -> Tensor:
    """Standard normal values, the same on every device."""
    return torch.randn(*shape, generator=torch.Generator().manual_seed(seed)).to(DEVICE, dtype)


def inputs(
    batch: int,
    heads: int,
    kv_heads: int,
    num_queries: int,
    num_keys: int,
    head: int,
    dtype: torch.dtype = torch.float32,
) -> list[Tensor]:
    """Queries, keys and values as projections give them: transposed views of (B, S, N, H)."""
    shapes = ((num_queries, heads), (num_keys, kv_heads), (num_keys, kv_heads))
    return [normal(batch, *shape, head, dtype=dtype, seed=i).transpose(1, 2) for i, shape in enumerate(shapes)]


def gradients(function: Any, tensors: list[Tensor], dtype: torch.dtype | None = None) -> list[Tensor]:
    """Output of ``function`` and gradients of all ``tensors``, for an output gradient that depends on the
    shape alone.
    """
    leaves = [x.detach().to(dtype).requires_grad_() for x in tensors]
    out = function(*leaves)
    # rounded to the narrow type, so that a wide computation is given the same
    dout = normal(*out.shape, dtype=tensors[0].dtype, seed=9).to(out.dtype)
    return [out.detach(), *torch.autograd.grad(out, leaves, dout)]


def plain(
    *,
    mask: Tensor | None = None,
    causal: bool = False,
    bottom_right: bool = False,
    window: int | None = None,
    scale: float | None = None,
    softcap: float | None = None,
    alibi_slopes_N: Tensor | None = None,
    dropout: float = 0.0,
    keep_BNST: Tensor | None = None,
) -> Any:
    """``attention_reference`` with the options of ``flash_attention``."""
    left, right = bounds(causal, window)

    def function(q: Tensor, k: Tensor, v: Tensor) -> Tensor:
        return attention_reference(
            q,
            k,
            v,
            mask=mask,
            left=left,
            right=right,
            bottom_right=bottom_right,
            scale=scale,
            softcap=softcap or 0.0,
            slopes_N=alibi_slopes_N,
            dropout=dropout,
            keep_BNST=keep_BNST,
        )

    return function


def relative(got: Tensor, exact: Tensor) -> float:
    """Relative RMS error; NaN counts as infinite."""
    assert got.shape == exact.shape
    error = (got.double() - exact.double()).norm().item() / (exact.double().norm().item() or 1.0)
    return error if error == error else float("inf")


@contextmanager
def use_plans(**plans: AttentionPlan) -> Iterator[None]:
    """Inside, kernels ('forward', 'dq', 'dkv') run by these plans; which forward it is, too, the plan says."""
    from vblackwell.kernels.attention.launch import _Call
    from vblackwell.kernels.runtime import triton_launch

    usual, usually_specialized = _Call.plan, _Call.specialized

    def plan(call: _Call, kernel: str) -> AttentionPlan:
        return plans[kernel] if kernel in plans else usual(call, kernel)

    def specialized(call: _Call) -> AttentionPlan | None:
        if "forward" not in plans:
            return usually_specialized(call)
        return plans["forward"] if plans["forward"].specialized else None

    kept: dict[object, object] = {}  # none for plans of before
    with (
        mock.patch.object(_Call, "plan", plan),
        mock.patch.object(_Call, "specialized", specialized),
        mock.patch.object(triton_launch, "_launches", kept),
        mock.patch.object(triton_launch, "_last", {}),
    ):
        yield
