"""Weights and AdamW states in and out, one parameter at a time, whatever the placement.

By name there are fp32 weights, ``exp_avg``, ``exp_avg_sq`` and ``step``, as `torch.optim.AdamW` has them: what one
stack wrote, any other stack, or a plain module, reads. Stated formats are widened on the way out and found again
(`masters`).
"""

from collections.abc import Callable, Iterator

import torch
from torch import nn

from vblackwell.errors import ConfigurationError
from vblackwell.offload.engine import Offload, offload_of
from vblackwell.offload.layout.groups import MOMENTS, Group, Slot
from vblackwell.offload.resident import plain_state, truth_of, write_param, write_state
from vblackwell.offload.storage import masters

ParameterState = dict[str, torch.Tensor]


def export_state(
    model: nn.Module, optimizer: torch.optim.Optimizer | None = None, *, only: Callable[[str], bool] | None = None
) -> Iterator[tuple[str, ParameterState]]:
    """``(name, {'weight', and if stepped 'exp_avg', 'exp_avg_sq', 'step'})`` of each parameter, on the CPU, one by one.

    Pending updates are finished first. ``weight`` is fp32 wherever it is updated so, else in the parameter's type.
    Shared parameters come once, under their first name; those that ``only`` does not hold for are not read.
    """
    wanted = only or (lambda name: True)
    engine = offload_of(model)
    if isinstance(engine, Offload):
        engine.finish()
        for group in engine.groups:
            slots = [slot for slot in group.slots if wanted(slot.name)]
            if slots:
                states, opened = dict(read_slot_states(engine, group)), masters.open_weights(engine.storage, group)
                for slot in slots:
                    weight = masters.read_truth(slot, opened).clone(memory_format=torch.preserve_format)
                    yield slot.name, {"weight": weight, **states.pop(slot, {})}
        return
    for name, param in model.named_parameters():
        if wanted(name):
            held = {"weight": truth_of(param)}
            if optimizer is not None:
                held |= plain_state(param, optimizer.state.get(param, {}))
            kept = [key for key in ("weight", *MOMENTS, "step") if key in held]
            yield name, {key: held[key].detach().to("cpu", copy=True) for key in kept}


def import_state(
    model: nn.Module,
    optimizer: torch.optim.Optimizer | None,
    read: Callable[[str], ParameterState],
    *,
    only: Callable[[str], bool] | None = None,
) -> None:
    """The reverse of `export_state`: ``read(name)`` gives a parameter's tensors; without an optimizer no states.

    Parameters that ``only`` does not hold for stay. ConfigurationError: a tensor is missing or has another shape; what
    was read before it is already in place.
    """
    wanted = only or (lambda name: True)
    engine = offload_of(model)
    if isinstance(engine, Offload):
        engine.finish()
        engine.weights.drop_all()
        for group in engine.groups:
            slots = [slot for slot in group.slots if wanted(slot.name)]
            if slots:
                engine.before_overwrite(group)
                found = {slot: _checked(slot.name, slot.shape, read(slot.name)) for slot in slots}
                opened = masters.open_weights(engine.storage, group, load=len(slots) < len(group.slots))
                for slot, state in found.items():
                    masters.write_truth(slot, state["weight"], opened)
                masters.store_weights(engine.storage, group, opened)
                if optimizer is not None:
                    write_slot_states(engine, group, {slot: state for slot, state in found.items() if "step" in state})
        return
    for name, param in model.named_parameters():
        if wanted(name):
            state = _checked(name, param.shape, read(name))
            write_param(param, state["weight"])
            if optimizer is not None and "step" in state:
                write_state(param, optimizer.state[param], state)


def read_slot_states(engine: Offload, group: Group) -> Iterator[tuple[Slot, ParameterState]]:
    """Moments and step count of each stepped parameter of ``group``, copied. The engine must be finished."""
    kinds, steps = group.formats.moments, engine.step_control.steps
    if (group, kinds[0]) in engine.storage:
        opened = {kind: engine.storage.open(group, kind) for kind in kinds}
        for slot in group.slots:
            if slot in steps:
                moments = masters.read_moments(slot, masters.moment_parts(slot, opened))
                yield slot, {**moments, "step": torch.tensor(steps[slot], dtype=torch.float32, device="cpu")}


def write_slot_states(engine: Offload, group: Group, states: dict[Slot, ParameterState]) -> None:
    """The reverse of `read_slot_states`; parameters that are not in ``states`` count as never stepped."""
    kinds, steps = group.formats.moments, engine.step_control.steps
    if (group, kinds[0]) not in engine.storage:
        return
    opened = {kind: engine.storage.open(group, kind, load=False).zero_() for kind in kinds}
    for slot, state in states.items():
        masters.write_moments(slot, masters.moment_parts(slot, opened), state)
    for kind, flat in opened.items():
        engine.storage.store(group, kind, flat)
    for slot in group.slots:
        steps.pop(slot, None)
        if slot in states:
            steps[slot] = int(states[slot]["step"])


def _checked(name: str, shape: torch.Size, state: ParameterState) -> ParameterState:
    if "weight" not in state:
        raise ConfigurationError(f"the checkpoint has no weight for {name!r}: it was written by another model")
    for key, value in state.items():
        if key != "step" and value.shape != shape:
            found, wanted = tuple(value.shape), tuple(shape)
            raise ConfigurationError(f"{key} of {name!r} has shape {found} in the checkpoint, {wanted} here")
    return state
