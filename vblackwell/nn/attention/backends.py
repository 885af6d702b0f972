"""Which attention runs: ``triton`` (kernels/attention/op.py), ``cudnn``, ``flash`` or ``efficient`` (PyTorch's SDPA) or
``math`` (kernels/attention/reference.py: everything else, any device). Each says why not.

Of those that accept a request the one runs that takes the least time of what ``benchmarks/bench_attention.py --tune``
has measured on this machine; where nothing was measured, and under ``torch.compile``, which cannot read the tables, the
order is that of ``preference``. A call is checked, and its backend chosen, once for all calls alike: `_key` is what
they have in common, and what is kept for it runs the backend's operator itself. Since a key takes longer to make and
find than all else here, a call is compared first with the last one of its options (`_last`).

Legend: B batch, N query heads, K key heads, S queries, T keys, H head width.
"""

import math
from collections.abc import Callable, Iterable, Iterator
from functools import partial
from typing import Any, NamedTuple

import torch
from torch import Tensor, nn
from torch.autograd import forward_ad
from torch.compiler import is_compiling

from vblackwell.errors import Unsupported, check_known
from vblackwell.kernels.attention import op
from vblackwell.kernels.runtime import registry, tuning
from vblackwell.nn.attention.documents import Documents, mask_or_documents
from vblackwell.nn.attention.operators import (
    HAS_CUDNN_BACKWARD,
    HAS_OPERATORS,
    ROW,
    Run,
    in_two,
    operator,
    run_math,
    run_sdpa,
)
from vblackwell.nn.attention.request import (
    PLAIN,
    SDP,
    AttentionRequest,
    Variant,
    computes_at_once,
    is_captured,
    request_of,
)

KIND = "attention"  # of its entries in runtime/tuning.py
HALF = (torch.bfloat16, torch.float16)
CUDNN_MASKS = 91900  # the release, as torch.backends.cudnn.version() says it
LIGHT = 1 << 28  # operations of a forward that 'efficient' computes in about the time that the host calls it in
MAX_BOUNDED_SCORES = 1 << 22  # of bounds that become a mask: 8 MB
# By name here, because every call asks them, and each attribute on the way costs.
_deterministic, _flash_enabled = torch._C._get_deterministic_algorithms, torch._C._get_flash_sdp_enabled
_efficient_enabled, _cudnn_enabled = torch._C._get_mem_efficient_sdp_enabled, torch._C._get_cudnn_sdp_enabled
_grad_enabled, _any_autocast = torch.is_grad_enabled, torch._C._is_any_autocast_enabled
_function_modes, _dispatch_modes = torch._C._len_torch_function_stack, torch._C._len_torch_dispatch_stack
_priorities = getattr(torch._C, "_get_sdp_priority_order", tuple)


# Generators: whether one refuses is asked at every call, and only what is read is written out.


def _common_reasons(r: AttentionRequest, dtypes: tuple[torch.dtype, ...], widest: int) -> Iterator[str]:
    yield from registry.dtype_reasons(r.dtype, dtypes)
    if r.head > widest:
        yield f"a head of {r.head}: it takes {widest}"


def _triton_reasons(r: AttentionRequest) -> Iterator[str]:
    on_cuda = r.device == "cuda"
    yield from registry.triton_reasons(r.device, r.capability)
    dtypes = (*HALF, torch.float32) if on_cuda else (torch.float16, torch.float32, torch.float64)
    yield from _common_reasons(r, dtypes, op.WIDEST_HEAD)
    if r.mask_gradient:
        yield "the mask wants a gradient"
    if on_cuda:
        yield from op.grid_reasons(r.batch, r.mask_planes)


