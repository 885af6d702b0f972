"""Everything fits level 0: the model stays plain, and its bytes lie in level 0's extents.

Weights, what completes them to fp32 masters, and moments are views of one reserved range each. Where torch's own AdamW
would give other bits than a streamed run (narrow weights, 8-bit moments, any on CUDA), `update_resident` runs.
"""

import threading
import weakref
from functools import partial
from typing import Any

import torch
from torch import Tensor, nn

from vblackwell.kernels.optimizer.adamw import AdamWStep
from vblackwell.memory.cache.stack import VGPUStack
from vblackwell.offload.layout.groups import MOMENTS, Slot, find_groups, formats_summary, moment_ranges, weight_ranges
from vblackwell.offload.layout.placement import StreamingOptions
from vblackwell.offload.layout.storage_plan import StoragePlan
from vblackwell.offload.movement.gradients import gradient_norm
from vblackwell.offload.movement.host_updates import update_master
from vblackwell.offload.movement.lane import update_part
from vblackwell.offload.movement.state import Hyper
from vblackwell.offload.parameters import SiteHook
from vblackwell.offload.storage import masters
from vblackwell.offload.storage.initialize import ModelSource, move_buffers
from vblackwell.offload.storage.masters import Opened, in_memory_order
from vblackwell.offload.storage.storage import Storage, spaces_of

_OURS = {"_vb_resident", "_vb_place", "_vb_version", "__getstate__"}  # what a resident parameter has in its __dict__


def uncached_forward(model: nn.Module) -> list[Any]:
    """Turn autocast's cache of cast weights off while the forward of ``model`` runs, as streaming does; the hooks.

    The cache changes bits: a weight used twice is cast once and its gradients are summed in the narrow type; and a step
    inside the context would not reach the next forward. torch.compile caches no casts. torch calls no hook after a
    KeyboardInterrupt: then the cache is on again when the autocast context has ended.
    """
    entered = threading.local()  # `cached`: whether the cache was on before each of the forwards that a thread is in

    def enter(module: nn.Module, args: Any) -> None:
        if not torch.compiler.is_compiling():
            vars(entered).setdefault("cached", []).append(torch.is_autocast_cache_enabled())
            torch.set_autocast_cache_enabled(False)

    def leave(module: nn.Module, args: Any, output: Any) -> None:
        # None where the way in failed: it is called even then.
        if not torch.compiler.is_compiling() and (cached := getattr(entered, "cached", None)):
            torch.set_autocast_cache_enabled(cached.pop())

    return [
        model.register_forward_pre_hook(SiteHook(enter), prepend=True),
        model.register_forward_hook(SiteHook(leave), always_call=True),
    ]


