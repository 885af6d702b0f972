"""Ties one model to one stack: module hooks that load weights, hooks that take gradients, and the step.

The model stays the user's object. Nothing of it is replaced: a forward pre-hook on each module that owns parameters
loads its group and makes its parameters plain, a forward hook undoes that, and a hook on each parameter takes its
gradient. While a group is in use, tensors saved for backward that lie in its buffer are packed as (group, view) and
read again when backward needs them; hooks that were already active (checkpointing, save_on_cpu) keep everything else.
"""

from __future__ import annotations

import threading
import weakref
from collections.abc import Callable, Iterable, Iterator
from contextlib import AbstractContextManager, ExitStack, nullcontext
from functools import partial
from typing import Any

import torch
from torch import nn

from vblackwell.errors import ConfigurationError, Unsupported
from vblackwell.memory.cache.stack import Reservation, VGPUStack
from vblackwell.offload.layout.groups import Group, Site, Slot, moment_ranges, of_all, smallest_buffer
from vblackwell.offload.layout.placement import (
    Measured,
    StreamedPlacement,
    StreamingOptions,
    place_streamed,
    refuse_slices_on_disk,
)
from vblackwell.offload.movement.activations import ActivationStore
from vblackwell.offload.movement.gradients import GradientCollector
from vblackwell.offload.movement.lane_cuda import make_lane
from vblackwell.offload.movement.sliced import SlicedLeaf, swap_class
from vblackwell.offload.movement.state import GroupState, Level0Room, Shared, Worker
from vblackwell.offload.movement.updates import DeviceUpdates, HostUpdates
from vblackwell.offload.movement.weights import PackedView, SavedTensor, WeightStreamer
from vblackwell.offload.parameters import (
    SiteHook,
    UsedParameters,
    computing_with_views,
    engine_and_slot,
    forget_binding,
    is_transformed,
    refuse_wrapping,
)
from vblackwell.offload.resident import Resident
from vblackwell.offload.step import Loading, StepControl, is_final
from vblackwell.offload.storage.initialize import Source, move_buffers
from vblackwell.offload.storage.masters import (
    close_weights,
    open_weights,
    read_truth,
    read_weight,
    refuse_unprepared,
    write_masters,
    write_parameter,
)
from vblackwell.offload.storage.storage import Shadows, Storage, spaces_of

_top_hooks: Callable[[bool], Any] = getattr(torch._C, "_autograd")._top_saved_tensors_default_hooks  # noqa: B009


def locked(engines: Iterable[Offload]) -> ExitStack:
    """The locks of the stacks of ``engines``, to be left; always taken in one order."""
    with ExitStack() as held:
        for lock in sorted({engine.lock for engine in engines}, key=id):
            held.enter_context(lock)
        return held.pop_all()


def offload_of(model: nn.Module) -> Offload | Resident | None:
    """The engine that holds ``model``'s parameters; None for a plain module."""
    for param in model.parameters():
        engine = param.__dict__.get("_vb_binding") or param.__dict__.get("_vb_resident")
        if engine is not None:
            return engine
    return None


def stream(
    model: nn.Module, stack: VGPUStack, name: str, options: StreamingOptions, source: Source,
    store: ActivationStore | None = None, measured: Measured | None = None,
) -> Offload:  # fmt: skip
    """Write ``model`` to the levels below level 0, and let it stream.

    Args:
        store: where checkpoints' inputs wait for backward; None: on level 0. measured: as `place_streamed`.

    Raises:
        As `place_streamed`; the model is as it was.
    """
    found = place_streamed(model, spaces_of(stack), options, measured)
    storage = Storage(stack, name, found.storage)
    plain: list[tuple[torch.Tensor, torch.Tensor, type]] = []
    try:
        refuse_slices_on_disk(found.slice_rows, storage.plan)
        for group in found.groups:
            opened = open_weights(storage, group, load=False)
            for slot in group.slots:
                source.write(slot, opened)
            close_weights(storage, group, opened, store=True)
        source.take_over(found.groups)
        move_buffers(model, stack.level0_device)
        params = [slot.param for group in found.groups for slot in group.slots]
        plain = [(param, param.data, type(param)) for param in params]
        return Offload(model, stack, name, found, storage, store)
    except BaseException:
        for param, data, kind in plain:
            forget_binding(param)
            param.__class__ = kind
            with torch.inference_mode(False):
                param.data = data
        source.give_back()
        storage.close()
        raise


