"""Flash Attention (Dao, arXiv:2307.08691) in Triton, forward and backward, with memory in proportion to the sequence.

No atomic additions: equal bits in every run. Rows that see nothing give zeros, in the output and in every gradient.
Results keep the strides of what came in. Causal attention over unequal lengths is aligned top left as in PyTorch's SDPA
unless ``bottom_right`` (the last query sees the last key), which decoding with a cache wants.

Legend: B batch, N query heads, K key heads, S queries, T keys, H head width.
"""

import functools
from collections.abc import Callable, Sequence
from typing import Any

import torch
from torch import Tensor

from vblackwell.errors import ConfigurationError, Unsupported
from vblackwell.kernels.attention.plan import lse_of
from vblackwell.kernels.runtime.registry import (
    empty_of,
    on_device,
    refuse_forward_mode,
    register_op,
    runs_directly,
    triton_reasons,
)

WIDEST_HEAD = 256
LARGEST_GRID = 65535  # CUDA's, of a launch's second and third dimension


def new_seed(device: torch.device) -> Tensor:
    """Seed and offset of a dropout mask (2,) int64, from torch's generator of ``device``, which is not waited for."""
    return torch.randint(0, 1 << 31, (2,), dtype=torch.int64, device=device)


def bounds(causal: bool, window: int | None) -> tuple[int | None, int | None]:
    """How many keys a query sees to its left and right of its own place, which ``window`` counts; None: all."""
    if window is not None and window < 1:
        raise ConfigurationError(f"a window of {window} keys: give at least 1, or None for all")
    side = None if window is None else window - 1
    return side, 0 if causal else side


def flash_attention(
    q_BNSH: Tensor,
    k_BKTH: Tensor,
    v_BKTH: Tensor,
    *,
    mask: Tensor | None = None,
    causal: bool = False,
    bottom_right: bool = False,
    window: int | None = None,
    scale: float | None = None,
    softcap: float | None = None,
    alibi_slopes_N: Tensor | None = None,
    dropout: float = 0.0,
    seed: Tensor | None = None,
) -> Tensor:
    """softmax(q k^T scale + mask) v of every head; differentiable in queries, keys and values.

    Args:
        q_BNSH: queries, H up to 256. Any strides; the last dimension is best contiguous.
        k_BKTH, v_BKTH: keys and values; N is a multiple of K.
        mask: broadcastable to (B, N, S, T): boolean (True attends) or added to the scores, no gradient; numbers near
            the least of fp32 hide as -inf does.
        causal: no key after the query's place is seen. Together with a mask both hold.
        bottom_right: the last query stands at the last key, instead of the first at the first.
        window: keys seen with the query's own: the last ``window`` with ``causal``, otherwise as many to each side.
        scale: of the scores, positive; default 1 / sqrt(H).
        softcap: scores s become softcap * tanh(s / softcap) before masks (Gemma 2, arXiv:2408.00118).
        alibi_slopes_N: fp32, no gradient; slope * distance is subtracted from the scores (arXiv:2108.12409).
        dropout: probability to drop a probability; the others are divided by 1 - dropout.
        seed: of the dropout, from ``new_seed``; default: a new one.

    Raises ConfigurationError where shapes, types or values do not belong together; Unsupported as `grid_reasons` says,
    and where Triton cannot run: on the CPU without its interpreter.
    """
    check_dense(q_BNSH, k_BKTH, v_BKTH, mask)
    check_options(q_BNSH, scale, softcap, alibi_slopes_N, dropout)
    planes = 0 if mask is None else mask.shape[:-2].numel()
    if q_BNSH.is_cuda and (reasons := grid_reasons(q_BNSH.shape[0], planes)):
        raise Unsupported(f"flash_attention of {'; '.join(reasons)}: cut the batch")
    mask = None if mask is None else _as_read(mask)
    tensors, lengths = (
        (q_BNSH, k_BKTH, v_BKTH, mask, alibi_slopes_N, seed),
        (None, None, q_BNSH.shape[2], k_BKTH.shape[2]),
    )
    return _attend(*tensors, lengths, causal, bottom_right, window, scale, softcap, dropout)


