"""Plans of ``fp4_mma`` (``cuda/fp4_mma.cu``), for few rows: how the kernel covers a shape.

A plan fixes the order in which partial sums are added, and depends on the shape alone, never on where it runs: results
repeat bit for bit on one kind of GPU. ``M`` rows, ``N`` out features, ``K`` in features. A window is 64 columns.
"""

import functools
import itertools
from dataclasses import dataclass, replace

from vblackwell.errors import ConfigurationError

MMA_FILES = (
    "ptx.cuh", "fp4/decode.cuh", "barrier.cuh", "ring.cuh", "fp4/epilogue.cuh", "fp4/mma_block.cuh",
    "fp4/norm_rows.cuh", "fp4/fp4_mma.cu",
)  # fmt: skip
MULTIPROCESSORS = 132  # of an H200, on every GPU: a plan may not depend on where it runs
SHARED_BYTES = 227 * 1024  # of a block on Hopper at most: of 228 KB each block takes 1 KB more than it asks for
_ALONE_BYTES = 114 * 1024  # of which two blocks do not fit one
_X_BYTES = 128 * 1024  # of x that a block stages at a time
# (row warps, K warps, splits) of plans with bulk copies, timed fastest on an H200 where the rule chooses others
# (benchmarks/results/tune; 2 and 8 rows are interpolated), by (rows rounded up to a power of two, N, K).
_TIMED: dict[tuple[int, int, int], tuple[int, int, int]] = {
    **{(rows, 28672, 8192): (7, 4, 1) for rows in (1, 2, 4, 8)},
    (16, 4096, 14336): (2, 6, 2),
    (16, 28672, 8192): (16, 1, 2),
}


def ceil_div(a: int, b: int) -> int:
    return -(-a // b)


def round_up(a: int, unit: int) -> int:
    return ceil_div(a, unit) * unit


def has_clusters(capability: tuple[int, int]) -> bool:
    """Clusters of blocks and 227 KB of shared memory a block: Hopper and data-centre Blackwell, not sm_120."""
    return capability[0] in (9, 10)


def launch_bytes(shared_bytes: int, blocks: int, processors: int) -> int:
    """Shared memory to ask for with clusters: where each of ``blocks`` can have a multiprocessor, so much that no two
    of the next product, which begin while this one's run, share one and take up to twice as long."""
    return max(shared_bytes, _ALONE_BYTES) if blocks <= processors else shared_bytes


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

    def macros(self, fp16: bool = False, out32: bool = False, norm: bool = False) -> dict[str, int]:
        fields = ("tokens", "row_warps", "k_warps", "splits", "prefetch", "min_blocks", "chunk", "x_stages")
        flags = {"FP16": fp16, "OUT32": out32, "NORM": norm, "BULK": self.chunk > 0, "PARTS": False}
        macros = {name.upper(): getattr(self, name) for name in fields} | {"PASS_TOKENS": min(self.tokens, 16)}
        return macros | {name: int(on) for name, on in flags.items()}

    @property
    def threads(self) -> int:
        return 32 * self.row_warps * self.k_warps

    def chunks(self, k: int) -> tuple[int, int]:
        """(windows a chunk of x, chunks a block): equal chunks that fit the staging memory, without bulk copies."""
        share = ceil_div(ceil_div(k, 64), self.splits)
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


def takes_bulk(k: int) -> bool:
    """Whether rows of K features may come by bulk copies: whole windows, and not just a few. (Compilers trace this.)"""
    return k % 64 == 0 and k >= 1024


def _with_x(plan: MmaPlan, k: int) -> MmaPlan:
    """``plan`` with all of a block's x staged at once where it fits, else 24 windows or a round of rings at a time."""
    turn = plan.k_warps * plan.prefetch
    whole = replace(plan, chunk=round_up(ceil_div(ceil_div(k, 64), plan.splits), turn), x_stages=1)
    parts = [replace(plan, chunk=max(1, 24 // turn) * turn, x_stages=stages) for stages in (3, 2, 1)]
    return next(fitting for fitting in (whole, *parts) if fits_with_norm(fitting, k))


def _plan_bulk(tokens: int, n: int, k: int) -> MmaPlan:
    """x in bulk copies, for up to 16 rows: blocks of up to 16 warps, each with eight windows or more if there are so
    many, in one wave in which a multiprocessor has least to do; of equals those that split K, which halves what a block
    stages of x, but for one row. Within 2.1 % of the fastest plan in 18 cells (docs/journal/fp4.md)."""
    if timed := _TIMED.get((tokens, n, k)):
        return _with_x(MmaPlan(tokens, *timed, 4), k)
    preferred = 2 if tokens > 1 else 1
    one_wave = [
        (row_warps * ceil_div(ceil_div(k, 64), splits), splits != preferred, row_warps, splits)
        for row_warps, splits in itertools.product((1, 2, 3, 4, 5, 6, 8), (1, 2))
        if ceil_div(n, 32 * row_warps) * splits <= MULTIPROCESSORS
    ]
    _, _, row_warps, splits = min(one_wave, default=(0, False, 8, 1))
    share = ceil_div(k, 64) // splits
    # A round of more K warps takes the memory that the next chunk of x needs.
    most = 8 if tokens > 8 and share > 64 else 16
    k_warps = min(max(8 // row_warps, min(16 // row_warps, share // 8)), most)
    return _with_x(MmaPlan(tokens, row_warps, k_warps, splits, 4), k)


@functools.lru_cache(4096)
def plan_mma(m: int, n: int, k: int, clusters: bool, bulk: bool = True) -> MmaPlan:
    """The plan for a shape, with or without clusters of blocks (sm_90), and x in ``bulk`` copies if it may. Without
    bulk copies one block of 12 to 16 warps a multiprocessor, from three rows on taller ones that split K, for less x to
    stage. Without clusters blocks are smaller, to fit 99 KB of shared memory."""
    tokens = min(1 << (m - 1).bit_length(), 16 if clusters else 32)
    windows = ceil_div(k, 64)
    if clusters and bulk and takes_bulk(k):
        return _plan_bulk(tokens, n, k)
    # Row warps that cover N in about one block a multiprocessor, at most 8.
    tall = next((warps for warps in (1, 2, 4) if ceil_div(n, 32 * warps) <= MULTIPROCESSORS), 8)
    if not clusters:
        row_warps = {1: 1, 2: 1, 4: 2}.get(tokens, 4)
        plan = MmaPlan(tokens, row_warps, 8 // row_warps, 1, 4 if tokens < 32 else 2, 1, 32 * 1024)
    elif tokens <= 2:
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


def max_mma_rows(capability: tuple[int, int], n: int, k: int) -> int:
    """Rows up to which ``fp4_mma`` is the faster fused kernel; without bulk copies of x fewer, for large N."""
    if capability[0] != 9:
        return 32
    return 8 if n >= 8192 and k % 64 else 16
