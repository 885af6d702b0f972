"""Which linears of any model may be replaced by ``FusedFP4Linear``, and their replacement on the same parameters.

What is left alone, and why: the output head and whatever shares its weight (embeddings), because their error reaches the
logits directly; a weight that two modules share, because packing one of them would untie it; subclasses of ``nn.Linear``,
because their owner may read the weight without calling them, as ``nn.MultiheadAttention`` does, and those whose weight transformers'
code reads (read_weights.py); an adapter's own matrices, because
they are small and are what is trained. The matrix under an adapter (``base_layer``) is a linear like any other.
"""

from __future__ import annotations

import re
from collections import defaultdict
from typing import Any

from torch import nn

from vblackwell.errors import ConfigurationError
from vblackwell.nn.convert.read_weights import reads_weight
from vblackwell.nn.linear.fused_fp4 import FusedFP4Linear
from vblackwell.nn.linear.stored_fp4 import StoredFP4Linear
from vblackwell.numerics.packed import PackedTensor

HEAD = r"(^|\.)(lm_head|embed_out|output_projection|classifier|score|head)$"
LARGE_ELEMENTS = 1 << 20
_TRANSPOSED = "its weight is stored as (inputs, outputs), so blocks along its rows would not be blocks of a product"


def find_linears(model: nn.Module, pattern: str = "all", keep: str = HEAD) -> dict[str, str | None]:
    """Every module of ``model`` that is a linear: why it is not replaced, or None if it may be.

    Args:
        model: any module.
        pattern: 'all', 'large' (a weight of 2^20 elements and more) or a regular expression searched for in names.
        keep: regular expression for names that are never selected.

    Raises:
        ConfigurationError: an invalid expression.
    """
    wanted, kept = _compiled(pattern), _compiled(keep)
    owners: dict[int, list[str]] = defaultdict(list)
    for prefix, module in model.named_modules():
        for name, parameter in module._parameters.items():
            if parameter is not None:
                owners[id(parameter)].append(f"{prefix}.{name}" if prefix else name)
    getter: Any = getattr(model, "get_output_embeddings", None)
    head = getter() if getter is not None else None
    found: dict[str, str | None] = {}
    for name, module in model.named_modules():
        if isinstance(module, FusedFP4Linear):
            found[name] = "it is a FusedFP4Linear already"
            continue
        if not (isinstance(module, nn.Linear) or _is_transposed(module)):
            continue
        own = f"{name}.weight" if name else "weight"
        others = [other for other in owners[id(module._parameters.get("weight"))] if other != own]
        reason = None
        if module is head:
            reason = "the output head: its error reaches the logits directly"
        elif others:
            reason = f"its weight is shared with {others[0]}: packing one would untie them"
        elif kept.search(name):
            reason = "its name is among those to keep"
        else:
            reason = _own_reason(model, name, module)
        if reason is None and pattern == "large" and module.weight.numel() < LARGE_ELEMENTS:  # type: ignore[union-attr]
            reason = f"smaller than {LARGE_ELEMENTS} elements"
        elif reason is None and pattern not in ("all", "large") and not wanted.search(name):
            reason = f"its name does not match {pattern!r}"
        found[name] = reason
    return found


def _is_transposed(module: nn.Module) -> bool:
    """transformers' Conv1D, by what it is: the name is known to belong to a linear with a transposed weight."""
    return type(module).__name__ == "Conv1D" and hasattr(module, "nf") and "weight" in module._parameters


def _own_reason(model: nn.Module, name: str, module: nn.Module) -> str | None:
    if not name:
        return "it is the model itself, which cannot be replaced in place"
    if _is_transposed(module):
        return _TRANSPOSED
    if _in_adapter(model, name):
        return "an adapter's own matrix, which is trained as it is"
    if read := reads_weight(model, name):
        return read
    if type(module) is not nn.Linear:
        return (
            f"{type(module).__name__} is another class than nn.Linear: its owner may read the weight without calling it"
        )
    hooks = (module._forward_hooks, module._forward_pre_hooks, module._backward_hooks, module._backward_pre_hooks)
    if any(hooks):
        return "it has hooks, which would be lost"
    return None


def _in_adapter(model: nn.Module, name: str) -> bool:
    """Whether the module belongs to what an adapter adds around its ``base_layer``, as peft's layers have it."""
    module: Any = model
    for part in name.split("."):
        if "base_layer" in module._modules and part != "base_layer":
            return True
        module = module._modules[part]
    return False


