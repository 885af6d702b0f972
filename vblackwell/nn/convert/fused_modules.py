"""Which modules of a foreign model compute what our fused ops compute, and their classes with the fused forward.

Names tell what a module might be, a probe decides: the module's own forward runs on small random weights and inputs in
fp32, and must give what the fused op stands for. A module that qualifies gets a subclass of its class as its class, as
`torch.nn.utils.parametrize` does: names, parameters, hooks and ``isinstance`` stay. Copies and pickles of it are plain.
"""

import functools
import inspect
import sys
import threading
import types
from collections.abc import Callable
from typing import Any

import torch
from torch import Tensor, nn
from torch.nn import functional

from vblackwell.kernels.pointwise.rows import rms_norm, rotary, swiglu
from vblackwell.nn.linear.one_input import (
    hooked,
    linears_of_one_input,
    on_gpu,
)
from vblackwell.nn.linear.packed_linear import FINE
from vblackwell.nn.linear.stored_fp4 import StoredFP4Linear, adapted_linear

ROTARY_NAME = "apply_rotary_pos_emb"
# fp32 sums of a few dozen terms in another order; a different formula is off by 1e-2 and more.
PROBE_TOLERANCE = 1e-4
Overrides = dict[str, Any]  # methods, and properties


def reason_of(error: Exception) -> str:
    """Why a forward that raised ``error`` while it was probed is left alone, in a line."""
    if isinstance(error, AttributeError) and isinstance(error.obj, Stub):
        return f"its forward reads {error.name!r} of a layer inside it, not only what that layer computes"
    return f"its forward could not be probed: {type(error).__name__}: {error}".splitlines()[0][:200]


@functools.cache
def _fused_class(original: type, overrides: tuple[tuple[str, Callable[..., Any]], ...]) -> type:
    def plain_copy(self: nn.Module, protocol: Any) -> Any:
        # copyreg.__newobj__ and (class,), then state; pickle insists that it makes the very class it was asked about.
        _, (_, *arguments), *rest = object.__reduce_ex__(self, 2)
        return original.__new__, (original, *arguments), *rest

    ours = {"__reduce_ex__": plain_copy, "__module__": original.__module__, "_vb_original": original}
    contents = {**dict(overrides), **ours, "_vb_overrides": overrides}
    # The name stays: auto-wrapping and device maps find layers by it.
    return type(original.__name__, (original,), contents | {"__qualname__": original.__qualname__})


def swap(module: nn.Module, overrides: Overrides) -> None:
    """Make ``module``'s class one with these methods; a second swap adds to the first."""
    before = dict(type(module).__dict__.get("_vb_overrides", ()))
    items = sorted({**before, **overrides}.items(), key=lambda item: item[0])
    object.__setattr__(module, "__class__", _fused_class(plain_class(module), tuple(items)))


def plain_class(module: nn.Module) -> type:
    return type(module).__dict__.get("_vb_original", type(module))


def twin_of(module: nn.Module, **replaced: Any) -> Any:
    """A module that shares everything with ``module`` but these attributes, such as ``_parameters``."""
    twin = object.__new__(plain_class(module))
    twin.__dict__.update(module.__dict__, **replaced)
    return twin


def _why_not(theirs: Callable[[], Any], ours: Callable[[], Any], otherwise: str) -> str | None:
    """``otherwise`` where the two give other tensors, what a foreign forward raised, or None."""
    try:
        with torch.no_grad(), torch.device("cpu"):
            found = theirs(), ours()
        pairs = [found] if isinstance(found[0], Tensor) else zip(*found, strict=True)
        same = all(a.shape == b.shape and torch.allclose(a, b, PROBE_TOLERANCE, PROBE_TOLERANCE) for a, b in pairs)
    except Exception as error:  # whatever a foreign forward raises is a reason to leave it alone
        return reason_of(error)
    return None if same else otherwise


def _more_inputs(module: nn.Module) -> str | None:
    more = list(inspect.signature(plain_class(module).forward).parameters)[2:]
    return f"its forward takes {more[0]} in addition to its input" if more else None


