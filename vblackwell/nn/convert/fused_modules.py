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
from collections.abc import Callable, Hashable
from typing import Any

import torch
from torch import Tensor, nn
from torch.nn import functional
from torch.utils._pytree import tree_leaves

from vblackwell.errors import Unsupported
from vblackwell.kernels.pointwise.layer import layer_block
from vblackwell.kernels.pointwise.layer_graphs import Attend
from vblackwell.kernels.pointwise.linears import feed_forward_block
from vblackwell.kernels.pointwise.rows import rms_norm, rotary, swiglu
from vblackwell.nn.linear.one_input import (
    hooked,
    is_linear,
    is_plain_norm,
    linears_of_one_input,
    may_be_lean,
    on_gpu,
    output_is_read,
)
from vblackwell.nn.linear.stored_fp4 import StoredFP4Linear, adapted_linear

ROTARY_NAME = "apply_rotary_pos_emb"
# fp32 sums of a few dozen terms in another order; a different formula is off by 1e-2 and more.
PROBE_TOLERANCE = 1e-4
Overrides = dict[str, Callable[..., Any]]


def reason_of(error: Exception) -> str:
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


_PARTS = {"self_attn", "mlp", "input_layernorm", "post_attention_layernorm"}
_PASSES = "_vb_passes"  # an argument of a checkpointed layer: a list that grows by one with each pass of one call


class Stub(nn.Module):
    def __init__(self, function: Callable[[Any], Any]) -> None:
        super().__init__()
        self.function = function

    def forward(self, hidden_states: Any = None, *args: Any, **options: Any) -> Any:
        return self.function(hidden_states)


class _Nothing:
    def __radd__(self, x: Tensor) -> Tensor:
        return x

    __add__ = __radd__


_WITHOUT_MLP: dict[str, nn.Module] = {
    "post_attention_layernorm": Stub(lambda x: x),
    "mlp": Stub(lambda x: _Nothing()),
}


def _pass_of(original: type, layer: Any, modules: dict[str, Any], *args: Any, **options: Any) -> Any:
    """The forward of class ``original`` for ``layer`` with some of its modules replaced, and no checkpoint."""
    twin = twin_of(layer, _modules={**layer._modules, **modules})
    twin.__dict__.update(gradient_checkpointing=False, training=options.pop("training", layer.training))
    return original.forward(twin, *args, **options)


def fused_layer(module: nn.Module) -> Overrides | str | None:
    """As `fused_norm`, for a layer that is ``h = x + attention(norm(x))`` and then ``h + mlp(norm(h))``: where
    transformers checkpoints it, it keeps ``x`` alone, and the second pass computes nothing; or, if attention has to be
    called, the second half keeps ``h`` alone. The feed-forward goes in chunks of tokens.
    """
    if set(module._modules) != _PARTS or not hasattr(module, "gradient_checkpointing") or "forward" in module.__dict__:
        return None
    norm, mlp = module.get_submodule("post_attention_layernorm"), module.get_submodule("mlp")
    fused = isinstance(fused_norm(norm), dict) and isinstance(fused_feed_forward(mlp), dict)
    if not fused or "gate_proj" not in mlp._modules:
        return None
    x, otherwise = _random(2, 3, 8), "it computes something else than h + mlp(norm(h)) after attention"
    stubs: dict[str, nn.Module] = {
        "input_layernorm": Stub(torch.cos),
        "self_attn": Stub(lambda x: (torch.sin(3 * x), None)),
        "post_attention_layernorm": Stub(torch.tanh),
        "mlp": Stub(torch.square),
    }
    h = x + torch.sin(3 * torch.cos(x))
    first, why = {**stubs, **_WITHOUT_MLP}, None
    for training in (True, False):
        pass_of = functools.partial(_pass_of, plain_class(module), module, training=training)
        why = why or _why_not(lambda: pass_of(stubs, x), lambda: h + torch.tanh(h).square(), otherwise)  # noqa: B023
        why = why or _why_not(lambda: pass_of(first, x), lambda: h, otherwise)  # noqa: B023
    return why or dict(_layer_methods(plain_class(module), _epsilon_name(norm) or "", *_probed_attention(module)))


_PROJECTIONS = ("q_proj", "k_proj", "v_proj", "o_proj")


_NUMBERS = (type(None), bool, int, float, str)
_OF_MODULES = frozenset(vars(nn.Module()))
_TABLES = ("position_ids", "cache_position")  # of numbers that attention may read; of any other, nobody can tell


