"""Which attention runs: ``triton`` (kernels/attention/op.py), ``cudnn``, ``flash`` or ``efficient`` (PyTorch's SDPA) or
``math`` (kernels/attention/reference.py: everything else, any device). Each says why not.

Of those that accept a request the one runs that takes the least time of what ``benchmarks/bench_attention.py --tune``
has measured on this machine; where nothing was measured, and under ``torch.compile``, which cannot read the tables, the
order is that of ``preference``. A call is checked, and its backend chosen, once for all calls alike: `_key` is what
they have in common, and what is kept for it runs the backend's operator itself.

Legend: B batch, N query heads, K key heads, S queries, T keys, H head width.
"""

import math
from collections.abc import Callable, Iterator
from functools import partial
from typing import Any, NamedTuple

import torch
from torch import Tensor, nn
from torch.backends import cuda
from torch.nn import functional
from torch.nn.attention import SDPBackend, sdpa_kernel

from vblackwell.errors import Unsupported, check_known
from vblackwell.kernels.attention import op
from vblackwell.kernels.attention.reference import attention_reference
from vblackwell.kernels.runtime import registry, tuning

KIND = "attention"  # of its entries in runtime/tuning.py
HALF = (torch.bfloat16, torch.float16)
# Operations of a forward, by whether there is a mask, or bounds that PyTorch needs one for, and whether it is captured,
# under which launches decide: 100 us of the host, or 10 us of a graph's small kernels, are what the faster of two
# kernels saves at 580 TFLOP/s against 127 with masks, or against 500 without, on an H200 (docs/journal/attention.md).
SMALL = {(False, False): 1 << 36, (False, True): 0, (True, False): 1 << 34, (True, True): 1 << 30}
MAX_BOUNDED_SCORES = 1 << 22  # of bounds that become a mask: 8 MB
# By name here, because every call asks them, and each attribute on the way costs.
_function_modes, _grad_enabled = torch._C._len_torch_function_stack, torch.is_grad_enabled
_deterministic, _flash_enabled = torch._C._get_deterministic_algorithms, torch._C._get_flash_sdp_enabled
_efficient_enabled, _cudnn_enabled = torch._C._get_mem_efficient_sdp_enabled, torch._C._get_cudnn_sdp_enabled


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

    ``mask`` is 'none', 'boolean' or 'additive', of ``mask_planes`` (S, T); ``captured``: into a CUDA graph, where the
    host's time does not count; ``refused``: backends that PyTorch does not let run on these tensors, None: it was not
    asked, as in plans and traces, whose tensors are not those that run.
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
    captured: bool = False
    refused: tuple[str, ...] | None = None

    @property
    def bounded(self) -> bool:
        """Whether positions hide keys in a way that PyTorch would need a mask for, or one more."""
        is_square = not self.bottom_right or self.queries == self.keys
        return self.window is not None or (self.causal and (self.mask != "none" or not is_square))

    @property
    def small(self) -> bool:
        """Whether launches take longer than what the faster kernel saves; False where the tensors are not known."""
        masked = self.mask != "none" or self.bounded
        if self.refused is None or (masked and self.captured and (self.bounded or self.heads != self.kv_heads)):
            return False  # in a graph, what 'efficient' needs of bounds and shared heads are more kernels
        return 4 * self.batch * self.heads * self.queries * self.keys * self.head < SMALL[masked, self.captured]

    @property
    def kind(self) -> str:
        """What timings are kept by, in addition to type, head width and length."""
        flags = ("causal", "softcap", "alibi", "dropout", "gradient")
        parts = [self.mask, *(name for name in flags if getattr(self, name))]
        return "+".join(parts + ["window"] * (self.window is not None) + ["grouped"] * (self.heads != self.kv_heads))


