"""CUDA C++ kernels of this package, compiled for the GPU at hand on first use by the NVRTC of PyTorch's CUDA wheels.

They fix which register holds which weight, which Triton cannot. Compiled code is kept under
``$XDG_CACHE_HOME/vblackwell/cubin``, named by a hash of source, macros, target and compiler. A source is a list of
files that are joined: headers of ``runtime/cuda`` by their bare names, a package's by ``package/name``.
"""

import ctypes
import functools
import hashlib
import importlib.util
import os
from collections.abc import Sequence
from pathlib import Path

import torch

from vblackwell.errors import Unsupported, VBError
from vblackwell.machine.cache import cache_root, write_atomically

KERNELS = Path(__file__).parents[1]


class KernelError(VBError):
    """A kernel did not compile or the driver refused it; the message has its log."""


@functools.lru_cache
def _nvrtc() -> ctypes.CDLL:
    """NVRTC, of the CUDA version that PyTorch was built with if any; raises Unsupported where there is none."""
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


@functools.lru_cache
def why_not() -> tuple[str, ...]:
    """Reasons why kernels cannot be compiled here; empty if they can."""
    try:
        _nvrtc()
    except Unsupported as error:
        return (str(error),)
    return ()


def path_of(name: str) -> Path:
    folder, _, file = name.rpartition("/")
    return Path(name) if folder.startswith("/") else KERNELS / (folder or "runtime") / "cuda" / file


def source(files: Sequence[str]) -> str:
    """The text of ``files``, joined; each says where it begins, so that a tool's reports name its lines."""
    return "\n".join(f'#line 1 "{path.name}"\n{path.read_text()}' for path in map(path_of, files))


def _options(macros: dict[str, int], arch: str) -> list[str]:
    lines = ["--generate-line-info"] if os.environ.get("VBLACKWELL_LINE_INFO") else []  # for profilers and sanitizers
    defines = (f"-D{name}={value}" for name, value in sorted(macros.items()))
    return [f"--gpu-architecture={arch}", "--std=c++17", *lines, *defines]


def compile_cubin(files: Sequence[str], macros: dict[str, int], arch: str) -> bytes:
    """Machine code for ``arch`` ('sm_90a'). Needs no GPU. Raises KernelError with the compiler's log."""
    nvrtc = _nvrtc()
    text = source(files).encode()
    options = _options(macros, arch)
    program = ctypes.c_void_p()
    _check(nvrtc, nvrtc.nvrtcCreateProgram(ctypes.byref(program), text, files[-1].encode(), 0, None, None))

    def output(kind: str) -> ctypes.Array[ctypes.c_char]:
        size = ctypes.c_size_t()
        _check(nvrtc, getattr(nvrtc, f"nvrtcGet{kind}Size")(program, ctypes.byref(size)))
        buffer = ctypes.create_string_buffer(size.value)
        _check(nvrtc, getattr(nvrtc, f"nvrtcGet{kind}")(program, buffer))
        return buffer

    try:
        array = (ctypes.c_char_p * len(options))(*(option.encode() for option in options))
        if nvrtc.nvrtcCompileProgram(program, len(options), array) != 0:
            log = output("ProgramLog").value.decode()
            raise KernelError(f"{files[-1]} does not compile for {arch} with {macros}:\n{log}")
        return output("CUBIN").raw
    finally:
        nvrtc.nvrtcDestroyProgram(ctypes.byref(program))


def _check(nvrtc: ctypes.CDLL, result: int) -> None:
    if result != 0:
        nvrtc.nvrtcGetErrorString.restype = ctypes.c_char_p
        raise KernelError(f"NVRTC: {nvrtc.nvrtcGetErrorString(result).decode()}")


def cached_cubin(files: Sequence[str], macros: dict[str, int], arch: str) -> bytes:
    version = (ctypes.c_int(), ctypes.c_int())
    _nvrtc().nvrtcVersion(ctypes.byref(version[0]), ctypes.byref(version[1]))
    key = f"{source(files)}|{_options(macros, arch)}|{version[0].value}.{version[1].value}"
    path = cache_root() / "cubin" / f"{hashlib.sha256(key.encode()).hexdigest()[:32]}.cubin"
    if path.exists():
        return path.read_bytes()
    cubin = compile_cubin(files, macros, arch)
    write_atomically(path, cubin)
    return cubin
