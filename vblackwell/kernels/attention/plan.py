"""Tiles, warps and pipeline stages of the attention kernels for a GPU, a type and a head width.

The tile sizes decide the order of additions: they are a function of the shape, of the class of GPU (by its shared
memory) and, on Hopper, of whether strides let the copy engine bring tiles (hopper.py), never of a measurement. How many
tiles are in flight, and whether they come by TMA, leaves every bit alone.
"""

from dataclasses import dataclass

import torch
from torch import Tensor

KERNELS = ("forward", "dq", "dkv")
# Shared memory that a block of threads may take, by class of GPU: Hopper, A100, and the others from Ampere on.
LARGE, MEDIUM, SMALL = 227 << 10, 163 << 10, 99 << 10


@dataclass(frozen=True)
class AttentionPlan:
    """How one kernel runs.

    Attributes:
        rows, columns: queries and keys of a tile.
        warps: of a program.
        stages: tiles on their way or in use at a time.
        tma: tiles come by tensor descriptors; only where strides and lengths allow it, and on Hopper.
        registers: most that a thread may hold, so that two programs share a multiprocessor; 0: the compiler's choice.
        specialized: hopper.py's kernel, ``stages`` being those of its rings; always by descriptors.
    """

    rows: int
    columns: int
    warps: int
    stages: int
    tma: bool = False
    registers: int = 0
    specialized: bool = False


def padded_head(head: int) -> int:
    """Width of a head in registers: a power of two, at least 16."""
    return max(16, 1 << (head - 1).bit_length())


P = AttentionPlan  # in the tables below
# (class, padded head up to) -> plans of forward, dq and dkv, 16-bit types
_HALF = {
    (LARGE, 64): (P(128, 128, 8, 3, True), P(128, 64, 8, 3, True), P(64, 128, 8, 3, True)),
    (LARGE, 128): (P(128, 128, 8, 2, True), P(128, 64, 8, 3, True), P(64, 128, 8, 3, True)),
    (LARGE, 256): (P(128, 64, 8, 2, True), P(64, 32, 4, 2, True), P(32, 64, 8, 2, True)),
    (MEDIUM, 64): (P(128, 64, 4, 3), P(128, 64, 8, 2), P(64, 128, 8, 2)),
    (MEDIUM, 128): (P(128, 64, 8, 2), P(128, 32, 8, 2), P(32, 128, 8, 2)),
    (MEDIUM, 256): (P(64, 32, 8, 2), P(32, 32, 8, 2), P(32, 32, 8, 2)),
    (SMALL, 64): (P(128, 64, 8, 2), P(64, 64, 4, 2), P(64, 64, 4, 2)),
    (SMALL, 128): (P(64, 32, 4, 2), P(64, 32, 8, 2), P(32, 64, 8, 2)),
    (SMALL, 256): (P(32, 32, 8, 2), P(32, 32, 8, 1), P(32, 32, 8, 1)),
}  # fmt: skip
# A boolean mask: two programs of the forward share a multiprocessor, one at its exponentials while the other's products
# run; of four warps, because eight, held to 128 registers, have ptxas wait after each product. The backward's registers
# allow one program; its tiles, too, are asked for two ahead.
_HALF_BOOLEAN = {(LARGE, 128): (P(128, 64, 4, 2, True), P(128, 64, 8, 3, True), P(64, 128, 8, 3, True))}
# Where scores are changed (soft cap, ALiBi, dropout): that takes registers too.
_HALF_SCORED = {
    (LARGE, 64): (P(128, 64, 8, 3, True), P(128, 64, 8, 3, True), P(64, 128, 8, 3, True)),
    (LARGE, 128): (P(128, 64, 8, 3, True), P(128, 64, 8, 2, True), P(64, 64, 8, 2, True)),
    (LARGE, 256): (P(128, 32, 8, 2, True), P(64, 32, 8, 2, True), P(32, 64, 8, 2, True)),
    (MEDIUM, 64): (P(64, 64, 4, 2), P(64, 32, 8, 2), P(32, 64, 8, 2)),
    (MEDIUM, 128): (P(64, 64, 8, 2), P(64, 32, 8, 2), P(32, 64, 8, 2)),
    (SMALL, 64): (P(64, 64, 8, 2), P(64, 32, 8, 2), P(32, 64, 8, 2)),
}  # fmt: skip
# And where a mask is added: two programs of four warps share a multiprocessor in dkv, one waiting for its mask while
# the other computes.
_HALF_ADDED = {**_HALF_SCORED, (LARGE, 128): (P(128, 64, 8, 3, True), P(128, 64, 8, 3, True), P(64, 64, 4, 2, True))}
# Packed sequences that are, on the average, no longer than a tile of these: two or three programs share a
# multiprocessor.
SHORT = 64
_HALF_SHORT = {
    (LARGE, 64): (P(64, 64, 4, 2), P(64, 64, 4, 2), P(64, 64, 4, 2)),
    (LARGE, 128): (P(64, 64, 4, 2), P(64, 32, 4, 2), P(32, 64, 4, 2)),
}
_BY_KIND = {"short": _HALF_SHORT, "boolean": _HALF_BOOLEAN, "scored": _HALF_SCORED, "additive": _HALF_ADDED}
# hopper.py's forward, by padded head: two groups of 64 queries.
SPECIALIZED = {
    64: P(128, 128, 4, 3, True, 168, True),
    128: P(128, 128, 4, 2, True, 168, True),
    256: P(128, 64, 4, 2, True, 168, True),
}
# (Kind of mask, padded head) for which it runs, a line each, to be taken out where another forward is faster. All kinds
# were compared with float64 on an H200 at heads 32 to 256; those listed were timed there too
# (docs/journal/attention.md).
SPECIALIZED_BY_DEFAULT = frozenset({("none", 64), ("none", 128), ("boolean", 128), ("additive", 128)})
# Releases of Triton that it was run with: Gluon is experimental and changes from one to the next.
SPECIALIZED_TRITON = ("3.6.",)
# fp32: products run on the ordinary units in full precision, so small tiles that stay in registers
_SINGLE = {
    64: (P(32, 32, 4, 1), P(32, 32, 8, 1), P(32, 32, 8, 1)),
    128: (P(32, 16, 8, 1), P(32, 16, 8, 1), P(16, 32, 8, 1)),
    256: (P(16, 16, 8, 1), P(16, 16, 8, 1), P(16, 16, 8, 1)),
}