def _torch_reasons(r: AttentionRequest, name: str, dtypes: tuple[torch.dtype, ...], widest: int) -> Iterator[str]:
    yield from _common_reasons(r, dtypes, widest)
    if name in (r.refused or ()):
        yield "PyTorch refuses it for these tensors: by sdpa_kernel or torch.backends.cuda, their strides or dropout"
    if min(r.queries, r.keys) == 0:
        yield "an empty sequence"
    made_masks = name == "efficient" and HAS_OPERATORS and r.refused is not None and not r.mask_gradient
    if r.window is not None and not made_masks:
        yield "a sliding window"
    if r.softcap:
        yield "a soft cap"
    if r.alibi:
        yield "ALiBi"
    if r.causal and r.mask != "none" and not made_masks:
        yield "causal together with a mask"
    if r.causal and r.bottom_right and r.queries != r.keys and not made_masks:
        yield f"causal from the bottom right over {r.queries} x {r.keys}"


def _cudnn_reasons(r: AttentionRequest) -> Iterator[str]:
    # On Hopper it takes wider heads, where this torch and cuDNN do, which have to be asked.
    wide = r.capability == (9, 0) and r.refused is not None
    yield from _torch_reasons(r, "cudnn", HALF, 256 if wide else 128)
    if r.device != "cuda" or r.capability < (8, 0):
        yield "it needs a CUDA GPU of compute capability 8.0"
    if r.head % 8:
        yield f"a head of {r.head} is no multiple of 8"
    if r.mask != "none":
        yield from _cudnn_mask_reasons(r)
    if r.causal and r.queries != r.keys:
        yield f"causal over {r.queries} x {r.keys}"
    if r.queries == 1 or r.keys == 1:
        yield "a sequence of one"
    if r.deterministic:  # refused then even where no gradient is wanted
        yield "its backward is not deterministic"


def _cudnn_mask_reasons(r: AttentionRequest) -> Iterator[str]:
    """Against masks: what was not compared with float64, rows that see nothing among it."""
    if r.refused is None or not HAS_OPERATORS:
        yield "a mask, where the tensors are not known"
    elif r.capability != (9, 0) or (torch.backends.cudnn.version() or 0) < CUDNN_MASKS:
        yield f"a mask: only on compute capability 9.0, from cuDNN {CUDNN_MASKS} on"
    if r.dropout:
        yield "a mask together with dropout"
    if r.mask_gradient:
        yield "the mask wants a gradient"
    # For what else is small another backend takes less than a second call.
    twice = not r.small or (r.captured and r.head > 128)
    if r.gradient and in_two(r.keys) and not (twice and HAS_CUDNN_BACKWARD):
        yield "gradients with a mask, with 64 keys in the last 128: its backward takes two calls"


def _flash_reasons(r: AttentionRequest) -> Iterator[str]:
    on_cpu = r.device == "cpu"
    dtypes = (*HALF, torch.float32, torch.float64) if on_cpu else HALF
    yield from _torch_reasons(r, "flash", dtypes, op.WIDEST_HEAD)
    if not on_cpu and (r.device != "cuda" or r.capability < (8, 0)):
        yield "it needs a CUDA GPU of compute capability 8.0, or the CPU"
    if r.mask != "none" and not on_cpu:
        yield "a mask"
    if r.causal and r.queries != r.keys:
        yield f"causal over {r.queries} x {r.keys}"
    if r.dropout and on_cpu:
        yield "dropout on the CPU"
    if r.mask_gradient:
        yield "the mask wants a gradient"


def _efficient_reasons(r: AttentionRequest) -> Iterator[str]:
    yield from _torch_reasons(r, "efficient", (*HALF, torch.float32), 1 << 16)
    if r.refused is None and r.heads != r.kv_heads:
        yield f"{r.heads} query heads over {r.kv_heads} key heads"
    if r.bounded and r.queries * r.keys > MAX_BOUNDED_SCORES:
        yield f"bounds that become a mask of {r.queries} x {r.keys}: it takes {MAX_BOUNDED_SCORES} scores"
    if r.device != "cuda":
        yield "it needs a CUDA GPU"
    if r.head % 8:
        yield f"a head of {r.head} is no multiple of 8"
    if r.deterministic and r.gradient:
        yield "its backward is not deterministic"


