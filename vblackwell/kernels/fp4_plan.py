"""Plans of the fused FP4 matmuls: how a kernel covers a shape, as pure functions of it.

``mma``: few rows (one to a few dozen), any GPU from sm_80 on; ``wgmma``: tens to hundreds of rows, Hopper. A plan fixes the order in
which partial sums are added, and depends on the shape alone: results repeat bit for bit on one kind of GPU, however it is tuned.
The kernels are ``cuda/fp4_mma.cu``, ``cuda/fp4_wgmma.cu`` and ``cuda/fp4_tiles.cu``; ``fp4_cuda.py`` launches them.

``M`` rows, ``N`` out features, ``K`` in features. A window is 64 columns.
"""

from __future__ import annotations

from dataclasses import dataclass, replace

from vblackwell.errors import ConfigurationError

MMA_FILES = ("ptx.cuh", "decode.cuh", "barrier.cuh", "epilogue.cuh", "fp4_mma.cu")
WGMMA_FILES = ("ptx.cuh", "decode.cuh", "wgmma.cuh", "barrier.cuh", "epilogue.cuh", "fp4_wgmma.cu")
TILES_FILES = (*WGMMA_FILES[:-1], "fp4_tiles.cu")
STATISTICS_BYTES = 1024  # of shared memory, for the statistics of rows that are normalised on the way
_MULTIPROCESSORS = 132  # of an H200, on every GPU: a plan may not depend on where it runs
_X_BYTES = 128 * 1024  # of x that a block stages at a time


def ceil_div(a: int, b: int) -> int:
    return -(-a // b)


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
        """The same, with x staged by the block's threads, for a K that is no multiple of 64."""
        return replace(self, chunk=0, x_stages=2)

    @property
    def threads(self) -> int:
        return 32 * self.row_warps * self.k_warps

    def chunks(self, k: int) -> tuple[int, int]:
        """(windows a chunk of x, chunks a block): equal chunks that fit the staging memory. Bulk copies take ``chunk`` instead."""
        share = ceil_div(ceil_div(k, 64), self.splits)
        most = max(1, self.x_bytes // (self.tokens * 128))
        if ceil_div(share, self.k_warps) * self.k_warps <= most:
            return ceil_div(share, self.k_warps) * self.k_warps, 1
        unit = self.k_warps * self.prefetch
        windows = max(1, most // 2 // unit) * unit
        count = ceil_div(share, windows)
        return ceil_div(ceil_div(share, count), unit) * unit, count

    def shared_bytes(self, k: int, norm: int = 0) -> int:
        windows, count = self.chunks(k)
        x_bytes = windows * self.tokens * 128 * min(2, count)
        if self.chunk:
            x_bytes = self.x_stages * (self.tokens * (self.chunk * 128 + 16) + 16)
        staged = x_bytes + self.threads * self.prefetch * 36
        sums = self.k_warps * min(self.tokens, 16) * (32 * self.row_warps + 4) * 4
        return max(staged, sums) + (STATISTICS_BYTES if norm else 0)


def goes_round(stages: int, k_groups: int) -> bool:
    """Whether each stage belongs to one of ``k_groups`` that take turns at windows, and each of them has two or more."""
    return k_groups == 1 or (stages % k_groups == 0 and stages >= 2 * k_groups)


@dataclass(frozen=True)
class WgmmaPlan:
    """How ``fp4_wgmma`` covers a shape.

    Attributes:
        tokens: rows of x a block takes (wgmma's n).
        groups: warpgroups, 64 weight rows each.
        splits: blocks of a cluster that split K.
        stages: windows of x in shared memory, at least 2; with several ``k_groups`` a multiple of them, at least twice as many.
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

    def __post_init__(self) -> None:
        """Raises ConfigurationError where a stage of x would go from one K group to another, or a group would wait for itself.

        A group that comes to a stage by which another one still awaits the window before would take the barrier's
        last phase for its own: copies need not land in order. It would multiply what is not there yet, or wait for ever.
        """
        if not goes_round(self.stages, self.k_groups):
            raise ConfigurationError(
                f"{self.k_groups} K groups take turns at stages: {self.stages} is not a multiple of them, 2 or more for each"
            )

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


def _row_warps(n: int) -> int:
    """Row warps that cover N in about one block a multiprocessor, at most 8."""
    row_warps = 1
    while row_warps < 8 and ceil_div(n, 32 * row_warps) > _MULTIPROCESSORS:
        row_warps *= 2
    return row_warps


# Where x in bulk copies was timed, and what was fastest: (rows up to a power of two, N, K), ratios to cuBLAS bf16 in docs/log-fp4.md.
_MEASURED = {
    (4, 4096, 4096): MmaPlan(4, 1, 15, 1, 4, chunk=30, x_stages=3),
    (16, 4096, 4096): MmaPlan(16, 1, 12, 1, 4, chunk=24, x_stages=3),
}


def plan_mma(m: int, n: int, k: int, clusters: bool, bulk: bool = True) -> MmaPlan:
    """The plan of ``fp4_mma`` for a shape, with or without clusters of blocks (sm_90).

    ``bulk``: whether x may come by bulk copies, which a norm on the way does not allow; it does only where that was measured to be faster.

    One block of 16 warps a multiprocessor, and as many K ways as that leaves: measured on an H200 over six shapes. From three rows on
    x costs more to stage than a cluster to join, so blocks get taller and split K. Without clusters blocks are smaller, to
    fit 99 KB of shared memory.
    """
    tokens = 1
    while tokens < min(m, 16 if clusters else 32):
        tokens *= 2
    windows = ceil_div(k, 64)
    if clusters and bulk and (tokens, n, k) in _MEASURED:
        return _MEASURED[tokens, n, k]
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
    narrow, wide = ceil_div(n, 64), ceil_div(n, 128)  # blocks along N of one and of two warpgroups
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
        blocks = wide * ceil_div(m, 256)
        if blocks >= 96:
            plan = WgmmaPlan(256, 2, 1, 5, image=True)
        elif blocks >= 48:
            plan = WgmmaPlan(256, 2, 2, 5, image=True)
        else:
            splits = 2 if narrow * ceil_div(m, 128) <= 132 else 1
            plan = WgmmaPlan(128, 1, splits, 6, min_blocks=2, image=True)
    while plan.splits > ceil_div(k, 64):
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
    tiles = ceil_div(n, 128) * ceil_div(m, 256)
    busy = tiles / (_MULTIPROCESSORS * ceil_div(tiles, _MULTIPROCESSORS))
    fused = 2 * m * n * k / (700e12 * busy)
    return fused < 2 * m * n * k / 790e12 + n * k * 2.5625 / 3.8e12
