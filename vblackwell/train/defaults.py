"""What a run does where nothing was said: pure functions of the settings, the device, the model's folder and the data,
each with its reason in words. A resumed run goes on with what was chosen when it began; ``--no-vgpu-auto`` chooses
nothing.

A preset keeps the numbers of its recipe (fp32, its batch and length), which are the same on every machine; on a GPU
it is planned. A folder computes in its own type, for which its weights were published; masters are exact in fp32
whatever the type. fp32 folders compute in bf16 on a GPU, as `--mixed-precision` does.
"""

from collections.abc import Callable, Iterable
from dataclasses import dataclass, replace
from typing import TypeVar

import numpy as np
import torch

from vblackwell.data.chat import ChatCorpus
from vblackwell.data.corpus import Corpus
from vblackwell.errors import InsufficientMemory
from vblackwell.train.config import TrainConfig

CPU_LENGTH = 256  # tokens: a step of a small model takes seconds on a few cores
UNKNOWN_LENGTH = 2048  # of a model that does not say how many positions it learnt
MIN_LENGTH, MULTIPLE = 128, 64  # below the first no memory is saved; kernels' tiles are multiples of the second
MIN_STEPS = 100  # of an epoch: larger batches would leave too few
SCANNED_AT_ONCE = 1 << 24  # tokens
T = TypeVar("T")


@dataclass(frozen=True)
class Facts:
    """What the choice depends on: whether there is a ``gpu``, and it has ``bf16``; the type of the folder's
    ``weights``, None for a preset; the ``positions`` of the model, None where its config.json does not say."""

    gpu: bool
    bf16: bool
    weights: torch.dtype | None = None
    positions: int | None = None


def choose(config: TrainConfig, facts: Facts) -> tuple[TrainConfig, list[str]]:
    """``config`` with a plan or none, a precision, and whether length and batch are left to what follows; the reasons
    for what was chosen here."""
    if config.resume or config.vgpu_auto is False:
        return replace(config, vgpu_auto=bool(config.vgpu_auto), **_as_given(config)), []
    reasons = list[str]()
    if config.vgpu_auto is None and facts.gpu:
        reasons.append("planned, on a GPU (--no-vgpu-auto for nothing chosen)")
    config = replace(config, vgpu_auto=facts.gpu if config.vgpu_auto is None else config.vgpu_auto)
    if facts.weights is None:
        return replace(config, **_as_given(config)), reasons
    if config.precision == "auto" and not config.mixed_precision:
        precision, why = _precision(facts)
        config = replace(config, precision=precision)
        reasons.append(f"{precision}, {why}")
    batch = facts.gpu and not config.deterministic  # which depends on the bytes that are free just now
    batch = batch if config.auto_batch_size is None else config.auto_batch_size
    length = config.auto_seq_length is not False
    return replace(config, auto_batch_size=batch, auto_seq_length=length), reasons


def _as_given(config: TrainConfig) -> dict[str, bool]:
    return {"auto_batch_size": bool(config.auto_batch_size), "auto_seq_length": bool(config.auto_seq_length)}


def _precision(facts: Facts) -> tuple[str, str]:
    own = str(facts.weights).removeprefix("torch.")
    if not facts.gpu:
        return "fp32", "in which a CPU is several times faster than in bf16"
    if not facts.bf16:
        return "fp16", f"with a scaled loss, for the folder's {own} on a GPU without bf16"
    return "bf16", "as the folder" if own == "bfloat16" else f"for the folder's {own}, with fp32 masters"


def bound_length(facts: Facts, needed: int | None, tokens: int) -> tuple[int, str]:
    """The tokens of a sequence, and why: the positions of the model, at most what the longest document ``needed``
    (None: where they end is not known), and on a CPU few. Of ``tokens`` of text (0: conversations, which are not cut)
    an epoch keeps `MIN_STEPS` rows."""
    known = facts.positions is not None
    bounds = [(facts.positions or UNKNOWN_LENGTH, "the model's positions" if known else "its positions are not known")]
    if needed is not None:
        bounds.append((max(2, _up(needed)), f"the longest document has {needed:,}"))
    if tokens:
        rows = f"an epoch of {tokens:,} tokens keeps {MIN_STEPS} rows"
        bounds.append((max(MIN_LENGTH, tokens // MIN_STEPS // MULTIPLE * MULTIPLE), rows))
        bounds.append((max(2, tokens // 2 - 1), "one sequence is trained on and one held out"))
    if not facts.gpu:
        bounds.append((CPU_LENGTH, "quick on a CPU"))
    length, why = min(bounds, key=lambda bound: bound[0])
    return length, f"{length:,} tokens a sequence: {why}"


def _up(length: int) -> int:
    return length if length < MULTIPLE else -(-length // MULTIPLE) * MULTIPLE


def longest_document(corpus: Corpus, enough: int) -> int | None:
    """Inputs of the longest document or conversation, at most ``enough``; None where text has no mark of their ends."""
    if isinstance(corpus, ChatCorpus):
        return min(enough, int(corpus.lengths.max()) - 1)
    if corpus.end_of_text_id is None:
        return None
    longest, begins = 0, 0
    for first in range(0, len(corpus.tokens), SCANNED_AT_ONCE):
        ends = first + np.flatnonzero(corpus.tokens[first : first + SCANNED_AT_ONCE] == corpus.end_of_text_id)
        if len(ends):
            longest = max(longest, int(np.diff(ends, prepend=begins - 1).max()) - 1)
            begins = int(ends[-1]) + 1
        if longest >= enough:
            return enough
    return min(enough, max(longest, len(corpus.tokens) - begins))


def most_sequences(rows: int) -> int:
    """In a step of a run whose epoch has so many ``rows``: an epoch keeps `MIN_STEPS` steps."""
    return max(1, rows // MIN_STEPS)


def shorter_lengths(length: int) -> Iterable[int]:
    """``length`` and its halves, which are tried where a sequence does not fit."""
    while True:
        yield length
        if length // 2 < MIN_LENGTH:
            return
        length //= 2


def longest_that_fits(lengths: Iterable[int], plan_of: Callable[[int], T]) -> T:
    """What ``plan_of`` makes of the first of ``lengths`` that fits; raises the InsufficientMemory of the last."""
    refused: InsufficientMemory | None = None
    for length in lengths:
        try:
            return plan_of(length)
        except InsufficientMemory as error:
            refused = error
    assert refused is not None
    raise refused
