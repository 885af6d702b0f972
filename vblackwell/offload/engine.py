"""Ties one model to one stack: module hooks that load weights, hooks that take gradients, and the step.

The model stays the user's object. Nothing of it is replaced: a forward pre-hook on each module that owns parameters
loads its group and makes its parameters plain, a forward hook undoes that, and a hook on each parameter takes its
gradient. While a group is in use, tensors saved for backward that lie in its buffer are packed as (group, view) and
read again when backward needs them; hooks that were already active (checkpointing, save_on_cpu) keep everything else.
"""

from __future__ import annotations

import threading
import weakref
from collections.abc import Callable, Iterable, Iterator, Sequence
from contextlib import AbstractContextManager, ExitStack, contextmanager, nullcontext
from typing import Any

import torch
from torch import nn

from vblackwell.errors import ConfigurationError, Unsupported
from vblackwell.memory.cache.stack import Reservation, VGPUStack
from vblackwell.offload.hooks import SiteHook, gradient_hook, handing_on, prefetcher_of
from vblackwell.offload.layout.groups import Group, Site, Slot, moment_ranges, of_all, smallest_buffer
from vblackwell.offload.movement.activations import ActivationStore
from vblackwell.offload.movement.device_updates import DeviceUpdates
from vblackwell.offload.movement.gradients import GradientCollector
from vblackwell.offload.movement.group_state import GroupStates
from vblackwell.offload.movement.host_updates import HostUpdates
from vblackwell.offload.movement.lane_cuda import make_lane
from vblackwell.offload.movement.room import Level0Room
from vblackwell.offload.movement.sliced import SlicedLeaf, swap_class
from vblackwell.offload.movement.weights import PackedView, SavedTensor, WeightStreamer
from vblackwell.offload.movement.worker import Worker
from vblackwell.offload.parameters import engine_and_slot, is_transformed
from vblackwell.offload.step import StepControl, UpdateSource, is_final
from vblackwell.offload.storage.masters import read_weight, refuse_unprepared, write_masters, write_parameter
from vblackwell.offload.storage.shadows import Shadows
from vblackwell.offload.storage.storage import Storage
from vblackwell.offload.transforms import computing_with_views, refuse_wrapping
from vblackwell.offload.use import Loading, UsedParameters

_autograd: Any = getattr(torch._C, "_autograd")  # noqa: B009 (untyped)
_top_hooks: Callable[[bool], Any] = _autograd._top_saved_tensors_default_hooks


def locked(engines: Iterable[Offload]) -> ExitStack:
    """The locks of the stacks of ``engines``, to be left; always taken in one order."""
    with ExitStack() as held:
        for lock in sorted({engine.lock for engine in engines}, key=id):
            held.enter_context(lock)
        return held.pop_all()


