"""One new position over a cache: attention against its definition in fp64, positions at every edge, and the kernels."""

from __future__ import annotations

import pytest
import torch

from tests.kernels.pointwise.oracle import DEVICE, normal
from vblackwell.errors import ConfigurationError
from vblackwell.kernels.attention.decode import decode_attention
from vblackwell.kernels.runtime.registry import use_backend

BACKENDS = ("triton", "torch")


def definition(q, keys, values, position):
    group = q.shape[1] // keys.shape[1]
    keys, values = (x[:, :, : position + 1].double().repeat_interleave(group, 1) for x in (keys, values))
    scores = torch.einsum("bnh,bnth->bnt", q.double(), keys) / q.shape[-1] ** 0.5
    return torch.einsum("bnt,bnth->bnh", scores.softmax(-1), values)


@pytest.mark.parametrize("backend", BACKENDS)
@pytest.mark.parametrize(
    ("rows", "heads", "kv_heads", "width", "positions", "position"),
    [
        (1, 2, 2, 16, 70, 0),
        (2, 4, 2, 24, 130, 63),
        (1, 8, 1, 128, 130, 64),
        (2, 3, 3, 32, 200, 199),
        (3, 16, 1, 16, 5, 3),
    ],
)
def test_what_is_gathered(backend, rows, heads, kv_heads, width, positions, position):
    q = normal(rows, heads, width)
    keys, values = (normal(rows, kv_heads, positions, width, seed=seed) for seed in (1, 2))
    expected = definition(q, keys, values, position)
    keys[:, :, position + 1 :] = values[:, :, position + 1 :] = float("nan")
    at = torch.tensor([position], device=DEVICE)
    with use_backend("decode_attention", backend):
        found = decode_attention(q, keys, values, at)
    # fp32: sums of up to 200 products of normal numbers, each rounded at 2^-24
    assert (found.double() - expected).norm() < 2e-6 * expected.norm()


def test_half_precision():
    shapes = ((2, 4, 32), (2, 2, 90, 32), (2, 2, 90, 32))
    q, keys, values = (normal(*shape, seed=seed).half() for seed, shape in enumerate(shapes))
    expected = definition(q, keys, values, 80)
    with use_backend("decode_attention", "triton"):
        found = decode_attention(q, keys, values, torch.tensor([80], device=DEVICE))
    assert (found.double() - expected).norm() < 1e-3 * expected.norm()  # weights and result are rounded at 2^-11


def test_what_does_not_fit_is_refused():
    q, cache, at = normal(1, 3, 16), normal(1, 2, 8, 16), torch.tensor([0], device=DEVICE)
    with pytest.raises(ConfigurationError, match="3 query heads over 2"):
        decode_attention(q, cache, cache, at)
