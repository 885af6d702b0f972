"""Many rows times a tiled weight that is dequantised in chunks, each beside the product of the one before.

A weight of large N is written out whole and read back from memory by the one-launch way (backends.py), and the product waits for all of it.
In chunks it stays in the L2, two buffers in turns; a chunk is decoded on a second stream, by blocks for multiprocessors that
the product's last round of tiles leaves free. Output columns of a chunk are columns of the one result, by its row pitch.

``M`` rows, ``N`` out features, ``K`` in features. A band is 32 rows of the weight, a window 64 columns.
"""

from __future__ import annotations

import ctypes
import functools
from collections.abc import Callable
from dataclasses import dataclass

import torch
from torch import Tensor

from vblackwell.kernels import fp4_cuda
from vblackwell.kernels.fp4_plan import ceil_div
from vblackwell.kernels.nvrtc import check_driver, in_context

_CAPTURE_RELAXED = 2  # CU_STREAM_CAPTURE_MODE_RELAXED
_NON_BLOCKING = 1  # CU_STREAM_NON_BLOCKING: it waits for events alone, not for the default stream


@dataclass(frozen=True)
class ChunkPlan:
    """How a weight is cut. Sums do not depend on ``helpers``.

    Attributes:
        chunks: parts of the output's columns, at least 2.
        helpers: blocks that decode beside a product.
    """

    chunks: int
    helpers: int


@functools.cache
def _second_stream(device: torch.device, stream: int) -> torch.cuda.ExternalStream:
    """A stream for work beside ``stream``, of nobody else: one of PyTorch's pool may be somebody's, who captures a graph on it."""
    handle, mode = ctypes.c_void_p(), ctypes.c_int(_CAPTURE_RELAXED)
    driver = ctypes.CDLL("libcuda.so.1")
    with torch.cuda.device(device):  # maybe while this thread captures a graph, to which the new stream is nothing
        check_driver(driver.cuThreadExchangeStreamCaptureMode(ctypes.byref(mode)), "making a stream")
        try:
            result = in_context(device, lambda: driver.cuStreamCreate(ctypes.byref(handle), _NON_BLOCKING))
        finally:
            driver.cuThreadExchangeStreamCaptureMode(ctypes.byref(mode))
    check_driver(result, "making a stream")
    assert handle.value is not None
    return torch.cuda.ExternalStream(handle.value, device)


def _in_turns(
    count: int,
    size: int,
    like: Tensor,
    decode: Callable[[int, Tensor, bool], Tensor],
    multiply: Callable[[int, Tensor], object],
) -> None:
    """``multiply(i, decode(i, ..))`` for each of ``count`` chunks, into two buffers of ``size`` in turns, one chunk decoded ahead.

    The second stream has nothing left to do when the current one goes on, so whoever frees what it read does so behind it.
    """
    device = like.device
    main = torch.cuda.current_stream(device)
    side = _second_stream(device, main.cuda_stream)
    buffers = [torch.empty(size, dtype=like.dtype, device=device) for _ in range(2)]
    w = decode(0, buffers[0], False)
    for i in range(count):
        free = main.record_event()  # the product that read the other buffer is over
        multiply(i, w)
        if i + 1 < count:
            side.wait_event(free)
            with torch.cuda.stream(side):
                w = decode(i + 1, buffers[(i + 1) % 2], True)
            main.wait_event(side.record_event())


def parts(tiles: int, chunks: int) -> list[tuple[int, int]]:
    """(first tile, end) of ``chunks`` nearly equal parts, none empty."""
    size = ceil_div(tiles, chunks)
    return [(first, min(first + size, tiles)) for first in range(0, tiles, size)]


