"""On a Hopper GPU: the forward with specialised warps, which no interpreter runs, beside float64 and PyTorch's own attention."""

from __future__ import annotations

from typing import Any

import pytest
import torch

from tests.kernels.attention_oracle import inputs
from tests.kernels.test_attention_gpu import compare, mask_of
from vblackwell.errors import ConfigurationError
from vblackwell.kernels.attention import flash_attention
from vblackwell.kernels.attention_plan import SPECIALIZED

pytestmark = [
    pytest.mark.gpu,
    pytest.mark.skipif(
        torch.cuda.is_available() and torch.cuda.get_device_capability() != (9, 0), reason="needs a Hopper GPU"
    ),
]


def check(shape, dtype=torch.bfloat16, **options) -> None:
    """Gradients too: they read the log-sum-exps that the forward wrote."""
    from vblackwell.kernels.attention_launch import use_plans

    with use_plans(forward=SPECIALIZED[max(64, 1 << (shape[5] - 1).bit_length())]):
        compare(shape, dtype, **options)


# Lengths of one tile and less, cut in the last tile, and even ones; what a kernel is told of lengths is the same for all.
LENGTHS = ((1, 1), (17, 129), (129, 63), (384, 512), (1000, 1000))


@pytest.mark.parametrize("options", [{}, {"causal": True}, {"causal": True, "bottom_right": True}], ids=str)
@pytest.mark.parametrize("head", [64, 128])
def test_lengths(head, options):
    for queries, keys in LENGTHS:
        check((2, 4, 2, queries, keys, head), **options)


@pytest.mark.parametrize(("head", "dtype"), [(32, torch.bfloat16), (96, torch.float16), (256, torch.bfloat16)], ids=str)
def test_heads(head, dtype):
    check((1, 3, 1, 257, 257, head), dtype, causal=True)


@pytest.mark.parametrize("options", [{"causal": True, "window": 100}, {"window": 300}], ids=str)
def test_windows(options):
    for queries, keys in ((1000, 1000), (300, 1000), (129, 63)):
        check((1, 4, 2, queries, keys, 128), **options)
    check((1, 4, 2, 300, 1000, 128), **options, bottom_right=True)


@pytest.mark.parametrize("head", [64, 128])
@pytest.mark.parametrize("kind", ["boolean", "additive"])
def test_masks(kind, head):
    """Lines with whole tiles, with others, with both and with none; rows that see nothing; masks broadcast and not."""
    for queries, keys in ((1000, 520), (384, 512)):
        for leading in ((), (1, 4), (2, 1)):
            mask = mask_of(kind, *leading, queries, keys)
            mask[..., 256:384, :] = float("-inf") if kind == "additive" else False
            if kind == "additive":
                mask[..., :256, 128:256] = 0.0
            check((2, 4, 2, queries, keys, head), mask=mask)


@pytest.mark.parametrize("shape", [(2, 1, 1, 520), (2, 4, 1000, 1)], ids=str)
def test_boolean_masks_broadcast_in_a_tile(shape):
    check((2, 4, 2, 1000, 520, 128), mask=mask_of("boolean", *shape))


@pytest.mark.parametrize("kind", ["boolean", "additive"])
def test_masks_with_bounds(kind):
    mask = mask_of(kind, 1, 4, 1000, 520)
    check((2, 4, 2, 1000, 520, 128), mask=mask, causal=True, bottom_right=True)
    check((2, 4, 2, 1000, 520, 128), mask=mask, window=300)


def test_what_it_does_not_compute_is_refused():
    from vblackwell.kernels.attention_launch import use_plans

    q, k, v = inputs(1, 2, 2, 200, 200, 64, torch.bfloat16)
    refused: list[dict[str, Any]] = [{"softcap": 20.0}, {"mask": torch.zeros(200, 200, device="cuda")}]  # 32 bits
    with use_plans(forward=SPECIALIZED[64]):
        for options in refused:
            with pytest.raises(ConfigurationError, match="specialised warps"):
                flash_attention(q, k, v, **options)
