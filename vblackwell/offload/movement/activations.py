"""Boundary activations in host memory: what a checkpointed layer keeps for backward leaves level 0 and is back in time.

`saved_tensors_hooks` around each checkpoint inside `ActivationStore.forward_of` catch its inputs; hooks that were
active before are asked first, and a recompute is left alone. The newest `NEWEST` boundaries stay on level 0, and what
stayed in the last forward is not even copied in the next. The others are let go after the computing stream was made to
wait for their copies, so the peak of memory does not depend on how far the host runs ahead. Autograd asks in the
reverse order: each answer starts the loads of the boundaries before it into fresh buffers of the computing stream's
pool. It holds the only strong reference to what it will ask for, so a graph that dies, after backward or by an
interrupt, gives its buffers back by reference counts; with ``retain_graph`` they are read again.
"""

import itertools
import threading
import weakref
from collections import deque
from collections.abc import Callable, Iterator
from contextlib import AbstractContextManager, contextmanager, nullcontext
from functools import partial
from operator import attrgetter
from typing import Any, NamedTuple

import torch
from torch import Tensor
from torch.multiprocessing.reductions import StorageWeakRef

from vblackwell.errors import ConfigurationError, InsufficientMemory, StaleTensor
from vblackwell.memory.cache.stack import Reservation, VGPUStack
from vblackwell.memory.level import Transfer
from vblackwell.memory.transfer import copy_streams, current_stream, no_inference_mode
from vblackwell.nn.decoder.checkpoint import inputs_saved_under, top_hooks
from vblackwell.offload.layout.placement import NEWEST, checkpoints_ahead
from vblackwell.offload.movement.state import FreeSome, Stalls, reserve
from vblackwell.offload.movement.weights import SavedTensor, WeightStreamer
from vblackwell.units import KiB, MiB, align_up, format_bytes

_size = attrgetter("num_bytes")


class HostBuffers:
    """Ranges of the first level in RAM below level 0, taken once and used again. The owner has a lock."""

    def __init__(self, stack: VGPUStack, name: str) -> None:
        below = list(enumerate(stack.levels))[1:]
        level = next((i for i, each in below if each.device is not None and each.device.type == "cpu"), None)
        if level is None:
            raise ConfigurationError(
                f"{name!r} needs host memory, and the stack has no level in RAM below level 0: add a 'cpu' level"
            )
        self.level = level
        self.free_some: FreeSome = lambda: False  # gives RAM that is not in use back to its level
        self._stack = stack
        self._name = name
        # Of each range the last copies into and out of it, which may still be under way.
        self.pending: dict[Reservation, list[Transfer]] = {}
        self._free: list[Reservation] = []
        self._serial = itertools.count()
        device = stack.level0_device
        self._outward = copy_streams(device).d2h if device.type == "cuda" else None  # where level 0's bytes leave
        # The first range of a level may start CUDA, to pin it. That must not happen in the middle of a checkpoint,
        # which has saved the state of the generators that existed when it began.
        stack.unreserve(stack.reserve(f"{name}#first", 1, level))

    @property
    def num_bytes(self) -> int:
        return sum(map(_size, self.pending))

    def take(self, num_bytes: int) -> Reservation:
        """A range of at least ``num_bytes``, ready for `VGPUStack.write`; raises InsufficientMemory."""
        # In steps of an eighth of the power of two below it, at least of a page.
        wanted = align_up(num_bytes, max(4 * KiB, 1 << max(0, num_bytes.bit_length() - 4)))
        fitting = [buffer for buffer in self._free if buffer.num_bytes >= wanted]
        if fitting:
            buffer = min(fitting, key=_size)  # of equal ones the first: it has been free longest
            self._free.remove(buffer)
            for transfer in self.pending[buffer]:
                transfer.wait_on(self._outward)
            self.pending[buffer] = []
            return buffer
        if self._free:
            self._end(max(self._free, key=_size))
        name = f"{self._name}#{next(self._serial)}"
        try:
            buffer = reserve(lambda: self._stack.reserve(name, wanted, self.level), self.free_some)
        except InsufficientMemory as error:
            level = self._stack.levels[self.level]
            raise InsufficientMemory(
                f"{self._name!r} holds {format_bytes(self.num_bytes)} of host memory and needs {format_bytes(wanted)} "
                f"more, but {level.name} has {format_bytes(level.free_bytes)} free: raise host_memory (the capacity of "
                "the level), use a smaller batch, or, where a model's states spill to a disk, keep RAM free of them "
                "with activation_bytes=",
                needed_bytes=wanted,
                available_bytes=level.free_bytes,
            ) from error
        self.pending[buffer] = []
        return buffer

    def give(self, buffer: Reservation) -> None:
        """End of `take`. Its pending copies need not be over."""
        self._free.append(buffer)

    def close(self) -> None:
        """Wait for all copies, also those of buffers in use, and give every range back. Idempotent."""
        for buffer in list(self.pending):
            self._end(buffer)

    def _end(self, buffer: Reservation) -> None:
        for transfer in self.pending[buffer]:
            transfer.wait()
        self._stack.unreserve(buffer)
        del self.pending[buffer]
        if buffer in self._free:
            self._free.remove(buffer)


