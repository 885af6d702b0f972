"""On a Hopper GPU: the forward with specialised warps, which no interpreter runs, compared with float64 and with
PyTorch's own attention.
"""

from __future__ import annotations

import math
from typing import Any

import pytest
import torch

from tests.kernels.attention.oracle import inputs, plain, relative, use_plans
from tests.kernels.attention.test_op_gpu import FLOOR, compare, mask_of
from tests.kernels.pointwise.oracle import poisoned
from vblackwell.kernels.attention.op import bounds, flash_attention
from vblackwell.kernels.attention.plan import SPECIALIZED, SPECIALIZED_BY_DEFAULT, padded_head
from vblackwell.kernels.attention.reference import visible_ST

pytestmark = [
    pytest.mark.gpu,
    pytest.mark.skipif(
        torch.cuda.is_available() and torch.cuda.get_device_capability() != (9, 0), reason="needs a Hopper GPU"
    ),
]


@pytest.fixture(autouse=True, scope="module")
def backward_thread() -> None:
    """Binds the context to autograd's thread, as in test_op_gpu.py."""
    torch.ones(1, device="cuda", requires_grad=True).exp().backward()


def check(shape, dtype=torch.bfloat16, *, mask=None, causal=False, bottom_right=False, window=None) -> None:
    """Output within 1.5 times the error of unfused attention in the same type, log-sum-exps as of float64, bits equal
    from run to run.
    """
    from vblackwell.kernels.attention import launch as attention_launch

    (queries, keys, head), (q, k, v) = shape[3:], inputs(*shape, dtype=dtype)
    left, right = bounds(causal, window)
    options = attention_launch.Options(
        None if mask is None else mask[(None,) * (4 - mask.dim())],
        None,
        None,
        None,
        None,
        queries,
        keys,
        head**-0.5,
        left,
        right,
        bottom_right,
        0.0,
        0.0,
    )
    plan = SPECIALIZED[max(64, padded_head(head))]
    with use_plans(forward=plan), poisoned():
        out, lse = attention_launch.forward(q, k, v, options)
        again = attention_launch.forward(q, k, v, options)
    assert torch.equal(out, again[0]) and torch.equal(
        lse, again[1]
    )  # NaN, which unwritten memory is, differs from itself
    wide = mask.double() if mask is not None and mask.is_floating_point() else mask
    bound = {"causal": causal, "bottom_right": bottom_right, "window": window}
    exact = plain(mask=wide, **bound)(q.double(), k.double(), v.double())
    allowed = max(1.5 * relative(plain(mask=mask, **bound)(q, k, v), exact), FLOOR)
    assert relative(out, exact) <= allowed, (relative(out, exact), allowed)
    # Scores are sums in fp32 of at most some hundred numbers of size 1: 1e-5; exact_lse is in units of log2, as lse.
    assert torch.allclose(lse.double(), exact_lse(q, k, wide, left, right, bottom_right), rtol=0, atol=1e-3)


def exact_lse(q, k, mask, left, right, bottom_right) -> torch.Tensor:
    """log2 of the sums of exponentials (B, N, S) in float64; +inf where a row sees nothing."""
    keys = k.double().repeat_interleave(q.shape[1] // k.shape[1], dim=1)
    scores = q.double() @ keys.transpose(-1, -2) * q.shape[-1] ** -0.5
    seen = visible_ST(q.shape[2], k.shape[2], left, right, bottom_right, q.device)
    if seen is not None:
        scores = scores.masked_fill(~seen, float("-inf"))
    if mask is not None:
        scores = scores.masked_fill(~mask, float("-inf")) if mask.dtype == torch.bool else scores + mask
    lse = scores.logsumexp(-1) / math.log(2)
    return torch.where(lse == float("-inf"), float("inf"), lse)


# In the order of what they tell, because a run may be cut short. To compile a kernel takes seconds: what a test asks of
# one kind of mask, bound and head width is one kernel, or two where lengths end inside a tile and at its end.


@pytest.mark.parametrize("head", [128, 64])
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


# Lengths of one tile and less, cut in the last tile, and even ones; what a kernel is told of lengths is the same for
# all.
LENGTHS = ((1, 1), (17, 129), (129, 63), (384, 512), (1000, 1000))


@pytest.mark.parametrize("head", [128, 64])
@pytest.mark.parametrize("causal", [True, False])
def test_lengths(causal, head):
    for queries, keys in LENGTHS:
        check((2, 4, 2, queries, keys, head), causal=causal)
        if causal:
            check((2, 4, 2, queries, keys, head), causal=True, bottom_right=True)


@pytest.mark.parametrize(("kind", "head"), sorted(SPECIALIZED_BY_DEFAULT))
def test_gradients_by_default(kind, head):
    """Forward as it is chosen, which is this one, and a backward that takes its log-sum-exps."""
    shape = (2, 4, 4, 512, 512, head)
    mask = None if kind == "none" else mask_of(kind, 1, 4, 512, 512)
    tensors = inputs(*shape, dtype=torch.bfloat16)
    usual = flash_attention(*tensors, mask=mask, causal=mask is None)
    with use_plans(forward=SPECIALIZED[head]):
        assert torch.equal(flash_attention(*tensors, mask=mask, causal=mask is None), usual)
    options: dict[str, Any] = {"causal": True} if mask is None else {"mask": mask}
    # Saying ``bottom_right`` has ours compared with attention written out, which gives zeros where a row sees nothing.
    compare(shape, **options, bottom_right=False)


@pytest.mark.parametrize("options", [{"causal": True, "window": 100}, {"window": 300}], ids=str)
def test_windows(options):
    for queries, keys in ((1000, 1000), (300, 1000), (129, 63)):
        check((1, 4, 2, queries, keys, 128), **options)
    check((1, 4, 2, 300, 1000, 128), **options, bottom_right=True)


@pytest.mark.parametrize("shape", [(2, 1, 1, 520), (2, 4, 1000, 1)], ids=str)
def test_boolean_masks_broadcast_in_a_tile(shape):
    check((2, 4, 2, 1000, 520, 128), mask=mask_of("boolean", *shape))


@pytest.mark.parametrize("kind", ["boolean", "additive"])
def test_masks_with_bounds(kind):
    mask = mask_of(kind, 1, 4, 1000, 520)
    check((2, 4, 2, 1000, 520, 128), mask=mask, causal=True, bottom_right=True)
    check((2, 4, 2, 1000, 520, 128), mask=mask, window=300)


@pytest.mark.parametrize(("head", "dtype"), [(32, torch.bfloat16), (96, torch.float16), (256, torch.bfloat16)], ids=str)
def test_heads(head, dtype):
    check((1, 3, 1, 257, 257, head), dtype, causal=True)


def test_what_it_does_not_compute_is_left_to_the_usual_one():
    from vblackwell.kernels.attention.launch import Options, _Call

    q, k, v = inputs(1, 2, 2, 200, 200, 128, torch.bfloat16)
    wide = torch.zeros(1, 1, 200, 200, device="cuda")  # 32 bits
    for mask, softcap in ((None, 20.0), (wide, 0.0)):
        options = Options(mask, None, None, None, None, 200, 200, 0.125, None, None, False, softcap, 0.0)
        assert _Call(q, k, v, options).specialized() is None
