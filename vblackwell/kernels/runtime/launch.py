"""Kernels loaded and launched through the CUDA driver. `Launcher` queues one by addresses, for about 2 us of the host:
it checks nothing and keeps no memory alive. `Launcher.queue` finds the stream; `Kernel.launch` takes tensors. All that
follows from shapes alone (grid, macros, numbers) its callers keep with a launcher, because making it costs more.

A kernel may begin before the kernel ahead of it in the stream has ended (programmatic dependent launch). Ours load
their weights before they wait for it (`wait_for_previous` in cuda/ptx.cuh): nobody writes weights but a packing, or a
copy in place. So the first launch that reads a weight as it is now goes without the overlap: it begins when all ahead
of it in the stream, the writing kernel among them, has ended and is seen. Every later launch comes after that one, and
so after the write. Copies from other streams need no care: a stream waits for their events before any launch.

A captured launch has run nothing, so it does not count as the first. A replayed graph begins when all ahead of it in
the stream has ended, so a captured launch must mind only what is written in the same graph: that changed the weight
when it was captured. A weight that no launch has read before a capture is read without overlap in each replay.
"""

import contextlib
import ctypes
import functools
import itertools
import operator
import struct
import threading
import weakref
from collections.abc import Callable, Iterator, Sequence
from typing import Any, NamedTuple

import torch
from torch import Tensor

from vblackwell.kernels.runtime.nvrtc import KernelError, cached_cubin

_MAX_DYNAMIC_SHARED = 8  # CU_FUNC_ATTRIBUTE_MAX_DYNAMIC_SHARED_SIZE_BYTES
_INVALID_CONTEXT = 201  # CUDA_ERROR_INVALID_CONTEXT: also of a thread that has none
_RELAXED = 2  # CU_STREAM_CAPTURE_MODE_RELAXED
_PROGRAMMATIC_STREAM_SERIALIZATION = 6
_STATIC_SHARED_BYTES = 48 * 1024  # more must be asked for
_address, _version = Tensor.data_ptr, operator.attrgetter("_version")


@functools.lru_cache
def driver() -> ctypes.PyDLL:
    """The CUDA driver for calls that end at once: the interpreter's lock is held."""
    found = ctypes.PyDLL("libcuda.so.1")
    found.cuMemcpyAsync.argtypes = (ctypes.c_void_p, ctypes.c_void_p, ctypes.c_size_t, ctypes.c_void_p)
    found.cuLaunchKernelEx.argtypes = (ctypes.c_void_p, ctypes.c_void_p, ctypes.c_void_p, ctypes.c_void_p)
    return found


@functools.lru_cache
def waiting_driver() -> ctypes.CDLL:
    """The same for calls that may wait for the GPU (allocating, loading): other threads go on meanwhile."""
    return ctypes.CDLL("libcuda.so.1")


def driver_version() -> int:
    """The CUDA version that the driver supports, as 1000 * major + 10 * minor."""
    version = ctypes.c_int()
    check_driver(driver().cuDriverGetVersion(ctypes.byref(version)), "asking for the driver's version")
    return version.value


def check_driver(result: int, what: str) -> None:
    """Raises KernelError, with the driver's word, if ``result`` is an error."""
    if result != 0:
        text = ctypes.c_char_p()
        driver().cuGetErrorString(result, ctypes.byref(text))
        raise KernelError(f"{what}: {text.value.decode() if text.value else f'CUDA error {result}'}")


def in_context(device: torch.device, call: Callable[[], int]) -> int:
    """The result of a driver's ``call``, made once more where this thread has no context yet, as a new one has not."""
    result = call()
    if result == _INVALID_CONTEXT:
        context, index = ctypes.c_void_p(), torch.cuda.current_device() if device.index is None else device.index
        retained = waiting_driver().cuDevicePrimaryCtxRetain(ctypes.byref(context), index)
        check_driver(retained, "asking for the GPU's context")
        check_driver(driver().cuCtxSetCurrent(context), "entering the GPU's context")
        result = call()
    return result


@contextlib.contextmanager
def outside_capture(device: torch.device, what: str) -> Iterator[None]:
    """Inside, this thread may allocate and load, which would end the capture of a CUDA graph otherwise."""
    mode = ctypes.c_int(_RELAXED)
    exchange = lambda: driver().cuThreadExchangeStreamCaptureMode(ctypes.byref(mode))  # noqa: E731
    check_driver(in_context(device, exchange), f"{what} outside a graph's capture")
    try:
        yield
    finally:
        check_driver(exchange(), f"going on with a graph's capture after {what}")


