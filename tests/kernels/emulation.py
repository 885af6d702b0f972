"""Builds a kernel's own CUDA source for the CPU (emulator.h, emulator*.cpp) and calls it on tensors.

Every CUDA thread becomes a coroutine and barriers stay barriers, so that indexing, staging, padding, reductions across
warps and clusters, and the decode run as written. Shared memory starts as NaN. Who goes on when, and when copies land,
is drawn anew for each launch; a kernel begins before the previous one has ended where that one allows it. What stays
unseen is the hardware: orders of memory that only it has, and speed.
"""

from __future__ import annotations

import ctypes
import functools
import hashlib
import os
import shutil
import subprocess
import tempfile
from collections.abc import Sequence
from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest
import torch
from torch import Tensor

from vblackwell.kernels.fp4 import launch as fp4_launch
from vblackwell.kernels.fp4 import layout, mma_plan, reference, w4a8, wgmma_plan
from vblackwell.kernels.fp4.mma_plan import MmaPlan
from vblackwell.kernels.fp4.w4a8 import W4A8Plan
from vblackwell.kernels.fp4.wgmma_plan import WgmmaPlan
from vblackwell.kernels.runtime import nvrtc
from vblackwell.numerics.formats import FORMATS

A100 = mma_plan.Gpu((8, 0), 108, 2.04e6)
STALE = 1001  # counters that a launch has to clear
GUARD_BYTES = 1 << 19  # bytes after a buffer that nobody may write
HERE = Path(__file__).parent
BUILT = HERE.parents[1] / ".pytest_cache" / "emulation"  # what was built; git ignores it
Args = list[Any]  # tensors, numbers, and None where there is no tensor
COMPILER = ["g++", "-w", "-fPIC"]
# Half of the time that a kernel takes: C++'s own <math.h>, and the linker that is the default.
QUICK = ["-D_GLIBCXX_INCLUDE_NEXT_C_HEADERS", *(["-fuse-ld=gold"] if shutil.which("ld.gold") else [])]
needs_compiler = pytest.mark.skipif(shutil.which("g++") is None, reason="g++ builds the kernels for the CPU")


class EmulationError(Exception):
    """What a kernel may not do: wait for ever, or touch shared memory that is not there or not a block's any more."""