class Offload:
    """The engine of one streamed model. Made by `enable_vgpu_stack_optimization`; users meet it through
    `offload_of(model)`.

    Args:
        storage: with ``weight`` ranges that already hold the compute weights (and ``master`` ranges the fp32 truth).
        budget_bytes: what loaded weights may take of level 0.
        slice_rows: groups that are computed in slices of that many rows (`SlicedLeaf`).
        on_level0: groups whose AdamW runs there; ring: level-0 bytes through which their states pass.
        activations: where checkpoints' inputs wait for backward; None: on level 0.
    """

    placement = "streamed"
    finalizer: weakref.finalize[Any, Any]

    def __init__(
        self, model: nn.Module, stack: VGPUStack, name: str, groups: list[Group], sites: list[Site], storage: Storage,
        budget_bytes: int, slice_rows: dict[Group, int] | None = None, on_level0: Sequence[Group] = (),
        ring: Reservation | None = None, activations: ActivationStore | None = None,
    ) -> None:  # fmt: skip
        self.model = model
        self.stack = stack
        self.name = name
        self.groups = groups
        self.storage = storage
        self.budget_bytes = budget_bytes
        self.device = stack.level0_device
        self.activations = activations
        self.worker = Worker(name)
        self._slice_rows = slice_rows or {}
        self._build(on_level0, ring)
        self._handles: list[Any] = []
        self._entered = threading.local()
        self._thread = threading.get_ident()
        self._backward_ends: set[int] = set()
        self.prefetcher = prefetcher_of(self)
        self._exported: dict[Slot, tuple[tuple[int, int], torch.Tensor]] | None = None
        self._exporting: set[Slot] = set()
        self._sliced: list[nn.Module] = []
        refuse_wrapping()
        try:
            self._take_modules(sites)
        except BaseException:
            self.detach()
            raise
        stack.add_prefetcher(self.prefetcher)
        self.room.join()

    def _build(self, on_level0: Sequence[Group], ring: Reservation | None) -> None:
        """Make what moves bytes, and tie it together: nothing of it knows this object, or what stands above it."""
        stack, groups, storage, worker = self.stack, self.groups, self.storage, self.worker
        self.states = states = GroupStates(groups)
        self.room = room = Level0Room(stack, storage)
        self.lock = room.lock
        self.shadows = Shadows(storage)
        self.weights = weights = WeightStreamer(stack, groups, states, storage, self.budget_bytes, room)
        self.gradients = gradients = GradientCollector(
            stack, groups, states, storage, worker, room,
            use_of=lambda buffer, adding: self.step_control.use_of(buffer, adding),
            arrived=lambda group: self.step_control.gradient_arrived(group),
            free_spare=lambda: self.level0 is not None and self.level0.free_shadows(),
        )  # fmt: skip
        self.host_updates = HostUpdates(self.name, states, storage, weights, gradients, worker)
        self.level0: DeviceUpdates | None = None
        if ring is not None:
            lane = make_lane(stack, storage, ring, worker, max(map(smallest_buffer, on_level0), default=0))
            self.level0 = DeviceUpdates(
                self.device, groups, on_level0, self._slice_rows.keys(), states, storage, weights, gradients,
                self.shadows, lane,
            )  # fmt: skip
            room.end_update, room.sweep_updates = self.level0.end_oldest, self.level0.sweep
        room.drop_weights, room.end_gradient = weights.drop_one, gradients.end_oldest
        self.step_control = control = StepControl(
            self.name, groups, states, storage, weights, gradients, worker, self.host_updates, self.level0
        )
        self.loading = Loading(stack, groups, states, storage, weights, control.order_loads, control.is_busy)
        self.used = UsedParameters(
            self, self.device, self.lock, self.loading, lambda slot: gradient_hook(self, slot), self._write_back
        )

    def _take_modules(self, sites: list[Site]) -> None:
        """Placeholders in place of parameters, and hooks that bring them."""
        for slot in self.slots():
            self.used.hide(slot)
        leaves = {group: self._leaf(group, num_rows) for group, num_rows in self._slice_rows.items()}
        for site in sites:
            if site.groups[0] in leaves:
                swap_class(site.module, leaves[site.groups[0]])
                self._sliced.append(site.module)
            else:
                self._attach(site)
        model, handles = self.model, self._handles
        handles.append(model.register_forward_pre_hook(SiteHook(self._begin_forward), prepend=True))
        handles.append(model.register_forward_hook(SiteHook(self._end_forward), always_call=True))
        handles.append(model.register_state_dict_pre_hook(SiteHook(self._begin_export)))
        handles.append(model.register_state_dict_post_hook(SiteHook(self._end_export)))
        handles.append(model.register_load_state_dict_pre_hook(SiteHook(self._refuse_assignment)))
        for module in model.modules():
            handles.append(module.register_state_dict_pre_hook(SiteHook(self._export_own)))

    def _leaf(self, group: Group, num_rows: int) -> SlicedLeaf:
        return SlicedLeaf(
            group, num_rows, self.stack, self.states, self.storage, self.room, self.weights, self.gradients,
            self.step_control.wait_for_updates, self.step_control.before_gradient,
        )  # fmt: skip

    def is_sliced(self, group: Group) -> bool:
        """Whether ``group`` is never on level 0 as a whole."""
        return group in self._slice_rows

    def slots(self) -> Iterator[Slot]:
        """Every managed parameter, in the model's order."""
        for group in self.groups:
            yield from group.slots

    # -- modules -----------------------------------------------------------------------------------------------------

    def _attach(self, site: Site) -> None:
        enter = SiteHook(lambda module, args, kwargs: self._enter(site) if site.when(args, kwargs) else None)
        leave = SiteHook(lambda module, args, output: self._leave(site))
        self._handles.append(site.module.register_forward_pre_hook(enter, prepend=True, with_kwargs=True))
        self._handles.append(site.module.register_forward_hook(leave, always_call=True))

    def _begin_forward(self, module: nn.Module, args: Any) -> None:
        if torch._C._current_graph_task_id() == -1:  # not a recompute
            self._thread = threading.get_ident()
            self._unwind()
            with self.lock:
                self._end_export()
                self.weights.trace.begin_pass()
                self.step_control.begin_forward()
            if self.activations is not None and torch.is_grad_enabled():
                self._forward_context().enter_context(self.activations.forward_of(self.model))

    def _end_forward(self, module: nn.Module, args: Any, output: Any) -> None:
        if torch._C._current_graph_task_id() == -1:
            self._forward_context().close()

    def _forward_context(self) -> ExitStack:
        """What this thread's forward of the whole model has entered."""
        return self._entered.__dict__.setdefault("forward", ExitStack())

    def _enter(self, site: Site) -> None:
        entered: list[tuple[Site, Any]] = self._entered.__dict__.setdefault("stack", [])
        with self.lock:
            self.step_control.reached(site.groups[-1])
        slots = [slot for group in site.groups for slot in group.slots]
        with ExitStack() as context:
            context.enter_context(self.used.using(slots))
            if is_transformed():
                context.enter_context(computing_with_views(site.module, slots))
            entered.append((site, context.pop_all()))

    def _leave(self, site: Site) -> None:
        entered = self._entered.__dict__.get("stack", [])
        if entered and entered[-1][0] is site:  # not so where the way in failed: `_leave` is called even then
            entered.pop()[1].__exit__(None, None, None)

    def _unwind(self) -> None:
        """Leave what an interrupted forward entered: torch calls no hook after a KeyboardInterrupt."""
        self._forward_context().close()
        entered = self._entered.__dict__.get("stack", [])
        while entered:
            entered.pop()[1].__exit__(None, None, None)

    def ask(self, group: Group) -> None:
        """Load ``group`` ahead: now, or, as only the thread that runs the model may, at that one's next use if this is
        another.
        """
        if threading.get_ident() == self._thread:
            with self.lock:
                self.loading.prefetch(group)
        else:
            self.loading.asked[group] = None

    # -- autograd ----------------------------------------------------------------------------------------------------

    def packing(self) -> AbstractContextManager[Any]:
        """Inside, tensors saved for backward that lie in a loaded buffer are kept as references.

        Hooks that are active already keep everything. Ours among them do what is right; checkpointing's must see the
        same tensors in the first pass and in the recompute, where modules may be called without their hooks.
        """
        if is_transformed():
            return nullcontext()  # there torch allows no such hooks: what is saved keeps its buffer
        active = _top_hooks(True)
        if active is None:
            return torch.autograd.graph.saved_tensors_hooks(self._pack, self._unpack)
        if active[0] == self._pack:
            return nullcontext()
        return handing_on(active) or nullcontext()

    def _pack(self, tensor: torch.Tensor) -> SavedTensor | PackedView:
        return self.weights.pack(tensor) or SavedTensor.of(tensor)

    def _unpack(self, packed: SavedTensor | PackedView) -> torch.Tensor:
        if isinstance(packed, SavedTensor):
            return packed.unchanged()
        with self.lock:
            return self.loading.unpack(packed)

    def take_gradient(self, slot: Slot) -> None:
        task = torch._C._current_graph_task_id()
        if task not in self._backward_ends:
            self._backward_ends.add(task)
            torch.autograd.Variable._execution_engine.queue_callback(lambda: self._end_backward(task))
        with self.lock:
            self.step_control.before_gradient(slot.group)
            self.gradients.take(slot)

    def _end_backward(self, task: int) -> None:
        self._backward_ends.discard(task)
        with self.lock:
            self.gradients.finish_backward()

    # -- what parameters ask for ------------------------------------------------------------------------------------

    @contextmanager
    def reading(self, slots: Iterable[Slot]) -> Iterator[None]:
        with self.used.using(sorted(slots, key=lambda slot: slot.group.index)):
            yield

    def aliases(self, tensor: torch.Tensor) -> bool:
        return self.weights.aliases(tensor)

    def has_gradient(self, slot: Slot) -> bool:
        return self.gradients.has(slot)

    def clear_gradient(self, slot: Slot) -> None:
        with self.lock:
            self.step_control.clear_gradients([slot])

    def gradient_norm(self, slot: Slot) -> torch.Tensor:
        with self.lock:
            return self.step_control.gradient_norm(slot)

    def read_gradient(self, slot: Slot) -> torch.Tensor:
        with self.lock:
            return self.step_control.read_gradient(slot)

    def scale_gradient(self, slot: Slot, factor: torch.Tensor) -> None:
        with self.lock:
            self.step_control.scale_gradients([slot], factor)

    def zero_gradient(self, slot: Slot) -> None:
        with self.lock:
            self.step_control.zero_gradients([slot])

    def overwrite(self, slot: Slot, source: torch.Tensor) -> bool:
        if slot.group not in self._slice_rows:
            return False
        with self.lock:
            self.step_control.wait_for_updates(slot.group)
            self.weights.touched(slot.group)
            load = self.states[slot.group].last_load
            if load is not None:
                load.wait()
            self.worker.submit(write_parameter, self.storage, slot, source.detach().to("cpu")).result()
        return True

    def _write_back(self, slots: list[Slot]) -> None:
        """The slots' loaded bytes were changed in place: write them to storage, and into their masters."""
        for group in dict.fromkeys(slot.group for slot in slots):
            self.step_control.wait_for_updates(group)  # an update of the step before may still be written
            buffer = self.loading.acquire(group)
            self.stack.write(self.storage.range(group, "weight"), buffer).wait()
            self.loading.release(group)
            changed = [slot for slot in slots if slot.group is group]
            self.worker.submit(write_masters, self.storage, group, changed).result()

    def _read_stored(self, slot: Slot) -> torch.Tensor:
        """A copy of a slot's compute weight on the CPU, after every update whose step came."""
        self.step_control.wait_for_updates(slot.group)
        self.worker.drain()  # ranges may be staged, and staging is the worker's
        return read_weight(self.storage, slot)

    # -- state_dict --------------------------------------------------------------------------------------------------

    def _begin_export(self, *args: Any) -> None:
        self.finish()
        self.step_control.check_whole()
        self._exported = {}

    def _export_own(self, module: nn.Module, prefix: str, keep_vars: bool) -> None:
        """``module`` is about to save its own parameters, each once: so where it fails, later reads are not taken for
        that.

        The state_dict of a module that is not the whole model, which begins without a prefix, reads as any other code
        does.
        """
        if not prefix and module is not self.model:
            self._end_export()  # of one that raised
        self._exporting.clear()
        if self._exported is None or keep_vars:  # what is kept as it is, is not read
            return
        for param in module._parameters.values():
            found = None if param is None else engine_and_slot(param)
            if found is not None and found[0] is self:
                self._exporting.add(found[1])

    def _end_export(self, *args: Any) -> None:
        self._exported = None
        self._exporting.clear()

    def export(self, slot: Slot) -> torch.Tensor | None:
        if self._exported is None or slot not in self._exporting:
            return self._read_stored(slot) if slot.group in self._slice_rows else None
        self._exporting.discard(slot)
        stamp = self.weights.stamp(slot.group, 0, slot.group.num_bytes)
        known = self._exported.get(slot)
        if known is None or known[0] != stamp:  # tied names get one tensor, so that savers see the tie
            known = self._exported[slot] = (stamp, self._read_stored(slot))
        return known[1]

    def _refuse_assignment(
        self, module: nn.Module, state_dict: Any, prefix: str, metadata: dict[str, Any], *rest: Any
    ) -> None:
        if metadata.get("assign_to_params_buffers", False):
            raise Unsupported(
                "load_state_dict(assign=True) would replace offloaded parameters: use assign=False, which copies"
            )

    # -- optimizer ---------------------------------------------------------------------------------------------------

    def adopt_optimizer(self, optimizer: UpdateSource, slots: list[Slot]) -> None:
        """Give ``optimizer`` states for ``slots``: both moments in storage, zero.

        Raises:
            Unsupported: another optimizer has this model already.
            InsufficientMemory: no room for the states; nothing was reserved.
        """
        if self.step_control.source not in (None, optimizer):  # `VGPUAdamW` has released one that it replaces
            raise Unsupported(
                f"model {self.name!r} already has an optimizer: put all its parameters into one VGPUAdamW"
            )
        groups = list(dict.fromkeys(slot.group for slot in slots))
        refuse_unprepared(self.name, groups, self.storage, () if self.level0 is None else self.level0)
        fresh = [(group, kind) for group, kind in moment_ranges(groups) if (group, kind) not in self.storage]
        on_host = [group for group in groups if not is_final(optimizer) or self._needs_gradient_on_host(group)]
        sums = [(group, "accumulated") for group in on_host if optimizer.accumulation_steps > 1 and not group.is_fp32]
        self.storage.reserve([(group, "gradient") for group in on_host] + fresh, sums)
        for group, kind in fresh:
            self.worker.submit(self.storage.zero, group, kind)
        self.worker.drain()
        self.step_control.source = optimizer

    def optimizers(self) -> list[Any]:
        """Those that have this model's parameters."""
        return [] if self.step_control.source is None else [self.step_control.source]

    def forget_optimizer(self) -> None:
        """As before the first `adopt_optimizer`, but for the room: moments are zero and no parameter was stepped;
        gradients stay.
        """
        self.finish()
        for group, kind in moment_ranges(self.groups):
            if (group, kind) in self.storage:
                self.worker.submit(self.storage.zero, group, kind)
        self.worker.drain()
        self.step_control.steps.clear()
        self.step_control.source = None

    def _needs_gradient_on_host(self, group: Group) -> bool:
        """Whether gradients need a range even where every update follows its backward at once."""
        if group in self._slice_rows:
            return True
        if self.level0 is not None and group in self.level0:
            return self.level0.is_deferred(group)
        return (group, "master") not in self.storage

    # -- life --------------------------------------------------------------------------------------------------------

    def wait_for_updates(self) -> None:
        """Return when every update whose step came has read its gradient."""
        self.step_control.drain()

    def end_interrupted(self) -> None:
        """Leave the forward that an interrupt ended, if one did.

        Raises:
            ConfigurationError: another thread is in a forward; nothing was changed.
        """
        self._unwind()
        used = next((group for group in self.groups if self.weights.is_pinned(group)), None)
        if used is not None:
            raise ConfigurationError(
                f"{self.name!r} is in use: a forward of {used.name!r} runs in another thread; wait for its end, then "
                "release"
            )

    def finish(self) -> None:
        """Wait until every update whose step came is in storage; undo the others."""
        with self.lock:
            self.gradients.finish_backward()
            self.step_control.roll_back()
            self.step_control.scale_stored()
            self.worker.drain()
            self.step_control.drain()
            self.gradients.sweep()

    def summary(self) -> dict[str, Any]:
        """Where the model's bytes are, for reports: kinds by level, groups, and level 0's budget for weights."""
        return {
            "placement": self.placement,
            "groups": len(self.groups),
            "largest_group_bytes": max((group.num_bytes for group in self.groups), default=0),
            "weights_budget_bytes": self.budget_bytes,
            "sliced": sorted({module._vb_leaf.group.name for module in self._sliced}),  # type: ignore[union-attr]
            "bytes_by_level": self.storage.bytes_by_level(),
            "formats": of_all(group.formats for group in self.groups).summary(),
            "updated_on_level0": []
            if self.level0 is None
            else [group.name for group in self.groups if group in self.level0],
            "activations": None if self.activations is None else self.activations.summary(),
            "undo_bytes": self.host_updates.undo_peak_bytes + self.shadows.num_bytes,
        }

    def detach(self) -> None:
        """Remove every hook; parameters keep their placeholders (the caller gives them data)."""
        for handle in self._handles:
            handle.remove()
        self._handles.clear()
        self.used.remove_hooks()
        for module in self._sliced:
            swap_class(module, None)
        self._sliced.clear()

    def close(self) -> None:
        """Give everything back to the stack. Idempotent. Parameters that were not released stay unreadable."""
        self.detach()
        with self.lock:
            self.wait_for_updates()
            self.weights.drop_all()
            self.finalizer()