def copy_async(target: int, source: int, num_bytes: int, stream: int) -> None:
    """Queue a copy between addresses of pinned host and device memory; the device's context must be the thread's."""
    result = driver().cuMemcpyAsync(target, source, num_bytes, stream)
    if result:
        check_driver(result, f"copying {num_bytes} bytes from {source:#x} to {target:#x}")


class _Attribute(ctypes.Structure):
    """CUlaunchAttribute: an id and a union of 64 bytes, of which we set the first word."""

    _fields_ = [("id", ctypes.c_int), ("pad", ctypes.c_int), ("value", ctypes.c_int * 16)]


class Launch(ctypes.Structure):
    """CUlaunchConfig."""

    _fields_ = [
        ("grid", ctypes.c_uint * 3),
        ("block", ctypes.c_uint * 3),
        ("shared_bytes", ctypes.c_uint),
        ("stream", ctypes.c_void_p),
        ("attributes", ctypes.POINTER(_Attribute)),
        ("count", ctypes.c_uint),
    ]


def raw_stream(device_index: int) -> int:
    """The address of the stream that is current on a GPU."""
    return torch._C._cuda_getCurrentRawStream(device_index)  # pyright: ignore[reportAttributeAccessIssue]


def allocate(num_bytes: int, stream: int) -> int:
    """The address of so many bytes of the current GPU, for work on ``stream`` alone, until `free`: what
    ``torch.cuda.caching_allocator_alloc`` does once it knows the GPU and the stream."""
    return torch._C._cuda_cudaCachingAllocator_raw_alloc(num_bytes, stream)


def free(address: int) -> None:
    torch._C._cuda_cudaCachingAllocator_raw_delete(address)


Grid = tuple[int, int, int]
Argument = Tensor | int | float | None
_OVERLAP = (_Attribute * 1)(_Attribute(_PROGRAMMATIC_STREAM_SERIALIZATION, 0, (ctypes.c_int * 16)(1)))


class Kernel:
    """One entry point (of the last of ``files``) with fixed macros, loaded on one CUDA device."""

    def __init__(self, files: tuple[str, ...], entry: str, macros: dict[str, int], device: torch.device) -> None:
        major, minor = torch.cuda.get_device_capability(device)
        arch = f"sm_{major}{minor}" + ("a" if (major, minor) == (9, 0) else "")
        self.entry, self.device = entry, device
        self.name = f"{entry} {macros}"
        self.overlaps = major >= 9  # the sources wait for the previous kernel themselves (ptx.cuh: wait_for_previous)
        self.shared_bytes = _STATIC_SHARED_BYTES  # that a block may ask for
        self._launchers: dict[tuple[int, int, int], Launcher] = {}
        cubin = cached_cubin(files, macros, arch)
        with torch.cuda.device(device):
            if not torch.cuda.is_current_stream_capturing():
                torch.empty(1, device=device)  # the context must exist before the driver is asked to load into it
            with outside_capture(device, f"loading {self.name}"):
                module, self.function = ctypes.c_void_p(), ctypes.c_void_p()
                load = lambda: waiting_driver().cuModuleLoadData(ctypes.byref(module), cubin)  # noqa: E731
                check_driver(in_context(device, load), f"loading {self.name}")
                found = waiting_driver().cuModuleGetFunction(ctypes.byref(self.function), module, entry.encode())
                check_driver(found, f"loading {self.name}")

    def launch(
        self, grid: Grid, threads: int, shared_bytes: int, args: Sequence[Argument], weight: Sequence[Tensor] = ()
    ) -> None:
        """Queue on the current stream. Tensors pass as pointers, None as a null pointer, int and float as 32 bits;
        ``weight`` are those of ``args`` that the kernel reads before it waits for the one ahead of it."""
        values = [
            arg.data_ptr() if isinstance(arg, Tensor) else float_bits(arg) if isinstance(arg, float) else arg or 0
            for arg in args
        ]
        self.launcher(threads, shared_bytes, len(args)).queue(grid, values, weight)

    def raise_shared_bytes(self, shared_bytes: int) -> None:
        """Let a block ask for so many."""
        if shared_bytes > self.shared_bytes:
            raised = self.function, _MAX_DYNAMIC_SHARED, shared_bytes
            with outside_capture(self.device, f"setting up {self.name}"):
                result = in_context(self.device, lambda: driver().cuFuncSetAttribute(*raised))
            check_driver(result, f"{shared_bytes} bytes of shared memory for {self.name}")
            self.shared_bytes = shared_bytes

    def launcher(self, threads: int, shared_bytes: int, num_parameters: int) -> "Launcher":
        """The kernel with a block, which is made once."""
        key = (threads, shared_bytes, num_parameters)
        if (found := self._launchers.get(key)) is None:
            found = self._launchers[key] = Launcher(self, *key)
        return found


