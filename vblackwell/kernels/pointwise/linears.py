"""Linear layers of one input (queries, keys and values; gate and up), whose input gradients add up inside the matrix
kernels (every product but the first starts from the sum so far, the same roundings as autograd's without its passes
over memory), and those that keep the input of their norm instead of what the norm made of it.

`normed_linears` and `feed_forward_block` are for blocks that are computed again in backward, whose input is kept in any
case; operations, their order, and so the bits are those of `rms_norm`, `shared_input_linears` and `swiglu_linear`. The
second pass of a `feed_forward_block` computes nothing; backward makes n, gate, up and the product's gradient, and one
kernel turns the last three, in place, into their gradients and the product. Where such a tensor would take more than
`MAX_BYTES` it goes in chunks of rows, and weights' gradients are rounded once a chunk.

Legend: M rows, C rows of a chunk, K (in a feed-forward D) features in, N features out, I inner width.
"""

import torch
from torch import Tensor

from vblackwell.errors import ConfigurationError
from vblackwell.kernels.pointwise.cross_entropy import add_product
from vblackwell.kernels.pointwise.rows import kernels
from vblackwell.kernels.runtime.registry import refuse_forward_mode, register_op

# Products of 8k rows run as fast as those of 16k, and few chunks are few roundings: 9.7k rows of I = 6912 in bf16, 6.1k
# of I = 11008.
MAX_BYTES = 128 << 20
ROW_STEP = 256  # chunks are multiples of the matrix kernels' tiles


def _check_weights(x: Tensor, weights_NK: list[Tensor], *norm_K: Tensor) -> None:
    shapes = [*((weight, (x.shape[-1],)) for weight in norm_K), *((w, (w.shape[0], x.shape[-1])) for w in weights_NK)]
    for weight, shape in shapes:
        if tuple(weight.shape) != shape or weight.dtype != x.dtype:
            raise ConfigurationError(
                f"a weight of {tuple(weight.shape)} {weight.dtype} for an input of {tuple(x.shape)} {x.dtype}: they do"
                " not fit"
            )


def linears_dx(dys: list[Tensor], weights_NK: list[Tensor]) -> Tensor:
    """``sum dy @ w`` of dys (..., N) and weights (N, K), in order: (..., K). No autograd."""
    rows = [dy.reshape(-1, dy.shape[-1]) for dy in dys]
    dx_MK = torch.mm(rows[0], weights_NK[0])
    for dy_MN, w_NK in zip(rows[1:], weights_NK[1:], strict=True):
        torch.addmm(dx_MK, dy_MN, w_NK, out=dx_MK)
    return dx_MK.view(*dys[0].shape[:-1], dx_MK.shape[1])  # a size of -1 is not known of no rows


def _products(x_MK: Tensor, weights_NK: list[Tensor], x: Tensor) -> list[Tensor]:
    return [torch.mm(x_MK, w_NK.t()).view(*x.shape[:-1], w_NK.shape[0]) for w_NK in weights_NK]


def _fake_linears(x, *norm_and_weights):  # type: ignore[no-untyped-def]
    return [x.new_empty(*x.shape[:-1], w_NK.shape[0]) for w_NK in norm_and_weights[-1]]


def _empty_gradients(x, tensors, needed):  # type: ignore[no-untyped-def]
    """Unwritten, like ``x`` and ``tensors``; without elements where not ``needed``, but for that of ``x``."""
    wanted = zip((x, *tensors), (True, *needed[1:]), strict=True)
    return [x.new_empty(each.shape if kept else (0,)) for each, kept in wanted]


def _found(gradients, needed):  # type: ignore[no-untyped-def]
    return [gradient if wanted else None for gradient, wanted in zip(gradients, needed, strict=True)]


def _save_shared(ctx, inputs, output) -> None:  # type: ignore[no-untyped-def]
    x, weights_NK = inputs
    ctx.save_for_backward(x, *weights_NK)
    ctx.set_materialize_grads(False)


