"""Launches of the attention kernels. Import it only where they run: triton takes half a second."""
# What @triton.jit makes of a function has no type.
# pyright: reportCallIssue=false

import functools
import warnings
from collections.abc import Sequence
from typing import Any, NamedTuple

import torch
import triton
from torch import Tensor
from triton.tools.tensor_descriptor import TensorDescriptor

from vblackwell.kernels.attention.backward import key_gradient, query_gradient
from vblackwell.kernels.attention.blocks import Bounds, TileLists, bits_of, list_tiles, mask_strides
from vblackwell.kernels.attention.device import INTERPRETED, Form, Given, Numbers
from vblackwell.kernels.attention.forward import attend
from vblackwell.kernels.attention.plan import (
    BY_ADDRESS,
    SHORT,
    SPECIALIZED_TRITON,
    AttentionPlan,
    lse_of,
    padded_head,
    plan_for,
    specialized_plan,
)
from vblackwell.kernels.runtime.registry import capability, empty_of
from vblackwell.kernels.runtime.triton_launch import (
    Launch,
    describe,
    described,
    keep,
    kept,
    layout,
    queue,
    recall,
    remember,
)


@functools.cache
def _runs_specialized() -> bool:
    """Whether hopper.py's forward has been run with this release of Triton; says once where it has not."""
    if triton.__version__.startswith(SPECIALIZED_TRITON):
        return True
    known = " or ".join(f"{version}x" for version in SPECIALIZED_TRITON)
    warnings.warn(
        f"Triton {triton.__version__}: attention's forward for Hopper has run with {known} alone, so the general one,"
        f" which is slower and rounds otherwise, takes its place: install Triton {known}",
        stacklevel=2,
    )
    return False


class Options(NamedTuple):
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