def _as_read(mask: Tensor) -> Tensor:
    """(.., S, T) as kernels read it: (1 or B, 1 or N, S, T), and what it says in memory, not the negative of it."""
    return mask.detach().resolve_neg()[(None,) * (4 - mask.dim())]


def dense_at_once(learns: bool, queries: int, keys: int, scale: float, options: Any) -> Callable[..., Tensor]:
    """`flash_attention` of queries, keys, values, a mask or None and slopes or None, with gradients if ``learns``:
    of arguments that were checked, which have no rules of their own, and with the ``options`` of a Variant, where
    nothing traces. Half of a call's time on the host would be for that."""
    numbers, dropout = (scale, *bounds(options.causal, options.window), options.bottom_right), options.dropout
    rest = (None, None, queries, keys, *numbers, options.softcap or 0.0, dropout)

    def run(q: Tensor, k: Tensor, v: Tensor, mask: Tensor | None, slopes_N: Tensor | None) -> Tensor:
        mask = None if mask is None else _as_read(mask)
        slopes_N = None if slopes_N is None else slopes_N.resolve_neg()
        seed = new_seed(q.device) if dropout else None
        return _at_once(learns, q, k, v, (mask, slopes_N, seed, *rest))

    return run


def flash_attention_varlen(
    q_SNH: Tensor,
    k_TKH: Tensor,
    v_TKH: Tensor,
    q_starts: Tensor,
    k_starts: Tensor,
    *,
    causal: bool = False,
    bottom_right: bool = False,
    window: int | None = None,
    scale: float | None = None,
    softcap: float | None = None,
    alibi_slopes_N: Tensor | None = None,
    dropout: float = 0.0,
    seed: Tensor | None = None,
) -> Tensor:
    """``flash_attention`` of sequences packed one after the other; returns (S, N, H), and raises the same.

    Args:
        q_starts, k_starts: (B + 1,) int32 on the device, ascending from 0: where each begins; the last is the number of
            rows. They are not looked at. Empty sequences cost a program a head and kernel.
    """
    if not (q_SNH.dim() == k_TKH.dim() == 3 and k_TKH.shape == v_TKH.shape and q_SNH.shape[-1] == k_TKH.shape[-1]):
        raise ConfigurationError(
            f"packed attention of {tuple(q_SNH.shape)}, {tuple(k_TKH.shape)}, {tuple(v_TKH.shape)}: "
            "give (S, N, H), (T, K, H) twice"
        )
    if not (
        q_starts.dtype == k_starts.dtype == torch.int32 and q_starts.shape == k_starts.shape and q_starts.dim() == 1
    ):
        raise ConfigurationError("packed attention: q_starts and k_starts are (B + 1,) int32")
    check_heads(q_SNH, k_TKH, v_TKH, 1)
    check_options(q_SNH, scale, softcap, alibi_slopes_N, dropout)
    tensors = (q_SNH, k_TKH, v_TKH, None, alibi_slopes_N, seed)
    lengths = (q_starts, k_starts, q_SNH.shape[0], k_TKH.shape[0])
    return _attend(*tensors, lengths, causal, bottom_right, window, scale, softcap, dropout)


def _attend(  # type: ignore[no-untyped-def]
    q, k, v, mask, slopes_N, seed, lengths, causal, bottom_right, window, scale, softcap, dropout
) -> Tensor:
    left, right = bounds(causal, window)
    seed = None if not dropout else new_seed(q.device) if seed is None else seed
    scale = q.shape[-1] ** -0.5 if scale is None else scale
    options = (mask, slopes_N, seed, *lengths, scale, left, right, bottom_right, softcap or 0.0, dropout)
    if runs_directly(q, k, v, *[x for x in (mask, slopes_N, seed, *lengths[:2]) if x is not None]):
        learns = torch.is_grad_enabled() and (q.requires_grad or k.requires_grad or v.requires_grad)
        return _at_once(learns, q, k, v, options)
    return _attention(q, k, v, *options)[0]


