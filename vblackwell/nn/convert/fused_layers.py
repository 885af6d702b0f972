"""Which layers of a foreign model become one operation where transformers checkpoints them, and with which methods.

A checkpoint keeps a layer's input, and calls the layer once more in backward, hooks and all. One operation keeps the
same and calls nothing: `layer_block` where norms, attention and feed-forward are what it stands for, which a probe
decides; in a stream, whose layers may be CUDA graphs, `own_layer` of any other layer that draws no numbers.
"""

import functools
import operator
import random
import threading
from collections.abc import Hashable, Iterator, Sequence
from typing import Any

import torch
from torch import Tensor, nn
from torch.nn.modules.module import _global_forward_pre_hooks
from torch.utils._pytree import tree_flatten, tree_leaves, tree_unflatten

from vblackwell.kernels.pointwise.layer import layer_block, own_layer
from vblackwell.kernels.pointwise.layer_graphs import Foreign, graphs_in_use
from vblackwell.kernels.pointwise.linears import feed_forward_block
from vblackwell.kernels.runtime.registry import computes_at_once, differentiating_forward, functions_are_seen
from vblackwell.nn.convert.alike import PLACE, AnyLayer
from vblackwell.nn.convert.fused_modules import (
    Overrides,
    Stub,
    _epsilon_name,
    _norm_forward,
    _random,
    _separate_forward,
    _why_not,
    fused_feed_forward,
    fused_norm,
    plain_class,
    twin_of,
)
from vblackwell.nn.decoder.checkpoint import saving_an_input, top_hooks
from vblackwell.nn.linear.one_input import hooked, is_linear, is_plain_norm, may_be_lean, output_is_read

_PARTS = {"self_attn", "mlp", "input_layernorm", "post_attention_layernorm"}
_PASSES = "_vb_passes"  # an argument of a checkpointed layer: a list that grows by one with each pass of one call
_ALONE = "_vb_alone"  # an argument of a layer in place of its checkpoint: what its one operation calls
_CACHES = ("past_key_values", "layer_past")  # that transformers' checkpoints leave out
# Weights to an element of the input: an operation gives all their gradients at once, and its caller copies them once
# more. That may take what backward needs in any case, about 16 tensors of the input's size, which is planned for.
MOST_WEIGHTS = 8


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
    transformers checkpoints it, it is one operation that keeps ``x`` alone; or, if attention has to be called, the
    second half keeps ``h`` alone. The feed-forward goes in chunks of tokens. Any other layer of transformers' that
    consists of linears and norms may be one operation in a stream.
    """
    if not hasattr(module, "gradient_checkpointing") or "forward" in module.__dict__:
        return None
    own = dict(_own_methods(plain_class(module))) if _is_simple(module) else None
    if set(module._modules) != _PARTS:
        return own
    norm, mlp = module.get_submodule("post_attention_layernorm"), module.get_submodule("mlp")
    fused = isinstance(fused_norm(norm), dict) and isinstance(fused_feed_forward(mlp), dict)
    if not fused or "gate_proj" not in mlp._modules:
        return own
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
    if why:
        return own or why
    return dict(_layer_methods(plain_class(module), _epsilon_name(norm) or "", *_probed_attention(module)))


_PROJECTIONS = ("q_proj", "k_proj", "v_proj", "o_proj")


_NUMBERS = (type(None), bool, int, float, str)
_CONTAINERS = (dict, list, tuple)
_OF_MODULES = frozenset(vars(nn.Module()))
_CHECKPOINTING = {"gradient_checkpointing", "_gradient_checkpointing_func"}
_NOT_OWN = _OF_MODULES | _CHECKPOINTING | {"config", PLACE}
_TABLES = ("position_ids", "cache_position")  # of numbers that attention may read; of any other, nobody can tell


def _frozen(value: Any) -> Hashable:
    """Equal where ``value``, of numbers and containers, is; of anything else the object."""
    if isinstance(value, dict):
        return tuple((name, _frozen(each)) for name, each in value.items())
    return tuple(map(_frozen, value)) if isinstance(value, _CONTAINERS) else (type(value), value)


def _is_number(value: Any) -> bool:
    """Whether ``value`` cannot change: a number or the like, or a tuple of such."""
    return all(map(_is_number, value)) if type(value) is tuple else isinstance(value, _NUMBERS)


def _rules(module: nn.Module) -> Hashable:
    """Equal for modules that compute the same function of arguments and parameters; None: nobody can tell."""
    own = {name: each for name, each in vars(module).items() if name not in _NOT_OWN}
    config: Any = getattr(module, "config", None)
    if module._buffers or not all(map(_is_number, own.values())) or not _has_known_attention(module):
        return None
    forward = type(module).forward, _sdpa(module), module.training
    return forward, _frozen(own), id(config), None if config is None else _frozen_once(config)


def _frozen_once(config: Any) -> Hashable:
    """`_frozen` of its attributes, which are many, anew where one of them is another object or changed inside."""
    graphs, now = graphs_in_use(), vars(config)
    values, inside = list(now.values()), [_frozen(each) for each in now.values() if isinstance(each, _CONTAINERS)]
    shared: dict[Hashable, Any] = {} if graphs is None else graphs.shared
    whose, names, before, inside_before, found = shared.get(_frozen_once, (None, [], [], [], None))
    same = whose is config and names == [*now] and inside_before == inside
    if not same or not all(map(operator.is_, values, before)):
        found = _frozen(now)
        shared[_frozen_once] = config, [*now], values, inside, found
    return found


def _sdpa(module: Any) -> Any:
    """What ``module`` would call for PyTorch's attention, if it has any."""
    return getattr(plain_class(module).forward, "__globals__", {}).get("ALL_ATTENTION_FUNCTIONS", {}).get("sdpa")


