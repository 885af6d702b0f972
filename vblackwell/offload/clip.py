"""`clip_grad_norm_` for gradients that have left: torch's function for offloaded and plain parameters alike."""

from __future__ import annotations

from collections.abc import Iterable

import torch
from torch import nn

from vblackwell.offload.layout.groups import Group, Slot
from vblackwell.offload.movement.norms import norm_of_norms
from vblackwell.offload.parameters import engine_and_slot
from vblackwell.offload.resident import plain_norm, restride


@torch.no_grad()
def clip_grad_norm_(model: nn.Module | Iterable[torch.Tensor], max_norm: float) -> torch.Tensor:
    """Scale the gradients of ``model`` (or of some parameters) in place to a global 2-norm of at most ``max_norm``.

    Call it between backward and `step`, instead of `torch.nn.utils.clip_grad_norm_` and instead of ``max_grad_norm``.

    Returns:
        The norm before clipping, an fp32 scalar. Not finite gradients are scaled as torch does; look at the value.
    """
    params = list(model.parameters() if isinstance(model, nn.Module) else model)
    found = {param: engine_and_slot(param) for param in params}
    engines = list(dict.fromkeys(pair[0] for pair in found.values() if pair is not None))
    for engine in engines:
        engine.step_control.rollback()
        engine.step_control.collect()
    norms: list[torch.Tensor] = []
    offloaded: dict[tuple[object, Group], list[Slot]] = {}
    plain: list[torch.Tensor] = []
    for param, pair in found.items():
        if pair is None:
            if param.grad is not None:
                restride(param)
                plain.append(param.grad)
                norms.append(plain_norm(param))
        elif pair[0].gradients.has(pair[1]):
            offloaded.setdefault((pair[0], pair[1].group), []).append(pair[1])
            norms.append(pair[0].gradients.norm(pair[1]))
    if not norms:
        return torch.zeros(())
    total = norm_of_norms(norms, engines[0].device if engines else norms[0].device)
    factor = torch.clamp(max_norm / (total + 1e-6), max=1.0)
    for gradient in plain:
        gradient.mul_(factor.to(gradient.device))
    for (engine, group), slots in offloaded.items():
        engine.gradients.scale_later(group, slots, factor.cpu())  # type: ignore[attr-defined]
    return total
