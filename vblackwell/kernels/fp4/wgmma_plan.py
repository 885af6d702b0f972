"""Plans of ``fp4_wgmma`` (``cuda/fp4_wgmma.cu``), for tens to thousands of rows; mma_plan.py says what a plan is.

How long a plan takes is arithmetic: rounds of blocks on the multiprocessors there are, and for each window what the
tensor cores, the schedulers that decode, or one warpgroup's own latencies need. Constants are fitted to times of 36
cells on an H200: what `predicted_us` chooses is on average 3.2 % slower than the fastest plan that was timed, with the
table 1.1 % (tests/kernels/fp4/test_model.py). Blocks take any multiple of 16 tokens, so that few rows, and rounds, are
wasted.
"""

import functools
import itertools
import math
from dataclasses import dataclass, replace
from typing import NamedTuple

from vblackwell.errors import ConfigurationError
from vblackwell.kernels.fp4.mma_plan import H200, SHARED_BYTES, Gpu, ceil_div, round_up

WGMMA_FILES = (
    "ptx.cuh", "fp4/decode.cuh", "fp4/wgmma.cuh", "barrier.cuh", "ring.cuh", "fp4/epilogue.cuh", "fp4/fp4_wgmma.cu",
)  # fmt: skip
COPY_REGISTERS = 24  # that a thread of wgmma's copying warpgroup keeps
_INSTRUCTION = 30  # without which, next to its sums, the assembler refuses an instruction

