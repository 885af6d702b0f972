"""Rotary positions of queries and keys together, and of the newest ones on their way into a cache."""

import pytest
import torch

from tests.kernels.pointwise.oracle import DEVICE, TOLERANCE, errors, normal, poisoned
from vblackwell.errors import ConfigurationError
from vblackwell.kernels.pointwise import rows as module
from vblackwell.kernels.pointwise.rows import rotary, store_rotated
from vblackwell.kernels.runtime.registry import use_backend
from vblackwell.nn.attention.layer import rotary_tables

# batch, sequence, query heads, key heads, width
SHAPES = [(1, 1, 1, 1, 2), (2, 7, 3, 1, 10), (1, 5, 4, 2, 64), (2, 3, 20, 20, 128), (1, 2, 33, 3, 256)]


def case(batch: int, length: int, heads: int, kv_heads: int, width: int, dtype: torch.dtype) -> list[torch.Tensor]:
    """Queries and keys as projections give them (B, S, N, H); tables of angles that are no rotation of equal halves."""
    q, k = normal(batch, length, heads, width, dtype=dtype), normal(batch, length, kv_heads, width, dtype=dtype, seed=1)
    return [q, k, normal(length, width, seed=2), normal(length, width, seed=3)]


def turned(q, k, cos, sin):
    return rotary(q.transpose(1, 2), k.transpose(1, 2), cos.detach(), sin.detach())


@pytest.mark.each_value
@pytest.mark.parametrize("dtype", TOLERANCE)
@pytest.mark.parametrize("shape", SHAPES, ids=str)
def test_against_float64(shape, dtype):
    q, k, cos, sin = case(*shape, dtype)

    def function(q, k):
        return turned(
            q, k, cos.to(torch.promote_types(q.dtype, cos.dtype)), sin.to(torch.promote_types(q.dtype, sin.dtype))
        )

    assert max(errors(function, "rotary", [q, k])) <= TOLERANCE[dtype]


@pytest.mark.gpu
@pytest.mark.parametrize("dtype", TOLERANCE)
def test_full_size(dtype):
    test_against_float64((8, 2048, 20, 4, 128), dtype)


@pytest.mark.parametrize("batched", [1, 2])
def test_tables_of_each_sequence(batched):
    q, k, _, _ = case(2, 5, 3, 1, 8, torch.float32)
    cos, sin = normal(batched, 5, 8, seed=4), normal(batched, 5, 8, seed=5)
    got = []
    for backend in ("triton", "torch"):
        with use_backend("rotary", backend), poisoned():
            got.append(turned(q, k, cos, sin))
    for a, b in zip(*got, strict=True):
        torch.testing.assert_close(
            a, b, rtol=1e-6, atol=1e-6
        )  # two products and a sum of order 1, with and without FMA


@pytest.mark.parametrize("strided", ["transposed", "slice", "last"])
def test_strides(strided):
    """Views are read where they are; dense ones keep their strides, so that attention reads them without a copy."""
    q = normal(2, 5, 3, 16)
    q, k = {
        "transposed": lambda: (q.transpose(1, 2), q.transpose(1, 2)),
        "slice": lambda: (q.transpose(1, 2)[..., 8:], q.transpose(1, 2)[:, :1, :, :8]),
        "last": lambda: (q.permute(0, 3, 2, 1)[..., :4], q.permute(0, 3, 2, 1)[..., 1:5]),
    }[strided]()
    cos, sin = normal(q.shape[2], q.shape[3], seed=2), normal(q.shape[2], q.shape[3], seed=3)
    with use_backend("rotary", "triton"), poisoned():
        got = rotary(q, k, cos, sin)
    if strided == "transposed":
        assert got[0].stride() == q.stride() and got[0].transpose(1, 2).is_contiguous()
    with use_backend("rotary", "torch"):
        expected = rotary(q, k, cos, sin)
    for a, b in zip(got, expected, strict=True):
        torch.testing.assert_close(a, b, rtol=1e-6, atol=1e-6)


def test_turning_back_gives_what_was_turned():
    q, k, angles, _ = case(1, 6, 2, 1, 8, torch.float32)
    angles = angles[:, :4].repeat(1, 2)
    with use_backend("rotary", "triton"):
        there = module._rotary(q.transpose(1, 2), k.transpose(1, 2), angles.cos(), angles.sin(), False)
        back = module._rotary(*there, angles.cos(), angles.sin(), True)
    torch.testing.assert_close(back[0], q.transpose(1, 2), rtol=1e-6, atol=1e-6)


def test_opcheck_and_compile():
    q, k, cos, sin = case(2, 5, 3, 1, 8, torch.float32)
    q, k = q.transpose(1, 2).requires_grad_(), k.transpose(1, 2).requires_grad_()
    torch.library.opcheck(torch.ops.vblackwell.rotary, (q, k, cos, sin, False))
    compiled = torch.compile(
        lambda a, b: module._rotary(a, b, cos, sin, False)[0] * 3, fullgraph=True, backend="aot_eager"
    )
    expected = torch.autograd.grad((module._rotary(q, k, cos, sin, False)[0] * 3).sum(), (q,))
    assert torch.equal(torch.autograd.grad(compiled(q, k).sum(), (q,))[0], expected[0])


@pytest.mark.skipif(DEVICE == "cuda", reason="about the CPU")
def test_on_the_cpu_it_is_hugging_faces():
    from transformers.models.llama.modeling_llama import apply_rotary_pos_emb

    for dtype in (torch.float32, torch.bfloat16):
        q, k, cos, sin = case(2, 5, 4, 2, 8, dtype)
        cos, sin = cos.to(dtype), sin.to(dtype)
        expected = apply_rotary_pos_emb(q.transpose(1, 2), k.transpose(1, 2), cos[None], sin[None])
        for a, b in zip(turned(q, k, cos, sin), expected, strict=True):
            assert torch.equal(a, b)


@pytest.mark.parametrize("change", ["odd", "heads", "tables", "dtype"])
def test_refusals(change):
    q, k, cos, sin = case(2, 5, 3, 1, 8, torch.float32)
    q, k = q.transpose(1, 2), k.transpose(1, 2)
    args = {
        "odd": (q[..., :7], k[..., :7], cos[:, :7], sin[:, :7]),
        "heads": (q, k[:, :, :4], cos, sin),
        "tables": (q, k, cos[:4], sin[:4]),
        "dtype": (q, k.bfloat16(), cos, sin),
    }[change]
    with pytest.raises(ConfigurationError, match="do not belong together"):
        rotary(*args)


@pytest.mark.parametrize("backend", ["triton", "torch"])
@pytest.mark.parametrize("joint", [False, True])
def test_what_is_stored_at_one_position(backend, joint):
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


def test_a_cache_that_does_not_fit_is_refused():
    q, cache, at = normal(1, 3, 16), normal(1, 2, 8, 16), torch.tensor([0], device=DEVICE)
    with pytest.raises(ConfigurationError, match="for a cache of"):
        store_rotated(q, normal(1, 3, 16), normal(1, 3, 16), cache, cache, cache[0, 0], cache[0, 0], at)
