"""Plans of ``fp4_mma`` (``cuda/fp4_mma.cu``), for few rows, and without wgmma for hundreds: how it covers a shape.

A plan fixes the order in which partial sums are added, and depends on the shape and on what kind of GPU it is (`Gpu`),
on nothing else: results repeat bit for bit on GPUs of one kind. ``M`` rows, ``N`` out features, ``K`` in features. A
window is 64 columns.
"""

import functools
import itertools
from collections.abc import Iterator
from dataclasses import dataclass, replace
from typing import NamedTuple

from vblackwell.errors import ConfigurationError

MMA_FILES = (
    "ptx.cuh", "fp4/decode.cuh", "barrier.cuh", "ring.cuh", "fp4/epilogue.cuh", "fp4/mma_block.cuh",
    "fp4/norm_rows.cuh", "fp4/fp4_mma.cu",
)  # fmt: skip
SHARED_BYTES = 227 * 1024  # of a block on Hopper at most: of 228 KB each block takes 1 KB more than it asks for
_X_BYTES = 128 * 1024  # of x that a block stages at a time
# (row warps, K warps, splits) of plans with bulk copies, timed fastest where the rule chooses others
# (benchmarks/results/tune; 2 and 8 rows are interpolated), by capability and multiprocessors, and by (rows rounded up
# to a power of two, N, K).
_TIMED: dict[tuple[tuple[int, int], int], dict[tuple[int, int, int], tuple[int, int, int]]] = {
    ((9, 0), 132): {
        **{(rows, 28672, 8192): (7, 4, 1) for rows in (1, 2, 4, 8)},
        (16, 4096, 14336): (2, 6, 2),
        (16, 28672, 8192): (16, 1, 2),
    }
}


class Gpu(NamedTuple):
    """What plans know of a GPU: nothing that may change between two runs."""

    capability: tuple[int, int]
    processors: int  # multiprocessors
    memory_bytes_a_us: float  # that its memory's clock and width allow

    @property
    def clusters(self) -> bool:
        """Clusters of blocks and 227 KB of shared memory a block: Hopper and data-centre Blackwell, not sm_120."""
        return self.capability[0] in (9, 10)

    @property
    def multiprocessor_bytes(self) -> int:
        """Shared memory of a multiprocessor, of which each block takes 1 KB more than it asks for."""
        return (228 if self.clusters else 164 if self.capability == (8, 0) else 100) * 1024

    @property
    def copied_bytes_a_us(self) -> float:
        """What a kernel reaches of the memory's rate."""
        return 0.86 * self.memory_bytes_a_us


H200 = Gpu((9, 0), 132, 4.9e6)  # where plans were timed


