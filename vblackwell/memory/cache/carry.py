"""Carry plans out: the bytes of entries from where they are to other extents, committed one by one.

Moves run in the plan's order and each is finished before the next starts, because it may write where the one before it
read. A move whose two sides are disks passes through RAM. While an entry moves it is hidden (not resident, no victim);
when it has arrived, or could not leave, it is shown again.
"""

from __future__ import annotations

import threading
import time

import torch

from vblackwell.memory.cache.entry import Entry
from vblackwell.memory.cache.plan import Plan
from vblackwell.memory.cache.policy import Policy
from vblackwell.memory.level import Extent, Level, Transfer
from vblackwell.memory.statistics import Place, Statistics


def settled(transfer: Transfer) -> None:
    """Wait for ``transfer``. However this ends, nothing is being copied any more: Ctrl-C must not leave a copy behind."""
    try:
        transfer.wait()
    except BaseException:
        while not transfer.done():
            time.sleep(1e-4)
        raise


def read_entry(levels: list[Level], entry: Entry, out: torch.Tensor) -> None:
    """Fill ``out`` (flat uint8, on any device) with the bytes of ``entry``."""
    if entry.stray is not None:
        out.copy_(entry.stray)
    else:
        assert entry.extent is not None
        settled(levels[entry.level].read(entry.extent, out))


def write_entry(levels: list[Level], entry: Entry, target: Level, extent: Extent) -> None:
    """Copy the bytes of ``entry`` into ``extent`` of the level ``target``."""
    target.materialise(extent)
    if entry.stray is not None:
        settled(target.write(extent, entry.stray))
        return
    assert entry.extent is not None
    source = levels[entry.level]
    bytes_there = source.view(entry.extent)
    if bytes_there is not None:
        settled(target.write(extent, bytes_there))
        return
    bytes_here = target.view(extent)
    if bytes_here is not None:
        settled(source.read(entry.extent, bytes_here))
        return
    through = torch.empty(entry.num_bytes, dtype=torch.uint8, device="cpu")
    settled(source.read(entry.extent, through))
    settled(target.write(extent, through))


class Mover:
    """The levels of one stack, its policy and its counters, and how entries get from extent to extent.

    Methods marked "under the lock" are called with `lock` held, the others without.
    """

    def __init__(self, levels: list[Level], policy: Policy) -> None:
        self.levels = levels
        self.policy = policy
        self.statistics = Statistics(levels)
        self.lock = threading.Lock()

    def begin(self, plan: Plan) -> None:
        """Hide what the plan moves. Under the lock, with the planning."""
        for move in plan.moves:
            self.hide(move.entry)

    def hide(self, entry: Entry) -> None:
        """Its place is about to change or to be written: nobody is handed its tensors. Under the lock."""
        entry.unsettle()

    def show(self, entry: Entry) -> None:
        """It has a place again; on level 0 it gets ready-made tensors. Under the lock."""
        if entry.level == 0 and entry.extent is not None:
            buffer = self.levels[0].view(entry.extent)
            assert buffer is not None, "level 0 is addressable"
            entry.settle(buffer)

    def carry_out(self, plan: Plan) -> None:
        """Make the moves; if one fails, those before it stay and it and the rest are undone."""
        for index, move in enumerate(tuple(plan.moves)):
            start = time.perf_counter()
            try:
                write_entry(self.levels, move.entry, self.levels[move.target], move.target_extent)
            except BaseException:
                with self.lock:
                    self.undo(plan, index)
                raise
            self.count(move.source, move.target, move.entry.num_bytes, time.perf_counter() - start)
            with self.lock:
                self.commit(move.entry, move.target, move.target_extent, evicted=move.evicted)

    def undo(self, plan: Plan, index: int) -> None:
        """Take back the moves from number ``index`` on. Under the lock."""
        undone = [move.entry for move in plan.moves[index:]]
        plan.take_back(index)
        for entry in undone:
            self.show(entry)

    def commit(self, entry: Entry, target: int, extent: Extent, *, evicted: bool) -> None:
        """The bytes of ``entry`` have arrived in ``extent``. Under the lock."""
        source = entry.level
        self.policy.discard(entry)
        if entry.extent is not None:
            self.levels[source].release(entry.extent)
        entry.level, entry.extent, entry.stray = target, extent, None
        if target > 0:
            entry.expected = False
        self.statistics.moved(source, target, evicted=evicted)
        self.seat(entry)

    def seat(self, entry: Entry) -> None:
        """``entry`` is on its level from now on. Under the lock."""
        self.policy.add(entry)
        self.show(entry)

    def fill(self, level: int, extent: Extent, bytes_in: torch.Tensor, source: Place) -> None:
        """Copy bytes from outside into an extent, and count them."""
        start = time.perf_counter()
        self.levels[level].materialise(extent)
        settled(self.levels[level].write(extent, bytes_in))
        self.count(source, level, bytes_in.nbytes, time.perf_counter() - start)

    def count(self, source: Place, target: Place, num_bytes: int, seconds: float) -> None:
        """Note what went over a link."""
        with self.lock:
            self.statistics.link(source, target, num_bytes, seconds)

    def read(self, entry: Entry, out: torch.Tensor) -> None:
        """Fill ``out`` (flat uint8) with the entry's bytes, and count them."""
        start = time.perf_counter()
        read_entry(self.levels, entry, out)
        self.count(entry.level, 0, entry.num_bytes, time.perf_counter() - start)
