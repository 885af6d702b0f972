"""The stack: levels together, keys on them, hot ones up, cold ones down.

A key's bytes live on exactly one level. What `access` returned stays valid while it is held: the entry is no victim
then, and `update` or `remove` leave the old bytes to their holder. Accessing a resident key takes one short lock and no
transfer; anything else takes its turn (`pool.Turn`), one cascade at a time.
"""

import time
import weakref
from collections.abc import Callable, Iterable, Iterator, Mapping
from concurrent.futures import ThreadPoolExecutor
from contextlib import AbstractContextManager, contextmanager
from typing import Any

import torch

from vblackwell.errors import ConfigurationError, InsufficientMemory, KeyClash, UnknownKey, nearest
from vblackwell.machine.device import hold_cap, use_expandable_segments
from vblackwell.machine.facts import choose_cpu_kernels, memory_facts
from vblackwell.machine.limits import ARENA_SHARE, MEASURED_HOST_SHARE, default_disk_path, free_disk_bytes
from vblackwell.memory.cache.config import GPU_SHARE, LevelConfig, build_levels
from vblackwell.memory.cache.entry import Entry, default_priority, layout_of, packed_bytes
from vblackwell.memory.cache.placement import Placement
from vblackwell.memory.cache.policy import POLICIES
from vblackwell.memory.host import HostLevel
from vblackwell.memory.level import Level
from vblackwell.memory.pool import LevelPool, Reservation, does_not_fit
from vblackwell.units import parse_bytes

__all__ = ["Reservation", "VGPUStack"]

PROMOTIONS = ("direct", "gradual")
Size = str | int | None  # bytes, or '8GiB'; None: a share of what the machine has free


