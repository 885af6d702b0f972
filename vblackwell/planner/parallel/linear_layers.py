"""The layers of a model that tensor parallelism divides, as its forward calls them: linears, those that share an input as one layer.

Found by running the forward on tensors without bytes and noting what goes into every module that owns a matrix. Two layers are *joined*
if no module with other parameters (a norm, an embedding) is called between them: then what lies between works on each feature or head by
itself, and the output of the first may stay divided. So it is in blocks whose parts follow each other; operators without parameters
that mix features are not seen.
"""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass
from typing import Any

import torch
from torch import Tensor, nn


@dataclass(frozen=True)
class Layer:
    """Linears with one input (rows, in_features); together they make (rows, out_features).

    Attributes:
        name: of the first.
        parts: what each of them makes.
        joined: its input comes from the layer before, feature by feature.
        copies: matrices of that size, of which each row takes a few: experts.
        heads: numbers of heads in which its parts come to the next layer; () where these are features by themselves.
    """

    name: str
    rows: int
    in_features: int
    parts: tuple[int, ...]
    joined: bool
    copies: int = 1
    heads: tuple[int, ...] = ()

    @property
    def out_features(self) -> int:
        """Of all of them."""
        return sum(self.parts)

    @property
    def elements(self) -> int:
        """Of their matrices."""
        return self.in_features * self.out_features * self.copies


def linear_layers(model: nn.Module, forward: Callable[[], Any]) -> tuple[Layer, ...]:
    """The layers of ``model`` in the order in which ``forward`` calls them.

    Args:
        model: on meta.
        forward: runs it once on meta, as on the CPU; fused CUDA paths may pass modules by.
    """
    calls: list[tuple[str, nn.Module, Tensor | None]] = []
    handles = [
        module.register_forward_pre_hook(
            lambda module, inputs, name=name: calls.append((name, module, _floating(inputs)))
        )
        for name, module in model.named_modules()
        if any(True for _ in module.parameters(recurse=False))
    ]
    try:
        with torch.no_grad():
            forward()
    finally:
        for handle in handles:
            handle.remove()
    found: list[Layer] = []
    last: Tensor | None = None
    joined = False
    for name, module, x in calls:
        sizes, copies = ([], 1) if x is None else _made_of(module, x.shape[-1])
        if x is None or not sizes:
            last, joined = None, False
            continue
        rows = x.numel() // max(1, x.shape[-1])
        if x is last and len(sizes) == 1:
            found[-1] = Layer(found[-1].name, rows, x.shape[-1], (*found[-1].parts, sizes[0]), found[-1].joined)
            continue
        inner = x.shape[-1]
        for size in sizes:
            found.append(Layer(name, rows, inner, (size,), joined, copies))
            inner, joined = size, True
        last = x if len(sizes) == 1 else None
    return tuple(found)


def _floating(inputs: Any) -> Tensor | None:
    x = inputs[0] if inputs else None
    return x if isinstance(x, Tensor) and x.is_floating_point() and x.dim() else None


def _made_of(module: nn.Module, in_features: int) -> tuple[list[int], int]:
    """The widths that a module's matrices make of ``in_features``, one behind the other, [] where it is no product; and how many experts.

    One matrix: a linear, either way round. Stacked matrices of experts: into their inner width, and back.
    """
    matrices = [p for p in module.parameters(recurse=False) if p.dim() >= 2]
    if len(matrices) == 1 and matrices[0].dim() == 2 and in_features in matrices[0].shape:
        out, inner = matrices[0].shape  # nn.Linear's order; transformers' Conv1D has the other
        return [out if inner == in_features else inner], 1
    if len(matrices) >= 2 and all(p.dim() == 3 and in_features in p.shape[1:] for p in matrices):
        first = matrices[0].shape[1:]
        return [first[0] if first[1] == in_features else first[1], in_features], len(matrices[0])
    return [], 1