def float_bits(value: float) -> int:
    return struct.unpack("i", struct.pack("f", value))[0]


class Prepared(NamedTuple):
    """One launch of a `Chain`."""

    kernel: Kernel
    grid: Grid
    threads: int
    shared_bytes: int
    parameters: Sequence[int]  # where each is in the chain's addresses and, after them, its numbers


class Chain:
    """Launches one after the other, of which all is prepared but the addresses; from any thread.

    The addresses are those of ``scratch``, so many bytes each that these launches alone use, and of what `queue` is
    given. Host time is what this is for: values are written once for all launches, only where they changed.
    """

    def __init__(
        self, launches: Sequence[Prepared], num_addresses: int, numbers: Sequence[int], scratch: Sequence[int] = ()
    ) -> None:
        self.launches, self._device = launches, launches[0].kernel.device
        self._index, self._overlaps = self._device.index, launches[0].kernel.overlaps
        self._offsets, self._scratch_bytes = [*itertools.accumulate(scratch, initial=0)][:-1], sum(scratch)
        # of a 32-bit parameter the lower half is read
        self._values = (ctypes.c_int64 * (num_addresses + len(numbers)))(*(0,) * num_addresses, *numbers)
        self._write = functools.partial(struct.Struct(f"{num_addresses}q").pack_into, self._values, 0)
        first = ctypes.addressof(self._values)
        self._configs, self._pointers, self._at = list[Launch](), list[Any](), list[tuple[Any, ...]]()
        for kernel, grid, threads, shared_bytes, parameters in launches:
            kernel.raise_shared_bytes(shared_bytes)
            pointers = (ctypes.c_void_p * len(parameters))(*(first + 8 * place for place in parameters))
            config = Launch(grid, (threads, 1, 1), shared_bytes, None, _OVERLAP, kernel.overlaps)
            self._at.append((ctypes.addressof(config), kernel.function, ctypes.addressof(pointers), None))
            self._configs.append(config)
            self._pointers.append(pointers)
        self._stream, self._overlap = 0, self._overlaps  # as the configurations say
        self._lock = threading.Lock()

    def queue(self, before: Sequence[int], weight: Sequence[Tensor], after: Sequence[int]) -> None:
        """Queue the launches on the current stream of their GPU, whichever is the current one, with the addresses
        ``before``, of ``weight`` as for `Kernel.launch`, and ``after``."""
        if torch._C._cuda_getDevice() != self._index:  # pyright: ignore[reportAttributeAccessIssue]
            with torch.cuda.device(self._device):
                return self.queue(before, weight, after)
        stream, at, launch = raw_stream(self._index), [*map(_address, weight)], driver().cuLaunchKernelEx
        # No tensor, which would cost the host as much as a launch.
        scratch = allocate(self._scratch_bytes, stream) if self._scratch_bytes else 0
        try:
            before = (*[scratch + offset for offset in self._offsets], *before)
            with self._lock:  # whoever is told that a weight was read comes after its first reader
                overlap = self._overlaps and may_overlap(weight, at)
                if stream != self._stream or overlap != self._overlap:
                    self._set(stream, overlap)
                self._write(*before, *at, *after)
                for config in self._at:
                    if result := launch(*config):
                        self._again(config, result)
        finally:
            if scratch:
                free(scratch)  # for what comes next on the stream

    def _set(self, stream: int, overlap: bool) -> None:
        self._stream, self._overlap = stream, overlap
        for config in self._configs:
            config.stream = stream
        self._configs[0].count = overlap  # the others come after it, and so after all that it waits for

    def _again(self, config: tuple[Any, ...], result: int) -> None:
        """Queue what gave the error ``result`` once more in the GPU's context, or raise it."""
        if result == _INVALID_CONTEXT:
            result = in_context(self._device, lambda: driver().cuLaunchKernelEx(*config))
        kernel, grid, *_ = self.launches[self._at.index(config)]
        check_driver(result, f"launching {kernel.name} on a grid of {grid}")