def select_linears(model: nn.Module, pattern: str = "all", keep: str = HEAD) -> dict[str, nn.Linear]:
    """The linears of ``model`` that may be packed, by module name; arguments as for `find_linears`.

    Raises:
        ConfigurationError: an invalid expression, or nothing is selected.
    """
    found = find_linears(model, pattern, keep)
    selected: dict[str, Any] = {name: model.get_submodule(name) for name, reason in found.items() if reason is None}
    if not selected:
        by_reason = defaultdict[str | None, list[str]](list)
        for name, reason in found.items():
            by_reason[reason].append(name)
        left = [
            f"{names[0]}{f' and {len(names) - 1} more' if names[1:] else ''} ({reason})"
            for reason, names in by_reason.items()
        ]
        raise ConfigurationError(
            f"pattern {pattern!r} selects no linear layer of {type(model).__name__}: {', '.join(left) or 'it has none'}"
        )
    return selected


def convert_linears(
    model: nn.Module,
    pattern: str = "all",
    *,
    format: str = "nvfp4",
    scale_search: str | None = None,
    use_fp4: bool = True,
    w4a8: bool = False,
    keep: str = HEAD,
) -> list[str]:
    """Replaces the selected linears in place; parameters keep their identity, so an optimizer made before still fits.

    Args:
        model, pattern, keep: as for ``select_linears``.
        format, scale_search: what ``quantize()`` will pack to.
        use_fp4: train straight through the format from now on; ``False`` trains in full precision until ``quantize()``.
        w4a8: packed mxfp4 layers will multiply on FP8 tensor cores, their inputs rounded to E4M3.

    Returns:
        Names of the replaced modules.

    Raises:
        ConfigurationError: as ``select_linears``; an unknown format or search; w4a8 with another format or odd sizes. The model
            is as it was.
    """
    selected = select_linears(model, pattern, keep)
    options = {"format": format, "scale_search": scale_search, "use_fp4": use_fp4, "w4a8": w4a8}
    layers = {name: FusedFP4Linear.from_linear(linear, **options) for name, linear in selected.items()}
    for name, layer in layers.items():
        replace_module(model, name, selected[name], layer)
    return list(selected)


def store_linears(
    model: nn.Module, pattern: str = "all", keep: str | None = None, format: str = "nvfp4", *, tiled: bool = False
) -> dict[str, str | None]:
    """Put a `StoredFP4Linear`, whose bytes are on the meta device, in the place of the selected linears of ``model``.

    Returns:
        Every linear: why it was left, or None if it was replaced.

    Raises:
        ConfigurationError: an invalid expression, or nothing is selected.
    """
    found = find_linears(model, pattern, HEAD if keep is None else f"(?:{HEAD})|(?:{keep})")
    chosen = [name for name, reason in found.items() if reason is None]
    if not chosen:
        said = next((f"{name}: {reason}" for name, reason in found.items()), "it has none")
        raise ConfigurationError(f"{pattern!r} selects no linear of {type(model).__name__} ({said})")
    for name in chosen:
        linear: Any = model.get_submodule(name)
        sizes, dtype = (linear.in_features, linear.out_features), linear.weight.dtype
        stored = StoredFP4Linear(*sizes, linear.bias, format, tiled=tiled, dtype=dtype)
        replace_module(model, name, linear, stored.train(linear.training))
    return found


def install_packed(model: nn.Module, name: str, packed: PackedTensor) -> FusedFP4Linear:
    """Puts a packed weight where the linear ``name`` is (it may be on the meta device); its bias stays.

    Raises:
        ConfigurationError: there is no linear of that name, or its shape is another.
    """
    linear = linear_of(model, name, packed.shape)
    layer = FusedFP4Linear.from_packed(packed, linear.bias).train(linear.training)
    replace_module(model, name, linear, layer)
    return layer


def linear_of(model: nn.Module, name: str, shape: tuple[int, ...] | None = None) -> nn.Linear:
    """The linear ``name``, which a packed weight of this shape, or of any, may replace.

    Raises:
        ConfigurationError: there is no linear of that name, or its shape is another.
    """
    try:
        linear = model.get_submodule(name)
    except AttributeError as error:
        raise ConfigurationError(f"the model has no module {name!r}: the packed file belongs to another") from error
    if not isinstance(linear, nn.Linear) or shape not in (None, (linear.out_features, linear.in_features)):
        packed = "there is a packed weight" if shape is None else f"the packed weight has shape {shape}"
        raise ConfigurationError(f"{name} is {linear}, {packed}: the file belongs to another model")
    return linear


def replace_module(model: nn.Module, name: str, old: nn.Module, new: nn.Module) -> None:
    """Puts ``new`` wherever ``old`` is, under every name it has."""
    for path in [path for path, module in model.named_modules(remove_duplicate=False) if module is old]:
        parent, _, child = path.rpartition(".")
        setattr(model.get_submodule(parent), child, new)


def _compiled(pattern: str) -> re.Pattern[str]:
    try:
        return re.compile(pattern)
    except re.error as error:
        raise ConfigurationError(f"{pattern!r} is no regular expression: {error}") from error
