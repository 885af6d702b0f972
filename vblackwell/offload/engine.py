"""Ties one model to one stack by hooks; nothing of the model is replaced.

A forward pre-hook on each module that owns parameters loads its group and makes its parameters plain, a forward hook
undoes that, and a hook on each parameter takes its gradient. Meanwhile, saved tensors that lie in a loaded buffer are
packed as (group, view) and read again when backward needs them; hooks that were active already keep everything else.
"""

import threading
import time
import weakref
from collections.abc import Callable, Iterable, Iterator, Sequence
from contextlib import AbstractContextManager, ExitStack, nullcontext
from dataclasses import replace
from functools import partial
from typing import Any

import torch
from torch import Tensor, nn

from vblackwell.errors import ConfigurationError, InsufficientMemory, Unsupported
from vblackwell.kernels.pointwise.layer_graphs import LayerGraphs
from vblackwell.memory.cache.stack import VGPUStack
from vblackwell.nn.decoder.checkpoint import second_pass_under, top_hooks
from vblackwell.offload.bound import BoundWeights, Entered, SiteHooks
from vblackwell.offload.host_share import HostShare
from vblackwell.offload.layout.forecast import FastestUpdates, fastest_updates
from vblackwell.offload.layout.groups import Group, Site, Slot, formats_summary, moment_ranges
from vblackwell.offload.layout.placement import (
    StreamedPlacement,
    StreamingOptions,
    place_streamed,
    refuse_slices_on_disk,
)
from vblackwell.offload.movement.activations import ActivationStore
from vblackwell.offload.movement.state import GroupState, Level0Budget, Shared, Worker, reserve
from vblackwell.offload.movement.weights import PackedView, SavedTensor
from vblackwell.offload.parameters import (
    AfterForward,
    BeforeForward,
    SiteHook,
    UsedParameters,
    computing_with_views,
    engine_and_slot,
    is_transformed,
    make_plain,
    refuse_compiled,
    refuse_wrapping,
    weakly,
)
from vblackwell.offload.resident import Resident
from vblackwell.offload.sliced import SlicedLeaf, swap_class
from vblackwell.offload.step import StepControl
from vblackwell.offload.storage import masters
from vblackwell.offload.storage.initialize import ModelSource, move_buffers
from vblackwell.offload.storage.storage import Storage, spaces_of


def locked(engines: Iterable["Offload"]) -> ExitStack:
    """The locks of the stacks of ``engines``, to be left; always taken in one order."""
    with ExitStack() as held:
        for lock in sorted({engine.lock for engine in engines}, key=id):
            held.enter_context(lock)
        return held.pop_all()


def offload_of(model: nn.Module) -> "Offload | Resident | None":
    """The engine that holds ``model``'s parameters; None for a plain module."""
    for param in model.parameters():
        engine = param.__dict__.get("_vb_binding") or param.__dict__.get("_vb_resident")
        if engine is not None:
            return engine
    return None


def stream(
    model: nn.Module,
    stack: VGPUStack,
    name: str,
    options: StreamingOptions,
    source: ModelSource,
    store: ActivationStore | None = None,
    measured: Callable[[], tuple[float, float]] | None = None,
) -> "Offload":
    """Write ``model`` to the levels below level 0, and let it stream; errors leave it as it was. Arguments and errors
    as `place_streamed`; ``store``: where checkpoints' inputs wait for backward, None: on level 0; ``measured``: as
    `fastest_updates` has it, None: no GPU.
    """
    refuse_compiled(model)
    levels, updates = spaces_of(stack), FastestUpdates({}, 0.0, 0.0, options.update)
    if measured is not None:
        updates = fastest_updates(model, levels, options, measured)
    found = place_streamed(model, levels, replace(options, update=updates(1, True)))
    storage = Storage(stack, name, found.storage)
    plain: list[tuple[Tensor, Tensor, type]] = []
    try:
        refuse_slices_on_disk(found.slice_rows, storage.plan)
        for group in found.groups:
            opened = masters.open_weights(storage, group, load=False)
            for slot in group.slots:
                source.write(slot, opened)
            masters.store_weights(storage, group, opened)
        source.take_over(found.groups)
        move_buffers(model, stack.level0_device)
        params = [slot.param for group in found.groups for slot in group.slots]
        plain = [(param, param.data, type(param)) for param in params]
        return Offload(model, name, found, storage, store, updates)
    except BaseException:
        for param, data, kind in plain:
            make_plain(param, kind, data)
        source.give_back()
        storage.close()
        raise


