"""The feed-forward half of a block, ``x + (silu(n @ gate.T) * (n @ up.T)) @ down.T`` with ``n = rms_norm(x)``, keeping
``x`` alone.

For blocks that are computed again in backward. As separate operations the second pass of a checkpoint leaves n, gate
and up, and backward makes three more tensors of gate's size: five, and for a moment the product's gradient: six of (M,
I). Here the second pass computes nothing at all; backward makes n, gate, up and the product's gradient, and one kernel
turns the last three, in place, into their gradients and the product: three. The operations and their order are the
same, so are the bits.

Where one such tensor would take more than `MAX_BYTES`, forward and backward go in chunks of rows. Gradients of the
weights are then rounded once a chunk: the first is written, the others are added to it inside the matrix kernels.

Legend: M rows, C rows of a chunk, D model width, I inner width.
"""

from __future__ import annotations

import torch
from torch import Tensor

from vblackwell.errors import ConfigurationError
from vblackwell.kernels.runtime.op import register_op
from vblackwell.kernels.runtime.registry import refuse_forward_mode

# Products of 8k rows run as fast as those of 16k, and few chunks are few roundings: 9.7k rows of I = 6912 in bf16, 6.1k
# of I = 11008.
MAX_BYTES = 128 << 20
ROW_STEP = 256  # chunks are multiples of the matrix kernels' tiles


def feed_forward_block(
    x: Tensor, norm_D: Tensor, eps: float, gate_ID: Tensor, up_ID: Tensor, down_DI: Tensor, wanted: bool = True
) -> Tensor:
    """``x`` (..., D) plus its feed-forward, (..., D). Differentiable in all five tensors; saves them alone. Triton
    only.

    Args:
        norm_D, eps: of the RMSNorm before the products.
        wanted: False leaves the result unwritten, as for `swiglu_linear`.

    Raises:
        ConfigurationError: shapes or types do not fit.
    """
    inner, width = gate_ID.shape if gate_ID.dim() == 2 else (-1, -1)
    shapes = [tuple(weight.shape) for weight in (norm_D, gate_ID, up_ID, down_DI)]
    if shapes != [(width,), (inner, width), (inner, width), (width, inner)] or x.shape[-1] != width:
        raise ConfigurationError(
            f"a feed-forward of {tuple(x.shape)} with weights {', '.join(map(str, shapes))}: they do not fit"
        )
    types = [each.dtype for each in (x, norm_D, gate_ID, up_ID, down_DI)]
    if len(set(types)) > 1:
        raise ConfigurationError(f"a feed-forward of types {', '.join(map(str, types))}: they must match")
    return _feed_forward_block(x, norm_D, eps, gate_ID, up_ID, down_DI, wanted)


