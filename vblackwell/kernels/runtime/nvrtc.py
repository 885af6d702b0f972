"""CUDA C++ kernels of this package, compiled for the GPU at hand on first use and launched through the driver.

NVRTC comes with PyTorch's CUDA wheels, so that users need no toolkit and the package ships no binaries. Triton is the
first choice elsewhere in this package; these kernels fix which register holds which weight, which its language does not let one say.
Compiled code is kept under ``$XDG_CACHE_HOME/vblackwell/cubin``, named by a hash of source, macros, target and compiler.
"""

from __future__ import annotations

import contextlib
import ctypes
import functools
import hashlib
import importlib.util
import os
import tempfile
import threading
from collections.abc import Callable, Iterator, Sequence
from pathlib import Path

import torch
from torch import Tensor

from vblackwell.errors import Unsupported, VBError
from vblackwell.kernels.runtime.overlap import may_overlap

SOURCES = Path(__file__).parents[1] / "cuda"
_MAX_DYNAMIC_SHARED = 8  # CU_FUNC_ATTRIBUTE_MAX_DYNAMIC_SHARED_SIZE_BYTES
_INVALID_CONTEXT = 201  # CUDA_ERROR_INVALID_CONTEXT: also of a thread that has none
_RELAXED = 2  # CU_STREAM_CAPTURE_MODE_RELAXED


class KernelError(VBError):
    """A kernel did not compile or the driver refused it; the message has its log."""


def cache_folder() -> Path:
    """Where compiled code and tuning results are kept; ``XDG_CACHE_HOME`` is respected."""
    return Path(os.environ.get("XDG_CACHE_HOME") or Path.home() / ".cache") / "vblackwell"


@functools.lru_cache
def _nvrtc() -> ctypes.CDLL:
    """NVRTC, of the CUDA version that PyTorch was built with where it was built with one.

    Raises:
        Unsupported: there is none.
    """
    major = (torch.version.cuda or "13").split(".")[0]
    names = [f"libnvrtc.so.{major}"]
    spec = importlib.util.find_spec("nvidia")
    for folder in spec.submodule_search_locations or () if spec else ():
        names += [str(path) for path in sorted(Path(folder).glob(f"*/lib/libnvrtc.so.{major}*"))]
    for name in names:
        try:
            for builtins in sorted(Path(name).parent.glob("libnvrtc-builtins.so.*")) if "/" in name else ():
                ctypes.CDLL(str(builtins))  # NVRTC asks for it by its bare name
            return ctypes.CDLL(name)
        except OSError:
            continue
    raise Unsupported(f"libnvrtc.so.{major} was not found: install nvidia-cuda-nvrtc, or use the 'dequantize' backend")


def why_not() -> list[str]:
    """Reasons why kernels cannot be compiled here; empty if they can."""
    try:
        _nvrtc()
    except Unsupported as error:
        return [str(error)]
    return []


def source(files: Sequence[str]) -> str:
    """The text of ``files`` under ``cuda/``, joined; each says where it begins, so that a tool's reports name its lines."""
    return "\n".join(f'#line 1 "{name}"\n{(SOURCES / name).read_text()}' for name in files)


def _options(macros: dict[str, int], arch: str) -> list[str]:
    lines = ["--generate-line-info"] if os.environ.get("VBLACKWELL_LINE_INFO") else []  # for profilers and sanitizers
    return [
        f"--gpu-architecture={arch}",
        "--std=c++17",
        *lines,
        *(f"-D{name}={value}" for name, value in sorted(macros.items())),
    ]


