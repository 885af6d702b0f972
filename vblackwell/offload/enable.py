"""`enable_vgpu_stack_optimization`, `release`, `offload_of`: a model goes into a stack and comes out again.

Two placements. *resident*: weights, gradients and states all fit level 0, and the model stays a plain module whose
parameters merely live in level 0's extents: no hooks, no cost. *streamed*: the lower levels hold the model, and level 0
what is in use. The choice is arithmetic (`bytes_when_resident`) and can be forced.
"""

from __future__ import annotations

import weakref
from collections.abc import Callable, Iterable
from typing import Any

import torch
from torch import nn

from vblackwell.errors import ConfigurationError, InsufficientMemory, KeyClash
from vblackwell.memory.stack import VGPUStack
from vblackwell.offload.activations import ActivationStore
from vblackwell.offload.engine import Offload, drop_idle_weights
from vblackwell.offload.formats import EXACT, Formats, range_bytes
from vblackwell.offload.groups import Group, Site, Slot, compute_dtype_of, find_groups, moment_ranges
from vblackwell.offload.home import Homes
from vblackwell.offload.masters import close_weights, needs_master, open_weights, read_truth, write_truth
from vblackwell.offload.moving import move_buffers
from vblackwell.offload.parameter import engine_and_slot, forget_binding
from vblackwell.offload.resident import Resident, resident_of
from vblackwell.offload.sliced import rows_per_slice, sliceable
from vblackwell.offload.update_place import check_update, groups_kept, groups_on_level0, ring_bytes, state_bytes
from vblackwell.offload.worker import Worker
from vblackwell.units import format_bytes, parse_bytes

PLACEMENTS = ("auto", "resident", "streamed")
# On CUDA, level 0's capacity is the whole process: this share is left to activations and workspaces...
CUDA_ACTIVATION_SHARE = 0.5
# ...and weights take no more than the groups in use, loading and turning around, unless ``weight_bytes`` says so.
CUDA_GROUPS = 6

_names: weakref.WeakKeyDictionary[VGPUStack, set[str]] = weakref.WeakKeyDictionary()