class _AnyLayer:
    """In place of a layer's number in what is computed for all layers of a kind: who asks for it is refused."""

    def _refuse(self, *args: Any) -> Any:
        raise Unsupported("attention that goes by the number of its layer")

    __eq__ = __ne__ = __lt__ = __le__ = __gt__ = __ge__ = __bool__ = __index__ = __int__ = __float__ = _refuse
    __add__ = __radd__ = __sub__ = __rsub__ = __mul__ = __rmul__ = __mod__ = __floordiv__ = __hash__ = _refuse
    __str__ = __repr__ = __format__ = _refuse
    __class__ = property(_refuse)  # type: ignore[assignment] - what `isinstance` asks


def _frozen(value: Any) -> Hashable:
    """Equal where ``value``, of numbers and containers, is; of anything else the object."""
    if isinstance(value, dict):
        return tuple((name, _frozen(each)) for name, each in value.items())
    return tuple(map(_frozen, value)) if isinstance(value, (list, tuple)) else (type(value), value)


class _Attention:
    """What a layer's ``attention`` does between its linears when it is ``given`` these arguments; an `Attend`."""

    def __init__(self, attention: Any, given: dict[str, Any]) -> None:
        self._attention, self._given = attention, given

    def __call__(self, x: Tensor, parts: list[Tensor]) -> Tensor:
        found = dict(zip(_PROJECTIONS, parts, strict=False))
        parts.clear()
        linears = {name: functools.partial(lambda name, _: found.pop(name), name) for name in _PROJECTIONS[:3]}
        twin = twin_of(self._attention, **linears, o_proj=lambda x: x)
        return type(self._attention).forward(twin, x, **self._given)[0]

    def kind(self) -> Hashable:
        attention, names = self._attention, self._names()
        given = {name: each for name, each in self._given.items() if name not in names}
        own = {name: each for name, each in vars(attention).items() if name not in _OF_MODULES}
        config, tables = own.pop("config", None), given.pop("position_embeddings", None)
        own.pop("layer_idx", None)
        known = type(tables) is tuple and all(isinstance(each, Tensor) for each in tables) and not attention._buffers
        if not known or not all(isinstance(each, _NUMBERS) for each in (*given.values(), *own.values())):
            return None
        forward = type(attention).forward
        names_of_module = getattr(plain_class(attention).forward, "__globals__", {})
        functions = names_of_module.get("ALL_ATTENTION_FUNCTIONS", {})
        rules = forward, functions.get("sdpa"), id(config), attention.training
        try:
            found = rules, _frozen(vars(config)), _frozen(own), _frozen(given), len(tables), tuple(names)
            hash(found)
        except TypeError:
            return None
        return found

    def _names(self) -> list[str]:
        return [name for name in _TABLES if isinstance(self._given.get(name), Tensor)]

    def tensors(self) -> list[Tensor]:
        return [*self._given["position_embeddings"], *(self._given[name] for name in self._names())]

    def over(self, tensors: list[Tensor]) -> "_Attention":
        number = len(self._given["position_embeddings"])
        tables = {"position_embeddings": tuple(tensors[:number])}
        tables |= dict(zip(self._names(), tensors[number:], strict=True))
        of_none = {**vars(nn.Module()), "training": self._attention.training}  # graphs keep no layer alive
        one = twin_of(self._attention, layer_idx=_AnyLayer(), **of_none)
        object.__setattr__(one, "__class__", type(self._attention))
        return _Attention(one, {**self._given, **tables})


def _attend_of(original: type, layer: Any, attention: Any, *args: Any, **options: Any) -> _Attention:
    """What ``attention`` does between its linears in a call of the layer with these arguments."""
    given: dict[str, Any] = {}

    def note(hidden_states: Tensor, **options: Any) -> Any:
        given.update(options)  # and nothing of the input, which may leave level 0
        return _Nothing(), None

    _pass_of(original, layer, {"input_layernorm": lambda x: x, "self_attn": note, **_WITHOUT_MLP}, *args, **options)
    return _Attention(attention, given)


def _probed_attention(layer: Any) -> tuple[type | None, str]:
    """The class of a layer's attention, and where the norm before it has epsilon, if nothing but linears is trained in
    it, and it is the last of a function of what the others give; else None."""
    attention, norm, original = layer.self_attn, layer.input_layernorm, plain_class(layer)
    head, groups = getattr(attention, "head_dim", 0), getattr(attention, "num_key_value_groups", 0)
    plain = set(attention._modules) == set(_PROJECTIONS) and not attention._parameters and head and groups
    if not plain or "forward" in attention.__dict__ or not isinstance(fused_norm(norm), dict):
        return None, ""
    sizes = zip(_PROJECTIONS, ((8, groups * head), (8, head), (8, head), (groups * head, 8)), strict=True)
    linears: dict[str, Any] = {name: nn.Linear(*size, device="cpu", dtype=torch.float32) for name, size in sizes}
    twin, x = twin_of(attention, _modules=linears, training=False), _random(2, 3, 8)
    tables = {"position_embeddings": (_random(2, 3, head), _random(2, 3, head))}

    def theirs() -> Tensor:
        modules = {"input_layernorm": torch.cos, "self_attn": functools.partial(plain_class(attention).forward, twin)}
        return _pass_of(original, layer, {**modules, **_WITHOUT_MLP}, x, **tables)

    def ours() -> Tensor:
        parts = [linears[name](x.cos()) for name in _PROJECTIONS[:3]]
        return x + linears["o_proj"](_attend_of(original, layer, twin, x, **tables)(x, parts))

    why = _why_not(theirs, ours, "it computes something else")
    return (None, "") if why else (plain_class(attention), _epsilon_name(norm) or "")


