"""The attention kernels against float64: outputs and every gradient, unwritten memory poisoned with NaN."""

from __future__ import annotations

import pytest
import torch

from tests.kernels.attention.oracle import DEVICE, gradients, inputs, normal, plain, relative
from tests.kernels.pointwise.oracle import poisoned
from vblackwell.errors import ConfigurationError, Unsupported
from vblackwell.kernels.attention.op import dense_at_once, flash_attention, flash_attention_varlen, new_seed
from vblackwell.kernels.attention.reference import attention_reference
from vblackwell.nn.attention.request import Variant

# Relative RMS error. fp32: sums of some hundred terms, each product and exponential of 2^-23. fp16: probabilities,
# score gradients and the result are rounded to 2^-11 each.
TOLERANCE = {torch.float32: 2e-6, torch.float16: 2e-3}


def error(function, exact, tensors) -> float:
    """Largest relative error of ``function``'s output and gradients."""
    with poisoned():
        got = gradients(function, tensors)
    return max(relative(a, b) for a, b in zip(got, gradients(exact, tensors, torch.float64), strict=True))


def check(shape, dtype=torch.float32, **options) -> None:
    assert (
        error(lambda q, k, v: flash_attention(q, k, v, **options), plain(**options), inputs(*shape, dtype))
        <= TOLERANCE[dtype]
    )


# batch, query heads, key heads, queries, keys, head width
@pytest.mark.parametrize(
    ("shape", "options"),
    [
        ((1, 1, 1, 1, 1, 32), {}),
        ((2, 2, 1, 17, 63, 80), {}),
        ((1, 1, 1, 129, 17, 33), {"scale": 0.3}),
        ((1, 1, 1, 1, 63, 32), {"causal": True, "bottom_right": True}),
        ((1, 2, 2, 63, 63, 32), {"causal": True}),
        ((1, 1, 1, 100, 100, 96), {"causal": True}),
        ((1, 1, 1, 33, 129, 32), {"causal": True}),
        ((1, 1, 1, 33, 129, 32), {"causal": True, "bottom_right": True}),
        ((1, 1, 1, 97, 63, 32), {"causal": True, "bottom_right": True}),  # the first queries see nothing
        ((1, 1, 1, 129, 129, 16), {"causal": True, "window": 40}),
        ((1, 1, 1, 63, 129, 16), {"window": 20, "bottom_right": True}),
        ((1, 2, 1, 40, 40, 32), {"softcap": 1.5, "causal": True}),
    ],
    ids=str,
)
def test_against_float64(shape, options):
    check(shape, **options)


def test_repeats_bit_for_bit():
    q, k, v = inputs(1, 2, 1, 20, 33, 16)
    mask = boolean(20, 33)
    got, again = (
        gradients(lambda q, k, v: flash_attention(q, k, v, mask=mask, causal=True), [q, k, v]) for _ in range(2)
    )
    assert all(torch.equal(a, b) for a, b in zip(got, again, strict=True))


def test_half():
    check((1, 2, 1, 63, 65, 64), torch.float16, causal=True)


def test_alibi():
    check(
        (1, 2, 1, 40, 63, 32), alibi_slopes_N=torch.tensor([0.5, 0.05], device=DEVICE), causal=True, bottom_right=True
    )


def boolean(*shape: int) -> torch.Tensor:
    """Half true; empty, whole and mixed tiles; a row that sees nothing."""
    mask = normal(*shape, seed=5) > 0
    if shape[-2] > 32 and shape[-1] > 32:
        mask[..., :32, :32] = False
        mask[..., 32:, :32] = True
    if shape[-2] > 3:
        mask[..., 3, :] = False
    return mask


@pytest.mark.each_value
@pytest.mark.parametrize("shape", [(40, 63), (2, 1, 1, 63), (1, 2, 40, 1)], ids=str)
@pytest.mark.parametrize("kind", ["boolean", "additive"])
def test_masks(shape, kind):
    mask = boolean(*shape)
    if kind == "additive":
        mask = normal(*shape, seed=6).masked_fill(~mask, float("-inf"))
        mask = mask.masked_fill(normal(*shape, seed=7) > 1, 0.0)
    check((2 if shape[0] == 2 else 1, 2 if len(shape) == 4 else 1, 1, 40, 63, 16), mask=mask)