def enable_vgpu_stack_optimization(
    model: nn.Module, stack: VGPUStack, name: str = "model", *, placement: str = "auto",
    compute_dtype: torch.dtype | None = None, groups: Iterable[str] | None = None, update: str | float = "auto",
    activations: str = "level0", resident_bytes: int | str = 0, weight_bytes: int | str | None = None,
    states: str = "fp32", masters: str = "exact", rounding_seed: int = 0,
) -> nn.Module:  # fmt: skip
    """Put ``model`` into ``stack`` and return it, ready to run on level 0's device.

    Args:
        model: any module, its parameters on the CPU or on level 0's device. Train it with `VGPUAdamW`, made afterwards.
        name: tells models in one stack apart.
        placement: 'auto' (resident if weights, gradients and AdamW states fit level 0), 'resident' or 'streamed'.
        compute_dtype: type of the weights that kernels read, e.g. torch.bfloat16; trainable parameters then keep fp32 masters.
        groups: names of modules that stream as one each; by default the children of outermost ModuleLists.
        update: where AdamW runs for a streamed model: 'level0' (states come up to the weights), 'home' (on the CPU), 'auto' (level 0 on
            a GPU), or the share of the parameters that is updated at home, 0 to 1. It changes no bit.
        resident_bytes: level-0 bytes (number or "2GiB") for groups that live there with their states, from the model's first on (the first
            of forward are the last of backward: nothing hides their journeys).
        weight_bytes: what loaded weights may take of level 0. More than the few groups in use saves journeys: a group that stays over the
            turn from forward to backward, or from backward to forward, is not loaded again. Default: a few groups.
        activations: where the inputs of checkpointed layers wait for backward, 'level0' or 'host' (`ActivationStore`).
        states: of AdamW's moments: 'fp32', or '8bit' for 2.03 bytes a parameter instead of 8 (bf16 or fp32 weights; updated on level 0,
            with or without a GPU). A stated choice: docs/numerics.md says what it changes.
        masters: 'exact' (fp32), or 'stochastic': bf16 weights are all there is, rounded at random; with 8-bit states alone.
        rounding_seed: of what is rounded at random. The bits depend on it, the parameter's name, its step and the element.

    What concerns streaming (``groups`` to ``activations``) has no meaning for, and is not looked at by, a model that is resident.

    Raises:
        ConfigurationError: unknown placement or format, formats that exclude each other, no parameters, or the model is in a stack already.
        Unsupported: a group that is to be trained cannot be kept in the formats asked for (fp16, mixed types).
        KeyClash: the stack has a model of this name.
        InsufficientMemory: level 0 cannot hold the largest group, or the lower levels the model; nothing was changed.
    """
    if placement not in PLACEMENTS:
        raise ConfigurationError(f"placement {placement!r} is none of {', '.join(PLACEMENTS)}")
    formats = Formats(states, masters, rounding_seed)
    check_update(update, formats)
    if activations not in ("level0", "host"):
        raise ConfigurationError(f"activations {activations!r} is neither 'level0' nor 'host'")
    if not any(True for _ in model.parameters()):
        raise ConfigurationError(f"{type(model).__name__} has no parameters to place")
    if offload_of(model) is not None:
        raise ConfigurationError(f"{type(model).__name__} is in a stack already: release(model) first")
    if any(param.grad is not None for param in model.parameters()):
        raise ConfigurationError(
            f"{type(model).__name__} has gradients: step with them, or zero_grad(set_to_none=True), before"
        )
    taken = _names.setdefault(stack, set())
    if name in taken:
        raise KeyClash(f"the stack already holds a model named {name!r}: give this one another name=")
    drop_idle_weights(stack)
    needed = bytes_when_resident(model, compute_dtype, formats)
    level = stack.levels[0]
    free = level.capacity_bytes - level.used_bytes
    room = free * (1 - CUDA_ACTIVATION_SHARE) if stack.level0_device.type == "cuda" else free
    if placement == "resident" and needed > free:
        raise InsufficientMemory(
            f"{name!r} needs {format_bytes(needed)} resident (weights, gradients, AdamW states), level 0 ({level.name}) has "
            f"{format_bytes(free)} free: raise fast_memory (the capacity of level 0) or use placement='streamed'",
            needed_bytes=needed,
            available_bytes=free,
        )
    if placement == "resident" or (placement == "auto" and needed <= room):
        engine: Any = Resident(model, stack, name, compute_dtype, formats)
        parts: tuple[Any, ...] = (engine.homes,)
    else:
        store = ActivationStore(stack, f"{name}/activations") if activations == "host" else None
        engine = _stream(
            model, stack, name, compute_dtype, groups, update, store, parse_bytes(resident_bytes), weight_bytes, formats
        )
        if store is not None:
            store.is_weight = engine.aliases
        parts = (engine.homes, engine.worker, engine.prefetcher, store)
    taken.add(name)
    engine.finalizer = weakref.finalize(model, _close_parts, weakref.ref(stack), name, *parts)
    engine.finalizer.atexit = False  # at exit the stack closes itself
    return model


def bytes_when_resident(model: nn.Module, compute_dtype: torch.dtype | None, formats: Formats = EXACT) -> int:
    """Level-0 bytes of weights, and for trainable ones fp32 gradients, both AdamW moments, and fp32 masters where narrower."""
    total = 0
    for param in model.parameters():
        itemsize = compute_dtype_of(param, compute_dtype).itemsize
        total += param.numel() * itemsize
        if param.requires_grad:
            master = 4 if itemsize < 4 and not formats.stochastic else 0
            total += param.numel() * (4 + master)
            total += sum(range_bytes(kind, param.numel(), itemsize) for kind in formats.moments)
    return total