BACKENDS: dict[str, registry.Backend[AttentionRequest, Run]] = {
    backend.name: backend
    for backend in (
        registry.Backend("triton", _triton_reasons, lambda q, k, v, how: op.flash_attention(q, k, v, **how._asdict())),
        registry.Backend("cudnn", _cudnn_reasons, partial(run_sdpa, SDP["cudnn"])),
        registry.Backend("flash", _flash_reasons, partial(run_sdpa, SDP["flash"])),
        registry.Backend("efficient", _efficient_reasons, partial(run_sdpa, SDP["efficient"])),
        registry.Backend("math", registry.accept, run_math, forward_mode=True),
    )
}


def preference(r: AttentionRequest) -> tuple[str, ...]:
    """Backends in the order in which they are taken where nothing was measured: cuDNN leads on Hopper, flash on older
    GPUs (`vb docs attention`); the CPU takes flash, the interpreter being for tests.
    """
    if r.device == "cpu":
        return ("flash", "math", "triton", "cudnn", "efficient")
    if r.dtype == torch.float32:
        return ("efficient", "triton", "math", "cudnn", "flash")
    # For a few queries flash splits the keys over programs.
    long = ("cudnn", "flash") if r.queries > 16 and r.capability >= (9, 0) else ("flash", "cudnn")
    copied = r.kv_heads not in (1, r.heads)  # 'efficient' gets copies of shared heads
    if r.small and not r.captured:
        first = () if r.chosen is None else (r.chosen,)  # a call as PyTorch makes it takes the host least
        if r.operations < LIGHT and r.keys <= 256 and not copied and not (r.gradient and r.mask != "boolean"):
            # But for this operator, unless a bias has to be copied for it; its kernel takes no longer than the host.
            first = ("efficient", *first) if r.mask == "none" or r.keys % ROW == 0 else first
        if r.mask != "none" or r.bounded:
            return _once((*first, "cudnn", "efficient", "triton", "flash", "math"))
        if not r.deterministic:
            return _once((*first, *long, "efficient", "triton", "math"))
    elif r.small and r.mask != "none":  # in a graph copies are kernels too
        first = ("efficient",) if r.keys <= 16 and not copied and not (r.gradient and r.head > 64) else ()
        return _once((*first, "cudnn", *(("triton", "efficient") if copied else ("efficient", "triton")), "math"))
    elif r.captured and not (r.mask != "none" or r.bounded or r.gradient) and max(r.queries, r.keys) <= 64:
        # cuDNN takes 3 us more
        return _once((*(("efficient",) if r.head <= 32 and not copied else ()), "flash", "cudnn", "triton", "math"))
    if r.mask != "none":  # whose tiles the own kernel skips where they hide all; of numbers that is rare
        added = r.mask == "additive" and r.head <= 64
        helped = r.captured and r.gradient and r.operations < 1 << 32  # by a dozen kernels, of 20 us
        return (*(("cudnn", "triton") if added or helped else ("triton", "cudnn")), "flash", "efficient", "math")
    return (long[0], "triton", long[1], "efficient", "math")


def _once(names: Iterable[str]) -> tuple[str, ...]:
    return tuple(dict.fromkeys(names))


def attention_backends(request: AttentionRequest) -> dict[str, list[str]]:
    """Each backend's reasons against ``request``, in the order they would be taken; those without any can run."""
    return registry.explain(_ranking(request), request)


def choose_attention(request: AttentionRequest, backend: str = "auto") -> str:
    """The backend that runs ``request``; Unsupported, with every backend's reasons, where it refuses."""
    check_known("attention backend", backend, ("auto", *BACKENDS))
    try:
        return registry.choose("attention", _ranking(request), request, None if backend == "auto" else backend).name
    except Unsupported:
        why = attention_backends(request)
    said = " | ".join(f"{name}: {'; '.join(reasons) or 'accepts'}" for name, reasons in why.items())
    raise Unsupported(f"attention backend {backend!r} refuses. {said}")


