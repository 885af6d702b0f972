"""Meta tensors that answer as if they were on a GPU, so that models take their CUDA path where there is none.

Fake CUDA tensors need a build of torch with CUDA as soon as autograd meets them; the autograd of meta tensors is the
same C++ on every build. What the device decides (which attention runs, what dropout keeps, what autocast casts, what
`x.is_cuda` says) `CudaOnMeta` answers as CUDA does, above autograd: the graph and what it saves are the GPU's, the same
on a laptop and a GPU server. Not seen from here: calls that C++ makes by itself to attention or dropout
(`torch.nn.LSTM`), autocast regions that a model opens itself.
"""

import sys
import threading
import warnings
from collections.abc import Callable, Iterator, Sequence
from contextlib import AbstractContextManager, ExitStack, contextmanager, nullcontext
from typing import Any
from unittest import mock

import torch
from torch import Tensor
from torch.autograd import graph
from torch.nn import functional
from torch.overrides import TorchFunctionMode
from torch.utils import checkpoint

from vblackwell.errors import Unsupported

CUDA = torch.device("cuda", 0)
META = torch.device("meta")
_SDPA = functional.scaled_dot_product_attention
_SOFTMAX = {
    functional.softmax: False, torch.softmax: False, Tensor.softmax: False,
    functional.log_softmax: True, torch.log_softmax: True, Tensor.log_softmax: True,
}  # fmt: skip
_DROPOUT = (functional.dropout, torch.dropout)
_DRAWS = {
    *(getattr(torch, name) for name in ["rand", "randn", "randint", "randperm", "bernoulli", "multinomial", "normal"]),
    *(getattr(torch, f"{name}_like") for name in ["rand", "randn", "randint"]),
    *(getattr(Tensor, name) for name in ["bernoulli", "multinomial"]),
    *(getattr(Tensor, f"{name}_") for name in ["bernoulli", "normal", "random", "uniform", "exponential"]),
}
_DEVICES = (torch.device, str)
_TYPES = frozenset((Tensor, torch.nn.Parameter))
# Of two that leave in another order than they came, one's patches would stay for good.
_ONE_AT_A_TIME = threading.RLock()

# What autocast computes in the lower precision and what in fp32 (torch's amp.html, "CUDA Op-Specific Behavior").
_AUTOCAST = (
    (
        (torch, "matmul bmm mm addmm addbmm baddbmm addmv mv conv1d conv2d conv3d conv_transpose1d conv_transpose2d "
                "prelu einsum"),
        (Tensor, "matmul __matmul__ __rmatmul__ bmm mm addmm addbmm baddbmm addmv mv prelu"),
        (functional, "linear conv1d conv2d conv3d conv_transpose1d conv_transpose2d bilinear"),
    ), (
        (torch, "exp expm1 log log10 log2 log1p pow reciprocal rsqrt acos asin cosh sinh tan erfinv cumsum cumprod "
                "prod sum norm softmax log_softmax dist cdist renorm logsumexp"),
        (Tensor, "exp expm1 log log10 log2 log1p pow __pow__ __rpow__ reciprocal rsqrt cumsum cumprod prod sum norm "
                 "softmax log_softmax logsumexp"),
        (functional, "softmax log_softmax layer_norm group_norm cross_entropy nll_loss mse_loss l1_loss smooth_l1_loss "
                     "kl_div cosine_similarity softplus normalize"),
    ),
)  # fmt: skip
_LOWER, _FP32 = (
    {getattr(owner, name) for owner, names in lists for name in names.split() if hasattr(owner, name)}
    for lists in _AUTOCAST
)


