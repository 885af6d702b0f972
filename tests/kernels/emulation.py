"""Builds a kernel's own CUDA source for the CPU (emulator.h, emulator*.cpp) and calls it on tensors.

Every CUDA thread becomes a coroutine and barriers stay barriers, so that indexing, staging, padding, reductions across warps and
clusters, and the decode run as written. Shared memory starts as NaN. Who goes on when, and when copies land, is drawn anew for each
launch. What stays unseen is the hardware: orders of memory that only it has, and speed.
"""

from __future__ import annotations

import ctypes
import functools
import shutil
import subprocess
import tempfile
from collections.abc import Sequence
from pathlib import Path

import pytest
import torch
from torch import Tensor

from vblackwell.kernels import fp4_cuda, fp4_plan, layout, nvrtc, reference, w4a8_cuda
from vblackwell.kernels.fp4_plan import MmaPlan, WgmmaPlan
from vblackwell.kernels.w4a8_cuda import W4A8Plan
from vblackwell.numerics.formats import FORMATS

STALE = 1001  # counters that a launch has to clear
BEHIND = 1 << 19  # bytes after a buffer that nobody may write
HERE = Path(__file__).parent
COMPILER = ["g++", "-w", "-fPIC"]
needs_compiler = pytest.mark.skipif(shutil.which("g++") is None, reason="g++ builds the kernels for the CPU")


class EmulationError(Exception):
    """What a kernel may not do: wait for ever, or touch shared memory that is not there or not a block's any more."""


_MMA_MAIN = """
extern "C" void run(const u16* x, const u8* codes, const u8* scales, const float* ts, const u16* bias, void* y, int M, int N,
                    int K, int act, int windows, int chunks, int gx, int gz, int shared) {
    launch(gx, SPLITS, gz, THREADS, shared, [=] { fp4_mma(x, codes, scales, ts, bias, y, M, N, K, act, windows, chunks); });
}"""
_NORM_MAIN = """
extern "C" void run(const u16* x, const u8* codes, const u8* scales, const float* ts, const u16* bias, void* y, int M, int N,
                    int K, int act, int windows, int chunks, const u16* gain, const float* sums, float eps, int gx, int gz,
                    int shared) {
    launch(gx, SPLITS, gz, THREADS, shared,
           [=] { fp4_mma(x, codes, scales, ts, bias, y, M, N, K, act, windows, chunks, gain, sums, eps); });
}"""
_WGMMA_MAIN = """
extern "C" void run(const u16* x, u8* image, const u8* codes, const u8* scales, const float* ts, const u16* bias, void* y,
                    int M, int N, int K, int act, int first, int ax, int gx, int gz, int shared) {
    launch(ax, gz, 1, ARRANGE_THREADS, 16, [=] { arrange(x, image, M, K); });
    launch(gx, SPLITS, gz, THREADS, shared, [=] { fp4_wgmma(image, codes, scales, ts, bias, y, M, N, K, act, first); });
}"""
_HELPED_MAIN = """
extern "C" void run(const u16* x, u8* image, const u8* codes, const u8* scales, const float* ts, const u16* bias, void* y,
                    int M, int N, int K, int act, int first, float4* passed, u32* counters, int ax, int gx, int gz, int shared) {
    launch(ax, gz, 1, ARRANGE_THREADS, 16, [=] { arrange(x, image, M, K, counters, (N + 63) / 64); });
    in_order = true;
    launch(gx, SPLITS, gz, THREADS, shared,
           [=] { fp4_wgmma(image, codes, scales, ts, bias, y, M, N, K, act, first, passed, counters); });
    in_order = false;
}"""
_DEQUANTIZE_MAIN = """
extern "C" void run(const u8* codes, const u8* scales, const float* ts, u8* w, int N, int K, int gx, int gy, int shared) {
    for (int y = 0; y < gy; y++)
        launch(gx, 1, 1, 32 * WARPS, shared, [=] {
            blockIdx.y = y;
            fp4_dequantize(codes, scales, ts, w, N, K);
        });
}"""
_PREPARE_MAIN = """
extern "C" void run(const u8* codes, const u8* scales, const float* ts, const u8* top, u8* w, int N, int K, float* row_scale,
                    const u16* x, u8* q, float* x_scale, int M, int row_blocks, int gx, int gy, int shared) {
    for (int y = 0; y < gy; y++)
        launch(gx, 1, 1, 32 * WARPS, shared, [=] {
            blockIdx.y = y;
            prepare_e4m3(codes, scales, ts, top, w, N, K, row_scale, x, q, x_scale, M, row_blocks);
        });
}"""
_W4A8_MAIN = """
extern "C" void run(const u16* x, u8* image, float* x_scale, const u8* codes, const u8* scales, const float* ts, const u8* top,
                    const u16* bias, u16* y, u8* w, u32* counters, u32* stale, int stale_count, int M, int N, int K, int act,
                    int clusters, int chunk, int head_blocks, int shared) {
    launch(head_blocks, 1, 1, 256, 32, [=] {
        w4a8_head(x, image, x_scale, codes, scales, top, w, counters, stale, stale_count, M, N, K, chunk);
    });
    launch(clusters, SPLITS, 1, THREADS, shared, [=] {
        w4a8(x, image, x_scale, codes, scales, ts, top, bias, y, w, counters, M, N, K, act, clusters, chunk);
    });
}"""
_REAL = ("ptx.cuh", "wgmma.cuh", "wgmma_e4m3.cuh", "barrier.cuh")  # what emulator.h stands in for