class VGPUStack(LevelPool, AbstractContextManager["VGPUStack"]):
    """Several levels of memory as one; leaving its block closes it.

    Args:
        config: ``{'levels': [{'capacity_mb', 'device', 'speed_gbps', 'path'}, ...]}``, fastest first, or a sequence of
            `LevelConfig`, or of ready-made `Level` objects, which the stack then owns.
        policy: ``'lru'`` or ``'next_use'``: what is evicted first among equal priorities.
        promotion: ``'direct'`` brings an accessed key to level 0, ``'gradual'`` one level up an access.

    ``level0_device`` is where `access` returns tensors. Raises ConfigurationError for unknown keys or values, a GPU
    that is not there, capacities beyond the machine's.
    """

    def __init__(
        self,
        config: Mapping[str, Any] | Iterable[LevelConfig] | Iterable[Level],
        policy: str = "lru",
        promotion: str = "direct",
    ) -> None:
        if promotion not in PROMOTIONS:
            raise ConfigurationError(f"promotion {promotion!r} must be one of {', '.join(PROMOTIONS)}")
        if policy not in POLICIES:
            raise ConfigurationError(
                f"policy {policy!r} must be one of {', '.join(POLICIES)}{nearest(policy, POLICIES)}"
            )
        choose_cpu_kernels()
        self._policy = POLICIES[policy]()
        super().__init__(build_levels(config))
        self.policy = policy
        self.promotion = promotion
        self._placement = Placement(self.levels, self._policy, weakref.proxy(self), self._lock)  # no cycle
        self._entries: dict[str, Entry] = {}
        # Offered the keys and parameters that are not registered here; one returns whether it took it.
        self.prefetchers: list[Callable[[Any], bool]] = []
        self._mover = ThreadPoolExecutor(1, thread_name_prefix="vblackwell-prefetch")
        self._cuda_index = self.level0_device.index if self.level0_device.type == "cuda" else None
        self._at_close: Callable[[], object] = lambda: None
        self._measured_host: HostLevel | None = None  # whose size nobody chose

    def measure_host_memory(self) -> None:
        """Give the host level of `create_vgpu_stack`, unless its size was chosen, its share of the RAM that is free now
        or the level's already: to be called when a model has given RAM up, or has taken it. What is in use stays.
        """
        with self._turn.take():
            host = self._measured_host
            if host is not None and not self._closed:
                arenas = [each for each in self.levels if each.device == host.device and each is not host]
                free = memory_facts().available_bytes + host.resident_bytes
                host.resize(_measured_bytes(free, sum(arena.free_bytes for arena in arenas)))

    def register(
        self, key: str, tensor: Any, priority: int | None = None, *, owner: str | None = None, take: bool = False
    ) -> None:
        """Put a tensor, or a packed tensor, under ``key``; one that is there already is replaced.

        ``priority``: 0 to 10; from 7 it starts on level 0, from 4 on level 1, below that above the last level, or
        further down where full. By default by what the name says (`default_priority`). Only the same
        ``owner``, such as a model's name, may replace the key. ``take``: let the stack use the tensor's own memory
        where it can; the caller gives the tensor up.

        Raises InsufficientMemory where the stack is full (nothing moved, and what was under ``key`` still is), KeyClash
        where another owner has the key, or it is a reservation's name.
        """
        priority = default_priority(key) if priority is None else priority
        if not isinstance(priority, int) or not 0 <= priority <= 10:
            raise ConfigurationError(f"priority {priority!r} of {key!r} must be a whole number from 0 to 10")
        layout, tensors = layout_of(tensor)
        if layout.num_bytes > max(level.capacity_bytes for level in self.levels):
            raise does_not_fit(self.levels, f"for {key!r}", layout.num_bytes)
        with self._turn.take():
            self._check_open()
            old = self._entries.get(key)
            if key in self._reservations or (old is not None and old.owner != owner):
                holder = "a reservation" if old is None else repr(old.owner)
                raise KeyClash(
                    f"key {key!r} is taken by {holder}, and {owner!r} wants it too: give the models different names "
                    "(name='...')"
                )
            last = len(self.levels) - 1
            level = min(0 if priority >= 7 else 1 if priority >= 4 else max(0, last - 1), last)
            self._admit(Entry(key, priority, layout, level, owner), tensors, old, take=take)

    def _admit(self, entry: Entry, tensors: tuple[torch.Tensor, ...], old: Entry | None, *, take: bool = False) -> None:
        """Place a new entry and put it in the table in the place of ``old``; in a turn."""
        buffer = packed_bytes(entry.layout, tensors)
        source = self._place_of(buffer)
        try:
            self._placement.admit(entry, buffer, source, take=take)
        except InsufficientMemory:
            if old is None or not self._placement.vacate(old):
                raise
            try:
                self._placement.admit(entry, buffer, source, take=take)
            except BaseException:
                self._placement.put_back(old)
                raise
        with self._lock:
            self._entries[entry.key] = entry
        if old is not None:
            self._placement.drop(old)

    def access(self, key: str) -> Any:
        """The value under ``key`` on level 0's device; valid while held, not to be written to. Raises UnknownKey;
        DiskError or CorruptData where its bytes, or those of a key that had to sink, cannot be moved."""
        return self._find(key, 0)[0]

    def _find(self, key: str, pins: int) -> tuple[Any, Entry]:
        with self._lock:
            entry = self._entries.get(key)
            if entry is not None and entry.resident is not None and entry.error is None:
                self._policy.touch(entry)
                self._counts[0]["hits"] += 1
                entry.expected = False
                entry.pins += pins
                return self._hand_out(entry, entry.resident), entry
        return self._find_elsewhere(key, pins)

    def _hand_out(self, entry: Entry, tensors: tuple[torch.Tensor, ...]) -> Any:
        if self._cuda_index is not None:
            stream = torch.cuda.current_stream(self._cuda_index)
            if stream.cuda_stream:  # not the default stream: the bytes may not be reused or changed under its kernels
                tensors[0].record_stream(stream)
                entry.side_streams.add(stream)
        return entry.layout.value(tensors)

    def _find_elsewhere(self, key: str, pins: int) -> tuple[Any, Entry]:
        """`access` for a key that is not on level 0, or on its way somewhere."""
        start = time.perf_counter()
        with self._turn.take():
            entry = self._lookup(key)
            with self._lock:
                error, entry.error = entry.error, None
                if error is not None:
                    raise error
                self._policy.touch(entry)
                entry.expected = False
            self.count_found(entry.level)
            if entry.resident is None:
                self._placement.promote(entry, self._target(entry))
            with self._lock:
                entry.pins += pins
                value = None if entry.resident is None else self._hand_out(entry, entry.resident)
            if value is None:  # a transient copy, the key stays where it is
                with torch.inference_mode(False):
                    buffer = torch.empty(entry.num_bytes, dtype=torch.uint8, device=self.level0_device)
                    self._placement.read(entry, buffer)
                    value = entry.layout.value(entry.layout.tensors_over(buffer))
        self.add_stall(time.perf_counter() - start)
        return value, entry

    def _target(self, entry: Entry) -> int:
        """The level that an access raises ``entry`` to."""
        return 0 if self.promotion == "direct" else max(0, entry.level - 1)

    @contextmanager
    def borrow(self, key: str) -> Iterator[Any]:
        """`access` for the length of a ``with`` block, in which the key is not evicted."""
        value, entry = self._find(key, 1)
        try:
            yield value
        finally:
            with self._lock:
                entry.pins -= 1

    def prefetch(self, keys: Iterable[Any]) -> None:
        """Bring keys, or parameters that an offloaded model on this stack knows, up in the background, in this order,
        as far as levels have room. Raises UnknownKey; what fails later is raised by the key's next `access`."""
        self._check_open()
        wanted: list[Any] = [keys] if isinstance(keys, (str, torch.Tensor)) else list(keys)
        for key in wanted:
            entry = self._entries.get(key) if isinstance(key, str) else None
            if entry is not None:
                if entry.resident is None:
                    self._mover.submit(self._bring_up, key)
            elif not any(prefetcher(key) for prefetcher in self.prefetchers):
                raise self._unknown(key)

    def _bring_up(self, key: str) -> None:
        with self._turn.take(background=True):
            with self._lock:
                entry = self._entries.get(key)
                if entry is None or entry.resident is not None or self._closed:
                    return
                self._policy.touch(entry, accessed=False)
            target = self._target(entry)
            try:
                entry.expected = self._placement.promote(entry, target, background=True) and target == 0
            except Exception as error:  # kept for the next access, not swallowed
                entry.error = error

    def update(self, key: str, tensor: Any) -> None:
        """Replace the bytes of ``key`` by those of a value of the same shape and dtype. Raises UnknownKey;
        ConfigurationError for another shape or dtype; InsufficientMemory where the old bytes are still held, and the
        new ones do not fit next to them."""
        layout, tensors = layout_of(tensor)
        with self._turn.take():
            old = self._lookup(key)
            if layout.parts != old.layout.parts:
                said = "has another shape or dtype: register it again to replace it"
                raise ConfigurationError(f"update of {key!r} {said}")
            buffer = packed_bytes(layout, tensors)
            if self._placement.overwrite(old, buffer, self._place_of(buffer)):
                old.layout, old.error = layout, None
            else:
                self._admit(Entry(key, old.priority, layout, old.level, old.owner), tensors, old)

    def remove(self, key: str) -> None:
        """Forget ``key`` and free its bytes (those still held, when they are let go)."""
        with self._turn.take():
            entry = self._lookup(key)
            with self._lock:
                del self._entries[key]
            self._placement.drop(entry)

    def move(self, key: str, level: int) -> None:
        """Promote or demote ``key`` by hand. Raises InsufficientMemory where it does not fit, whatever sinks (nothing
        moved), StaleTensor where it would leave level 0 while somebody holds its tensor."""
        self._check_level(level)
        with self._turn.take():
            entry = self._lookup(key)
            if level != entry.level:
                self._placement.move(entry, level)

    def reserve(self, name: str, num_bytes: int, level: int) -> Reservation:
        """``num_bytes`` on exactly this level, counted as used and never evicted; keys there sink for it.
        Raises KeyClash where the name is taken, InsufficientMemory where it does not fit; nothing moved."""
        self._check_level(level)
        if num_bytes <= 0:
            raise ConfigurationError(f"reservation {name!r} of {num_bytes} bytes: it must hold at least one byte")
        with self._turn.take():
            self._check_open()
            if name in self._entries or name in self._reservations:
                raise KeyClash(f"the name {name!r} is taken in this stack: give models different names (name='...')")
            extent = self._placement.reserve(f"reservation {name!r}", num_bytes, level)
            with self._lock:
                self._reservations[name] = Reservation(name, level, extent, self.levels[level])
                return self._reservations[name]

    def keys(self) -> list[str]:
        with self._lock:
            return list(self._entries)

    def __iter__(self) -> Iterator[str]:
        return iter(self.keys())

    def __contains__(self, key: object) -> bool:
        return key in self._entries

    def __len__(self) -> int:
        return len(self._entries)

    def level_of(self, key: str) -> int:
        return self._lookup(key).level

    def _lookup(self, key: str) -> Entry:
        self._check_open()
        if (entry := self._entries.get(key)) is None:
            raise self._unknown(key)
        return entry

    def _unknown(self, key: Any) -> UnknownKey:
        what = f"{key!r}" if isinstance(key, str) else f"a tensor of shape {tuple(getattr(key, 'shape', ()))}"
        return UnknownKey(f"{what} is not in the stack{nearest(str(key), self._entries)}; register it first")

    def get_stats(self) -> dict[str, Any]:
        with self._lock:
            self._placement.sweep()
        return super().get_stats()

    def close(self) -> None:
        """Drop all keys and release memory, file and threads. Idempotent. Tensors that are held stay valid."""
        if not self._closed:
            self._closed = True
            self._mover.shutdown(cancel_futures=True)
            with self._turn.take(), self._lock:
                for entry in self._entries.values():
                    entry.resident = None
                self._entries.clear()
            super().close()
            self._at_close()

    def __exit__(self, *_: object) -> None:
        self.close()