_CYCLES_A_US = 1755.0
_TENSOR = 1.8  # cycles of products, a token and window of 64 rows
_ISSUE = 164.0  # cycles of a scheduler to decode a window of 64 rows
_LATENCY = 174.0  # cycles of a warpgroup between its products and the next ones
_STAGE = 107.0  # cycles of a block to bring and to release a stage of x, for each K group
_OVERLAP = 2.46  # norm in which these four meet: the longest hides the others, not all of them
_SUM, _OUTPUT = 4.0, 2.0  # cycles a token of a block's epilogue, for each K group and for each 64 features
_LATER = 1.25  # that rounds after the first take longer: nothing overlaps their ends, and clocks fall
_START_US, _CLUSTER_US = 2.4, 1.2  # a launch and what is in front of it; what blocks that split K send each other
_SWIZZLED_BYTES_A_US = 3.4e6  # read and written by `swizzle_x`, which the product waits for
_LATE_US = 0.64  # where some of its blocks begin only as the product ahead ends, and the product's after them
_SWIZZLE_BYTES, _SWIZZLE_REGISTERS = 4096, 4096  # of a block: what it writes, what it takes of a multiprocessor's 65536
_L2_BYTES_A_US = 11.7e6
_CLUSTERED = 10 / 11  # of the multiprocessors, that clusters of four find: 120 of 132
_WHOLE_START_US = 6.0  # what writing a weight out and cuBLAS, 3.5 to 4.0 by itself, take more than their rates say
_UNALIGNED = 5.0  # that cuBLAS takes longer at least where rows do not begin at multiples of 16 bytes (5.0 to 7.3)
# That a plan of a kind which nobody has timed must be faster, one that splits K by more than two much so.
_UNTIMED, _SPLIT = 1.03, 1.15
# (tokens, groups, K groups, splits, blocks a multiprocessor, windows a step) of plans that were timed to be more than
# 4 % faster than what the model chooses (benchmarks/results/tune), by capability and multiprocessors, and by (rows
# rounded up to a multiple of 16, N, K).
_TIMED: dict[tuple[tuple[int, int], int], dict[tuple[int, int, int], tuple[int, int, int, int, int, int]]] = {
    ((9, 0), 132): {
        (32, 4096, 4096): (32, 1, 2, 2, 2, 2),
        (32, 4096, 14336): (32, 1, 2, 2, 2, 2),
        (32, 6144, 4096): (32, 2, 2, 2, 1, 2),
        (32, 8192, 8192): (32, 2, 2, 2, 1, 2),
        (64, 4096, 4096): (64, 1, 2, 2, 2, 2),
        (64, 6144, 4096): (64, 1, 3, 1, 1, 1),
        (64, 28672, 8192): (64, 4, 1, 1, 1, 1),
        (128, 8192, 8192): (128, 1, 4, 1, 1, 1),
        (256, 4096, 14336): (256, 1, 1, 2, 1, 1),
    }
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
    tail: "WgmmaPlan | None" = None  # of the features that whole rounds of blocks leave, in a separate launch

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
        if self.tail and self.groups % self.tail.groups:
            raise ConfigurationError(f"features in blocks of {self.groups} groups, then {self.tail.groups}: take fewer")
        if self.prefetch % 2:
            raise ConfigurationError(f"{self.prefetch} windows in flight: wgmma's ring takes an even number")

    @property
    def consumers(self) -> int:
        return self.groups * self.k_groups

    @property
    def blocks(self) -> tuple[int, ...]:
        """As a cell of `_TIMED`."""
        return self.tokens, self.groups, self.k_groups, self.splits, self.min_blocks, self.windows_per_step

    @property
    def fragments(self) -> int:
        """Sets of ``windows_per_step`` decoded windows that a warpgroup holds: one where others multiply meanwhile."""
        return 1 if self.k_groups >= 3 or self.consumers >= 4 or self.windows_per_step > 1 else 2

    @property
    def needed_registers(self) -> int:
        """Of a consumer thread: sums, fragments, addresses."""
        return self.tokens // 2 + 16 * self.fragments * self.windows_per_step + 28

    @property
    def launch_registers(self) -> int:
        """Of every thread when a block starts: of 16384 of a scheduler, less 1024 for a block of the next product's
        ``swizzle_x``. Where one block is to have a multiprocessor, what it needs, and so much that no second one
        begins: all others are for blocks of ``swizzle_x`` that begin early."""
        most = min(248, 15360 // (self.threads // 4 * self.min_blocks) // 8 * 8)
        needed = (self.needed_registers + 16) * self.consumers + COPY_REGISTERS
        wanted = max(ceil_div(needed, self.consumers + 1), _INSTRUCTION + self.tokens // 2, 32768 // self.threads + 1)
        return most if self.min_blocks > 1 else min(most, round_up(wanted, 8))

    @property
    def registers(self) -> int:
        """Of a consumer thread, next to the copying warpgroup's; more than a block has would be waited for forever."""
        return min(240, (self.launch_registers * (self.consumers + 1) - COPY_REGISTERS) // self.consumers // 8 * 8)

    def macros(self, fp16: bool, out32: bool = False) -> dict[str, int]:
        fields = ("tokens", "groups", "k_groups", "splits", "stages", "prefetch", "windows_per_step")
        derived = ("fragments", "registers", "launch_registers")
        macros = {name.upper(): getattr(self, name) for name in (*fields, *derived)}
        macros |= {"FP16": int(fp16), "OUT32": int(out32), "SUMS": self.tokens // 2}
        return macros | {"COPY_REGISTERS": COPY_REGISTERS}

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
        if self.registers < self.needed_registers or self.launch_registers < _INSTRUCTION + self.tokens // 2:
            return False
        return self.shared_bytes() <= SHARED_BYTES // self.min_blocks - 1024


def _tokens(m: int) -> set[int]:
    """Tokens of a block for ``m`` rows: even shares of 64 or more, a multiple of 16; of up to 64 rows all at once."""
    columns = range(ceil_div(m, 256), max(1, m // 64) + 1)[:16]
    return {round_up(ceil_div(m, count), unit) for count, unit in itertools.product(columns, (16, 32))}


@functools.lru_cache(64)
def candidates(m: int, k: int) -> tuple[WgmmaPlan, ...]:
    """Plans that fit registers and shared memory, with the deepest ring of x up to 6 stages, or 8 of four K groups."""
    found = []
    ways = itertools.product(sorted(_tokens(m)), (1, 2, 3, 4), (1, 2, 3, 4), (1, 2, 4), (1, 2), (1, 2))
    for tokens, groups, k_groups, splits, min_blocks, per_step in ways:
        if groups * k_groups > 4 or splits * k_groups * per_step > ceil_div(k, 64):
            continue
        if splits > 2 and groups > 1:  # for few features, of which blocks of more rows would be fewer
            continue
        # Shares of tokens by sixteens, for outputs by rows; two windows a step are slower where products take longer.
        if tokens % ((16 if splits <= 2 else 8) * splits) or (per_step == 2 and tokens > 64):
            continue
        depths = (max(8, 4 * k_groups),) if per_step == 2 else (8,) if k_groups == 4 else (6, 5, 4, 3)
        going_round = (stages for stages in depths if goes_round(stages, k_groups, per_step))
        plans = (WgmmaPlan(tokens, groups, splits, stages, 4, min_blocks, k_groups, per_step) for stages in going_round)
        found += itertools.islice((plan for plan in plans if plan.fits()), 1)
    return tuple(found)


def _block_cycles(plan: WgmmaPlan, windows: int, at_once: int) -> float:
    """Cycles of ``at_once`` blocks that share a multiprocessor."""
    warpgroups, tensor = plan.consumers * at_once, _TENSOR * plan.tokens
    alone = (max(tensor, _ISSUE) if plan.fragments == 2 else tensor + _ISSUE) + _LATENCY / plan.windows_per_step
    needs = warpgroups * tensor, warpgroups * _ISSUE, alone, plan.k_groups * at_once * _STAGE
    step = sum(cycles**_OVERLAP for cycles in needs) ** (1 / _OVERLAP)
    sums = plan.tokens * (_SUM * plan.k_groups + _OUTPUT * plan.groups)
    return step * ceil_div(windows, plan.k_groups) + at_once * sums


def _swizzle_us(plan: WgmmaPlan, m: int, k: int, blocks: int, gpu: Gpu) -> float:
    """Microseconds of ``swizzle_x`` before ``blocks`` of ``plan``, next to those of the product ahead."""
    rate = _SWIZZLED_BYTES_A_US * gpu.processors / H200.processors
    resident = min(plan.min_blocks, ceil_div(blocks, gpu.processors))
    early = (65536 - plan.launch_registers * plan.threads * resident) // _SWIZZLE_REGISTERS * gpu.processors
    late = round_up(m, plan.tokens) * round_up(k, 64) * 2 > early * _SWIZZLE_BYTES
    return 4 * m * k / rate + (_LATE_US if late else 0.0)


def predicted_us(plan: WgmmaPlan, m: int, n: int, k: int, gpu: Gpu) -> float:
    """Predicted microseconds of a product by ``plan`` on ``gpu``, as of `launches`."""
    parts = launches(plan, m, n, gpu.processors)
    rounds_cycles, x_us, swizzle_us = list[float](), 0.0, 0.0
    for part, _, rows in parts:
        windows = ceil_div(ceil_div(k, 64), part.splits)
        blocks = rows * part.splits * ceil_div(m, part.tokens)
        processors = gpu.processors if part.splits <= 2 else int(gpu.processors * _CLUSTERED)
        rounds, rest = divmod(blocks, processors * part.min_blocks)
        rounds_cycles += [_block_cycles(part, windows, part.min_blocks)] * rounds
        rounds_cycles += [_block_cycles(part, windows, ceil_div(rest, processors))] if rest else []
        swizzle_us = max(swizzle_us, _swizzle_us(part, m, k, blocks, gpu))
        x_us += blocks * windows * part.tokens * 128 / (_L2_BYTES_A_US * gpu.processors / H200.processors)
    cycles = rounds_cycles[0] + _LATER * sum(rounds_cycles[1:])
    needs = cycles / _CYCLES_A_US, x_us, n * k * 0.5625 / gpu.copied_bytes_a_us
    sums_us = _CLUSTER_US * math.log2(max(part.splits for part, _, _ in parts))
    return sum(us**8 for us in needs) ** 0.125 + _START_US * len(parts) + sums_us + swizzle_us


def _cost(plan: WgmmaPlan, m: int, n: int, k: int, gpu: Gpu) -> float:
    """What plans are compared by: powers of two were timed, and share kernels with other shapes."""
    parts = (plan, plan.tail or plan)
    odd, split = any(part.tokens & (part.tokens - 1) for part in parts), any(part.splits > 2 for part in parts)
    return predicted_us(plan, m, n, k, gpu) * (_SPLIT if split else _UNTIMED if odd else 1.0)


def with_tail(plan: WgmmaPlan, m: int, n: int, k: int, gpu: Gpu) -> WgmmaPlan:
    """``plan``, with another for the features of its last round where that is expected to end earlier."""
    whole = 64 * plan.groups * rows_in_whole_rounds(plan, m, n, gpu.processors)
    if not 0 < whole < n:
        return plan
    found = [replace(plan, tail=tail) for tail in candidates(m, k) if plan.groups % tail.groups == 0]
    return min([plan, *found], key=lambda plan: _cost(plan, m, n, k, gpu))


def rows_in_whole_rounds(plan: WgmmaPlan, m: int, n: int, processors: int) -> int:
    """Rows of blocks of ``plan`` that fill rounds of as many multiprocessors."""
    columns, slots = ceil_div(m, plan.tokens), processors * plan.min_blocks
    return ceil_div(n, 64 * plan.groups) * columns // slots * slots // columns


def _rows(m: int) -> int:
    """Rows that ``m`` are planned as, up to 15 or a sixteenth more, so that a plan, and its kernels, serve others."""
    return round_up(m, 1 << min(max(m.bit_length(), 9), 11) - 5)


def plan_wgmma(m: int, n: int, k: int, gpu: Gpu) -> WgmmaPlan:
    """The plan of ``fp4_wgmma`` for a shape: as it was timed on such GPUs, or what is expected to end first."""
    return _plan(_rows(m), n, k, gpu)


@functools.lru_cache(4096)
def _plan(m: int, n: int, k: int, gpu: Gpu) -> WgmmaPlan:
    if timed := _TIMED.get((gpu.capability, gpu.processors), {}).get((m, n, k)):
        return next(plan for plan in candidates(timed[0], k) if plan.blocks == timed)
    cost = lambda plan: _cost(plan, m, n, k, gpu)  # noqa: E731
    plans = sorted(candidates(m, k), key=cost)
    whole = [plan for plan in plans if plan.tokens >= 128 and plan.blocks[1:] == (2, 1, 1, 1, 1)] if m > 256 else []
    whole = whole and {whole[0], max(whole, key=lambda plan: plan.tokens)}  # the fastest, the one with least to decode
    plan = min([plans[0], *(with_tail(plan, m, n, k, gpu) for plan in whole)], key=cost)
    # In many rounds 6 stages take up to 0.8 % longer: what they leave of a multiprocessor's memory is its L1.
    return replace(plan, stages=4) if m > 256 and (plan.groups, plan.k_groups) == (2, 1) else plan


class Rows(NamedTuple):
    """Blocks of ``plan`` above each other, from block ``first`` on, that one launch does."""

    plan: WgmmaPlan
    first: int
    blocks: int


@functools.lru_cache(4096)
def launches(plan: WgmmaPlan, m: int, n: int, processors: int) -> tuple[Rows, ...]:
    """A product's launches: one, or whole rounds of blocks and the ``tail``."""
    if plan.tail is None:
        return (Rows(plan, 0, ceil_div(n, 64 * plan.groups)),)
    whole, groups = rows_in_whole_rounds(plan, m, n, processors), plan.tail.groups
    first = whole * plan.groups // groups
    parts = Rows(plan, 0, whole), Rows(plan.tail, first, ceil_div(n, 64 * groups) - first)
    return tuple(part for part in parts if part.blocks > 0)


def wgmma_beats_dequantize(m: int, n: int, k: int, gpu: Gpu) -> bool:
    """Whether ``fp4_wgmma`` is expected to finish before dequantising once and cuBLAS."""
    return m <= 256 or _beats_dequantize(_rows(m), n, k, gpu)


@functools.lru_cache(4096)
def _beats_dequantize(m: int, n: int, k: int, gpu: Gpu) -> bool:
    flops_a_us = 790e6 * gpu.processors / H200.processors / (_UNALIGNED if n % 8 or k % 8 else 1.0)
    # cuBLAS, the weight written out, two launches
    whole_us = 2 * m * n * k / flops_a_us + n * k * 2.5625 / (0.9 * gpu.copied_bytes_a_us) + _WHOLE_START_US
    return predicted_us(plan_wgmma(m, n, k, gpu), m, n, k, gpu) < whole_us
