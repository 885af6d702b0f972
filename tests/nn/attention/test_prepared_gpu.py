"""The operators that attention calls run themselves, on a GPU: against PyTorch's own way to them, and float64."""

from __future__ import annotations

import pytest
import torch
from torch.nn import functional
from torch.nn.attention import SDPBackend, sdpa_kernel

from tests.nn.attention.inputs import masks, qkv, with_gradients
from vblackwell.errors import Unsupported
from vblackwell.nn.attention import backends as dispatcher
from vblackwell.nn.attention.backends import Variant, attention
from vblackwell.nn.attention.request import SMALL

pytestmark = pytest.mark.gpu
CUDNN_TAKES_MASKS = pytest.mark.skipif(
    not torch.cuda.is_available()
    or torch.cuda.get_device_capability() != (9, 0)
    or (torch.backends.cudnn.version() or 0) < dispatcher.CUDNN_MASKS,
    reason="masks are given to cuDNN on Hopper alone, from the release that was compared on",
)
BOTTOM_RIGHT = {"causal": True, "bottom_right": True}
TORCHS = {
    "cudnn": SDPBackend.CUDNN_ATTENTION,
    "flash": SDPBackend.FLASH_ATTENTION,
    "efficient": SDPBackend.EFFICIENT_ATTENTION,
}


@pytest.fixture(autouse=True)
def nothing_is_kept():
    dispatcher._forget()
    yield
    dispatcher._forget()


