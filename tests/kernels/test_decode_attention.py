"""One new position over a cache: the cache's bytes, attention against its definition in fp64, positions at every edge, and the kernels."""

from __future__ import annotations

import pytest
import torch

from tests.kernels.fused_oracle import DEVICE, normal
from vblackwell.errors import ConfigurationError
from vblackwell.kernels.attention.decode import decode_attention
from vblackwell.kernels.pointwise.rotary import rotary, store_rotated
from vblackwell.kernels.runtime.registry import use_backend
from vblackwell.nn.attention.rotary import rotary_tables

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


@pytest.mark.parametrize("backend", BACKENDS)
@pytest.mark.parametrize("joint", [False, True])
def test_what_is_stored(backend, joint):
    rows, heads, kv_heads, width, positions, position = 2, 4, 2, 24, 9, 5
    if joint:
        sizes = (heads * width, kv_heads * width, kv_heads * width)
        parts = normal(rows, sum(sizes)).split(sizes, -1)
        q, k, v = (part.unflatten(-1, (-1, width)) for part in parts)
    else:
        q, k, v = (normal(rows, count, width, seed=count + 3) for count in (heads, kv_heads, kv_heads))
    keys, values = (normal(rows, kv_heads, positions, width, seed=seed) for seed in (1, 2))
    kept = keys.clone(), values.clone()
    cos, sin = rotary_tables(0, positions, width, 10000.0, q.device)
    with use_backend("rotary", "torch"):
        turned = rotary(q.unsqueeze(2), k.unsqueeze(2), cos[position : position + 1], sin[position : position + 1])
    with use_backend("store_rotated", backend):
        found = store_rotated(q, k, v, keys, values, cos, sin, torch.tensor([position], device=DEVICE))
    kept[0][:, :, position], kept[1][:, :, position] = turned[1].squeeze(2), v
    # two products and their difference: fused multiply-adds may leave out a rounding of 2^-24
    torch.testing.assert_close(found, turned[0].squeeze(2), rtol=0, atol=5e-7)
    torch.testing.assert_close(keys, kept[0], rtol=0, atol=5e-7)
    assert torch.equal(values, kept[1])


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
    with pytest.raises(ConfigurationError, match="for a cache of"):
        store_rotated(q, normal(1, 3, 16), normal(1, 3, 16), cache, cache, cache[0, 0], cache[0, 0], at)
