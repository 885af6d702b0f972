"""The stack: levels together, keys on them, hot ones up, cold ones down.

A key's bytes live on exactly one level. `register` copies them in, `access` gives them back on level 0's device, promotions
and evictions move them in between. Other parts of the package place bytes by hand (`reserve`) in the same levels, where
they are counted and never evicted.

What `access` returned stays valid while it is held: the entry is no victim while its storage has other users, and `update`
or `remove` then leave the old bytes to their holder. It is to be read; writing goes through `update`. Accessing a resident key takes one
short lock and no transfer; anything else takes its turn (`turn`), one cascade at a time.
"""

from __future__ import annotations

import time
from collections.abc import Callable, Iterable, Iterator, Mapping
from concurrent.futures import ThreadPoolExecutor
from contextlib import contextmanager
from typing import Any

import torch

from vblackwell.errors import ConfigurationError, InsufficientMemory, KeyClash, UnknownKey, nearest
from vblackwell.memory.config import LevelConfig, build_levels, build_policy
from vblackwell.memory.entry import Entry, Layout, default_priority, layout_of, packed_bytes
from vblackwell.memory.level import Level, Transfer
from vblackwell.memory.placement import Placement
from vblackwell.memory.reservation import Reservation
from vblackwell.memory.statistics import Place
from vblackwell.units import format_bytes

PROMOTIONS = ("direct", "gradual")