class CudaOnMeta(TorchFunctionMode):
    """Tensors on meta say that they are on ``cuda:0``, and CUDA's are made there; ``autocast``: dtype of a region."""

    def __init__(self, autocast: torch.dtype | None) -> None:
        super().__init__()
        self.autocast = autocast
        self.item_read: Callable[[], None] | None = None  # told where an item is asked for, which is 1 then
        self.casts: dict[int, tuple[Tensor, Tensor]] | None = None  # of weights, once each, inside autocast's region

    def __torch_function__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        if func in _ANSWERS:
            return _ANSWERS[func](args[0], func)
        if func is Tensor.item and self.item_read is not None and args[0].is_meta:
            self.item_read()
            return 1.0
        kwargs = kwargs or {}
        if func in _SOFTMAX and (wide := wide_softmax(_SOFTMAX[func], args, kwargs)) is not None:
            return wide
        if self.autocast is not None:
            if func is functional.cross_entropy and _is_half(args[0]):
                return cross_entropy(*args, **kwargs)
            args, kwargs = self.cast(func, args, kwargs)
        if func is _SDPA:
            return attention(*args, **kwargs)
        if func in _DROPOUT:
            return dropout(*args, **kwargs)
        if func is torch.device:  # a name makes nothing yet; checkpointing looks for the module of that name
            return func(*args, **kwargs)
        for value in (*args, *kwargs.values()):
            if isinstance(value, _DEVICES) and _names_cuda(value):
                args = tuple(META if _names_cuda(value) else value for value in args)
                kwargs = {name: META if _names_cuda(value) else value for name, value in kwargs.items()}
                break
        for kind in types:
            if kind not in _TYPES:  # a subclass's own rule, which may look at devices again
                with self:
                    return kind.__torch_function__(func, types, args, kwargs)
        # Restored at once: other threads may draw while a trace goes on, and would draw the same again.
        with torch.random.fork_rng(devices=[]) if func in _DRAWS else nullcontext():
            return func(*args, **kwargs)

    def cast(self, func: Any, args: tuple[Any, ...], kwargs: dict[str, Any]) -> tuple[tuple[Any, ...], dict[str, Any]]:
        if func is _SDPA or func in _LOWER:
            wanted = self.autocast
        elif func in _FP32 and kwargs.get("dtype") is None:
            wanted = torch.float32
        else:
            return args, kwargs
        # The last argument first, as the compiler of torch's C++ evaluates them.
        named = {name: self._as(kwargs[name], wanted) for name in reversed(kwargs)}
        return tuple(self._as(value, wanted) for value in reversed(args))[::-1], named

    def _as(self, value: Any, wanted: torch.dtype | None) -> Any:
        if isinstance(value, (list, tuple)):
            return type(value)(self._as(each, wanted) for each in value)
        if not isinstance(value, Tensor) or not value.is_floating_point() or value.dtype in (wanted, torch.float64):
            return value
        if not (value.is_leaf and value.requires_grad) or self.casts is None or wanted == torch.float32:
            return value.to(wanted)
        if id(value) not in self.casts:
            self.casts[id(value)] = (value, value.to(wanted))
        return self.casts[id(value)][1]


def _names_cuda(value: Any) -> bool:
    if isinstance(value, torch.device):
        return value.type == "cuda"
    return isinstance(value, str) and (value == "cuda" or value.startswith("cuda:"))


_ANSWERS: dict[Any, Callable[[Tensor, Any], Any]] = {  # by function; given the tensor and that function
    Tensor.device.__get__: lambda tensor, getter: CUDA if tensor.is_meta else getter(tensor),  # pyright: ignore
    Tensor.is_cuda.__get__: lambda tensor, getter: tensor.is_meta,  # pyright: ignore[reportAttributeAccessIssue]
    Tensor.is_meta.__get__: lambda tensor, getter: False,  # pyright: ignore[reportAttributeAccessIssue]
    Tensor.get_device: lambda tensor, getter: 0 if tensor.is_meta else -1,
    Tensor.cuda: lambda tensor, getter: tensor.to(META),
    Tensor.pin_memory: lambda tensor, getter: tensor,
}


def dropout(input: Tensor, p: float = 0.5, training: bool = True, inplace: bool = False) -> Tensor:
    """`torch.nn.functional.dropout` as CUDA computes it: one fused operator that keeps a byte an element."""
    if not training or inplace or p == 0 or p == 1 or input.numel() == 0:
        return _DROPOUT[0](input, p, training, inplace)
    return torch.native_dropout(input, p, True)[0]