class Load(NamedTuple):
    """A copy on its way to level 0: its destination, and the CUDA stream from whose pool that is (None on the CPU)."""

    transfer: Transfer
    flat: Tensor
    stream: torch.cuda.Stream | None


Dropped = deque[tuple[Reservation, Load | None]]


class Boundary:
    """One tensor that left level 0, or may leave. Only tickets refer to it strongly; ``dropped`` notes its death.

    Its address keeps the distance from an aligned one (``lead_bytes``), by which kernels choose. The ``span_bytes``
    from its first to its last element travel.
    """

    def __init__(self, tensor: Tensor, dropped: Dropped) -> None:
        self.resident: Tensor | None = tensor.detach()  # while it is on level 0
        self.version = tensor._version
        self.spoiled = False  # it was written to before its copy was over
        self.lead_bytes = tensor.data_ptr() % (512 if tensor.device.type == "cuda" else 64)  # torch's allocators align
        self.span_bytes = span_bytes(tensor)
        self.shape, self.stride, self.dtype = tensor.shape, tensor.stride(), tensor.dtype
        self.buffer: Reservation | None = None  # where it is in host memory
        self.sent: Transfer | None = None  # the copy there
        self.load: Load | None = None  # the copy to level 0, until backward asks
        self.saves, self.calls, self.last_call = 0, 0, -1  # how often, by how many checkpoints, the last of them
        self._dropped = dropped
        self._identity = StorageWeakRef(tensor.untyped_storage())  # so that no other storage gets this one's address

    def view(self, flat: Tensor) -> Tensor:
        """The tensor over ``flat``, uint8, which has the span after ``lead_bytes``."""
        start = (flat.storage_offset() + self.lead_bytes) // self.dtype.itemsize
        tensor = torch.empty(0, dtype=self.dtype, device=flat.device)
        return tensor.set_(flat.untyped_storage(), start, self.shape, self.stride)

    def __del__(self) -> None:
        # In any thread and at any moment, even while the store's lock is held: so it only leaves a note.
        if self.buffer is not None:
            self._dropped.append((self.buffer, self.load))


class Ticket:
    """What autograd holds instead of a tensor, each time that it was saved; ``call`` numbers the checkpoints."""

    def __init__(self, boundary: Boundary, call: int, tape: list[weakref.ref["Ticket"]]) -> None:
        self.boundary = boundary
        self.call = call
        self._tape = tape
        self._position = len(tape)
        tape.append(weakref.ref(self))

    def before(self, calls: int) -> list["Ticket"]:
        """What the last ``calls`` checkpoints before this one saved in the same forward and is held; last first."""
        held = (self._tape[position]() for position in range(self._position - 1, -1, -1))
        others = (ticket for ticket in held if ticket is not None and ticket.call != self.call)
        by_call = itertools.groupby(others, key=lambda ticket: ticket.call)
        return [ticket for _, saved in itertools.islice(by_call, calls) for ticket in saved]