# Keys in pages (paged.py): plans of requests of one query and of the others. Both must add up a row in one order: they
# have the same columns, and differ only where Triton puts the warps of both one below the other (with wgmma, and with
# mma.sync where rows are not fewer than the head's width). Not timed yet.
_PAGED = {
    (LARGE, 64): (P(64, 64, 4, 3), P(128, 64, 8, 3)),
    (LARGE, 128): (P(64, 64, 4, 3), P(128, 64, 8, 3)),
    (LARGE, 256): (P(64, 64, 8, 2),) * 2,
    (MEDIUM, 64): (P(64, 64, 4, 3), P(128, 64, 8, 2)),
    (MEDIUM, 128): (P(64, 64, 4, 2),) * 2,
    (MEDIUM, 256): (P(64, 32, 8, 2),) * 2,
    (SMALL, 64): (P(64, 64, 4, 2), P(128, 64, 8, 2)),
    (SMALL, 128): (P(64, 32, 4, 2),) * 2,
    (SMALL, 256): (P(32, 32, 8, 2),) * 2,
}
BY_ADDRESS = 128  # queries and keys up to which tiles come by address: a descriptor takes the host 5 us
CHUNK = 512  # keys of a row that are added up on their own, before they are merged with those before


def plan_for(kernel: str, head: int, itemsize: int, shared_bytes: int, kind: str = "none") -> AttentionPlan:
    """The plan of ``kernel``; ``kind``: 'none', 'boolean', 'additive', 'scored' or 'short'."""
    width = max(64, padded_head(head))
    if itemsize != 2:
        plans = _SINGLE[width]
    else:
        key = (next((size for size in (LARGE, MEDIUM) if shared_bytes >= size), SMALL), width)
        plans = _BY_KIND.get(kind, _HALF).get(key, _HALF[key])
    return plans[KERNELS.index(kernel)]


def paged_plans(head: int, itemsize: int, shared_bytes: int) -> tuple[AttentionPlan, AttentionPlan]:
    """Plans over keys in pages, of requests of one query and of the others."""
    width = max(64, padded_head(head))
    if itemsize != 2:
        return _SINGLE[width][0], _SINGLE[width][0]
    return _PAGED[next((size for size in (LARGE, MEDIUM) if shared_bytes >= size), SMALL), width]


def specialized_plan(head: int, itemsize: int, capability: tuple[int, int], kind: str) -> AttentionPlan | None:
    """The plan of hopper.py's forward for a kind of mask; None where it does not run."""
    width = padded_head(head)  # narrower heads than 64 it would pad further than the Triton forward does
    if (kind, width) not in SPECIALIZED_BY_DEFAULT or capability != (9, 0) or itemsize != 2:
        return None
    return SPECIALIZED[width]


def lse_of(q: Tensor) -> Tensor:
    """Log-sum-exps of dense (B, N, S, H) or packed (total, N, H) queries, without their numbers."""
    first, second, *rest = q.shape
    shape = (first, second, rest[0]) if len(rest) == 2 else (second, first)
    return torch.empty(shape, dtype=torch.float64 if q.dtype == torch.float64 else torch.float32, device=q.device)