def _backward_shared(ctx, dys: list[Tensor | None]):  # type: ignore[no-untyped-def]
    x, *weights_NK = ctx.saved_tensors
    given = [(dy, w_NK) for dy, w_NK in zip(dys, weights_NK, strict=True) if dy is not None]
    dx = None
    if ctx.needs_input_grad[0] and given:
        dx = _shared_input_linears_dx([dy for dy, _ in given], [w_NK for _, w_NK in given])
    x_MK = x.reshape(-1, x.shape[-1])
    return dx, [
        torch.mm(dy.reshape(-1, dy.shape[-1]).t(), x_MK) if dy is not None and needed else None
        for dy, needed in zip(dys, ctx.needs_input_grad[1], strict=True)
    ]


@register_op(_fake_linears, save=_save_shared, backward=_backward_shared)
def shared_input_linears(x: Tensor, weights_NK: list[Tensor]) -> list[Tensor]:
    """``[x @ w.T for w in weights_NK]``: (..., K) in, (..., N) each out. Differentiable in ``x`` and every weight.
    Raises ConfigurationError where a weight is not (N, K), or of another type than ``x``."""
    _check_weights(x, weights_NK)
    refuse_forward_mode("shared_input_linears")
    return _products(x.reshape(-1, x.shape[-1]), weights_NK, x)


@register_op(lambda dys, weights_NK: dys[0].new_empty(*dys[0].shape[:-1], weights_NK[0].shape[1]))
def _shared_input_linears_dx(dys: list[Tensor], weights_NK: list[Tensor]) -> Tensor:
    return linears_dx(dys, weights_NK)


def _save_normed(ctx, inputs, output) -> None:  # type: ignore[no-untyped-def]
    x, norm_K, ctx.eps, weights_NK = inputs
    ctx.save_for_backward(x, norm_K, *weights_NK)


def _backward_normed(ctx, dys: list[Tensor]):  # type: ignore[no-untyped-def]
    x, norm_K, *weights_NK = ctx.saved_tensors
    needed = [*ctx.needs_input_grad[:2], *ctx.needs_input_grad[3]]
    dx, dnorm_K, *dweights = _found(_normed_linears_backward(dys, x, norm_K, ctx.eps, weights_NK, needed), needed)
    return dx, dnorm_K, None, dweights


@register_op(_fake_linears, save=_save_normed, backward=_backward_normed)
def normed_linears(x: Tensor, norm_K: Tensor, eps: float, weights_NK: list[Tensor]) -> list[Tensor]:
    """`shared_input_linears` of ``rms_norm(x)``; differentiable in all tensors, and saves these alone. Triton only.
    Raises ConfigurationError as that does, also for a norm's weight that is not (K,)."""
    _check_weights(x, weights_NK, norm_K)
    refuse_forward_mode("normed_linears")
    n_MK, _, _ = kernels().rms_norm(x.reshape(-1, x.shape[-1]), None, norm_K, eps)
    return _products(n_MK, weights_NK, x)


@register_op(lambda dys, x, norm, eps, weights, needed: _empty_gradients(x, (norm, *weights), needed))
def _normed_linears_backward(
    dys: list[Tensor], x: Tensor, norm_K: Tensor, eps: float, weights_NK: list[Tensor], needed: list[bool]
) -> list[Tensor]:
    """Gradients of x, the norm's weight and each weight; empty where not ``needed``, but for x's."""
    x_MK = x.reshape(-1, x.shape[-1])
    n_MK, _, scale_M = kernels().rms_norm(x_MK, None, norm_K, eps)
    rows = [dy.reshape(-1, dy.shape[-1]) for dy in dys]
    dweights = [
        torch.mm(dy_MN.t(), n_MK) if wanted else dy_MN.new_empty(0)
        for dy_MN, wanted in zip(rows, needed[2:], strict=True)
    ]
    del n_MK
    dn_MK = linears_dx(rows, weights_NK)
    dx_MK, dnorm_K = kernels().rms_norm_backward(dn_MK, None, x_MK, norm_K, scale_M, needed[1])
    return [dx_MK.view(x.shape), dnorm_K, *dweights]


