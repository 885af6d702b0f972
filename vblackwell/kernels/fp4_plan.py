"""Plans of the fused FP4 matmuls: how a kernel covers a shape, as pure functions of it.

``mma``: few rows (one to a few dozen), any GPU from sm_80 on; ``wgmma``: tens to hundreds of rows, Hopper. A plan fixes the order in
which partial sums are added, and depends on the shape alone: results repeat bit for bit on one kind of GPU, however it is tuned.
The kernels are ``cuda/fp4_mma.cu`` and ``cuda/fp4_wgmma.cu``; ``fp4_cuda.py`` launches them.

``M`` rows, ``N`` out features, ``K`` in features. A window is 64 columns.
"""

from __future__ import annotations

import functools
import itertools
from dataclasses import dataclass, replace

from vblackwell.errors import ConfigurationError
from vblackwell.kernels import fp4_shapes
from vblackwell.kernels.fp4_cost import MANY_ROWS_US, MULTIPROCESSORS, many_rows_us, rows_in_whole_rounds, wgmma_us

MMA_FILES = ("ptx.cuh", "decode.cuh", "barrier.cuh", "epilogue.cuh", "fp4_mma.cu")
WGMMA_FILES = ("ptx.cuh", "decode.cuh", "wgmma.cuh", "barrier.cuh", "ring.cuh", "epilogue.cuh", "fp4_wgmma.cu")
COPY_REGISTERS = 24  # that a thread of wgmma's copying warpgroup keeps
STATISTICS_BYTES = 1024  # of shared memory, for the statistics of rows that are normalised on the way
_SHARED_BYTES = (
    227 * 1024
)  # most of a block on Hopper, whose multiprocessors have 228 KB: each block takes 1 KB more than it asks for
_ALONE_BYTES = 114 * 1024  # of which two blocks do not fit one
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
        chunk: windows of x a bulk copy brings (sm_90, K a multiple of 64), a multiple of ``k_warps * prefetch``; 0: x comes by smaller
            copies.
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

    def __post_init__(self) -> None:
        """Raises ConfigurationError where a chunk of x would begin between the slots of the warps' rings.

        Also where the blocks of a cluster would not share the outputs evenly, or more than once.
        """
        if self.chunk % (self.k_warps * self.prefetch):
            raise ConfigurationError(
                f"chunks of {self.chunk} windows, {self.k_warps} K warps with {self.prefetch} windows in flight each: take a multiple of "
                f"{self.k_warps * self.prefetch} windows"
            )
        if self.splits > 1 and (self.tokens > 16 or 8 * self.row_warps % self.splits):
            raise ConfigurationError(
                f"tokens {self.tokens}, row warps {self.row_warps}, splits {self.splits}: take at most 16 tokens, and splits that divide "
                f"{8 * self.row_warps}, a token's outputs by fours"
            )

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
            rows = self.tokens + (1 if norm else 0)  # its gain is one more
            x_bytes = (
                self.x_stages * (rows * (self.chunk * 128 + 16) + 16) + 16
            )  # two barriers a stage, one of the first round
        staged = x_bytes + self.threads * self.prefetch * 36
        tokens = min(self.tokens, 16)
        sums = self.k_warps * tokens * (32 * self.row_warps + 4) * 4
        share = tokens * 8 * self.row_warps // self.splits  # groups of four outputs
        mail = ceil_div(16 + (self.splits - 1) * share * 16, 128) * 128 if self.splits > 1 else 0
        return max(staged, sums) + mail + (STATISTICS_BYTES * (2 if self.chunk else 1) if norm else 0)


def launch_bytes(shared_bytes: int, blocks: int, processors: int) -> int:
    """Shared memory to ask for with clusters: where each of ``blocks`` can have one of ``processors``, so much that no two share one.

    Blocks of the next product begin while this one's run. Two of them would go to a multiprocessor that is idle, and that product take
    up to twice as long: 18.7 us, not 11.5, for 8 rows of 14336 x 4096 on an H200.
    """
    return max(shared_bytes, _ALONE_BYTES) if blocks <= processors else shared_bytes


