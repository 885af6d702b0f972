"""Fused FP4 matmuls on tiled weights: plans as pure functions of the shape, and their launches.

``mma``: few rows (one to a few dozen), any GPU from sm_80 on; ``wgmma``: tens to hundreds of rows, Hopper. A plan fixes the order in
which partial sums are added, and depends on the shape alone: results repeat bit for bit on one kind of GPU, however it is tuned.
The sources, with the reasoning about registers and memory, are ``cuda/fp4_mma.cu`` and ``cuda/fp4_wgmma.cu``.

``M`` rows, ``N`` out features, ``K`` in features. A window is 64 columns.
"""

from __future__ import annotations

from dataclasses import dataclass, replace

import torch
from torch import Tensor

from vblackwell.kernels.nvrtc import kernel
from vblackwell.kernels.reference import ACTIVATIONS

MMA_FILES = ("ptx.cuh", "decode.cuh", "barrier.cuh", "epilogue.cuh", "fp4_mma.cu")
WGMMA_FILES = ("ptx.cuh", "decode.cuh", "wgmma.cuh", "barrier.cuh", "epilogue.cuh", "fp4_wgmma.cu")
TILES_FILES = (*WGMMA_FILES[:-1], "fp4_tiles.cu")
DEQUANTIZE_FILES = ("ptx.cuh", "decode.cuh", "fp4_dequantize.cu")
_MULTIPROCESSORS = 132  # of an H200, on every GPU: a plan may not depend on where it runs
_X_BYTES = 128 * 1024  # of x that a block stages at a time


