"""Plans of ``fp4_wgmma`` (``cuda/fp4_wgmma.cu``), for tens to hundreds of rows; mma_plan.py says what a plan is.

How long a plan takes is arithmetic about an H200. For a window a warpgroup issues its decode and waits for its
products; alone on a multiprocessor it also waits for its own latencies. The constants are of a regression that ranks
329 plans in 18 cells of 64 to 256 rows (benchmarks/results/tune): its plan is on average 1.9 %, at most 11.4 %, slower
than the fastest of a cell. `many_rows_us` compares plans for more rows, in grids of many rounds.
"""

import functools
import itertools
import math
from dataclasses import dataclass, replace
from typing import NamedTuple

from vblackwell.errors import ConfigurationError
from vblackwell.kernels.fp4.mma_plan import MULTIPROCESSORS, SHARED_BYTES, ceil_div

WGMMA_FILES = (
    "ptx.cuh", "fp4/decode.cuh", "fp4/wgmma.cuh", "barrier.cuh", "ring.cuh", "fp4/epilogue.cuh", "fp4/fp4_wgmma.cu",
)  # fmt: skip
COPY_REGISTERS = 24  # that a thread of wgmma's copying warpgroup keeps

_CYCLES_A_US = 1755.0
_TENSOR = 0.519  # cycles of products, a token and window of 64 rows
_ALONE = 1.29  # more of all cycles where one warpgroup has the multiprocessor, half of it with two, ..
_LATENCY = 149.0  # cycles of a warpgroup alone between two windows' first products, without the products
_ISSUE = 142.0  # cycles of a scheduler to decode a window of 64 rows
_ADDED = 1.13  # of the shorter of products and decode, what the longer does not hide, and what both cost each other
_SUM = 15.1  # cycles a token of a block's epilogue, for each K group
_START_US, _CLUSTER_US = 0.51, 1.74  # a launch and what is in front of it; what two blocks that split K send each other
_L2_BYTES_A_US, _MEMORY_BYTES_A_US = 8.89e6, 4.2e6
# Microseconds a window of a block alone on a multiprocessor, by (tokens, groups, K groups).
_MANY_ROWS_US = {(256, 2, 1): 0.75, (128, 3, 1): 0.59, (256, 1, 2): 0.405}
# (tokens, groups, K groups, splits, blocks a multiprocessor, windows a step) of plans, timed fastest on an H200 where
# the rule chooses others (benchmarks/results/tune), by (rows rounded up to a power of two, N, K).
_TIMED: dict[tuple[int, int, int], tuple[int, int, int, int, int, int]] = {
    (32, 4096, 4096): (32, 1, 2, 2, 2, 2),
    (32, 6144, 4096): (32, 2, 2, 2, 1, 2),
    (32, 4096, 14336): (32, 1, 2, 2, 2, 2),
    (32, 8192, 8192): (32, 2, 2, 2, 1, 2),
    (32, 28672, 8192): (32, 4, 1, 1, 1, 2),
    (64, 4096, 4096): (64, 1, 2, 2, 2, 2),
    (64, 6144, 4096): (64, 1, 3, 1, 1, 1),
    (64, 4096, 14336): (64, 1, 2, 2, 2, 2),
    (64, 8192, 8192): (64, 2, 2, 2, 1, 1),
    (128, 4096, 4096): (128, 1, 3, 2, 1, 1),
    (128, 6144, 4096): (128, 1, 4, 1, 1, 1),
    (128, 4096, 14336): (128, 1, 3, 2, 1, 1),
    (256, 4096, 4096): (256, 1, 1, 2, 1, 1),
    (256, 4096, 14336): (256, 1, 1, 2, 1, 1),
    (256, 8192, 8192): (256, 1, 2, 1, 1, 1),
}


def goes_round(stages: int, k_groups: int, windows_per_step: int = 1) -> bool:
    """Whether each stage belongs to one of ``k_groups`` that take turns, with two turns each."""
    turn = k_groups * windows_per_step
    return turn == 1 or (stages % turn == 0 and stages >= 2 * turn)


