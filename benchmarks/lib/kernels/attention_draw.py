"""Attention that bench_attention.py draws from a seed: shapes and masks that nobody has tuned for; their summary."""

from __future__ import annotations

import math
import random
from collections.abc import Sequence
from dataclasses import dataclass, replace

from benchmarks.lib.draw import odd_or_round_size, worst_and_median

KINDS = ("plain", "causal", "window", "boolean", "additive", "documents")  # they take turns
LENGTHS, ODD, MAX_DOCUMENTS = (1, 32768), 0.5, 16
HEADS = (32, 256)  # the width of one
# Of one case: a forward's operations, scores that PyTorch holds in memory where it has no kernel (grouped heads with a
# mask: 24 bytes each, forward and backward), elements of a mask, and of queries, keys and values together.
MAX_FLOPS, MAX_WRITTEN_SCORES, MAX_MASK, MAX_ELEMENTS = 1.2e12, 1 << 28, 1 << 30, 1 << 28
EAGER_GOALS = ((0.9, 1.0), (1.0, 1.0))  # floor and aim of the worst and the median over PyTorch's own choice
GRAPHED_GOAL = (0.97, 1.0)  # of the worst over PyTorch's best backend


@dataclass(frozen=True)
class Attention:
    """One case, in bf16.

    Attributes:
        head: width of a head. window: keys that a query of a causal window sees.
        mask: shape of a boolean or additive mask.
        ends: where the packed documents of one row end, in which attention is causal.
        gradient: a step is forward and backward, else a forward without gradients.
    """

    kind: str
    batch: int
    heads: int
    kv_heads: int
    queries: int
    keys: int
    head: int
    gradient: bool
    window: int | None = None
    mask: tuple[int, int, int, int] | None = None
    ends: tuple[int, ...] = ()

    @property
    def scores(self) -> int:
        return self.batch * self.heads * self.queries * self.keys

    @property
    def flops(self) -> int:
        """Of a forward that skips nothing."""
        return 4 * self.head * self.scores

    @property
    def masked(self) -> bool:
        """Whether PyTorch is given a mask: it knows no windows and no documents."""
        return self.kind not in ("plain", "causal")

    @property
    def fits(self) -> bool:
        """Whether it takes no more than 20 GB, and fractions of a second, also in PyTorch."""
        written = self.scores if self.masked and self.heads > self.kv_heads else 0
        elements = self.batch * self.head * (self.heads * self.queries + 2 * self.kv_heads * self.keys)
        return self.flops <= MAX_FLOPS and written <= MAX_WRITTEN_SCORES and elements <= MAX_ELEMENTS

    def __str__(self) -> str:
        what = {"window": f" of {self.window}", "documents": f" ({len(self.ends)})"}.get(self.kind, "")
        mask = "" if self.mask is None else f" {'x'.join(map(str, self.mask))}"
        heads = f"{self.heads}/{self.kv_heads}" if self.heads > self.kv_heads else f"{self.heads}"
        lengths = f"{self.queries}" if self.queries == self.keys else f"{self.queries} over {self.keys}"
        training = ", backward" if self.gradient else ""
        return f"{self.kind}{what}{mask}, {self.batch} x {heads} heads of {self.head}, {lengths}{training}"


def draws(count: int, seed: int) -> list[Attention]:
    """``count`` cases of ``seed``."""
    draw = random.Random(seed)
    return [drawn(draw, KINDS[number % len(KINDS)]) for number in range(count)]


def drawn(draw: random.Random, kind: str) -> Attention:
    """A case of a kind; what is too large loses sequences, then grouped heads, then heads."""
    keys = odd_or_round_size(draw, *LENGTHS, ODD)
    queries = odd_or_round_size(draw, *LENGTHS, ODD) if draw.random() < 0.3 else keys
    if kind not in ("plain", "boolean", "additive"):  # PyTorch's causal, over unequal lengths, is nobody's
        queries = keys
    head = draw.choice((64, 128)) if draw.random() < 0.4 else 8 * draw.randint(HEADS[0] // 8, HEADS[1] // 8)
    kv_heads, group, batch = (1 << draw.randint(0, most) for most in (4, 3, 4))
    group = draw.choice((1, group))
    case = Attention(kind, batch, group * kv_heads, kv_heads, queries, keys, head, draw.random() < 0.5)
    if kind == "documents":
        ends = draw.sample(range(1, keys), min(keys, draw.randint(1, MAX_DOCUMENTS)) - 1)
        case = replace(case, batch=1, ends=(*sorted(ends), keys))
    while not case.fits:
        if case.batch > 1:
            case = replace(case, batch=case.batch // 2)
        elif case.heads > case.kv_heads:
            case = replace(case, heads=case.heads // 2)
        else:
            case = replace(case, heads=case.heads // 2, kv_heads=case.kv_heads // 2)
    if kind == "window":
        return replace(case, window=odd_or_round_size(draw, 1, keys, ODD))
    if kind not in ("boolean", "additive"):
        return case
    padding, bias = (case.batch, 1, 1, keys), (1, 1, queries, keys)
    shapes = [padding, bias, (case.batch, case.heads, queries, keys)]
    return replace(case, mask=draw.choice([shape for shape in shapes if math.prod(shape) <= MAX_MASK]))


@dataclass(frozen=True)
class Times:
    """us of one call: ours and PyTorch's own choice launched one by one; systems in CUDA graphs, 'ours' among them."""

    eager: float
    eager_torch: float
    graphed: dict[str, float]

    @property
    def best(self) -> str:
        """PyTorch's fastest backend."""
        return min(self.graphed.keys() - {"ours", "triton"}, key=self.graphed.__getitem__)

    @property
    def ratios(self) -> tuple[float, float]:
        """How many times as long PyTorch takes: eager, by its own choice, and graphed, by its best backend."""
        return self.eager_torch / self.eager, self.graphed[self.best] / self.graphed["ours"]

    def __str__(self) -> str:
        ms = {name: f"{us / 1000:.4f} ms" for name, us in self.graphed.items()}
        own = f"; own kernel {ms['triton']}" if "triton" in ms else ""
        eager = f"eager {self.eager / 1000:.4f} ms, PyTorch {self.eager_torch / 1000:.4f} ms: {self.ratios[0]:.3f}"
        return f"{eager}; graphed {ms['ours']}, {self.best} {ms[self.best]}: {self.ratios[1]:.3f}{own}"


def summary(found: Sequence[Times]) -> list[str]:
    """The worst and the median ratios, with floors and aims."""
    eager, graphed = zip(*(times.ratios for times in found), strict=True) if found else ((), ())
    return [
        *worst_and_median("eager, over PyTorch's own choice", eager, *EAGER_GOALS),
        *worst_and_median("graphed, over PyTorch's best backend", graphed, GRAPHED_GOAL),
    ]