def _close_parts(
    stack: weakref.ref[VGPUStack], name: str, homes: Homes, worker: Worker | None = None,
    prefetcher: Callable[[Any], bool] | None = None, store: ActivationStore | None = None,
) -> None:  # fmt: skip
    """Called by `close`, or when the model is collected: must not refer to it."""
    if store is not None:
        store.close()
    if worker is None:
        homes.close()
    else:
        worker.close(homes.close)
    alive = stack()
    if alive is not None:
        if prefetcher is not None:
            alive.remove_prefetcher(prefetcher)
        _names.get(alive, set()).discard(name)


# -- streamed ----------------------------------------------------------------------------------------------------------


def _stream(
    model: nn.Module, stack: VGPUStack, name: str, compute_dtype: torch.dtype | None, given: Iterable[str] | None,
    update: str | float, store: ActivationStore | None, resident_bytes: int,
    weight_bytes: int | str | None, formats: Formats,
) -> Offload:  # fmt: skip
    groups, sites = find_groups(model, compute_dtype, given, formats)
    level = stack.levels[0]
    free = level.capacity_bytes - level.used_bytes
    slice_rows = _choose_slices(groups, sites, free)
    whole = [group for group in groups if group not in slice_rows]
    # A sliced leaf's weights and gradient come from home, as those of any update that has to wait for its step.
    on_level0 = groups_on_level0(groups if formats.packed else whole, update, stack.level0_device)
    ring = ring_bytes(on_level0, free) if on_level0 else 0
    kept = groups_kept([group for group in on_level0 if group in whole], resident_bytes)
    kept_bytes = sum(state_bytes(group) for group in kept)
    if resident_bytes and not on_level0:
        raise ConfigurationError(
            f"resident_bytes={resident_bytes} keeps groups that are updated on level 0, and none is: use update='level0'"
        )
    if kept_bytes > free // 2:
        raise InsufficientMemory(
            f"resident_bytes would keep {format_bytes(kept_bytes)} on level 0 ({level.name}), more than half of the {format_bytes(free)} "
            "that are free there: lower it, or raise fast_memory (the capacity of level 0)",
            needed_bytes=2 * kept_bytes,
            available_bytes=free,
        )
    wanted = None if weight_bytes is None else parse_bytes(weight_bytes)
    budget = _weights_budget(whole, free - ring - kept_bytes, stack.level0_device, level.name, wanted)
    if len(stack.levels) < 2:
        raise ConfigurationError("streaming needs a level below level 0: add a 'cpu' or 'ssd' level to the stack")
    homes = Homes(stack, name, range(1, len(stack.levels)), groups, kept, on_level0)
    trainable = [group for group in groups if group.trainable()]
    ordered = sorted(
        groups, key=lambda group: group not in slice_rows
    )  # slices are cut from addressable ranges: those first
    homes.reserve(
        [(group, "weight") for group in ordered]
        + [(group, "remainder" if group in on_level0 else "master") for group in trainable if needs_master(group)],
        later=moment_ranges(trainable),
    )
    for group in slice_rows:
        if homes.range(group, "weight").view() is None:
            needed, level_name = group.num_bytes, stack.levels[homes.range(group, "weight").level].name
            homes.close()
            raise InsufficientMemory(
                f"{group.name!r} is larger than level 0 and must be cut from RAM, but only {level_name} has room for its "
                f"{format_bytes(needed)}: raise host_memory",
                needed_bytes=needed,
                available_bytes=0,
            )
    for group in groups:
        _bring_home(group, homes)
    move_buffers(model, stack.level0_device)
    memory = homes.take("update ring", ring, 0) if ring else None
    return Offload(model, stack, name, groups, sites, homes, budget, slice_rows, on_level0, memory, store)


