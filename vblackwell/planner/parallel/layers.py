"""What tensor parallelism finds to divide in a model: its layers as the forward calls them, and the sizes that GPUs
should divide.

*Layers*: linears, those that share an input as one. Found by running the forward on tensors without bytes and noting
what goes into every module that owns a matrix. Two layers are *joined* if no module with other parameters (a norm, an
embedding) is called between them: then what lies between works on each feature or head separately, and the output of
the first may stay divided. Operators without parameters that mix features are not seen.

*Sizes*: heads, key heads, widths of feed-forwards, the vocabulary. A layer's features can be cut anywhere, but
attention between two layers works on whole heads, and every GPU needs the keys of its queries. So queries, keys and
values that leave a layer divided stay so only where their heads divide; if not, they are gathered, and attention is
whole on every GPU. A vocabulary that does not divide costs less: the head is then cut by its input features, or left
whole.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import dataclass, replace
from typing import Any

import torch
from torch import Tensor, nn

_HEADS = ("num_attention_heads", "num_heads", "n_heads", "n_head", "nhead")
_KEY_HEADS = ("num_key_value_heads", "kv_heads", "num_kv_heads", "n_kv_heads", "n_head_kv")
VOCABULARY = "vocabulary"


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
    """The layers of ``model``, which is on meta, in the order in which ``forward`` calls them, as on the CPU: fused
    CUDA paths may pass modules by.
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
        elif x is last and len(sizes) == 1:
            found[-1] = replace(found[-1], parts=(*found[-1].parts, sizes[0]))
        else:
            inner, rows = x.shape[-1], x.numel() // max(1, x.shape[-1])
            for size in sizes:
                found.append(Layer(name, rows, inner, (size,), joined, copies))
                inner, joined = size, True
            last = x if len(sizes) == 1 else None
    return tuple(found)


def _floating(inputs: Any) -> Tensor | None:
    x = inputs[0] if inputs else None
    return x if isinstance(x, Tensor) and x.is_floating_point() and x.dim() else None


def _made_of(module: nn.Module, in_features: int) -> tuple[list[int], int]:
    """The widths that a module's matrices make of ``in_features``, one after the other, [] where it is no product; and
    how many experts. One matrix: a linear, either way round. Stacked ones of experts: into their inner width, and back.
    """
    matrices = [p for p in module.parameters(recurse=False) if p.dim() >= 2]
    if len(matrices) == 1 and matrices[0].dim() == 2 and in_features in matrices[0].shape:
        out, inner = matrices[0].shape  # nn.Linear's order; transformers' Conv1D has the other
        return [out if inner == in_features else inner], 1
    if len(matrices) >= 2 and all(p.dim() == 3 and in_features in p.shape[1:] for p in matrices):
        first = matrices[0].shape[1:]
        return [first[0] if first[1] == in_features else first[1], in_features], len(matrices[0])
    return [], 1


# -- sizes -------------------------------------------------------------------------------------------------------------


@dataclass(frozen=True)
class Size:
    """``count`` of something that stays whole: 'attention heads', features of an 'intermediate size'."""

    name: str
    count: int

    @property
    def is_heads(self) -> bool:
        """Whether attention works on them."""
        return self.name.endswith("heads")

    def __str__(self) -> str:
        return f"{self.count:,} {self.name}" if self.is_heads else f"the {self.name} of {self.count:,}"


def with_heads(model: nn.Module, layers: Sequence[Layer]) -> tuple[tuple[Layer, ...], tuple[Size, ...]]:
    """``layers`` with the heads of those that make queries, keys and values; and all that a number of GPUs should
    divide. Heads are looked for in attention modules and the model's configuration, and may not be found.
    """
    config = getattr(model, "config", None)
    text = getattr(config, "get_text_config", lambda: config)()
    # Experts' gates and values are one matrix: the half of its width is what has to divide.
    halves = _number(text, ["moe_intermediate_size"]), _number(text, ["intermediate_size"])
    modules = dict(model.named_modules())
    found: list[Layer] = []
    sizes: dict[Size, None] = {}
    for layer, following in zip(layers, [*layers[1:], None], strict=True):
        parts = layer.name.split(".")
        names = [".".join(parts[:count]) for count in range(len(parts), 0, -1)]  # the module and those around it
        words = [layer.name, *(type(modules[name]).__name__ for name in names[1:])]
        is_attention = any("attn" in word.lower() or "attention" in word.lower() for word in words)
        if following is not None and following.joined and is_attention:
            owners = [*(modules[name] for name in names[1:]), text]
            owner = next((each for each in owners if _number(each, _HEADS)), None)
            if (heads := _number(owner, _HEADS)) is not None:
                keys = _number(owner, _KEY_HEADS) or _number(text, _KEY_HEADS)
                layer = replace(layer, heads=(heads,) if keys is None or keys == heads else (heads, keys))
                names_of = zip(("attention heads", "key heads"), layer.heads, strict=False)
                sizes |= {Size(name, count): None for name, count in names_of}
        elif following is not None and following.joined and following.in_features in layer.parts:
            wide = following.in_features
            sizes[Size("intermediate size", wide // 2 if wide % 2 == 0 and wide // 2 in halves else wide)] = None
        found.append(layer)
    if found and not found[-1].joined:
        sizes[Size(VOCABULARY, found[-1].out_features)] = None
    return tuple(found), tuple(sizes)


def _number(owner: Any, names: Sequence[str]) -> int | None:
    values = (getattr(owner, name, None) for name in names)
    return next((value for value in values if isinstance(value, int) and value > 0), None)


def undivided(sizes: Sequence[Size], num_gpus: int) -> list[Size]:
    """Those that ``num_gpus`` does not divide."""
    return [size for size in sizes if size.count % num_gpus]


def legal_degree(sizes: Sequence[Size], num_gpus: int) -> int:
    """The most GPUs, a divisor of ``num_gpus``, that divide all but the vocabulary."""
    needed = [size for size in sizes if size.name != VOCABULARY]
    return max(each for each in range(1, num_gpus + 1) if num_gpus % each == 0 and not undivided(needed, each))