def span_bytes(tensor: Tensor) -> int:
    """Bytes from the first to the last element in memory; 0 without elements."""
    reach = sum((size - 1) * stride for size, stride in zip(tensor.shape, tensor.stride(), strict=True))
    return (1 + reach) * tensor.element_size() if tensor.numel() else 0


SHARED_CALLS = 3  # what so many checkpoints keep (rotary tables, an encoder's output) is alive anyway
SMALLEST_BYTES = 4 * MiB  # the link needs so much at a time to come near its rate
HOLES = 2  # a strided tensor may span so many times its bytes


class ActivationStore:
    """The boundary activations of whatever runs forward inside `forward_of`; tensors under ``smallest_bytes`` stay.

    They go from level 0 to the first level in RAM below: raises ConfigurationError where ``stack`` has none, and
    InsufficientMemory where that is full, or, with ``may_stay``, leaves them where they are.
    """

    def __init__(
        self,
        stack: VGPUStack,
        name: str = "activations",
        *,
        smallest_bytes: int = SMALLEST_BYTES,
        may_stay: bool = False,
    ) -> None:
        self._may_stay = may_stay
        self._stack = stack
        self._device = stack.level0_device
        self._smallest_bytes = smallest_bytes
        self._weights: Callable[[], WeightStreamer | None] = lambda: None
        self._buffers = HostBuffers(stack, name)
        self._stalls = Stalls(stack)
        self._lock = threading.RLock()  # collecting garbage inside it may close the store
        self._tape: list[weakref.ref[Ticket]] = []  # what this forward has saved
        self._count = self._count_before = 0  # boundaries of this forward, and of the one before
        self._call = 0
        self._known: weakref.WeakValueDictionary[tuple[Any, ...], Boundary] = weakref.WeakValueDictionary()
        self._window: list[weakref.ref[Boundary]] = []  # on level 0, to leave when newer ones come; oldest first
        self._coming: list[weakref.ref[Boundary]] = []  # on their way to level 0; oldest first
        self._dropped: Dropped = deque()
        self._in_flight: list[Transfer] = []  # copies of which nobody wants anything but their end
        self._closed = False

    @contextmanager
    def forward_of(self, model: torch.nn.Module | None = None) -> Iterator[None]:
        """Around one forward: what its checkpoints keep is kept here; raises ConfigurationError if the store is closed.

        ``model`` is needed for transformers' models, whose modules checkpoint themselves.
        """
        if self._closed:
            raise ConfigurationError("the activation store is closed: make a new one")
        before = self._tape, self._count, self._count_before
        self._tape, self._count, self._count_before = [], 0, self._count or self._count_before
        try:
            with inputs_saved_under(self.hooks, model):
                yield
        except BaseException:
            self._tape, self._count, self._count_before = before
            raise

    def leave_out(self, weights: WeightStreamer, free_some: FreeSome | None = None) -> None:
        """Weights that these have loaded stay; ``free_some`` gives spare RAM back. Neither keeps a dead model alive."""
        self._weights = weakref.ref(weights)
        self._buffers.free_some = free_some or self._buffers.free_some

    def hooks(self) -> AbstractContextManager[Any]:
        """Around one checkpoint: saved-tensor hooks for what it keeps. Hooks that are active already come first."""
        if torch._C._current_graph_task_id() != -1:
            return nullcontext()  # a checkpoint inside a recompute: the outer one's hooks have to see everything
        self._call += 1
        outer = top_hooks(True)
        if outer is None:
            return torch.autograd.graph.saved_tensors_hooks(self.pack, self.unpack)
        outer_pack, outer_unpack = outer

        def pack(tensor: Tensor) -> Any:
            packed = outer_pack(tensor)
            if packed is tensor or isinstance(packed, SavedTensor):  # the outer hooks leave it where it is
                ours = self.pack(tensor)
                if ours is not tensor:
                    return ours
            return partial(outer_unpack, packed)

        return torch.autograd.graph.saved_tensors_hooks(pack, self.unpack)

    def summary(self) -> dict[str, int]:
        """For reports: bytes reserved in host memory, and on which level."""
        with self._lock:
            return {"host_bytes": self._buffers.num_bytes, "level": self._buffers.level}

    def close(self) -> None:
        """Give all host memory back to the stack. Idempotent. A graph that still needs some of it gets an error."""
        with self._lock:
            self._closed = True
            self._buffers.close()
            self._in_flight.clear()

    def pack(self, tensor: Tensor) -> Tensor | Ticket:
        """What autograd holds instead of ``tensor``: a ticket, or the tensor itself where it stays."""
        if self._closed or not self._may_leave(tensor):
            return tensor
        with self._lock, torch.no_grad(), no_inference_mode():
            self._collect()
            boundary = self._boundary_of(tensor)
            boundary.saves += 1
            if boundary.last_call != self._call:
                boundary.calls, boundary.last_call = boundary.calls + 1, self._call
            if boundary.calls >= SHARED_CALLS and boundary.resident is None:
                boundary.resident = tensor.detach()
            return Ticket(boundary, self._call, self._tape)

    def _may_leave(self, tensor: Tensor) -> bool:
        if type(tensor) is not Tensor or tensor.layout != torch.strided or tensor.device != self._device:
            return False
        if tensor.is_conj() or tensor.is_neg() or (tensor.is_leaf and tensor.requires_grad):
            return False  # a leaf that wants a gradient is a parameter, which its module holds
        if not self._smallest_bytes <= span_bytes(tensor) <= HOLES * tensor.nbytes:
            return False
        weights = self._weights()
        return weights is None or weights.find(tensor) is None

    def _boundary_of(self, tensor: Tensor) -> Boundary:
        storage = tensor.untyped_storage()._cdata
        key = (storage, tensor.storage_offset(), tensor.shape, tensor.stride(), tensor.dtype, tensor._version)
        boundary = self._known.get(key)
        if boundary is None:
            boundary = Boundary(tensor, self._dropped)
            rest = self._count_before - self._count
            self._count += 1
            if not 0 < rest <= NEWEST:  # if it goes as the last time, the newest are still on level 0 at the end
                self._send(boundary)
            self._known[key] = boundary
            self._let_oldest_go(boundary)
        return boundary

    def _send(self, boundary: Boundary) -> None:
        """Start the copy to host memory; where there is no room and it may stay, nothing is done."""
        assert boundary.resident is not None
        length, start = boundary.span_bytes // boundary.dtype.itemsize, boundary.resident.storage_offset()
        try:
            buffer = self._buffers.take(boundary.span_bytes)
        except InsufficientMemory:
            if self._may_stay:
                return
            raise
        try:
            boundary.sent = self._stack.write(buffer, boundary.resident.as_strided((length,), (1,), start))
        except BaseException:
            self._buffers.give(buffer)
            raise
        boundary.buffer = buffer
        self._buffers.pending[buffer] = [boundary.sent]

    def _let_oldest_go(self, newest: Boundary) -> None:
        window = [boundary for boundary in [*_alive(self._window), newest] if boundary.calls < SHARED_CALLS]
        while len(window) > NEWEST:
            self._let_go(window.pop(0))
        self._window = [weakref.ref(boundary) for boundary in window]

    def _let_go(self, boundary: Boundary) -> None:
        if boundary.sent is None:
            self._send(boundary)
        if boundary.sent is None:
            return  # it stays
        assert boundary.resident is not None
        self._stalls.wait_for(boundary.sent)  # the stream that may reuse the memory waits, the host does not
        boundary.sent.let_go()
        boundary.spoiled = boundary.resident._version != boundary.version
        boundary.resident = None

    def unpack(self, packed: Any) -> Tensor:
        """The tensor that `pack` was given, on level 0, or StaleTensor; those saved before it start to come back."""
        if isinstance(packed, partial):  # what hooks outside ours made of it
            return packed()
        if not isinstance(packed, Ticket):
            return packed
        with self._lock, torch.no_grad(), no_inference_mode():
            self._collect()
            tensor = self._bring(packed.boundary)
            self._prefetch(packed)
        return tensor

    def _bring(self, boundary: Boundary) -> Tensor:
        resident = boundary.resident
        if boundary.spoiled or (resident is not None and resident._version != boundary.version):
            raise StaleTensor(
                f"the input of a checkpointed layer, shape {tuple(boundary.shape)}, was written to in place after the "
                "layer had read it, and backward needs it as it was: write into a copy of it"
            )
        if resident is not None:
            if boundary.sent is not None:  # its end would otherwise hold the memory
                self._stalls.wait_for(boundary.sent)
                boundary.sent.let_go()
            return resident
        if self._closed:
            raise StaleTensor(
                "backward needs an activation of a store that is closed: close it after the last backward"
            )
        load = boundary.load
        if load is None or load.stream != current_stream(self._device):  # another stream's memory is not for this one
            self._cancel(boundary)
            load = self._load(boundary)
        self._stalls.wait_for(load.transfer)
        load.transfer.let_go()
        boundary.load = None
        tensor = boundary.view(load.flat)
        if boundary.saves > 1:  # it will be asked for again soon
            boundary.resident, boundary.version = tensor, tensor._version
        return tensor

    def _prefetch(self, asked: Ticket) -> None:
        on_gpu, room = self._device.type == "cuda", self._stack.levels[0].capacity_bytes
        # Of a checkpoint the largest counts: by each tensor it would be another number, and loads would be cancelled.
        largest = max(ticket.boundary.span_bytes for ticket in [asked, *asked.before(1)])
        wanted = asked.before(checkpoints_ahead(largest, room, on_gpu=on_gpu))
        first = wanted[-1].call if wanted else asked.call
        coming = []
        for boundary in _alive(self._coming):
            if first <= boundary.last_call <= asked.call:
                coming.append(boundary)
            else:
                self._cancel(boundary)  # backward took another way
        for boundary in (ticket.boundary for ticket in wanted):
            if boundary.resident is None and boundary.load is None and not boundary.spoiled and not self._closed:
                boundary.load = self._load(boundary)
                coming.append(boundary)
        self._coming = [weakref.ref(boundary) for boundary in coming if boundary.load is not None]

    def _load(self, boundary: Boundary) -> Load:
        assert boundary.buffer is not None and boundary.sent is not None
        flat = torch.empty(boundary.lead_bytes + boundary.span_bytes, dtype=torch.uint8, device=self._device)
        boundary.sent.wait_on(copy_streams(self._device).h2d if self._device.type == "cuda" else None)
        transfer = self._stack.read(boundary.buffer, flat[boundary.lead_bytes :])
        self._buffers.pending[boundary.buffer] = [boundary.sent, transfer]
        return Load(transfer, flat, current_stream(self._device))

    def _cancel(self, boundary: Boundary) -> None:
        """Forget a load that is under way; its memory is free when the copy is over."""
        if boundary.load is not None:
            self._in_flight.append(boundary.load.transfer)
            boundary.load = None

    def _collect(self) -> None:
        while self._dropped:
            buffer, load = self._dropped.popleft()
            self._in_flight += self._buffers.pending.get(buffer, [])  # none where the store was closed
            self._in_flight += [] if load is None else [load.transfer]
            self._buffers.give(buffer)
        started, self._in_flight = self._in_flight, []
        for transfer in started:  # one that failed is over: its graph, which would raise it, is dead
            transfer.let_go() if transfer.done() else self._in_flight.append(transfer)


def _alive(refs: list[weakref.ref[Boundary]]) -> list[Boundary]:
    return [boundary for ref in refs if (boundary := ref()) is not None]
