"""What tensor parallelism finds to divide in a model: its linear layers in the order of the forward, and the sizes that
the GPUs of a group should divide.

Linears that share an input are one layer. Two layers are *joined* if no module with other parameters (a norm, an
embedding) is called between them: what lies between works on each feature or head separately, and the first one's
output may stay divided. Operators without parameters that mix features are not seen. Attention works on whole heads, so
queries, keys and values stay divided only where their heads divide. A vocabulary that does not divide costs less: the
head is then cut by its input features, or left whole.
"""

from __future__ import annotations

from collections.abc import Callable, Iterable, Sequence
from dataclasses import dataclass, replace
from typing import Any

from torch import Tensor, nn

from vblackwell.trace.trace import weighted_calls

_HEADS = ("num_attention_heads", "num_heads", "n_heads", "n_head", "nhead")
_KEY_HEADS = ("num_key_value_heads", "kv_heads", "num_kv_heads", "n_kv_heads", "n_head_kv")
VOCABULARY = "vocabulary"


@dataclass(frozen=True)
class Layer:
    """Linears with one input (rows, in_features); each makes one of ``parts``. ``joined``: the input comes from the
    layer before, feature by feature. ``copies``: experts, of which each row takes a few. ``heads``: numbers of heads in
    which the parts come to the next layer; () where these are features by themselves.
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
        return sum(self.parts)

    @property
    def elements(self) -> int:
        return self.in_features * self.out_features * self.copies


def linear_layers(model: nn.Module, forward: Callable[[], Any]) -> tuple[Layer, ...]:
    """Of ``model``, which is on meta, as ``forward`` calls them on the CPU: fused CUDA paths may pass modules by."""
    modules = dict(model.named_modules())
    found: list[Layer] = []
    last: Tensor | None = None
    joined = False
    for name, inputs in weighted_calls(model, forward):
        x: Any = inputs[0] if inputs else None
        is_input = isinstance(x, Tensor) and x.is_floating_point() and x.dim() > 0
        sizes, copies = _made_of(modules[name], x.shape[-1]) if is_input else ([], 1)
        if not sizes:
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


def _made_of(module: nn.Module, in_features: int) -> tuple[list[int], int]:
    """The widths that a module's matrices make of ``in_features``, one after the other ([]: it is no product), and how
    many experts: stacked matrices lead to their inner width and back.
    """
    matrices = [p.shape for p in module.parameters(recurse=False) if p.dim() >= 2]
    if len(matrices) == 1 and len(matrices[0]) == 2 and in_features in matrices[0]:
        out, inner = matrices[0]  # nn.Linear's order; transformers' Conv1D has the other
        return [out if inner == in_features else inner], 1
    if len(matrices) >= 2 and all(len(shape) == 3 and in_features in shape[1:] for shape in matrices):
        count, out, inner = matrices[0]
        return [out if inner == in_features else inner, in_features], count
    return [], 1


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
    """``layers`` with the heads of those that make queries, keys and values, looked for in attention modules and the
    configuration; and all that a number of GPUs should divide.
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
        around = [modules[".".join(parts[:count])] for count in range(len(parts) - 1, 0, -1)]
        words = " ".join([layer.name, *(type(module).__name__ for module in around)]).lower()
        if following is not None and following.joined and ("attn" in words or "attention" in words):
            owner = next((each for each in [*around, text] if _number(each, _HEADS)), None)
            if (heads := _number(owner, _HEADS)) is not None:
                keys = _number(owner, _KEY_HEADS) or _number(text, _KEY_HEADS)
                layer = replace(layer, heads=(heads,) if keys is None or keys == heads else (heads, keys))
                names = zip(("attention heads", "key heads"), layer.heads, strict=False)
                sizes |= {Size(name, count): None for name, count in names}
        elif following is not None and following.joined and following.in_features in layer.parts:
            wide = following.in_features
            sizes[Size("intermediate size", wide // 2 if wide % 2 == 0 and wide // 2 in halves else wide)] = None
        found.append(layer)
    if found and not found[-1].joined:
        sizes[Size(VOCABULARY, found[-1].out_features)] = None
    return tuple(found), tuple(sizes)


def _number(owner: Any, names: Iterable[str]) -> int | None:
    values = (getattr(owner, name, None) for name in names)
    return next((value for value in values if isinstance(value, int) and value > 0), None)


def undivided(sizes: Iterable[Size], num_gpus: int) -> list[Size]:
    """Those that ``num_gpus`` does not divide."""
    return [size for size in sizes if size.count % num_gpus]


def legal_degree(sizes: Sequence[Size], num_gpus: int) -> int:
    """The most GPUs, a divisor of ``num_gpus``, that divide all but the vocabulary."""
    needed = [size for size in sizes if size.name != VOCABULARY]
    return max(each for each in range(1, num_gpus + 1) if num_gpus % each == 0 and not undivided(needed, each))
