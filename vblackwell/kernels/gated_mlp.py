"""A SwiGLU feed-forward, ``(silu(x @ gate.T) * (x @ up.T)) @ down.T``, that keeps its input alone: for blocks that are computed again.

Saved as separate operations, the second pass of a checkpoint leaves gate and up for backward, which makes three more tensors of that
size: five, and the gradient of the product for a moment: six of (M, I). Here the second pass computes nothing at all, and backward
makes gate, up and the product's gradient, which one kernel turns, in place, into their gradients and the product: three. The products
and their order are the same, so are the bits.

Where one such tensor would take more than `MOST_BYTES`, forward and backward go in chunks of rows. Gradients of the weights are then
rounded once a chunk: the first is written, the others are added to it inside the matrix kernels.

Legend: M rows, D model width, I inner width.
"""

from __future__ import annotations

import torch
from torch import Tensor

from vblackwell.errors import ConfigurationError

# Products of 8k rows run as fast as those of 16k, and few chunks are few roundings: 18k rows of I = 6912 in bf16, 11k of I = 11008.
MOST_BYTES = 256 << 20
ROW_STEP = 256  # chunks are multiples of the matrix kernels' tiles


def gated_mlp(x: Tensor, gate_ID: Tensor, up_ID: Tensor, down_DI: Tensor, wanted: bool = True) -> Tensor:
    """The feed-forward of ``x`` (..., D), to (..., D). Differentiable in all four; saves them and nothing else. Triton only.

    Args:
        wanted: False leaves the result unwritten, for the second pass of a checkpoint, which needs what backward reads and nothing else.

    Raises:
        ConfigurationError: shapes or types do not fit.
    """
    inner, width = gate_ID.shape if gate_ID.dim() == 2 else (-1, -1)
    shapes = [tuple(weight.shape) for weight in (gate_ID, up_ID, down_DI)]
    if shapes != [(inner, width), (inner, width), (width, inner)] or x.shape[-1] != width:
        raise ConfigurationError(
            f"a feed-forward of {tuple(x.shape)} with weights {shapes[0]}, {shapes[1]} and {shapes[2]}: they do not fit"
        )
    types = [each.dtype for each in (x, gate_ID, up_ID, down_DI)]
    if len(set(types)) > 1:
        raise ConfigurationError(f"a feed-forward of types {', '.join(map(str, types))}: they must match")
    return _gated_mlp(x, gate_ID, up_ID, down_DI, wanted)


def _chunks(rows: int, row_bytes: int) -> list[slice]:
    """Chunks of ``rows``, about equal, of at most about `MOST_BYTES`."""
    count = max(1, -(-rows * row_bytes // MOST_BYTES))
    step = -(-rows // count)
    step = max(1, -(-step // ROW_STEP) * ROW_STEP)
    return [slice(start, min(start + step, rows)) for start in range(0, max(rows, 1), step)]


@torch.library.custom_op("vblackwell::gated_mlp", mutates_args=())
def _gated_mlp(x: Tensor, gate_ID: Tensor, up_ID: Tensor, down_DI: Tensor, wanted: bool) -> Tensor:
    from vblackwell.kernels import swiglu_triton

    y = torch.empty(x.shape, dtype=x.dtype, device=x.device)
    if not wanted:
        return y
    x_MD, y_MD = x.reshape(-1, x.shape[-1]), y.view(-1, x.shape[-1])
    for rows in _chunks(len(x_MD), gate_ID.shape[0] * x.itemsize):
        gate, up = torch.mm(x_MD[rows], gate_ID.t()), torch.mm(x_MD[rows], up_ID.t())
        swiglu_triton.forward(gate, up, out=gate)
        del up
        torch.mm(gate, down_DI.t(), out=y_MD[rows])
        del gate
    return y


@_gated_mlp.register_fake
def _(x, gate_ID, up_ID, down_DI, wanted):  # type: ignore[no-untyped-def]
    return x.new_empty(x.shape)


@torch.library.custom_op("vblackwell::gated_mlp_backward", mutates_args=())
def _gated_mlp_backward(
    dy: Tensor, x: Tensor, gate_ID: Tensor, up_ID: Tensor, down_DI: Tensor, needed: list[bool]
) -> list[Tensor]:
    """Gradients of x, gate, up and down; empty where they are not ``needed``."""
    from vblackwell.kernels import swiglu_triton

    found = [
        torch.empty(each.shape if wanted else (0,), dtype=x.dtype, device=x.device)
        for each, wanted in zip((x, gate_ID, up_ID, down_DI), needed, strict=True)
    ]
    dx, dgate_ID, dup_ID, ddown_DI = found
    x_MD, dy_MD = x.reshape(-1, x.shape[-1]), dy.reshape(-1, x.shape[-1])

    def add(gradient: Tensor, left: Tensor, right: Tensor, first: bool) -> None:
        if first:
            torch.mm(left.t(), right, out=gradient)
        else:
            torch.addmm(gradient, left.t(), right, out=gradient)

    for number, rows in enumerate(_chunks(len(x_MD), gate_ID.shape[0] * x.itemsize)):
        x_CD, dy_CD, first = x_MD[rows], dy_MD[rows], number == 0
        gate, up = torch.mm(x_CD, gate_ID.t()), torch.mm(x_CD, up_ID.t())
        product = torch.mm(dy_CD, down_DI)
        dgate, dup = gate, up
        swiglu_triton.backward_in_place(product, gate, up)
        if needed[3]:
            add(ddown_DI, dy_CD, product, first)
        del product
        if needed[0]:
            dx_CD = dx.view(-1, x.shape[-1])[rows]
            torch.mm(dgate, gate_ID, out=dx_CD)
            torch.addmm(dx_CD, dup, up_ID, out=dx_CD)
        if needed[1]:
            add(dgate_ID, dgate, x_CD, first)
        del gate, dgate
        if needed[2]:
            add(dup_ID, dup, x_CD, first)
        del up, dup
    return found


@_gated_mlp_backward.register_fake
def _(dy, x, gate_ID, up_ID, down_DI, needed):  # type: ignore[no-untyped-def]
    tensors = zip((x, gate_ID, up_ID, down_DI), needed, strict=True)
    return [x.new_empty(each.shape if wanted else (0,)) for each, wanted in tensors]


def _save(ctx, inputs, output) -> None:  # type: ignore[no-untyped-def]
    ctx.save_for_backward(*inputs[:4])


def _backward(ctx, dy: Tensor):  # type: ignore[no-untyped-def]
    needed = list(ctx.needs_input_grad[:4])
    found = _gated_mlp_backward(dy, *ctx.saved_tensors, needed)
    return *(gradient if wanted else None for gradient, wanted in zip(found, needed, strict=True)), None


_gated_mlp.register_autograd(_backward, setup_context=_save)