_MMA_MAIN = """
extern "C" void run(const u16* x, const u8* codes, const u8* scales, const float* ts, const u16* bias, void* y, int M,
        int N,
                    int K, int act, int windows, int chunks, int gx, int gz, int shared) {
    launch(gx, SPLITS, gz, THREADS, shared, [=] { fp4_mma(x, codes, scales, ts, bias, y, M, N, K, act, windows,
            chunks); });
}"""
_K_BLOCKS_MAIN = """
extern "C" void run(const u16* x, const u8* codes, const u8* scales, const float* ts, const u16* bias, void* y, int M,
        int N,
                    int K, int act, int windows, int chunks, float4* sums, u32* counters, u32* stale, int stale_count,
                    int gx, int gz, int shared) {
    launch(gx, K_BLOCKS, gz, THREADS, shared, [=] { fp4_mma(x, codes, scales, ts, bias, y, M, N, K, act, windows,
            chunks, sums, counters, stale, stale_count); });
}"""
_NORM_MAIN = """
extern "C" void run(const u16* x, const u8* codes, const u8* scales, const float* ts, const u16* bias, void* y, int M,
        int N,
                    int K, int act, int windows, int chunks, const u16* gain, float eps, int gx,
                    int gz,
                    int shared) {
    launch(gx, SPLITS, gz, THREADS, shared,
           [=] { fp4_mma(x, codes, scales, ts, bias, y, M, N, K, act, windows, chunks, gain, eps); });
}"""
_WGMMA_MAIN = """
extern "C" void run(const u16* x, u8* x_swizzled, const u8* codes, const u8* scales, const float* ts, const u16* bias,
        void* y,
                    int M, int N, int K, int act, int first, int ax, int gx, int gz, int shared) {
    launch(ax, gz, 1, SWIZZLE_THREADS, 16, [=] { swizzle_x(x, x_swizzled, M, K); });
    launch(gx, SPLITS, gz, THREADS, shared, [=] { fp4_wgmma(x_swizzled, codes, scales, ts, bias, y, M, N, K, act,
            first); });
}"""
_DEQUANTIZE_MAIN = """
extern "C" void run(const u8* codes, const u8* fine, const u8* scales, const float* ts, u8* w, int N, int K, int gx,
        int gy, int shared) {
    for (int y = 0; y < gy; y++)
        launch(gx, 1, 1, 32 * WARPS, shared, [=] {
            blockIdx.y = y;
#if PARTS
            fp4_dequantize(codes, fine, scales, ts, w, N, K);
#else
            fp4_dequantize(codes, scales, ts, w, N, K);
#endif
        });
}"""
_PREPARE_MAIN = """
extern "C" void run(const u8* codes, const u8* scales, const float* ts, const u8* top, u8* w, int N, int K,
        float* row_scale,
                    const u16* x, u8* q, float* x_scale, int M, int row_blocks, int gx, int gy, int shared) {
    for (int y = 0; y < gy; y++)
        launch(gx, 1, 1, 32 * WARPS, shared, [=] {
            blockIdx.y = y;
            prepare_e4m3(codes, scales, ts, top, w, N, K, row_scale, x, q, x_scale, M, row_blocks);
        });
}"""
_W4A8_MAIN = """
extern "C" void run(const u16* x, u8* image, float* x_scale, const u8* codes, const u8* scales, const float* ts,
        const u8* top,
                    const u16* bias, u16* y, u8* w, u32* counters, u32* stale, int stale_count, int M, int N, int K,
                    int act,
                    int clusters, int chunk, int head_blocks, int shared) {
    launch(head_blocks, 1, 1, 256, 32, [=] {
        w4a8_head(x, image, x_scale, codes, scales, top, w, counters, stale, stale_count, M, N, K, chunk);
    });
    launch(clusters, SPLITS, 1, THREADS, shared, [=] {
        w4a8(x, image, x_scale, codes, scales, ts, top, bias, y, w, counters, M, N, K, act, clusters, chunk);
    });
}"""
_REAL = ("ptx.cuh", "fp4/wgmma.cuh", "fp4/wgmma_e4m3.cuh", "barrier.cuh")  # what emulator.h stands in for


def _built(words: Sequence[str | Path], *sources: Path | str) -> Path:
    """What the compiler makes of ``sources``, files and texts; of the same ones kept, for other processes too."""
    texts = [source if isinstance(source, str) else source.read_text() for source in sources]
    texts += [path.read_text() for path in sorted(HERE.glob("emulator*.h"))]
    key = hashlib.sha256("\0".join([*map(str, COMPILER), *map(str, words), *texts]).encode()).hexdigest()[:32]
    path = BUILT / key
    if not path.exists():
        BUILT.mkdir(parents=True, exist_ok=True)
        with tempfile.TemporaryDirectory(dir=BUILT) as folder:
            named = [Path(folder, "kernel.cpp") if isinstance(source, str) else source for source in sources]
            for source, file in zip(sources, named, strict=True):
                if isinstance(source, str):
                    file.write_text(source)
            subprocess.run([*COMPILER, *words, "-o", f"{folder}/built", *named], check=True)
            os.replace(f"{folder}/built", path)
    return path


@functools.cache
def _runtime() -> Path:
    """The object file of emulator.cpp and emulator_wgmma.cpp."""
    words = ["-std=c++20", "-O2", "-U_FORTIFY_SOURCE", "-nostdlib", "-r"]  # -U: its checks forbid jumps between stacks
    return _built(words, HERE / "emulator.cpp", HERE / "emulator_wgmma.cpp")


@functools.cache
def _library(files: tuple[str, ...], macros: tuple[tuple[str, int], ...], main: str) -> ctypes.CDLL:
    text = "\n".join(f"#define {name} {value}" for name, value in macros)
    text += (
        "\n" + (HERE / "emulator.h").read_text() + nvrtc.source([name for name in files if name not in _REAL]) + main
    )
    words = ["-std=c++14", "-O0", *QUICK, f"-I{HERE}", "-shared", _runtime()]  # whose name tells its sources
    return ctypes.CDLL(str(_built(words, text)))


