"""Linear layer and cross entropy in one: ``sum_i -log softmax(hidden_i W^T + b)[target_i]``, the logits never whole.

A chunk of tokens at a time: logits in the type of ``hidden``, loss and log-sum-exp in fp32, logits overwritten by their
gradient, and with it at once the gradients of hidden states and weight. Backward only multiplies what was saved by the
incoming gradient. All sums are in a fixed order: equal calls give equal bits.

The gradients of n chunks add up in the weight's type, so in bf16 the error is at most n * 2^-8 of the largest partial
sum, typically sqrt(n) times that of rounding once. Sums of fp16 stay fp32 until backward has divided them by the number
of tokens and multiplied them by a loss scale: they would be infinite, and terms divided beforehand would vanish.

Legend: T tokens, D width, V vocabulary, C tokens of a chunk.
"""

from collections.abc import Callable

import torch
from torch import Tensor

from vblackwell.errors import ConfigurationError
from vblackwell.kernels.pointwise.rows import kernels
from vblackwell.kernels.runtime.registry import refuse_forward_mode, register_op, runs_triton

CHUNK_BYTES = 256 << 20  # of logits; large enough for matrix kernels at any vocabulary in use
CHUNK_MULTIPLE = 256
WIDE = 8  # elements of the widest load; cuBLAS takes kernels with narrower ones where a vocabulary is no multiple of it
WHOLE_WORDS = 64


