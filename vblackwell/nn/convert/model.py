"""Any model on this package's operators: linears in FP4, attention by the dispatcher, the rest fused; and back.

Experts of transformers' mixtures have their linears stacked in parameters of three dimensions, which their forward
reads. Their class becomes a subclass (as in fused_modules.py) in which ``gate_up_proj`` is a property: the parameter
rounded, its gradient straight through, all experts of a layer sharing one tensor scale.
"""

import functools
import re
from collections import Counter
from typing import Any

import torch
from torch import Tensor, nn

from vblackwell.errors import ConfigurationError
from vblackwell.nn.attention.backends import use_dispatcher, why_not_dispatcher
from vblackwell.nn.convert.causal_lm import Conversion, Row, accelerate_causal_lm, in_stack
from vblackwell.nn.convert.fused_modules import swap
from vblackwell.nn.convert.linears import LARGE_ELEMENTS, find_linears, head_and, nothing_selected, replace_modules
from vblackwell.nn.linear.fused_fp4 import FusedFP4Linear
from vblackwell.nn.linear.one_input import hooked
from vblackwell.nn.linear.packed_linear import is_transposed, turned
from vblackwell.nn.linear.rounded import fp4_round_trip

_ACTIVATIONS: dict[type, str] = {nn.ReLU: "relu", nn.SiLU: "silu", nn.GELU: "gelu"}
_EXPERTS = ("gate_up_proj", "down_proj")


def convert(
    model: nn.Module,
    *,
    fp4_layers: str | None = "all",
    keep: str | None = None,
    format: str = "nvfp4",
    scale_search: str | None = None,
    pack: bool = False,
    attention: str | None = "auto",
    fused: bool = True,
    loss: bool = False,
) -> Conversion:
    """Replace what provably computes the same, or, for FP4, what was asked for, in place.

    Args:
        fp4_layers: which linears become `FusedFP4Linear`: 'all', 'large' (2^20 elements and more), a regular expression
            searched for in names, or None for none. The output head and tied weights never do. Experts of transformers'
            mixtures follow the same names.
        keep: regular expression for names that stay in addition.
        format, scale_search: of FP4, as for `FusedFP4Linear`.
        pack: pack the linears at once and freeze them, the base of adapters, experts excepted; otherwise they train
            straight through the format.
        attention: backend of the dispatcher for transformers' models, 'auto' for its choice, None to leave it alone.
        fused: norms, gated feed-forwards, experts' gates and rotary positions on the fused operators, and activations
            after linears in the linears' epilogues.
        loss: the causal loss in chunks of tokens, too (`accelerate_causal_lm`).

    Raises ConfigurationError, the model as it was, for an invalid expression, an unknown format or backend, weights
    that cannot be packed, nothing of what FP4 was asked for, or a model that is in a stack or accelerated already.
    """
    if in_stack(model):
        raise ConfigurationError(f"{type(model).__name__} is in a stack: convert it first, or release(model)")
    done = accelerate_causal_lm(model, modules=fused, loss=loss) if fused or loss else Conversion(model)
    try:
        known = {row.name for row in done.rows}
        for name, module in model.named_modules() if fused else ():
            if isinstance(module, (nn.LayerNorm, nn.GroupNorm)) and name not in known:
                why = f"{type(module).__name__}: torch's own is one kernel already"
                done.rows.append(Row("norm", name, None, why))
        if fp4_layers is not None:
            options = {"format": format, "scale_search": scale_search, "use_fp4": not pack}
            _linears(done, fp4_layers, keep, options, pack, fused)
            _experts(done, fp4_layers, keep, format, pack)
            rows = [row for row in done.rows if row.kind in ("linear", "experts")]
            if not any(row.became for row in rows):
                raise nothing_selected(model, fp4_layers, {row.name: row.reason for row in rows})
        if attention is not None:
            _attention(done, attention)
    except BaseException:
        done.undo()
        raise
    return done


def _linears(
    done: Conversion, pattern: str, keep: str | None, options: dict[str, Any], pack: bool, epilogues: bool
) -> None:
    model = done.model
    found = find_linears(model, pattern, head_and(keep), transposed=True)
    following = _following_activations(model) if epilogues else {}
    replacements: dict[nn.Module, nn.Module] = {}
    for name, reason in found.items():
        if reason is not None:
            done.rows.append(Row("linear", name, None, reason))
            continue
        linear: Any = model.get_submodule(name)
        transposed = is_transposed(linear)
        if transposed and not pack:
            done._undo.append(functools.partial(object.__setattr__, linear, "__class__", type(linear)))
            swap(linear, {"weight": _rounded_transposed(options["format"])})  # type: ignore[dict-item]
            done.rows.append(Row("linear", name, f"Conv1D, {options['format']}, straight through"))
            continue
        place, activation = following.get(name, ("", None))
        kind = _ACTIVATIONS[type(activation)] if activation is not None else "none"
        trained = [parameter is not None and parameter.requires_grad for parameter in (linear.weight, linear.bias)]
        layer = FusedFP4Linear.from_linear(_as_linear(linear), activation=kind, **options)
        if pack:
            layer.freeze()
        replacements[linear] = layer
        linear._parameters.update(weight=None, bias=None)  # or a packed layer's original would live on in here
        done._undo.append(functools.partial(_give_back, model, linear, layer, *trained))
        state = "packed" if pack else "straight through"
        done.rows.append(Row("linear", name, f"FusedFP4Linear, {options['format']}, {state}"))
        if activation is not None:
            replacements[activation] = identity = nn.Identity()
            done._undo.append(functools.partial(replace_modules, model, {identity: activation}))
            done.rows.append(Row("activation", place, f"in the epilogue of {name}"))
    if epilogues and replacements:
        fused = {row.name for row in done.rows if row.kind == "feed_forward" and row.became}
        for name, module in model.named_modules():
            if type(module) in _ACTIVATIONS and module not in replacements and name.rpartition(".")[0] not in fused:
                why = "not right after a replaced linear of an nn.Sequential, so nothing proves whose output it takes"
                done.rows.append(Row("activation", name, None, why))
    replace_modules(model, replacements)