def grid_reasons(batch: int, mask_planes: int) -> list[str]:
    """What a launch has against so many sequences, and (S, T) planes of a mask."""
    found = ((batch, "sequences"), (mask_planes, "planes of a mask, along batch and heads"))
    return [f"{count} {what}: it takes {LARGEST_GRID}" for count, what in found if count > LARGEST_GRID]


def check_heads(q: Tensor, k: Tensor, v: Tensor, head_dim: int) -> None:
    if not (q.dtype == k.dtype == v.dtype and q.device == k.device == v.device):
        raise ConfigurationError(
            f"attention of {q.dtype} on {q.device}, {k.dtype} on {k.device}, {v.dtype} on {v.device}: they must match"
        )
    if k.shape[head_dim] == 0 or q.shape[head_dim] % k.shape[head_dim]:
        raise ConfigurationError(
            f"{q.shape[head_dim]} query heads over {k.shape[head_dim]} key heads: give a multiple of the key heads"
        )


def check_dense(q: Tensor, k: Tensor, v: Tensor, mask: Tensor | None) -> None:
    if not (q.dim() == k.dim() == 4 and k.shape == v.shape and q.shape[0] == k.shape[0] and q.shape[3] == k.shape[3]):
        raise ConfigurationError(
            f"attention of queries {tuple(q.shape)}, keys {tuple(k.shape)} and values {tuple(v.shape)}: "
            "give (B, N, S, H), (B, K, T, H) and (B, K, T, H)"
        )
    check_heads(q, k, v, 1)
    if mask is None:
        return
    if mask.dtype not in (torch.bool, torch.float32, q.dtype):
        raise ConfigurationError(
            f"an attention mask of {mask.dtype}: give torch.bool (True attends), or torch.float32 or {q.dtype} to add"
        )
    whole = (q.shape[0], q.shape[1], q.shape[2], k.shape[2])
    sizes = zip(reversed(mask.shape), reversed(whole), strict=False)
    if mask.dim() > 4 or any(size not in (1, full) for size, full in sizes) or mask.device != q.device:
        raise ConfigurationError(
            f"an attention mask of {tuple(mask.shape)} on {mask.device} does not broadcast to {whole} on {q.device}"
        )


def check_options(
    q: Tensor, scale: float | None, softcap: float | None, slopes_N: Tensor | None, dropout: float
) -> None:
    if scale is not None and not scale > 0:
        raise ConfigurationError(
            f"an attention scale of {scale}: give a positive one; negate the queries for a negative one"
        )
    if softcap is not None and not softcap > 0:
        raise ConfigurationError(f"a soft cap of {softcap}: give a positive one, or None")
    if not 0 <= dropout < 1:
        raise ConfigurationError(f"a dropout of {dropout}: give at least 0 and less than 1")
    if q.shape[-1] < 1:
        raise ConfigurationError("attention of heads without width")
    if slopes_N is not None and (slopes_N.shape != (q.shape[1],) or slopes_N.dtype != torch.float32):
        raise ConfigurationError(
            f"ALiBi slopes of {tuple(slopes_N.shape)} {slopes_N.dtype}: give ({q.shape[1]},) torch.float32"
        )


@functools.cache
def _launches() -> Any:
    """Its module, which imports triton: where kernels run."""
    from vblackwell.kernels.attention import launch

    return launch


def _launch_options(options: tuple[Any, ...]) -> Any:
    *others, scale, left, right, bottom_right, softcap, dropout = options
    numbers = (float(scale), left, right, bottom_right, float(softcap), float(dropout))  # none may be an int
    return _launches().Options(*others, *numbers)


def _forward(q: Tensor, k: Tensor, v: Tensor, options: tuple[Any, ...]) -> tuple[Tensor, Tensor]:
    refuse_forward_mode("attention")
    if not q.is_cuda and (reasons := triton_reasons(q.device, (0, 0))):
        other = "vblackwell.nn.attention.backends.attention takes PyTorch's backends there"
        raise Unsupported(f"flash_attention: {'; '.join(reasons)}; {other}")
    with on_device(q):
        return _launches().forward(q, k, v, _launch_options(options))