def _call(
    files: tuple[str, ...],
    macros: dict[str, int],
    main: str,
    args: Args,
    lagging: range = range(0),
) -> None:
    """`_call_all` of one."""
    _call_all(files, macros, main, [args], lagging)


def _call_all(
    files: tuple[str, ...],
    macros: dict[str, int],
    main: str,
    calls: Sequence[Args],
    lagging: range = range(0),
) -> None:
    """Runs ``main`` with the arguments of one call after the other's in a stream, whose kernels begin as early as they
    may.

    ``lagging`` warps of each block are often late, or, if there are none, some that are drawn.
    """
    kinds = {int: ctypes.c_int, float: ctypes.c_float}
    library = _library(files, tuple(macros.items()), main)
    library.run_launched.restype = ctypes.c_char_p
    for name, value in (("lag_first", lagging.start), ("lag_end", lagging.stop)):
        ctypes.c_int.in_dll(library, name).value = value
    values = [
        [
            kinds[type(arg)](arg) if type(arg) in kinds else ctypes.c_void_p(0 if arg is None else arg.data_ptr())
            for arg in args
        ]
        for args in calls
    ]
    for each in values:  # which are launched, not yet run
        library.run(*each)
    if failure := library.run_launched().decode():
        raise EmulationError(f"{files[-1]} with {macros}: {failure}")


