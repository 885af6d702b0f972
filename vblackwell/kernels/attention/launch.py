"""Launches of the attention kernels. Import it only where they run: triton takes half a second."""
# What @triton.jit makes of a function has no type.
# pyright: reportCallIssue=false, reportGeneralTypeIssues=false, reportArgumentType=false, reportIndexIssue=false

from __future__ import annotations

import contextlib
import dataclasses
from collections.abc import Iterator
from contextvars import ContextVar
from dataclasses import dataclass
from typing import Any

import torch
import triton
from torch import Tensor
from triton.tools.tensor_descriptor import TensorDescriptor

from vblackwell.errors import ConfigurationError
from vblackwell.kernels.attention.backward import key_gradient, query_gradient
from vblackwell.kernels.attention.blocks import MaskBits, TileLists, bits_of, list_tiles, mask_strides
from vblackwell.kernels.attention.device import INTERPRETED
from vblackwell.kernels.attention.forward import attend
from vblackwell.kernels.attention.plan import (
    SPECIALIZED_TRITON,
    AttentionPlan,
    lse_of,
    padded_head,
    specialized_plan,
    tuned,
)
from vblackwell.kernels.runtime.registry import empty_of

_FORCED: ContextVar[dict[str, AttentionPlan]] = ContextVar("vblackwell_attention_plans", default={})  # noqa: B039


@dataclass(frozen=True)
class Options:
    """What op.py's op takes in addition to queries, keys and values; see there."""

    mask: Tensor | None
    slopes_N: Tensor | None
    seed: Tensor | None
    q_starts: Tensor | None
    k_starts: Tensor | None
    max_q: int
    max_k: int
    scale: float
    left: int | None
    right: int | None
    bottom_right: bool
    softcap: float
    dropout: float

    @property
    def mask_kind(self) -> str:
        """'none', 'boolean' or 'additive'."""
        if self.mask is None:
            return "none"
        return "additive" if self.mask.is_floating_point() else "boolean"


@contextlib.contextmanager
def use_plans(**plans: AttentionPlan) -> Iterator[None]:
    """Inside, kernels ('forward', 'dq', 'dkv') run by these plans. For measurements and tests.

    In this thread alone: on a GPU autograd runs backward in another one, so call ``backward`` here for 'dq' and 'dkv'.
    """
    token = _FORCED.set({**_FORCED.get(), **plans})
    try:
        yield
    finally:
        _FORCED.reset(token)