def _attention_as_probed(layer: Any, x: Tensor, kind: type | None, eps_name: str, options: Any) -> bool:
    """Whether the layer's attention and the norm before it are still what `_probed_attention` found, and may run inside
    backward."""
    attention, norm = layer.self_attn, layer.input_layernorm
    if kind is None or plain_class(attention) is not kind or "forward" in attention.__dict__ or hooked(attention):
        return False
    if type(norm).forward is not _norm_forward(eps_name) or "forward" in norm.__dict__ or not is_plain_norm(x, norm):
        return False
    linears = [getattr(attention, name) for name in _PROJECTIONS]
    fits = all(is_linear(each) and each.weight.dtype == x.dtype for each in linears)
    # Other attention may draw random numbers, as dropout does, or be compiled.
    sdpa = getattr(getattr(attention, "config", None), "_attn_implementation", None) == "sdpa"
    alone = sdpa and getattr(attention, "attention_dropout", None) == 0
    return fits and alone and not any(isinstance(each, Tensor) and each.requires_grad for each in tree_leaves(options))


@functools.cache
def _layer_methods(original: Any, eps_name: str, kind: type | None, first_eps_name: str) -> Overrides:
    def call(self: Any, *args: Any, **options: Any) -> Any:
        compiled = self._compiled_call_impl is not None or torch.compiler.is_compiling()
        if self.training and self.gradient_checkpointing and not compiled and "forward" not in self.__dict__:
            options[_PASSES] = []  # the very list comes again with the second pass of a checkpoint of this layer alone
        return original.__call__(self, *args, **options)

    def forward(self: Any, hidden_states: Tensor, *args: Any, **options: Any) -> Any:
        passes = options.pop(_PASSES, None)
        # What a second pass in backward makes of the layer is thrown away, but for what it saves and hooks read.
        wanted = not passes or torch._C._current_graph_task_id() == -1 or output_is_read(self)
        if passes and passes[0] is not None:
            return whole(self, passes[0], wanted, hidden_states)
        norm, mlp = self.post_attention_layernorm, self.mlp
        ours = type(norm).forward is _norm_forward(eps_name) and type(mlp).forward is _separate_forward
        ours = ours and not any("forward" in each.__dict__ for each in (norm, mlp))  # still what was probed
        linears = (mlp.gate_proj, mlp.up_proj, mlp.down_proj) if ours else ()
        if passes is None or not ours or not may_be_lean(hidden_states, norm, mlp, linears):
            return original.forward(self, hidden_states, *args, **options)
        if not passes and _attention_as_probed(self, hidden_states, kind, first_eps_name, (args, options)):
            passes.append(_attend_of(original, self, self.self_attn, hidden_states, *args, **options))
            return whole(self, passes[0], True, hidden_states)
        passes.append(None)
        h = _pass_of(original, self, _WITHOUT_MLP, hidden_states, *args, **options)
        if h.dtype != hidden_states.dtype:
            return h + mlp(norm(h))
        weights = (mlp.gate_proj.weight, mlp.up_proj.weight, mlp.down_proj.weight)
        return feed_forward_block(h, norm.weight, getattr(norm, eps_name), *weights, wanted)

    def whole(self: Any, attend: Attend, wanted: bool, x: Tensor) -> Tensor:
        first, second, mlp, attention = self.input_layernorm, self.post_attention_layernorm, self.mlp, self.self_attn
        weights = [first.weight, second.weight, mlp.gate_proj.weight, mlp.up_proj.weight, mlp.down_proj.weight]
        for linear in (attention.q_proj, attention.k_proj, attention.v_proj, attention.o_proj):
            weights += [linear.weight, linear.bias]
        epsilons = (getattr(first, first_eps_name), getattr(second, eps_name))
        return layer_block(attend, epsilons, wanted, x, *weights)

    return {"__call__": call, "forward": forward}


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


KINDS: dict[str, Callable[[nn.Module], Overrides | str | None]] = {
    "norm": fused_norm,
    "feed_forward": fused_feed_forward,
    "activation": fused_gelu,
    "gate": fused_gate,
    "layer": fused_layer,
    "rotary": fused_rotation,
    "adapter": fused_adapter,
    "positions": counted_positions,
}