def chunk_tokens_for(vocabulary: int, itemsize: int) -> int:
    """Tokens whose logits take `CHUNK_BYTES`, in multiples of `CHUNK_MULTIPLE`."""
    return max(1, CHUNK_BYTES // (vocabulary * itemsize) // CHUNK_MULTIPLE) * CHUNK_MULTIPLE


def word_parts(words: int, *, on_gpu: bool) -> list[slice]:
    """The vocabulary in parts of one product each: on a GPU a multiple of `WHOLE_WORDS`, and what is left.

    With all of 86,809 words an H200 made logits and gradients of hidden states at 120 TFLOP/s.
    """
    whole = words // WHOLE_WORDS * WHOLE_WORDS
    if not on_gpu or words % WIDE == 0 or not whole:
        return [slice(0, words)]
    return [slice(0, whole), slice(whole, words)]


def linear_cross_entropy(
    hidden: Tensor,
    weight_VD: Tensor,
    targets: Tensor,
    bias_V: Tensor | None = None,
    *,
    ignore_index: int = -100,
    reduction: str = "mean",
    chunk_tokens: int | None = None,
) -> Tensor:
    """Cross entropy of ``hidden W^T + b`` against ``targets``, a scalar in fp32.

    If no token counts, the mean is 0 with zero gradients. A target outside the vocabulary makes the loss NaN.

    Args:
        hidden: (..., D); under autocast it and the weight are cast as by a linear layer.
        weight_VD, bias_V: of the same type as ``hidden``; the bias may be None.
        targets: (...) integers, one for each row of ``hidden``; tokens of ``ignore_index`` do not count.
        reduction: 'mean' over the tokens that count, or 'sum'.
        chunk_tokens: tokens whose logits exist at a time; default: what 256 MiB hold.

    Raises ConfigurationError where shapes or types do not belong together, or for an unknown reduction.
    """
    if torch.is_autocast_enabled(hidden.device.type):
        dtype = torch.get_autocast_dtype(hidden.device.type)
        hidden, weight_VD = hidden.to(dtype), weight_VD.to(dtype)
        bias_V = None if bias_V is None else bias_V.to(dtype)
    _check(hidden, weight_VD, targets, bias_V, reduction, chunk_tokens)
    targets_T = targets.reshape(-1)
    grad = torch.is_grad_enabled()
    wanted = [grad and x is not None and x.requires_grad for x in (hidden, weight_VD, bias_V)]
    chunk = chunk_tokens or chunk_tokens_for(weight_VD.shape[0], hidden.element_size())
    total = _linear_cross_entropy(
        hidden.reshape(-1, hidden.shape[-1]), weight_VD, bias_V, targets_T, ignore_index, chunk, *wanted
    )[0]
    if reduction == "sum":
        return total
    return total / (targets_T != ignore_index).sum().clamp(min=1)


def _sum_type(dtype: torch.dtype) -> torch.dtype:
    """In which a gradient that is a sum over tokens waits for backward."""
    return torch.float32 if dtype == torch.float16 else dtype


def _check(
    hidden: Tensor, weight_VD: Tensor, targets: Tensor, bias_V: Tensor | None, reduction: str, chunk: int | None
) -> None:
    if reduction not in ("mean", "sum"):
        raise ConfigurationError(f"reduction {reduction!r} is not known: choose 'mean' or 'sum'")
    if chunk is not None and chunk < 1:
        raise ConfigurationError(f"chunk_tokens is {chunk}: give at least 1")
    if weight_VD.dim() != 2 or hidden.shape[-1] != weight_VD.shape[1] or hidden.shape[:-1] != targets.shape:
        raise ConfigurationError(
            f"hidden {tuple(hidden.shape)}, weight {tuple(weight_VD.shape)} and targets {tuple(targets.shape)} "
            "do not belong together: give (..., D), (V, D) and (...)"
        )
    if bias_V is not None and bias_V.shape != weight_VD.shape[:1]:
        raise ConfigurationError(f"a bias of {tuple(bias_V.shape)} for {weight_VD.shape[0]} words")
    if targets.is_floating_point() or targets.is_complex() or targets.dtype == torch.bool:
        raise ConfigurationError(f"targets are {targets.dtype}: give word numbers")
    types = {x.dtype for x in (hidden, weight_VD, bias_V) if x is not None}
    if len(types) > 1 or not hidden.is_floating_point():
        raise ConfigurationError(
            f"hidden, weight and bias are {', '.join(map(str, types))}: give one floating-point type"
        )


def _fake_linear_cross_entropy(hidden_TD, weight_VD, *rest):  # type: ignore[no-untyped-def]
    with_hidden, with_weight, with_bias = rest[-3:]
    return (
        hidden_TD.new_empty((), dtype=torch.float32),
        hidden_TD.new_empty(hidden_TD.shape if with_hidden else (0,)),
        hidden_TD.new_empty(weight_VD.shape if with_weight else (0,), dtype=_sum_type(hidden_TD.dtype)),
        hidden_TD.new_empty(weight_VD.shape[:1] if with_bias else (0,), dtype=_sum_type(hidden_TD.dtype)),
    )


def _save(ctx, inputs, output) -> None:  # type: ignore[no-untyped-def]
    ctx.save_for_backward(*output[1:])
    ctx.dtype = inputs[0].dtype
    ctx.set_materialize_grads(False)


def _backward(ctx, dloss: Tensor | None, *unused: None):  # type: ignore[no-untyped-def]
    nothing = [None] * 5
    if dloss is None:
        return None, None, None, None, *nothing
    dhidden, dweight, dbias = (
        _scaled(x, dloss).to(ctx.dtype) if needed else None
        for x, needed in zip(ctx.saved_tensors, ctx.needs_input_grad[:3], strict=True)
    )
    return dhidden, dweight, dbias, None, *nothing


@register_op(_fake_linear_cross_entropy, save=_save, backward=_backward, direct=True)
def _linear_cross_entropy(
    hidden_TD: Tensor,
    weight_VD: Tensor,
    bias_V: Tensor | None,
    targets_T: Tensor,
    ignore_index: int,
    chunk: int,
    with_hidden: bool,
    with_weight: bool,
    with_bias: bool,
) -> tuple[Tensor, Tensor, Tensor, Tensor]:
    """The summed loss, and the gradients of hidden states, weight and bias for an incoming 1; empty if not wanted."""
    refuse_forward_mode("linear_cross_entropy")
    tokens, words, sum_type = hidden_TD.shape[0], weight_VD.shape[0], _sum_type(hidden_TD.dtype)
    dhidden_TD = torch.empty_like(hidden_TD) if with_hidden else hidden_TD.new_empty(0)
    sum_VD = torch.empty_like(weight_VD, dtype=sum_type) if with_weight else hidden_TD.new_empty(0, dtype=sum_type)
    if not tokens:
        sum_VD.zero_()
    dbias_V = hidden_TD.new_zeros(words if with_bias else 0, dtype=torch.float32)
    loss_T = hidden_TD.new_empty(tokens, dtype=torch.float32)
    # Rows start at multiples of 128 bytes: matrix kernels need 16 for their wide loads, and 50257 words would give 2.
    buffer_CV = hidden_TD.new_empty(min(chunk, tokens), -(-words // 64) * 64)[:, :words]
    words_of = word_parts(words, on_gpu=hidden_TD.is_cuda)
    step = kernels().loss_and_gradient_ if runs_triton("cross_entropy", hidden_TD, 0) else _torch_step
    with torch.autocast(hidden_TD.device.type, enabled=False):
        for start in range(0, tokens, chunk):
            part = slice(start, min(start + chunk, tokens))
            hidden_CD, targets_C = hidden_TD[part], targets_T[part]
            logits_CV = buffer_CV[: hidden_CD.shape[0]]
            for own in words_of:
                if bias_V is None:
                    torch.mm(hidden_CD, weight_VD[own].t(), out=logits_CV[:, own])
                else:
                    torch.addmm(bias_V[own], hidden_CD, weight_VD[own].t(), out=logits_CV[:, own])
            gradients = with_hidden or with_weight or with_bias
            step(logits_CV, targets_C, loss_T[part], ignore_index, gradients)
            if with_hidden:
                for own in reversed(words_of):  # the few words first: their sum alone is rounded on the way
                    add_product(dhidden_TD[part], logits_CV[:, own], weight_VD[own], own is words_of[-1])
            if with_weight:
                for own in words_of:
                    add_product(sum_VD[own], logits_CV[:, own].t(), hidden_CD, start == 0)
            if with_bias:
                dbias_V += logits_CV.sum(0, dtype=torch.float32)
    return loss_T.sum(), dhidden_TD, sum_VD, dbias_V.to(sum_type)


def add_product(total: Tensor, left: Tensor, right: Tensor, first: bool) -> None:
    """Add ``left @ right`` to ``total``, in its type; ``first`` writes it."""
    options = {}
    if total.dtype != left.dtype:
        if left.is_cuda:
            options["out_dtype"] = torch.float32
        else:
            left, right = left.float(), right.float()
    if first:
        torch.mm(left, right, **options, out=total)
    else:
        torch.addmm(total, left, right, **options, out=total)


def _torch_step(logits_CV: Tensor, targets_C: Tensor, loss_C: Tensor, ignore_index: int, gradients: bool) -> None:
    """``loss_C`` from the logits, which become their own gradient."""
    wide_CV = logits_CV.double() if logits_CV.dtype == torch.float64 else logits_CV.float()
    lse_C = torch.logsumexp(wide_CV, 1)
    counted_C = targets_C != ignore_index
    valid_C = (targets_C >= 0) & (targets_C < wide_CV.shape[1])
    index_C1 = targets_C.where(valid_C, 0)[:, None]
    logit_C = wide_CV.gather(1, index_C1)[:, 0].where(valid_C, torch.nan)
    loss_C.copy_((lse_C - logit_C).where(counted_C, 0.0))
    if gradients:
        wide_CV = (wide_CV - lse_C[:, None]).exp_()
        wide_CV.scatter_add_(1, index_C1, torch.full_like(lse_C, -1.0)[:, None])
        logits_CV.copy_(wide_CV.where(counted_C[:, None], 0.0))


@register_op(lambda x, factor: torch.empty_like(x), direct=True)
def _scale_by(x: Tensor, factor: Tensor) -> Tensor:
    """``x * factor`` in fp32, rounded once to the type of ``x``: a 0-dim factor would be rounded to it first."""
    if runs_triton("cross_entropy", x, 0):
        return kernels().scale(x, factor)
    return (x.float() * factor).to(x.dtype) if x.element_size() < 4 else x * factor


@torch.library.custom_op("vblackwell::scale_by_", mutates_args=("x",))  # an op, so that a trace launches nothing
def _scale_by_(x: Tensor, factor: Tensor) -> None:
    if runs_triton("cross_entropy", x, 0):
        kernels().scale(x, factor, out=x)
    else:
        x.copy_(x.float() * factor if x.element_size() < 4 else x * factor)


def _scaled(x: Tensor, factor: Tensor) -> Tensor:
    """``x * factor``, in the memory of ``x``, as large as the head, if nobody will ask for it again."""
    traced = type(x) is not Tensor  # a compiler's stand-in: what is saved there must stay as it was
    if traced or torch.compiler.is_compiling() or _keeps_graph():
        return _scale_by(x, factor)
    _scale_by_(x, factor)
    return x


_AUTOGRAD = getattr(torch._C, "_autograd")  # noqa: B009 - untyped
_keeps_graph: Callable[[], bool] = _AUTOGRAD._get_current_graph_task_keep_graph