def attention(
    q_BNSH: Tensor, k_BKTH: Tensor, v_BKTH: Tensor, variant: Variant = PLAIN, backend: str = "auto"
) -> tuple[Tensor, str]:
    """Attention (B, N, S, H), and the name of the backend that ran.

    Raises ConfigurationError as ``flash_attention`` does, or for an unknown backend; Unsupported, with every backend's
    reasons, where the backend asked for refuses.
    """
    mask, causal, bottom_right, window, scale, softcap, slopes_N, dropout = variant
    options = (causal, bottom_right, window, scale, softcap, dropout, mask is None, slopes_N is None, backend)
    surroundings: tuple[Any, ...] = ()
    if not (is_compiling() or _dispatch_modes() or (_function_modes() and registry.functions_are_seen())):
        surroundings = _surroundings(q_BNSH)
        last = _last.get(options)
        if last is not None and last.alike is not None and last.surroundings == surroundings:
            is_alike = not (q_BNSH.is_nested or k_BKTH.is_nested or v_BKTH.is_nested)
            if slopes_N is not None:
                given = _given(q_BNSH, k_BKTH, v_BKTH, mask, slopes_N)
                is_alike = is_alike and not any(x.is_nested for x in given) and last.alike(*given)
            elif mask is not None:
                is_alike = is_alike and not mask.is_nested and last.alike(q_BNSH, k_BKTH, v_BKTH, mask)
            else:
                is_alike = is_alike and last.alike(q_BNSH, k_BKTH, v_BKTH)
            if is_alike:
                return last.run(q_BNSH, k_BKTH, v_BKTH, variant), last.name
    if not computes_at_once(q_BNSH, k_BKTH, v_BKTH):
        variant, _, name = _checked(q_BNSH, k_BKTH, v_BKTH, variant, backend)
        return BACKENDS[name].run(q_BNSH, k_BKTH, v_BKTH, variant), name
    key = _key(q_BNSH, k_BKTH, v_BKTH, variant, backend, surroundings)
    if (prepared := _prepared.get(key)) is None:
        how, request, name = _checked(q_BNSH, k_BKTH, v_BKTH, variant, backend)
        run = operator(name, request, how, q_BNSH.device, backend == "auto")
        if run is None:
            seen, runs = {"causal": how.causal, "window": how.window}, BACKENDS[name].run
            run = lambda q, k, v, now: runs(q, k, v, now._replace(**seen))  # noqa: E731
        if len(_prepared) >= MAX_PREPARED:
            _forget()
        alike = registry.comparison_with(_given(q_BNSH, k_BKTH, v_BKTH, mask, slopes_N))
        prepared = _prepared[key] = _Prepared(run, name, surroundings, alike)
    if prepared.alike is not None:
        _last[options] = prepared
    return prepared.run(q_BNSH, k_BKTH, v_BKTH, variant), prepared.name


def _checked(q: Tensor, k: Tensor, v: Tensor, variant: Variant, backend: str) -> tuple[Variant, AttentionRequest, str]:
    """The variant that runs, the request that it is, and the backend that runs it."""
    op.check_dense(q, k, v, variant.mask)
    op.check_options(q, variant.scale, variant.softcap, variant.alibi_slopes_N, variant.dropout)
    if variant.window is not None and variant.window >= max(q.shape[2], k.shape[2]):
        variant = variant._replace(window=None)  # it hides nothing
    if variant.causal and variant.bottom_right and q.shape[2] == 1 and variant.window is None:
        variant = variant._replace(causal=False)  # a single query at the end sees everything: decoding
    request = request_of(q, k, v, variant)
    return variant, request, choose_attention(request, backend)


class _Prepared(NamedTuple):
    """What runs calls alike, and on which backend; and how one tells that another call is such."""

    run: Run
    name: str
    surroundings: tuple[Any, ...]
    alike: Callable[..., bool] | None  # `registry.comparison_with` its tensors