class Launcher:
    """A kernel with a fixed block and so many parameters of 4 or 8 bytes, launched by addresses; from any thread. The
    kernel's last parameter may be a struct, for which all that is left stands, 8 bytes each."""

    def __init__(self, kernel: Kernel, threads: int, shared_bytes: int, num_parameters: int) -> None:
        self.kernel = kernel
        kernel.raise_shared_bytes(shared_bytes)
        self._values = (ctypes.c_uint64 * num_parameters)()  # of a 32-bit parameter the lower half is read
        first = ctypes.addressof(self._values)
        self._parameters = (ctypes.c_void_p * num_parameters)(*(first + 8 * index for index in range(num_parameters)))
        self._launch = Launch((1, 1, 1), (threads, 1, 1), shared_bytes, None, _OVERLAP, 0)
        self._at = (ctypes.addressof(self._launch), kernel.function, ctypes.addressof(self._parameters), None)
        self._grid: Grid | None = None
        self._lock = threading.Lock()

    def queue(self, grid: Grid, values: Sequence[int], weight: Sequence[Tensor] = ()) -> None:
        """Queue ``values`` on the current stream of the kernel's GPU, whichever is the current one; ``weight`` as for
        `Kernel.launch`."""
        kernel, device = self.kernel, self.kernel.device
        if torch._C._cuda_getDevice() != device.index:  # pyright: ignore[reportAttributeAccessIssue]
            with torch.cuda.device(device):
                return self.queue(grid, values, weight)
        overlap = not weight or not kernel.overlaps or may_overlap(weight)
        return self(grid, values, raw_stream(device.index), overlap)

    def __call__(self, grid: Grid, values: Sequence[int], stream: int, overlap: bool = True) -> None:
        """Queue ``values`` (addresses, 32-bit integers) on ``stream``; it may ``overlap`` the kernel ahead of it."""
        launch, kernel = self._launch, self.kernel
        with self._lock:
            self._values[:] = values
            if grid is not self._grid:
                launch.grid[:] = self._grid = grid
            launch.stream = stream
            launch.count = overlap and kernel.overlaps
            result = self._queue()
            if result == _INVALID_CONTEXT:
                result = in_context(kernel.device, self._queue)
        if result:
            check_driver(result, f"launching {kernel.name} on a grid of {grid}")

    def _queue(self) -> int:
        return driver().cuLaunchKernelEx(*self._at)


_kernels: dict[tuple[tuple[str, ...], str, tuple[tuple[str, int], ...], torch.device], Kernel] = {}
_loading = threading.Lock()


def kernel(files: tuple[str, ...], entry: str, macros: dict[str, int], device: torch.device) -> Kernel:
    """The compiled and loaded kernel, made on first use, by one thread, and kept for the life of the process."""
    key = (files, entry, tuple(macros.items()), device)
    if (found := _kernels.get(key)) is None:
        with _loading:
            if (found := _kernels.get(key)) is None:
                found = _kernels[key] = Kernel(files, entry, macros, device)
    return found


# By the ids of a weight's tensors: their addresses and versions at which a launch has read them, and references that
# end the entry before another tensor can have one of the ids.
_read: dict[tuple[int, ...], tuple[list[int], list[weakref.ref[Tensor]]]] = {}


def may_overlap(weight: Sequence[Tensor], at: Sequence[int] | None = None) -> bool:
    """Whether a launch that loads the tensors of ``weight``, which lie ``at`` these addresses, early may overlap the
    kernel ahead; the next one may. Never for tensors made under ``inference_mode``, which do not tell whether they were
    written."""
    key, at = tuple(map(id, weight)), at or [*map(_address, weight)]
    if (known := _read.get(key)) is not None and known[0] == [*at, *map(_version, weight)]:
        return True
    if not torch.cuda.is_current_stream_capturing() and not any(tensor.is_inference() for tensor in weight):
        references = [weakref.ref(tensor, lambda _: _read.pop(key, None)) for tensor in weight]
        _read[key] = [*at, *map(_version, weight)], references
    return False
