"""Which runs estimates are checked on: drawn from a grid with a fixed seed, every family as often as the others."""

from __future__ import annotations

import random
from dataclasses import asdict, dataclass
from typing import Any

from vblackwell.units import GiB

# Per family: sizes, attention, precisions, tokens of a batch, sequence lengths. Pictures count their patches as one
# sequence.
LANGUAGE = ((768, 6, 12), (1024, 8, 16), (1024, 16, 16), (1536, 8, 12))
ATTENTION = ("sdpa", "sdpa", "eager")
PRECISIONS = ("fp32", "bf16", "autocast")
TOKENS, LENGTHS = (1024, 2048, 4096, 8192), (256, 512, 1024, 2048)
OPTIMIZERS = ("adamw", "adamw-fused", "adamw-for-loop", "sgd-momentum", "sgd", "adafactor")


@dataclass(frozen=True)
class Family:
    """What a family may be drawn with. ``lengths`` (0,): its batch counts samples, not tokens."""

    sizes: tuple[tuple[int, ...], ...] = LANGUAGE
    attention: tuple[str, ...] = ATTENTION
    precisions: tuple[str, ...] = PRECISIONS
    tokens: tuple[int, ...] = TOKENS
    lengths: tuple[int, ...] = LENGTHS
    checkpointing: tuple[bool, ...] = (False, False, True)
    stacks: tuple[str, ...] = ("",)


FAMILIES: dict[str, Family] = {
    "decoder": Family(
        attention=("sdpa",), precisions=("fp32", "bf16", "bf16"), checkpointing=(False, True), stacks=("", "streamed")
    ),
    "gpt2": Family(),
    "llama": Family(),
    "qwen": Family(sizes=((896, 8, 14), (1024, 12, 16)), tokens=(1024, 2048, 4096)),
    "mixtral": Family(sizes=((768, 6, 12), (1024, 6, 16)), precisions=("bf16", "bf16", "autocast", "fp32")),
    "t5": Family(sizes=((512, 6, 8), (768, 8, 12)), attention=("eager", "sdpa"), lengths=(256, 512)),
    "bert": Family(),
    "vit": Family(sizes=((768, 12, 12), (1024, 12, 16)), tokens=(16, 32, 64), lengths=(0,)),
    "resnet": Family(
        sizes=((3, 4, 6, 3), (3, 4, 23, 3)), attention=("eager",), tokens=(16, 32, 64), lengths=(0,),
        checkpointing=(False,)
    ),
    "mlp": Family(
        sizes=((2048, 8, 0), (4096, 4, 0)), attention=("eager",), lengths=(1,), tokens=(4096, 16384),
        checkpointing=(False,)
    ),
}  # fmt: skip


@dataclass(frozen=True)
class Case:
    """One training run.

    Attributes:
        number: its place in the draw. family: of `FAMILIES`, with a ``size`` of it.
        optimizer: of `vblackwell.planner.memory_estimate.OPTIMIZERS`; a stack brings its own.
        precision: 'fp32', 'bf16' (weights) or 'autocast'. attention: as transformers names it.
        batch, seq: sequences and their tokens; pictures: batch alone.
        expandable: segments of the allocator.
        stack: '' or 'streamed': through an offload stack with ``level0_bytes`` on the GPU.
        card_bytes: the batch is the largest that is predicted to fit a card of so many bytes; 0: as drawn.
    """

    number: int
    family: str
    size: tuple[int, ...]
    optimizer: str
    precision: str
    checkpointing: bool
    attention: str
    batch: int
    seq: int
    expandable: bool = False
    stack: str = ""
    level0_bytes: int = 0
    card_bytes: int = 0

    @property
    def name(self) -> str:
        """Short enough for a table."""
        shape = "x".join(map(str, self.size[:2]))
        words = [self.family, shape, self.precision, self.stack or self.optimizer, self.attention.split("_")[0]]
        flags = ("ckpt" if self.checkpointing else "") + ("+exp" if self.expandable else "")
        card = f"{self.card_bytes // GiB}GiB" if self.card_bytes else ""
        return f"{self.number:03d} " + " ".join(filter(None, [*words, f"{self.batch}x{self.seq}", flags, card]))

    @classmethod
    def from_dict(cls, values: dict[str, Any]) -> Case:
        """From `asdict`, through JSON."""
        return cls(**values | {"size": tuple(values["size"])})


def draw(count: int, seed: int = 0) -> list[Case]:
    """``count`` different cases, families in turn, everything else at random."""
    rng, found, seen = random.Random(seed), [], set()
    names = list(FAMILIES)
    while len(found) < count:
        family = names[len(found) % len(names)]
        case = _one(rng, len(found), family)
        values = tuple(asdict(case).items())[1:]
        if str(values) not in seen:
            seen.add(str(values))
            found.append(case)
    return found


def _one(rng: random.Random, number: int, name: str) -> Case:
    family = FAMILIES[name]
    size, attention = rng.choice(family.sizes), rng.choice(family.attention)
    precision, checkpointing = rng.choice(family.precisions), rng.choice(family.checkpointing)
    stack = rng.choice(family.stacks)
    # What keeps squares of the sequence is given short ones, so that eight cases fit one GPU side by side.
    seq = rng.choice([each for each in family.lengths if attention != "eager" or each <= 1024])
    most = 4096 if attention == "eager" and seq > 1 else max(family.tokens)
    count = rng.choice([each for each in family.tokens if each <= most])
    batch = count if seq == 0 else max(1, count // seq)
    if stack:
        precision, attention = "bf16", "sdpa"
    optimizer, expandable = rng.choice(OPTIMIZERS), rng.random() < 0.25
    return Case(
        number,
        name,
        size,
        optimizer,
        precision,
        checkpointing,
        attention,
        batch,
        seq,
        expandable or bool(stack),  # which asks for them
        stack,
        GiB if stack else 0,
    )


CARDS = (8 * GiB, 16 * GiB, 24 * GiB)


def boundary_cases(cases: list[Case], count: int) -> list[Case]:
    """For the search of real boundaries: cards of each size whose batch the prediction chooses, and drawn ones without
    a stack.

    Two cards have 24 GiB: one alone would leave that size unchecked where its run fails. A larger ``count`` begins with
    the same cases.
    """
    wide = (1536, 12, 12)
    cards = [
        Case(900, "gpt2", (1024, 12, 16), "adamw", "fp32", False, "sdpa", 0, 512, card_bytes=CARDS[0]),
        Case(901, "llama", wide, "adamw-fused", "autocast", False, "sdpa", 0, 1024, card_bytes=CARDS[1]),
        Case(902, "decoder", wide, "adamw", "bf16", True, "sdpa", 0, 1024, card_bytes=CARDS[2]),
        Case(903, "vit", (1024, 12, 16), "adamw-fused", "bf16", False, "sdpa", 0, 0, card_bytes=CARDS[0]),
        Case(904, "gpt2", (1024, 16, 16), "adamw-fused", "bf16", False, "sdpa", 0, 1024, card_bytes=CARDS[2]),
    ][: max(0, count)]
    plain = [case for case in cases if not case.stack]
    return cards + random.Random(0).sample(plain, min(len(plain), max(0, count - len(cards))))