# By `_key`, and the last one by options. Reading and writing one is a step for every other thread.
_prepared: dict[tuple[Any, ...], _Prepared] = {}
_last: dict[tuple[Any, ...], _Prepared] = {}
MAX_PREPARED = 4096  # keys; lengths that grow by one with every token would fill the memory in the end


def _forget() -> None:
    _prepared.clear()
    _last.clear()


tuning.clear_with_entries(_forget)


def _surroundings(q: Tensor) -> tuple[Any, ...]:
    """What calls depend on that is no argument: switches of the process and of the thread."""
    # One tuple: to make and unpack parts of it costs.
    return (
        _deterministic(),
        _flash_enabled(),
        _efficient_enabled(),
        _cudnn_enabled(),
        *_priorities(),
        _grad_enabled(),
        forward_ad._current_level,  # noqa: SLF001
        _any_autocast() and torch.get_autocast_dtype("cuda" if q.is_cuda else "cpu"),
        registry.asked_for(KIND),
        is_captured(q),
    )


def _given(*tensors: Tensor | None) -> list[Tensor]:
    return [x for x in tensors if x is not None]


def _key(
    q: Tensor, k: Tensor, v: Tensor, variant: Variant, backend: str, surroundings: tuple[Any, ...]
) -> tuple[Any, ...]:
    """All that checks, the choice and `operator` look at."""
    mask, slopes = variant.mask, variant.alibi_slopes_N
    how: tuple[Any, ...] = variant
    if mask is not None or slopes is not None:  # shapes in place of tensors, which a key must not keep alive
        how = (*_place(mask), *variant[1:6], *_place(slopes), variant.dropout)
    types = (q.dtype, q.device, k.dtype, k.device, v.dtype, v.device, backend)
    wanted = (q.requires_grad, k.requires_grad, v.requires_grad)
    # Flat, because to hash tuples in tuples costs.
    sizes = (q.shape, q.stride(), k.shape, k.stride(), v.shape, v.stride())
    return *sizes, *types, *wanted, *surroundings, *how


def _place(x: Tensor | None) -> tuple[Any, ...]:
    return (None,) if x is None else (x.shape, x.stride(), x.dtype, x.device, x.requires_grad)


def neighbours_key(r: AttentionRequest) -> str:
    """The key of times of a shape and its neighbours: type, head width, power of two of the length, and kind."""
    bucket = tuning.bucket(max(r.queries, r.keys))
    return f"backend|{tuning.dtype_name(r.dtype)}|{r.head}|{bucket}|{r.kind}"


def shape_key(r: AttentionRequest) -> str:
    shape = "x".join(str(size) for size in (r.batch, r.heads, r.kv_heads, r.queries, r.keys, r.head, r.mask_planes))
    bounds = f"{r.window}{'+bottom_right' * r.bottom_right}"
    return f"shape|{tuning.dtype_name(r.dtype)}|{shape}|{bounds}|{r.kind}"


def _measured(r: AttentionRequest) -> dict[str, int]:
    """Times (ns) by backend, of the very shape or else of its neighbours, where some are known."""
    if r.device != "cuda" or torch.compiler.is_compiling():
        return {}
    gpu = torch.cuda.current_device() if r.gpu is None else r.gpu
    entries = tuning.entries(KIND, torch.device("cuda", gpu))
    return entries.get(shape_key(r)) or ({} if r.small else entries.get(neighbours_key(r), {}))


def _ranking(r: AttentionRequest) -> list[registry.Backend[AttentionRequest, Run]]:
    times = _measured(r)
    order = sorted(preference(r), key=lambda name: times.get(name, math.inf)) if times else preference(r)
    return [BACKENDS[name] for name in order]


NAME = "vblackwell"
_UNKNOWN = ("s_aux", "position_bias", "cache", "indices")  # no backend has sinks, biases by position, or picks keys