def linear(
    plan: MmaPlan | WgmmaPlan,
    x_MK: Tensor,
    tiled: tuple[Tensor, Tensor, Tensor],
    bias: Tensor | None,
    activation: str,
    n: int,
    gain_K: Tensor | None = None,
    eps: float = 0.0,
    rounded: bool = False,
    processors: int = mma_plan.H200.processors,
    lagging: range = range(0),
) -> Tensor:
    """Output of the kernel of ``plan``, an mma plan with a norm's gain: fp32, or ``rounded`` to the type of x.

    It starts as NaN.
    """
    m, k = x_MK.shape
    if isinstance(plan, MmaPlan) and k % 64:
        plan = replace(plan, chunk=0)
    y_MN = torch.full((m, n), torch.nan, dtype=x_MK.dtype if rounded else torch.float32)
    fp16 = x_MK.dtype == torch.float16
    args = [*tiled, bias, y_MN, m, n, k, reference.ACTIVATIONS.index(activation)]
    if gain_K is not None:
        assert isinstance(plan, MmaPlan)
        grid = (-(-n // (32 * plan.row_warps)), -(-m // plan.tokens), plan.shared_bytes(k, True))
        args = [x_MK, *args, *plan.chunks(k), gain_K, eps, *grid]
        _call(mma_plan.MMA_FILES, plan.macros(fp16, True, True), _NORM_MAIN, args)
    elif isinstance(plan, MmaPlan):
        macros = plan.macros(fp16, not rounded, unaligned=k % 8 > 0)
        main = _MMA_MAIN if plan.k_blocks == 1 else _K_BLOCKS_MAIN
        _call(mma_plan.MMA_FILES, macros, main, _mma_call(plan, x_MK, args))
    else:
        for rows in wgmma_plan.launches(plan, m, n, processors):
            macros, x_swizzled = rows.plan.macros(fp16, not rounded), _swizzled(rows.plan, m, k)
            _call(wgmma_plan.WGMMA_FILES, macros, _WGMMA_MAIN, _wgmma_call(rows, x_MK, args, x_swizzled), lagging)
    return y_MN


def linear_layers(
    plan: MmaPlan | WgmmaPlan,
    x_MK: Tensor,
    layers: Sequence[tuple[Tensor, Tensor, Tensor]],
    lagging: range = range(0),
) -> list[Tensor]:
    """Rounded outputs of square weights, each the next one's x, of launches that begin early and share what a layer
    needs in addition.
    """
    m, k = x_MK.shape
    written = [torch.full_like(x_MK, torch.nan) for _ in layers]
    each = list(zip([x_MK, *written[:-1]], layers, written, strict=True))
    macros = plan.macros(x_MK.dtype == torch.float16)
    if isinstance(plan, MmaPlan):
        calls = [_mma_call(plan, x, [*tiled, None, y, m, k, k, 0]) for x, tiled, y in each]
        _call_all(mma_plan.MMA_FILES, macros, _MMA_MAIN, calls, lagging)
    else:
        (rows,), x_swizzled = wgmma_plan.launches(plan, m, k, mma_plan.H200.processors), _swizzled(plan, m, k)
        calls = [_wgmma_call(rows, x, [*tiled, None, y, m, k, k, 0], x_swizzled) for x, tiled, y in each]
        _call_all(wgmma_plan.WGMMA_FILES, macros, _WGMMA_MAIN, calls, lagging)
    return written


def _mma_call(plan: MmaPlan, x_MK: Tensor, args: Args) -> Args:
    (m, k), n = x_MK.shape, args[-3]
    columns, rows = -(-n // (32 * plan.row_warps)), -(-m // plan.tokens)
    meeting = []
    if plan.k_blocks > 1:  # the sums that blocks leave, which count from zero; counters that a launch has to clear
        left = torch.full((plan.left_sums(m, n),), torch.nan)
        meeting = [left, torch.zeros(columns * rows, dtype=torch.int32), torch.full((5,), STALE, dtype=torch.int32), 3]
    return [x_MK, *args, *plan.chunks(k), *meeting, columns, rows, plan.shared_bytes(k)]


def _wgmma_call(rows: wgmma_plan.Rows, x_MK: Tensor, args: Args, x_swizzled: Tensor) -> Args:
    (m, k), plan = x_MK.shape, rows.plan
    grid = (-(-k // 64 * plan.tokens * 8 // 256), rows.blocks, -(-m // plan.tokens))
    return [x_MK, x_swizzled, *args, rows.first, *grid, plan.shared_bytes()]


def _swizzled(plan: WgmmaPlan, m: int, k: int) -> Tensor:
    """Room for x as ``swizzle_x`` writes it, of NaN."""
    return torch.full((-(-m // plan.tokens) * -(-k // 64) * plan.tokens * 128,), 0xFF, dtype=torch.uint8)


def dequantize(weight: Sequence[Tensor], n: int, k: int, dtype: torch.dtype) -> Tensor:
    """What ``fp4_dequantize`` writes, of a weight in one part or two."""
    codes, *fine, scales, tensor_scale = weight
    w_NK = torch.full((n, k), torch.nan).to(dtype)
    macros = {"FP16": 0, "OUT": fp4_launch.OUT_TYPES[dtype], "PARTS": len(fine)}
    warps = 4 if dtype == torch.float32 else 8
    grid = ((k + 64 * warps - 1) // (64 * warps), -(-n // 32), warps * 32 * 64 * w_NK.element_size())
    args = [codes, fine[0] if fine else None, scales, tensor_scale, w_NK, n, k, *grid]
    _call(fp4_launch.DEQUANTIZE_FILES, macros, _DEQUANTIZE_MAIN, args)
    return w_NK


def prepare_e4m3(
    x_MK: Tensor, tiled: tuple[Tensor, Tensor, Tensor], row_top: Tensor, n: int, k: int, row_blocks: int
) -> tuple[Tensor, Tensor, Tensor, Tensor]:
    """As ``w4a8.run_prepare_e4m3``, with so many blocks under each other for the rows of x."""
    m, fp8, nan = x_MK.shape[0], torch.float8_e4m3fn, torch.nan
    q_MK, w_NK = torch.full((m, k), nan).to(fp8), torch.full((n, k), nan).to(fp8)
    scale_M1, scale_1N = torch.full((m, 1), nan), torch.full((1, n), nan)
    macros = w4a8.prepare_macros(x_MK.dtype == torch.float16, k)
    args = [*tiled, row_top, w_NK, n, k, scale_1N, x_MK, q_MK, scale_M1, m, row_blocks]
    grid = (-(-k // 512), -(-n // 32) + row_blocks, w4a8.PREPARE_SHARED_BYTES)
    _call(w4a8.E4M3_FILES, macros, _PREPARE_MAIN, [*args, *grid])
    return q_MK, scale_M1, w_NK, scale_1N


def run_w4a8(
    plan: W4A8Plan,
    x_MK: Tensor,
    tiled: tuple[Tensor, Tensor, Tensor],
    bias: Tensor | None,
    activation: str,
    n: int,
    clusters: int,
    lagging: range = range(0),
) -> Tensor:
    """As ``w4a8.run_w4a8`` on so many clusters; all that the kernels write starts as NaN, and nothing else is
    written.
    """
    return run_w4a8_layers(plan, x_MK, [tiled], bias, activation, n, clusters, lagging)[0]


def run_w4a8_layers(
    plan: W4A8Plan,
    x_MK: Tensor,
    layers: Sequence[tuple[Tensor, Tensor, Tensor]],
    bias: Tensor | None,
    activation: str,
    n: int,
    clusters: int,
    lagging: range = range(0),
) -> list[Tensor]:
    """Outputs of `run_w4a8` with one weight after the other, each of which is the next one's x (then N is K).

    They share all that a layer needs in addition, and the counters as ``kernels/runtime/counters.py`` hands them out.
    """
    m, k = x_MK.shape
    assert len(layers) == 1 or n == k
    sizes = w4a8.cut(plan, m, n, k, clusters)
    tokens = sizes.pairs * w4a8.CLUSTER * 128
    lengths = [tokens * sizes.steps * 128, sizes.columns * sizes.steps * plan.features * 128, 4 * m]
    lengths += [4 * STALE] * 2 + [2 * m * n] * len(layers)
    assert sizes.counters <= STALE
    written = [torch.full((length + GUARD_BYTES,), 0xFF, dtype=torch.uint8) for length in lengths]
    (image, weight, scale_M, *counters), outputs = written[:5], written[5:]
    counters[0][: 4 * STALE] = 0
    calls, used = [], STALE
    for turn, (x, tiled, y) in enumerate(zip([x_MK, *outputs[:-1]], layers, outputs, strict=True)):
        now, stale = counters[turn % 2], counters[1 - turn % 2]
        args = [x, image, scale_M, *tiled, w4a8.row_tops(tiled[1], n, k), bias, y, weight, now, stale, used]
        shape = [m, n, k, reference.ACTIVATIONS.index(activation)]
        calls.append([*args, *shape, clusters, sizes.chunk, sizes.head_blocks, plan.shared_bytes()])
        used = sizes.counters
    _call_all(w4a8.FILES, plan.macros(x_MK.dtype == torch.float16, k), _W4A8_MAIN, calls, lagging)
    for length, buffer in zip(lengths, written, strict=True):
        assert (buffer[length:] == 0xFF).all(), "written after its end"
    assert not counters[len(layers) % 2][: 4 * STALE].any(), "counters of the launch before are left"
    return [y[: 2 * m * n].view(x_MK.dtype).view(m, n) for y in outputs]


def random_weight(format: str, n: int, k: int, seed: int = 0) -> tuple[Tensor, tuple[Tensor, Tensor, Tensor]]:
    """(fp32 weight, tiled tensors) of random codes under all finite scales of nvfp4, or exponents that span 2^16 of
    mxfp4.
    """
    generator = torch.Generator().manual_seed(seed)
    form = FORMATS[format]
    codes = torch.randint(0, 256, form.codes_shape(n, k), dtype=torch.uint8, generator=generator)
    low, high = (0, 127) if format == "nvfp4" else (115, 132)
    scales = torch.randint(low, high, form.scales_shape(n, k), dtype=torch.uint8, generator=generator)
    tensor_scale = torch.tensor(0.37 if format == "nvfp4" else 1.0)
    w_NK = reference.dequantize(codes, scales, tensor_scale, format, n, k)
    return w_NK, layout.to_tiled(codes, scales, tensor_scale, format, n, k)


def error_over_bound(y_MN: Tensor, x_MK: Tensor, w_NK: Tensor) -> float:
    """Largest error of an fp32 result over 4 * 2^-24 * sqrt(K) * sum |w||x|: fp32 sums in any order, tensor cores
    included.
    """
    exact = x_MK.double() @ w_NK.double().t()
    bound = 4 * 2**-24 * x_MK.shape[1] ** 0.5 * (x_MK.double().abs() @ w_NK.double().abs().t()) + 1e-30
    ratio = ((y_MN.double() - exact).abs() / bound).max().item()
    return ratio if ratio == ratio else float("inf")
