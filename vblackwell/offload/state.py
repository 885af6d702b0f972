"""Weights and AdamW states in and out, one parameter at a time, whatever the placement.

A checkpoint knows nothing of stacks: by name it holds fp32 weights (masters where there are any), ``exp_avg``,
``exp_avg_sq`` and ``step``, as `torch.optim.AdamW` has them. So what one stack wrote, any other stack, or a plain
module, reads. Stated formats (8-bit moments, weights without masters) are widened on the way out and found again on the
way in (`moments`).
"""

from __future__ import annotations

from collections.abc import Callable, Iterator

import torch
from torch import nn

from vblackwell.errors import ConfigurationError
from vblackwell.offload.engine import Offload, offload_of
from vblackwell.offload.layout.groups import MOMENTS, Group, Slot
from vblackwell.offload.resident import plain_state, truth_of, updates_here, write_param, write_state
from vblackwell.offload.storage.masters import (
    close_weights,
    moment_parts,
    open_weights,
    read_moments,
    read_truth,
    write_moments,
    write_truth,
)

ParameterState = dict[str, torch.Tensor]


def export_state(
    model: nn.Module, optimizer: torch.optim.Optimizer | None = None, *, only: Callable[[str], bool] | None = None
) -> Iterator[tuple[str, ParameterState]]:
    """``(name, {'weight', and if stepped 'exp_avg', 'exp_avg_sq', 'step'})`` of each parameter, on the CPU, one by one.

    Pending updates are finished first. ``weight`` is fp32 wherever it is updated so, else in the parameter's type.
    Shared parameters come once, under their first name. ``only``: of the parameters that it holds for by name; no
    others are read.
    """
    wanted = only or (lambda name: True)
    engine = offload_of(model)
    if isinstance(engine, Offload):
        engine.finish()
        for group in engine.groups:
            if any(wanted(slot.name) for slot in group.slots):
                yield from (entry for entry in _export_group(engine, group) if wanted(entry[0]))
        return
    for name, param in model.named_parameters():
        if not wanted(name):
            continue
        state: ParameterState = {"weight": truth_of(param).to("cpu", copy=True)}
        held = plain_state(param, optimizer.state.get(param, {})) if optimizer is not None else {}
        state.update({key: held[key].detach().to("cpu", copy=True) for key in (*MOMENTS, "step") if key in held})
        yield name, state


def import_state(
    model: nn.Module,
    optimizer: torch.optim.Optimizer | None,
    read: Callable[[str], ParameterState],
    *,
    only: Callable[[str], bool] | None = None,
) -> None:
    """The reverse of `export_state`: ``read(name)`` gives a parameter's tensors; without an optimizer no states.

    With ``only``, parameters that it does not hold for stay as they are.

    Raises:
        ConfigurationError: a tensor is missing or has another shape; what was read before it is already in place.
    """
    wanted = only or (lambda name: True)
    engine = offload_of(model)
    if isinstance(engine, Offload):
        engine.finish()
        engine.weights.drop_all()
        for group in engine.groups:
            if not any(wanted(slot.name) for slot in group.slots):
                continue
            engine.before_overwrite(group)
            _import_group(engine, group, read, wanted, with_states=optimizer is not None)
        return
    for name, param in model.named_parameters():
        if not wanted(name):
            continue
        state = _checked(name, param.shape, read(name))
        write_param(param, state["weight"])
        if optimizer is not None and "step" in state:
            _import_plain_state(optimizer, param, state)


def _import_plain_state(optimizer: torch.optim.Optimizer, param: torch.Tensor, state: ParameterState) -> None:
    held = optimizer.state[param]
    if held and updates_here(param):
        write_state(param, held, state)
        return
    for key in MOMENTS:
        if key in held:
            held[key].copy_(state[key])
        else:
            held[key] = torch.empty_like(param, dtype=torch.float32, memory_format=torch.preserve_format).copy_(
                state[key]
            )
    held["step"] = state["step"].to(param.device, torch.float32, copy=True)  # where torch's fused AdamW wants it


def read_slot_states(engine: Offload, group: Group) -> Iterator[tuple[Slot, ParameterState]]:
    """Moments and step count of each stepped parameter of ``group``, cloned. The engine must be finished."""
    if not _has_moments(engine, group):
        return
    opened = {kind: engine.storage.open(group, kind) for kind in group.formats.moments}
    for slot in group.slots:
        step = engine.step_control.steps.get(slot)
        if step is not None:
            yield slot, {**read_moments(slot, moment_parts(slot, opened)), "step": step.clone()}
    for kind, flat in opened.items():
        engine.storage.close_range(group, kind, flat, store=False)


def write_slot_states(engine: Offload, group: Group, states: dict[Slot, ParameterState]) -> None:
    """The reverse of `read_slot_states`; parameters that are not in ``states`` count as never stepped."""
    if not _has_moments(engine, group):
        return
    opened = {kind: engine.storage.open(group, kind, load=False).zero_() for kind in group.formats.moments}
    for slot, state in states.items():
        write_moments(slot, moment_parts(slot, opened), state)
    for kind, flat in opened.items():
        engine.storage.close_range(group, kind, flat, store=True)
    for slot in group.slots:
        engine.step_control.steps.pop(slot, None)
        if slot in states:
            engine.step_control.steps[slot] = states[slot]["step"].to("cpu", torch.float32, copy=True)


def _has_moments(engine: Offload, group: Group) -> bool:
    return (group, group.formats.moments[0]) in engine.storage


def _export_group(engine: Offload, group: Group) -> Iterator[tuple[str, ParameterState]]:
    states = dict(read_slot_states(engine, group))
    opened = open_weights(engine.storage, group)
    for slot in group.slots:
        weight = read_truth(slot, opened)
        yield slot.name, {"weight": weight.clone(memory_format=torch.preserve_format), **states.pop(slot, {})}
    close_weights(engine.storage, group, opened, store=False)


def _import_group(
    engine: Offload, group: Group, read: Callable[[str], ParameterState], wanted: Callable[[str], bool], *,
    with_states: bool,
) -> None:  # fmt: skip
    found = {slot: _checked(slot.name, slot.shape, read(slot.name)) for slot in group.slots if wanted(slot.name)}
    opened = open_weights(engine.storage, group, load=len(found) < len(group.slots))
    for slot, state in found.items():
        write_truth(slot, state["weight"], opened)
    close_weights(engine.storage, group, opened, store=True)
    if with_states:
        write_slot_states(engine, group, {slot: state for slot, state in found.items() if "step" in state})


def _checked(name: str, shape: torch.Size, state: ParameterState) -> ParameterState:
    if "weight" not in state:
        raise ConfigurationError(f"the checkpoint has no weight for {name!r}: it was written by another model")
    for key, value in state.items():
        if key != "step" and value.shape != shape:
            raise ConfigurationError(
                f"{key} of {name!r} has shape {tuple(value.shape)} in the checkpoint, {tuple(shape)} here"
            )
    return state