def why_not_dispatcher(model: nn.Module) -> str | None:
    """Why ``model``'s attention cannot be given to the dispatcher; None if it can."""
    try:
        from transformers import PreTrainedModel
    except ImportError:
        return "transformers is not installed"
    if not isinstance(model, PreTrainedModel):
        return "the model is not one of transformers', whose registry names the attention"
    if not model._supports_attention_backend or not model._can_set_attn_implementation():
        return f"{type(model).__name__} computes its attention itself, past transformers' registry"
    return None


def packs_documents(model: nn.Module) -> bool:
    """Whether ``model``, one of transformers', hands on what it was given as a mask: then documents of packed rows can
    go through `flash_attention_varlen`."""
    return getattr(model, "_supports_flash_attn", False)


def use_dispatcher(model: nn.Module, backend: str = "auto", cached: str | None = None) -> Callable[[], None]:
    """Let one of transformers' models, which may be in a stack, attend through the dispatcher; returns what undoes it.

    Its masks are those that transformers makes for SDPA, or `mask_or_documents`. ``cached`` is the backend of passes
    that continue what a cache holds. Raises ConfigurationError where there is no such backend, Unsupported with the
    reason of `why_not_dispatcher`.
    """
    check_known("attention backend", backend, ("auto", *BACKENDS))
    if reason := why_not_dispatcher(model):
        raise Unsupported(f"the dispatcher's attention: {reason}")
    made: Any = model
    before = made.config._attn_implementation
    from transformers import AttentionInterface, AttentionMaskInterface
    from transformers.masking_utils import sdpa_mask

    cached = backend if cached is None else cached
    # Numbers, not words: transformers takes every name with "flash" in it for one of theirs.
    numbers = ["auto", *BACKENDS]
    packs = backend in ("auto", "triton") and packs_documents(model)
    name = f"{NAME}-{numbers.index(backend)}-{numbers.index(cached)}{'-packed' * packs}"
    AttentionInterface.register(name, partial(_forward, backend, cached))
    AttentionMaskInterface.register(name, mask_or_documents if packs else sdpa_mask)
    made.set_attn_implementation(name)
    return lambda: made.set_attn_implementation(before)


def _forward(
    backend: str,
    cached: str,
    module: Any,
    query: Tensor,
    key: Tensor,
    value: Tensor,
    attention_mask: Tensor | Documents | None,
    **options: Any,
) -> tuple[Tensor, None]:
    """transformers' attention function: (B, N, S, H) and twice (B, K, T, H) to (B, S, N, H), and no weights."""
    asked = [name for name in _UNKNOWN if options.get(name) is not None]
    if asked:
        raise Unsupported(f"{type(module).__name__} attends with {asked[0]}, which no backend of the dispatcher has")
    scores: dict[str, Any] = {"scale": options.get("scaling"), "softcap": options.get("softcap")}
    scores["dropout"] = options.get("dropout", 0.0)
    if isinstance(attention_mask, Documents):
        if (packed_BNSH := attention_mask.attention(query, key, value, **scores)) is not None:
            return packed_BNSH.transpose(1, 2).contiguous(), None
        attention_mask = attention_mask.mask
    queries, keys = query.shape[2], key.shape[2]
    is_causal = options.get("is_causal")
    causal = (getattr(module, "is_causal", True) if is_causal is None else is_causal) and attention_mask is None
    causal = causal and queries > 1
    if causal and keys > queries:  # a static cache that is being filled: what follows is empty
        key, value = key[:, :, :queries], value[:, :, :queries]
    if attention_mask is not None and attention_mask.shape[-1] != key.shape[2]:
        attention_mask = attention_mask[..., : key.shape[2]]
    variant = Variant(attention_mask, causal, **scores)
    out_BNSH, _ = attention(query, key, value, variant, backend if queries == keys else cached)
    return out_BNSH.transpose(1, 2).contiguous(), None
