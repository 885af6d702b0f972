"""A text after one prompt, for tests that compare texts."""

from typing import Any

from tokenizers import Tokenizer
from torch import nn

from vblackwell.generate.generate import generate_batch
from vblackwell.generate.sampling import Sampling


def generate(
    model: nn.Module,
    tokenizer: Tokenizer,
    prompt: str,
    max_new_tokens: int | None = None,
    temperature: float = 0.8,
    top_k: int = 0,
    **others: Any,
) -> str:
    """What the model writes; ``others`` as in `generate_batch`."""
    sampling = Sampling(temperature, top_k)
    (text,) = generate_batch(model, tokenizer, [prompt], max_new_tokens, sampling, **others)
    return text
