"""Replaces linears of any model by ``FusedFP4Linear``, on the same parameters.

What is left alone, and why: the output head and whatever shares its weight (embeddings), because their error reaches the
logits directly; a weight that two modules share, because packing one of them would untie it; subclasses of ``nn.Linear``,
because their owner may read the weight without calling them, as ``nn.MultiheadAttention`` does.
"""

from __future__ import annotations

import re
from collections import Counter
from typing import Any

from torch import nn

from vblackwell.errors import ConfigurationError
from vblackwell.nn.linear import FusedFP4Linear
from vblackwell.numerics.packed import PackedTensor

HEAD = r"(^|\.)(lm_head|embed_out|output_projection|classifier|score|head)$"
LARGE_ELEMENTS = 1 << 20


def select_linears(model: nn.Module, pattern: str = "all", keep: str = HEAD) -> dict[str, nn.Linear]:
    """The linears of ``model`` that may be packed, by module name.

    Args:
        model: any module.
        pattern: 'all', 'large' (a weight of 2^20 elements and more) or a regular expression searched for in names.
        keep: regular expression for names that are never selected.

    Raises:
        ConfigurationError: an invalid expression, or nothing is selected.
    """
    wanted, kept = _compiled(pattern), _compiled(keep)
    owners = Counter(id(module._parameters["weight"]) for module in model.modules() if "weight" in module._parameters)
    getter: Any = getattr(model, "get_output_embeddings", None)
    head = getter() if getter is not None else None
    selected = {
        name: module
        for name, module in model.named_modules()
        if type(module) is nn.Linear
        and module is not head
        and owners[id(module.weight)] == 1
        and not kept.search(name)
        and (
            pattern == "all" or (module.weight.numel() >= LARGE_ELEMENTS if pattern == "large" else wanted.search(name))
        )
    }
    if not selected:
        seen = [name for name, module in model.named_modules() if type(module) is nn.Linear][:3]
        raise ConfigurationError(
            f"pattern {pattern!r} selects no linear layer of {type(model).__name__} (heads and tied weights are kept); "
            f"its linears: {', '.join(seen) or 'none of class nn.Linear'}"
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
        _replace(model, name, selected[name], layer)
    return list(selected)


def install_packed(model: nn.Module, name: str, packed: PackedTensor) -> FusedFP4Linear:
    """Puts a packed weight where the linear ``name`` is (it may be on the meta device); its bias stays.

    Raises:
        ConfigurationError: there is no linear of that name, or its shape is another.
    """
    try:
        linear = model.get_submodule(name)
    except AttributeError as error:
        raise ConfigurationError(f"the model has no module {name!r}: the packed file belongs to another") from error
    if not isinstance(linear, nn.Linear) or packed.shape != (linear.out_features, linear.in_features):
        raise ConfigurationError(
            f"{name} is {linear}, the packed weight has shape {packed.shape}: the file belongs to another model"
        )
    layer = FusedFP4Linear.from_packed(packed, linear.bias).train(linear.training)
    _replace(model, name, linear, layer)
    return layer


def _replace(model: nn.Module, name: str, old: nn.Module, new: nn.Module) -> None:
    """Puts ``new`` wherever ``old`` is, under every name it has."""
    for path in [path for path, module in model.named_modules(remove_duplicate=False) if module is old]:
        parent, _, child = path.rpartition(".")
        setattr(model.get_submodule(parent), child, new)


def _compiled(pattern: str) -> re.Pattern[str]:
    try:
        return re.compile(pattern)
    except re.error as error:
        raise ConfigurationError(f"{pattern!r} is no regular expression: {error}") from error