def _has_known_attention(module: Any) -> bool:
    """Whether attention, if ``module`` has any, is PyTorch's by transformers' own function: another may be compiled,
    draw numbers, or read what nobody sees here."""
    how, function = getattr(getattr(module, "config", None), "_attn_implementation", None), _sdpa(module)
    return how is None or (how == "sdpa" and (function is None or function.__module__.startswith("transformers.")))


def _hashable(found: Hashable) -> Hashable:
    try:
        hash(found)
    except TypeError:
        return None
    return found


def _of_any_layer(module: nn.Module, **replaced: Any) -> Any:
    """A twin of ``module`` for all layers of its kind, with no hooks and no parameters: graphs keep no layer alive."""
    number = {PLACE: AnyLayer()} if PLACE in vars(module) else {}
    one = twin_of(module, **number, **{**vars(nn.Module()), "training": module.training, **replaced})
    object.__setattr__(one, "__class__", type(module))
    return one


class _Attention:
    """What a layer's ``attention`` does between its linears when it is ``given`` these arguments."""

    def __init__(self, attention: Any, given: dict[str, Any]) -> None:
        self._attention, self._given = attention, given

    def __call__(self, x: Tensor, parts: list[Tensor]) -> Tensor:
        found = dict(zip(_PROJECTIONS, parts, strict=False))
        parts.clear()
        linears = {name: functools.partial(lambda name, _: found.pop(name), name) for name in _PROJECTIONS[:3]}
        twin = twin_of(self._attention, **linears, o_proj=lambda x: x)
        return type(self._attention).forward(twin, x, **self._given)[0]

    @functools.cached_property
    def kind(self) -> Hashable:
        names = self._names()
        given = {name: each for name, each in self._given.items() if name not in names}
        tables, rules = given.pop("position_embeddings", None), _rules(self._attention)
        known = type(tables) is tuple and all(isinstance(each, Tensor) for each in tables)
        if not known or rules is None or not all(isinstance(each, _NUMBERS) for each in given.values()):
            return None
        return _hashable((rules, _frozen(given), len(tables), tuple(names)))

    def _names(self) -> list[str]:
        return [name for name in _TABLES if isinstance(self._given.get(name), Tensor)]

    def tensors(self) -> list[Tensor]:
        return [*self._given["position_embeddings"], *(self._given[name] for name in self._names())]

    def over(self, tensors: list[Tensor]) -> "_Attention":
        number = len(self._given["position_embeddings"])
        tables = {"position_embeddings": tuple(tensors[:number])}
        tables |= dict(zip(self._names(), tensors[number:], strict=True))
        return _Attention(_of_any_layer(self._attention), {**self._given, **tables})


