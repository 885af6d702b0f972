"""How backends run that are not the own kernel: `run_sdpa` and `run_math` anywhere, `operator` where nothing is traced.

Legend: B batch, N query heads, K key heads, S queries, T keys, H head width.
"""

import functools
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
MAX_KEPT_BYTES = 1 << 19  # of bounds that became numbers
ROW = 16  # elements: 'efficient' reads a bias whose rows are at multiples of 32 bytes
HAS_OPERATORS = all(hasattr(torch, f"_scaled_dot_product_{name}") for name in _OPERATORS)
HAS_CUDNN_BACKWARD = hasattr(torch.ops.aten, "_scaled_dot_product_cudnn_attention_backward")
CUT = 32  # keys of the second call of `_CudnnInTwo`; those before are then no 64 over a multiple of 128


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
    if x_BKTH.shape[1] == 1:
        return x_BKTH.expand(-1, heads, -1, -1)  # it reads heads by their stride
    return x_BKTH.repeat_interleave(heads // x_BKTH.shape[1], dim=1)


def _rows(q: Tensor, keys: int, multiple: int, *lead: int) -> Tensor:
    """Memory for a bias (..., T) in the queries' type, rows at multiples of ``multiple`` elements."""
    padded = -(-keys // multiple) * multiple
    if padded == keys:
        return q.new_empty((*lead, keys))
    return q.new_zeros((*lead, padded))[..., :keys]  # what pads a row is read, multiplied by zero: it must be finite


@functools.cache
def _shown_and_hidden(dtype: torch.dtype, device: torch.device) -> tuple[Tensor, ...]:
    """0 and -inf; copied from the host, which waits until they are there, because all streams read them."""
    with torch.inference_mode(False):
        return torch.tensor([0.0, -torch.inf], dtype=dtype, device="cpu").to(device).unbind()


def _bias_of(
    mask: Tensor, dtype: torch.dtype, keys: int, multiple: int, captured: bool = False
) -> Callable[[Any, Tensor], Tensor]:
    """What makes numbers to add, (1 or B, 1 or N, 1 or S, T) in ``dtype``, rows at multiples of ``multiple`` elements,
    of a mask that is laid out as ``mask``, given it and the queries."""
    lead = (None,) * (4 - mask.dim())
    like = mask[lead]
    once = [dim for dim in range(3) if like.stride(dim) == 0 and like.shape[dim] > 1]
    for dim in once:
        like = like.narrow(dim, 0, 1)  # of an expanded mask what is there
    *steps, last = like.stride()
    sizes, boolean, along = like.shape[:3], like.dtype == torch.bool, like.shape[3] == keys
    fits = along and like.dtype == dtype and last == 1 and not any(step % multiple for step in steps)
    # In one call, where rows are as they should be; a graph would make the numbers, for others to read too early.
    selects = boolean and along and keys % multiple == 0 and like.is_contiguous() and not captured
    numbers = _shown_and_hidden(dtype, mask.device) if selects else ()

    def bias(mask: Any, q: Tensor) -> Tensor:
        if lead:
            mask = mask[lead]
        for dim in once:
            mask = mask.narrow(dim, 0, 1)
        if fits and not mask.data_ptr() % 32:
            return mask
        if selects:
            return torch.where(mask, *numbers)
        made = _rows(q, keys, multiple, *sizes)
        if boolean:  # of 1 the logarithm is 0, of 0 -inf: in one launch
            return torch.log(mask if along else mask.expand(made.shape), out=made)
        return made.copy_(mask)

    return bias


def _bounds_bias(
    queries: int, keys: int, left: int | None, right: int | None, offset: int, dtype: torch.dtype, device: torch.device
) -> Tensor:
    """Bounds, as device.py has them, as numbers to add, (S, T), rows at multiples of `ROW`."""
    hidden = torch.full((queries, -(-keys // ROW) * ROW), -torch.inf, dtype=dtype, device=device)
    parts = [] if right is None else [hidden.triu(offset + right + 1)]
    parts += [] if left is None else [hidden.tril(offset - left - 1)]
    return (parts[0] if len(parts) == 1 else parts[0].add_(parts[1]))[:, :keys]


@functools.lru_cache(maxsize=8)
def _kept_bounds_bias(stream: int, sizes: tuple[int, ...], *what: Any) -> Tensor:
    """`_bounds_bias`, made once on a ``stream``: another one would have to wait for it."""
    with torch.inference_mode(False):  # what is made in that mode could not be saved for a backward
        return _bounds_bias(*what).expand(sizes)


def _bounds_of(r: AttentionRequest, how: Variant, device: torch.device) -> Callable[[], Tensor]:
    """What gives the bounds of calls as ``r`` as numbers to add, (S, T), or (B, N, S, T) where they have no mask: kept
    where they are small, 8 of them, but not in a graph, which would need them for as long as it may be replayed."""
    sizes = (r.batch, r.heads, r.queries, r.keys) if r.mask == "none" else (r.queries, r.keys)
    seen = (*op.bounds(how.causal, how.window), r.keys - r.queries if how.bottom_right else 0)
    what = (r.queries, r.keys, *seen, r.dtype, device)
    size_bytes = r.queries * -(-r.keys // ROW) * ROW * r.dtype.itemsize
    if r.captured or size_bytes > MAX_KEPT_BYTES:
        return lambda: _bounds_bias(*what).expand(sizes)
    if device.type != "cuda":
        return lambda: _kept_bounds_bias(0, sizes, *what)
    current = torch._C._cuda_getCurrentRawStream
    return lambda: _kept_bounds_bias(current(device.index), sizes, *what)


def in_two(keys: int) -> bool:
    """Whether cuDNN's backward with a mask goes wrong over so many keys at once."""
    return keys % 128 == 64


class _CudnnInTwo(torch.autograd.Function):
    """cuDNN with a bias (.., T) over keys of which 64 are left over by 128. Its backward gives NaN there where
    log-sum-exps are low (pytorch/pytorch#196678), so it is called for the last `CUT` keys alone and for those before:
    either gives the gradients of its keys, and its part of the queries', by the log-sum-exps of all. The two parts are
    rounded before they are added: the last keys' is small.
    """

    @staticmethod
    def forward(ctx: Any, q: Tensor, k: Tensor, v: Tensor, bias: Tensor, scale: float | None) -> Tensor:
        run, ctx.scale = _TORCH._scaled_dot_product_cudnn_attention, scale
        out, lse, _, _, _, _, seed, offset, _ = run(q, k, v, bias, True, 0.0, False, scale=scale)
        ctx.save_for_backward(q, k, v, bias, out, lse, seed, offset)
        return out

    @staticmethod
    @torch.autograd.function.once_differentiable
    def backward(ctx: Any, dout: Tensor) -> tuple[Tensor | None, ...]:  # type: ignore[override]
        q, k, v, bias, out, lse, *drawn = ctx.saved_tensors
        cut, keys, run = k.shape[2] - CUT, k.shape[2], torch.ops.aten._scaled_dot_product_cudnn_attention_backward
        found = []
        for start, end in ((0, cut), (cut, keys)):
            some, sizes = (x[:, :, start:end] for x in (k, v)), (None, None, q.shape[2], end - start)
            rest = (*drawn, bias[..., start:end], *sizes, 0.0, False)
            found.append(run(dout, q, *some, out, lse, *rest, scale=ctx.scale))
        (dq, *first), (more, *last) = found
        pairs = zip(first, last, ctx.needs_input_grad[1:3], strict=True)
        return dq.add_(more), *(torch.cat(pair, 2) if wanted else None for *pair, wanted in pairs), None, None


def _plainly(r: AttentionRequest, how: Variant) -> Run:
    """PyTorch's `scaled_dot_product_attention`. An operator's other results, which autograd keeps, would be Python's
    objects too, which the thread of the backward had to wait for."""
    run, dropout, causal = functional.scaled_dot_product_attention, how.dropout, how.causal
    given: dict[str, Any] = {} if how.scale is None else {"scale": how.scale}
    if r.heads != r.kv_heads:
        given["enable_gqa"] = True
    if r.mask == "none" and not given:
        return lambda q, k, v, now: run(q, k, v, None, dropout, causal)
    if r.mask == "none":
        return lambda q, k, v, now: run(q, k, v, None, dropout, causal, **given)

    def added(q: Tensor, k: Tensor, v: Tensor, now: Variant) -> Tensor:
        assert now.mask is not None
        mask = now.mask if not now.mask.data_ptr() % 32 else now.mask.clone()  # kernels read it aligned
        return run(q, k, v, mask, dropout, causal, **given)

    return added


def operator(name: str, r: AttentionRequest, how: Variant, device: torch.device, free: bool) -> Run | None:
    """What backend ``name``, of a ``free`` choice or asked for, runs for such requests where nothing is traced, with
    ``how``, whose tensors are looked at and not kept; None: what it runs anywhere.

    PyTorch's are called without `sdpa_kernel`, which takes 20 us and turns switches that all threads see; `_plainly`
    obeys them, as PyTorch itself does.
    """
    scale, causal, dropout, learns = how.scale, how.causal, how.dropout, r.gradient
    given: dict[str, Any] = {} if scale is None else {"scale": scale}  # an argument less to read
    if name == "triton":
        own = op.dense_at_once(learns, r.queries, r.keys, r.head**-0.5 if scale is None else scale, how)
        return lambda q, k, v, now: own(q, k, v, now.mask, now.alibi_slopes_N)
    wrong = r.mask != "none" and learns and in_two(r.keys)  # by cuDNN
    least = name == "efficient" and not learns and (r.mask == "none" or r.keys % ROW == 0)  # of the host, by itself
    if free and r.chosen == name and not wrong and not least:
        return _plainly(r, how)
    if HAS_OPERATORS and name == "cudnn" and r.mask == "none":
        run = _TORCH._scaled_dot_product_cudnn_attention
        return lambda q, k, v, now: run(q, k, v, None, learns, dropout, causal, **given)[0]
    if HAS_OPERATORS and name == "flash" and r.device == "cpu" and r.mask == "none":
        run = _TORCH._scaled_dot_product_flash_attention_for_cpu
        return lambda q, k, v, now: run(q, k, v, dropout, causal, **given)[0]
    if HAS_OPERATORS and name == "flash" and r.device == "cuda" and r.head % 8 == 0:  # else PyTorch pads it
        run = _TORCH._scaled_dot_product_flash_attention
        return lambda q, k, v, now: run(q, k, v, dropout, causal, **given)[0]
    multiple = 1 if name == "cudnn" else ROW
    bias_of = None if how.mask is None else _bias_of(how.mask, r.dtype, r.keys, multiple, r.captured)
    if HAS_OPERATORS and name == "cudnn" and bias_of is not None:  # it reads a bias as it is, and takes no bounds
        if learns and in_two(r.keys):
            return lambda q, k, v, now: _CudnnInTwo.apply(q, k, v, bias_of(now.mask, q), scale)
        run = _TORCH._scaled_dot_product_cudnn_attention
        return lambda q, k, v, now: run(q, k, v, bias_of(now.mask, q), learns, dropout, False, **given)[0]
    if HAS_OPERATORS and name == "efficient" and not r.mask_gradient:
        run = _TORCH._scaled_dot_product_efficient_attention
        whole, bounds_of = (r.batch, r.heads, r.queries, r.keys), _bounds_of(r, how, device) if r.bounded else None
        shares_heads, causal = r.heads != r.kv_heads, causal and not r.bounded

        def efficient(q: Tensor, k: Tensor, v: Tensor, now: Variant) -> Tensor:
            if shares_heads:
                k, v = _repeated(k, r.heads), _repeated(v, r.heads)
            bias = None if bounds_of is None else bounds_of()
            if bias_of is not None:
                added = bias_of(now.mask, q)
                if bias is not None:
                    added = torch.add(added, bias, out=_rows(q, r.keys, ROW, *added.shape[:2], r.queries))
                bias = added.expand(whole)
            return run(q, k, v, bias, learns, dropout, causal, **given)[0]

        return efficient
    return None
