"""Cases of a seed: models, tokens a step and caps that nobody has tuned for.

A case needs something to be compared with, so plain PyTorch has to hold it: what a draw makes too large loses tokens,
and then layers. The cap is what a streamed step is thought to need, times 1.1 to 2.
"""

from __future__ import annotations

import random
from dataclasses import dataclass, replace

from benchmarks.lib.draw import worst_and_median
from benchmarks.lib.offload.case import FAMILIES, Result, Shape
from vblackwell.units import GiB, KiB, format_bytes

PLAIN_STATE = 18  # bytes a parameter: weights, gradients, moments, and autocast's bf16 copies
PLAIN_LOGIT = 12  # bytes: bf16 and fp32, and their gradients
SHARE_OF_GPU = 0.85  # that plain PyTorch may need
GOALS = (0.8, 1.0), (1.1, 1.25)  # floor and aim of the worst and of the median ratio


@dataclass(frozen=True)
class Scale:
    """From, to: parameters, tokens a step, layers, tokens a sequence, head sizes; bytes of a step that do not grow."""

    parameters: tuple[float, float]
    tokens: tuple[int, int]
    layers: tuple[int, int]
    sequences: tuple[int, ...]
    heads: tuple[int, ...]
    vocabulary: tuple[int, int]
    fixed: int


ON_GPU = Scale((0.3e9, 8e9), (4096, 65536), (10, 40), (512, 1024, 2048, 4096), (64, 80, 128), (30_000, 152_000), GiB)
ON_CPU = Scale((5e4, 2e5), (32, 128), (3, 6), (16, 32), (8, 16), (200, 600), 64 * KiB)


@dataclass(frozen=True)
class Draw:
    """One case, and the cap of the system that streams."""

    shape: Shape
    seq: int
    batch: int
    cap_bytes: int

    @property
    def name(self) -> str:
        """In words."""
        shape = self.shape
        heads = f"{shape.num_heads}/{shape.num_kv_heads}" if shape.num_kv_heads else f"{shape.num_heads}"
        return (
            f"{shape.family}{' tied' if shape.tied else ''} {shape.num_parameters / 1e9:.2f}G: {shape.num_layers} x "
            f"{shape.hidden_size}/{shape.intermediate_size}, {heads} heads, {shape.vocab_size:,} words; "
            f"{self.batch} x {self.seq} tokens under {format_bytes(self.cap_bytes)}"
        )


def _between(draw: random.Random, low: float, high: float) -> float:
    """As likely in each octave."""
    return low * (high / low) ** draw.random()


def plain_bytes(shape: Shape, tokens: int) -> int:
    """About what plain PyTorch needs for a step with checkpoints."""
    return PLAIN_STATE * shape.num_parameters + tokens * (PLAIN_LOGIT * shape.vocab_size) + _activations(shape, tokens)


def streamed_bytes(shape: Shape, tokens: int, fixed: int) -> int:
    """About what a streamed step needs: some blocks, a head with its gradient, one block's activations."""
    blocks = 6 * 2 * shape.block_parameters
    return (
        fixed + blocks + 4 * shape.vocab_size * shape.hidden_size + _activations(replace(shape, num_layers=0), tokens)
    )


def _activations(shape: Shape, tokens: int) -> int:
    """Checkpoints' inputs, and what one block's backward needs."""
    return 2 * tokens * (shape.num_layers * shape.hidden_size + 20 * shape.hidden_size + 8 * shape.intermediate_size)


def drawn_shape(draw: random.Random, scale: Scale) -> Shape:
    """A model; twelve squares of its width are a block, about."""
    family = draw.choice(FAMILIES)
    wanted, layers = _between(draw, *scale.parameters), draw.randint(*scale.layers)
    head = draw.choice(scale.heads)
    count = max(2, round((wanted / (12 * layers)) ** 0.5 / head))
    hidden = count * head
    wide = 4 * hidden if family == "gpt2" else round(draw.uniform(2.4, 4.0) * hidden / 8) * 8
    groups = None if family == "gpt2" else draw.choice([None, *(each for each in range(1, count) if count % each == 0)])
    tied = family == "gpt2" or draw.random() < 0.3
    return Shape(hidden, wide, layers, count, draw.randint(*scale.vocabulary), groups, family, tied)


def draws(count: int, seed: int, gpu_bytes: int | None) -> list[Draw]:
    """``count`` cases that plain PyTorch can hold in ``gpu_bytes``; None: tiny ones for a CPU."""
    draw, scale = random.Random(seed), ON_CPU if gpu_bytes is None else ON_GPU
    found: list[Draw] = []
    while len(found) < count:
        shape = drawn_shape(draw, scale)
        seq = draw.choice(scale.sequences)
        batch = max(1, round(_between(draw, *scale.tokens) / seq))
        if shape.family == "gpt2":
            shape = replace(shape, positions=seq)
        room = draw.uniform(1.1, 2.0)
        if gpu_bytes is not None:
            while plain_bytes(shape, batch * seq) > SHARE_OF_GPU * gpu_bytes and batch * seq > scale.tokens[0]:
                batch -= max(1, batch // 4)
            while plain_bytes(shape, batch * seq) > SHARE_OF_GPU * gpu_bytes and shape.num_layers > 4:
                shape = replace(shape, num_layers=shape.num_layers - 1)
        if batch >= 1 and (gpu_bytes is None or plain_bytes(shape, batch * seq) <= SHARE_OF_GPU * gpu_bytes):
            found.append(Draw(shape, seq, batch, int(room * streamed_bytes(shape, batch * seq, scale.fixed))))
    return found


def draw_lines(pairs: list[tuple[Draw, Result, Result]]) -> list[str]:
    """A row a draw, (it, plain, ours), and the worst and the median ratio, with floors and aims."""
    lines, ratios, held = [], [], 0
    for drawn, plain, ours in pairs:
        failed = next((each for each in (plain, ours) if each.status != "ok"), None)
        if ours.status != "ok":
            ratios.append(0.0)
        held += ours.status == "ok" and (ours.peak_reserved or 0) <= drawn.cap_bytes
        if failed is not None:
            lines.append(f"   -    {drawn.name}: {failed.system} {failed.status} {failed.error}".rstrip())
            continue
        ratio = (ours.tokens_per_second or 0.0) / (plain.tokens_per_second or 1.0)
        ratios.append(ratio)
        memory = "" if ours.peak_reserved is None else f", {ours.peak_reserved / 1e9:.2f} GB reserved"
        lines.append(
            f"{ratio:7.3f} {drawn.name}: {ours.tokens_per_second:,.0f} over {plain.tokens_per_second:,.0f} tokens/s"
            f"{memory}"
        )
    lines += worst_and_median("three lines, tokens/s over plain", ratios, *GOALS)
    return [*lines, f"caps held: {held} of {len(pairs)}"]