def compile_cubin(files: Sequence[str], macros: dict[str, int], arch: str) -> bytes:
    """Machine code for ``arch`` ('sm_90a'). Needs no GPU.

    Raises:
        KernelError: the compiler's log.
        Unsupported: NVRTC is not installed.
    """
    nvrtc = _nvrtc()
    text = source(files).encode()
    options = _options(macros, arch)
    program = ctypes.c_void_p()
    _check_nvrtc(nvrtc, nvrtc.nvrtcCreateProgram(ctypes.byref(program), text, files[-1].encode(), 0, None, None))
    try:
        array = (ctypes.c_char_p * len(options))(*(option.encode() for option in options))
        if nvrtc.nvrtcCompileProgram(program, len(options), array) != 0:
            size = ctypes.c_size_t()
            nvrtc.nvrtcGetProgramLogSize(program, ctypes.byref(size))
            log = ctypes.create_string_buffer(size.value)
            nvrtc.nvrtcGetProgramLog(program, log)
            raise KernelError(f"{files[-1]} does not compile for {arch} with {macros}:\n{log.value.decode()}")
        size = ctypes.c_size_t()
        _check_nvrtc(nvrtc, nvrtc.nvrtcGetCUBINSize(program, ctypes.byref(size)))
        cubin = ctypes.create_string_buffer(size.value)
        _check_nvrtc(nvrtc, nvrtc.nvrtcGetCUBIN(program, cubin))
        return cubin.raw
    finally:
        nvrtc.nvrtcDestroyProgram(ctypes.byref(program))


def _check_nvrtc(nvrtc: ctypes.CDLL, result: int) -> None:
    if result != 0:
        nvrtc.nvrtcGetErrorString.restype = ctypes.c_char_p
        raise KernelError(f"NVRTC: {nvrtc.nvrtcGetErrorString(result).decode()}")


def cached_cubin(files: Sequence[str], macros: dict[str, int], arch: str) -> bytes:
    """``compile_cubin``, kept on disk."""
    version = (ctypes.c_int(), ctypes.c_int())
    _nvrtc().nvrtcVersion(ctypes.byref(version[0]), ctypes.byref(version[1]))
    key = f"{source(files)}|{_options(macros, arch)}|{version[0].value}.{version[1].value}"
    path = cache_folder() / "cubin" / f"{hashlib.sha256(key.encode()).hexdigest()[:32]}.cubin"
    if path.exists():
        return path.read_bytes()
    cubin = compile_cubin(files, macros, arch)
    write_atomically(path, cubin)
    return cubin


def write_atomically(path: Path, content: bytes) -> None:
    """``content`` appears at ``path`` whole or not at all, also when the power fails; a cache that cannot be written is no error."""
    with contextlib.suppress(OSError):
        path.parent.mkdir(parents=True, exist_ok=True)
        with tempfile.NamedTemporaryFile(dir=path.parent, delete=False) as file:
            try:
                file.write(content)
                file.flush()
                os.fsync(file.fileno())  # or the new name may stand for an empty file
                os.replace(file.name, path)
            except OSError:
                os.unlink(file.name)


@functools.lru_cache
def driver() -> ctypes.CDLL:
    """The CUDA driver's own interface."""
    return ctypes.CDLL("libcuda.so.1")


def driver_version() -> int:
    """CUDA version that the driver supports, as 1000 * major + 10 * minor."""
    version = ctypes.c_int()
    check_driver(driver().cuDriverGetVersion(ctypes.byref(version)), "asking for the driver's version")
    return version.value


def check_driver(result: int, what: str) -> None:
    if result != 0:
        text = ctypes.c_char_p()
        driver().cuGetErrorString(result, ctypes.byref(text))
        raise KernelError(f"{what}: {text.value.decode() if text.value else f'CUDA error {result}'}")


def in_context(device: torch.device, call: Callable[[], int]) -> int:
    """The result of a driver's ``call``, made once more where this thread has no context yet.

    CUDA's runtime gives a thread the device's primary context with its first call that needs one. PyTorch's allocator may hand out
    memory without such a call, so in a thread that has just begun ours can be the first.
    """
    result = call()
    if result == _INVALID_CONTEXT:
        context, index = ctypes.c_void_p(), torch.cuda.current_device() if device.index is None else device.index
        check_driver(driver().cuDevicePrimaryCtxRetain(ctypes.byref(context), index), "asking for the GPU's context")
        check_driver(driver().cuCtxSetCurrent(context), "entering the GPU's context")
        result = call()
    return result


@contextlib.contextmanager
def outside_capture(device: torch.device, what: str) -> Iterator[None]:
    """Inside, this thread may allocate and load, which would end the capture of a CUDA graph otherwise: nothing of it is captured.

    Args:
        what: this is for, of errors.
    """
    mode = ctypes.c_int(_RELAXED)
    exchange = lambda: driver().cuThreadExchangeStreamCaptureMode(ctypes.byref(mode))  # noqa: E731
    check_driver(in_context(device, exchange), f"{what} outside a graph's capture")
    try:
        yield
    finally:
        check_driver(exchange(), f"going on with a graph's capture after {what}")


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