def test_expanded_masks_are_read_once():
    """Kernels are given what is there: of an expanded mask one plane, whatever its shape says."""
    from vblackwell.kernels.attention.launch import Options, _Call

    q, k, v = inputs(2, 3, 3, 40, 63, 16)
    for mask, shape in (
        (boolean(40, 63).expand(2, 3, 40, 63), (1, 1, 40, 63)),
        (boolean(2, 1, 1, 63).expand(2, 3, 40, 63), (2, 1, 1, 63)),
    ):
        options = Options(mask, None, None, None, None, 40, 63, 0.25, None, None, False, 0.0, 0.0)
        call = _Call(q, k, v, options)
        assert call.mask is not None and tuple(call.mask.shape) == shape


def test_mask_with_causal_and_window():
    check((1, 2, 1, 40, 63, 16), mask=boolean(1, 2, 40, 63), causal=True, window=50, bottom_right=True)


@pytest.mark.filterwarnings(
    "ignore:overflow encountered:RuntimeWarning"
)  # the interpreter's: the least number, in units of log2
@pytest.mark.parametrize("hidden", [False, torch.finfo(torch.float32).min])
def test_rows_that_see_nothing_are_zero(hidden):
    q, k, v = inputs(1, 1, 1, 40, 40, 16)
    mask = torch.full((40, 40), True if hidden is False else 0.0, device=DEVICE)
    mask[5], mask[:, 7] = hidden, hidden
    with poisoned():
        out, dq, dk, dv = gradients(lambda q, k, v: flash_attention(q, k, v, mask=mask), [q, k, v])
    assert not out[0, 0, 5].any() and not dq[0, 0, 5].any() and not dk[0, 0, 7].any() and not dv[0, 0, 7].any()
    assert out.isfinite().all() and out[0, 0, 6].any()


def test_float64_gradients():
    """Finite differences, in the interpreter alone."""
    if DEVICE == "cuda":
        pytest.skip("finite differences need fp64, and compiled attention kernels take fp16, bf16 and fp32 only")
    tensors = [x.double().requires_grad_() for x in inputs(1, 2, 1, 3, 4, 4)]
    mask = torch.tensor([[True, False, True, True], [False] * 4, [True] * 4])
    torch.autograd.gradcheck(
        lambda q, k, v: flash_attention(q, k, v, mask=mask, softcap=2.0, scale=0.25), tensors, fast_mode=True
    )


def test_dropout_is_the_same_in_backward_and_by_seed():
    q, k, v = inputs(1, 2, 1, 20, 63, 64)
    seed = torch.tensor([11, 3], dtype=torch.int64, device=DEVICE)
    unit = torch.eye(63, 64, device=DEVICE).expand(1, 1, 63, 64)
    keep = (
        flash_attention(q, k, unit, dropout=0.3, seed=seed)[..., :63] > 0
    )  # with unit values the output is the probabilities
    # 2520 draws of mean 0.7: six standard deviations are 0.055
    assert abs(keep.float().mean().item() - 0.7) < 0.055
    assert not torch.equal(keep[:, 0], keep[:, 1])
    options = {"dropout": 0.3}
    assert (
        error(
            lambda q, k, v: flash_attention(q, k, v, seed=seed, **options),
            plain(keep_BNST=keep, **options),
            [q, k, v],
        )
        <= TOLERANCE[torch.float32]
    )
    other = flash_attention(q, k, unit, dropout=0.3, seed=seed + 1)[..., :63] > 0
    assert not torch.equal(keep, other)


def test_dropout_follows_torchs_generator():
    q, k, v = inputs(1, 1, 1, 17, 17, 16)
    results = []
    for number in (1, 1, 2):
        torch.manual_seed(number)
        results.append(flash_attention(q, k, v, dropout=0.5))
    assert torch.equal(results[0], results[1]) and not torch.equal(results[0], results[2])
    assert new_seed(q.device).shape == (2,)