class _OwnForward:
    """The forward of ``layer`` after its input, when it is given these arguments, as a function of its parameters."""

    def __init__(self, layer: Any, args: Sequence[Any], options: dict[str, Any]) -> None:
        self._layer = layer
        self._given, self._tree = tree_flatten((list(args), options))

    def __call__(self, x: Tensor, weights: Sequence[Tensor | None]) -> Tensor:
        args, options = tree_unflatten(self._given, self._tree)
        layer = _with_parameters(self._layer, iter(weights))
        layer.__dict__["gradient_checkpointing"] = False
        return plain_class(self._layer).forward(layer, x, *args, **options)

    @functools.cached_property
    def kind(self) -> Hashable:
        tensors = [isinstance(each, Tensor) for each in self._given]
        others = [each for each, is_tensor in zip(self._given, tensors, strict=True) if not is_tensor]
        parts = list(self._layer.modules())
        rules = [None if hooked(each) and each is not self._layer else _rules(each) for each in parts]
        if None in rules or not all(isinstance(each, _NUMBERS) for each in others):
            return None
        return _hashable((tuple(rules), str(self._tree), tuple(tensors), _frozen(others)))

    def tensors(self) -> list[Tensor]:
        return [each for each in self._given if isinstance(each, Tensor)]

    def over(self, tensors: list[Tensor]) -> "_OwnForward":
        one, left = _OwnForward(_any_of(self._layer), (), {}), iter(tensors)
        one._given = [next(left) if isinstance(each, Tensor) else each for each in self._given]
        one._tree = self._tree
        return one


def _any_of(module: nn.Module) -> Any:
    parts = {name: None if each is None else _any_of(each) for name, each in module._modules.items()}
    return _of_any_layer(module, _modules=parts, _parameters=dict.fromkeys(module._parameters))


def _with_parameters(module: nn.Module, parameters: Iterator[Tensor | None]) -> Any:
    """A twin of ``module`` with the next ``parameters``, in the order of `_parameters_of`."""
    own = {name: next(parameters) for name in module._parameters}
    parts = module._modules.items()
    twin = twin_of(module, _parameters=own)
    twin.__dict__["_modules"] = {n: None if each is None else _with_parameters(each, parameters) for n, each in parts}
    object.__setattr__(twin, "__class__", type(module))
    return twin


def _parameters_of(module: nn.Module) -> list[Tensor | None]:
    """All, as often as they are held."""
    parts = [each for each in module._modules.values() if each is not None]
    return [*module._parameters.values(), *(param for each in parts for param in _parameters_of(each))]


def _attend_of(original: type, layer: Any, attention: Any, *args: Any, **options: Any) -> _Attention:
    """What ``attention`` does between its linears in a call of the layer with these arguments."""
    graphs = graphs_in_use()
    if graphs is None:
        return _Attention(attention, _given_to_attention(original, layer, *args, **options))
    # Mostly the layer before was the same but for its parts, and was called with the very same but for the input. What
    # tensors hold is not compared: a layer that goes by that would wait for the GPU.
    x, *rest = args
    named = {name: each for name, each in vars(layer).items() if name not in _OF_MODULES | _CHECKPOINTING}
    objects = [*rest, *options.values()]
    known = all(map(_is_fixed, objects)) and all(map(_is_number, named.values()))
    equal = (original, layer.training, x.shape, x.dtype, *options, _frozen(named)) if known else None
    equal_before, objects_before, given = graphs.shared.get(_attend_of, (None, (), None))
    same = known and equal == equal_before and len(objects) == len(objects_before)
    if same and all(map(operator.is_, objects, objects_before)):
        return _Attention(attention, given)
    given = _given_to_attention(original, layer, *args, **options)
    theirs = {id(each) for each in objects}  # anything else may be made of this layer's input
    if known and all(_is_number(each) or id(each) in theirs for each in given.values()):
        graphs.shared[_attend_of] = equal, objects, given
    return _Attention(attention, given)


def _is_fixed(value: Any) -> bool:
    """Whether a layer's argument is the same as long as it is the same object, but for what tensors hold."""
    return all(map(_is_fixed, value)) if type(value) is tuple else isinstance(value, Tensor) or _is_number(value)