_PROGRAMMATIC_STREAM_SERIALIZATION = 6
OVERLAP = (_Attribute * 1)(_Attribute(_PROGRAMMATIC_STREAM_SERIALIZATION, 0, (ctypes.c_int * 16)(1)))


class Kernel:
    """One entry point with fixed macros, loaded on one device.

    Args:
        files: sources under ``cuda/`` in order; the last one has the entry point.
        entry: its name.
        macros: what the source is compiled with.
        device: CUDA device it is loaded on.
    """

    def __init__(self, files: tuple[str, ...], entry: str, macros: dict[str, int], device: torch.device) -> None:
        major, minor = torch.cuda.get_device_capability(device)
        arch = f"sm_{major}{minor}" + ("a" if (major, minor) == (9, 0) else "")
        self.name = f"{entry} {macros}"
        self._shared_bytes = 48 * 1024
        self._cubin = cached_cubin(files, macros, arch)
        with torch.cuda.device(device):
            if not torch.cuda.is_current_stream_capturing():
                torch.empty(1, device=device)  # the context must exist before the driver is asked to load into it
        with torch.cuda.device(device), outside_capture(device, f"loading {self.name}"):
            module, function = ctypes.c_void_p(), ctypes.c_void_p()
            check_driver(
                in_context(device, lambda: driver().cuModuleLoadData(ctypes.byref(module), self._cubin)),
                f"loading {self.name}",
            )
            check_driver(
                driver().cuModuleGetFunction(ctypes.byref(function), module, entry.encode()), f"loading {self.name}"
            )
        self.function = function
        self._device = device
        self.overlaps = major >= 9  # the sources wait for the previous kernel themselves (ptx.cuh: wait_for_previous)

    def launch(
        self, grid: tuple[int, int, int], threads: int, shared_bytes: int, args: Sequence[Tensor | int | float | None],
        weight: Sequence[Tensor] = (),
    ) -> None:  # fmt: skip
        """Enqueue on the current stream. Tensors pass as pointers, None as a null pointer, int and float as 32 bits.

        Args:
            weight: those of ``args`` that the kernel reads before it waits for the one ahead of it.
        """
        if shared_bytes > self._shared_bytes:
            with outside_capture(self._device, f"setting up {self.name}"):
                result = in_context(
                    self._device, lambda: driver().cuFuncSetAttribute(self.function, _MAX_DYNAMIC_SHARED, shared_bytes)
                )
            check_driver(result, f"{shared_bytes} bytes of shared memory for {self.name}")
            self._shared_bytes = shared_bytes
        values: list[ctypes.c_int32 | ctypes.c_float | ctypes.c_void_p] = []
        for arg in args:
            if isinstance(arg, Tensor):
                values.append(ctypes.c_void_p(arg.data_ptr()))
            elif isinstance(arg, float):
                values.append(ctypes.c_float(arg))
            else:
                values.append(ctypes.c_void_p(0) if arg is None else ctypes.c_int32(arg))
        pointers = (ctypes.c_void_p * len(values))(*(ctypes.addressof(value) for value in values))
        launch = Launch(grid, (threads, 1, 1), shared_bytes, torch.cuda.current_stream(self._device).cuda_stream)
        with torch.cuda.device(self._device):
            if self.overlaps and (not weight or may_overlap(weight)):
                launch.attributes, launch.count = OVERLAP, 1
            result = in_context(
                self._device, lambda: driver().cuLaunchKernelEx(ctypes.byref(launch), self.function, pointers, None)
            )
        check_driver(result, f"launching {self.name} on a grid of {grid}")


_kernels: dict[tuple[tuple[str, ...], str, tuple[tuple[str, int], ...], torch.device], Kernel] = {}
_loading = threading.Lock()


def kernel(files: tuple[str, ...], entry: str, macros: dict[str, int], device: torch.device) -> Kernel:
    """The compiled and loaded kernel, made on first use, by one thread, and kept for the life of the process."""
    key = (files, entry, tuple(macros.items()), device)
    found = _kernels.get(key)
    if found is None:
        with _loading:
            found = _kernels.get(key)
            if found is None:
                found = _kernels[key] = Kernel(files, entry, macros, device)
    return found