def _measured_bytes(free_bytes: int, arena_bytes: int) -> int:
    """Of a host level that nobody chose: an arena is in RAM too, but a cap; more than half of it may stay unused."""
    return int((free_bytes - min(arena_bytes, free_bytes // 2)) * MEASURED_HOST_SHARE)


def create_vgpu_stack(
    fast_memory: Size = None,
    host_memory: Size = None,
    disk_memory: Size = None,
    disk_path: str | None = None,
    *,
    device: torch.device | str | None = None,
    policy: str = "lru",
    promotion: str = "direct",
    cap_process: bool = True,
) -> VGPUStack:
    """Probe the machine and make a stack: GPU, RAM, disk; a capped arena over RAM and disk where torch can use no GPU.

    Args:
        fast_memory: cap of level 0, bytes or ``'8GiB'``. host_memory, disk_memory: of those below; 0 leaves one out.
            Of a GPU it is the cap of all that torch allocates there while the stack is open, activations included;
            torch reserves it in expandable segments from then on, unless it was told how (``PYTORCH_ALLOC_CONF``). The
            forward of a batch in training whose step needs more raises InsufficientMemory before it begins, where the
            model is one of transformers' causal models or a `Decoder`.
            The default host_memory is 7/8 of the RAM that is free, and changes with it when a model comes or goes.
        disk_path: directory for the disk level; by default ``$VBLACKWELL_DISK_PATH``, else the first of the temporary,
            the cache and the current directory that is on a disk.
        device: level 0's; by default the first GPU. ``'cpu'`` makes level 0 an arena in RAM.
        cap_process: False: a GPU's ``fast_memory`` caps level 0 alone.

    Raises ConfigurationError for a size that the machine does not have, or where no directory is on a disk;
    InsufficientMemory where torch holds more of the GPU already than ``fast_memory``.
    """
    available = memory_facts().available_bytes
    chosen = torch.device(("cuda:0" if torch.cuda.is_available() else "cpu") if device is None else device)
    level0, share = "arena", int(available * ARENA_SHARE)
    if chosen.type == "cuda":
        level0, share = str(chosen), int(torch.cuda.mem_get_info(chosen)[0] * GPU_SHARE)
    sizes = {"fast_memory": fast_memory, "host_memory": host_memory, "disk_memory": disk_memory}
    fast, host, disk = (None if size is None else parse_bytes(size, name) for name, size in sizes.items())
    if fast == 0:
        raise ConfigurationError("fast_memory 0 leaves no level 0: give it at least 4 KiB")
    levels = [LevelConfig(level0, share if fast is None else fast)]
    if host is None:
        arena = 0 if chosen.type == "cuda" else levels[0].capacity_bytes
        levels.append(LevelConfig("cpu", _measured_bytes(available, arena)))
    elif host != 0:
        levels.append(LevelConfig("cpu", host))
    if disk != 0:
        path = disk_path or default_disk_path()
        if free := free_disk_bytes(path) if disk is None else disk:
            levels.append(LevelConfig("ssd", free, path=path))
    if chosen.type == "cuda":
        use_expandable_segments()
    stack = VGPUStack(levels, policy=policy, promotion=promotion)
    if host is None and isinstance(measured := stack.levels[1], HostLevel):
        stack._measured_host = measured
    if cap_process and fast is not None and chosen.type == "cuda":
        try:
            uncapped = weakref.finalize(stack, hold_cap(stack.level0_device, fast))
        except BaseException:
            stack.close()
            raise
        uncapped.atexit = False  # CUDA may have gone before
        stack._at_close = uncapped
    return stack