def _given_to_attention(original: type, layer: Any, *args: Any, **options: Any) -> dict[str, Any]:
    """What class ``original``, called for ``layer`` with these arguments, calls attention with, but for its input."""
    given: dict[str, Any] = {}

    def note(hidden_states: Tensor, **options: Any) -> Any:
        given.update(options)  # and nothing of the input, which may leave level 0
        return _Nothing(), None

    _pass_of(original, layer, {"input_layernorm": lambda x: x, "self_attn": note, **_WITHOUT_MLP}, *args, **options)
    return given


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
    sdpa = hasattr(attention, "config") and _has_known_attention(attention)
    alone = sdpa and getattr(attention, "attention_dropout", None) == 0
    return fits and alone and not _wants_gradients(options)


def _wants_gradients(given: Any) -> bool:
    """Whether a tensor in ``given`` does."""
    return any(isinstance(each, Tensor) and each.requires_grad for each in tree_leaves(given))


def _is_checkpointed(layer: Any) -> bool:
    """Whether transformers makes a checkpoint of a call of ``layer``."""
    compiled = layer._compiled_call_impl is not None or torch.compiler.is_compiling()
    return layer.training and layer.gradient_checkpointing and not compiled and "forward" not in layer.__dict__


def _may_be_alone(layer: Any) -> bool:
    """Whether a checkpointed call of ``layer`` may do without: nobody's hooks but ours would see it, of modules or of
    what is saved, as a checkpoint around it has them in both of its passes."""
    keeps_cache = getattr(layer, "_can_checkpoint_with_cache", False)
    backward = layer._backward_hooks or layer._backward_pre_hooks
    if keeps_cache or backward or output_is_read(layer) or top_hooks(True) is not None:
        return False
    before = [*layer._forward_pre_hooks.values(), *_global_forward_pre_hooks.values()]
    return all(getattr(hook, "ignores_output", False) for hook in before)


def _without_cache(options: dict[str, Any]) -> dict[str, Any]:
    """What a checkpoint of transformers makes of a layer's arguments."""
    left_out = dict.fromkeys(options.keys() & {*_CACHES}) | ({"use_cache": False} if "use_cache" in options else {})
    return {**options, **left_out}


def _alone(original: type, layer: Any, foreign: Foreign, x: Tensor, args: Sequence[Any], options: Any) -> Tensor:
    """A call of ``layer`` in place of the checkpoint that transformers makes of it."""
    before, _calls.alone = getattr(_calls, "alone", None), layer
    try:
        return original.__call__(layer, x, *args, **options, **{_ALONE: foreign})
    finally:
        _calls.alone = before


_calls = threading.local()  # ``alone``: the layer that this thread calls without its checkpoint


@property
def _checkpointing(self: Any) -> bool:
    return vars(self).get("gradient_checkpointing", False) and getattr(_calls, "alone", None) is not self


@_checkpointing.setter
def _checkpointing(self: Any, value: bool) -> None:
    vars(self)["gradient_checkpointing"] = value


