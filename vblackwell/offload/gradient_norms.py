"""Norms of gradients that have left level 0: clip by them, and choose the groups with the largest."""

from __future__ import annotations

import math
from collections.abc import Iterable
from typing import Any

import torch
from torch import nn

from vblackwell.errors import ConfigurationError
from vblackwell.offload.hooks import group_key
from vblackwell.offload.layout.groups import Slot, find_groups
from vblackwell.offload.movement.host_gradients import norm_of_norms
from vblackwell.offload.parameters import engine_and_slot
from vblackwell.offload.resident import plain_norm, restride


@torch.no_grad()
def clip_grad_norm_(model: nn.Module | Iterable[torch.Tensor], max_norm: float) -> torch.Tensor:
    """Scale the gradients of ``model`` (or of some parameters) in place to a global 2-norm of at most ``max_norm``.

    Call it between backward and `step`, instead of `torch.nn.utils.clip_grad_norm_` and instead of ``max_grad_norm``.

    Returns:
        The norm before clipping, an fp32 scalar. Not finite gradients are scaled as torch does; read the value.
    """
    params = list(model.parameters() if isinstance(model, nn.Module) else model)
    found = {param: engine_and_slot(param) for param in params}
    engines = list(dict.fromkeys(pair[0] for pair in found.values() if pair is not None))
    for engine in engines:
        engine.step_control.roll_back()
        engine.step_control.collect()
    norms: list[torch.Tensor] = []
    offloaded: dict[Any, list[Slot]] = {engine: [] for engine in engines}
    plain: list[torch.Tensor] = []
    for param, pair in found.items():
        if pair is None:
            if param.grad is not None:
                restride(param)
                plain.append(param.grad)
                norms.append(plain_norm(param))
        elif pair[0].gradients.has(pair[1]):
            offloaded[pair[0]].append(pair[1])
            norms.append(pair[0].gradients.norm(pair[1]))
    if not norms:
        return torch.zeros(())
    total = norm_of_norms(norms, engines[0].device if engines else norms[0].device)
    factor = torch.clamp(max_norm / (total + 1e-6), max=1.0)
    for gradient in plain:
        gradient.mul_(factor.to(gradient.device))
    for engine, slots in offloaded.items():
        engine.step_control.scale_gradients(slots, factor)
    return total


def select_top_k_gradients(model: nn.Module, fraction: float) -> list[Any]:
    """The layer groups with the largest gradient norm per element, as `VGPUAdamW.step(only=...)` and `prefetch` take
    them.

    Args:
        model: after a backward. Offloaded or plain.
        fraction: share of the groups that have gradients, in (0, 1]; at least one is returned.

    Returns:
        Keys such as ``'model/layers.3'`` for an offloaded model, parameters for a plain one, largest first.

    Raises:
        ConfigurationError: ``fraction`` out of range, or there are no gradients.
    """
    if not 0 < fraction <= 1:
        raise ConfigurationError(f"fraction {fraction} must be in (0, 1], e.g. 0.1 for the top tenth of the groups")
    found = [engine_and_slot(param) for param in model.parameters()]
    engines = list(dict.fromkeys(pair[0] for pair in found if pair is not None))
    ranked = [item for engine in engines for item in _rank_offloaded(engine)] if engines else _rank_plain(model)
    if not ranked:
        raise ConfigurationError("no parameter has a gradient: call backward() before selecting by gradient")
    ranked.sort(key=lambda item: -item[0])
    chosen = ranked[: max(1, math.ceil(fraction * len(ranked)))]
    return [key for _, keys in chosen for key in keys]


def _rank_offloaded(engine: Any) -> list[tuple[float, list[Any]]]:
    engine.step_control.collect()
    ranked = []
    for group in engine.groups:
        slots = [slot for slot in group.slots if engine.gradients.has(slot)]
        if slots:
            norms = [engine.gradients.norm(slot) for slot in slots]  # taken on level 0, or on the host
            density = _density(norms, sum(slot.num_elements for slot in slots), engine.device)
            ranked.append((density, [group_key(engine, group)]))
    return ranked


def _rank_plain(model: nn.Module) -> list[tuple[float, list[Any]]]:
    ranked = []
    for group in find_groups(model)[0]:
        params = [slot.param for slot in group.slots if slot.param.grad is not None]
        if params:
            gradients = [param.grad for param in params if param.grad is not None]
            norms = [torch.linalg.vector_norm(gradient, dtype=torch.float32) for gradient in gradients]
            density = _density(norms, sum(param.numel() for param in params), params[0].device)
            ranked.append((density, list(params)))
    return ranked


def _density(norms: list[torch.Tensor], num_elements: int, device: torch.device) -> float:
    """Root mean square of a group's gradient: groups of different sizes become comparable."""
    return float(norm_of_norms(norms, device)) / math.sqrt(num_elements)