def _is_half(value: Any) -> bool:
    return isinstance(value, Tensor) and value.dtype in (torch.bfloat16, torch.float16)


class WideSoftmax(torch.autograd.Function):
    """The bytes of a softmax of half-precision values in fp32: it keeps its result; its gradient is narrow."""

    @staticmethod
    def forward(ctx: Any, values: Tensor, log: bool) -> Tensor:
        out = torch.empty_like(values, dtype=torch.float32)
        ctx.save_for_backward(out)
        ctx.log, ctx.dtype = log, values.dtype
        return out

    @staticmethod
    def backward(ctx: Any, *gradients: Any) -> tuple[Tensor, None]:
        (out,) = ctx.saved_tensors
        product = None if ctx.log else torch.empty_like(out)
        found = torch.empty_like(out, dtype=ctx.dtype)
        del product
        return found, None


def wide_softmax(log: bool, args: tuple[Any, ...], kwargs: dict[str, Any]) -> Tensor | None:
    """A softmax of half-precision values in fp32, as CUDA computes it, without a wide copy; None for any other."""
    values, dim = (args[at] if len(args) > at else kwargs.get(name) for at, name in enumerate(("input", "dim")))
    dtype = kwargs.get("dtype", next((each for each in args[2:] if isinstance(each, torch.dtype)), None))
    if not _is_half(values) or not isinstance(dim, int) or dtype != torch.float32:
        return None
    with torch._C.DisableTorchFunction():  # checkpointing compares devices of what is saved: meta, as within operators
        found: Any = WideSoftmax.apply(values, log)
    return found


def cross_entropy(input: Tensor, target: Tensor, *args: Any, label_smoothing: float = 0.0, **options: Any) -> Tensor:
    """`functional.cross_entropy` of half-precision logits under autocast, which reaches only the second of its two
    parts: the log-softmax keeps the logits' type, which C++ asks for by name; its result is cast for the loss.
    """
    label_smoothing, args = (args[5], args[:5]) if len(args) > 5 else (label_smoothing, args)
    if target.is_floating_point() or label_smoothing:
        return functional.cross_entropy(input.float(), target, *args, label_smoothing=label_smoothing, **options)
    with torch._C.DisableTorchFunction():  # as in `wide_softmax`
        narrow = torch.ops.aten._log_softmax(input, 0 if input.dim() == 1 else 1, False)
        return functional.nll_loss(narrow.float(), target, *args, **options)


def _as_bias(mask: Tensor, dtype: torch.dtype) -> Tensor:
    """What is added to scores: 0 where ``mask`` is True."""
    return torch.where(mask, 0.0, torch.full((), float("-inf"), dtype=dtype, device=mask.device))


def unfused_attention(
    qkv: Sequence[Tensor], mask: Tensor | None, dropout_p: float, is_causal: bool, scale: float | None, grouped: bool
) -> Tensor:
    """As torch's C++ writes it out (`_scaled_dot_product_attention_math`), in fp32, which autocast does not reach."""
    with torch._C.DisableTorchFunction():
        narrow = qkv[0].dtype
        wide = [each.float() if _is_half(each) else each for each in qkv]
        query, key, value = wide
        root = abs(query.shape[-1] ** -0.5 if scale is None else scale) ** 0.5
        query = query * root
        if is_causal:
            mask = query.new_ones(query.shape[-2], key.shape[-2], dtype=torch.bool).tril()
        if mask is not None and mask.dtype == torch.bool:
            mask = _as_bias(mask, query.dtype)
        if grouped:
            groups = query.shape[-3] // key.shape[-3]
            key, value = (each.repeat_interleave(groups, -3) for each in (key, value))
        scores = torch.matmul(query, key.transpose(-2, -1) * root)
        if mask is not None:
            scores.add_(mask)
        shares = torch.ops.aten._safe_softmax(scores, -1)
        del scores
        shares = dropout(shares, dropout_p) if dropout_p else shares
        narrow_shares = shares.to(narrow)  # C++ returns them too; its compiler evaluates the last argument first
        out = torch.matmul(shares, value)
        out = out.to(narrow)
        # What leaves C++'s scope, in its order: the last that was declared goes first.
        del shares, value, key, mask, query
        while wide:
            wide.pop()
        del narrow_shares
        return out