def _ceil(a: int, b: int) -> int:
    return -(-a // b)


@dataclass(frozen=True, eq=False)
class Norm:
    """What ``fp4_mma`` normalises the rows of x by, on the way: RMSNorm, or with ``gain_sums`` LayerNorm.

    Attributes:
        gain: (K,) of the type of x; K is a multiple of 8.
        eps: added to the mean square, or to the variance.
        gain_sums: (N,) fp32, W times the gain; LayerNorm's own bias times W belongs into the linear's bias.
    """

    gain: Tensor
    eps: float
    gain_sums: Tensor | None = None

    @property
    def kind(self) -> int:
        """As the kernel's macro NORM."""
        return 1 if self.gain_sums is None else 2


STATISTICS_BYTES = 1024  # of shared memory, for the rows' statistics


@dataclass(frozen=True)
class MmaPlan:
    """How ``fp4_mma`` covers a shape.

    Attributes:
        tokens: rows of x a block takes, a power of two.
        row_warps: warps side by side, 32 weight rows each.
        k_warps: warps that split K inside a block.
        splits: blocks of a cluster that split K (1 where there are no clusters).
        prefetch: windows a warp has in flight.
        min_blocks: blocks the compiler must fit on a multiprocessor.
        x_bytes: of x that a block may hold; more than one chunk takes half of it each.
        chunk: windows of x a bulk copy brings (sm_90, K a multiple of 64), a multiple of ``k_warps``; 0: x comes by smaller copies.
        x_stages: chunks of x in shared memory, with ``chunk``.
    """

    tokens: int
    row_warps: int
    k_warps: int
    splits: int
    prefetch: int
    min_blocks: int = 1
    x_bytes: int = _X_BYTES
    chunk: int = 0
    x_stages: int = 2

    def macros(self, fp16: bool, out32: bool = False, norm: int = 0) -> dict[str, int]:
        macros = {
            "FP16": int(fp16), "TOKENS": self.tokens, "ROW_WARPS": self.row_warps, "K_WARPS": self.k_warps,
            "SPLITS": self.splits, "PREFETCH": self.prefetch, "PASS_TOKENS": min(self.tokens, 16),
            "MIN_BLOCKS": self.min_blocks, "OUT32": int(out32),
        }  # fmt: skip
        if self.chunk:
            macros |= {"BULK": 1, "CHUNK": self.chunk, "X_STAGES": self.x_stages}
        return macros | {"NORM": norm} if norm else macros

    def without_bulk(self) -> MmaPlan:
        """The same, with x staged by the block's threads: what a norm and a K that is no multiple of 64 take."""
        return replace(self, chunk=0, x_stages=2)

    @property
    def threads(self) -> int:
        return 32 * self.row_warps * self.k_warps

    def chunks(self, k: int) -> tuple[int, int]:
        """(windows a chunk of x, chunks a block): equal chunks that fit the staging memory. Bulk copies take ``chunk`` instead."""
        share = _ceil(_ceil(k, 64), self.splits)
        most = max(1, self.x_bytes // (self.tokens * 128))
        if _ceil(share, self.k_warps) * self.k_warps <= most:
            return _ceil(share, self.k_warps) * self.k_warps, 1
        unit = self.k_warps * self.prefetch
        windows = max(1, most // 2 // unit) * unit
        count = _ceil(share, windows)
        return _ceil(_ceil(share, count), unit) * unit, count

    def shared_bytes(self, k: int, norm: int = 0) -> int:
        windows, count = self.chunks(k)
        x_bytes = windows * self.tokens * 128 * min(2, count)
        if self.chunk:
            x_bytes = self.x_stages * (self.tokens * (self.chunk * 128 + 16) + 16)
        staged = x_bytes + self.threads * self.prefetch * 36
        sums = self.k_warps * min(self.tokens, 16) * (32 * self.row_warps + 4) * 4
        return max(staged, sums) + (STATISTICS_BYTES if norm else 0)


@dataclass(frozen=True)
class WgmmaPlan:
    """How ``fp4_wgmma`` covers a shape.

    Attributes:
        tokens: rows of x a block takes (wgmma's n).
        groups: warpgroups, 64 weight rows each.
        splits: blocks of a cluster that split K.
        stages: windows of x in shared memory, at least 2 and more than ``k_groups``.
        prefetch: windows of weights a warp has in flight.
        min_blocks: blocks the compiler must fit on a multiprocessor.
        image: whether x is brought into the kernel's order by a launch of its own.
        k_groups: sets of ``groups`` warpgroups that take turns at the windows.
        clusters: if not 0, so many clusters of two blocks go through all tiles (``fp4_tiles``); with ``image``, without splits.
    """

    tokens: int
    groups: int
    splits: int
    stages: int
    prefetch: int = 4
    min_blocks: int = 1
    image: bool = False
    k_groups: int = 1
    clusters: int = 0

    @property
    def files(self) -> tuple[str, ...]:
        """The kernel's sources."""
        return TILES_FILES if self.clusters else WGMMA_FILES

    @property
    def consumers(self) -> int:
        """Warpgroups that multiply."""
        return self.groups * self.k_groups

    @property
    def registers(self) -> int:
        """Of a consumer thread: its share of what the block gets at launch when the copying warpgroup keeps its own.

        Asking for more than the block was given would wait for ever.
        """
        kept = 40 if self.image else 56
        at_launch = min(255, 65536 // self.min_blocks // self.threads) // 8 * 8
        return min(240, (at_launch * (self.consumers + 1) - kept) // self.consumers // 8 * 8)

    def macros(self, fp16: bool, out32: bool = False) -> dict[str, int]:
        return {
            "FP16": int(fp16), "TOKENS": self.tokens, "IMAGE": int(self.image), "GROUPS": self.groups,
            "KGROUPS": self.k_groups, "SPLITS": 2 if self.clusters else self.splits,
            "STAGES": self.stages, "PREFETCH": self.prefetch, "REGISTERS": self.registers,
            "MIN_BLOCKS": self.min_blocks, "OUT32": int(out32),
        }  # fmt: skip

    @property
    def threads(self) -> int:
        return 128 * (self.consumers + 1)

    def shared_bytes(self) -> int:
        sums = self.k_groups * self.tokens * (64 * self.groups + 4) * 4
        raw = 0 if self.image else 4  # windows of x as it comes
        main = (self.stages + raw) * self.tokens * 128 + 4 * self.consumers * self.prefetch * 640
        if self.clusters:
            main += 4 * self.consumers * 32 * 20 * 4  # where warps turn their sums
        return max(main, sums) + 16 * self.stages


def _flags(x_MK: Tensor) -> bool:
    return x_MK.dtype == torch.float16


def _aligned(x_MK: Tensor) -> tuple[Tensor, int]:
    """x with rows of a multiple of 16 bytes, and their length: copies only where K is not a multiple of 8."""
    k = x_MK.shape[1]
    if k % 8 == 0 and x_MK.data_ptr() % 16 == 0:
        return x_MK, k
    return torch.nn.functional.pad(x_MK, (0, -k % 8)).contiguous(), k + -k % 8


def _output(x_MK: Tensor, n: int, out_dtype: torch.dtype | None) -> Tensor:
    return torch.empty(x_MK.shape[0], n, dtype=out_dtype or x_MK.dtype, device=x_MK.device)


def run_mma(
    plan: MmaPlan,
    x_MK: Tensor,
    codes: Tensor,
    block_scales: Tensor,
    tensor_scale: Tensor,
    bias: Tensor | None,
    activation: str,
    n: int,
    out_dtype: torch.dtype | None = None,
    norm: Norm | None = None,
) -> Tensor:
    """One launch of ``fp4_mma``; ``out_dtype`` may be fp32, else the type of x. ``norm`` comes before the product."""
    x_MK, k = _aligned(x_MK)
    y_MN = _output(x_MK, n, out_dtype)
    m, kind = x_MK.shape[0], 0 if norm is None else norm.kind
    if kind or k % 64:
        plan = plan.without_bulk()
    windows, count = plan.chunks(k)
    macros = plan.macros(_flags(x_MK), y_MN.dtype == torch.float32, kind)
    grid = (_ceil(n, 32 * plan.row_warps), plan.splits, _ceil(m, plan.tokens))
    args = (x_MK, codes, block_scales, tensor_scale, bias, y_MN, m, n, k, ACTIVATIONS.index(activation), windows, count)
    more = () if norm is None else (norm.gain, norm.gain_sums, float(norm.eps))
    kernel(MMA_FILES, "fp4_mma", macros, x_MK.device).launch(
        grid, plan.threads, plan.shared_bytes(k, kind), (*args, *more)
    )
    return y_MN


def run_wgmma(
    plan: WgmmaPlan,
    x_MK: Tensor,
    codes: Tensor,
    block_scales: Tensor,
    tensor_scale: Tensor,
    bias: Tensor | None,
    activation: str,
    n: int,
    out_dtype: torch.dtype | None = None,
) -> Tensor:
    """``fp4_wgmma``, after ``arrange`` if the plan asks for it; ``out_dtype`` may be fp32, else the type of x."""
    x_MK, k = _aligned(x_MK)
    y_MN = _output(x_MK, n, out_dtype)
    m, windows, blocks = x_MK.shape[0], _ceil(k, 64), _ceil(x_MK.shape[0], plan.tokens)
    macros = plan.macros(_flags(x_MK), y_MN.dtype == torch.float32)
    source = x_MK
    if plan.image:
        source = torch.empty(blocks * windows * plan.tokens * 128, dtype=torch.uint8, device=x_MK.device)
        arrange = kernel(WGMMA_FILES, "arrange", macros, x_MK.device)
        arrange.launch((_ceil(windows * plan.tokens * 8, 256), blocks, 1), 256, 0, (x_MK, source, m, k))
    grid = (_ceil(n, 64 * plan.groups), plan.splits, blocks)
    args = (source, codes, block_scales, tensor_scale, bias, y_MN, m, n, k, ACTIVATIONS.index(activation))
    if plan.clusters:
        grid, args = (plan.clusters, 2, 1), (*args, plan.clusters)
    entry = "fp4_tiles" if plan.clusters else "fp4_wgmma"
    kernel(plan.files, entry, macros, x_MK.device).launch(grid, plan.threads, plan.shared_bytes(), args)
    return y_MN


def _row_warps(n: int) -> int:
    """Row warps that cover N in about one block a multiprocessor, at most 8."""
    row_warps = 1
    while row_warps < 8 and _ceil(n, 32 * row_warps) > _MULTIPROCESSORS:
        row_warps *= 2
    return row_warps


def plan_mma(m: int, n: int, k: int, clusters: bool) -> MmaPlan:
    """The plan of ``fp4_mma`` for a shape, with or without clusters of blocks (sm_90).

    One block of 16 warps a multiprocessor, and as many K ways as that leaves: measured on an H200 over six shapes. From three rows on
    x costs more to stage than a cluster to join, so blocks get taller and split K. Without clusters blocks are smaller, to
    fit 99 KB of shared memory.
    """
    tokens = 1
    while tokens < min(m, 16 if clusters else 32):
        tokens *= 2
    windows = _ceil(k, 64)
    if not clusters:
        row_warps = {1: 1, 2: 1, 4: 2, 8: 4, 16: 4, 32: 4}[tokens]
        plan = MmaPlan(tokens, row_warps, 8 // row_warps, 1, 4 if tokens < 32 else 2, 1, 32 * 1024)
    elif tokens <= 2:
        plan = MmaPlan(tokens, _row_warps(n), 16 // _row_warps(n), 1, 4)
    elif tokens <= 8:
        row_warps = min(8, 2 * _row_warps(n))
        plan = MmaPlan(tokens, row_warps, 16 // row_warps, row_warps // _row_warps(n), 4)
    else:
        plan = MmaPlan(tokens, 8, 2, 4, 4)
    while plan.k_warps > 1 and plan.k_warps * plan.splits > windows:
        plan = replace(plan, k_warps=plan.k_warps // 2)
    while plan.splits > 1 and plan.splits > windows:
        plan = replace(plan, splits=plan.splits // 2)
    return plan


def plan_wgmma(m: int, n: int, k: int) -> WgmmaPlan:
    """The plan of ``fp4_wgmma`` for a shape: the fewest waves on 132 multiprocessors, from measurements on an H200."""
    narrow, wide = _ceil(n, 64), _ceil(n, 128)  # blocks along N of one and of two warpgroups
    if m <= 32:
        tokens = 16 if m <= 16 else 32
        if wide > 132:
            plan = WgmmaPlan(tokens, 4, 1, 6, image=True)
        elif wide > 66:
            plan = WgmmaPlan(tokens, 2, 2, 6, min_blocks=2, image=True)
        elif wide > 40:
            plan = WgmmaPlan(tokens, 2, 2, 6, image=True)
        else:
            plan = WgmmaPlan(tokens, 2, 4, 6, min_blocks=2, image=True)
    elif m <= 64:
        if narrow > 264:
            plan = WgmmaPlan(64, 4, 1, 6, image=True)
        elif narrow > 132:
            plan = WgmmaPlan(64, 2, 2, 6, min_blocks=2, image=True)
        else:
            plan = WgmmaPlan(64, 1, 2, 6, min_blocks=2, image=True)
    elif m <= 128:
        tokens = 64 if narrow <= 66 else 128
        plan = WgmmaPlan(tokens, 1, 1 if narrow > 132 else 2, 6, min_blocks=2, image=True)
    else:
        blocks = wide * _ceil(m, 256)
        if blocks >= 96:
            plan = WgmmaPlan(256, 2, 1, 5, image=True)
        elif blocks >= 48:
            plan = WgmmaPlan(256, 2, 2, 5, image=True)
        else:
            splits = 2 if narrow * _ceil(m, 128) <= 132 else 1
            plan = WgmmaPlan(128, 1, splits, 6, min_blocks=2, image=True)
    while plan.splits > _ceil(k, 64):
        plan = replace(plan, splits=plan.splits // 2)
    return plan


def has_clusters(capability: tuple[int, int]) -> bool:
    """Clusters of blocks and 227 KB of shared memory a block: Hopper and data-centre Blackwell, not sm_120."""
    return capability[0] in (9, 10)


def most_mma_rows(capability: tuple[int, int], n: int) -> int:
    """Rows up to which ``fp4_mma`` is the faster fused kernel."""
    if capability[0] != 9:
        return 32
    return 8 if n >= 8192 else 16


def wgmma_beats_dequantize(m: int, n: int, k: int) -> bool:
    """Whether ``fp4_wgmma`` is expected to finish before dequantising once and cuBLAS; rates measured on an H200."""
    if m <= 256:
        return True
    tiles = _ceil(n, 128) * _ceil(m, 256)
    busy = tiles / (_MULTIPROCESSORS * _ceil(tiles, _MULTIPROCESSORS))
    fused = 2 * m * n * k / (700e12 * busy)
    return fused < 2 * m * n * k / 790e12 + n * k * 2.5625 / 3.8e12


def run_dequantize(
    codes: Tensor, block_scales: Tensor, tensor_scale: Tensor, n: int, k: int, dtype: torch.dtype
) -> Tensor:
    """One launch of ``fp4_dequantize``: the (n, k) weight as bf16, fp16 or fp32."""
    w_NK = torch.empty(n, k, dtype=dtype, device=codes.device)
    macros = {"FP16": 0, "OUT": {torch.bfloat16: 0, torch.float16: 1, torch.float32: 2}[dtype]}
    warps = 4 if dtype == torch.float32 else 8
    grid = (_ceil(_ceil(k, 64), warps), _ceil(n, 32), 1)
    shared_bytes = warps * 32 * 64 * w_NK.element_size()
    args = (codes, block_scales, tensor_scale, None, w_NK, n, k)
    kernel(DEQUANTIZE_FILES, "fp4_dequantize", macros, codes.device).launch(grid, 32 * warps, shared_bytes, args)
    return w_NK


def run_prepare_e4m3(
    x_MK: Tensor, codes: Tensor, block_scales: Tensor, tensor_scale: Tensor, row_top: Tensor, n: int, k: int
) -> tuple[Tensor, Tensor, Tensor, Tensor]:
    """One launch that makes both operands of an FP8 matmul; K is a multiple of 16.

    Returns:
        x as E4M3 rows (M, K) and their (M, 1) fp32 scales, amax / 448 or 1; the weight (N, K) as E4M3, each row relative to its largest
        scale ``row_top`` (E5M3 bytes), which becomes 2^6, and its (1, N) fp32 scales.
    """
    x_MK, _ = _aligned(x_MK)
    m, device = x_MK.shape[0], x_MK.device
    q_MK = torch.empty(m, k, dtype=torch.float8_e4m3fn, device=device)
    w_NK = torch.empty(n, k, dtype=torch.float8_e4m3fn, device=device)
    scale_M1 = torch.empty(m, 1, dtype=torch.float32, device=device)
    scale_1N = torch.empty(1, n, dtype=torch.float32, device=device)
    macros = {"FP16": 0, "OUT": 3, "X_FP16": int(_flags(x_MK))}
    columns = _ceil(_ceil(k, 64), 8)
    row_blocks = min(1024, _ceil(m, columns))
    args = (codes, block_scales, tensor_scale, row_top, w_NK, n, k, scale_1N, x_MK, q_MK, scale_M1, m, row_blocks)
    prepare = kernel(DEQUANTIZE_FILES, "fp4_dequantize", macros, device)
    prepare.launch((columns, _ceil(n, 32) + row_blocks, 1), 256, 8 * 32 * 64, args)
    return q_MK, scale_M1, w_NK, scale_1N


def row_tops(block_scales: Tensor, n: int, k: int) -> Tensor:
    """(N,) E5M3 bytes: the largest scale of each row of a tiled weight."""
    bands, windows = _ceil(n, 32), _ceil(k, 64)
    return block_scales.view(bands, windows, 8, 4, 4).amax((1, 3)).transpose(1, 2).reshape(-1)[:n].contiguous()