class _Call:
    """Everything that the three kernels are given in common."""

    def __init__(self, q: Tensor, k: Tensor, v: Tensor, options: Options) -> None:
        self.options = options
        self.varlen = options.q_starts is not None
        self.q, self.k, self.v = (self.heads_first(x) for x in (q, k, v))
        self.num_heads, self.kv_heads, self.head = self.q.shape[1], self.k.shape[1], self.q.shape[3]
        self.batch = options.q_starts.shape[0] - 1 if options.q_starts is not None else self.q.shape[0]
        self.q_length, self.k_length = options.max_q, options.max_k
        mask = options.mask
        if mask is not None:
            for dim, stride in enumerate(mask.stride()):  # of an expanded mask only what is there is packed and judged
                mask = mask.narrow(dim, 0, 1) if stride == 0 and mask.shape[dim] > 1 else mask
        self.mask = mask.view(torch.uint8) if mask is not None and mask.dtype == torch.bool else mask
        self.bits: MaskBits | None = None

    def heads_first(self, x: Tensor) -> Tensor:
        """(B, N, S, H) of a dense tensor, (1, N, total, H) of packed sequences (total, N, H); last stride 1."""
        x = x.transpose(0, 1)[None] if self.varlen else x
        return x if x.stride(-1) == 1 or x.shape[-1] == 1 else x.contiguous()

    def strides(self, x: Tensor) -> tuple[int, int, int]:
        """Of batch (none where sequences are packed), head and row."""
        return (0 if self.varlen else x.stride(0), x.stride(1), x.stride(2))

    def plan(self, kernel: str) -> AttentionPlan:
        length = max(self.q_length, self.k_length)
        options, kind = self.options, self.options.mask_kind
        if options.softcap or options.dropout or options.slopes_N is not None:
            kind = "scored"  # takes registers, with any mask
        found = tuned(kernel, self.head, self.q.dtype, length, kind, self.q.device)
        if kind == "additive" and self.mask is not None and self.mask.element_size() > self.q.element_size():
            # What was measured with a mask of 16 bits may hold more tiles than fit of one of 32.
            found = dataclasses.replace(found, stages=min(found.stages, 3))
        return _FORCED.get().get(kernel, found)

    def specialized(self, plan: AttentionPlan) -> AttentionPlan | None:
        """The plan of Hopper's own forward, where it computes this; ``use_plans`` decides if it gave one."""
        options, forced = self.options, "forward" in _FORCED.get()
        scored = options.softcap or options.dropout or options.slopes_N is not None
        fits = (
            self.q.device.type == "cuda" and not INTERPRETED and self.q.element_size() == 2 and self.head >= 32
            and not scored and self.takes_tma(self.q, self.k, self.v)
            and (options.mask_kind != "additive" or self.describes_mask())
        )  # fmt: skip
        if forced and plan.specialized and not fits:
            raise ConfigurationError(f"{plan}: the forward with specialised warps does not compute this")
        if forced or not fits or not triton.__version__.startswith(SPECIALIZED_TRITON):
            return plan if forced and plan.specialized else None
        capability = torch.cuda.get_device_capability(self.q.device)
        return specialized_plan(self.head, self.q.element_size(), capability, options.mask_kind)

    def takes_tma(self, *tensors: Tensor) -> bool:
        return not self.varlen and all(
            x.data_ptr() % 16 == 0 and all(stride * x.element_size() % 16 == 0 for stride in x.stride()[:-1])
            and x.numel() > 0 and all(x.stride(i) > 0 for i in range(3))
            for x in tensors
        )  # fmt: skip

    def described(self, x: Tensor, rows: int, tma: bool) -> Any:
        if not tma:
            return x
        return TensorDescriptor(x, list(x.shape), list(x.stride()), [1, 1, rows, padded_head(self.head)])

    def pack(self, with_keys: bool) -> None:
        """Put a boolean mask into bits, once for all kernels that follow."""
        if self.mask is not None and self.options.mask_kind == "boolean":
            self.bits = bits_of(self.mask, with_keys)

    def lists(self, plan: AttentionPlan, by_column: bool) -> TileLists | None:
        if self.mask is None:
            return None
        return list_tiles(
            self.mask, self.bits, (self.q_length, self.k_length), (plan.rows, plan.columns), self.offset,
            self.options.left, self.options.right, by_column,
        )  # fmt: skip

    @property
    def offset(self) -> int:
        return self.k_length - self.q_length if self.options.bottom_right else 0

    def read_mask(self, by_column: bool) -> Tensor | None:
        """What kernels load: numbers (B, N, S, T), or words followed by their lines, each 1 where broadcast."""
        if self.bits is None:
            return self.mask
        words = self.bits.by_key if by_column else self.bits.by_query
        assert words is not None  # ``pack`` was asked for both
        return words.transpose(2, 3)

    def describes_mask(self) -> bool:
        """Whether tiles of an additive mask come through the copy engine: 16 bits wide, not broadcast in a tile, laid
        out for it.
        """
        mask = self.mask
        if mask is None or mask.element_size() != 2:
            return False
        steps = [stride for size, stride in zip(mask.shape[:3], mask.stride(), strict=False) if size > 1]
        return (
            tuple(mask.shape[2:]) == (self.q_length, self.k_length) and mask.stride(3) == 1
            and mask.data_ptr() % 16 == 0 and all(stride > 0 and stride % 8 == 0 for stride in steps)
        )  # fmt: skip

    def pointers(self, lists: TileLists | None, by_column: bool) -> tuple[Any, ...]:
        """mask, items, counts, order, slopes, seed, starts of queries and keys; some tensor stands in where there is
        none.
        """
        options, none = self.options, self.q
        given = (
            self.read_mask(by_column), lists and lists.items, lists and lists.counts, lists and lists.order,
            options.slopes_N,
            options.seed, options.q_starts, options.k_starts,
        )  # fmt: skip
        return tuple(none if x is None else x for x in given)

    def numbers(self, lse: Tensor, lists: TileLists | None, by_column: bool) -> tuple[Any, ...]:
        options, mask = self.options, self.read_mask(by_column)
        rows = (0, lse.stride(0)) if self.varlen else (lse.stride(0), lse.stride(1))
        listed = (lists.list_batch, lists.list_head, lists.items.shape[1]) if lists else (0, 0, 0)
        return (
            *rows, *((0, 0, 0, 0) if mask is None else mask_strides(mask)), *listed, self.q_length, self.k_length,
            options.left or 0, options.right or 0, options.scale, options.softcap, options.dropout,
        )  # fmt: skip

    def constants(self, plan: AttentionPlan, tma: bool) -> dict[str, Any]:
        options = self.options
        return {
            "GROUP": self.num_heads // self.kv_heads,
            "MASK": {"none": 0, "boolean": 1, "additive": 2}[options.mask_kind],
            "HAS_LEFT": options.left is not None,
            "HAS_RIGHT": options.right is not None,
            "BOTTOM_RIGHT": options.bottom_right,
            "SOFTCAP": options.softcap > 0,
            "ALIBI": options.slopes_N is not None,
            "DROPOUT": options.dropout > 0,
            "VARLEN": self.varlen,
            "H": self.head,
            "D": padded_head(self.head),
            "ROWS": plan.rows,
            "COLUMNS": plan.columns,
            "PRECISION": "ieee" if self.q.dtype == torch.float32 else "tf32",
            "TMA": tma,
            "ENDS": self.open_ended(plan),
            "TOGETHER": plan.together,
            "num_warps": plan.warps,
            "num_stages": plan.stages,
            # Addresses of single rows take the registers that descriptors do not.
            **({"maxnreg": plan.registers} if plan.registers and tma == plan.tma else {}),
        }

    def open_ended(self, plan: AttentionPlan) -> bool:
        """Whether a mask's tiles may have visible places beyond the last key."""
        cut = self.k_length % plan.columns != 0
        return cut and self.mask is not None and (self.bits is None or self.mask.shape[3] == 1)

    def even(self, plan: AttentionPlan) -> bool:
        return not self.varlen and self.k_length % plan.columns == 0