def _choose_slices(groups: list[Group], sites: list[Site], free: int) -> dict[Group, int]:
    """Rows a slice for every group that with its gradient does not fit ``free`` and can be cut."""
    chosen: dict[Group, int] = {}
    for group in groups:
        whole = group.num_bytes * (2 if group.trainable() else 1)
        if whole > free and sliceable(group, sites):
            rows = rows_per_slice(group, free // 2)
            if rows > 0:
                chosen[group] = rows
    return chosen


def _weights_budget(groups: list[Group], free: int, device: torch.device, level_name: str, wanted: int | None) -> int:
    """What loaded weights may take of ``free`` bytes: ``wanted``, or all but one gradient buffer, on CUDA a few groups.

    Raises:
        InsufficientMemory: the largest group with its gradient does not fit.
    """
    weights = max((group.num_bytes for group in groups), default=0)
    gradient = max((group.num_bytes for group in groups if group.trainable()), default=0)
    if weights + gradient > free:
        largest = max(groups, key=lambda group: group.num_bytes)
        raise InsufficientMemory(
            f"level 0 ({level_name}) has {format_bytes(free)} free, and the largest layer group, {largest.name!r}, needs "
            f"{format_bytes(weights + gradient)} there (weights {format_bytes(weights)}, gradient {format_bytes(gradient)}): "
            "raise fast_memory (the capacity of level 0)",
            needed_bytes=weights + gradient,
            available_bytes=free,
        )
    budget = free - gradient
    if wanted is not None:
        return max(weights, min(budget, wanted))
    if device.type == "cuda":
        budget = max(weights, min(budget, CUDA_GROUPS * weights, int(free * (1 - CUDA_ACTIVATION_SHARE))))
    return budget


def _bring_home(group: Group, homes: Homes) -> None:
    """Copy the group's parameters to where they will live."""
    opened = open_weights(homes, group, load=False)
    for slot in group.slots:
        write_truth(slot, slot.param.detach(), opened)
    close_weights(homes, group, opened, store=True)


# -- back ----------------------------------------------------------------------------------------------------------------


def offload_of(model: nn.Module) -> Offload | Resident | None:
    """The engine that holds ``model``'s parameters; None for a plain module."""
    for param in model.parameters():
        found = engine_and_slot(param)
        if found is not None:
            return found[0]
        resident = resident_of(param)
        if resident is not None:
            return resident
    return None


def release(model: nn.Module, device: torch.device | str = "cpu") -> nn.Module:
    """Take ``model`` out of its stack: a plain module again, on ``device``, with fp32 masters as its weights.

    Pending updates are finished first. Gradients, and the optimizer's states, come along, so that training may go on.
    A model that was never offloaded is returned as it is.
    """
    engine = offload_of(model)
    target = torch.device(device)
    if isinstance(engine, Resident):
        engine.release(target)
    elif engine is not None:
        engine.finish()
        engine.detach()
        engine.weights.drop_all()
        if engine.step_control.source is not None:
            engine.step_control.source.let_go(engine, target)
        for slot in engine.slots():
            _make_plain(engine, slot, target)
    if engine is not None:
        move_buffers(model, target)
        engine.close()
    return model


@torch.no_grad()
def _make_plain(engine: Offload, slot: Slot, device: torch.device) -> None:
    homes, group, param = engine.homes, slot.group, slot.param
    opened = open_weights(homes, group)
    values = read_truth(slot, opened).to(device, copy=True)
    close_weights(homes, group, opened, store=False)
    gradient = None
    if engine.gradients.has(slot):
        grad_kind = engine.gradients.home.kind_at_home(group)
        flat = homes.open(group, grad_kind)
        gradient = (slot.view_fp32(flat) if grad_kind == "accumulated" else slot.view(flat)).to(
            device, values.dtype, copy=True
        )
        homes.close_range(group, grad_kind, flat, store=False)
    param.__class__ = slot.plain_class
    param.data = values
    param.grad = gradient
    forget_binding(param)
