"""Which attention runs: ``triton`` (kernels/attention/op.py), ``cudnn``, ``flash`` or ``efficient`` (PyTorch's SDPA) or
``math`` (kernels/attention/reference.py: everything else, any device). Each says why not.

Of those that accept a request the one runs that takes the least time of what ``benchmarks/bench_attention.py --tune``
has measured on this machine; where nothing was measured, and under ``torch.compile``, which cannot read the tables, the
order is that of ``preference``.

Legend: B batch, N query heads, K key heads, S queries, T keys, H head width.
"""

import math
from collections.abc import Callable, Iterator
from functools import partial
from typing import Any, NamedTuple

import torch
from torch import Tensor, nn
from torch.nn import functional
from torch.nn.attention import SDPBackend, sdpa_kernel

from vblackwell.errors import Unsupported, check_known
from vblackwell.kernels.attention import op
from vblackwell.kernels.attention.reference import attention_reference
from vblackwell.kernels.runtime import registry, tuning

KIND = "attention"  # of its entries in runtime/tuning.py
HALF = (torch.bfloat16, torch.float16)


class Variant(NamedTuple):
    """What is attended, in addition to queries, keys and values; as in ``flash_attention``."""

    mask: Tensor | None = None
    causal: bool = False
    bottom_right: bool = False
    window: int | None = None
    scale: float | None = None
    softcap: float | None = None
    alibi_slopes_N: Tensor | None = None
    dropout: float = 0.0


PLAIN = Variant()


class AttentionRequest(NamedTuple):
    """What a backend may look at before it agrees; times of the CUDA device ``gpu`` count, None: of the current one.

    ``mask`` is 'none', 'boolean' or 'additive', of ``mask_planes`` (S, T).
    """

    device: str
    capability: tuple[int, int]
    dtype: torch.dtype
    heads: int
    kv_heads: int
    queries: int
    keys: int
    head: int
    mask: str = "none"
    causal: bool = False
    bottom_right: bool = False
    window: int | None = None
    softcap: bool = False
    alibi: bool = False
    dropout: bool = False
    gradient: bool = False
    mask_gradient: bool = False
    deterministic: bool = False
    batch: int = 1
    mask_planes: int = 0
    gpu: int | None = None

    @property
    def kind(self) -> str:
        """What timings are kept by, in addition to type, head width and length."""
        flags = ("causal", "softcap", "alibi", "dropout", "gradient")
        parts = [self.mask, *(name for name in flags if getattr(self, name))]
        return "+".join(parts + ["window"] * (self.window is not None) + ["grouped"] * (self.heads != self.kv_heads))


def request_of(q_BNSH: Tensor, k_BKTH: Tensor, v_BKTH: Tensor, variant: Variant) -> AttentionRequest:
    mask, device, learns = variant.mask, q_BNSH.device, torch.is_grad_enabled()
    capability = torch.cuda.get_device_capability(device) if device.type == "cuda" else (0, 0)
    sizes = (q_BNSH.shape[1], k_BKTH.shape[1], q_BNSH.shape[2], k_BKTH.shape[2], q_BNSH.shape[3])
    kind = "none" if mask is None else "boolean" if mask.dtype == torch.bool else "additive"
    bounds = (variant.causal, variant.bottom_right, variant.window)
    changes = (variant.softcap is not None, variant.alibi_slopes_N is not None, variant.dropout > 0)
    gradient = learns and (q_BNSH.requires_grad or k_BKTH.requires_grad or v_BKTH.requires_grad)
    gradients = (gradient, learns and mask is not None and mask.requires_grad)
    planes, deterministic = 0 if mask is None else mask.shape[:-2].numel(), torch.are_deterministic_algorithms_enabled()
    rest = (deterministic, q_BNSH.shape[0], planes, device.index)
    what = (*sizes, kind, *bounds, *changes, *gradients, *rest)
    return AttentionRequest(device.type, capability, q_BNSH.dtype, *what)


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


