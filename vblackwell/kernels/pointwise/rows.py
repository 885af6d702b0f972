"""Row-wise ops, each in one pass over memory and rounded once from fp32 (PyTorch's expressions round each operation):
RMSNorm (Zhang & Sennrich, arXiv:1910.07467), alone or with the residual addition before it; the gating of SwiGLU
(Shazeer, arXiv:2002.05202); rotary position embedding (Su et al., arXiv:2104.09864), pairs (h, h + H/2) as in Hugging
Face's models.

With a residual ``x + residual`` is rounded to its type first, as the unfused addition would. The weight's gradient is
deterministic: every program sums its own rows, and the partial sums are added in order. The rotation's backward is the
transposed one, so only the tables are kept, and its results have the strides of what came in.

Legend: R rows, D width, I inner width; B batch, S sequence, N query heads, K key heads, H head width, T positions of
the cache.
"""

from functools import cache
from typing import Any

import torch
from torch import Tensor
from torch.nn import functional

from vblackwell.errors import ConfigurationError
from vblackwell.kernels.runtime.registry import empty_of, refuse_forward_mode, register_op, runs_triton


@cache
def kernels() -> Any:
    """rows_triton.py, imported when the first kernel runs: triton takes half a second."""
    from vblackwell.kernels.pointwise import rows_triton

    return rows_triton


def rms_norm(x: Tensor, weight_D: Tensor, eps: float) -> Tensor:
    """``x`` (..., D) normalised over its last dimension and scaled by ``weight_D``, in the type that both promote to.
    Differentiable in both. Raises ConfigurationError where the weight is not one value for each feature."""
    _check_rms_norm(x, weight_D, None)
    if runs_triton("rms_norm", x, x.shape[-1]):
        return _rms_norm(x, None, weight_D, eps)[0]
    return functional.rms_norm(x, (x.shape[-1],), weight_D, eps)


def add_rms_norm(x: Tensor, residual: Tensor, weight_D: Tensor, eps: float) -> tuple[Tensor, Tensor]:
    """``(rms_norm(x + residual), x + residual)`` in one pass; all (..., D), or ConfigurationError."""
    _check_rms_norm(x, weight_D, residual)
    if runs_triton("rms_norm", x, x.shape[-1]):
        y, total, _ = _rms_norm(x, residual, weight_D, eps)
        return y, total
    total = x + residual
    return functional.rms_norm(total, (x.shape[-1],), weight_D, eps), total


def _check_rms_norm(x: Tensor, weight_D: Tensor, residual: Tensor | None) -> None:
    if weight_D.dim() != 1 or x.dim() == 0 or weight_D.shape[0] != x.shape[-1]:
        raise ConfigurationError(
            f"rms_norm of {tuple(x.shape)} with a weight of {tuple(weight_D.shape)}: give ({x.shape[-1:]},)"
        )
    if residual is not None and (residual.shape != x.shape or residual.dtype != x.dtype):
        raise ConfigurationError(
            f"rms_norm of {tuple(x.shape)} {x.dtype} "
            f"with a residual of {tuple(residual.shape)} {residual.dtype}: they must match"
        )


def _save_rms_norm(ctx, inputs, output) -> None:  # type: ignore[no-untyped-def]
    x, residual, weight_D, _ = inputs
    ctx.added = residual is not None
    ctx.save_for_backward(output[1] if ctx.added else x, weight_D, output[2])
    ctx.set_materialize_grads(False)


def _backward_rms_norm(ctx, dy: Tensor | None, dtotal: Tensor | None, dscale: None):  # type: ignore[no-untyped-def]
    dtotal = dtotal if ctx.added else None  # of the empty one
    dx, dweight_D, wanted = dtotal, None, ctx.needs_input_grad[2]
    if dy is not None:
        dx, dweight_D = _rms_norm_backward(dy, dtotal, *ctx.saved_tensors, wanted)
    return dx, dx if ctx.added else None, dweight_D if wanted else None, None


def _fake_rms_norm(x, residual, weight_D, eps):  # type: ignore[no-untyped-def]
    y = x.new_empty(x.shape, dtype=torch.promote_types(x.dtype, weight_D.dtype))
    scale_R = x.new_empty(x.shape[:-1].numel(), dtype=torch.float32)
    return y, x.new_empty(x.shape if residual is not None else (0,)), scale_R


@register_op(_fake_rms_norm, save=_save_rms_norm, backward=_backward_rms_norm, direct=True)
def _rms_norm(x: Tensor, residual: Tensor | None, weight_D: Tensor, eps: float) -> tuple[Tensor, Tensor, Tensor]:
    return kernels().rms_norm(x, residual, weight_D, eps)