def _random(*shape: int) -> Tensor:
    generator = torch.Generator().manual_seed(len(shape) + sum(shape))
    return torch.randn(*shape, generator=generator, dtype=torch.float32, device="cpu")


def _epsilon_name(norm: nn.Module) -> str | None:
    names = ("variance_epsilon", "eps", "epsilon")
    return next((name for name in names if isinstance(getattr(norm, name, None), float)), None)


def fused_norm(module: nn.Module) -> Overrides | str | None:
    """Methods that make ``module`` a fused RMSNorm; why not; or None if it does not look like one."""
    if "RMSNorm" not in type(module).__name__ and not isinstance(module, nn.RMSNorm):
        return None
    weight, eps_name = module._parameters.get("weight"), _epsilon_name(module)
    if len(module._parameters) != 1 or weight is None or weight.dim() != 1:
        return "it has no weight of one dimension, or other parameters"
    if eps_name is None:
        return "no attribute holds its epsilon"
    if more := _more_inputs(module):
        return more
    width, eps = weight.shape[0], getattr(module, eps_name)
    x, probe = _random(3, width) * 2, nn.Parameter(_random(width) + 0.5)
    theirs = functools.partial(type(module).forward, twin_of(module, _parameters={"weight": probe}), x)
    ours = functools.partial(functional.rms_norm, x, (width,), probe, eps)
    why = _why_not(theirs, ours, "it computes something else than weight * x / rms(x)")
    return why or {"forward": _norm_forward(eps_name)}


@functools.cache
def _norm_forward(eps_name: str) -> Callable[..., Tensor]:
    def forward(self: Any, hidden_states: Tensor) -> Tensor:
        return rms_norm(hidden_states, self.weight, getattr(self, eps_name))

    return forward


def _separate_forward(self: Any, x: Tensor) -> Tensor:
    # Not `gated_product`: a second pass under torch's checkpointing would end after its product, not before.
    return self.down_proj(swiglu(*linears_of_one_input(x, self.gate_proj, self.up_proj)))


def _joined_forward(self: Any, hidden_states: Tensor) -> Tensor:
    return self.down_proj(swiglu(*self.gate_up_proj(hidden_states).chunk(2, dim=-1)))


def fused_feed_forward(module: nn.Module) -> Overrides | str | None:
    """As `fused_norm`, for ``down(silu(gate(x)) * up(x))`` from linears of those names, gate and up joined or not."""
    children = set(module._modules)
    forward = _separate_forward if {"gate_proj", "up_proj", "down_proj"} <= children else None
    forward = _joined_forward if {"gate_up_proj", "down_proj"} <= children else forward
    if forward is None or "Experts" in type(module).__name__:
        return None
    if module._parameters:
        return "it has parameters other than its linears'"
    if more := _more_inputs(module):
        return more
    small = {"gate_proj": nn.Linear(8, 6), "up_proj": nn.Linear(8, 6), "down_proj": nn.Linear(6, 8)}
    small["gate_up_proj"] = nn.Linear(8, 12)
    twin = twin_of(module, _modules={name: small.get(name, child) for name, child in module._modules.items()})
    x, otherwise = _random(2, 3, 8) * 2, "it computes something else than down(silu(gate(x)) * up(x))"
    why = _why_not(lambda: type(module).forward(twin, x), lambda: forward(twin, x), otherwise)
    return why or {"forward": forward}


