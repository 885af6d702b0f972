"""Carry out moves: the bytes of an entry from where they are to another extent, finished on return.

At most one side is not addressable, or both are disks; then the bytes pass through RAM. Why moves wait one by one:
each may write where the one before it read.
"""

from __future__ import annotations

import time

import torch

from vblackwell.memory.entry import Entry
from vblackwell.memory.level import Extent, Level, Transfer


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