def chunks(rows: int, row_bytes: int) -> list[slice]:
    """Chunks of ``rows``, about equal, of at most about `MAX_BYTES`."""
    count = max(1, -(-rows * row_bytes // MAX_BYTES))
    step = max(1, -(-rows // (count * ROW_STEP)) * ROW_STEP)
    return [slice(start, min(start + step, rows)) for start in range(0, max(rows, 1), step)]


def _save_block(ctx, inputs, output) -> None:  # type: ignore[no-untyped-def]
    x, norm_D, ctx.eps, *weights, _ = inputs
    ctx.save_for_backward(x, norm_D, *weights)


def _backward_block(ctx, dy: Tensor):  # type: ignore[no-untyped-def]
    x, norm_D, *weights = ctx.saved_tensors
    needed = [wanted for number, wanted in enumerate(ctx.needs_input_grad) if number not in (2, 6)]
    gradients = _feed_forward_block_backward(dy, x, norm_D, ctx.eps, *weights, needed)
    dx, dnorm_D, *dweights = _found(gradients, needed)
    return dx, dnorm_D, None, *dweights, None


@register_op(lambda x, *rest: x.new_empty(x.shape), save=_save_block, backward=_backward_block, direct=True)
def feed_forward_block(
    x: Tensor, norm_D: Tensor, eps: float, gate_ID: Tensor, up_ID: Tensor, down_DI: Tensor, wanted: bool
) -> Tensor:
    """``x + (silu(n @ gate.T) * (n @ up.T)) @ down.T`` with ``n = rms_norm(x)``, all (..., D); saves the five tensors
    alone and is differentiable in each. Triton only.

    ``wanted``: False leaves the result unwritten, as for `swiglu_linear`. Raises ConfigurationError where shapes or
    types do not fit.
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
    refuse_forward_mode("feed_forward_block")
    y = torch.empty(x.shape, dtype=x.dtype, device=x.device)
    if not wanted:
        return y
    x_MD, y_MD = x.reshape(-1, x.shape[-1]), y.view(-1, x.shape[-1])
    for rows in chunks(len(x_MD), gate_ID.shape[0] * x.itemsize):
        n_CD, _, _ = kernels().rms_norm(x_MD[rows], None, norm_D, eps)
        gate, up = torch.mm(n_CD, gate_ID.t()), torch.mm(n_CD, up_ID.t())
        del n_CD
        kernels().swiglu(gate, up, out=gate)
        del up
        y_CD = y_MD[rows]
        torch.mm(gate, down_DI.t(), out=y_CD)
        del gate
        torch.add(x_MD[rows], y_CD, out=y_CD)
    return y


@register_op(lambda dy, x, norm, eps, *weights: _empty_gradients(x, (norm, *weights[:-1]), weights[-1]), direct=True)
def _feed_forward_block_backward(
    dy: Tensor,
    x: Tensor,
    norm_D: Tensor,
    eps: float,
    gate_ID: Tensor,
    up_ID: Tensor,
    down_DI: Tensor,
    needed: list[bool],
) -> list[Tensor]:
    """Gradients of x, the norm's weight, gate, up and down; empty where not ``needed``, but for x's."""
    dx, dnorm_D, dgate_ID, dup_ID, ddown_DI = _empty_gradients(x, (norm_D, gate_ID, up_ID, down_DI), needed)
    x_MD, dy_MD, dx_MD = (each.reshape(-1, x.shape[-1]) for each in (x, dy, dx))
    for number, rows in enumerate(chunks(len(x_MD), gate_ID.shape[0] * x.itemsize)):
        x_CD, dy_CD, first = x_MD[rows], dy_MD[rows], number == 0
        n_CD, _, scale_C = kernels().rms_norm(x_CD, None, norm_D, eps)
        gate, up = torch.mm(n_CD, gate_ID.t()), torch.mm(n_CD, up_ID.t())
        product = torch.mm(dy_CD, down_DI)
        dgate, dup = gate, up
        kernels().swiglu_backward_in_place(product, gate, up)
        if needed[4]:
            add_product(ddown_DI, dy_CD.t(), product, first)
        del product
        dn_CD = torch.mm(dgate, gate_ID)
        torch.addmm(dn_CD, dup, up_ID, out=dn_CD)
        if needed[2]:
            add_product(dgate_ID, dgate.t(), n_CD, first)
        del gate, dgate
        if needed[3]:
            add_product(dup_ID, dup.t(), n_CD, first)
        del up, dup, n_CD
        _, part_D = kernels().rms_norm_backward(dn_CD, dy_CD, x_CD, norm_D, scale_C, needed[1], out=dx_MD[rows])
        if needed[1]:
            dnorm_D.copy_(part_D) if first else dnorm_D.add_(part_D)
    return [dx, dnorm_D, dgate_ID, dup_ID, ddown_DI]
