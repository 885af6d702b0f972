"""How far two models are apart on one input, by layer too, and what each takes for it. Each runs on its own
activations: a layer's figure holds what went wrong before it, and the first that falls is the one to look at.
"""

import dataclasses
from collections.abc import Mapping, Sequence
from contextlib import ExitStack
from dataclasses import dataclass, field
from functools import partial
from typing import Any

import torch
from torch import Tensor, nn

from vblackwell.errors import ConfigurationError
from vblackwell.nn.convert.assignment import evaluating
from vblackwell.numerics.sqnr import decibels, noise_and_signal
from vblackwell.tools.cost import Measured, measure


@dataclass(frozen=True)
class Comparison:
    """Differences of ``b`` from ``a``: ``absolute``, the largest |a - b|; ``relative``, |a - b| over |a| in the
    Euclidean norm; ``sqnr_db``, the same in decibels, inf where nothing differs; ``rms``, the root of the mean of (a -
    b)^2; of ``layers`` by module name in order of execution, where asked for; and what each model took, where repeats
    were asked for.
    """

    absolute: float
    relative: float
    sqnr_db: float
    layers: dict[str, "Comparison"] = field(default_factory=dict)
    rms: float = 0.0
    a: Measured | None = None
    b: Measured | None = None


def compare(model_a: nn.Module, model_b: nn.Module, x: Any, per_layer: bool = False, repeats: int = 5) -> Comparison:
    """Runs both on ``x`` (a tensor, a tuple of positional or a mapping of keyword arguments; eval mode, no gradients)
    and compares what comes out, of equally named modules too if ``per_layer``, and what it took in ``repeats`` timed
    passes after three others; 0: times and bytes are not measured. Raises ConfigurationError: outputs that are no
    tensors or of different shapes, or no layer of the same name.
    """
    outputs: list[dict[str, Tensor]] = []
    for model in (model_a, model_b):
        seen: dict[str, Tensor] = {}  # outputs by module name
        with evaluating(model), ExitStack() as hooks:
            for name, module in model.named_modules() if per_layer else ():
                if name:
                    hooks.callback(module.register_forward_hook(partial(_record, seen, name)).remove)
            result = _first_tensor(_call(model, x))
        if result is None:
            raise ConfigurationError(f"{type(model).__name__} returned no tensor to compare")
        outputs.append(seen | {"": result})
    a, b = outputs
    layers = {name: difference(a[name], b[name]) for name in a if name and name in b and a[name].shape == b[name].shape}
    if per_layer and not layers:
        raise ConfigurationError("the two models have no layer of the same name and output shape to compare")
    apart = dataclasses.replace(difference(a[""], b[""]), layers=layers)
    devices = [a[""].device, b[""].device]
    del outputs, seen, result, a, b  # what is measured now does without their bytes
    if not repeats:
        return apart
    costs = []
    for model, device in zip((model_a, model_b), devices, strict=True):
        with evaluating(model):
            costs.append(measure(partial(_call, model, x), device, repeats, holder=model))
    return dataclasses.replace(apart, a=costs[0], b=costs[1])


def difference(a: Tensor, b: Tensor) -> Comparison:
    """How far ``b`` is from ``a``. Raises ConfigurationError: the shapes differ."""
    noise, signal = noise_and_signal(a, b)
    absolute = float((a.double() - b.to(a.device).double()).abs().max()) if a.numel() else 0.0
    relative = (noise / signal) ** 0.5 if signal else (0.0 if noise == 0 else float("inf"))
    return Comparison(absolute, relative, decibels(noise, signal), rms=(noise / max(a.numel(), 1)) ** 0.5)


def _call(model: nn.Module, x: Any) -> Any:
    with torch.no_grad():
        if isinstance(x, Mapping):
            return model(**x)
        return model(*x) if isinstance(x, tuple) else model(x)


def _record(seen: dict[str, Tensor], name: str, module: nn.Module, inputs: Any, output: Any) -> None:
    tensor = _first_tensor(output)
    if tensor is not None:
        seen[name] = tensor.detach().clone()


def _first_tensor(output: Any) -> Tensor | None:
    """The tensor of an output, of a tuple's first element, or of the logits of a ``transformers`` output."""
    if isinstance(output, Tensor):
        return output
    if isinstance(output, Mapping):
        output = list(output.values())
    if isinstance(output, Sequence):
        return next((item for item in output if isinstance(item, Tensor)), None)
    return None