def ceil_div(a: int, b: int) -> int:
    return -(-a // b)


def round_up(a: int, unit: int) -> int:
    return ceil_div(a, unit) * unit


def launch_bytes(shared_bytes: int, blocks: int, gpu: Gpu) -> int:
    """Shared memory to ask for: where each of ``blocks`` can have a multiprocessor, so much that no two of the next
    product, which begin while this one's run (from capability 9.0 on), share one and take several times as long."""
    apart = gpu.capability[0] >= 9 and blocks <= gpu.processors
    return max(shared_bytes, gpu.multiprocessor_bytes // 2) if apart else shared_bytes


@dataclass(frozen=True)
class MmaPlan:
    """How ``fp4_mma`` covers a shape."""

    tokens: int  # rows of x a block takes, a power of two
    row_warps: int  # warps of 32 weight rows each
    k_warps: int  # warps of a block,
    splits: int  # and blocks of a cluster, that split K (1 where there are no clusters)
    prefetch: int  # windows a warp has in flight
    min_blocks: int = 1  # that the compiler must fit on a multiprocessor
    x_bytes: int = _X_BYTES  # of x that a block may hold; more than one chunk takes half of it each
    chunk: int = 0  # windows of x a bulk copy brings (sm_90, K a multiple of 64); 0: x comes by smaller copies
    x_stages: int = 2  # of such chunks
    k_blocks: int = 1  # of the grid that split K where there are no clusters, and meet in global memory

    def __post_init__(self) -> None:
        """Raises ConfigurationError where a chunk would begin between slots, or blocks share the outputs unevenly."""
        if self.chunk % (turn := self.k_warps * self.prefetch):
            raise ConfigurationError(
                f"chunks of {self.chunk} windows, {self.k_warps} K warps with {self.prefetch} windows in flight each:"
                f" take a multiple of {turn} windows"
            )
        if self.splits > 1 and (self.tokens > 16 or 8 * self.row_warps % self.splits):
            raise ConfigurationError(
                f"tokens {self.tokens}, row warps {self.row_warps}, splits {self.splits}: take at most 16 tokens, and"
                f" splits that divide {8 * self.row_warps}, a token's outputs by fours"
            )

    def macros(
        self, fp16: bool = False, out32: bool = False, norm: bool = False, unaligned: bool = False
    ) -> dict[str, int]:
        names = "tokens", "row_warps", "k_warps", "splits", "prefetch", "min_blocks", "chunk", "x_stages", "k_blocks"
        flags = {"FP16": fp16, "OUT32": out32, "NORM": norm, "BULK": self.chunk > 0, "PARTS": False}
        flags["UNALIGNED"] = unaligned
        macros = {name.upper(): getattr(self, name) for name in names} | {"PASS_TOKENS": min(self.tokens, 16)}
        return macros | {name: int(on) for name, on in flags.items()}

    @property
    def threads(self) -> int:
        return 32 * self.row_warps * self.k_warps

    def left_sums(self, m: int, n: int) -> int:
        """fp32 sums that blocks leave in global memory for each other; none where one block has all of K."""
        if self.k_blocks == 1:
            return 0
        return self.k_blocks * round_up(m, self.tokens) * round_up(n, 32 * self.row_warps)

    def chunks(self, k: int) -> tuple[int, int]:
        """(windows a chunk of x, chunks a block): equal chunks that fit the staging memory, without bulk copies."""
        share = ceil_div(ceil_div(k, 64), self.splits * self.k_blocks)
        most = max(1, self.x_bytes // (self.tokens * 128))
        if (windows := round_up(share, self.k_warps)) <= most:
            return windows, 1
        unit = self.k_warps * self.prefetch
        count = ceil_div(share, max(1, most // 2 // unit) * unit)
        return round_up(ceil_div(share, count), unit), count

    def shared_bytes(self, k: int, norm: bool = False) -> int:
        windows, count = self.chunks(k)
        x_bytes = windows * self.tokens * 128 * min(2, count)
        if self.chunk:  # a norm's gain is one more row; two barriers a stage, one of the first round
            x_bytes = self.x_stages * ((self.tokens + norm) * (self.chunk * 128 + 16) + 16) + 16
        tokens = min(self.tokens, 16)
        sums = self.k_warps * tokens * (32 * self.row_warps + 4) * 4
        share = tokens * 8 * self.row_warps // self.splits  # groups of four outputs
        mail = round_up(16 + (self.splits - 1) * share * 16, 128) if self.splits > 1 else 0
        statistics = (2048 if self.chunk else 1024) if norm else 0  # of rows that are normalised on the way
        return max(x_bytes + self.threads * self.prefetch * 36, sums) + mail + statistics


def fits_with_norm(plan: MmaPlan, k: int) -> bool:
    """Whether a block of Hopper has the shared memory that ``plan`` needs for K, also with RMSNorm on the way."""
    return plan.shared_bytes(k, norm=True) <= SHARED_BYTES


def takes_bulk(k: int, least: int = 1024) -> bool:
    """Whether rows of K features may come by bulk copies: whole windows, and not just a few. (Compilers trace this.)"""
    return k % 64 == 0 and k >= least


def _with_x(plan: MmaPlan, k: int) -> MmaPlan:
    """``plan`` with all of a block's x staged at once where it fits, else 24 windows or a round of rings at a time."""
    turn = plan.k_warps * plan.prefetch
    whole = replace(plan, chunk=round_up(ceil_div(ceil_div(k, 64), plan.splits), turn), x_stages=1)
    parts = [replace(plan, chunk=max(1, 24 // turn) * turn, x_stages=stages) for stages in (3, 2, 1)]
    return next(fitting for fitting in (whole, *parts) if fits_with_norm(fitting, k))


def _plan_bulk(tokens: int, n: int, k: int, gpu: Gpu) -> MmaPlan:
    """x in bulk copies, for up to 16 rows: blocks of up to 16 warps, each with eight windows or more if there are so
    many, in fewest waves, one if it can be, in which a multiprocessor has least to do; of equals those that split K,
    which halves what a block stages of x, but for one row. On an H200 within 2.1 % of the fastest plan in 18 cells
    (docs/journal/fp4.md)."""
    if timed := _TIMED.get((gpu.capability, gpu.processors), {}).get((tokens, n, k)):
        return _with_x(MmaPlan(tokens, *timed, 4), k)
    if not takes_bulk(k):
        return _plan_short(tokens, n, k, gpu)
    preferred = 2 if tokens > 1 else 1
    _, _, _, row_warps, splits = min(
        (waves, row_warps * ceil_div(ceil_div(k, 64), splits), splits != preferred, row_warps, splits)
        for row_warps, splits in itertools.product((1, 2, 3, 4, 5, 6, 8), (1, 2))
        for waves in [ceil_div(ceil_div(n, 32 * row_warps) * splits, gpu.processors)]
    )
    share = ceil_div(k, 64) // splits
    # A round of more K warps takes the memory that the next chunk of x needs.
    most = 8 if tokens > 8 and share > 64 else 16
    k_warps = min(max(8 // row_warps, min(16 // row_warps, share // 8)), most)
    return _with_x(MmaPlan(tokens, row_warps, k_warps, splits, 4), k)


def _plan_short(tokens: int, n: int, k: int, gpu: Gpu) -> MmaPlan:
    """x in bulk copies where K is below 1024: blocks in fewest waves, in which a multiprocessor has least to do; from
    three rows on half of K each, or else two windows more. Of the numbers of K warps that leave a scheduler fewest
    windows one that makes four warps, or eight of a larger weight. On an H100 within 7 % of the fastest of 20 plans in
    the seven of ten cells where it was among them (docs/journal/fp4.md)."""
    windows, more = ceil_div(k, 64), {1: 0} if tokens <= 2 else {1: 2, 2: 0}
    _, _, row_warps, splits = min(
        (waves, row_warps * ceil_div(windows, splits) + more[splits], row_warps, splits)
        for row_warps, splits in itertools.product((1, 2, 3, 4, 5, 6, 8), more)
        for waves in [ceil_div(ceil_div(n, 32 * row_warps) * splits, gpu.processors)]
    )
    share, usual = ceil_div(windows, splits), 4 if row_warps == 1 else 8

    def cost(k_warps: int) -> tuple[int, int]:
        warps = row_warps * k_warps
        return ceil_div(warps, 4) * ceil_div(share, k_warps), abs(warps - usual)

    k_warps = min(range(1, min(16 // row_warps, share) + 1), key=cost)
    return _with_x(MmaPlan(tokens, row_warps, k_warps, splits, 2), k)


# What plans without clusters and bulk copies are compared by, in cycles of a scheduler.
_DECODE, _EIGHT_TOKENS = 130.0, 12.0  # a warp's window: to issue its decode and copies, and its products
# What warps of a scheduler, which keep step, do not hide from each other: of a window, also for each eight tokens, and
# for a block's warps to meet where the next windows of x are asked for. With two warps a scheduler (green contexts of
# 112 multiprocessors of an H200, docs/journal/fp4.md) windows of 16, 32 and 64 tokens took 750, 920 and 1520 cycles.
_LATENCY, _EIGHT_LATENCY, _CHUNK = 100.0, 15.0, 600.0
_BLOCK = 2000.0  # for a block to begin and to end, and for each eight tokens and K warp to add up
_EIGHT_SUMS = 250.0
_CYCLES_A_US = 1500.0
_L2_BYTES_A_CYCLE = 32.0  # for each multiprocessor
_MEET_US = 1.5  # of blocks that split K
_START_US = 2.5
_SMALL_WEIGHT = 1 << 20  # elements, of which no warp has more than a few windows
_SMALL_SHARED_BYTES = 99 * 1024  # of a block where there are no clusters, but on an A100
_REGISTERS = 65536  # of a multiprocessor


def mma_cycles(capability: tuple[int, int]) -> float:
    """Of a scheduler's tensor core for an mma.m16n8k16 with fp32 sums; half that on workstation cards of 8.6 and up."""
    return 8.0 if capability[0] >= 9 and capability[0] < 12 or capability == (8, 0) else 32.0


def _plans_without_clusters(m: int, k: int, one_block: bool) -> Iterator[MmaPlan]:
    """Blocks of 8 or 16 warps that fit 99 KB, each with the deepest rings that do; ``one_block`` of 8 must have all
    of K."""
    most = min(1 << (m - 1).bit_length(), 64)
    sizes, k_splits = [most, most // 2] if most > 16 else [most], [1] if one_block else range(1, 9)
    windows = ceil_div(k, 64)
    ways = itertools.product(sizes, (8,) if one_block else (8, 16), (1, 2, 4, 8, 16), k_splits, (32 * 1024, 64 * 1024))
    for tokens, warps, row_warps, k_blocks, x_bytes in ways:
        k_warps = warps // row_warps
        if not 1 <= k_warps <= max(1, windows // k_blocks) or (k_blocks > 1 and windows < 8 * k_blocks):
            continue
        for prefetch in (4, 2):
            plan = MmaPlan(tokens, row_warps, k_warps, 1, prefetch, 16 // warps, x_bytes, k_blocks=k_blocks)
            if plan.shared_bytes(k, norm=one_block) <= _SMALL_SHARED_BYTES:
                yield plan
                break


def _resident(plan: MmaPlan, k: int, gpu: Gpu) -> int:
    """Blocks of ``plan`` that a multiprocessor holds at a time."""
    registers = 128 if plan.tokens > 16 else 96  # of a thread
    by_memory = gpu.multiprocessor_bytes // (plan.shared_bytes(k) + 1024)
    return max(1, min(_REGISTERS // (plan.threads * registers), by_memory))


def mma_us(plan: MmaPlan, m: int, n: int, k: int, gpu: Gpu) -> float:
    """Predicted microseconds of ``plan``, without clusters and bulk copies, on ``gpu``."""
    blocks = ceil_div(n, 32 * plan.row_warps) * plan.k_blocks * ceil_div(m, plan.tokens)
    eights, (chunk, count) = ceil_div(plan.tokens, 8), plan.chunks(k)
    windows = chunk * count  # of a block
    needs = _DECODE + _EIGHT_TOKENS * eights, 8 * eights * mma_cycles(gpu.capability)
    window, latency = sum(cycles**2.5 for cycles in needs) ** 0.4, _LATENCY + _EIGHT_LATENCY * eights

    def block_cycles(at_once: int) -> float:  # of so many that share a multiprocessor
        warps = ceil_div(plan.row_warps * plan.k_warps * at_once, 4)  # of a scheduler
        cycles = windows // plan.k_warps * (warps * window + latency) + (count - 1) * _CHUNK
        return cycles + _BLOCK + at_once * _EIGHT_SUMS * eights * plan.k_warps

    resident = _resident(plan, k, gpu)
    rounds, rest = divmod(blocks, gpu.processors * resident)
    cycles = rounds * block_cycles(resident) + (block_cycles(ceil_div(rest, gpu.processors)) if rest else 0.0)
    x_cycles = blocks * windows * plan.tokens * 128 / (_L2_BYTES_A_CYCLE * gpu.processors)
    sums_cycles = 8 * m * n * (plan.k_blocks - 1) / (_L2_BYTES_A_CYCLE * gpu.processors)
    needs_us = max(cycles, x_cycles) / _CYCLES_A_US, n * k * 0.5625 / gpu.copied_bytes_a_us
    met_us = sums_cycles / _CYCLES_A_US + _MEET_US if plan.k_blocks > 1 else 0.0
    return sum(us**8 for us in needs_us) ** 0.125 + met_us + _START_US


@functools.lru_cache(4096)
def plan_mma(m: int, n: int, k: int, gpu: Gpu, bulk: bool = True, one_block: bool = False) -> MmaPlan:
    """The plan for a shape, and x in ``bulk`` copies if it may. With clusters but without bulk copies one block of 12
    to 16 warps a multiprocessor, from three rows on taller ones that split K, for less x to stage. Without clusters
    what is expected to end first; ``one_block`` of them must have all of K, as RMSNorm on the way asks."""
    windows = ceil_div(k, 64)
    if not gpu.clusters:
        return min(_plans_without_clusters(m, k, one_block), key=lambda plan: mma_us(plan, m, n, k, gpu))
    tokens = min(1 << (m - 1).bit_length(), 16)
    if bulk and takes_bulk(k, 1024 if one_block else 512):
        return _plan_bulk(tokens, n, k, gpu)
    # Row warps that cover N in about one block a multiprocessor, at most 8.
    tall = next((warps for warps in (1, 2, 4) if ceil_div(n, 32 * warps) <= gpu.processors), 8)
    if tokens <= 2:
        plan = MmaPlan(tokens, tall, 16 // tall, 1, 4)
    elif tokens <= 8:
        row_warps = min(8, 2 * tall)
        plan = MmaPlan(tokens, row_warps, 16 // row_warps, row_warps // tall, 4)
    else:
        plan = MmaPlan(tokens, 8, 2, 4, 4)
    while plan.k_warps > 1 and plan.k_warps * plan.splits > windows:
        plan = replace(plan, k_warps=plan.k_warps // 2)
    while plan.splits > 1 and plan.splits > windows:
        plan = replace(plan, splits=plan.splits // 2)
    return plan


@functools.lru_cache(4096)
def mma_is_faster(m: int, n: int, k: int, gpu: Gpu) -> bool:
    """Whether ``fp4_mma`` is expected to end before other ways: fp4_wgmma, or the weight written out and cuBLAS."""
    if gpu.capability[0] == 9:
        # Without bulk copies of x fewer, for large N; with them more of weights that are small next to two launches.
        return m <= (32 if takes_bulk(k) and n * k <= _SMALL_WEIGHT else 8 if n >= 8192 and k % 64 else 16)
    if m <= 32 or gpu.clusters:
        return m <= 32
    # cuBLAS with 85 % of the tensor cores, or of the memory, the weight written out, two launches
    cycles = m * n * k / 2048 * mma_cycles(gpu.capability) / (4 * gpu.processors)
    product_us = max(cycles / (0.85 * _CYCLES_A_US), 2 * n * k / gpu.copied_bytes_a_us)
    whole_us = product_us + 2.5625 * n * k / gpu.copied_bytes_a_us + 2 * _START_US
    return m <= 256 and mma_us(plan_mma(m, n, k, gpu), m, n, k, gpu) < whole_us
