"""Copies and launches by address, for work that is queued in hundreds of small pieces a step.

A torch call with its views, checks and stream guards costs 5 to 20 us of the host; one of these costs 2. Nothing is checked, nothing keeps
memory alive: callers own what they name until the stream is past it. The driver is called with the interpreter's lock held, because
giving it up a hundred times in a row means waiting for other threads a hundred times.
"""

from __future__ import annotations

import ctypes
import functools
import threading
from collections.abc import Sequence

from vblackwell.kernels.runtime.nvrtc import OVERLAP, Kernel, Launch, check_driver


@functools.cache
def _driver() -> ctypes.PyDLL:
    driver = ctypes.PyDLL("libcuda.so.1")
    driver.cuMemcpyAsync.argtypes = (ctypes.c_void_p, ctypes.c_void_p, ctypes.c_size_t, ctypes.c_void_p)
    driver.cuLaunchKernelEx.argtypes = (ctypes.c_void_p, ctypes.c_void_p, ctypes.c_void_p, ctypes.c_void_p)
    return driver


def copy_async(target: int, source: int, num_bytes: int, stream: int) -> None:
    """Queue a copy between any two of pinned host memory and device memory. The device's context must be the thread's.

    Args:
        target, source: addresses.
        stream: a stream's handle (`torch.cuda.Stream.cuda_stream`).

    Raises:
        KernelError: the driver's word.
    """
    result = _driver().cuMemcpyAsync(target, source, num_bytes, stream)
    if result:
        check_driver(result, f"copying {num_bytes} bytes from {source:#x} to {target:#x}")


class Launcher:
    """A kernel with a fixed block, whose parameters are addresses and then 32-bit words. From any thread.

    Args:
        num_addresses, num_words: how many of each the kernel takes, in this order.
    """

    def __init__(self, kernel: Kernel, threads: int, shared_bytes: int, num_addresses: int, num_words: int) -> None:
        self._kernel = kernel
        self._addresses = (ctypes.c_void_p * num_addresses)()
        self._words = (ctypes.c_int32 * num_words)()
        each = [ctypes.addressof(self._addresses) + 8 * index for index in range(num_addresses)]
        each += [ctypes.addressof(self._words) + 4 * index for index in range(num_words)]
        self._parameters = (ctypes.c_void_p * len(each))(*each)
        self._launch = Launch((1, 1, 1), (threads, 1, 1), shared_bytes, None)
        if kernel.overlaps:
            self._launch.attributes, self._launch.count = OVERLAP, 1
        self._lock = threading.Lock()

    def __call__(self, blocks: int, addresses: Sequence[int], words: Sequence[int], stream: int) -> None:
        """Queue a launch of ``blocks`` blocks; parameters are copied by the driver.

        Raises:
            KernelError: the driver's word.
        """
        with self._lock:
            self._addresses[:] = addresses
            self._words[:] = words
            self._launch.grid[0] = blocks
            self._launch.stream = stream
            result = _driver().cuLaunchKernelEx(
                ctypes.addressof(self._launch), self._kernel.function, ctypes.addressof(self._parameters), None
            )
        if result:
            check_driver(result, f"launching {self._kernel.name} in {blocks} blocks")