def request_of(q_BNSH: Tensor, k_BKTH: Tensor, v_BKTH: Tensor, variant: Variant) -> AttentionRequest:
    """What backends are asked; PyTorch's own opinion is in it for tensors that no trace has made."""
    mask, device, learns = variant.mask, q_BNSH.device, torch.is_grad_enabled()
    capability = torch.cuda.get_device_capability(device) if device.type == "cuda" else (0, 0)
    sizes = (q_BNSH.shape[1], k_BKTH.shape[1], q_BNSH.shape[2], k_BKTH.shape[2], q_BNSH.shape[3])
    kind = "none" if mask is None else "boolean" if mask.dtype == torch.bool else "additive"
    bounds = (variant.causal, variant.bottom_right, variant.window)
    changes = (variant.softcap is not None, variant.alibi_slopes_N is not None, variant.dropout > 0)
    gradient = learns and (q_BNSH.requires_grad or k_BKTH.requires_grad or v_BKTH.requires_grad)
    gradients = (gradient, learns and mask is not None and mask.requires_grad)
    planes, deterministic = 0 if mask is None else mask.shape[:-2].numel(), torch.are_deterministic_algorithms_enabled()
    refused, captured = None, False
    if _computes_at_once(q_BNSH, k_BKTH, v_BKTH):
        refused, captured = _refused(q_BNSH, k_BKTH, v_BKTH, variant), _is_captured(q_BNSH)
    rest = (deterministic, q_BNSH.shape[0], planes, device.index, captured, refused)
    what = (*sizes, kind, *bounds, *changes, *gradients, *rest)
    return AttentionRequest(device.type, capability, q_BNSH.dtype, *what)


def _computes_at_once(q: Tensor, k: Tensor, v: Tensor) -> bool:
    """Whether the operators that are called here run here, on the types that they are given."""
    if not registry.computes_at_once() or _function_modes() or registry.differentiating_forward():
        return False
    if not type(q) is type(k) is type(v) is Tensor:
        return False
    device = "cuda" if q.is_cuda else "cpu"
    return not torch.is_autocast_enabled(device) or q.dtype == torch.get_autocast_dtype(device)


def _is_captured(q: Tensor) -> bool:
    return q.is_cuda and torch.cuda.is_current_stream_capturing()


def _refused(q: Tensor, k: Tensor, v: Tensor, variant: Variant) -> tuple[str, ...]:
    """Backends that PyTorch refuses for what requests do not say: flags and contexts of the user, strides, versions."""
    if not q.is_cuda:
        return () if cuda.flash_sdp_enabled() else ("flash",)
    grouped, heads = q.shape[1] != k.shape[1], q.shape[1]
    given = (variant.dropout, variant.causal, grouped)
    params = cuda.SDPAParams(q, k, v, None, *given)
    repeated = cuda.SDPAParams(q, *(x[:, :1].expand(-1, heads, -1, -1) for x in (k, v)), None, *given)
    with registry.on_device(q):
        accepts = {
            "cudnn": cuda.can_use_cudnn_attention(params),
            "flash": cuda.can_use_flash_attention(params),
            "efficient": cuda.can_use_efficient_attention(repeated if grouped else params),
        }
    return tuple(name for name, accepted in accepts.items() if not accepted)


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
    made_masks = name == "efficient" and r.refused is not None and not r.mask_gradient
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
    # Hopper's forward takes wider heads where this torch and cuDNN do, which have to be asked.
    wide = r.capability == (9, 0) and not r.gradient and r.refused is not None
    yield from _torch_reasons(r, "cudnn", HALF, 256 if wide else 128)
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


def _run_math(q: Tensor, k: Tensor, v: Tensor, variant: Variant) -> Tensor:
    mask, causal, bottom_right, window, scale, softcap, slopes_N, dropout = variant
    left, right = op.bounds(causal, window)
    sees: dict[str, Any] = {"mask": mask, "left": left, "right": right, "bottom_right": bottom_right}
    softcap = softcap or 0.0
    return attention_reference(q, k, v, **sees, scale=scale, softcap=softcap, slopes_N=slopes_N, dropout=dropout)


