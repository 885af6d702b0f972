"""FlexAttention and torch's limit of compilations. The attention itself is tested on a GPU (tests/kernels/test_attention_gpu.py)."""

from __future__ import annotations

import functools

import pytest
import torch

from vblackwell.errors import Unsupported
from vblackwell.nn.attention import flex as attention_flex
from vblackwell.nn.attention.backends import Variant


def compiled_to_nothing():
    """torch.compile with all of its guards and limits, and a backend that generates no code."""
    return torch.compile(lambda q, k, v, **options: q * q.shape[2], dynamic=False, backend="eager")


@pytest.fixture(autouse=True)
def no_code(monkeypatch):
    torch._dynamo.reset()
    monkeypatch.setattr(attention_flex, "_compiled", functools.lru_cache(compiled_to_nothing))
    yield
    torch._dynamo.reset()


def attend(length):
    x = torch.ones(1, 1, length, 4)
    return attention_flex.flex(x, x, x, Variant())


def test_more_shapes_than_torch_compiles_by_itself():
    assert [int(attend(length)[0, 0, 0, 0]) for length in range(2, 14)] == list(range(2, 14))
    assert torch._dynamo.config.recompile_limit == 8  # the user's own functions keep theirs


def test_the_limit_is_an_error(monkeypatch):
    monkeypatch.setattr(attention_flex, "MOST_SHAPES", 3)
    for length in (2, 3, 4):
        attend(length)
    with pytest.raises(Unsupported, match="has asked for 3"):
        attend(5)
    attend(3)