class VGPUStack:
    """Several levels of memory as one.

    Args:
        config: ``{'levels': [{'capacity_mb', 'device', 'speed_gbps', 'path'}, ...]}``, fastest first (`config`), or a
            sequence of `LevelConfig`, or of ready-made `Level` objects, which the stack then owns.
        policy: ``'lru'`` or ``'next_use'``: who is evicted first among equal priorities.
        promotion: ``'direct'`` brings an accessed key to level 0, ``'gradual'`` one level up an access.

    Attributes:
        levels: the `Level` objects, fastest first. level0_device: where `access` returns tensors.

    Raises:
        ConfigurationError: unknown keys or values, a GPU that is not there, capacities beyond the machine's.
    """

    def __init__(
        self,
        config: Mapping[str, Any] | Iterable[LevelConfig] | Iterable[Level],
        policy: str = "lru",
        promotion: str = "direct",
    ) -> None:
        if promotion not in PROMOTIONS:
            raise ConfigurationError(f"promotion {promotion!r} must be one of {', '.join(PROMOTIONS)}")
        self.policy = policy
        self.promotion = promotion
        chosen = build_policy(policy)
        self.levels: list[Level] = build_levels(config)
        assert self.levels[0].device is not None, "build_levels sees to it"
        self.level0_device: torch.device = self.levels[0].device
        self._placement = Placement(self.levels, chosen)
        self._lock = self._placement.lock
        self._policy = chosen
        self._statistics = self._placement.statistics
        self._entries: dict[str, Entry] = {}
        self._reservations: dict[str, Reservation] = {}
        self._prefetchers: list[Callable[[Any], bool]] = []
        self._mover = ThreadPoolExecutor(1, thread_name_prefix="vblackwell-prefetch")
        self._cuda_index = self.level0_device.index if self.level0_device.type == "cuda" else None
        self._closed = False

    # Keys.

    def register(
        self, key: str, tensor: Any, priority: int | None = None, *, owner: str | None = None, take: bool = False
    ) -> None:
        """Put a tensor, or a packed tensor, under ``key``; one that is there already is replaced.

        Args:
            priority: 0 to 10; from 7 it starts on level 0, from 4 on level 1, below that above the last level, or further
                down where full. By default by what the name says (`default_priority`).
            owner: who registers, such as a model's name. Only the same owner may replace the key.
            take: let the stack use the tensor's own memory where it can; the caller gives the tensor up.

        Raises:
            InsufficientMemory: the stack is full; nothing moved, and what was under ``key`` still is.
            KeyClash: another owner has the key, or it is a reservation's name.
        """
        priority = default_priority(key) if priority is None else priority
        if not isinstance(priority, int) or not 0 <= priority <= 10:
            raise ConfigurationError(f"priority {priority!r} of {key!r} must be a whole number from 0 to 10")
        layout, tensors = layout_of(tensor)
        self._check_fits(key, layout)
        with self._placement.turn.take():
            old = self._owned(key, owner)
            entry = Entry(key, owner, priority, layout)
            self._admit(entry, tensors, old, take=take)

    def _admit(self, entry: Entry, tensors: tuple[torch.Tensor, ...], old: Entry | None, *, take: bool = False) -> None:
        """Place a new entry and put it in the table, in place of ``old``; in a turn."""
        if not entry.num_bytes:
            self._placement.admit_empty(entry)
        else:
            self._admit_bytes(entry, packed_bytes(entry.layout, tensors), old, take=take)
        with self._lock:
            self._entries[entry.key] = entry
        if old is not None:
            self._placement.drop(old)

    def _admit_bytes(self, entry: Entry, buffer: torch.Tensor, old: Entry | None, *, take: bool) -> None:
        source = self._place_of(buffer)
        try:
            self._placement.admit(entry, buffer, source, adopt=take)
        except InsufficientMemory:
            if old is None or not self._placement.vacate(old):
                raise
            try:
                self._placement.admit(entry, buffer, source, adopt=take)
            except BaseException:
                self._placement.put_back(old)
                raise

    def _check_fits(self, key: str, layout: Layout) -> None:
        largest = max(level.capacity_bytes for level in self.levels)
        if layout.num_bytes > largest:
            raise self._placement.no_room(f"for {key!r}", layout.num_bytes)

    def _owned(self, key: str, owner: str | None) -> Entry | None:
        self._check_open()
        with self._lock:
            entry = self._entries.get(key)
            clash = entry.owner if entry is not None else None
            if (entry is None or clash == owner) and key not in self._reservations:
                return entry
        holder = f"{clash!r}" if entry is not None else "a reservation"
        raise KeyClash(
            f"key {key!r} is taken by {holder}, and {owner!r} wants it too: give the models different names (name='...')"
        )

    def access(self, key: str) -> Any:
        """The value under ``key`` on level 0's device; valid while held, not to be written to.

        Raises:
            UnknownKey: nothing is registered under it.
            DiskError, CorruptData: its bytes, or those of a key that had to make room, could not be moved.
        """
        return self._find(key, 0)[0]

    def _find(self, key: str, pins: int) -> tuple[Any, Entry]:
        with self._lock:
            entry = self._entries.get(key)
            tensors = entry.resident if entry is not None else None
            if entry is not None and tensors is not None and entry.error is None:
                self._policy.touch(entry)
                self._statistics.hits[0] += 1
                entry.expected = False
                entry.pins += pins
                return self._hand_out(entry, tensors), entry
        return self._find_elsewhere(key, pins)

    def _hand_out(self, entry: Entry, tensors: tuple[torch.Tensor, ...]) -> Any:
        if self._cuda_index is not None and entry.num_bytes:
            stream = torch.cuda.current_stream(self._cuda_index)
            if stream.cuda_stream:  # not the default stream: the allocator must not reuse the bytes under its kernels
                tensors[0].record_stream(stream)
        return entry.layout.value(tensors)

    def _find_elsewhere(self, key: str, pins: int) -> tuple[Any, Entry]:
        """`access` for a key that is not on level 0, or on its way somewhere."""
        start = time.perf_counter()
        with self._placement.turn.take():
            with self._lock:
                entry = self._lookup(key)
                error, entry.error = entry.error, None
                if error is not None:
                    raise error
                self._policy.touch(entry)
                self._statistics.found(entry.level)
                entry.expected = False
            if entry.resident is None:
                self._placement.promote(entry, 0 if self.promotion == "direct" else max(0, entry.level - 1))
            with self._lock:
                entry.pins += pins
                value = None if entry.resident is None else self._hand_out(entry, entry.resident)
            if value is None:
                value = self._serve_in_place(entry)
        with self._lock:
            self._statistics.stall_seconds += time.perf_counter() - start
        return value, entry

    def _serve_in_place(self, entry: Entry) -> Any:
        """A transient copy on level 0's device; the key stays where it is."""
        with torch.inference_mode(False):
            buffer = torch.empty(entry.num_bytes, dtype=torch.uint8, device=self.level0_device)
            self._placement.read(entry, buffer)
            return entry.layout.value(entry.layout.tensors_over(buffer))

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
        """Bring keys up in the background, in this order; returns at once. Full levels make it a hint.

        Args:
            keys: registered keys, or keys and parameters that an offloaded model on this stack knows.

        Raises:
            UnknownKey: neither. What fails later is raised by the next `access` of that key.
        """
        self._check_open()
        keys = [keys] if isinstance(keys, (str, torch.Tensor)) else list(keys)
        for key in keys:
            if isinstance(key, str) and key in self._entries:
                if self._entries[key].resident is None:
                    self._mover.submit(self._bring_up, key)
            elif not any(prefetcher(key) for prefetcher in self._prefetchers):
                raise self._unknown(key)

    def _bring_up(self, key: str) -> None:
        with self._placement.turn.take(background=True):
            with self._lock:
                entry = self._entries.get(key)
                if entry is None or entry.resident is not None or self._closed:
                    return
                self._policy.touch(entry, accessed=False)
            target = 0 if self.promotion == "direct" else max(0, entry.level - 1)
            try:
                entry.expected = self._placement.promote(entry, target, background=True) and target == 0
            except Exception as error:  # kept, not swallowed: there is nobody in this thread to hear of it
                entry.error = error

    def add_prefetcher(self, prefetcher: Callable[[Any], bool]) -> None:
        """Offer keys and parameters that are not registered here to ``prefetcher``; it returns whether it took them."""
        self._prefetchers.append(prefetcher)

    def remove_prefetcher(self, prefetcher: Callable[[Any], bool]) -> None:
        """The opposite of `add_prefetcher`."""
        self._prefetchers.remove(prefetcher)

    def update(self, key: str, tensor: Any) -> None:
        """Replace the bytes of ``key`` by those of a value of the same shape and dtype.

        Raises:
            UnknownKey: nothing is registered under it.
            ConfigurationError: another shape or dtype (register it instead).
            InsufficientMemory: the old bytes are held by somebody, and there is no room for the new ones beside them.
        """
        layout, tensors = layout_of(tensor)
        with self._placement.turn.take():
            with self._lock:
                old = self._lookup(key)
            if (layout.parts, layout.kind) != (old.layout.parts, old.layout.kind):
                raise ConfigurationError(
                    f"update of {key!r} has another shape or dtype: register it again to replace it"
                )
            if not old.num_bytes:
                return
            buffer = packed_bytes(layout, tensors)
            if self._placement.overwrite(old, buffer, self._place_of(buffer)):
                old.layout, old.error = layout, None
            else:
                self._admit(Entry(key, old.owner, old.priority, layout), tensors, old)

    def remove(self, key: str) -> None:
        """Forget ``key`` and free its bytes (those still held, when they are let go)."""
        with self._placement.turn.take():
            with self._lock:
                entry = self._lookup(key)
                del self._entries[key]
            self._placement.drop(entry)

    def move(self, key: str, level: int) -> None:
        """Promote or demote ``key`` by hand.

        Raises:
            InsufficientMemory: nobody there can make room; nothing moved.
            StaleTensor: it would leave level 0 while somebody holds its tensor.
        """
        self._check_level(level)
        with self._placement.turn.take():
            with self._lock:
                entry = self._lookup(key)
            if level != entry.level and entry.num_bytes:
                self._placement.shift(entry, level)

    def keys(self) -> list[str]:
        """All registered keys."""
        with self._lock:
            return list(self._entries)

    def __contains__(self, key: object) -> bool:
        return key in self._entries

    def __len__(self) -> int:
        return len(self._entries)

    def level_of(self, key: str) -> int:
        """The level on which ``key`` is now."""
        with self._lock:
            return self._lookup(key).level

    def priority_of(self, key: str) -> int:
        """The priority of ``key``."""
        with self._lock:
            return self._lookup(key).priority

    def _lookup(self, key: str) -> Entry:
        self._check_open()
        entry = self._entries.get(key)
        if entry is None:
            raise self._unknown(key)
        return entry

    def _unknown(self, key: Any) -> UnknownKey:
        what = f"{key!r}" if isinstance(key, str) else f"a tensor of shape {tuple(getattr(key, 'shape', ()))}"
        return UnknownKey(f"{what} is not in the stack{nearest(str(key), self._entries)}; register it first")

    # Ranges that their owner fills by hand.

    def reserve(self, name: str, num_bytes: int, level: int) -> Reservation:
        """``num_bytes`` on exactly this level, counted as used and never evicted; cached keys there make room.

        Raises:
            KeyClash: the name is a key or a reservation already.
            InsufficientMemory: the keys there cannot make room; nothing moved.
        """
        self._check_level(level)
        if num_bytes <= 0:
            raise ConfigurationError(f"reservation {name!r} of {num_bytes} bytes: it must hold at least one byte")
        with self._placement.turn.take():
            self._check_open()
            if name in self._entries or name in self._reservations:
                raise KeyClash(
                    f"the name {name!r} is taken in this stack: give the models different names (name='...')"
                )
            extent = self._placement.reserve(f"reservation {name!r}", num_bytes, level)
            reservation = Reservation(name, level, extent, self.levels[level])
            with self._lock:
                self._reservations[name] = reservation
        return reservation

    def unreserve(self, reservation: Reservation) -> None:
        """Give a reservation back. Its transfers must be done."""
        with self._lock:
            extent = reservation.end()
            del self._reservations[reservation.name]
        self.levels[reservation.level].free(extent)

    def read(self, reservation: Reservation, out: torch.Tensor) -> Transfer:
        """Start copying the first ``out.nbytes`` bytes of a reservation into the contiguous ``out``; counted on the link."""
        transfer = self.levels[reservation.level].read(reservation.extent, out)
        with self._lock:
            self._statistics.link_started(reservation.level, self._place_of(out), out.nbytes, transfer)
        return transfer

    def write(self, reservation: Reservation, src: torch.Tensor) -> Transfer:
        """Start copying the contiguous ``src`` to the start of a reservation; counted on the link."""
        transfer = self.levels[reservation.level].write(reservation.extent, src)
        with self._lock:
            self._statistics.link_started(self._place_of(src), reservation.level, src.nbytes, transfer)
        return transfer

    # Counting.

    def count_hit(self, level: int = 0) -> None:
        """Something was found on ``level`` by whoever manages a reservation there."""
        with self._lock:
            self._statistics.hits[level] += 1

    def count_miss(self, level: int) -> None:
        """Something was looked for on level 0 and found on ``level`` only."""
        with self._lock:
            self._statistics.found(level)

    def count_link(self, source: int, destination: int, num_bytes: int, seconds: float | None = None) -> None:
        """Bytes that somebody else moved between two levels."""
        with self._lock:
            self._statistics.link(source, destination, num_bytes, seconds)

    def add_stall(self, seconds: float) -> None:
        """Time that computation waited for bytes."""
        with self._lock:
            self._statistics.stall_seconds += seconds

    def get_stats(self) -> dict[str, Any]:
        """All counters.

        Returns:
            ``{'levels': [{'device', 'capacity_bytes', 'used_bytes', 'peak_bytes', 'hits', 'misses', 'evictions',
            'promotions', 'demotions'}], 'links': [{'source', 'destination', 'bytes', 'seconds'}], 'stall_seconds'}``.
            A key found on level 2 is a hit there and a miss on levels 0 and 1. ``promotions``: keys that rose to the level;
            ``demotions``: that sank from it, ``evictions`` of them to make room. ``seconds`` of asynchronous copies count once they are done.
        """
        with self._lock:
            self._placement.sweep()
            return self._statistics.report()

    def _place_of(self, tensor: torch.Tensor) -> Place:
        """The level that a tensor outside the levels counts for: level 0 on its device, else the device's name."""
        return 0 if tensor.device == self.level0_device else str(tensor.device)

    # Life.

    def _check_level(self, level: int) -> None:
        if not isinstance(level, int) or not 0 <= level < len(self.levels):
            raise ConfigurationError(f"level {level!r} must be from 0 to {len(self.levels) - 1}")

    def _check_open(self) -> None:
        if self._closed:
            raise ConfigurationError("the stack is closed: make a new one")

    def close(self) -> None:
        """Drop all keys and release memory, file and threads. Idempotent. Tensors that are held stay valid."""
        if self._closed:
            return
        self._closed = True
        self._mover.shutdown(cancel_futures=True)
        with self._placement.turn.take(), self._lock:
            for entry in self._entries.values():
                entry.unsettle()
            self._entries.clear()
            self._reservations.clear()
        for level in self.levels:
            level.close()

    def __enter__(self) -> VGPUStack:
        return self

    def __exit__(self, *_: object) -> None:
        self.close()

    def __repr__(self) -> str:
        rooms = ", ".join(f"{level.name} {format_bytes(level.capacity_bytes)}" for level in self.levels)
        return f"VGPUStack({rooms}; policy={self.policy!r}, promotion={self.promotion!r})"