def _run_sdpa(backend: SDPBackend, q: Tensor, k: Tensor, v: Tensor, variant: Variant) -> Tensor:
    mask = variant.mask
    assert variant.window is None, "bounds become a mask in `_operator` alone"
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
    return x_BKTH.repeat_interleave(heads // x_BKTH.shape[1], dim=1)


def _rows(q: Tensor, keys: int, *lead: int) -> Tensor:
    """Memory for a bias (..., T) in the queries' type, rows at multiples of 32 bytes, as 'efficient' reads them."""
    padded = -(-keys // 16) * 16
    # What pads a row is read, multiplied by zero: it must be finite.
    return (q.new_empty if padded == keys else q.new_zeros)((*lead, padded))[..., :keys]


def _bias(mask: Tensor, q: Tensor, keys: int) -> Tensor:
    """``mask`` as numbers to add, (1 or B, 1 or N, 1 or S, T)."""
    mask = mask[(None,) * (4 - mask.dim())]
    *steps, last = mask.stride()
    is_dense = mask.shape[3] == keys and last == 1 and not any(at % 16 for at in (*steps, mask.data_ptr()))
    if is_dense and mask.dtype == q.dtype:
        return mask
    bias = _rows(q, keys, *mask.shape[:3])
    if mask.dtype == torch.bool:
        return torch.log(mask.expand(bias.shape), out=bias)  # of 1 it is 0, of 0 -inf: in one launch
    return bias.copy_(mask)


def _bounds_bias(q: Tensor, keys: int, left: int | None, right: int | None, offset: int) -> Tensor:
    """Bounds, as device.py has them, as numbers to add, (S, T)."""
    hidden = q.new_full((q.shape[2], -(-keys // 16) * 16), -torch.inf)
    parts = [] if right is None else [hidden.triu(offset + right + 1)]
    parts += [] if left is None else [hidden.tril(offset - left - 1)]
    return (parts[0] if len(parts) == 1 else parts[0].add_(parts[1]))[:, :keys]


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


# PyTorch's operators by themselves; a release that has other ones runs them through `_run_sdpa`.
_OPERATORS = ("flash_attention", "efficient_attention", "cudnn_attention", "flash_attention_for_cpu")
_HAS_OPERATORS = all(hasattr(torch, f"_scaled_dot_product_{name}") for name in _OPERATORS)


def _operator(name: str, r: AttentionRequest, how: Variant) -> Run:
    """What backend ``name`` runs for such requests where nothing is traced, given ``how`` without its tensors.

    PyTorch's are called without `sdpa_kernel`, which takes 20 us and turns switches that all threads see.
    """
    of, causal, dropout, learns = {"scale": how.scale}, how.causal, how.dropout, r.gradient
    if name == "triton":
        numbers = (None, causal, how.bottom_right, how.window, how.scale, how.softcap, dropout)
        return lambda q, k, v, now: op.attend_dense(q, k, v, now.mask, now.alibi_slopes_N, *numbers)
    if _HAS_OPERATORS and name == "cudnn":
        run = torch._scaled_dot_product_cudnn_attention
        return lambda q, k, v, now: run(q, k, v, None, learns, dropout, causal, **of)[0]
    if _HAS_OPERATORS and name == "flash" and r.device == "cpu" and r.mask == "none":
        run = torch._scaled_dot_product_flash_attention_for_cpu
        return lambda q, k, v, now: run(q, k, v, dropout, causal, **of)[0]
    if _HAS_OPERATORS and name == "flash" and r.device == "cuda" and r.head % 8 == 0:  # else PyTorch pads it
        run = torch._scaled_dot_product_flash_attention
        return lambda q, k, v, now: run(q, k, v, dropout, causal, **of)[0]
    if _HAS_OPERATORS and name == "efficient" and not r.mask_gradient:
        run = torch._scaled_dot_product_efficient_attention

        seen = (*op.bounds(causal, how.window), r.keys - r.queries if how.bottom_right else 0)

        def efficient(q: Tensor, k: Tensor, v: Tensor, now: Variant) -> Tensor:
            if r.heads != r.kv_heads:
                k, v = _repeated(k, r.heads), _repeated(v, r.heads)
            bias = None if now.mask is None else _bias(now.mask, q, r.keys)
            if r.bounded:
                bounds = _bounds_bias(q, r.keys, *seen)
                rows = None if bias is None else _rows(q, r.keys, *bias.shape[:2], r.queries)
                bias = bounds if bias is None else torch.add(bias, bounds, out=rows)
            bias = None if bias is None else bias.expand(r.batch, r.heads, r.queries, r.keys)
            return run(q, k, v, bias, learns, dropout, causal and not r.bounded, **of)[0]

        return efficient
    return lambda q, k, v, now: BACKENDS[name].run(q, k, v, now._replace(causal=causal))


def preference(r: AttentionRequest) -> tuple[str, ...]:
    """Backends in the order in which they are taken where nothing was measured: cuDNN leads on Hopper, flash on older
    GPUs (docs/attention.md); the CPU takes flash, the interpreter being for tests.
    """
    if r.device == "cpu":
        return ("flash", "math", "triton", "cudnn", "efficient")
    if r.dtype == torch.float32:
        return ("efficient", "triton", "math", "cudnn", "flash")
    if r.small and (r.mask != "none" or r.bounded):
        return ("efficient", "triton", "flash", "cudnn", "math")
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
    if not _computes_at_once(q_BNSH, k_BKTH, v_BKTH):
        variant, name = _checked(q_BNSH, k_BKTH, v_BKTH, variant, backend)
        return BACKENDS[name].run(q_BNSH, k_BKTH, v_BKTH, variant), name
    key = _key(q_BNSH, k_BKTH, v_BKTH, variant, backend)
    if (prepared := _prepared.get(key)) is None:
        how, name = _checked(q_BNSH, k_BKTH, v_BKTH, variant, backend)
        run = _operator(name, request_of(q_BNSH, k_BKTH, v_BKTH, how), how._replace(mask=None, alibi_slopes_N=None))
        if len(_prepared) >= MAX_PREPARED:
            _prepared.clear()
        prepared = _prepared[key] = run, name
    run, name = prepared
    return run(q_BNSH, k_BKTH, v_BKTH, variant), name


def _checked(q: Tensor, k: Tensor, v: Tensor, variant: Variant, backend: str) -> tuple[Variant, str]:
    """The variant that runs, and on which backend."""
    op.check_dense(q, k, v, variant.mask)
    op.check_options(q, variant.scale, variant.softcap, variant.alibi_slopes_N, variant.dropout)
    if variant.causal and variant.bottom_right and q.shape[2] == 1 and variant.window is None:
        variant = variant._replace(causal=False)  # a single query at the end sees everything: decoding
    return variant, choose_attention(request_of(q, k, v, variant), backend)


# What runs calls of a `_key`, and on which backend. Reading and writing one is a step for every other thread.
_prepared: dict[tuple[Any, ...], tuple[Run, str]] = {}
MAX_PREPARED = 4096  # keys; lengths that grow by one with every token would fill the memory in the end
tuning.clear_with_entries(_prepared.clear)


def _key(q: Tensor, k: Tensor, v: Tensor, variant: Variant, backend: str) -> tuple[Any, ...]:
    """All that checks, the choice and `_operator` look at."""
    mask, slopes = variant.mask, variant.alibi_slopes_N
    how: tuple[Any, ...] = variant
    if mask is not None or slopes is not None:  # shapes in place of tensors, which a key must not keep alive
        how = (_place(mask), _is_captured(q), _place(slopes), *variant._replace(mask=None, alibi_slopes_N=None))
    learns = _grad_enabled() and (q.requires_grad, k.requires_grad, v.requires_grad)
    process = (_deterministic(), _flash_enabled(), _efficient_enabled(), _cudnn_enabled(), registry.chosen(KIND))
    types = (q.dtype, q.device, k.dtype, k.device, v.dtype, v.device)
    return q.shape, q.stride(), k.shape, k.stride(), v.shape, v.stride(), types, how, learns, process, backend


def _place(x: Tensor | None) -> tuple[Any, ...]:
    return () if x is None else (x.shape, x.stride(), x.dtype, x.device, x.requires_grad)


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