def fused_gelu(module: nn.Module) -> Overrides | str | None:
    """As `fused_norm`, for GELU that a forward spells out: on a GPU one pass over memory, in the input's type, where
    autocast makes of each power and product another fp32 tensor of the feed-forward's width."""
    original = plain_class(module)
    names = getattr(getattr(inspect.unwrap(original.forward), "__code__", None), "co_names", ())
    if "GELU" not in type(module).__name__ or not {"tanh", "erf"} & set(names):
        return None
    if module._modules or module._parameters or module._buffers:
        return "it has modules, parameters or buffers"
    home = sys.modules.get(original.__module__)
    if home is not None and any(each is module for each in vars(home).values()):
        return "all models share it"
    if more := _more_inputs(module):
        return more
    near, far = (torch.linspace(-end, end, 97, dtype=torch.float32, device="cpu") for end in (6, 40))
    x, why = torch.cat((near, far)), ""
    for approximate in ("tanh", "none"):
        ours = functools.partial(functional.gelu, x, approximate=approximate)
        modes = [functools.partial(original.forward, twin_of(module, training=mode), x) for mode in (True, False)]
        found = [_why_not(theirs, ours, "it computes something else than GELU") for theirs in modes]
        if found == [None, None]:
            return {"forward": _gelu_forward(original, approximate)}
        why = why or next(filter(None, found))
    return why


@functools.cache
def _gelu_forward(original: Any, approximate: str) -> Callable[..., Tensor]:
    def forward(self: Any, *args: Tensor, **named: Tensor) -> Tensor:
        (x,) = (*args, *named.values())
        return functional.gelu(x, approximate=approximate) if on_gpu(x) else original.forward(self, x)

    return forward


class Stub(nn.Module):
    def __init__(self, function: Callable[[Any], Any]) -> None:
        super().__init__()
        self.function = function

    def forward(self, hidden_states: Any = None, *args: Any, **options: Any) -> Any:
        return self.function(hidden_states)


def _gate(self: Any, gate_up_out: Tensor) -> Tensor:
    return swiglu(*gate_up_out.chunk(2, dim=-1))


def fused_gate(module: nn.Module) -> Overrides | str | None:
    """As `fused_norm`, for transformers' experts: the gating between their grouped products."""
    gate: Any = getattr(type(module), "_apply_gate", None)
    if gate is None:
        return None
    found = getattr(getattr(module, "config", None), "_experts_implementation", None)
    if found in (None, "eager"):
        return f"experts_implementation is {found!r}, which gates inside its loop; 'grouped_mm' gates in one place"
    x, otherwise = _random(5, 12) * 2, "it gates otherwise than silu(gate) * up"
    return _why_not(lambda: gate(module, x), lambda: _gate(module, x), otherwise) or {"_apply_gate": _gate}


def fused_rotation(module: nn.Module) -> Overrides | str | None:
    """As `fused_norm`, for a forward that calls ``apply_rotary_pos_emb``: its code, the fused op under that name."""
    forward: Any = plain_class(module).forward
    if ROTARY_NAME not in getattr(getattr(forward, "__code__", None), "co_names", ()):
        wrapped = getattr(getattr(forward, "__wrapped__", None), "__code__", None)
        return "its forward is wrapped by a decorator" if ROTARY_NAME in getattr(wrapped, "co_names", ()) else None
    theirs = forward.__globals__.get(ROTARY_NAME)
    return _why_not_rotation(theirs) or {"forward": _with_rotation(forward, theirs)}


@functools.cache
def _why_not_rotation(theirs: Callable[..., Any]) -> str | None:
    given = (_random(2, 3, 5, 8), _random(2, 1, 5, 8), _random(2, 5, 8), _random(2, 5, 8))
    otherwise = "it rotates otherwise than by halves of the head"
    return _why_not(lambda: theirs(*given), lambda: rotary(*given), otherwise)


@functools.cache
def _with_rotation(forward: types.FunctionType, theirs: Callable[..., Any]) -> Callable[..., Any]:
    def rotate(q: Tensor, k: Tensor, cos: Tensor, sin: Tensor, *rest: Any, **options: Any) -> Any:
        if rest or options or q.dim() != 4 or k.dim() != 4 or cos.shape[-1] != q.shape[-1] or q.dtype != k.dtype:
            return theirs(q, k, cos, sin, *rest, **options)  # a layout that the op does not have, asked for by name
        return rotary(q, k, cos, sin)

    names = {**forward.__globals__, ROTARY_NAME: rotate}
    renamed = types.FunctionType(forward.__code__, names, forward.__name__, forward.__defaults__, forward.__closure__)
    renamed.__kwdefaults__ = forward.__kwdefaults__
    return functools.update_wrapper(renamed, forward)