class Resident:
    """A model that is wholly on level 0. Made by `enable_vgpu_stack_optimization`.

    What is written in place to a parameter that has an fp32 master (`load_state_dict`, `nn.init`) is its master from
    then on, as in a streamed model: torch's version counter tells. Writes through ``.data`` or numpy, and those to
    parameters that were made or moved here in `torch.inference_mode`, escape that counter: the master stays, and the
    next update or `release` brings its value back.
    """

    placement = "resident"
    updates_on_host = False

    def __init__(
        self, model: nn.Module, stack: VGPUStack, name: str, options: StreamingOptions, source: ModelSource
    ) -> None:
        self.stack, self.name = stack, name
        self.groups, _ = find_groups(model, options.compute_dtype, formats=options.formats)
        self._states: dict[Slot, dict[str, Tensor]] = {}
        self._optimizers: weakref.WeakSet[Any] = weakref.WeakSet()
        self.storage = Storage(stack, name, StoragePlan.empty(spaces_of(stack), [0], self.groups))
        ranges = weight_ranges(self.groups)
        self.storage.reserve(ranges)
        self._hooks: dict[Slot, Any] = {}
        opened = {group: dict[str, Tensor]() for group in self.groups}
        for group, kind in ranges:
            opened[group][kind] = self.storage.range(group, kind).bytes
        places = [(slot, opened[group]) for group in self.groups for slot in group.slots]
        try:
            for place in places:
                source.write(*place)
            source.take_over(self.groups)
        except BaseException:
            source.give_back()
            self.storage.close()
            raise
        for place in places:
            # A separate storage: safetensors takes views of one storage for tied, and may keep one alone.
            slot, view = place[0], place[0].view(place[1]["weight"])
            start, num_bytes = view.storage_offset() * view.itemsize, view.numel() * view.itemsize
            storage = view.untyped_storage()[start : start + num_bytes]
            slot.param.data = view.new_empty(0).set_(storage, 0, view.shape, view.stride())
            plain_state = partial(_plain_state, slot.param)
            vars(slot.param).update(_vb_resident=self, _vb_place=place, __getstate__=plain_state)
            _mark_agreed(slot.param)
            self._round_gradients(slot)
        move_buffers(model, stack.level0_device)
        # Autocast caches the casts of fp32 parameters alone.
        cached = any(slot.dtype == torch.float32 for group in self.groups for slot in group.slots)
        self.handles = uncached_forward(model) if cached else []
        self.finalizer = weakref.finalize(model, self.storage.close)
        self.finalizer.atexit = False  # at exit the stack closes itself

    def _round_gradients(self, slot: Slot) -> None:
        """Let micro-batches add up in fp32, each rounded to the compute type first, as gradients that leave level 0."""
        if slot.param.requires_grad and has_truth(slot.param) and slot not in self._hooks:
            slot.param.grad_dtype = torch.float32
            dtype = slot.dtype
            self._hooks[slot] = slot.param.register_hook(lambda gradient: gradient.to(dtype).to(torch.float32))

    # What these mean, see `Offload`.

    def optimizers(self) -> list[Any]:
        return list(self._optimizers)

    def forget_optimizer(self) -> None:
        """Nothing to do: `adopt_optimizer` begins anew."""

    def adopt_optimizer(self, optimizer: Any, params: list[Tensor]) -> dict[Tensor, dict[str, Tensor]]:
        """Fresh AdamW states of ``params`` on level 0, as torch has them or 8-bit; Unsupported if they were frozen."""
        wanted = set(params)
        slots = [slot for group in self.groups for slot in group.slots if slot.param in wanted]
        groups = list(dict.fromkeys(slot.group for slot in slots))
        masters.refuse_unprepared(self.name, groups, self.storage, groups)
        self.storage.reserve(moment_ranges(groups))
        for slot in slots:
            self._round_gradients(slot)  # which may have been frozen when it was moved here
            opened = {kind: self.storage.range(slot.group, kind).bytes for kind in slot.group.formats.moments}
            moments = {kind: part.zero_() for kind, part in masters.moment_parts(slot, opened).items()}
            if not slot.group.formats.packed:
                moments = {kind: slot.view_fp32(flat) for kind, flat in opened.items()}
            device = "cpu" if updates_here(slot.param) else self.stack.level0_device
            self._states[slot] = {"step": torch.zeros((), dtype=torch.float32, device=device), **moments}
        self._optimizers.add(optimizer)
        return {slot.param: self._states[slot] for slot in slots}

    def finish(self) -> None:
        """Nothing runs in the background here."""

    def summary(self) -> dict[str, Any]:
        return {
            "placement": self.placement,
            "groups": len(self.groups),
            "largest_group_bytes": max(group.num_bytes for group in self.groups),
            "sliced": [],
            "weights_budget_bytes": sum(group.num_bytes for group in self.groups),
            "bytes_by_level": self.storage.plan.bytes_by_level(),
            "formats": formats_summary(self.groups),
            "undo_bytes": 0,
        }

    @torch.no_grad()
    def release(self, device: torch.device) -> None:
        """Give every parameter, its fp32 master where there is one, memory on ``device``; 8-bit states become plain."""
        for handle in [*self._hooks.values(), *self.handles]:
            handle.remove()
        for param in (slot.param for group in self.groups for slot in group.slots):
            truth = truth_of(param)
            slot, _ = vars(param).pop("_vb_place")
            if slot in self._states and slot.group.formats.packed:  # what torch's own AdamW goes on from
                state = self._states[slot]
                plain = {"step": state["step"], **masters.read_moments(slot, state)}
                state.clear()
                state.update({key: value.to(device) for key, value in plain.items()})
            del vars(param)["_vb_resident"], vars(param)["_vb_version"], vars(param)["__getstate__"]
            gradient, param.grad = param.grad, None
            param.data = truth.to(device, copy=True)
            param.grad_dtype = param.dtype
            param.grad = None if gradient is None else gradient.to(device, param.dtype)

    def close(self) -> None:
        """Give everything back to the stack. The optimizer's states, if any, stay valid while it holds them."""
        self.finalizer()


def _plain_state(param: Tensor) -> Any:
    """What a pickle of ``param`` holds next to its values: all that somebody else gave it, None where that is nothing.
    torch asks for it by the name ``__getstate__``.
    """
    state: Any = type(param).__getstate__(param)
    if not isinstance(state, dict):
        return state
    return {name: value for name, value in state.items() if name not in _OURS} or None


def resident_of(param: Tensor) -> Resident | None:
    return param.__dict__.get("_vb_resident")


def _place_of(param: Tensor) -> tuple[Slot, Opened] | None:
    return param.__dict__.get("_vb_place")


def _version_of(param: Tensor) -> int | None:
    """How often ``param`` was written to in place; None if it was made in `torch.inference_mode`, which counts none."""
    try:
        return param._version
    except RuntimeError:
        return None


def _mark_agreed(param: Tensor) -> None:
    """The weight is now the rounded master. Our updates keep it so, and torch does not count them: they write to the
    group's range, not to ``param``.
    """
    vars(param)["_vb_version"] = _version_of(param)