def _torch_reasons(r: AttentionRequest, dtypes: tuple[torch.dtype, ...], widest: int) -> Iterator[str]:
    yield from _common_reasons(r, dtypes, widest)
    if min(r.queries, r.keys) == 0:
        yield "an empty sequence"
    if r.window is not None:
        yield "a sliding window"
    if r.softcap:
        yield "a soft cap"
    if r.alibi:
        yield "ALiBi"
    if r.causal and r.mask != "none":
        yield "causal together with a mask"
    if r.causal and r.bottom_right and r.queries != r.keys:
        yield f"causal from the bottom right over {r.queries} x {r.keys}"


def _cudnn_reasons(r: AttentionRequest) -> Iterator[str]:
    yield from _torch_reasons(r, HALF, 128)
    if r.device != "cuda" or r.capability < (8, 0):
        yield "it needs a CUDA GPU of compute capability 8.0"
    if r.head % 8:
        yield f"a head of {r.head} is no multiple of 8"
    if r.mask != "none":
        yield "a mask"
    if r.causal and r.queries != r.keys:
        yield f"causal over {r.queries} x {r.keys}"
    if r.queries == 1 or r.keys == 1:
        yield "a sequence of one"
    if r.deterministic:  # refused then even where no gradient is wanted
        yield "its backward is not deterministic"


def _flash_reasons(r: AttentionRequest) -> Iterator[str]:
    on_cpu = r.device == "cpu"
    yield from _torch_reasons(r, (*HALF, torch.float32, torch.float64) if on_cpu else HALF, op.WIDEST_HEAD)
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
    yield from _torch_reasons(r, (*HALF, torch.float32), 1 << 16)
    if r.device != "cuda":
        yield "it needs a CUDA GPU"
    if r.heads != r.kv_heads:
        yield f"{r.heads} query heads over {r.kv_heads} key heads"
    if r.head % 8:
        yield f"a head of {r.head} is no multiple of 8"
    if r.deterministic and r.gradient:
        yield "its backward is not deterministic"


def _run_math(q: Tensor, k: Tensor, v: Tensor, variant: Variant) -> Tensor:
    mask, causal, bottom_right, window, scale, softcap, slopes_N, dropout = variant
    left, right = op.bounds(causal, window)
    sees: dict[str, Any] = {"mask": mask, "left": left, "right": right, "bottom_right": bottom_right}
    softcap = softcap or 0.0
    return attention_reference(q, k, v, **sees, scale=scale, softcap=softcap, slopes_N=slopes_N, dropout=dropout)


def _run_sdpa(backend: SDPBackend, q: Tensor, k: Tensor, v: Tensor, variant: Variant) -> Tensor:
    mask = variant.mask
    if mask is not None:
        mask = mask if mask.dtype == torch.bool else mask.to(q.dtype)
        mask = mask[(None,) * (4 - mask.dim())]  # the CPU's flash takes two or four dimensions
        if mask.shape[-1] != k.shape[2]:  # 'efficient' reads consecutive keys: it takes no stride of zero
            mask = mask.expand(*mask.shape[:-1], k.shape[2]).contiguous()
    # A branch, because sizes may be symbols under torch.compile.
    grouped = {"enable_gqa": True} if q.shape[1] != k.shape[1] else {}
    how = {"scale": variant.scale, **grouped}
    with sdpa_kernel(backend):
        return functional.scaled_dot_product_attention(q, k, v, mask, variant.dropout, variant.causal, **how)


Run = Callable[[Tensor, Tensor, Tensor, Variant], Tensor]
BACKENDS: dict[str, registry.Backend[AttentionRequest, Run]] = {
    backend.name: backend
    for backend in (
        registry.Backend("triton", _triton_reasons, lambda q, k, v, how: op.flash_attention(q, k, v, **how._asdict())),
        registry.Backend("cudnn", _cudnn_reasons, partial(_run_sdpa, SDPBackend.CUDNN_ATTENTION)),
        registry.Backend("flash", _flash_reasons, partial(_run_sdpa, SDPBackend.FLASH_ATTENTION)),
        registry.Backend("efficient", _efficient_reasons, partial(_run_sdpa, SDPBackend.EFFICIENT_ATTENTION)),
        registry.Backend("math", registry.accept, _run_math, forward_mode=True),
    )
}


