"""Plans of ``fp4_wgmma``, for tens to hundreds of rows: how the kernel covers a shape, as pure functions of it; which kernel takes which.

Few rows are ``fp4_mma``'s (fp4_mma_plan.py). A plan fixes the order in which partial sums are added, and depends on the shape alone:
results repeat bit for bit on one kind of GPU, however it is tuned. The kernel is ``cuda/fp4_wgmma.cu``; ``fp4_cuda.py`` launches it.

``M`` rows, ``N`` out features, ``K`` in features. A window is 64 columns.
"""

from __future__ import annotations

import functools
import itertools
from dataclasses import dataclass, replace

from vblackwell.errors import ConfigurationError
from vblackwell.kernels.fp4 import shapes as fp4_shapes
from vblackwell.kernels.fp4.blocks import SHARED_BYTES, ceil_div
from vblackwell.kernels.fp4.cost import MANY_ROWS_US, MULTIPROCESSORS, many_rows_us, rows_in_whole_rounds, wgmma_us

WGMMA_FILES = ("ptx.cuh", "decode.cuh", "wgmma.cuh", "barrier.cuh", "ring.cuh", "epilogue.cuh", "fp4_wgmma.cu")
COPY_REGISTERS = 24  # that a thread of wgmma's copying warpgroup keeps


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
        return self.registers >= needed and self.shared_bytes() <= SHARED_BYTES // self.min_blocks - 1024


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
        plan = next((plan for plan in fitting if _blocks(plan) == whole), WgmmaPlan(256, 2, 1, 6))
        # 6 stages take up to 0.8 % longer: what shared memory leaves of a multiprocessor's is L1 (docs/log-fp4.md)
        return replace(plan, stages=4) if whole == (256, 2, 1, 1, 1) else plan
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


def wgmma_beats_dequantize(m: int, n: int, k: int) -> bool:
    """Whether ``fp4_wgmma`` is expected to finish before dequantising once and cuBLAS; rates measured on an H200."""
    if m <= 256 or (256 * ceil_div(m, 256), n, k) in fp4_shapes.FUSED:
        return True
    if fills_with_many_rows(m, n):
        fused_us = min(many_rows_us((m, n, k), blocks) for blocks in MANY_ROWS_US)
    else:
        fused_us = predicted_us(plan_wgmma(m, n, k), m, n, k)
    return (
        fused_us < 2 * m * n * k / 790e6 + n * k * 2.5625 / 3.8e6 + 5.0
    )  # cuBLAS, the weight written out, two launches