def _gradients(dout: Tensor, tensors: Sequence[Tensor], options: tuple[Any, ...]) -> tuple[Tensor, Tensor, Tensor]:
    """Of queries, keys and values; ``tensors``: these, the output and the log-sum-exps."""
    with on_device(dout):
        return _launches().backward(dout, *tensors, _launch_options(options))


class _AtOnce(torch.autograd.Function):
    """`_attention` for autograd alone, which takes less of the host with fewer arguments."""

    @staticmethod
    def forward(ctx: Any, q: Tensor, k: Tensor, v: Tensor, options: tuple[Any, ...]) -> Tensor:
        out, lse = _forward(q, k, v, options)
        ctx.save_for_backward(q, k, v, out, lse, *options[:5])
        ctx.numbers = options[5:]
        return out

    @staticmethod
    def backward(ctx: Any, dout: Tensor) -> tuple[Tensor | None, ...]:  # type: ignore[override]
        q, k, v, out, lse, *others = ctx.saved_tensors
        if torch.is_grad_enabled() or not runs_directly(dout):  # the op says that it has no second derivative
            return *_attention_backward(dout, q, k, v, out, lse, *others, *ctx.numbers), None
        return *_gradients(dout, (q, k, v, out, lse), (*others, *ctx.numbers)), None


# `Function.apply` would ask once more whether there are transforms.
_apply: Any = super(torch.autograd.Function, _AtOnce).apply  # pyright: ignore[reportAttributeAccessIssue]


def _at_once(learns: bool, q: Tensor, k: Tensor, v: Tensor, options: tuple[Any, ...]) -> Tensor:
    """Where `runs_directly`: ``options`` are what `_attention` takes in addition."""
    return _apply(q, k, v, options) if learns else _forward(q, k, v, options)[0]


def _save(ctx, inputs, output) -> None:  # type: ignore[no-untyped-def]
    q, k, v, mask, slopes_N, seed, q_starts, k_starts, *ctx.numbers = inputs
    ctx.save_for_backward(q, k, v, *output, mask, slopes_N, seed, q_starts, k_starts)
    ctx.set_materialize_grads(False)


def _backward(ctx, dout: Tensor | None, dlse: None):  # type: ignore[no-untyped-def]
    gradients = (None,) * 3 if dout is None else _attention_backward(dout, *ctx.saved_tensors, *ctx.numbers)
    return *gradients, *(None,) * 13


@register_op(lambda q, *rest: (empty_of(q), lse_of(q)), save=_save, backward=_backward)
def _attention(
    q: Tensor,
    k: Tensor,
    v: Tensor,
    mask: Tensor | None,
    slopes_N: Tensor | None,
    seed: Tensor | None,
    q_starts: Tensor | None,
    k_starts: Tensor | None,
    max_q: int,
    max_k: int,
    scale: float,
    left: int | None,
    right: int | None,
    bottom_right: bool,
    softcap: float,
    dropout: float,
) -> tuple[Tensor, Tensor]:
    lengths = (q_starts, k_starts, max_q, max_k)
    return _forward(q, k, v, (mask, slopes_N, seed, *lengths, scale, left, right, bottom_right, softcap, dropout))


@register_op(lambda dout, q, k, v, *others: (empty_of(q), empty_of(k), empty_of(v)))
def _attention_backward(
    dout: Tensor,
    q: Tensor,
    k: Tensor,
    v: Tensor,
    out: Tensor,
    lse: Tensor,
    mask: Tensor | None,
    slopes_N: Tensor | None,
    seed: Tensor | None,
    q_starts: Tensor | None,
    k_starts: Tensor | None,
    max_q: int,
    max_k: int,
    scale: float,
    left: int | None,
    right: int | None,
    bottom_right: bool,
    softcap: float,
    dropout: float,
) -> tuple[Tensor, Tensor, Tensor]:
    options = (
        mask,
        slopes_N,
        seed,
        q_starts,
        k_starts,
        max_q,
        max_k,
        scale,
        left,
        right,
        bottom_right,
        softcap,
        dropout,
    )
    return _gradients(dout, (q, k, v, out, lse), options)
