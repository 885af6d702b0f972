"""Memory with several names: refused where it can be seen, as a parameter's bytes move and a view of them does not.

Seen are parameters that overlap themselves or each other, and tensors that a module of the model keeps. What only a
closure, a numpy array or a variable of the caller holds is not.
"""

from __future__ import annotations

from collections.abc import Iterator
from typing import Any

import torch
from torch import nn

from vblackwell.errors import ConfigurationError

# Where torch.nn.utils.spectral_norm keeps the parameter that it computes an attribute from, anew at each forward.
ORIGINAL = "_orig"


def refuse_shared_memory(model: nn.Module) -> None:
    """
    Raises:
        ConfigurationError: two elements of parameters lie in one place, or a module keeps a view of a parameter.
    """
    params = {name: param for name, param in model.named_parameters() if _lies_somewhere(param)}
    for name, param in params.items():
        if any(size > 1 and stride == 0 for size, stride in zip(param.shape, param.stride(), strict=True)):
            raise ConfigurationError(
                f"elements of the parameter {name!r} share memory (shape {tuple(param.shape)}, stride "
                f"{param.stride()}): make it separate by nn.Parameter(p.detach().clone()), or keep a small parameter "
                "and expand it in forward"
            )
    known = {id(param) for param in params.values()}
    kept = [
        (name, tensor) for name, tensor in _kept_tensors(model) if id(tensor) not in known and _lies_somewhere(tensor)
    ]
    spans = sorted(
        ((*_span(tensor), name, tensor) for name, tensor in [*params.items(), *kept]), key=lambda span: span[:2]
    )
    for position, (_, end, name, tensor) in enumerate(spans):
        for start, _, other_name, other in spans[position + 1 :]:
            if start >= end:
                break
            if (name in params or other_name in params) and _meet(tensor, other):
                first, second = (name, other_name) if name in params else (other_name, name)
                if second == first + ORIGINAL or first == second + ORIGINAL:
                    continue
                raise ConfigurationError(
                    f"{second!r} shares memory with the parameter {first!r}, whose bytes move when the model is "
                    "offloaded: compute it in forward, make both names one parameter (a.weight = b.weight), or give it "
                    "a copy (.clone())"
                )


def _kept_tensors(model: nn.Module) -> Iterator[tuple[str, torch.Tensor]]:
    """Tensors that are attributes or buffers of modules, or in lists, tuples and dicts that are."""
    for prefix, module in model.named_modules():
        for name, value in {**vars(module), **module._buffers}.items():
            if name not in ("_parameters", "_modules", "_buffers"):
                for tensor in _tensors_in(value):
                    yield f"{prefix}.{name}" if prefix else name, tensor


def _tensors_in(value: Any) -> list[torch.Tensor]:
    items = list(value.values()) if isinstance(value, dict) else value if isinstance(value, (list, tuple)) else [value]
    return [item for item in items if isinstance(item, torch.Tensor)]


def _lies_somewhere(tensor: torch.Tensor) -> bool:
    return (
        tensor.layout == torch.strided and torch._C._has_storage(tensor) and not tensor.is_meta and tensor.numel() > 0
    )


def _span(tensor: torch.Tensor) -> tuple[int, int]:
    """Address of the first byte, and of the one after the last."""
    reach = sum((size - 1) * stride for size, stride in zip(tensor.shape, tensor.stride(), strict=True))
    start = tensor.data_ptr()
    return start, start + (1 + reach) * tensor.element_size()


def _meet(one: torch.Tensor, other: torch.Tensor) -> bool:
    """Whether two tensors whose spans overlap have an element in common: halves of a matrix's rows have none."""
    if one.element_size() != other.element_size():
        return True
    spans = [_span(one), _span(other)]
    first, last = min(start for start, _ in spans), max(end for _, end in spans)
    taken = torch.zeros((last - first) // one.element_size(), dtype=torch.bool)
    places = [
        taken.as_strided(tensor.shape, tensor.stride(), (start - first) // one.element_size())
        for tensor, (start, _) in zip((one, other), spans, strict=True)
    ]
    places[0].fill_(True)
    return bool(places[1].any())