def fits_with_norm(plan: MmaPlan, k: int) -> bool:
    """Whether a block of Hopper has the shared memory that ``plan`` needs for K, also with RMSNorm on the way."""
    return plan.shared_bytes(k, norm=1) <= _SHARED_BYTES


def takes_bulk(k: int) -> bool:
    """Whether rows of K features may come by bulk copies: whole windows, and not just a few. (No plan is made here: compilers trace it.)"""
    return k % 64 == 0 and k >= 1024


def goes_round(stages: int, k_groups: int, together: int = 1) -> bool:
    """Whether each stage belongs to one of ``k_groups`` that take turns at ``together`` windows, and each has room for two turns."""
    return k_groups * together == 1 or (stages % (k_groups * together) == 0 and stages >= 2 * k_groups * together)


@dataclass(frozen=True)
class WgmmaPlan:
    """How ``fp4_wgmma`` covers a shape.

    Attributes:
        tokens: rows of x a block takes (wgmma's n).
        groups: warpgroups, 64 weight rows each.
        splits: blocks of a cluster that split K, and share the tokens by eights.
        stages: windows of x in shared memory, at least 2; a multiple of ``k_groups * together``, and at least twice that.
        prefetch: windows of weights a warp has in flight, an even number.
        min_blocks: blocks for which the compiler leaves registers on a multiprocessor. In a grid of one wave only one is there
            (`launch_bytes`); 2 was faster than 1 all the same for some plans of two K groups.
        k_groups: sets of ``groups`` warpgroups that take turns at the windows.
        helped: windows at the end of K that a block leaves to a helper, a block that does those of ``k_groups`` others.
        together: windows that a warpgroup multiplies at a time, 1 or 2.
    """

    tokens: int
    groups: int
    splits: int
    stages: int
    prefetch: int = 4
    min_blocks: int = 1
    k_groups: int = 1
    helped: int = 0
    together: int = 1

    def __post_init__(self) -> None:
        """Raises ConfigurationError where a stage of x would go from one K group to another, or a group would wait for itself.

        A group that comes to a stage by which another one still awaits the window before would take the barrier's
        last phase for its own: copies need not land in order. It would multiply what is not there yet, or wait for ever.
        """
        if not goes_round(self.stages, self.k_groups, self.together):
            raise ConfigurationError(
                f"{self.k_groups} K groups take turns at stages of x, {self.together} at a time: {self.stages} do not go round, "
                f"{2 * self.together} or more for each"
            )
        if self.tokens % (8 * self.splits):
            raise ConfigurationError(
                f"tokens {self.tokens}, splits {self.splits}: take a multiple of {8 * self.splits} tokens, or fewer splits"
            )
        if self.prefetch % 2:
            raise ConfigurationError(f"{self.prefetch} windows in flight: wgmma's ring takes an even number")
        if self.helped and (self.groups, self.splits, min(2, self.k_groups)) != (1, 1, 2):
            raise ConfigurationError(
                f"{self.groups} groups, {self.splits} splits, {self.k_groups} K groups: helpers are for blocks of one group "
                "and several K groups that no cluster splits"
            )

    @property
    def consumers(self) -> int:
        """Warpgroups that multiply."""
        return self.groups * self.k_groups

    def helpers(self, n: int) -> int:
        """Blocks of a column of tokens that help others: they come first, so that nobody waits for one that has no place yet."""
        return ceil_div(ceil_div(n, 64), self.k_groups) if self.helped else 0

    @property
    def fragments(self) -> int:
        """Sets of ``together`` windows of decoded weights that a warpgroup holds.

        One is enough where others multiply meanwhile, and leaves registers for a fourth warpgroup beside 128 tokens. On an H200 it takes
        0.77 to 1.01 of the time with three K groups, 1.00 with two warpgroups, 1.05 to 1.3 with one, 1.02 to 1.06 with three tiles of
        rows (docs/log-fp4.md).
        """
        return 1 if self.k_groups >= 3 or self.consumers >= 4 or self.together > 1 else 2

    @property
    def at_launch(self) -> int:
        """Registers of every thread of a block when it starts.

        A quarter of a multiprocessor has 16384; 1024 stay for a block of ``arrange``, which waits beside this kernel for the next product.
        """
        return min(248, 15360 // (self.threads // 4 * self.min_blocks) // 8 * 8)

    @property
    def registers(self) -> int:
        """Of a consumer thread: its share of what the block gets at launch when the copying warpgroup keeps its own.

        Asking for more than the block was given would wait for ever.
        """
        return min(240, (self.at_launch * (self.consumers + 1) - COPY_REGISTERS) // self.consumers // 8 * 8)

    def macros(self, fp16: bool, out32: bool = False) -> dict[str, int]:
        return {
            "FP16": int(fp16), "TOKENS": self.tokens, "GROUPS": self.groups, "KGROUPS": self.k_groups, "SPLITS": self.splits,
            "HELPED": self.helped, "FRAGMENTS": self.fragments, "TOGETHER": self.together, "STAGES": self.stages, "PREFETCH": self.prefetch,
            "REGISTERS": self.registers, "COPY_REGISTERS": COPY_REGISTERS, "AT_LAUNCH": self.at_launch, "OUT32": int(out32),
        }  # fmt: skip

    @property
    def threads(self) -> int:
        return 128 * (self.consumers + 1)

    def shared_bytes(self) -> int:
        rows, share = 64 * self.groups, self.tokens // self.splits
        sums = (self.k_groups * self.tokens * rows if self.k_groups > 1 else 0) * 4 + share * (rows + 4) * 4
        main = self.stages * self.tokens * 128 + 4 * self.consumers * self.prefetch * 640
        mail = (self.splits - 1) * share * rows * 4
        barriers = 16 * self.stages + (
            8 if self.splits > 1 or self.helped else 0
        )  # two a stage, one of mail or of a helper's sums
        passed = self.tokens * rows * 4 if self.helped else 0
        return max(main, sums) + mail + passed + barriers

    def fits(self) -> bool:
        """Whether ``min_blocks`` blocks find the registers and the shared memory that they need on a multiprocessor of Hopper."""
        needed = self.tokens // 2 + 16 * self.fragments * self.together + 28  # sums, fragments, addresses
        return self.registers >= needed and self.shared_bytes() <= _SHARED_BYTES // self.min_blocks - 1024


def _row_warps(n: int) -> int:
    """Row warps that cover N in about one block a multiprocessor, at most 8."""
    row_warps = 1
    while row_warps < 8 and ceil_div(n, 32 * row_warps) > MULTIPROCESSORS:
        row_warps *= 2
    return row_warps


def _bulk_shape(tokens: int, n: int, k: int) -> tuple[int, int]:
    """(row warps, splits) of blocks that take x in bulk copies: one wave in which a multiprocessor has least to do.

    Of equals those that split K, which halves what a block stages of x; not for one row, where that is little.
    """
    choices = [
        (row_warps, splits)
        for row_warps, splits in itertools.product((1, 2, 3, 4, 5, 6, 8), (1, 2))
        if ceil_div(n, 32 * row_warps) * splits <= MULTIPROCESSORS
    ]
    preferred = 2 if tokens > 1 else 1

    def rank(shape: tuple[int, int]) -> tuple[int, bool, int]:
        row_warps, splits = shape
        return row_warps * ceil_div(ceil_div(k, 64), splits), splits != preferred, row_warps

    return min(choices, key=rank, default=(8, 1))


def _with_x(plan: MmaPlan, k: int) -> MmaPlan:
    """``plan`` with all of a block's x staged at once where it fits, else 24 windows, or a round of the rings, at a time."""
    turn = plan.k_warps * plan.prefetch
    whole = replace(plan, chunk=ceil_div(ceil_div(ceil_div(k, 64), plan.splits), turn) * turn, x_stages=1)
    parts = [replace(plan, chunk=max(1, 24 // turn) * turn, x_stages=stages) for stages in (3, 2, 1)]
    return next(fitting for fitting in (whole, *parts) if fits_with_norm(fitting, k))


def _plan_bulk(tokens: int, n: int, k: int) -> MmaPlan:
    """x in bulk copies, for up to 16 rows: a block of up to 16 warps, of which each has eight windows or more where there are so many.

    Within 2.1 % of the fastest plan of an H200 in 18 cells with what fp4_shapes.py keeps, up to 9.5 % behind without (docs/log-fp4.md).
    """
    row_warps, splits = _bulk_shape(tokens, n, k)
    share = ceil_div(k, 64) // splits
    # A round of more K warps takes the room that the next chunk of x needs.
    most = 8 if tokens > 8 and share > 64 else 16
    k_warps = min(max(8 // row_warps, min(16 // row_warps, share // 8)), most)
    return _with_x(MmaPlan(tokens, row_warps, k_warps, splits, 4), k)


@functools.lru_cache(4096)
def plan_mma(m: int, n: int, k: int, clusters: bool, bulk: bool = True) -> MmaPlan:
    """The plan of ``fp4_mma`` for a shape, with or without clusters of blocks (sm_90).

    ``bulk``: whether x may come by bulk copies, which a LayerNorm on the way does not allow. It does where `takes_bulk`.

    Without them one block of 12 to 16 warps a multiprocessor, and as many K ways as that leaves: measured on an H200 over six shapes. From
    three rows on x costs more to stage than a cluster to join, so blocks get taller and split K. Without clusters blocks are smaller,
    to fit 99 KB of shared memory.
    """
    tokens = 1
    while tokens < min(m, 16 if clusters else 32):
        tokens *= 2
    windows = ceil_div(k, 64)
    if clusters and bulk and takes_bulk(k):
        if blocks := fp4_shapes.MMA.get((tokens, n, k)):
            return _with_x(MmaPlan(tokens, *blocks, 4), k)
        return _plan_bulk(tokens, n, k)
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


@functools.lru_cache
def _wgmma_candidates(most_tokens: int) -> tuple[WgmmaPlan, ...]:
    """Plans that may be best for some shape: those that fit registers and shared memory, with the deepest ring of x up to 6 stages."""
    found = []
    for tokens, groups, k_groups, splits, most in itertools.product(
        (16, 32, 64, 128, 256), (1, 2, 3, 4), (1, 2, 3, 4), (1, 2), (1, 2)
    ):
        if tokens > most_tokens or tokens < min(64, most_tokens) or groups * k_groups > 4:
            continue
        plan = WgmmaPlan(tokens, groups, splits, 12, min_blocks=most, k_groups=k_groups)
        fitting = (
            ring
            for stages in ((8,) if k_groups == 4 else (6, 5, 4))
            if goes_round(stages, k_groups) and (ring := replace(plan, stages=stages)).fits()
        )
        found += itertools.islice(fitting, 1)
    return tuple(found)


def predicted_us(plan: WgmmaPlan, m: int, n: int, k: int) -> float:
    """What `fp4_cost.wgmma_us` says of a plan."""
    return wgmma_us((m, n, k), plan.tokens, plan.groups, plan.k_groups, plan.splits, plan.min_blocks)


@functools.lru_cache(4096)
def plan_wgmma(m: int, n: int, k: int) -> WgmmaPlan:
    """The plan of ``fp4_wgmma`` for a shape: as it was timed (fp4_shapes.py), or what is expected to end first on an H200."""
    most_tokens = next((tokens for tokens in (16, 32, 64, 128) if m <= tokens), 256)
    fitting = [plan for plan in _wgmma_candidates(most_tokens) if plan.splits * plan.k_groups <= ceil_div(k, 64)]
    if timed := fp4_shapes.WGMMA.get((most_tokens, n, k)) if m <= 256 else None:
        *blocks, helped, together = timed
        plan = replace(next(plan for plan in fitting if _blocks(plan) == tuple(blocks)), helped=helped)
        return _in_pairs(plan) if together == 2 else plan
    if fills_with_many_rows(m, n):
        tokens, groups, k_groups = min(MANY_ROWS_US, key=lambda blocks: many_rows_us((m, n, k), blocks))
        whole = (tokens, groups, k_groups, 1, 1)
        return next((plan for plan in fitting if _blocks(plan) == whole), WgmmaPlan(256, 2, 1, 6))
    plan = min(fitting, key=lambda plan: predicted_us(plan, m, n, k))
    return _in_pairs(plan) if plan.k_groups == 2 and plan.tokens <= 32 else plan


def _in_pairs(plan: WgmmaPlan) -> WgmmaPlan:
    """``plan`` with two windows multiplied together: up to 5 % faster for few tokens, slower for 128 (docs/log-fp4.md)."""
    return replace(plan, together=2, stages=max(8, 4 * plan.k_groups))


@dataclass(frozen=True)
class Rows:
    """Blocks of ``plan`` above each other, from block ``first`` on, that one launch does."""

    plan: WgmmaPlan
    first: int
    blocks: int


@functools.lru_cache(4096)
def launches(plan: WgmmaPlan, m: int, n: int, processors: int = MULTIPROCESSORS) -> tuple[Rows, ...]:
    """A product's launches, one or two.

    Where a last round of blocks of 256 tokens by 128 features would leave multiprocessors idle, its rows go in twice as many blocks of half
    the height, whose sums two K groups share. What is tuned of a plan has no say in it, since it decides the order of additions.
    """
    rows, columns = ceil_div(n, 64 * plan.groups), ceil_div(m, plan.tokens)
    if (plan.tokens, plan.groups, plan.k_groups, plan.splits) != (256, 2, 1, 1):
        return (Rows(plan, 0, rows),)
    whole = rows_in_whole_rounds(rows, columns, processors)
    if whole == rows:
        return (Rows(plan, 0, rows),)
    half = replace(plan, groups=1, k_groups=2, stages=6)
    return Rows(plan, 0, whole), Rows(half, 2 * whole, ceil_div(n, 64) - 2 * whole)


def _blocks(plan: WgmmaPlan) -> tuple[int, int, int, int, int]:
    return plan.tokens, plan.groups, plan.k_groups, plan.splits, plan.min_blocks


def fills_with_many_rows(m: int, n: int) -> bool:
    """Whether blocks of 256 rows and 128 features are about one a multiprocessor or more: then none splits K."""
    return m > 256 and ceil_div(n, 128) * ceil_div(m, 256) >= 0.9 * MULTIPROCESSORS


def has_clusters(capability: tuple[int, int]) -> bool:
    """Clusters of blocks and 227 KB of shared memory a block: Hopper and data-centre Blackwell, not sm_120."""
    return capability[0] in (9, 10)


def most_mma_rows(capability: tuple[int, int], n: int, k: int) -> int:
    """Rows up to which ``fp4_mma`` is the faster fused kernel; without bulk copies of x fewer, for large N."""
    if capability[0] != 9:
        return 32
    return 8 if n >= 8192 and k % 64 else 16


def wgmma_beats_dequantize(m: int, n: int, k: int) -> bool:
    """Whether ``fp4_wgmma`` is expected to finish before dequantising once and cuBLAS; rates measured on an H200."""
    if m <= 256:
        return True
    if fills_with_many_rows(m, n):
        fused_us = min(many_rows_us((m, n, k), blocks) for blocks in MANY_ROWS_US)
    else:
        fused_us = predicted_us(plan_wgmma(m, n, k), m, n, k)
    return (
        fused_us < 2 * m * n * k / 790e6 + n * k * 2.5625 / 3.8e6 + 5.0
    )  # cuBLAS, the weight written out, two launches
