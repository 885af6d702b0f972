"""How a group comes into use: its updates first, then its load, then its parameters; and what comes next is loaded
ahead.

The model's parameters stay the same objects. Inside `UsedParameters.using` they are `nn.Parameter`s whose data are
views of level 0; outside they are `OffloadedParameter`s over a scalar that takes no memory.
"""

from __future__ import annotations

from collections.abc import Callable, Iterable, Iterator
from contextlib import AbstractContextManager, contextmanager
from typing import Any

import torch

from vblackwell.errors import InsufficientMemory
from vblackwell.memory.cache.stack import VGPUStack
from vblackwell.offload.layout.generation import WEIGHT_PLACES
from vblackwell.offload.layout.groups import TRAINED, Group, Slot
from vblackwell.offload.movement.group_state import GroupStates
from vblackwell.offload.movement.weights import PackedView, WeightStreamer
from vblackwell.offload.parameters import Binding, begin_use, end_use, written_through_data
from vblackwell.offload.storage.storage import Storage

# Groups that are loaded ahead: half of those that the budget holds, within these. Copies of states share the link, and
# a load may wait for a ring of them.
MIN_AHEAD, MAX_AHEAD = 2, 5


class Loading:
    """Brings groups of one model to level 0 in time.

    Args:
        order_loads: called with a group before it is loaded; returns when a load from then on is ordered after its
            updates.
        is_busy: whether that would wait, or roll something back.
    """

    def __init__(
        self, stack: VGPUStack, groups: list[Group], states: GroupStates, storage: Storage, weights: WeightStreamer,
        order_loads: Callable[[Group], None], is_busy: Callable[[Group], bool],
    ) -> None:  # fmt: skip
        self._stack = stack
        self._groups = groups
        self._states = states
        self._storage = storage
        self._weights = weights
        self._order_loads = order_loads
        self._is_busy = is_busy
        largest = max((group.num_bytes for group in groups), default=1) or 1
        self._ahead = max(MIN_AHEAD, min(MAX_AHEAD, weights.budget_bytes // largest // 2))
        if any(group.name.endswith(TRAINED) for group in groups):  # a layer is two groups, one of them small
            self._ahead *= 2
        self.asked: dict[Group, None] = {}  # groups that other threads want loaded ahead

    def acquire(self, group: Group) -> torch.Tensor:
        """The group's bytes on level 0, arrived, not dropped until `release`; the groups after it start to load."""
        self._load(group)
        buffer = self._weights.pin(group)
        try:
            asked, self.asked = self.asked, {}
            for wanted in list(asked):
                self.prefetch(wanted)
            self._prefetch_upcoming()
        except BaseException:
            self._weights.unpin(group)
            raise
        return buffer

    def buffer(self, group: Group) -> torch.Tensor:
        """The bytes of a group that is acquired."""
        return self._weights.buffer(group)

    def release(self, group: Group) -> None:
        """End of `acquire`."""
        self._weights.unpin(group)

    def unpack(self, packed: PackedView) -> torch.Tensor:
        """The tensor that autograd packed, loading its group if it was dropped.

        Raises:
            StaleTensor: the weights were updated since the forward.
        """
        self._order_loads(packed.group)
        self._weights.check_unchanged(packed)
        self._load(packed.group)
        tensor = self._weights.view(packed)
        self._prefetch_upcoming()
        return tensor

    def _load(self, group: Group) -> None:
        weights = self._weights
        again = weights.begin_use(group)
        if self._states[group].is_unsettled and weights.is_loaded(group):
            self._order_loads(group)
        if not weights.is_loaded(group):
            self._stack.count_miss(self._storage.range(group, "weight").level)
            self._order_loads(group)
            if not weights.is_loaded(group):  # by an update that was due, and is now queued
                weights.load(group)
        elif not again:  # backward reads a group weight by weight: that is one use
            self._stack.count_hit(0)
        weights.arrive(group)

    def prefetch(self, group: Group) -> bool:
        """Start loading ``group`` if that costs nothing that is needed sooner; False if it was not possible. Never
        blocks.
        """
        weights = self._weights
        if weights.is_loaded(group):
            return True
        if self._is_busy(group):
            return False  # an update is on its way: loading now would wait for it, or be stale
        if not weights.make_room_for_later(group):
            return False
        try:
            self._order_loads(group)
            if not weights.is_loaded(group):
                weights.load(group)
        except InsufficientMemory:  # somebody else's keys took the room between the question and the load
            return False
        return True

    def _prefetch_upcoming(self) -> None:
        weights = self._weights
        if weights.frozen:
            self._prefetch_frozen()
            return
        for index in weights.trace.upcoming(self._ahead):
            if not self.prefetch(self._groups[index]):
                return

    def _prefetch_frozen(self) -> None:
        """The next copies are begun whatever pass they belong to, because no update lies between passes: so the link
        always works.
        """
        weights, begun = self._weights, 0
        if weights.all_loaded:
            return
        for index in weights.trace.upcoming(len(self._groups), wrap=True):
            group = self._groups[index]
            if weights.is_loaded(group) or group.num_bytes > weights.budget_bytes:
                continue
            if not self.prefetch(group):
                return
            begun += 1
            if begun == WEIGHT_PLACES:
                return


@contextmanager
def _unseen() -> Iterator[None]:
    """Inside, the caller's modes and transforms see no operators: selective checkpointing counts those of both passes,
    and loads differ; torch.func would wrap every tensor that is made.
    """
    torch_c: Any = torch._C
    with torch_c._DisableTorchDispatch(), torch_c._DisableFuncTorch():
        yield


class UsedParameters:
    """Which parameters of one model are in use, and by how many.

    Args:
        binding: what parameters that are not in use ask for their bytes.
        lock: held while what is loaded changes.
        gradient_hook: makes the hook that takes a parameter's gradient.
        write_back: carries to storage what was written to parameters in place.
    """

    def __init__(
        self, binding: Binding, device: torch.device, lock: AbstractContextManager[Any], loading: Loading,
        gradient_hook: Callable[[Slot], Callable[[torch.Tensor], None]], write_back: Callable[[list[Slot]], None],
    ) -> None:  # fmt: skip
        self._binding = binding
        self._device = device
        self._lock = lock
        self._loading = loading
        self._gradient_hook = gradient_hook
        self._write_back = write_back
        self._pins: dict[Slot, int] = {}
        self._seen_versions: dict[Slot, int] = {}
        self._placeholders: dict[torch.dtype, torch.Tensor] = {}
        self._hooks: dict[Slot, Any] = {}

    @contextmanager
    def using(self, slots: Iterable[Slot]) -> Iterator[None]:
        """Inside, the slots' groups are loaded, their parameters plain, and saved tensors packed."""
        taken: list[Slot] = []
        groups: list[Group] = []
        autocast_cache = torch.is_autocast_cache_enabled()
        try:
            with self._lock, _unseen():
                for slot in slots:
                    if not groups or slot.group is not groups[-1]:
                        self._loading.acquire(slot.group)
                        groups.append(slot.group)
                    self._pin(slot)
                    taken.append(slot)
            # The cache is keyed by parameter and would hold the casts of every group until the context ends.
            torch.set_autocast_cache_enabled(False)
            with self._binding.packing():
                yield
        finally:
            torch.set_autocast_cache_enabled(autocast_cache)
            with self._lock, _unseen():
                try:
                    self._write_back([slot for slot in taken if self._pins[slot] == 1 and self._was_written(slot)])
                finally:
                    for slot in taken:
                        self._unpin(slot)
                    for group in groups:
                        self._loading.release(group)

    def _pin(self, slot: Slot) -> None:
        pins = self._pins.get(slot, 0)
        self._pins[slot] = pins + 1
        if pins == 0:
            begin_use(slot.param, slot.plain_class, slot.view(self._loading.buffer(slot.group)))
            if slot.param.requires_grad and slot not in self._hooks:
                hook = self._gradient_hook(slot)
                self._hooks[slot] = slot.param.register_post_accumulate_grad_hook(hook)
            self._seen_versions[slot] = slot.param._version

    def _was_written(self, slot: Slot) -> bool:
        """Whether the plain parameter was changed in place (by its module's forward, or by a call outside)."""
        return slot.param._version != self._seen_versions[slot] or written_through_data(slot.param)

    def _unpin(self, slot: Slot) -> None:
        self._pins[slot] -= 1
        if self._pins[slot] == 0:
            self.hide(slot)

    def hide(self, slot: Slot) -> None:
        """Make the slot's parameter an `OffloadedParameter`."""
        placeholder = self._placeholders.get(slot.dtype)
        if placeholder is None:
            filling = float("nan") if slot.dtype.is_floating_point else 0
            with torch.inference_mode(False):
                placeholder = torch.full((), filling, dtype=slot.dtype, device=self._device)
            self._placeholders[slot.dtype] = placeholder
        end_use(slot.param, placeholder.expand(slot.shape), self._binding, slot)

    def remove_hooks(self) -> None:
        """Nobody takes gradients any more."""
        for handle in self._hooks.values():
            handle.remove()
        self._hooks.clear()