_counted_on = threading.local()  # ``here``: positions are made by a model, of one document a row


def _ask_of_given_positions() -> bool:
    """From now on, transformers' masks ask the GPU whether positions are of packed documents only where positions were
    given: the answer, which the host waits for, is known of those that a model makes. False where masks do not ask.
    """
    from transformers import masking_utils

    ask: Any = getattr(masking_utils, "find_packed_sequence_indices", None)
    if ask is None or hasattr(ask, "_vb_given"):
        return ask is not None

    @functools.wraps(ask)
    def find(position_ids: Tensor) -> Tensor | None:
        return None if getattr(_counted_on, "here", False) else ask(position_ids)

    find._vb_given = True  # type: ignore[attr-defined]
    masking_utils.find_packed_sequence_indices = find
    return True


def counted_positions(module: nn.Module) -> Overrides | str | None:
    """Methods of a trunk of transformers that makes positions where none are given, and a causal mask of them."""
    original: Any = plain_class(module)
    forward = inspect.unwrap(original.forward)
    names = getattr(forward, "__code__", None)
    if names is None or not {"create_causal_mask", "arange"} <= set(names.co_names):
        return None
    if "position_ids" not in inspect.signature(forward).parameters or not _ask_of_given_positions():
        return None
    return {"forward": _counting_forward(original)}


@functools.cache
def _counting_forward(original: Any) -> Callable[..., Any]:
    place = list(inspect.signature(inspect.unwrap(original.forward)).parameters).index("position_ids") - 1

    @functools.wraps(original.forward)
    def forward(self: Any, *args: Any, **options: Any) -> Any:
        if torch.compiler.is_compiling():  # a trace asks nothing
            return original.forward(self, *args, **options)
        given = args[place] if len(args) > place else options.get("position_ids")
        before, _counted_on.here = getattr(_counted_on, "here", False), given is None
        try:
            return original.forward(self, *args, **options)
        finally:
            _counted_on.here = before

    return forward


def fused_adapter(module: nn.Module) -> Overrides | str | None:
    """As `fused_norm`, for peft's LoRA around a `StoredFP4Linear`, where `adapted_linear` is what peft computes."""
    base: Any = getattr(module, "base_layer", None)
    if not isinstance(base, StoredFP4Linear) or not type(module).__module__.startswith("peft.tuners.lora"):
        return None
    if FINE in base.parts:
        return "its base is in two parts"
    return {"forward": _adapter_forward} if base.bias is None else "its base has a bias"


def _adapter_forward(self: Any, x: Tensor, *args: Any, **options: Any) -> Tensor:
    # A compiler fuses peft's expression itself, and cannot trace what `_only_adapter` asks.
    name = None if args or options or torch.compiler.is_compiling() else _only_adapter(self, x)
    if name is None:
        return plain_class(self).forward(self, x, *args, **options)
    weights = (self.lora_A[name].weight, self.lora_B[name].weight)
    return adapted_linear(x, *weights, float(self.scaling[name]), self.base_layer)


def _only_adapter(module: Any, x: Tensor) -> str | None:
    """The adapter whose sum with the base is all that the module computes; None where peft's own forward has to run."""
    active = module.active_adapters
    # Passes over memory count on a GPU; on the CPU peft's expression keeps its bits.
    if not on_gpu(x) or module.disable_adapters or module.merged or len(active) != 1:
        return None
    name = active[0]
    plain = name in module.lora_A and name not in module.lora_variant
    if not plain or torch.is_autocast_enabled("cuda") or not isinstance(module.lora_dropout[name], nn.Identity):
        return None
    parts = (module.base_layer, module.lora_A[name], module.lora_B[name])
    if any(hooked(part) or getattr(part, "bias", None) is not None for part in parts):
        return None
    weights = (parts[0].weight_codes, parts[1].weight, parts[2].weight)
    resident = not any("_vb_binding" in weight.__dict__ for weight in weights)
    return name if resident and weights[1].dtype == weights[2].dtype == x.dtype else None