def attention(
    query: Tensor,
    key: Tensor,
    value: Tensor,
    attn_mask: Tensor | None = None,
    dropout_p: float = 0.0,
    is_causal: bool = False,
    scale: float | None = None,
    enable_gqa: bool = False,
) -> Tensor:
    """`scaled_dot_product_attention` as CUDA dispatches it.

    Half precision without a mask: flash (which keeps output and a log-sum-exp a row; cuDNN's keeps the same bytes).
    With a mask, or in fp32: memory-efficient, which pads a mask's rows to 16 bytes. Grouped queries in fp32, heads over
    256 or of odd widths, a mask whose rows are not dense: the unfused one.
    """
    head = query.shape[-1]
    saves = any(each.requires_grad for each in (query, key, value)) and torch.is_grad_enabled()
    is_usual = query.dim() == 4 and head <= 256 and value.shape[-1] == head and head % 4 == 0
    if is_usual and _is_half(query) and attn_mask is None:
        if pad := -head % 8:
            query, key, value = (functional.pad(each, (0, pad)) for each in (query, key, value))
        given, scale = (query, key, value, dropout_p, is_causal, False), head**-0.5 if scale is None else scale
        return torch.ops.aten._scaled_dot_product_flash_attention(*given, scale=scale)[0][..., :head]
    if not is_usual or query.shape[1] != key.shape[1] or (attn_mask is not None and attn_mask.stride(-1) != 1):
        return unfused_attention((query, key, value), attn_mask, dropout_p, is_causal, scale, enable_gqa)
    bias = attn_mask
    if bias is not None:
        bias = _as_bias(bias, query.dtype) if bias.dtype == torch.bool else bias
        if pad := -bias.shape[-1] % 8:
            bias = functional.pad(bias, (0, pad))[..., :-pad]
        bias = bias.expand(*query.shape[:3], key.shape[2])
    given = (query, key, value, bias, saves, dropout_p, is_causal)
    return torch.ops.aten._scaled_dot_product_efficient_attention(*given, scale=scale)[0]


def _saved(tensor: Tensor) -> dict[str, Any]:
    """What checkpointing compares of a saved tensor, where it lies too: the same if C++ asks or Python."""
    with torch._C.DisableTorchFunction():
        return checkpoint._default_meta_extractor(tensor)


def _refuse_launch(kernel: Any, *args: Any, **options: Any) -> Any:
    """A tensor without bytes has the address 0: a GPU that is there would read it, and be lost to the process."""
    raise Unsupported(f"the Triton kernel {getattr(kernel, '__name__', kernel)} needs bytes, so it cannot be traced")


# Private names of torch that a trace stands on; there and with the same meaning in the versions that were tried.
PRIVATE_NAMES = (
    (torch._C, "DisableTorchFunction"), (torch._C, "_storage_Use_Count"), (Tensor, "_use_count"),
    (graph, "_engine_run_backward"), (torch.UntypedStorage, "_cdata"), (checkpoint, "get_device_states"),
    (checkpoint, "_allowed_determinism_checks_to_fns"), (checkpoint, "_default_meta_extractor"),
)  # fmt: skip
# Two names of one method of Optimizer: torch 2.11 has the first, 2.13 both.
_CAPTURE_CHECKS = ("_cuda_graph_capture_health_check", "_accelerator_graph_capture_health_check")


def answered(owner: Any, name: str, answer: Any) -> AbstractContextManager[Any]:
    """Inside, ``owner`` has ``answer`` under this name; a function answers this thread alone."""
    before, thread = getattr(owner, name), threading.get_ident()

    def call(*args: Any, **kwargs: Any) -> Any:
        return (answer if threading.get_ident() == thread else before)(*args, **kwargs)

    return mock.patch.object(owner, name, call if callable(answer) else answer)