def _fake_rms_norm_backward(dy, dtotal, x, weight_D, scale_R, with_weight):  # type: ignore[no-untyped-def]
    return x.new_empty(x.shape), weight_D.new_empty(weight_D.shape if with_weight else (0,))


@register_op(_fake_rms_norm_backward, direct=True)
def _rms_norm_backward(
    dy: Tensor, dtotal: Tensor | None, x: Tensor, weight_D: Tensor, scale_R: Tensor, with_weight: bool
) -> tuple[Tensor, Tensor]:
    return kernels().rms_norm_backward(dy, dtotal, x, weight_D, scale_R, with_weight)


def swiglu(gate: Tensor, up: Tensor) -> Tensor:
    """``silu(gate) * up``, all (..., I) of one type, or ConfigurationError. Differentiable in both."""
    if gate.shape != up.shape or gate.dtype != up.dtype:
        raise ConfigurationError(
            f"swiglu of {tuple(gate.shape)} {gate.dtype} and {tuple(up.shape)} {up.dtype}: they must match"
        )
    if runs_triton("swiglu", gate, 0):
        return _swiglu(gate, up)
    return functional.silu(gate) * up


@register_op(
    lambda gate, up: gate.new_empty(gate.shape),
    save=lambda ctx, inputs, output: ctx.save_for_backward(*inputs),
    backward=lambda ctx, dy: swiglu_backward(dy, *ctx.saved_tensors, False)[:2],
    direct=True,
)
def _swiglu(gate: Tensor, up: Tensor) -> Tensor:
    return kernels().swiglu(gate, up)


def _fake_swiglu_backward(dy, gate, up, with_product):  # type: ignore[no-untyped-def]
    return gate.new_empty(gate.shape), gate.new_empty(gate.shape), gate.new_empty(gate.shape if with_product else (0,))


@register_op(_fake_swiglu_backward, direct=True)
def swiglu_backward(dy: Tensor, gate: Tensor, up: Tensor, with_product: bool) -> tuple[Tensor, Tensor, Tensor]:
    """``(dgate, dup, silu(gate) * up)`` from ``dy``, all (..., I); the product is empty unless wanted. Triton only."""
    return kernels().swiglu_backward(dy, gate, up, with_product)


def _backward_linear(ctx, dy: Tensor):  # type: ignore[no-untyped-def]
    gate, up, weight_DI = ctx.saved_tensors
    dy_MD = dy.reshape(-1, dy.shape[-1])
    dproduct = torch.mm(dy_MD, weight_DI).view(gate.shape)
    dgate, dup, product = swiglu_backward(dproduct, gate, up, ctx.needs_input_grad[2])
    del dproduct
    dweight_DI = torch.mm(dy_MD.t(), product.view(-1, product.shape[-1])) if ctx.needs_input_grad[2] else None
    return dgate, dup, dweight_DI, None


@register_op(
    lambda gate, up, weight_DI, wanted: gate.new_empty(*gate.shape[:-1], weight_DI.shape[0]),
    save=lambda ctx, inputs, output: ctx.save_for_backward(*inputs[:3]),
    backward=_backward_linear,
    direct=True,
)
def swiglu_linear(gate: Tensor, up: Tensor, weight_DI: Tensor, wanted: bool) -> Tensor:
    """``(silu(gate) * up) @ weight.T``, (..., I) to (..., D), which keeps ``gate``, ``up`` and the weight alone:
    backward computes the product again in the pass that makes the gradients. Triton only.

    ``wanted``: False leaves the result unwritten, for the second pass of a checkpoint. Raises ConfigurationError where
    shapes or types differ.
    """
    if gate.shape != up.shape or gate.dtype != up.dtype or gate.dtype != weight_DI.dtype:
        raise ConfigurationError(
            f"swiglu of {tuple(gate.shape)} {gate.dtype} and {tuple(up.shape)} {up.dtype} "
            f"for a {weight_DI.dtype} weight: they must match"
        )
    if weight_DI.dim() != 2 or weight_DI.shape[1] != gate.shape[-1]:
        raise ConfigurationError(f"a weight of {tuple(weight_DI.shape)} for {gate.shape[-1]} features: they do not fit")
    refuse_forward_mode("swiglu_linear")
    if not wanted:
        return gate.new_empty(*gate.shape[:-1], weight_DI.shape[0])
    product = kernels().swiglu(gate, up)
    return torch.mm(product.view(-1, product.shape[-1]), weight_DI.t()).view(*gate.shape[:-1], weight_DI.shape[0])