@dataclass(frozen=True)
class WgmmaPlan:
    """How ``fp4_wgmma`` covers a shape."""

    tokens: int  # rows of x a block takes (wgmma's n)
    groups: int  # warpgroups, 64 weight rows each
    splits: int  # blocks of a cluster that split K, and share the tokens by eights
    stages: int  # windows of x in shared memory, as `goes_round` asks
    prefetch: int = 4  # windows of weights a warp has in flight, an even number
    min_blocks: int = 1  # of a multiprocessor, to leave registers for; 2 may be faster in a grid of one wave, too
    k_groups: int = 1  # sets of ``groups`` warpgroups that take turns at the windows
    windows_per_step: int = 1  # that a warpgroup multiplies at a time, 1 or 2

    def __post_init__(self) -> None:
        """Raises ConfigurationError where a stage of x would go from one K group to another: one that comes to it while
        another still awaits the window before would multiply what is not there yet, or wait forever."""
        if not goes_round(self.stages, self.k_groups, self.windows_per_step):
            raise ConfigurationError(
                f"{self.k_groups} K groups take turns at stages of x, {self.windows_per_step} at a time: {self.stages}"
                f" do not go round, {2 * self.windows_per_step} or more for each"
            )
        if self.tokens % (unit := 8 * self.splits):
            raise ConfigurationError(
                f"tokens {self.tokens}, splits {self.splits}: take a multiple of {unit} tokens, or fewer splits"
            )
        if self.prefetch % 2:
            raise ConfigurationError(f"{self.prefetch} windows in flight: wgmma's ring takes an even number")

    @property
    def consumers(self) -> int:
        return self.groups * self.k_groups

    @property
    def fragments(self) -> int:
        """Sets of ``windows_per_step`` decoded windows that a warpgroup holds: one where others multiply meanwhile."""
        return 1 if self.k_groups >= 3 or self.consumers >= 4 or self.windows_per_step > 1 else 2

    @property
    def launch_registers(self) -> int:
        """Of every thread when a block starts: of 16384, less 1024 for a block of the next product's ``swizzle_x``."""
        return min(248, 15360 // (self.threads // 4 * self.min_blocks) // 8 * 8)

    @property
    def registers(self) -> int:
        """Of a consumer thread, next to the copying warpgroup's; more than a block has would be waited for forever."""
        return min(240, (self.launch_registers * (self.consumers + 1) - COPY_REGISTERS) // self.consumers // 8 * 8)

    def macros(self, fp16: bool, out32: bool = False) -> dict[str, int]:
        fields = ("tokens", "groups", "k_groups", "splits", "stages", "prefetch", "windows_per_step")
        derived = ("fragments", "registers", "launch_registers")
        macros = {name.upper(): getattr(self, name) for name in (*fields, *derived)}
        return macros | {"FP16": int(fp16), "OUT32": int(out32), "COPY_REGISTERS": COPY_REGISTERS}

    @property
    def threads(self) -> int:
        return 128 * (self.consumers + 1)

    def shared_bytes(self) -> int:
        rows, share = 64 * self.groups, self.tokens // self.splits
        sums = (self.k_groups * self.tokens * rows if self.k_groups > 1 else 0) * 4 + share * (rows + 4) * 4
        main = self.stages * self.tokens * 128 + 4 * self.consumers * self.prefetch * 640
        mail = (self.splits - 1) * share * rows * 4
        barriers = 16 * self.stages + (8 if self.splits > 1 else 0)  # two a stage, one of mail
        return max(main, sums) + mail + barriers

    def fits(self) -> bool:
        """Whether ``min_blocks`` blocks find their registers and shared memory on a multiprocessor of Hopper."""
        needed = self.tokens // 2 + 16 * self.fragments * self.windows_per_step + 28  # sums, fragments, addresses
        return self.registers >= needed and self.shared_bytes() <= SHARED_BYTES // self.min_blocks - 1024


@functools.lru_cache
def _wgmma_candidates(most_tokens: int) -> tuple[WgmmaPlan, ...]:
    """Plans that fit registers and shared memory, with the deepest ring of x up to 6 stages."""
    found = []
    shapes = itertools.product((16, 32, 64, 128, 256), (1, 2, 3, 4), (1, 2, 3, 4), (1, 2), (1, 2))
    for tokens, groups, k_groups, splits, blocks in shapes:
        if min(64, most_tokens) <= tokens <= most_tokens and groups * k_groups <= 4:
            plans = (
                WgmmaPlan(tokens, groups, splits, stages, min_blocks=blocks, k_groups=k_groups)
                for stages in ((8,) if k_groups == 4 else (6, 5, 4))
                if goes_round(stages, k_groups)
            )
            found += itertools.islice((plan for plan in plans if plan.fits()), 1)
    return tuple(found)


def predicted_us(plan: WgmmaPlan, m: int, n: int, k: int) -> float:
    """Predicted microseconds of a launch of ``plan`` on an H200."""
    windows = ceil_div(ceil_div(k, 64), plan.splits)
    blocks = ceil_div(n, 64 * plan.groups) * plan.splits * ceil_div(m, plan.tokens)
    rounds, rest = divmod(blocks, MULTIPROCESSORS * plan.min_blocks)
    tensor = _TENSOR * plan.tokens

    def block_cycles(at_once: int) -> float:
        warpgroups = plan.consumers * at_once
        step = warpgroups * (max(tensor, _ISSUE) + _ADDED * min(tensor, _ISSUE))
        return max(_LATENCY + tensor, step) * (1 + _ALONE / warpgroups) * ceil_div(windows, plan.k_groups)

    cycles = rounds * block_cycles(plan.min_blocks)
    if rest:
        cycles += block_cycles(ceil_div(rest, MULTIPROCESSORS))
    cycles += (rounds + bool(rest)) * plan.tokens * _SUM * plan.k_groups * plan.min_blocks
    x_us = blocks * windows * plan.tokens * 128 / _L2_BYTES_A_US
    weights_us = n * k * 0.5625 / _MEMORY_BYTES_A_US
    return max(cycles / _CYCLES_A_US, x_us, weights_us) + _START_US + _CLUSTER_US * math.log2(plan.splits)


def many_rows_us(shape: tuple[int, int, int], blocks: tuple[int, int, int]) -> float:
    """Predicted microseconds for ``shape`` (M, N, K) in rounds of ``blocks`` of `_MANY_ROWS_US`, as of `launches`."""
    (m, n, k), (tokens, groups, k_groups) = shape, blocks
    columns, rows, last_us = ceil_div(m, tokens), ceil_div(n, 64 * groups), 0.0
    if (groups, k_groups) == (2, 1) and (whole := rows_in_whole_rounds(rows, columns)) < rows:
        rows, last_us = whole, _MANY_ROWS_US[tokens, 1, 2]
    return ceil_div(k, 64) * (ceil_div(rows * columns, MULTIPROCESSORS) * _MANY_ROWS_US[blocks] + last_us) + 3.0


def rows_in_whole_rounds(rows: int, columns: int, processors: int = MULTIPROCESSORS) -> int:
    """Of ``rows`` by ``columns`` blocks the rows that fill rounds; all where the others, cut in two, exceed one."""
    whole = rows * columns // processors * processors // columns
    return whole if whole > 0 and 2 * (rows - whole) * columns <= processors else rows


@functools.lru_cache(4096)
def plan_wgmma(m: int, n: int, k: int) -> WgmmaPlan:
    """The plan of ``fp4_wgmma`` for a shape: as it was timed, or what is expected to end first on an H200."""
    most_tokens = next((tokens for tokens in (16, 32, 64, 128) if m <= tokens), 256)
    fitting = [plan for plan in _wgmma_candidates(most_tokens) if plan.splits * plan.k_groups <= ceil_div(k, 64)]
    found: dict[tuple[int, ...], WgmmaPlan] = {
        (plan.tokens, plan.groups, plan.k_groups, plan.splits, plan.min_blocks): plan for plan in fitting
    }
    if timed := _TIMED.get((most_tokens, n, k)) if m <= 256 else None:
        *blocks, windows_per_step = timed
        return _in_pairs(found[tuple(blocks)]) if windows_per_step == 2 else found[tuple(blocks)]
    if fills_with_many_rows(m, n):
        blocks = min(_MANY_ROWS_US, key=lambda blocks: many_rows_us((m, n, k), blocks))
        plan = found.get((*blocks, 1, 1), WgmmaPlan(256, 2, 1, 6))
        # 6 stages take up to 0.8 % longer: what shared memory leaves of a multiprocessor's is L1 (docs/journal/fp4.md)
        return replace(plan, stages=4) if blocks == (256, 2, 1) else plan
    plan = min(fitting, key=lambda plan: predicted_us(plan, m, n, k))
    return _in_pairs(plan) if plan.k_groups == 2 and plan.tokens <= 32 else plan


def _in_pairs(plan: WgmmaPlan) -> WgmmaPlan:
    """``plan`` with two windows a step: up to 5 % faster for few tokens, slower for 128 (docs/journal/fp4.md)."""
    return replace(plan, windows_per_step=2, stages=max(8, 4 * plan.k_groups))


class Rows(NamedTuple):
    """Blocks of ``plan`` above each other, from block ``first`` on, that one launch does."""

    plan: WgmmaPlan
    first: int
    blocks: int


@functools.lru_cache(4096)
def launches(plan: WgmmaPlan, m: int, n: int, processors: int = MULTIPROCESSORS) -> tuple[Rows, ...]:
    """A product's launches, one or two: where a last round of blocks of 256 tokens by 128 features would leave
    multiprocessors idle, its rows go in twice as many blocks of half the height, whose sums two K groups share."""
    rows = whole = ceil_div(n, 64 * plan.groups)
    if (plan.tokens, plan.groups, plan.k_groups, plan.splits) == (256, 2, 1, 1):
        whole = rows_in_whole_rounds(rows, ceil_div(m, plan.tokens), processors)
    if whole == rows:
        return (Rows(plan, 0, rows),)
    half = replace(plan, groups=1, k_groups=2, stages=6)
    return Rows(plan, 0, whole), Rows(half, 2 * whole, ceil_div(n, 64) - 2 * whole)


def fills_with_many_rows(m: int, n: int) -> bool:
    """Whether blocks of 256 rows and 128 features are about one a multiprocessor or more: then none splits K."""
    return m > 256 and ceil_div(n, 128) * ceil_div(m, 256) >= 0.9 * MULTIPROCESSORS


def wgmma_beats_dequantize(m: int, n: int, k: int) -> bool:
    """Whether ``fp4_wgmma`` is expected to finish before dequantising once and cuBLAS; rates measured on an H200."""
    if m <= 256:
        return True
    if fills_with_many_rows(m, n):
        fused_us = min(many_rows_us((m, n, k), blocks) for blocks in _MANY_ROWS_US)
    else:
        fused_us = predicted_us(plan_wgmma(m, n, k), m, n, k)
    # cuBLAS, the weight written out, two launches
    return fused_us < 2 * m * n * k / 790e6 + n * k * 2.5625 / 3.8e6 + 5.0