def forward(q: Tensor, k: Tensor, v: Tensor, options: Options) -> tuple[Tensor, Tensor]:
    """``(out, log2-sum-exp)``; the second is (B, N, S), or (N, total) of packed sequences."""
    call = _Call(q, k, v, options)
    result = empty_of(q)
    lse = lse_of(q)
    plan = call.plan("forward")
    if q.numel() == 0:
        return result, lse
    if k.numel() == 0:
        return result.zero_(), lse.fill_(float("inf"))
    out = call.heads_first(result)
    special = call.specialized(plan)
    call.pack(with_keys=False)
    lists = call.lists(special or plan, by_column=False)
    if special is not None:
        from vblackwell.kernels.attention import hopper as attention_hopper  # triton.experimental: only where it runs

        attention_hopper.launch(
            call.q, call.k, call.v, out, lse, (options.left, options.right), call.offset, options.scale, special,
            call.read_mask(by_column=False), lists, call.open_ended(special),
        )  # fmt: skip
        return result, lse
    tma = plan.tma and call.takes_tma(call.q, call.k, call.v)
    ahead = plan.ahead and call.mask is not None
    attend[(triton.cdiv(call.q_length, plan.rows), call.num_heads, call.batch)](
        call.described(call.q, plan.rows, tma), call.described(call.k, plan.columns, tma),
        call.described(call.v, plan.columns, tma), out, lse, *call.pointers(lists, False), *call.strides(call.q),
        *call.strides(call.k), *call.strides(call.v), *call.strides(out), *call.numbers(lse, lists, False),
        **call.constants(plan, tma), EVEN=call.even(plan), AHEAD=ahead, STAGES=plan.stages if ahead else 0,
    )  # fmt: skip
    return result, lse


def backward(
    dout: Tensor, q: Tensor, k: Tensor, v: Tensor, out: Tensor, lse: Tensor, options: Options
) -> tuple[Tensor, Tensor, Tensor]:
    """Gradients of queries, keys and values."""
    call = _Call(q, k, v, options)
    results = empty_of(q), empty_of(k), empty_of(v)
    if q.numel() == 0 or k.numel() == 0:
        return results[0].zero_(), results[1].zero_(), results[2].zero_()
    dq, dk, dv = (call.heads_first(x) for x in results)
    dout, out = call.heads_first(dout), call.heads_first(out)
    delta, start = torch.empty_like(lse), torch.empty_like(lse)
    inputs = (call.q, call.k, call.v, dout)

    call.pack(with_keys=True)
    plan = call.plan("dq")
    tma = plan.tma and call.takes_tma(*inputs)
    lists = call.lists(plan, by_column=False)
    sizes = (plan.rows, plan.columns, plan.columns, plan.rows)
    q_in, k_in, v_in, dout_in = (call.described(x, size, tma) for x, size in zip(inputs, sizes, strict=True))
    query_gradient[(triton.cdiv(call.q_length, plan.rows), call.num_heads, call.batch)](
        q_in, k_in, v_in, out, dout_in, lse, delta, start, dq, *call.pointers(lists, False),
        *call.strides(call.q), *call.strides(call.k), *call.strides(call.v), *call.strides(out), *call.strides(dout),
        *call.strides(dq), *call.numbers(lse, lists, False), **call.constants(plan, tma), EVEN=call.even(plan),
    )  # fmt: skip

    plan = call.plan("dkv")
    tma = plan.tma and call.takes_tma(*inputs)
    lists = call.lists(plan, by_column=True)
    sizes = (plan.rows, plan.columns, plan.columns, plan.rows)
    q_in, k_in, v_in, dout_in = (call.described(x, size, tma) for x, size in zip(inputs, sizes, strict=True))
    key_gradient[(triton.cdiv(call.k_length, plan.columns), call.kv_heads, call.batch)](
        q_in, k_in, v_in, dout_in, lse, delta, start, dk, dv, *call.pointers(lists, True),
        *call.strides(call.q), *call.strides(call.k), *call.strides(call.v), *call.strides(dout), *call.strides(dk),
        *call.strides(dv), *call.numbers(lse, lists, True), **call.constants(plan, tma),
    )  # fmt: skip
    return results