@pytest.mark.each_value
@pytest.mark.parametrize("options", [{}, {"causal": True, "bottom_right": True}], ids=str)
@pytest.mark.parametrize(
    "lengths",
    [
        [(17, 33), (0, 0), (40, 35)],
        [(32, 64), (0, 0), (25, 4), (0, 0)],  # ends on a tile's edge, and with an empty one
        [(0, 0)] * 127 + [(1, 1), (9, 3), (0, 0), (3, 24)],  # more than a program loads the starts of at a time
    ],
    ids=["few", "edges", "many"],
)
def test_packed_sequences(lengths, options):
    """Each as if alone; empty ones among them, and neighbours that are NaN stay theirs."""
    q_starts, k_starts = (  # not side by side
        torch.tensor([0, *torch.tensor(side).cumsum(0)], dtype=torch.int32, device=DEVICE).repeat_interleave(2)[::2]
        for side in zip(*lengths, strict=True)
    )
    queries, keys = (sum(side) for side in zip(*lengths, strict=True))
    tensors = [normal(queries, 2, 16), normal(keys, 1, 16, seed=1), normal(keys, 1, 16, seed=2)]

    def packed(q, k, v):
        return flash_attention_varlen(q, k, v, q_starts, k_starts, **options)

    def alone(q, k, v):
        parts = []
        for a, b, c, d in zip(q_starts[:-1], q_starts[1:], k_starts[:-1], k_starts[1:], strict=True):
            views = (x[None].transpose(1, 2) for x in (q[a:b], k[c:d], v[c:d]))
            right = 0 if options.get("causal") else None
            parts.append(attention_reference(*views, right=right, bottom_right=True)[0].transpose(0, 1))
        return torch.cat(parts)

    assert error(packed, alone, tensors) <= TOLERANCE[torch.float32]


@pytest.mark.parametrize("layout", ["heads first", "fused projection", "last dimension apart", "no keys", "no queries"])
def test_layouts(layout):
    if layout == "heads first":
        tensors = [x.contiguous() for x in inputs(2, 2, 1, 17, 17, 16)]
    elif layout == "fused projection":
        tensors = list(normal(2, 17, 3, 2, 16).permute(2, 0, 3, 1, 4).unbind())
    elif layout == "last dimension apart":
        tensors = [x.transpose(2, 3).contiguous().transpose(2, 3) for x in inputs(2, 2, 1, 17, 17, 16)]
    else:
        tensors = inputs(1, 1, 1, 17, 17, 16)
        index = 0 if layout == "no queries" else 1
        for which in (0,) if index == 0 else (1, 2):
            tensors[which] = tensors[which][:, :, :0]
    if layout == "no keys":
        with poisoned():
            assert not any(x.any() for x in gradients(flash_attention, tensors))
        return
    assert error(flash_attention, plain(), tensors) <= TOLERANCE[torch.float32]


def test_result_has_the_strides_of_the_queries():
    q, k, v = inputs(2, 2, 1, 17, 17, 16)
    assert flash_attention(q, k, v).transpose(1, 2).is_contiguous()


def test_opcheck_and_compile():
    q, k, v = (x.requires_grad_() for x in inputs(1, 2, 1, 17, 17, 16))
    arguments = (q, k, v, None, None, None, None, None, 17, 17, 0.25, None, 0, False, 0.0, 0.0)
    torch.library.opcheck(torch.ops.vblackwell.attention, arguments, test_utils=("test_schema", "test_faketensor"))
    compiled = torch.compile(
        lambda q, k, v: flash_attention(q, k, v, causal=True) * 3, fullgraph=True, backend="aot_eager"
    )
    expected = gradients(lambda q, k, v: flash_attention(q, k, v, causal=True) * 3, [q, k, v])
    assert all(torch.equal(a, b) for a, b in zip(gradients(compiled, [q, k, v]), expected, strict=True))


@pytest.mark.parametrize(
    ("change", "words"),
    [
        ({"mask": torch.zeros(17, 17, dtype=torch.int64)}, "mask of torch.int64"),
        ({"mask": torch.zeros(5, 17, dtype=torch.bool)}, "does not broadcast"),
        ({"window": 0}, "window of 0"),
        ({"dropout": 1.0}, "dropout of 1.0"),
        ({"softcap": -1.0}, "soft cap"),
        ({"scale": 0.0}, "scale"),
        ({"alibi_slopes_N": torch.zeros(3)}, "slopes"),
    ],
    ids=str,
)
def test_refused_options(change, words):
    change = {name: value.to(DEVICE) if isinstance(value, torch.Tensor) else value for name, value in change.items()}
    with pytest.raises(ConfigurationError, match=words):
        flash_attention(*inputs(1, 2, 1, 17, 17, 16), **change)