class _Call:
    """Everything that the kernels are given in common; ``others``: what backward has in addition, which makes it read
    a boolean mask's bits by key too."""

    def __init__(self, q: Tensor, k: Tensor, v: Tensor, options: Options, *others: Tensor) -> None:
        some = [x for x in options[1:5] if x is not None]
        if some and not all([x.is_contiguous() for x in some]):  # kernels read them side by side
            dense = (None if x is None else x.contiguous() for x in options[1:5])
            options = Options(options.mask, *dense, *options[5:])
        self.options, self.mask, self.mask_kind, self.bits = options, options.mask, "none", None
        self.q, self.k, self.v, *self.others = _dense(q), _dense(k), _dense(v), *map(_dense, others)
        self.varlen = options.q_starts is not None
        self.batch = q.shape[0] if options.q_starts is None else options.q_starts.shape[0] - 1
        if (mask := options.mask) is not None:
            for dim, stride in enumerate(mask.stride()):  # of an expanded mask only what is there is packed and judged
                mask = mask.narrow(dim, 0, 1) if stride == 0 and mask.shape[dim] > 1 else mask
            self.mask_kind = "boolean" if mask.dtype == torch.bool else "additive"
            self.mask = mask.view(torch.uint8) if mask.dtype == torch.bool else mask
            self.bits = bits_of(self.mask, with_keys=bool(others)) if mask.dtype == torch.bool else None

    @functools.cached_property
    def key(self) -> tuple[Any, ...]:
        """All that launches follow from."""
        options, mask = self.options, self.mask
        # Of what is made here (results, words, lists) the layouts follow from these.
        some = [x if x is None else (x.shape, layout(x)) for x in (*options[1:5], mask)]
        tensors = map(layout, (self.q, self.k, self.v, *self.others))
        return (self.q.device, self.q.shape, self.k.shape, *options[5:], *some, *tensors)

    @property
    def num_heads(self) -> int:
        return self.q.shape[1]

    @property
    def kv_heads(self) -> int:
        return self.k.shape[1]

    @property
    def head(self) -> int:
        return self.q.shape[-1]

    @property
    def lengths(self) -> tuple[int, int]:
        return self.options.max_q, self.options.max_k

    @property
    def offset(self) -> int:
        return self.options.max_k - self.options.max_q if self.options.bottom_right else 0

    @property
    def short(self) -> bool:
        """Whether packed sequences are short on the average."""
        return self.varlen and max(self.lengths) <= SHORT * self.batch

    @property
    def scored(self) -> bool:
        return bool(self.options.softcap or self.options.dropout or self.options.slopes_N is not None)

    def plan(self, kernel: str) -> AttentionPlan:
        if self.q.device.type != "cuda":  # the interpreter: tiles small enough that odd lengths have several
            return AttentionPlan(32, 32, 4, 1)
        shared_bytes = torch.cuda.get_device_properties(self.q.device).shared_memory_per_block_optin
        # Changed scores take registers, with any mask.
        kind = "scored" if self.scored else "short" if self.short else self.mask_kind
        return plan_for(kernel, self.head, self.q.element_size(), shared_bytes, kind)

    def specialized(self) -> AttentionPlan | None:
        """The plan of Hopper's own forward, where it computes this and is the faster one."""
        fits = (
            self.q.device.type == "cuda"
            and not INTERPRETED
            and self.q.element_size() == 2
            and self.head >= 32
            and not self.scored
            and self.takes_tma(self.q, self.k, self.v)
            and (self.mask_kind != "additive" or self.describes_mask())
        )
        if not fits:
            return None
        plan = specialized_plan(self.head, self.q.element_size(), capability(self.q.device), self.mask_kind)
        return plan if plan and _runs_specialized() else None

    def takes_tma(self, *tensors: Tensor) -> bool:
        if self.varlen:
            return False
        for x in tensors:
            itemsize = x.element_size()
            steps = [step for step in x.stride()[:3] if step <= 0 or step * itemsize % 16]
            if steps or x.data_ptr() % 16 or x.numel() == 0:
                return False
        return True

    def describes_mask(self) -> bool:
        """Whether the copy engine brings tiles of an additive mask: 16 bits wide, not broadcast in a tile, aligned."""
        mask = self.mask
        if mask is None or mask.element_size() != 2:
            return False
        steps = [stride for size, stride in zip(mask.shape[:3], mask.stride(), strict=False) if size > 1]
        return (
            tuple(mask.shape[2:]) == self.lengths
            and mask.stride(3) == 1
            and mask.data_ptr() % 16 == 0
            and all(stride > 0 and stride % 8 == 0 for stride in steps)
        )

    def lists(self, plan: AttentionPlan, by_column: bool) -> TileLists | None:
        if self.mask is None:
            return None
        bounds = Bounds(*self.lengths, self.offset, self.options.left, self.options.right)
        return list_tiles(self.mask, self.bits, (plan.rows, plan.columns), bounds, by_column)

    def read_mask(self, by_column: bool) -> Tensor | None:
        """What kernels load: numbers (B, N, S, T), or words followed by their lines, each 1 where broadcast."""
        if self.bits is None:
            return self.mask
        words = self.bits.by_key if by_column else self.bits.by_query
        assert words is not None  # the backward has both
        return words.transpose(2, 3)

    def open_ended(self, plan: AttentionPlan) -> bool:
        """Whether a mask's tiles may have visible places beyond the last key."""
        cut = self.lengths[1] % plan.columns != 0
        return cut and self.mask is not None and (self.bits is None or self.mask.shape[3] == 1)

    def form(self, plan: AttentionPlan, tma: bool, even: bool = False) -> Form:
        options = self.options
        return Form(
            mask=("none", "boolean", "additive").index(self.mask_kind),
            has_left=options.left is not None,
            has_right=options.right is not None,
            bottom_right=options.bottom_right,
            softcap=options.softcap > 0,
            alibi=options.slopes_N is not None,
            dropout=options.dropout > 0,
            varlen=self.varlen,
            group=self.num_heads // self.kv_heads,
            head=self.head,
            width=padded_head(self.head),
            rows=plan.rows,
            columns=plan.columns,
            precision="ieee" if self.q.dtype == torch.float32 else "tf32",
            stages=plan.stages,
            tma=tma,
            ends=self.open_ended(plan),
            even=even,
        )

    def launch(
        self,
        kernel: Any,
        name: str,
        known: Launch | None,
        tiled: Sequence[tuple[Tensor, str]],
        outputs: Any,
        lse: Tensor,
    ) -> None:
        """Run ``kernel`` over the heads and tiles of queries, or `key_gradient` of keys: it takes the tensors of
        ``tiled``, in tiles of the plan's 'rows' or 'columns' ('': always by address), ``outputs``, and then what all
        kernels take. ``known``: what is `kept` for it."""
        options, by_column = self.options, kernel is key_gradient
        plan = self.plan(name) if known is None else known.plan
        mask, lists = self.read_mask(by_column), self.lists(plan, by_column)
        launch = known or self.plan_launch(by_column, plan, tiled, outputs, lse, mask)
        found = (None, None, None) if lists is None else (lists.items, lists.counts, lists.order)
        some = (mask, *found, options.slopes_N, options.seed, options.q_starts, options.k_starts)
        if known is None:  # what is compiled knows the types of all; later nobody reads what is not there
            some = (self.q if x is None else x for x in some)
        given = Given(*some, *launch.strides, launch.numbers)
        tiles = [
            x if tile is None else described(tile, x) for (x, _), tile in zip(tiled, launch.described, strict=True)
        ]
        places = (self.batch if self.varlen else 0, 0, 0) if lists is None else lists.places
        arguments = (*tiles, *outputs, given, *places, launch.form)
        if known is not None:
            known.compiled[known.grid](*arguments)
            return
        # Addresses of single rows take the registers that descriptors do not.
        limits = {"maxnreg": plan.registers} if plan.registers and launch.form.tma == plan.tma else {}
        limits |= {"num_warps": plan.warps, "num_stages": plan.stages}
        keep(name, self.key, launch, queue(kernel, (plan, *self.key), launch.grid, arguments, **limits))

    def plan_launch(
        self,
        by_column: bool,
        plan: AttentionPlan,
        tiled: Sequence[tuple[Tensor, str]],
        outputs: Any,
        lse: Tensor,
        mask: Tensor | None,
    ) -> Launch:
        options = self.options
        even = not by_column and not self.varlen and options.max_k % plan.columns == 0
        length, tile, heads = (
            (options.max_k, plan.columns, self.kv_heads) if by_column else (options.max_q, plan.rows, self.num_heads)
        )
        tma = plan.tma and max(self.lengths) > BY_ADDRESS and self.takes_tma(*(x for x, side in tiled if side))
        width = padded_head(self.head)
        blocks = [[1, 1, getattr(plan, side), width] if tma and side else None for _, side in tiled]
        written = [x for x in outputs if isinstance(x, Tensor) and x is not lse]  # not numbers of rows
        strides = tuple(
            (0, x.stride(1), x.stride(0)) if self.varlen else x.stride()[:3] for x in (*(x for x, _ in tiled), *written)
        )
        lse_strides = (0, lse.stride(0)) if self.varlen else lse.stride()[:2]
        numbers = Numbers(
            *self.lengths, options.left or 0, options.right or 0, options.scale, options.softcap, options.dropout
        )
        count = length // tile + self.batch if self.varlen else -(-length // tile)  # as `packed_tile` finds them
        return Launch(
            plan,
            tuple(
                None if block is None else describe(TensorDescriptor, x, x.stride(), block)
                for (x, _), block in zip(tiled, blocks, strict=True)
            ),
            (count, heads, 1 if self.varlen else self.batch),
            (strides, lse_strides, (0, 0, 0, 0) if mask is None else mask_strides(mask)),
            numbers,
            self.form(plan, tma, even),
        )