@functools.cache
def _runtime() -> bytes:
    """The object file of emulator.cpp and emulator_wgmma.cpp."""
    with tempfile.TemporaryDirectory(prefix="vblackwell-emulation-") as folder:
        path = Path(folder) / "emulator.o"
        # -U: its checks forbid jumps between stacks
        words = ["-std=c++20", "-O2", "-U_FORTIFY_SOURCE", "-nostdlib", "-r", "-o", str(path)]
        subprocess.run([*COMPILER, *words, HERE / "emulator.cpp", HERE / "emulator_wgmma.cpp"], check=True)
        return path.read_bytes()


@functools.lru_cache
def _library(files: tuple[str, ...], macros: tuple[tuple[str, int], ...], main: str) -> ctypes.CDLL:
    text = "\n".join(f"#define {name} {value}" for name, value in macros)
    text += (
        "\n" + (HERE / "emulator.h").read_text() + nvrtc.source([name for name in files if name not in _REAL]) + main
    )
    folder = Path(tempfile.mkdtemp(prefix="vblackwell-emulation-"))
    (folder / "kernel.cpp").write_text(text)
    (folder / "emulator.o").write_bytes(_runtime())
    words = ["-std=c++14", "-O0", f"-I{HERE}", "-shared", "-o", "kernel.so", "kernel.cpp", "emulator.o"]
    subprocess.run([*COMPILER, *words], cwd=folder, check=True)
    library = ctypes.CDLL(str(folder / "kernel.so"))
    shutil.rmtree(folder)
    return library


def _call(
    files: tuple[str, ...],
    macros: dict[str, int],
    main: str,
    args: Sequence[Tensor | float | None],
    lagging: range = range(0),
) -> None:
    """Runs ``main``; ``lagging`` warps of each block are often late, or, if there are none, some that are drawn."""
    kinds = {int: ctypes.c_int, float: ctypes.c_float}
    values = [
        kinds[type(arg)](arg) if type(arg) in kinds else ctypes.c_void_p(0 if arg is None else arg.data_ptr())
        for arg in args
    ]
    library = _library(files, tuple(macros.items()), main)
    library.take_failure.restype = ctypes.c_char_p
    for name, value in (("lag_first", lagging.start), ("lag_end", lagging.stop)):
        ctypes.c_int.in_dll(library, name).value = value
    library.run(*values)
    if failure := library.take_failure().decode():
        raise EmulationError(f"{files[-1]} with {macros}: {failure}")