def test_refused_shapes():
    q, k, v = inputs(1, 3, 2, 17, 17, 16)
    with pytest.raises(ConfigurationError, match="3 query heads over 2"):
        flash_attention(q, k, v)
    with pytest.raises(ConfigurationError, match="give .B, N, S, H"):
        flash_attention(q, k, v[:, :, :5])
    with pytest.raises(ConfigurationError, match="must match"):
        flash_attention(q, k[:, :1].half(), v[:, :1])


def test_a_release_of_triton_without_hoppers_forward_is_said_once(monkeypatch):
    from vblackwell.kernels.attention import launch

    launch._runs_specialized.cache_clear()
    monkeypatch.setattr(launch.triton, "__version__", "3.7.1")
    with pytest.warns(UserWarning, match=r"Triton 3\.7\.1: .* install Triton 3\.6\.x"):
        assert not launch._runs_specialized()
    assert not launch._runs_specialized()  # a second warning would be an error
    launch._runs_specialized.cache_clear()
    monkeypatch.setattr(launch.triton, "__version__", "3.6.0")
    assert launch._runs_specialized()
    launch._runs_specialized.cache_clear()


@pytest.mark.parametrize("packed", [False, True])
def test_a_second_derivative_is_refused(packed):
    q, k, v = (x.requires_grad_() for x in inputs(1, 1, 1, 5, 5, 16, torch.float32))
    if packed:
        starts = torch.tensor([0, 2, 5], dtype=torch.int32, device=DEVICE)
        out = flash_attention_varlen(*(x[0].transpose(0, 1) for x in (q, k, v)), starts, starts)
    else:
        out = flash_attention(q, k, v)
    (dq,) = torch.autograd.grad(out.square().sum(), q, create_graph=True)
    with pytest.raises(RuntimeError, match="attention_backward"):
        torch.autograd.grad(dq.sum(), q)


def test_what_a_backward_needs_goes_through_the_hooks_of_saved_tensors():
    """As offloaded activations do: masks and starts too."""
    packs = []
    q, k, v = (x.requires_grad_() for x in inputs(1, 2, 1, 9, 9, 16, torch.float32))
    mask = torch.ones(9, 9, dtype=torch.bool, device=DEVICE).tril()
    with torch.autograd.graph.saved_tensors_hooks(lambda x: packs.append(x.shape) or x.clone(), lambda x: x):
        out = flash_attention(q, k, v, mask=mask)
    assert packs == [q.shape, k.shape, v.shape, out.shape, (1, 2, 9), (1, 1, 9, 9)]
    got = torch.autograd.grad(out.sum(), (q, k, v))
    wanted = torch.autograd.grad(flash_attention(q, k, v, mask=mask).sum(), (q, k, v))
    assert all(torch.equal(one, other) for one, other in zip(got, wanted, strict=True))


def test_masks_and_slopes_that_are_negatives_of_memory():
    """As imaginary parts of conjugates are: kernels read memory."""
    q, k, v = inputs(1, 2, 1, 9, 9, 16, torch.float32)
    mask, slopes = normal(9, 9), normal(2).abs()
    wanted = flash_attention(q, k, v, mask=-mask, alibi_slopes_N=-slopes)
    mask, slopes = torch._neg_view(mask), torch._neg_view(slopes)
    assert mask.is_neg() and slopes.is_neg()
    assert torch.equal(flash_attention(q, k, v, mask=mask, alibi_slopes_N=slopes), wanted)
    own = dense_at_once(False, 9, 9, 0.25, Variant(mask, alibi_slopes_N=slopes))
    assert torch.equal(own(q, k, v, mask, slopes), wanted)


def test_without_a_gpu_and_the_interpreter_it_says_what_it_needs(monkeypatch):
    """In the dispatcher's words, at once and as an op; Triton's own are of drivers."""
    q, starts = torch.zeros(1, 1, 4, 16), torch.tensor([0, 4], dtype=torch.int32)
    monkeypatch.setenv("TRITON_INTERPRET", "0")
    needs = r"on cpu: it needs a CUDA GPU, or TRITON_INTERPRET=1; .*backends\.attention takes"
    for run in (flash_attention, torch.compile(flash_attention, backend="eager")):
        with pytest.raises(Unsupported, match=needs):
            run(q, q, q, causal=True)
    packed = q[0].transpose(0, 1)
    with pytest.raises(Unsupported, match=needs):
        flash_attention_varlen(packed, packed, packed, starts, starts)
    meta = q.to("meta")
    assert flash_attention(meta, meta, meta).shape == q.shape  # shapes alone need neither
