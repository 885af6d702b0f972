"""Linears whose owners read the weight instead of calling them, so that a packed form cannot take their place.

Two kinds of reading, and two ways to see them. A forward that multiplies by ``self.dt_proj.weight`` (Mamba) cannot be run on a model
without values, so the source of transformers' module is searched. transformers' ``_init_weights`` can: it runs when a packed folder is
opened there, for modules that lack a weight, and fails where it reaches into a module for a linear's weight (GPT-BigCode's ``c_proj``).
"""

from __future__ import annotations

import functools
import re
import sys
from collections.abc import Collection
from pathlib import Path
from typing import Any

import torch
from torch import nn

# Bloom reads it to repeat what several GPUs once summed, GPT-J and GPT-Neo for the type that flash attention gets of fp32: not otherwise.
_ASIDE = ("modeling_bloom", "modeling_gptj", "modeling_gpt_neo")
_INIT = re.compile(r"^    def _init_weights\(.*?(?=^    def |^\S|\Z)", re.MULTILINE | re.DOTALL)


def reads_weight(model: nn.Module, name: str) -> str | None:
    """Where the code of transformers that owns the linear ``name`` reads its weight; None if it only calls it."""
    path, _, leaf = name.rpartition(".")
    for owner in {type(model), type(model.get_submodule(path))}:
        file = owner.__module__.rpartition(".")[2]
        if not owner.__module__.startswith("transformers.models.") or file in _ASIDE:
            continue
        if leaf in _leaves_read(owner.__module__):
            return f"{file} reads its weight without calling it"
    return None


@functools.cache
def _leaves_read(module: str) -> frozenset[str]:
    file = sys.modules[module].__file__
    source = _INIT.sub("", Path(file or "").read_text(encoding="utf-8"))
    return frozenset(re.findall(r"\.(\w+)\.weight\b(?!_)", source))


def needed_to_initialize(model: Any, names: Collection[str]) -> list[str]:
    """Those of the linears ``names`` whose weight transformers' ``_init_weights`` reads of their owner.

    Args:
        model: one of transformers', its parameters on the meta device; any other needs none.
    """
    if not hasattr(model, "_init_weights"):
        return []
    linears = {name: model.get_submodule(name) for name in names}
    needed, asked = list[str](), list[nn.Module]()
    kinds: dict[nn.Module, tuple[type, Any]] = {}

    class Weightless(nn.Linear):
        def __getattr__(self, name: str) -> Any:
            if name == "weight":
                asked.append(self)
            return super().__getattr__(name)

    for linear in linears.values():
        kinds[linear] = (type(linear), linear._parameters.pop("weight"))
        linear.__class__ = Weightless

    def give_back(linear: nn.Module) -> None:
        kind, weight = kinds.pop(linear)
        linear.__class__, linear._parameters["weight"] = kind, weight

    try:
        with torch.no_grad(), torch.random.fork_rng(devices=[]):
            for module, initialize in _initialized(model, model._init_weights):
                while True:
                    try:
                        initialize(module)
                    except AttributeError:
                        if not asked or asked[-1] not in kinds:
                            raise
                        give_back(asked[-1])
                        needed += [name for name, linear in linears.items() if linear is asked[-1]]
                        continue
                    break
    finally:
        for linear in list(kinds):
            give_back(linear)
    return needed


def _initialized(module: Any, initialize: Any) -> Any:
    """Modules, each with what initializes it: that of the nearest model of transformers around it."""
    for child in module.children():
        yield from _initialized(child, getattr(child, "_init_weights", initialize))
    yield module, initialize