def pytorchs_way(name, variant):
    def function(q, k, v):
        mask = variant.mask
        if name == "efficient" and q.shape[1] != k.shape[1]:
            k, v = (x.repeat_interleave(q.shape[1] // x.shape[1], dim=1) for x in (k, v))
        if mask is not None and mask.dtype != torch.bool:
            mask = mask.to(q.dtype)
        if mask is not None:  # rows that PyTorch can read
            mask = mask.expand(*mask.shape[:-1], k.shape[2]).contiguous()
        grouped = {"enable_gqa": True} if q.shape[1] != k.shape[1] else {}
        with sdpa_kernel(TORCHS[name]):
            return functional.scaled_dot_product_attention(q, k, v, mask, 0.0, variant.causal, **grouped)

    return function


@pytest.mark.parametrize("name", TORCHS)
@pytest.mark.parametrize("kv_heads", [4, 2, 1])
@pytest.mark.parametrize("kind", ["none", "causal", "boolean", "padding", "added", "transposed"])
def test_operators_give_the_bits_of_pytorchs_way(name, kv_heads, kind):
    if name != "efficient" and kind not in ("none", "causal"):
        pytest.skip(f"{name} takes no mask")
    queries, keys = (65, 65) if kind == "causal" else (63, 257)
    tensors = qkv(4, kv_heads, queries, keys, 64, "cuda", torch.bfloat16)
    mask = None if kind in ("none", "causal") else masks(queries, keys, "cuda")[kind]
    variant = Variant(mask, kind == "causal")
    with torch.no_grad():
        got, ran = attention(*tensors, variant, name)
        assert ran == name and torch.equal(got, pytorchs_way(name, variant)(*tensors))
    mine = with_gradients(lambda q, k, v: attention(q, k, v, variant, name)[0], tensors)
    theirs = with_gradients(pytorchs_way(name, variant), tensors)
    assert torch.equal(mine[0], theirs[0])
    for got, wanted in zip(mine[1:], theirs[1:], strict=True):
        # Sums of gradients in another order from run to run: some roundings of bf16 to 2^-9.
        assert (got - wanted).norm() <= 1e-2 * wanted.norm()


@pytest.mark.parametrize("kind", ["none", "boolean", "padding", "added"])
@pytest.mark.parametrize("options", [{"window": 20}, BOTTOM_RIGHT, {"causal": True}], ids=str)
@pytest.mark.parametrize("kv_heads", [4, 2])
def test_bounds_on_efficient_are_those_of_the_unfused_one(kind, options, kv_heads):
    if kind == "none" and "bottom_right" not in options and "window" not in options:
        pytest.skip("causal alone is PyTorch's own")
    tensors = qkv(4, kv_heads, 63, 257, 64, "cuda", torch.bfloat16)
    how = Variant(masks(63, 257, "cuda").get(kind), **options)
    assert attention(*tensors, how)[1] == "efficient"
    wide = how if how.mask is None or how.mask.dtype == torch.bool else how._replace(mask=how.mask.double())
    got = with_gradients(lambda q, k, v: attention(q, k, v, how)[0], tensors)
    exact = with_gradients(lambda q, k, v: attention(q, k, v, wide, "math")[0], [x.double() for x in tensors])
    for one, other in zip(got, exact, strict=True):
        # some roundings of bf16 to 2^-9 each, at a few times their size where gradients cancel
        assert (one - other).norm() <= 2e-2 * other.norm()


def test_rows_that_see_nothing_are_zero_where_efficient_runs():
    tensors = qkv(4, 4, 63, 257, 64, "cuda", torch.bfloat16)
    mask = masks(63, 257, "cuda")["boolean"]
    mask[:, :, 5] = False
    results = with_gradients(lambda q, k, v: attention(q, k, v, Variant(mask), "efficient")[0], tensors)
    assert all(x.isfinite().all() for x in results)
    assert not results[0][:, :, 5].any() and not results[1][:, :, 5].any()


@CUDNN_TAKES_MASKS
def test_small_masks_run_on_cudnn_and_large_ones_on_the_own_kernel():
    for length, name in ((63, "cudnn"), (4096, "triton")):
        q, k, v = qkv(8, 8, length, length, 64, "cuda", torch.bfloat16)
        assert attention(q, k, v, Variant(masks(length, length, "cuda")["boolean"]))[1] == name


def as_cudnn_reads(mask):
    """Of fp32 it is refused for bf16: it would be rounded."""
    return mask if mask.dtype == torch.bool else mask.to(torch.bfloat16)


def on_cudnn(q, k, v, mask):
    request = dispatcher.request_of(q, k, v, Variant(mask))
    assert not dispatcher.attention_backends(request)["cudnn"]
    return attention(q, k, v, Variant(mask), "cudnn")[0]


def exactly(tensors, mask):
    wide = mask if mask.dtype == torch.bool else mask.double()
    return with_gradients(lambda q, k, v: attention(q, k, v, Variant(wide), "math")[0], [x.double() for x in tensors])


@CUDNN_TAKES_MASKS
@pytest.mark.parametrize("kind", ["boolean", "padding", "added", "transposed", "expanded"])
@pytest.mark.parametrize(("queries", "keys"), [(63, 257), (5, 7), (300, 200), (2, 384)])
@pytest.mark.parametrize(("kv_heads", "head"), [(4, 64), (2, 64), (1, 128), (4, 176), (2, 256)])
def test_masks_on_cudnn_are_those_of_the_unfused_one(kind, queries, keys, kv_heads, head):
    tensors = qkv(4, kv_heads, queries, keys, head, "cuda", torch.bfloat16)
    found = masks(queries, keys, "cuda")
    found["expanded"] = found["added"].to(torch.bfloat16).expand(2, 4, queries, keys)
    mask = as_cudnn_reads(found[kind])
    if kind == "boolean":
        mask[:, :, 1] = False
    got, exact = with_gradients(lambda q, k, v: on_cudnn(q, k, v, mask), tensors), exactly(tensors, mask)
    for one, other in zip(got, exact, strict=True):
        # some roundings of bf16 to 2^-9 each, at a few times their size where gradients cancel
        assert (one - other).norm() <= 2e-2 * other.norm()
    if kind == "boolean":
        assert not got[0][:, :, 1].any() and not got[1][:, :, 1].any()
    with torch.no_grad():
        alone = on_cudnn(*tensors, mask)
    assert (alone - exact[0]).norm() <= 2e-2 * exact[0].norm()


def far_below_zero(keys, kv_heads, head):
    q, k, v = (0.1 * x for x in qkv(2, kv_heads, 70, keys, head, "cuda", torch.bfloat16))
    q[..., 0], k[..., 0] = 1.0, -120 * head**0.5  # log-sum-exps of about -120: their exponentials overflow
    return q, k, v


def assert_right_far_below_zero(tensors, mask):
    got, exact = with_gradients(lambda q, k, v: on_cudnn(q, k, v, mask), tensors), exactly(tensors, mask)
    assert all(x.isfinite().all() for x in got)
    for one, other in zip((got[0], got[3]), (exact[0], exact[3]), strict=True):
        # Scores of 120 are sums in fp32, exact to 2^-17 of them: 1e-3 of a probability, next to bf16's roundings.
        assert (one - other).norm() <= 2e-2 * other.norm()


@CUDNN_TAKES_MASKS
@pytest.mark.parametrize("keys", [3, 17, 55, 63, 65, 96, 128, 200, 256, 257, 384])
@pytest.mark.parametrize("head", [40, 64, 128, 136, 160, 192, 224, 256])
def test_masks_on_cudnn_where_all_scores_are_far_below_zero(keys, head):
    assert_right_far_below_zero(far_below_zero(keys, 2, head), masks(70, keys, "cuda")["boolean"])


@CUDNN_TAKES_MASKS
@pytest.mark.parametrize("keys", [64, 192, 320, 704])
@pytest.mark.parametrize(("kv_heads", "head"), [(2, 40), (2, 64), (1, 128), (2, 160), (1, 256)])
def test_masks_on_cudnn_whose_backward_is_two_calls(keys, kv_heads, head, monkeypatch):
    """As in long calls: its backward over so many keys at once gives NaN far below zero."""
    monkeypatch.setitem(SMALL, (True, False), 0)
    for kind in ("boolean", "added", "padding"):
        mask = as_cudnn_reads(masks(70, keys, "cuda")[kind])
        assert_right_far_below_zero(far_below_zero(keys, kv_heads, head), mask)
        if kind == "boolean":
            mask[:, :, 1], mask[:, :, 2, :-5] = False, False
        tensors = qkv(2, kv_heads, 70, keys, head, "cuda", torch.bfloat16)
        got, exact = with_gradients(lambda q, k, v, mask=mask: on_cudnn(q, k, v, mask), tensors), exactly(tensors, mask)
        for one, other in zip(got, exact, strict=True):
            # some roundings of bf16 to 2^-9 each, at a few times their size where gradients cancel
            assert (one - other).norm() <= 2e-2 * other.norm()
        if kind == "boolean":
            assert not got[0][:, :, 1].any() and not got[1][:, :, 1].any()


@pytest.mark.skipif(
    not torch.cuda.is_available() or torch.cuda.get_device_capability() != (9, 0), reason="Hopper's cuDNN"
)
@pytest.mark.parametrize("head", [136, 192, 256])
def test_cudnn_takes_wide_heads_where_torch_lets_it(head):
    tensors = [x.requires_grad_() for x in qkv(4, 2, 300, 300, head, "cuda", torch.bfloat16)]
    params = torch.backends.cuda.SDPAParams(*tensors, None, 0.0, True, True)
    how, takes = Variant(causal=True), torch.backends.cuda.can_use_cudnn_attention(params)
    assert takes == (not dispatcher.attention_backends(dispatcher.request_of(*tensors, how))["cudnn"])
    if takes:
        got = with_gradients(lambda q, k, v: attention(q, k, v, how, "cudnn")[0], tensors)
        exact = with_gradients(lambda q, k, v: attention(q, k, v, how, "math")[0], [x.double() for x in tensors])
        for one, other in zip(got, exact, strict=True):
            # some roundings of bf16 to 2^-9 each, at a few times their size where gradients cancel
            assert (one - other).norm() <= 2e-2 * other.norm()


def test_strides_that_pytorch_refuses_run_elsewhere():
    q, k, v = (x.transpose(2, 3).contiguous().transpose(2, 3) for x in qkv(4, 4, 64, 64, 64, "cuda", torch.bfloat16))
    assert attention(q, k, v)[1] == "triton"
    with pytest.raises(Unsupported, match="cudnn: PyTorch refuses it"):
        attention(q, k, v, backend="cudnn")


def test_a_captured_call_is_a_call_of_its_own():
    """At 4 GFLOP the host's launches decide outside a graph, the kernels inside, which are first loaded there."""
    q, k, v = qkv(16, 16, 512, 512, 128, "cuda", torch.bfloat16)
    how = Variant(masks(512, 512, "cuda")["boolean"])
    with torch.no_grad():
        eager, name = attention(q, k, v, how)
        graph = torch.cuda.CUDAGraph()
        with torch.cuda.graph(graph):
            captured, other = attention(q, k, v, how)
        graph.replay()
    assert name in ("cudnn", "efficient") and other == "triton"
    assert (eager - captured).norm() <= 1e-2 * eager.norm()  # bf16's roundings to 2^-9


@pytest.mark.parametrize("kv_heads", [4, 2, 1])
@pytest.mark.parametrize("kind", ["none", "causal", "added"])
@pytest.mark.parametrize(("queries", "keys", "head"), [(1, 512, 64), (9, 48, 32), (63, 257, 64), (200, 192, 176)])
def test_what_is_chosen_freely_is_right(kv_heads, kind, queries, keys, head):
    """By PyTorch's own way, or by an operator; eager and in a graph."""
    if kind == "causal":  # of one key the gradients of scores are zero, but for roundings
        queries = keys = max(2, queries)
    tensors = qkv(4, kv_heads, queries, keys, head, "cuda", torch.bfloat16)
    mask = masks(queries, keys, "cuda")["added"].to(torch.bfloat16) if kind == "added" else None
    how = Variant(mask, kind == "causal")
    exact = with_gradients(
        lambda q, k, v: attention(q, k, v, how._replace(mask=None if mask is None else mask.double()), "math")[0],
        [x.double() for x in tensors],
    )
    for _ in range(2):
        got = with_gradients(lambda q, k, v: attention(q, k, v, how)[0], tensors)
        for one, other in zip(got, exact, strict=True):
            # some roundings of bf16 to 2^-9 each, at a few times their size where gradients cancel
            assert (one - other).norm() <= 2e-2 * other.norm()
        alone = attention(*tensors, how)[0]
        assert (alone - exact[0]).norm() <= 2e-2 * exact[0].norm()
    graph = torch.cuda.CUDAGraph()
    with torch.cuda.graph(graph):
        captured = attention(*tensors, how)[0]
    graph.replay()
    assert (captured - exact[0]).norm() <= 2e-2 * exact[0].norm()