@contextmanager
def cuda_on_meta(autocast: torch.dtype | None = None, capability: tuple[int, int] = (8, 0)) -> Iterator[CudaOnMeta]:
    """Enter `CudaOnMeta`, on a GPU of that compute capability.

    One thread at a time; others go on as ever, on a GPU too. What torch asks of a GPU by itself (optimizers, whether a
    CUDA graph is being captured; checkpointing, for the states of random numbers) is answered here: asking a GPU that
    is there would start CUDA, half a second, and take memory of it. Raises Unsupported where this torch lacks something
    that a trace needs, instead of bytes that are wrong.
    """
    if missing := [name for owner, name in PRIVATE_NAMES if not hasattr(owner, name)]:
        lacks = f"traces need {', '.join(missing)} of torch, which {torch.__version__} lacks"
        raise Unsupported(f"{lacks}: they were tried with torch 2.11 to 2.13")
    with _ONE_AT_A_TIME, ExitStack() as stack:
        for device in ("cpu", "cuda"):  # a region that a model opens itself ends with the answers below, not with these
            stack.callback(torch.set_autocast_dtype, device, torch.get_autocast_dtype(device))
            stack.callback(torch.set_autocast_enabled, device, torch.is_autocast_enabled(device))
        mode, has_bf16, optimizer = CudaOnMeta(autocast), capability >= (8, 0), torch.optim.Optimizer
        run_backward = graph._engine_run_backward
        # Our kernels' dispatcher remembers the capability: not across the borders of a trace.
        dispatch = sys.modules.get("vblackwell.kernels.runtime.registry")
        forget: Callable[[], Any] = getattr(getattr(dispatch, "capability", None), "cache_clear", lambda: None)

        def run_engine(*args: Any, **kwargs: Any) -> Any:
            # torch takes a mode off the stack before it hands `backward` to it. Functions' own backwards and the
            # forwards that checkpointing repeats have to see what the forward saw.
            with mode:
                return run_backward(*args, **kwargs)

        def attend(*args: Any, **kwargs: Any) -> Tensor:
            if autocast is not None:  # a call by this name never reaches the mode, which casts what it sees
                args, kwargs = mode.cast(_SDPA, args, kwargs)
            return attention(*args, **kwargs)

        kernels = getattr(sys.modules.get("triton.runtime.jit"), "JITFunction", None)
        answers: list[tuple[Any, str, Any]] = [
            *(((kernels, "run", _refuse_launch),) if kernels is not None else ()),
            (torch.autograd, "_engine_run_backward", run_engine),
            (functional, "scaled_dot_product_attention", attend),
            (torch.cuda, "get_device_capability", lambda device=None: capability),
            (torch.cuda, "is_bf16_supported", lambda including_emulation=True: including_emulation or has_bf16),
            (torch.cuda, "is_current_stream_capturing", lambda: False),
            (torch.cuda, "current_device", lambda: 0),
            *((optimizer, name, lambda self: None) for name in _CAPTURE_CHECKS if hasattr(optimizer, name)),
            # Tensors without bytes draw no random numbers, so there is no state to come back to.
            (checkpoint, "get_device_states", lambda *args: ([], [])),
            (torch.version, "cuda", torch.version.cuda or "13.0"),
            (torch, "is_autocast_enabled", lambda device_type="cuda": device_type == "cuda" and autocast is not None),
            (torch, "get_autocast_dtype", lambda device_type: autocast or torch.float32),
        ]
        with mode, warnings.catch_warnings():
            for owner, name, answer in answers:
                stack.enter_context(answered(owner, name, answer))
            stack.enter_context(mock.patch.dict(checkpoint._allowed_determinism_checks_to_fns, default=_saved))
            forget()
            stack.callback(forget)
            # Checkpointing restores autocast around its second forward, and says so where torch has no CUDA.
            warnings.filterwarnings("ignore", message=".*Disabling autocast")
            yield mode
