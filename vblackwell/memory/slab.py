"""A slab: one large host allocation in huge pages, pre-faulted in parallel, near the GPU, registered with CUDA.

Private anonymous memory with `MADV_HUGEPAGE` (Python's default for anonymous maps is shared memory, which gets 4 KiB
pages), touched by several threads at once, because the kernel zeroes pages at a few GB/s a thread. The threads sit on
the cores of the GPU's NUMA node while they touch, so first-touch puts the pages there. Then `cudaHostRegister` pins the
whole range. Why not `pin_memory=True` per tensor: slow, and rounded up to powers of two by torch 2.11.

The mapping lives as long as any tensor that views it: torch holds the buffer, and the mapping unregisters itself before
it is unmapped. So closing a level under a live view cannot crash the process.
"""

from __future__ import annotations

import ctypes
import functools
import mmap
import os
import sys
import threading
import warnings
from collections.abc import Callable
from contextlib import suppress
from typing import Any

import torch

from vblackwell.errors import InsufficientMemory
from vblackwell.machine.facts import numa_node_count, numa_node_cpus
from vblackwell.units import MiB, align_up, format_bytes

HUGE_PAGE = 2 * MiB
_POPULATE_WRITE = 23  # MADV_POPULATE_WRITE, Linux 5.14
_FAULT_THREADS = 8
_FAULT_BYTES = 64 * MiB


class _Mapping(mmap.mmap):
    """Host memory that may be registered with CUDA. A `weakref` finalizer would run after mmap has unmapped it."""

    unregister: Callable[[], Any] | None = None

    def __del__(self) -> None:
        # At exit CUDA may be gone, and the process's memory goes anyway.
        if self.unregister is not None and not sys.is_finalizing():
            self.unregister()


def map_slab(size: int, *, numa_node: int | None = None, pin: bool = False) -> torch.Tensor:
    """``size`` bytes of zeroed, resident host memory as a uint8 tensor, 4 KiB aligned (2 MiB for large ones).

    Args:
        numa_node: where the pages should lie; None leaves it to the system.
        pin: register with CUDA; where the system refuses, one warning, and the memory stays pageable.

    Raises:
        InsufficientMemory: the system gave no memory.
    """
    size = align_up(size, mmap.PAGESIZE)
    padding = HUGE_PAGE if size >= HUGE_PAGE else 0
    try:
        mapping = _Mapping(-1, size + padding, flags=mmap.MAP_PRIVATE | mmap.MAP_ANONYMOUS)
    except OSError as error:
        raise InsufficientMemory(
            f"the system gave no {format_bytes(size)} of host memory ({error.strerror}): lower the cpu level's cap",
            needed_bytes=size,
            available_bytes=0,
        ) from error
    if padding and hasattr(mmap, "MADV_HUGEPAGE"):
        mapping.madvise(mmap.MADV_HUGEPAGE)
    with torch.inference_mode(False):  # a tensor born under inference mode breaks a later backward
        whole = torch.frombuffer(mapping, dtype=torch.uint8)
        start = -whole.data_ptr() % HUGE_PAGE if padding else 0
        slab = whole[start : start + size]
    _fault_in(slab.data_ptr(), size, numa_node)
    if pin:
        _register(mapping, slab.data_ptr(), size)
    return slab


def _fault_in(address: int, size: int, numa_node: int | None) -> None:
    """Touch every page, from several threads, on the node's cores where there is more than one node."""
    cpus = numa_node_cpus(numa_node) if numa_node is not None and numa_node_count() > 1 else set()
    cpus &= os.sched_getaffinity(0)
    if size <= _FAULT_BYTES and not cpus:
        _touch(address, size)
        return
    starts = iter(range(0, size, _FAULT_BYTES))
    lock = threading.Lock()

    def work() -> None:
        if cpus:
            os.sched_setaffinity(0, cpus)  # of this thread only
        while True:
            with lock:
                start = next(starts, None)
            if start is None:
                return
            _touch(address + start, min(_FAULT_BYTES, size - start))

    count = min(_FAULT_THREADS, len(cpus or os.sched_getaffinity(0)), -(-size // _FAULT_BYTES))
    threads = [threading.Thread(target=work, name="vblackwell-fault") for _ in range(count)]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join()


def _touch(address: int, size: int) -> None:
    libc = ctypes.CDLL(None)
    if libc.madvise(ctypes.c_void_p(address), ctypes.c_size_t(size), _POPULATE_WRITE):
        ctypes.memset(address, 0, size)  # an older kernel; fresh pages are zero anyway


def _register(mapping: _Mapping, address: int, size: int) -> None:
    cudart: Any = torch.cuda.cudart()
    refused = int(cudart.cudaHostRegister(address, size, 1))  # portable: pinned for every device
    if refused:
        warnings.warn(
            f"CUDA refused to pin {format_bytes(size)} of host memory (error {refused}): copies to and from the GPU "
            f"stay correct but run at pageable speed. Check `ulimit -l`, or on WSL2 the memory limit in .wslconfig",
            RuntimeWarning,
            stacklevel=2,
        )
        # CUDA keeps the error, and torch would report it at the next kernel of somebody else.
        with suppress(RuntimeError):
            torch.zeros(1, device="cuda")
        return
    mapping.unregister = functools.partial(cudart.cudaHostUnregister, address)