def linear(
    plan: MmaPlan | WgmmaPlan,
    x_MK: Tensor,
    tiled: tuple[Tensor, Tensor, Tensor],
    bias: Tensor | None,
    activation: str,
    n: int,
    norm: fp4_cuda.Norm | None = None,
    rounded: bool = False,
    processors: int = fp4_plan.MULTIPROCESSORS,
    lagging: range = range(0),
) -> Tensor:
    """Output of the kernel of ``plan``, an mma plan with ``norm``: fp32, or ``rounded`` to the type of x; starts as NaN."""
    x_MK, k = fp4_cuda.aligned(x_MK)
    m = x_MK.shape[0]
    if isinstance(plan, MmaPlan) and k % 64:
        plan = plan.without_bulk()
    y_MN = torch.full((m, n), torch.nan, dtype=x_MK.dtype if rounded else torch.float32)
    fp16 = x_MK.dtype == torch.float16
    macros = plan.macros(fp16, not rounded)
    act = reference.ACTIVATIONS.index(activation)
    blocks = -(-m // plan.tokens)
    if norm is not None:
        assert isinstance(plan, MmaPlan)
        grid = (-(-n // (32 * plan.row_warps)), blocks, plan.shared_bytes(k, norm.kind))
        args = [x_MK, *tiled, bias, y_MN, m, n, k, act, *plan.chunks(k), norm.gain, norm.gain_sums, norm.eps, *grid]
        _call(fp4_plan.MMA_FILES, plan.macros(fp16, True, norm.kind), _NORM_MAIN, args)
    elif isinstance(plan, MmaPlan):
        grid = (-(-n // (32 * plan.row_warps)), blocks, plan.shared_bytes(k))
        _call(fp4_plan.MMA_FILES, macros, _MMA_MAIN, [x_MK, *tiled, bias, y_MN, m, n, k, act, *plan.chunks(k), *grid])
    else:
        windows = -(-k // 64)
        image = torch.full((blocks * windows * plan.tokens * 128,), 0xFF, dtype=torch.uint8)
        passed = fp4_cuda.passed_sums(plan, m, n, x_MK.device)
        for buffer in passed:
            if buffer is not None:
                buffer.view(torch.uint8).fill_(0xFF)
        for rows in fp4_plan.launches(plan, m, n, processors):
            columns = rows.plan.helpers(n) + rows.blocks
            grid = (-(-windows * plan.tokens * 8 // 256), columns, blocks, rows.plan.shared_bytes())
            args = [x_MK, image, *tiled, bias, y_MN, m, n, k, act, rows.first]
            main, more = (_HELPED_MAIN, passed) if plan.helped else (_WGMMA_MAIN, ())
            _call(fp4_plan.WGMMA_FILES, rows.plan.macros(fp16, not rounded), main, [*args, *more, *grid], lagging)
    return y_MN


def dequantize(tiled: tuple[Tensor, Tensor, Tensor], n: int, k: int, dtype: torch.dtype) -> Tensor:
    """What ``fp4_dequantize`` writes."""
    w_NK = torch.full((n, k), torch.nan).to(dtype)
    macros = {"FP16": 0, "OUT": {torch.bfloat16: 0, torch.float16: 1, torch.float32: 2}[dtype]}
    warps = 4 if dtype == torch.float32 else 8
    grid = ((k + 64 * warps - 1) // (64 * warps), -(-n // 32), warps * 32 * 64 * w_NK.element_size())
    _call(fp4_cuda.DEQUANTIZE_FILES, macros, _DEQUANTIZE_MAIN, [*tiled, w_NK, n, k, *grid])
    return w_NK


def prepare_e4m3(
    x_MK: Tensor, tiled: tuple[Tensor, Tensor, Tensor], row_top: Tensor, n: int, k: int, row_blocks: int
) -> tuple[Tensor, Tensor, Tensor, Tensor]:
    """As ``fp4_cuda.run_prepare_e4m3``, with so many blocks under each other for the rows of x."""
    m, fp8, nan = x_MK.shape[0], torch.float8_e4m3fn, torch.nan
    q_MK, w_NK = torch.full((m, k), nan).to(fp8), torch.full((n, k), nan).to(fp8)
    scale_M1, scale_1N = torch.full((m, 1), nan), torch.full((1, n), nan)
    macros = fp4_cuda.prepare_macros(x_MK.dtype == torch.float16, k)
    args = [*tiled, row_top, w_NK, n, k, scale_1N, x_MK, q_MK, scale_M1, m, row_blocks]
    grid = (-(-k // 512), -(-n // 32) + row_blocks, fp4_cuda.PREPARE_SHARED_BYTES)
    _call(fp4_cuda.E4M3_FILES, macros, _PREPARE_MAIN, [*args, *grid])
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
    """As ``w4a8_cuda.run_w4a8`` on so many clusters; all that the kernels write starts as NaN, and nothing else is written."""
    m, k = x_MK.shape
    sizes = w4a8_cuda.cut(plan, m, n, k, clusters)
    tokens = sizes.pairs * w4a8_cuda.CLUSTER * 128
    lengths = (tokens * sizes.steps * 128, sizes.columns * sizes.steps * plan.features * 128, 4 * m, 2 * m * n)
    counted = [4 * sizes.counters, 4 * STALE]
    image, weight, scale_M, y, counters, stale = written = [
        torch.full((length + BEHIND,), 0xFF, dtype=torch.uint8) for length in (*lengths, *counted)
    ]
    counters[: counted[0]] = 0
    args = [x_MK, image, scale_M, *tiled, fp4_cuda.row_tops(tiled[1], n, k), bias, y, weight, counters, stale, STALE]
    shape = [m, n, k, reference.ACTIVATIONS.index(activation)]
    grids = [clusters, sizes.chunk, sizes.head_blocks, plan.shared_bytes()]
    macros = plan.macros(x_MK.dtype == torch.float16, k)
    _call(w4a8_cuda.FILES, macros, _W4A8_MAIN, [*args, *shape, *grids], lagging)
    for length, buffer in zip((*lengths, *counted), written, strict=True):
        assert (buffer[length:] == 0xFF).all(), "written behind its end"
    assert not stale[: 4 * STALE].any(), "counters of the launch before are left"
    return y[: 2 * m * n].view(x_MK.dtype).view(m, n)


def random_weight(format: str, n: int, k: int, seed: int = 0) -> tuple[Tensor, tuple[Tensor, Tensor, Tensor]]:
    """(fp32 weight, tiled tensors) of random codes under all finite scales of nvfp4, or exponents that span 2^16 of mxfp4."""
    generator = torch.Generator().manual_seed(seed)
    form = FORMATS[format]
    codes = torch.randint(0, 256, form.codes_shape(n, k), dtype=torch.uint8, generator=generator)
    low, high = (0, 127) if format == "nvfp4" else (115, 132)
    scales = torch.randint(low, high, form.scales_shape(n, k), dtype=torch.uint8, generator=generator)
    tensor_scale = torch.tensor(0.37 if format == "nvfp4" else 1.0)
    w_NK = reference.dequantize(codes, scales, tensor_scale, format, n, k)
    return w_NK, layout.to_tiled(codes, scales, tensor_scale, format, n, k)


def error_over_bound(y_MN: Tensor, x_MK: Tensor, w_NK: Tensor) -> float:
    """Largest error of an fp32 result over 4 * 2^-24 * sqrt(K) * sum |w||x|: fp32 sums in any order, tensor cores included."""
    exact = x_MK.double() @ w_NK.double().t()
    bound = 4 * 2**-24 * x_MK.shape[1] ** 0.5 * (x_MK.double().abs() @ w_NK.double().abs().t()) + 1e-30
    ratio = ((y_MN.double() - exact).abs() / bound).max().item()
    return ratio if ratio == ratio else float("inf")