def preference(r: AttentionRequest) -> tuple[str, ...]:
    """Backends in the order in which they are taken where nothing was measured: cuDNN leads on Hopper, flash on older
    GPUs (docs/attention.md); the CPU takes flash, the interpreter being for tests.
    """
    if r.device == "cpu":
        return ("flash", "math", "triton", "cudnn", "efficient")
    if r.dtype == torch.float32:
        return ("efficient", "triton", "math", "cudnn", "flash")
    if r.queries > 16 and r.capability >= (9, 0):
        return ("cudnn", "triton", "flash", "efficient", "math")
    return ("flash", "triton", "cudnn", "efficient", "math")  # for a few queries it splits the keys over programs


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
    op.check_dense(q_BNSH, k_BKTH, v_BKTH, variant.mask)
    op.check_options(q_BNSH, variant.scale, variant.softcap, variant.alibi_slopes_N, variant.dropout)
    if variant.causal and variant.bottom_right and q_BNSH.shape[2] == 1 and variant.window is None:
        variant = variant._replace(causal=False)  # a single query at the end sees everything: decoding
    name = choose_attention(request_of(q_BNSH, k_BKTH, v_BKTH, variant), backend)
    return BACKENDS[name].run(q_BNSH, k_BKTH, v_BKTH, variant), name


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
    return entries.get(shape_key(r)) or entries.get(neighbours_key(r), {})


def _ranking(r: AttentionRequest) -> list[registry.Backend[AttentionRequest, Run]]:
    times = _measured(r)
    order = sorted(preference(r), key=lambda name: times.get(name, math.inf)) if times else preference(r)
    return [BACKENDS[name] for name in order]


NAME = "vblackwell"
_UNKNOWN = ("s_aux", "position_bias", "cache")  # no backend has sinks, or biases by position


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


def use_dispatcher(model: nn.Module, backend: str = "auto", cached: str | None = None) -> Callable[[], None]:
    """Let one of transformers' models, which may be in a stack, attend through the dispatcher; returns what undoes it.

    Its masks are those that transformers makes for SDPA. ``cached`` is the backend of passes that continue what a cache
    holds. Raises ConfigurationError where there is no such backend, Unsupported with the reason of
    `why_not_dispatcher`.
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
    name = f"{NAME}-{numbers.index(backend)}-{numbers.index(cached)}"
    AttentionInterface.register(name, partial(_forward, backend, cached))
    AttentionMaskInterface.register(name, sdpa_mask)
    made.set_attn_implementation(name)
    return lambda: made.set_attn_implementation(before)


def _forward(
    backend: str,
    cached: str,
    module: Any,
    query: Tensor,
    key: Tensor,
    value: Tensor,
    attention_mask: Tensor | None,
    **options: Any,
) -> tuple[Tensor, None]:
    """transformers' attention function: (B, N, S, H) and twice (B, K, T, H) to (B, S, N, H), and no weights."""
    asked = [name for name in _UNKNOWN if options.get(name) is not None]
    if asked:
        raise Unsupported(f"{type(module).__name__} attends with {asked[0]}, which no backend of the dispatcher has")
    queries, keys = query.shape[2], key.shape[2]
    is_causal = options.get("is_causal")
    causal = (getattr(module, "is_causal", True) if is_causal is None else is_causal) and attention_mask is None
    causal = causal and queries > 1
    if causal and keys > queries:  # a static cache that is being filled: what follows is empty
        key, value = key[:, :, :queries], value[:, :, :queries]
    if attention_mask is not None and attention_mask.shape[-1] != key.shape[2]:
        attention_mask = attention_mask[..., : key.shape[2]]
    scores: dict[str, Any] = {"scale": options.get("scaling"), "softcap": options.get("softcap")}
    variant = Variant(attention_mask, causal, dropout=options.get("dropout", 0.0), **scores)
    out_BNSH, _ = attention(query, key, value, variant, backend if queries == keys else cached)
    return out_BNSH.transpose(1, 2).contiguous(), None
