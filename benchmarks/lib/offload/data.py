"""The same weights and the same tokens for every system, from a seed.

Tokens: a Markov chain of order one over up to 16,384 words spread over the vocabulary. Each word has four successors,
taken with probabilities 0.60, 0.20, 0.15 and 0.05; sequences begin anywhere. A model first learns which words occur
(the loss falls from ln V towards ln 16,384 = 9.7), then the successors (1.06 nats are left). Some batches, if asked
for, repeat one word in each sequence: of sequences of 2,048 tokens their gradients are some forty times the others',
as a bad batch's are.

Weights: of embeddings that are not tied normal(0, 8), so that layers change the residual stream by as little as in a
trained model: gradients of usual batches of 16,384 tokens have norms of about 0.65 then, where with 0.02 they have 15
to 115; they grow as tokens become fewer, and tied models keep theirs. Every tensor has a separate generator, seeded by
its name, on the device that computes: drawing 2.7 G normal numbers takes minutes on a CPU and a blink on a GPU, and no
system needs more than one tensor of them there.
"""

from __future__ import annotations

import zlib
from collections.abc import Iterable

import numpy as np
import torch

from benchmarks.lib.offload.case import Shape

WORDS = 16_384
SUCCESSOR_CHANCES = (0.60, 0.20, 0.15, 0.05)
IGNORED = -100
EMBEDDING = 8.0


def token_batches(
    vocab_size: int, batch: int, seq: int, count: int, seed: int, bad_every: int | None = None
) -> torch.Tensor:
    """Token numbers (count, batch, seq) int64 on the CPU; of each ``bad_every`` batches the last is a bad one."""
    rng = np.random.default_rng(seed)
    words = rng.permutation(vocab_size)[: min(WORDS, vocab_size)]
    successors = rng.integers(0, len(words), (len(words), len(SUCCESSOR_CHANCES)))
    chosen = np.empty((seq, count, batch), dtype=np.int64)
    states = np.empty((seq, count, batch), dtype=np.int64)
    for number in range(count):  # each batch by a seed of its own: a system may have more of them than another
        rng = np.random.default_rng((seed, number))
        chosen[:, number] = rng.choice(len(SUCCESSOR_CHANCES), (seq, batch), p=SUCCESSOR_CHANCES)
        states[0, number] = rng.integers(0, len(words), batch)
    for position in range(1, seq):
        states[position] = successors[states[position - 1], chosen[position]]
    tokens = words[states.transpose(1, 2, 0)]
    if bad_every is not None:
        bad = tokens[bad_every - 1 :: bad_every]
        bad[:] = bad[:, :, :1]
    return torch.from_numpy(tokens)


def next_tokens(ids_BS: torch.Tensor) -> torch.Tensor:
    """Targets as transformers makes them of ``labels=ids``: the token that follows; the last position has none."""
    ends_B1 = ids_BS.new_full((len(ids_BS), 1), IGNORED)
    return torch.cat([ids_BS[:, 1:], ends_B1], dim=1)


def drawn(
    name: str, shape: torch.Size, num_layers: int, seed: int, device: torch.device, tied: bool = False
) -> torch.Tensor:
    """Initial fp32 value of a weight: 0 for biases, 1 for norms, else normal(0, 0.02), into the residual stream /
    sqrt(2 * layers), of embeddings that are not ``tied`` normal(0, 8).
    """
    if len(shape) == 1:
        return torch.full(shape, 0.0 if name.endswith(".bias") else 1.0, device=device)
    generator = torch.Generator(device).manual_seed(seed << 32 | zlib.crc32(name.encode()))
    into_residual = name.endswith(("o_proj.weight", "down_proj.weight", "c_proj.weight"))
    spread = 0.02 / (2 * num_layers) ** 0.5 if into_residual else 0.02
    if name.endswith("embed_tokens.weight") and not tied:
        spread = EMBEDDING
    return torch.empty(shape, device=device).normal_(0.0, spread, generator=generator)


@torch.no_grad()
def fill(named: Iterable[tuple[str, torch.Size, torch.Tensor]], shape: Shape, seed: int, device: torch.device) -> None:
    """Draw each (name, shape, where) on ``device`` and copy it to ``where``, which may be flat, narrower and
    elsewhere. Where it has no pages yet, all cores fetch them; a copy would do it alone.
    """
    for name, size, where in named:
        where.zero_().copy_(drawn(name, size, shape.num_layers, seed, device, shape.tied).view(where.shape))