def chunks(rows: int, row_bytes: int) -> list[slice]:
    """Chunks of ``rows``, about equal, of at most about `MAX_BYTES`."""
    count = max(1, -(-rows * row_bytes // MAX_BYTES))
    step = -(-rows // count)
    step = max(1, -(-step // ROW_STEP) * ROW_STEP)
    return [slice(start, min(start + step, rows)) for start in range(0, max(rows, 1), step)]


def _save(ctx, inputs, output) -> None:  # type: ignore[no-untyped-def]
    x, norm_D, ctx.eps, *weights, _ = inputs
    ctx.save_for_backward(x, norm_D, *weights)


def _backward(ctx, dy: Tensor):  # type: ignore[no-untyped-def]
    x, norm_D, *weights = ctx.saved_tensors
    needed = [wanted for number, wanted in enumerate(ctx.needs_input_grad) if number not in (2, 6)]
    dx, dnorm_D, *found = (
        gradient if wanted else None
        for gradient, wanted in zip(
            _feed_forward_block_backward(dy, x, norm_D, ctx.eps, *weights, needed), needed, strict=True
        )
    )
    return dx, dnorm_D, None, *found, None


@register_op(lambda x, *rest: x.new_empty(x.shape), save=_save, backward=_backward)
def _feed_forward_block(
    x: Tensor, norm_D: Tensor, eps: float, gate_ID: Tensor, up_ID: Tensor, down_DI: Tensor, wanted: bool
) -> Tensor:
    from vblackwell.kernels.pointwise import rms_norm_triton, swiglu_triton

    y = torch.empty(x.shape, dtype=x.dtype, device=x.device)
    refuse_forward_mode("feed_forward_block")
    if not wanted:
        return y
    x_MD, y_MD = x.reshape(-1, x.shape[-1]), y.view(-1, x.shape[-1])
    for rows in chunks(len(x_MD), gate_ID.shape[0] * x.itemsize):
        n_CD, _, _ = rms_norm_triton.forward(x_MD[rows], None, norm_D, eps)
        gate, up = torch.mm(n_CD, gate_ID.t()), torch.mm(n_CD, up_ID.t())
        del n_CD
        swiglu_triton.forward(gate, up, out=gate)
        del up
        y_CD = y_MD[rows]
        torch.mm(gate, down_DI.t(), out=y_CD)
        del gate
        torch.add(x_MD[rows], y_CD, out=y_CD)
    return y


def _fake_feed_forward_block_backward(dy, x, norm_D, eps, gate_ID, up_ID, down_DI, needed):  # type: ignore[no-untyped-def]
    tensors = zip((x, norm_D, gate_ID, up_ID, down_DI), [True, *needed[1:]], strict=True)
    return [x.new_empty(each.shape if wanted else (0,)) for each, wanted in tensors]


@register_op(_fake_feed_forward_block_backward)
def _feed_forward_block_backward(
    dy: Tensor, x: Tensor, norm_D: Tensor, eps: float, gate_ID: Tensor, up_ID: Tensor, down_DI: Tensor, needed: list[bool]
) -> list[Tensor]:  # fmt: skip
    """Gradients of x, the norm's weight, gate, up and down; empty where not ``needed``, but for x's."""
    from vblackwell.kernels.pointwise import rms_norm_triton, swiglu_triton

    weights = (norm_D, gate_ID, up_ID, down_DI)
    dx, dnorm_D, dgate_ID, dup_ID, ddown_DI = (
        torch.empty(each.shape if wanted else (0,), dtype=x.dtype, device=x.device)
        for each, wanted in zip((x, *weights), [True, *needed[1:]], strict=True)
    )
    x_MD, dy_MD, dx_MD = (each.reshape(-1, x.shape[-1]) for each in (x, dy, dx))

    def add(gradient: Tensor, left: Tensor, right: Tensor, first: bool) -> None:
        if first:
            torch.mm(left.t(), right, out=gradient)
        else:
            torch.addmm(gradient, left.t(), right, out=gradient)

    for number, rows in enumerate(chunks(len(x_MD), gate_ID.shape[0] * x.itemsize)):
        x_CD, dy_CD, first = x_MD[rows], dy_MD[rows], number == 0
        n_CD, _, scale_C = rms_norm_triton.forward(x_CD, None, norm_D, eps)
        gate, up = torch.mm(n_CD, gate_ID.t()), torch.mm(n_CD, up_ID.t())
        product = torch.mm(dy_CD, down_DI)
        dgate, dup = gate, up
        swiglu_triton.backward_in_place(product, gate, up)
        if needed[4]:
            add(ddown_DI, dy_CD, product, first)
        del product
        dn_CD = torch.mm(dgate, gate_ID)
        torch.addmm(dn_CD, dup, up_ID, out=dn_CD)
        if needed[2]:
            add(dgate_ID, dgate, n_CD, first)
        del gate, dgate
        if needed[3]:
            add(dup_ID, dup, n_CD, first)
        del up, dup, n_CD
        _, part_D = rms_norm_triton.backward(dn_CD, dy_CD, x_CD, norm_D, scale_C, needed[1], out=dx_MD[rows])
        if needed[1]:
            dnorm_D.copy_(part_D) if first else dnorm_D.add_(part_D)
    return [dx, dnorm_D, dgate_ID, dup_ID, ddown_DI]