@torch.no_grad()
def _as_linear(linear: Any) -> Any:
    """An ``nn.Linear`` that computes what a `Conv1D` does, on its bias and a copy of its weight; others as they are."""
    if not is_transposed(linear):
        return linear
    made = nn.Linear(linear.weight.shape[0], linear.nf, device="meta").train(linear.training)
    made.weight, made.bias = nn.Parameter(turned(linear.weight, True)), linear.bias
    return made


def _following_activations(model: nn.Module) -> dict[str, tuple[str, nn.Module]]:
    counts = Counter(id(module) for _, module in model.named_modules(remove_duplicate=False))
    found: dict[str, tuple[str, nn.Module]] = {}
    for prefix, sequence in model.named_modules():
        if type(sequence) is not nn.Sequential:
            continue
        children = [(f"{prefix}.{key}" if prefix else key, child) for key, child in sequence._modules.items()]
        for (first, linear), (second, activation) in zip(children, children[1:], strict=False):
            exact = type(activation) in _ACTIVATIONS and getattr(activation, "approximate", "none") == "none"
            once = counts[id(linear)] == 1 == counts[id(activation)]
            if exact and once and not hooked(activation) and not getattr(activation, "inplace", False):
                found[first] = (second, activation)
    return found


@torch.no_grad()
def _give_back(model: nn.Module, linear: nn.Linear, layer: FusedFP4Linear, trained: bool, bias_trained: bool) -> None:
    packed, weight, bias = layer.packed, layer.weight, layer.bias
    if weight is None:
        assert packed is not None
        weight = nn.Parameter(turned(packed.dequantize(), "nf" in vars(linear)), requires_grad=trained)
        if bias is not None:
            bias.requires_grad_(bias_trained)
    linear._parameters.update(weight=weight, bias=bias)
    linear.train(layer.training)
    replace_modules(model, {layer: linear})


def _experts(done: Conversion, pattern: str, keep: str | None, format: str, pack: bool) -> None:
    for name, module in done.model.named_modules():
        held: list[Any] = [module._parameters.get(each) for each in _EXPERTS]
        if any(parameter is None or parameter.dim() != 3 for parameter in held):  # (E, outputs, inputs), or the reverse
            continue
        elements = max(parameter.numel() for parameter in held)
        wanted = pattern == "all" or (elements >= LARGE_ELEMENTS if pattern == "large" else re.search(pattern, name))
        transposed = getattr(module, "is_transposed", False)
        eager = getattr(getattr(module, "config", None), "_experts_implementation", None) in (None, "eager")
        reasons = {
            "its name is among those to keep": keep is not None and re.search(keep, name),
            f"its name does not match {pattern!r}": not wanted,
            "experts are stacked in one parameter, which has no packed form": pack,
            "its experts are stored as (inputs, outputs): their rows have no blocks of a product": transposed,
            "its loop reads the parameter once an expert, and each reading would round all: use 'grouped_mm'": eager,
        }
        if reason := next((reason for reason, holds in reasons.items() if holds), None):
            done.rows.append(Row("experts", name, None, reason))
            continue
        done._undo.append(functools.partial(object.__setattr__, module, "__class__", type(module)))
        swap(module, {each: _rounded(each, format) for each in _EXPERTS})  # type: ignore[arg-type]
        done.rows.append(Row("experts", name, f"rounded to {format} where they are read, straight through"))


@functools.cache
def _rounded(name: str, format: str) -> property:
    def read(self: nn.Module) -> Tensor:
        w_ENK: Any = self._parameters[name]
        return fp4_round_trip(w_ENK.flatten(0, 1), format, w_ENK.dtype).view(w_ENK.shape)

    return property(read)


@functools.cache
def _rounded_transposed(format: str) -> property:
    """The weight (K, N) of a `Conv1D`, rounded in blocks of the (N, K) that it is the transpose of."""

    def read(self: nn.Module) -> Tensor:
        w_KN: Any = self._parameters["weight"]
        return fp4_round_trip(w_KN.t(), format, w_KN.dtype).t()

    return property(read)


def _attention(done: Conversion, backend: str) -> None:
    if (reason := why_not_dispatcher(done.model)) is None:
        done._undo.append(use_dispatcher(done.model, backend))
    done.rows.append(Row("attention", "", None if reason else f"the dispatcher ({backend})", reason or ""))
    for name, module in done.model.named_modules():
        if isinstance(module, nn.MultiheadAttention):
            why = "its calls return weights and take other masks: from_multihead_attention makes a FlashAttention of it"
            done.rows.append(Row("attention", name, None, why))