def _close_parts(
    stack: weakref.ref[VGPUStack], storage: Storage, worker: Worker, prefetcher: Callable[[Any], bool],
    store: ActivationStore | None,
) -> None:  # fmt: skip
    """Called by `Offload.close`, or when the model is collected: must not refer to it."""
    if store is not None:
        store.close()
    worker.close(storage.close)
    alive = stack()
    if alive is not None:
        alive.prefetchers.remove(prefetcher)


class Offload:
    """The engine of one streamed model. Made by `stream`; users meet it through `offload_of(model)`.

    Args:
        storage: with ``weight`` ranges that already hold the compute weights (and ``master`` ranges the fp32 truth).
    """

    placement = "streamed"

    def __init__(
        self, model: nn.Module, stack: VGPUStack, name: str, found: StreamedPlacement, storage: Storage,
        activations: ActivationStore | None = None,
    ) -> None:  # fmt: skip
        self.model = model
        self.stack = stack
        self.name = name
        self.groups = found.groups
        self.storage = storage
        self.budget_bytes = found.budget_bytes
        self.device = stack.level0_device
        self.activations = activations
        self._slice_rows = found.slice_rows
        ring = storage.take("update ring", found.ring_bytes, 0) if found.ring_bytes else None
        self.worker = Worker(name)
        self._build(found, ring)
        self._handles: list[Any] = []
        self._entered = threading.local()
        self._thread = threading.get_ident()
        self._backward_ends: set[int] = set()
        self._exported: dict[Slot, tuple[tuple[int, int], torch.Tensor]] | None = None
        self._exporting: set[Slot] = set()
        self._sliced: list[nn.Module] = []
        refuse_wrapping()
        try:
            self._take_modules(found.sites)
        except BaseException:
            self.detach()
            raise
        if activations is not None:
            activations.leave_out(self.weights)
        prefetcher = _prefetcher_of(self)
        stack.prefetchers.append(prefetcher)
        self.room.join()
        self.finalizer = weakref.finalize(
            model, _close_parts, weakref.ref(stack), storage, self.worker, prefetcher, activations
        )
        self.finalizer.atexit = False  # at exit the stack closes itself

    def _build(self, found: StreamedPlacement, ring: Reservation | None) -> None:
        """Make what moves bytes, and tie it together: nothing of it knows this object, or what stands above it."""
        stack, groups, storage, worker = self.stack, self.groups, self.storage, self.worker
        self.states = states = {group: GroupState() for group in groups}
        self.room = room = Level0Room(stack, storage)
        self._shared = shared = Shared(self.name, stack, groups, storage, worker, states, room)
        self.lock = room.lock
        self.shadows = Shadows(storage)
        self.weights = weights = WeightStreamer(shared, self.budget_bytes)
        self.gradients = gradients = GradientCollector(
            shared,
            use_of=lambda buffer, adding: self.step_control.use_of(buffer, adding),
            arrived=lambda group: self.step_control.gradient_arrived(group),
            free_spare=lambda: self.level0 is not None and self.level0.free_shadows(),
        )  # fmt: skip
        self.host_updates = HostUpdates(shared, weights)
        self.level0: DeviceUpdates | None = None
        if ring is not None:
            lane = make_lane(stack, storage, ring, worker, max(map(smallest_buffer, found.on_level0), default=0))
            self.level0 = DeviceUpdates(
                shared, found.on_level0, self._slice_rows.keys(), weights, gradients, self.shadows, lane
            )
            room.end_update, room.sweep_updates = self.level0.end_oldest, self.level0.sweep
        room.drop_weights, room.end_gradient = weights.drop_one, gradients.end_oldest
        self.step_control = StepControl(
            self.name, groups, states, storage, weights, gradients, worker, self.host_updates, self.level0
        )
        self.loading = Loading(stack, groups, states, storage, weights, self.step_control)
        self.used = UsedParameters(self, lambda slot: _gradient_hook(self, slot), self._write_back)

    def _take_modules(self, sites: list[Site]) -> None:
        """Placeholders in place of parameters, and hooks that bring them."""
        keep = self._handles.append  # each at once: where a later one fails, `detach` removes it
        for slot in self.slots():
            self.used.hide(slot)
        leaves = {
            group: SlicedLeaf(
                self._shared, group, num_rows, self.weights, self.gradients, self.step_control.wait_for_updates,
                self.step_control.before_gradient,
            )
            for group, num_rows in self._slice_rows.items()
        }  # fmt: skip
        for site in sites:
            if site.groups[0] in leaves:
                swap_class(site.module, leaves[site.groups[0]])
                self._sliced.append(site.module)
            else:
                enter, leave = SiteHook(partial(self._enter, site)), SiteHook(partial(self._leave, site))
                keep(site.module.register_forward_pre_hook(enter, prepend=True, with_kwargs=True))
                keep(site.module.register_forward_hook(leave, always_call=True))
        model = self.model
        keep(model.register_forward_pre_hook(SiteHook(self._begin_forward), prepend=True))
        keep(model.register_forward_hook(SiteHook(self._end_forward), always_call=True))
        keep(model.register_state_dict_pre_hook(SiteHook(self._begin_export)))
        keep(model.register_state_dict_post_hook(SiteHook(self._end_export)))
        keep(model.register_load_state_dict_pre_hook(SiteHook(_refuse_assignment)))
        for module in model.modules():
            keep(module.register_state_dict_pre_hook(SiteHook(self._export_own)))

    def is_sliced(self, group: Group) -> bool:
        """Whether ``group`` is never on level 0 as a whole."""
        return group in self._slice_rows

    def slots(self) -> Iterator[Slot]:
        """Every managed parameter, in the model's order."""
        for group in self.groups:
            yield from group.slots

    def key_of(self, group: Group) -> str:
        """The name under which users meet a group: ``'model/layers.3'``."""
        return f"{self.name}/{group.name}"

    # -- modules -----------------------------------------------------------------------------------------------------

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

    def _enter(self, site: Site, module: nn.Module, args: Any, kwargs: Any) -> None:
        if not site.when(args, kwargs):
            return
        entered: list[tuple[Site, Any]] = self._entered.__dict__.setdefault("stack", [])
        with self.lock:
            self.step_control.reached(site.groups[-1])
        slots = [slot for group in site.groups for slot in group.slots]
        with ExitStack() as context:
            context.enter_context(self.used.using(slots))
            if is_transformed():
                context.enter_context(computing_with_views(site.module, slots))
            entered.append((site, context.pop_all()))

    def _leave(self, site: Site, module: nn.Module, args: Any, output: Any) -> None:
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
        """Load ``group`` ahead: now, or, as only the thread that runs the model may, at that one's next use."""
        if threading.get_ident() == self._thread:
            with self.lock:
                self.loading.prefetch(group)
        else:
            self.loading.asked[group] = None

    # -- autograd ----------------------------------------------------------------------------------------------------

    def packing(self) -> AbstractContextManager[Any]:
        """Inside, tensors saved for backward that lie in a loaded buffer are kept as references.

        Hooks that are active already keep everything. Checkpointing's must see the same tensors in the first pass and
        in the recompute, where modules may be called without their hooks: they stay, and get parameters detached.
        """
        if is_transformed():
            return nullcontext()  # there torch allows no such hooks: what is saved keeps its buffer
        active = _top_hooks(True)
        if active is None:
            return torch.autograd.graph.saved_tensors_hooks(self._pack, self._unpack)
        pack, unpack = active
        if pack == self._pack or isinstance(pack, _Detaching):
            return nullcontext()
        return torch.autograd.graph.saved_tensors_hooks(_Detaching(pack), unpack)

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

    def reading(self, slots: Iterable[Slot]) -> AbstractContextManager[None]:
        """Inside, the slots' parameters are plain and loaded; what is written to them in place is written back."""
        return self.used.using(sorted(slots, key=lambda slot: slot.group.index))

    def overwrite(self, slot: Slot, source: torch.Tensor) -> bool:
        """Replace the bytes of a slot that level 0 cannot hold whole; False if it can, and nothing was done."""
        if slot.group not in self._slice_rows:
            return False
        with self.lock:
            self.step_control.wait_for_updates(slot.group)
            self.before_overwrite(slot.group)
            self.worker.submit(write_parameter, self.storage, slot, source.detach().to("cpu")).result()
        return True

    def before_overwrite(self, group: Group) -> None:
        """The weights of ``group`` in storage are about to change: what was loaded of them is stale."""
        state = self.states[group]
        state.version += 1
        if state.last_load is not None:
            state.last_load.wait()

    def _write_back(self, slots: list[Slot]) -> None:
        """The slots' loaded bytes were changed in place: write them to storage, and into their masters."""
        for group in dict.fromkeys(slot.group for slot in slots):
            self.step_control.wait_for_updates(group)  # an update of the step before may still be written
            buffer = self.loading.acquire(group)
            self.stack.write(self.storage.range(group, "weight"), buffer).wait()
            self.weights.unpin(group)
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
        self.host_updates.check_whole()
        self._exported = {}

    def _export_own(self, module: nn.Module, prefix: str, keep_vars: bool) -> None:
        """``module`` is about to save its own parameters, each once; where it fails, later reads are just that.

        The state_dict of a part, which begins without a prefix, reads as any other code does.
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
        """While a state_dict is being made, or if level 0 cannot hold them whole: the slot's bytes on the CPU."""
        if self._exported is None or slot not in self._exporting:
            return self._read_stored(slot) if slot.group in self._slice_rows else None
        self._exporting.discard(slot)
        stamp = self.weights.stamp(slot.group, 0, slot.group.num_bytes)
        known = self._exported.get(slot)
        if known is None or known[0] != stamp:  # tied names get one tensor, so that savers see the tie
            known = self._exported[slot] = (stamp, self._read_stored(slot))
        return known[1]

    # -- optimizer ---------------------------------------------------------------------------------------------------

    def adopt_optimizer(self, optimizer: Any, slots: list[Slot]) -> None:
        """Give ``optimizer`` states for ``slots``: both moments in storage, zero.

        Raises:
            Unsupported: another optimizer has this model already.
            InsufficientMemory: no room for the states; nothing was reserved.
        """
        if self.step_control.source not in (None, optimizer):  # `VGPUAdamW` has released one that it replaces
            raise Unsupported(f"{self.name!r} already has an optimizer: put all its parameters into one VGPUAdamW")
        groups = list(dict.fromkeys(slot.group for slot in slots))
        refuse_unprepared(self.name, groups, self.storage, () if self.level0 is None else self.level0)
        fresh = [pair for pair in moment_ranges(groups) if pair not in self.storage]
        on_host = [group for group in groups if not is_final(optimizer) or self._needs_gradient_on_host(group)]
        sums = [(group, "accumulated") for group in on_host if optimizer.accumulation_steps > 1 and not group.is_fp32]
        self.storage.reserve([(group, "gradient") for group in on_host] + fresh, sums)
        self._zero(fresh)
        self.step_control.source = optimizer

    def optimizers(self) -> list[Any]:
        """Those that have this model's parameters."""
        return [] if self.step_control.source is None else [self.step_control.source]

    def forget_optimizer(self) -> None:
        """As before the first `adopt_optimizer`: moments and step counts are zero. Ranges and gradients stay."""
        self.finish()
        self._zero([pair for pair in moment_ranges(self.groups) if pair in self.storage])
        self.step_control.steps.clear()
        self.step_control.source = None

    def _zero(self, ranges: list[tuple[Group, str]]) -> None:
        for group, kind in ranges:
            self.worker.submit(self.storage.zero, group, kind)
        self.worker.drain()

    def _needs_gradient_on_host(self, group: Group) -> bool:
        """Whether gradients need a range even where every update follows its backward at once."""
        if group in self._slice_rows:
            return True
        if self.level0 is not None and group in self.level0:
            return group in self.level0.deferred
        return (group, "master") not in self.storage

    # -- life --------------------------------------------------------------------------------------------------------

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
            "bytes_by_level": self.storage.plan.bytes_by_level(),
            "formats": of_all(group.formats for group in self.groups).summary(),
            "updated_on_level0": [group.name for group in self.groups if self.level0 and group in self.level0],
            "activations": None if self.activations is None else self.activations.summary(),
            "undo_bytes": self.host_updates.undo_peak_bytes + self.shadows.num_bytes,
        }

    def release(self, device: torch.device) -> None:
        """Give every parameter, its gradient and the optimizer's states memory of their own on ``device``.

        Raises:
            ConfigurationError: another thread is in a forward; nothing was changed.
        """
        self._unwind()  # a forward that an interrupt ended
        used = next((group for group in self.groups if self.weights.is_pinned(group)), None)
        if used is not None:
            raise ConfigurationError(
                f"{self.name!r} is in use: a forward of {used.name!r} runs in another thread; release after its end"
            )
        self.finish()
        self.detach()
        with self.lock:
            self.weights.drop_all()
        if self.step_control.source is not None:
            self.step_control.source.let_go(self, device)
        for slot in self.slots():
            self._make_plain(slot, device)

    @torch.no_grad()
    def _make_plain(self, slot: Slot, device: torch.device) -> None:
        opened = open_weights(self.storage, slot.group)
        values = read_truth(slot, opened).to(device, copy=True)
        close_weights(self.storage, slot.group, opened, store=False)
        gradient = self.gradients.host.read(slot).to(device, values.dtype) if self.gradients.has(slot) else None
        slot.param.__class__ = slot.plain_class
        slot.param.data = values
        slot.param.grad = gradient
        forget_binding(slot.param)

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
            self.step_control.drain()
            self.weights.drop_all()
            self.finalizer()