def _close_parts(storage: Storage, worker: Worker, prefetcher: Any, store: ActivationStore | None) -> None:
    """Called by `Offload.close`, or when the model is collected: must not refer to it."""
    if store is not None:
        store.close()
    worker.close(storage.close)
    storage.stack.prefetchers.remove(prefetcher)


class Offload:
    """The engine of one streamed model, whose weights and masters ``storage`` holds already. Made by `stream`; users
    meet it through `offload_of(model)`.
    """

    placement = "streamed"

    def __init__(
        self,
        model: nn.Module,
        name: str,
        found: StreamedPlacement,
        storage: Storage,
        activations: ActivationStore | None,
        updates: FastestUpdates,
    ) -> None:
        self.model, self.name = model, name
        self.stack = stack = storage.stack
        self.groups = found.groups
        self.storage = storage
        self.device = stack.level0_device
        self.activations = activations
        self.host_share, self._placed = HostShare(updates, stack.host_updates), found
        self._slice_rows = found.slice_rows
        self.worker = Worker(name)
        self.states = {group: GroupState() for group in found.groups}
        self.budget = budget = Level0Budget(stack, storage)
        self.lock, self.bound = budget.lock, BoundWeights(self)
        shared = Shared(name, stack, found.groups, storage, self.worker, self.states, budget)
        self.step_control = control = StepControl(shared, found)
        budget.drop_weights = weakly(self.bound.drop_one)
        self.weights, self.gradients = control.weights, control.gradients
        self.host_updates, self.level0 = control.host_updates, control.level0
        self.used = UsedParameters(self, weakly(self._take_gradient))
        if control.graphs is not None:
            control.graphs.places = weakly(self._places_of_gradients)
        self.handles: list[Any] = []
        self.site_hooks = SiteHooks(self._enter, self._leave)
        self.entered = Entered()
        self._thread = threading.get_ident()
        self._backward_ends: set[int] = set()
        self._exported: dict[Slot, tuple[tuple[int, int], Tensor]] | None = None
        self._exporting: set[Slot] = set()
        self._sliced: list[nn.Module] = []
        refuse_wrapping()
        try:
            self._take_modules(found.sites, shared)
        except BaseException:
            self.detach()
            raise
        if activations is not None:
            activations.leave_out(self.weights, weakly(self._free_spare))
        prefetcher = weakly(self._prefetch)
        stack.prefetchers.append(prefetcher)
        self.finalizer = weakref.finalize(model, _close_parts, storage, self.worker, prefetcher, activations)
        self.finalizer.atexit = False  # at exit the stack closes itself

    def _take_modules(self, sites: list[Site], shared: Shared) -> None:
        """Placeholders in place of parameters, and hooks that bring them."""
        keep = self.handles.append  # each at once: where a later one fails, `detach` removes it
        model, outer = self.model, {self.model, *self.model.children()}
        with torch.inference_mode(False):
            for slot in self.slots():
                self.used.hide(slot)
        for site in sites:
            if (group := site.groups[0]) in self._slice_rows:
                swap_class(site.module, SlicedLeaf(shared, group, self._slice_rows[group], self.step_control))
                self._sliced.append(site.module)
            else:
                self.site_hooks.add(site, keep if site.module in outer else None)
        keep(model.register_forward_pre_hook(BeforeForward(self._begin_forward), prepend=True, with_kwargs=True))
        keep(model.register_forward_hook(AfterForward(self._end_forward), always_call=True))
        keep(model.register_state_dict_post_hook(SiteHook(self._end_export)))
        keep(model.register_load_state_dict_pre_hook(SiteHook(_refuse_assignment)))
        for module in model.modules():
            keep(module.register_state_dict_pre_hook(SiteHook(self._export_own)))

    def _free_spare(self) -> bool:
        """See `StepControl.free_spare`."""
        with self.lock:
            return self.step_control.free_spare()

    def is_sliced(self, group: Group) -> bool:
        """Whether ``group`` is never on level 0 as a whole."""
        return group in self._slice_rows

    def slots(self) -> Iterator[Slot]:
        for group in self.groups:
            yield from group.slots

    def key_of(self, group: Group) -> str:
        """The name under which users meet a group: ``'model/layers.3'``."""
        return f"{self.name}/{group.name}"

    # -- modules -----------------------------------------------------------------------------------------------------

    def _begin_forward(self, module: nn.Module, args: Any, arguments: Any) -> None:
        if torch._C._current_graph_task_id() == -1:  # not a recompute
            self._thread = threading.get_ident()
            self._unwind()
            self.budget.last_used = time.monotonic()
            if self.bound.wanted:
                self.bound.enter()
                self.entered.forward.callback(self.bound.leave)
                if self.bound:
                    return
            with self.lock:
                self._end_export()
                self.weights.trace.begin_pass()
                self.step_control.begin_forward((args, arguments), training=module.training)
                self._divide_anew()
            if torch.is_grad_enabled():
                if (graphs := self.step_control.graphs) is not None:
                    self.entered.forward.enter_context(graphs.used())
                if self.activations is not None:
                    self.entered.forward.enter_context(self.activations.forward_of(self.model))

    def _end_forward(self, module: nn.Module, args: Any, output: Any) -> None:
        if torch._C._current_graph_task_id() == -1:
            self.entered.forward.close()

    def _enter(self, site: Site, module: nn.Module, args: Any, kwargs: Any) -> None:
        if self.bound or not site.when(args, kwargs):
            return
        if self.level0 is not None:
            with self.lock:
                self.level0.advance(site.groups[-1])
        with ExitStack() as context:
            context.enter_context(self.used.using(site.slots))
            if torch._C._current_graph_task_id() == -1:
                context.enter_context(second_pass_under(partial(self.used.using, site.slots), module))
            if is_transformed():
                context.enter_context(computing_with_views(site.module, site.slots))
            self.entered.sites.append((site, context.pop_all().close))

    def _leave(self, site: Site, module: nn.Module, args: Any, output: Any) -> None:
        entered = self.entered.sites
        if entered and entered[-1][0] is site:  # not so where the way in failed: `_leave` is called even then
            entered.pop()[1]()

    def _unwind(self) -> None:
        """Leave what an interrupted forward entered: torch calls no hook after a KeyboardInterrupt."""
        while self.entered.sites:  # first: they put back what the forward has put there
            self.entered.sites.pop()[1]()
        self.entered.forward.close()
        self.bound.unwind()

    def _prefetch(self, item: Any) -> bool:
        """Load what the stack was asked for, a name such as 'model/layers.3' or a parameter, if it is this model's:
        now, or, as only the thread that runs the model may, at that one's next use.
        """
        if isinstance(item, Tensor):
            found = engine_and_slot(item)
            group = found[1].group if found is not None and found[0] is self else None
        else:
            group = next((group for group in self.groups if self.key_of(group) == item), None)
        if group is not None and threading.get_ident() == self._thread:
            with self.lock:
                self.step_control.prefetch(group)
        elif group is not None:
            self.weights.asked[group] = None
        return group is not None

    # -- autograd ----------------------------------------------------------------------------------------------------

    def packing(self) -> AbstractContextManager[Any]:
        """Inside, tensors saved for backward that lie in a loaded buffer are kept as references.

        Hooks that are active already keep everything; checkpointing's must see the same tensors in the first pass and
        in the recompute, where modules may be called without their hooks: they stay, and get parameters detached.
        """
        if is_transformed():
            return nullcontext()  # there torch allows no such hooks: what is saved keeps its buffer
        active = top_hooks(True)
        if active is None:
            return torch.autograd.graph.saved_tensors_hooks(self._pack, self._unpack)
        pack, unpack = active
        if pack == self._pack or getattr(pack, "func", None) is _pack_detached:
            return nullcontext()
        return torch.autograd.graph.saved_tensors_hooks(partial(_pack_detached, pack), unpack)

    def _pack(self, tensor: Tensor) -> SavedTensor | PackedView:
        packed = self.weights.pack(tensor)
        return packed or SavedTensor(tensor if tensor.grad_fn is None else tensor.detach(), tensor._version)

    def _unpack(self, packed: SavedTensor | PackedView) -> Tensor:
        if isinstance(packed, SavedTensor):
            return packed.unchanged()
        with self.lock:
            return self.step_control.unpack(packed)

    def _places_of_gradients(self, params: Sequence[Tensor | None]) -> Sequence[Tensor | None]:
        """Where gradients of the used ``params`` of one group, about to be made, are taken without a copy; empty where
        somebody else sees them, or they are not ours.
        """
        slots: list[Slot | None] = [None if param is None else vars(param).get("_vb_slot") for param in params]
        ours = [slot for slot in slots if slot is not None and slot.group in self.states]
        seen = [p for p in params if p is not None and (p._backward_hooks or len(p._post_accumulate_grad_hooks) != 1)]
        if seen or not ours or len(ours) < len(slots):
            return ()
        with self.lock:
            return self.step_control.places_of_gradients(ours)

    def _take_gradient(self, param: Tensor) -> None:
        slot: Slot = param.__dict__["_vb_slot"]
        task = torch._C._current_graph_task_id()
        if task not in self._backward_ends:
            self._backward_ends.add(task)
            torch.autograd.Variable._execution_engine.queue_callback(lambda: self._end_backward(task))
        try:
            with self.lock:
                self.step_control.take_gradient(slot)
        except BaseException:
            with torch._C.DisableTorchFunctionSubclass():
                param.grad = None  # which may not be taken, and the next backward would add to it
            raise

    def _end_backward(self, task: int) -> None:
        self._backward_ends.discard(task)
        with self.lock:
            self.step_control.finish_backward()

    # -- what parameters ask for ------------------------------------------------------------------------------------

    def reading(self, slots: Iterable[Slot]) -> AbstractContextManager[None]:
        """Inside, the slots' parameters are plain and loaded; what is written to them in place is written back."""
        return self.used.using(sorted(slots, key=lambda slot: slot.group.index))

    def overwrite(self, slot: Slot, source: Tensor) -> bool:
        """Replace the bytes of a slot that level 0 cannot hold whole; False if it can, and nothing was done."""
        if slot.group not in self._slice_rows:
            return False
        with self.lock:
            self.step_control.wait_for_updates(slot.group)
            self.before_overwrite(slot.group)
            self.worker.submit(masters.write_parameters, self.storage, [slot], source.detach().to("cpu")).result()
        return True

    def before_overwrite(self, group: Group) -> None:
        """The weights of ``group`` in storage are about to change: what was loaded of them is stale."""
        state = self.states[group]
        state.version += 1
        if state.last_load is not None:
            state.last_load.wait()

    def write_back(self, slots: list[Slot]) -> None:
        """The slots' loaded bytes were changed in place: write them to storage, and into their masters."""
        for group in dict.fromkeys(slot.group for slot in slots):
            self.step_control.wait_for_updates(group)  # an update of the step before may still be written
            buffer = self.step_control.acquire(group)
            try:
                self.stack.write(self.storage.range(group, "weight"), buffer).wait()
            finally:
                self.weights.unpin(group)
            changed = [slot for slot in slots if slot.group is group]
            self.worker.submit(masters.write_parameters, self.storage, changed).result()

    def _read_stored(self, slot: Slot) -> Tensor:
        """A copy of a slot's compute weight on the CPU, after every update whose step came."""
        self.step_control.wait_for_updates(slot.group)
        self.worker.drain()  # ranges may be staged, and staging is the worker's
        return slot.view(self.storage.open(slot.group, "weight")).clone(memory_format=torch.preserve_format)

    # -- state_dict --------------------------------------------------------------------------------------------------

    def _export_own(self, module: nn.Module, prefix: str, keep_vars: bool) -> None:
        """``module`` is about to save its own parameters, each once; a part's state_dict, which begins without a
        prefix, reads as any other code does.
        """
        if module is self.model:
            self.finish()
            self.worker.check_whole()
            self._exported = {}
        elif not prefix:
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

    def export(self, slot: Slot) -> Tensor | None:
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

    def share_by(self, updates: FastestUpdates) -> None:
        """Before there is an optimizer: let ``updates`` choose the host's share, as they did in the plan whose share
        the model was placed with, and again by the rates of steps."""
        self.host_share = HostShare(updates, self.stack.host_updates)

    def adopt_optimizer(self, optimizer: Any, slots: list[Slot]) -> None:
        """Give ``optimizer`` states for ``slots``: moments in storage, zero; all or nothing.

        Raises:
            Unsupported: another optimizer has this model already. InsufficientMemory: no room for the states.
        """
        if self.step_control.source not in (None, optimizer):  # `VGPUAdamW` has released one that it replaces
            raise Unsupported(f"{self.name!r} already has an optimizer: put all its parameters into one VGPUAdamW")
        wanted = {slot.group for slot in slots}
        groups = [group for group in self.groups if group in wanted]
        masters.refuse_unprepared(self.name, groups, self.storage, () if self.level0 is None else self.level0.groups)
        fresh = [pair for pair in moment_ranges(groups) if pair not in self.storage]
        # What parameters that are added later will need, too: host memory through which that spills is not given back.
        rest = [group for group in self.groups if group.trainable() and group not in groups]
        control, place, micro_batches = self.step_control, None, optimizer.accumulation_steps
        undo = optimizer.undo or not optimizer.update_in_backward
        if self.host_share.place is None:
            place = self.host_share.first(micro_batches, optimizer.undo)  # maybe seconds
        with self.lock:
            before = control.found
            for found in [before] if place is None else [before.updated(place), before]:
                control.divide(found)
                now, then = (found.gradient_ranges(each, micro_batches, undo=undo) for each in (groups, rest))
                later = [pair for pair in then + moment_ranges(rest) if pair not in self.storage]
                incoming_bytes = found.incoming_bytes(micro_batches, undo=undo)
                try:
                    reserve(partial(self.storage.reserve, now + fresh, later, incoming_bytes), self.budget.free_host)
                    break
                except InsufficientMemory:  # groups that are updated on level 0 may need more of RAM
                    if found is before:
                        raise
        self._zero([pair for pair in fresh if not self.storage.range(*pair).extent.born_zero])
        if self.level0 is not None and self.step_control.source is None:
            self.level0.compile_ahead()
        self.step_control.source = optimizer
        if place is not None:  # 'auto': as placed, where RAM has no room for another
            self.host_share.moved("auto" if control.found is before else place, control.num_steps)

    def _divide_anew(self) -> None:
        """Between two steps, where the last ones say so: run AdamW elsewhere."""
        control, share = self.step_control, self.host_share
        share.begin(control.num_steps)
        if control.num_steps >= share.next_look and control.between_steps and self._placed.on_level0:
            source, clips = control.source, control.clipping.expected
            place = share.again(control.num_steps, source.accumulation_steps, source.undo, clips)
            if place is not None:
                control.divide_anew(self._placed.updated(place))
                share.moved(place, control.num_steps)

    def optimizers(self) -> list[Any]:
        return [] if self.step_control.source is None else [self.step_control.source]

    def forget_optimizer(self) -> None:
        """As before the first `adopt_optimizer`: moments and step counts are zero. Ranges and gradients stay."""
        self.finish()
        self._zero([pair for pair in moment_ranges(self.groups) if pair in self.storage])
        self.step_control.steps.clear()
        self.step_control.source = None

    def _zero(self, ranges: list[tuple[Group, str]]) -> None:
        tasks = [self.worker.submit(self.storage.zero, group, kind) for group, kind in ranges]
        if tasks:
            self.worker.drain()

    # -- life --------------------------------------------------------------------------------------------------------

    def finish(self) -> None:
        """Wait until every update whose step came is in storage; undo the others."""
        with self.lock:
            self.step_control.finish_backward()
            self.step_control.roll_back()
            self.step_control.scale_stored()
            self.worker.drain()
            if self.level0 is not None:
                self.level0.drain()
            self.step_control.settle(self.groups)
            self.gradients.in_flight.sweep()

    @property
    def updates_on_host(self) -> bool:
        """Whether the CPU's AdamW has something to do."""
        here = () if self.level0 is None else self.level0.groups
        return any(group.trainable() and group not in here for group in self.groups)

    def summary(self) -> dict[str, Any]:
        """Where the model's bytes are, for reports: kinds by level, groups, and level 0's budget for weights."""
        graphs = self.step_control.graphs or LayerGraphs()
        return {
            "placement": self.placement,
            "groups": len(self.groups),
            "largest_group_bytes": max((group.num_bytes for group in self.groups), default=0),
            "weights_budget_bytes": self.weights.budget_bytes,
            "ring_bytes": self.step_control.found.ring_bytes,
            "sliced": sorted({module._vb_leaf.group.name for module in self._sliced}),  # type: ignore[union-attr]
            "bytes_by_level": self.storage.plan.bytes_by_level(),
            "formats": formats_summary(self.groups),
            "updated_on_level0": [group.name for group in self.groups if self.level0 and group in self.level0.groups],
            "activations": None if self.activations is None else self.activations.summary(),
            "updated_early": None if (early := self.step_control.early_groups) is None else [g.name for g in early],
            "undo_bytes": self.step_control.shadow_bytes,
            "graphs": graphs.about,
            "graph_bytes": graphs.peak_bytes,
            "reserved_before_graphs": graphs.reserved_before,
            "host_share": self.host_share.about,
            "steps": self.step_control.num_steps,
            "rolled_back_steps": self.step_control.num_rolled_back,
        }

    @torch.no_grad()
    def release(self, device: torch.device) -> None:
        """Give every parameter, its gradient and its states separate memory on ``device``; ConfigurationError, and
        nothing changed, if another thread is in a forward.
        """
        self._unwind()  # a forward that an interrupt ended
        self.bound.release()
        for group in self.groups:
            if self.weights.is_pinned(group):
                raise ConfigurationError(
                    f"{self.name!r} is in use: a forward of {group.name!r} runs in another thread; release after its "
                    "end"
                )
        self.finish()
        self.detach()
        with self.lock:
            self.weights.drop_all()
        if self.step_control.source is not None:
            self.step_control.source.let_go(self, device)
        for slot in self.slots():
            values = masters.read_truth(slot, masters.open_weights(self.storage, slot.group)).to(device, copy=True)
            gradient = self.gradients.read(slot, values.dtype).to(device) if self.gradients.has(slot) else None
            make_plain(slot.param, slot.plain_class, values)
            slot.param.grad = gradient

    def detach(self) -> None:
        """Remove every hook; parameters keep their placeholders (the caller gives them data)."""
        for handle in [*self.handles, *self.used.hooks.values()]:
            handle.remove()
        self.handles.clear()
        self.site_hooks.remove()
        self.used.hooks.clear()
        for module in self._sliced:
            swap_class(module, None)
        self._sliced.clear()
        if self.step_control.graphs is not None:
            self.step_control.graphs.drop()

    def close(self) -> None:
        """Give everything back to the stack. Idempotent. Parameters that were not released stay unreadable."""
        self._unwind()
        self.bound.release()
        self.detach()
        try:
            with self.lock:
                if self.level0 is not None:
                    self.level0.drain()
                self.weights.drop_all()
        finally:
            self.finalizer()  # without the lock: a forward that packs holds the activations' and wants this one


# -- hooks that keep no model alive ------------------------------------------------------------------------------------


def _refuse_assignment(module: nn.Module, state_dict: Any, prefix: str, metadata: dict[str, Any], *rest: Any) -> None:
    if metadata.get("assign_to_params_buffers", False):
        raise Unsupported(
            "load_state_dict(assign=True) would replace offloaded parameters: use assign=False, which copies"
        )


def _pack_detached(pack: Callable[[Tensor], Any], tensor: Tensor) -> Any:
    """What ``pack`` makes of a tensor; it gets parameters detached."""
    return pack(tensor.detach() if isinstance(tensor, nn.Parameter) else tensor)