def _agreed_place_of(param: Tensor) -> tuple[Slot, Opened] | None:
    """`_place_of`, after the master has become what was written to the weight in place since they last agreed."""
    place = _place_of(param)
    if place is not None and _version_of(param) != vars(param)["_vb_version"]:
        slot, opened = place
        masters.write_truth(slot, slot.view(opened["weight"]), opened)
        _mark_agreed(param)
    return place


def has_truth(param: Tensor) -> bool:
    """Whether ``param`` is resident and narrower than the fp32 in which it is updated."""
    place = _place_of(param)
    if place is None or not place[0].dtype.is_floating_point:
        return False
    return len(place[1]) > 1 or place[0].group.formats.stochastic


def updates_here(param: Tensor) -> bool:
    """Whether `update_resident`, not torch's own AdamW, gives ``param`` the bits of a streamed run."""
    place = _place_of(param)
    if place is None:
        return False
    return has_truth(param) or place[0].group.formats.packed or (param.is_cuda and place[0].dtype == torch.float32)


def restride(param: Tensor) -> None:
    """Give the gradient the parameter's strides: one that autograd widened may lie transposed in memory."""
    if updates_here(param) and param.grad is not None and param.grad.stride() != param.stride():
        param.grad = torch.empty_like(param, dtype=param.grad.dtype).copy_(param.grad)


def plain_norm(param: Tensor) -> Tensor:
    """The 2-norm of the gradient of a plain or resident parameter, after `restride`: the bits of a streamed run."""
    assert param.grad is not None
    if updates_here(param) and param.is_cuda:
        return gradient_norm(in_memory_order(param.grad))
    return torch.linalg.vector_norm(param.grad, dtype=torch.float32)


def truth_of(param: Tensor) -> Tensor:
    """The fp32 truth of a resident parameter, ``param`` itself where there is none; may alias it."""
    place = _agreed_place_of(param)
    return param.detach() if place is None else masters.read_truth(*place)


def plain_state(param: Tensor, state: dict[str, Tensor]) -> dict[str, Tensor]:
    """The optimizer's ``state`` of any parameter as `torch.optim.AdamW` would hold it: 8-bit moments in fp32. One that
    is so already is from before ``param`` was moved here.
    """
    place = _place_of(param)
    if place is None or not place[0].group.formats.packed or MOMENTS[0] in state:
        return state
    return {"step": state["step"], **masters.read_moments(place[0], state)}


@torch.no_grad()
def write_state(param: Tensor, held: dict[str, Tensor], state: dict[str, Tensor] | None) -> None:
    """Make ``held``, the state of a plain or resident parameter, the plain ``state``; None: as never stepped."""
    if state is None:
        for tensor in held.values():
            tensor.zero_()
        return
    place = _place_of(param)
    if place is not None and held and updates_here(param):
        held["step"].copy_(state["step"])
        if place[0].group.formats.packed:
            masters.write_moments(place[0], held, state)
            return
    else:  # where torch's fused AdamW wants it
        held["step"] = state["step"].to(param.device, torch.float32, copy=True)
    for kind in MOMENTS:
        if kind not in held:
            held[kind] = torch.empty_like(param, dtype=torch.float32, memory_format=torch.preserve_format)
        held[kind].copy_(state[kind])


@torch.no_grad()
def write_param(param: Tensor, source: Tensor) -> None:
    """Make ``source`` the value of a plain or resident parameter, and of its master."""
    place = _place_of(param)
    if place is None:
        param.copy_(source)
    else:
        masters.write_truth(place[0], source, place[1])
        _mark_agreed(param)


def update_resident(
    param: Tensor, gradient: Tensor, state: dict[str, Tensor], hyper: Hyper, factor: Tensor | None
) -> None:
    """One AdamW step for a parameter that `updates_here`; ``gradient`` has its strides and is times ``factor``."""
    place = _agreed_place_of(param)
    assert place is not None
    slot, opened = place
    state["step"].add_(1)
    moments = {kind: in_memory_order(state[kind]) for kind in slot.group.formats.moments}
    flat = in_memory_order(gradient)
    factor = None if factor is None else factor.to(flat.device)
    if "master" in opened and has_truth(param):
        if factor is not None:
            flat.mul_(factor)
        master, weight = slot.flat_fp32(opened["master"]), slot.flat(opened["weight"])
        update_master(master, weight, moments["exp_avg"], moments["exp_avg_sq"], flat, state["step"], hyper)
        return
    part = {"weight": slot.flat(opened["weight"]), "gradient": flat, **moments}
    if "remainder" in opened:
        part["remainder"] = slot.flat(opened["remainder"], torch.int16)
    update_part(slot, part, AdamWStep(**vars(hyper), step=int(state["step"])), factor)  # a product in fp32
    if factor is not None:
        flat.mul_(factor)  # as torch's clipping leaves it