def _dense(x: Tensor) -> Tensor:
    """``x``, elements of its last dimension side by side."""
    return x if x.stride(-1) == 1 or x.shape[-1] == 1 else x.contiguous()


def _given(name: str, options: Options, *tensors: Tensor) -> tuple[tuple[Any, ...], list[Tensor]]:
    """What `recall` asks: all that is not a tensor, and the tensors, none of them twice."""
    mask, slopes_N, seed, q_starts, k_starts = options[:5]
    same = k_starts is q_starts
    some = (mask, slopes_N, seed, q_starts, None if same else k_starts)
    what = (name, same, mask is None, slopes_N is None, seed is None, q_starts is None, *options[5:])
    return what, [*tensors, *[x for x in some if x is not None]]


def forward(q: Tensor, k: Tensor, v: Tensor, options: Options) -> tuple[Tensor, Tensor]:
    """``(out, log2-sum-exp)``; the second is (B, N, S), or (N, total) of packed sequences."""
    out, lse = empty_of(q), lse_of(q)
    if q.numel() == 0:
        return out, lse
    if k.numel() == 0:
        return out.zero_(), lse.fill_(float("inf"))
    call = _Call(q, k, v, options)
    what, given = _given("forward", options, q, k, v)
    last = recall(what, given)
    known = kept("forward", call.key) if last is None else last[0]
    if (special := call.specialized() if known is None else known.plan) is not None and special.specialized:
        from vblackwell.kernels.attention import hopper  # triton.experimental: only where it runs

        hopper.launch(call, special, known, out, lse)
    else:
        tiled = ((call.q, "rows"), (call.k, "columns"), (call.v, "columns"))
        call.launch(attend, "forward", known, tiled, (out, lse), lse)
    if last is None:
        remember(what, given, [kept("forward", call.key)])
    return out, lse


def backward(
    dout: Tensor, q: Tensor, k: Tensor, v: Tensor, out: Tensor, lse: Tensor, options: Options
) -> tuple[Tensor, Tensor, Tensor]:
    """Gradients of queries, keys and values."""
    dq, dk, dv = empty_of(q), empty_of(k), empty_of(v)
    if q.numel() == 0 or k.numel() == 0:
        return dq.zero_(), dk.zero_(), dv.zero_()
    call = _Call(q, k, v, options, dout, out, lse)
    what, given = _given("backward", options, q, k, v, dout, out, lse)
    dout, out, lse = call.others
    tiled = ((call.q, "rows"), (call.k, "columns"), (call.v, "columns"))
    sums = (lse, torch.empty_like(lse), torch.empty_like(lse))  # and what ``query_gradient`` writes for the other
    last = recall(what, given)
    first, second = (kept("dq", call.key), kept("dkv", call.key)) if last is None else last
    call.launch(query_gradient, "dq", first, (*tiled, (out, ""), (dout, "rows")), (sums, dq), lse)
    call.launch(key_gradient, "dkv", second, (*tiled, (dout, "rows")), (sums, dk, dv), lse)
    if last is None:
        remember(what, given, [kept("dq", call.key), kept("dkv", call.key)])
    return dq, dk, dv