def linear(
    plan: ChunkPlan,
    x_MK: Tensor,
    codes: Tensor,
    block_scales: Tensor,
    tensor_scale: Tensor,
    bias: Tensor | None,
    n: int,
) -> Tensor:
    """``x W^T + bias`` with a tiled ``W``, cut along N: (M, N)."""
    m, k = x_MK.shape
    y_MN = torch.empty(m, n, dtype=x_MK.dtype, device=x_MK.device)
    bands = parts(codes.shape[0], plan.chunks)
    rows = [slice(32 * first, min(32 * end, n)) for first, end in bands]

    def decode(i: int, buffer: Tensor, beside: bool) -> Tensor:
        (first, end), here = bands[i], rows[i]
        w = buffer[: (here.stop - here.start) * k].view(-1, k)
        part = (codes[first:end], block_scales[first:end], tensor_scale)
        fp4_cuda.dequantize_into(w, *part, blocks=plan.helpers if beside else None)
        return w

    def multiply(i: int, w: Tensor) -> None:
        out = y_MN[:, rows[i]]
        if bias is None:
            torch.mm(x_MK, w.t(), out=out)
        else:
            torch.addmm(bias[rows[i]], x_MK, w.t(), out=out)

    _in_turns(len(bands), (rows[0].stop - rows[0].start) * k, x_MK, decode, multiply)
    return y_MN


def linear_dx(
    plan: ChunkPlan, dy_MN: Tensor, codes: Tensor, block_scales: Tensor, tensor_scale: Tensor, n: int, k: int
) -> Tensor:
    """``dY W`` with a tiled ``W``, cut along K: (M, K)."""
    dx_MK = torch.empty(dy_MN.shape[0], k, dtype=dy_MN.dtype, device=dy_MN.device)
    windows = parts(codes.shape[1], plan.chunks)
    columns = [slice(64 * first, min(64 * end, k)) for first, end in windows]

    def decode(i: int, buffer: Tensor, beside: bool) -> Tensor:
        here = columns[i]
        w = buffer[: n * (here.stop - here.start)].view(n, -1)
        helpers = plan.helpers if beside else None
        fp4_cuda.dequantize_into(w, codes, block_scales, tensor_scale, windows[i][0], helpers)
        return w

    def multiply(i: int, w: Tensor) -> None:
        torch.mm(dy_MN, w, out=dx_MK[:, columns[i]])

    _in_turns(len(windows), n * (columns[0].stop - columns[0].start), dy_MN, decode, multiply)
    return dx_MK


def linear_w4a8(
    plan: ChunkPlan, x_MK: Tensor, codes: Tensor, block_scales: Tensor, tensor_scale: Tensor, row_top: Tensor, n: int
) -> Tensor:
    """As of ``w4a8``'s backend "fp8" without bias and activation, cut along N: (M, N) bf16."""
    m, k = x_MK.shape
    y_MN = torch.empty(m, n, dtype=torch.bfloat16, device=x_MK.device)
    bands = parts(codes.shape[0], plan.chunks)
    rows = [slice(32 * first, min(32 * end, n)) for first, end in bands]
    scale_1N = torch.empty(1, n, dtype=torch.float32, device=x_MK.device)
    operand: list[Tensor] = []

    def decode(i: int, buffer: Tensor, beside: bool) -> Tensor:
        (first, end), here = bands[i], rows[i]
        w = buffer[: (here.stop - here.start) * k].view(-1, k)
        part = (codes[first:end], block_scales[first:end], tensor_scale, row_top[here])
        if beside:
            fp4_cuda.e4m3_into(w, scale_1N[:, here], *part, blocks=plan.helpers)
        else:  # the first one, beside the rows of x
            made = fp4_cuda.run_prepare_e4m3(x_MK, *part, len(w), k, w_NK=w, scale_1N=scale_1N[:, here])
            operand.extend(made[:2])
        return w

    def multiply(i: int, w: Tensor) -> None:
        q_MK, scale_M1 = operand
        y = y_MN[:, rows[i]]
        torch.ops.aten._scaled_mm.out(
            q_MK, w.t(), scale_M1, scale_1N[:, rows[i]], out_dtype=y.dtype, use_fast_accum=False, out=y
        )

    like = torch.empty(0, dtype=torch.float8_e4m3fn, device=x_MK.device)
    _in_turns(len(bands), (rows[0].stop - rows[0].start) * k, like, decode, multiply)
    return y_MN