@functools.cache
def _layer_methods(original: Any, eps_name: str, kind: type | None, first_eps_name: str) -> Overrides:
    def ours(self: Any, x: Tensor) -> bool:
        norm, mlp = self.post_attention_layernorm, self.mlp
        probed = type(norm).forward is _norm_forward(eps_name) and type(mlp).forward is _separate_forward
        if not probed or any("forward" in each.__dict__ for each in (norm, mlp)):
            return False
        return may_be_lean(x, norm, mlp, (mlp.gate_proj, mlp.up_proj, mlp.down_proj))

    def call(self: Any, *args: Any, **options: Any) -> Any:
        if not _is_checkpointed(self):
            return original.__call__(self, *args, **options)
        if args and _may_be_alone(self):
            (x, *rest), given = args, _without_cache(options)
            with torch._C.DisableTorchFunctionSubclass():  # an offloaded parameter's own would be asked for each type
                as_probed = ours(self, x) and _attention_as_probed(self, x, kind, first_eps_name, (rest, given))
            if as_probed:
                attend = _attend_of(original, self, self.self_attn, x, *rest, **given)
                return _alone(original, self, attend, x, rest, given)
        options[_PASSES] = []  # the very list comes again with the second pass of a checkpoint of this layer alone
        return original.__call__(self, *args, **options)

    def forward(self: Any, hidden_states: Tensor, *args: Any, **options: Any) -> Any:
        attend, passes = options.pop(_ALONE, None), options.pop(_PASSES, None)
        if attend is not None:
            with saving_an_input():
                return whole(self, attend, hidden_states)
        if passes is None or not ours(self, hidden_states):
            return original.forward(self, hidden_states, *args, **options)
        # What a second pass in backward makes of the layer is thrown away, but for what it saves and hooks read.
        wanted = not passes or torch._C._current_graph_task_id() == -1 or output_is_read(self)
        passes.append(None)
        norm, mlp = self.post_attention_layernorm, self.mlp
        h = _pass_of(original, self, _WITHOUT_MLP, hidden_states, *args, **options)
        if h.dtype != hidden_states.dtype:
            return h + mlp(norm(h))
        weights = (mlp.gate_proj.weight, mlp.up_proj.weight, mlp.down_proj.weight)
        return feed_forward_block(h, norm.weight, getattr(norm, eps_name), *weights, wanted)

    def whole(self: Any, attend: Foreign, x: Tensor) -> Tensor:
        first, second, mlp, attention = self.input_layernorm, self.post_attention_layernorm, self.mlp, self.self_attn
        weights = [first.weight, second.weight, mlp.gate_proj.weight, mlp.up_proj.weight, mlp.down_proj.weight]
        for linear in (attention.q_proj, attention.k_proj, attention.v_proj, attention.o_proj):
            weights += [linear.weight, linear.bias]
        epsilons = (getattr(first, first_eps_name), getattr(second, eps_name))
        return layer_block(attend, epsilons, x, *weights)

    return {"__call__": call, "forward": forward, "gradient_checkpointing": _checkpointing}


def _is_simple(layer: nn.Module) -> bool:
    """Whether a layer is transformers' own, and its parameters are of linears and norms alone: of no experts, which
    the GPU would be asked about."""
    parts = list(layer.modules())
    held = [each for each in parts if each._parameters]
    known = (nn.Linear, nn.LayerNorm)
    simple = all(isinstance(each, known) or type(each).__name__ == "Conv1D" or _is_norm(each) for each in held)
    only = sum(hasattr(each, "gradient_checkpointing") for each in parts) == 1
    return simple and only and bool(held) and plain_class(layer).__module__.startswith("transformers.models.")


def _is_norm(module: nn.Module) -> bool:
    return isinstance(fused_norm(module), dict)


@functools.cache
def _own_methods(original: Any) -> Overrides:
    def call(self: Any, *args: Any, **options: Any) -> Any:
        graphs, plain = graphs_in_use(), functools.partial(original.__call__, self, *args, **options)
        if graphs is None or not args or not isinstance(args[0], Tensor) or not _is_checkpointed(self):
            return plain()
        (x, *rest), given = args, _without_cache(options)
        seen = functions_are_seen() or differentiating_forward() or not computes_at_once()
        if seen or not _may_be_alone(self) or _wants_gradients((rest, given)):
            return plain()
        forward = _OwnForward(self, rest, given)
        if (kind := forward.kind) is None:
            return plain()
        if kind not in graphs.alone:  # whether it draws numbers, or keeps something, is known when it has run
            before = _generators(x.device)
            y = plain()
            same = before == _generators(x.device) and kind == _OwnForward(self, rest, given).kind
            weights = sum(each.numel() for each in self.parameters())
            graphs.alone[kind] = weights if same and isinstance(y, Tensor) and y.shape == x.shape else None
            return y
        known = graphs.alone[kind]
        may = known is not None and known <= MOST_WEIGHTS * x.numel()
        return _alone(original, self, forward, x, rest, given) if may else plain()

    def forward(self: Any, hidden_states: Tensor, *args: Any, **options: Any) -> Any:
        own = options.pop(_ALONE, None)
        if own is None:
            return original.forward(self, hidden_states, *args, **options)
        with saving_an_input():
            return own_layer(own, hidden_states, *_parameters_of(self))

    return {"__call__": call, "forward": forward, "gradient_checkpointing": _checkpointing}


def _generators(device: torch.device) -> list[Any]:
    """The states of what layers draw numbers from."""
    own = torch.cuda.get_rng_state(device) if device.type == "cuda" else torch.empty(0)
    return [random.getstate(), torch.get_rng_state().tolist(), own.tolist()]