# -- hooks that keep no model alive ------------------------------------------------------------------------------------


def _refuse_assignment(module: nn.Module, state_dict: Any, prefix: str, metadata: dict[str, Any], *rest: Any) -> None:
    if metadata.get("assign_to_params_buffers", False):
        raise Unsupported(
            "load_state_dict(assign=True) would replace offloaded parameters: use assign=False, which copies"
        )


def _gradient_hook(engine: Offload, slot: Slot) -> Callable[[torch.Tensor], None]:
    """Weak, because these hooks live in C++ where Python's collector does not see the cycle they would close."""
    engine_ref, slot_ref = weakref.ref(engine), weakref.ref(slot)

    def take(param: torch.Tensor) -> None:
        alive, place = engine_ref(), slot_ref()
        if alive is not None and place is not None:
            alive.take_gradient(place)

    return take


def _prefetcher_of(engine: Offload) -> Callable[[Any], bool]:
    """What the stack asks about keys it does not know: group names such as 'model/layers.3', and parameters."""
    engine_ref = weakref.ref(engine)

    def take(item: Any) -> bool:
        alive = engine_ref()
        if alive is None:
            return False
        if isinstance(item, torch.Tensor):
            found = engine_and_slot(item)
            group = found[1].group if found is not None and found[0] is alive else None
        else:
            group = next((group for group in alive.groups if alive.key_of(group) == item), None)
        if group is not None:
            alive.ask(group)
        return group is not None

    return take


class _Detaching:
    """The pack hook ``outer``, which gets parameters as detached tensors."""

    def __init__(self, outer: Callable[[torch.Tensor], Any]) -> None:
        self._outer = outer

    def __call__(self, tensor: torch.Tensor) -> Any:
        return self._outer(tensor.detach() if isinstance(tensor, nn.Parameter) else tensor)