def rotary(q_BNSH: Tensor, k_BKSH: Tensor, cos: Tensor, sin: Tensor) -> tuple[Tensor, Tensor]:
    """Queries (H even) and keys of the same batch, sequence and width turned by their positions' angles.

    ``cos``, ``sin``: (S, H) or (B or 1, S, H), of any floating-point type; on the CPU they are rounded to the queries'
    type first. Raises ConfigurationError for shapes that do not belong together.
    """
    batch, _, length, width = q_BNSH.shape
    same = (k_BKSH.shape[0], k_BKSH.shape[2], k_BKSH.shape[3]) == (batch, length, width)
    tables = cos.shape == sin.shape and cos.shape in ((length, width), (1, length, width), (batch, length, width))
    if not same or not tables or width % 2 or q_BNSH.dtype != k_BKSH.dtype:
        raise ConfigurationError(
            f"rotary of queries {tuple(q_BNSH.shape)} {q_BNSH.dtype}, "
            f"keys {tuple(k_BKSH.shape)} {k_BKSH.dtype} and tables "
            f"{tuple(cos.shape)}, {tuple(sin.shape)}: they do not belong together"
        )
    if runs_triton("rotary", q_BNSH, q_BNSH.shape[-1]):
        return _rotary(q_BNSH, k_BKSH, cos, sin, False)
    cos, sin = (table.to(q_BNSH.dtype) for table in (cos, sin))
    if cos.dim() == 3:
        cos, sin = cos[:, None], sin[:, None]
    return _rotate(q_BNSH, cos, sin), _rotate(k_BKSH, cos, sin)


def store_rotated(
    q_BNH: Tensor,
    k_BKH: Tensor,
    v_BKH: Tensor,
    keys_BKTH: Tensor,
    values_BKTH: Tensor,
    cos_TH: Tensor,
    sin_TH: Tensor,
    position_1: Tensor,
) -> Tensor:
    """Put the rotated keys and the values at ``position_1`` (int64, on the device); returns the rotated queries (B, N,
    H).

    Tables are of all positions in fp32, as of `rotary_tables`. No gradient. Raises ConfigurationError for sizes that do
    not fit.
    """
    if q_BNH.shape[-1] % 2 or k_BKH.shape != v_BKH.shape or keys_BKTH.shape[:2] != k_BKH.shape[:2]:
        raise ConfigurationError(
            f"queries {tuple(q_BNH.shape)}, keys {tuple(k_BKH.shape)} and values {tuple(v_BKH.shape)} "
            f"for a cache of {tuple(keys_BKTH.shape)}"
        )
    if runs_triton("store_rotated", q_BNH, q_BNH.shape[-1]):
        return kernels().store(q_BNH, k_BKH, v_BKH, keys_BKTH, values_BKTH, cos_TH, sin_TH, position_1)
    tables = (cos_TH.index_select(0, position_1), sin_TH.index_select(0, position_1))
    q_BN1H, k_BK1H = rotary(q_BNH.unsqueeze(2), k_BKH.unsqueeze(2), *tables)
    keys_BKTH.index_copy_(2, position_1, k_BK1H)
    values_BKTH.index_copy_(2, position_1, v_BKH.unsqueeze(2))
    return q_BN1H.squeeze(2)


def _rotate(x_BNSH: Tensor, cos: Tensor, sin: Tensor) -> Tensor:
    left, right = x_BNSH.chunk(2, dim=-1)
    return x_BNSH * cos + torch.cat((-right, left), dim=-1) * sin


def _save_rotary(ctx, inputs, output) -> None:  # type: ignore[no-untyped-def]
    ctx.save_for_backward(inputs[2], inputs[3])
    ctx.inverse = inputs[4]


def _backward_rotary(ctx, dq_BNSH: Tensor, dk_BKSH: Tensor):  # type: ignore[no-untyped-def]
    return *_rotary(dq_BNSH, dk_BKSH, *ctx.saved_tensors, not ctx.inverse), None, None, None


@register_op(
    lambda q_BNSH, k_BKSH, *rest: (empty_of(q_BNSH), empty_of(k_BKSH)),
    save=_save_rotary,
    backward=_backward_rotary,
    direct=True,
)
def _rotary(q_BNSH: Tensor, k_BKSH: Tensor, cos: Tensor, sin: Tensor, inverse: bool) -> tuple[Tensor, Tensor]:
    return kernels().rotate(q_BNSH, k_BKSH, cos, sin, inverse)
