"""The feed-forward half of a block that keeps the residual stream alone."""

import pytest
import torch
from torch.nn import functional

from tests.kernels.pointwise.oracle import DEVICE, TOLERANCE, errors, normal, poisoned, results
from vblackwell.errors import ConfigurationError
from vblackwell.kernels.pointwise import linears as module
from vblackwell.kernels.pointwise.linears import feed_forward_block, shared_input_linears
from vblackwell.kernels.pointwise.rows import add_rms_norm, swiglu_linear
from vblackwell.kernels.runtime.registry import use_backend

EPS = 1e-5


def case(dtype: torch.dtype) -> list[torch.Tensor]:
    """x, the norm's weight, gate, up and down."""
    weights = [normal(*shape, dtype=dtype, seed=seed) / 4 for seed, shape in enumerate([(24, 16), (24, 16), (16, 24)])]
    return [normal(3, 5, 16, dtype=dtype, seed=9), 1 + normal(16, dtype=dtype, seed=8) / 4, *weights]


def block(x, norm, gate, up, down):
    return feed_forward_block(x, norm, EPS, gate, up, down, True)


def plain(x, norm, gate, up, down):
    n = functional.rms_norm(x, (16,), norm, EPS)
    return x + functional.linear(functional.silu(functional.linear(n, gate)) * functional.linear(n, up), down)


def separately(x, norm, gate, up, down):
    """As the decoder computes it where gates are kept."""
    n, total = add_rms_norm(x, torch.zeros_like(x), norm, EPS)
    return total + swiglu_linear(*shared_input_linears(n, [gate, up]), down, True)


def rows_at_a_time(monkeypatch, count):
    """Chunks of ``count`` of `case`'s 15 rows."""
    monkeypatch.setattr(module, "ROW_STEP", count)
    monkeypatch.setattr(module, "MAX_BYTES", 1)


def test_chunks_cover_all_rows():
    assert module.chunks(8192, 6912 * 2) == [slice(0, 8192)]
    assert module.chunks(16384, 6912 * 2) == [slice(0, 8192), slice(8192, 16384)]
    assert module.chunks(0, 64) == [slice(0, 0)]
    for rows in (1, 255, 100_001):
        found = module.chunks(rows, 30_000)
        assert [each.start for each in found] == [0, *(each.stop for each in found[:-1])] and found[-1].stop == rows


@pytest.mark.each_pair
@pytest.mark.parametrize("dtype", TOLERANCE)
@pytest.mark.parametrize("chunk", [100, 4])
def test_against_float64(dtype, chunk, monkeypatch):
    rows_at_a_time(monkeypatch, chunk)
    # norm, gate and up, the product, and the result are rounded one after the other; weights' gradients once a chunk,
    # of four
    assert max(errors(block, "swiglu", case(dtype), plain)) <= (5 if chunk == 100 else 7) * TOLERANCE[dtype]


@pytest.mark.parametrize("dtype", TOLERANCE)
def test_bits_of_separate_operations(dtype):
    with use_backend("swiglu", "triton"), use_backend("rms_norm", "triton"), poisoned():
        together, apart = results(block, case(dtype)), results(separately, case(dtype))
    assert len(together) == 6 and all(torch.equal(a, b) for a, b in zip(together, apart, strict=True))


def test_it_keeps_its_arguments_and_no_more():
    inputs = [tensor.requires_grad_() for tensor in case(torch.float32)]
    kept = []
    with torch.autograd.graph.saved_tensors_hooks(lambda tensor: kept.append(tensor.shape), lambda _: None):
        unwanted = feed_forward_block(*inputs[:2], EPS, *inputs[2:], wanted=False)
    assert unwanted.shape == inputs[0].shape
    assert sorted(kept) == sorted(tensor.shape for tensor in inputs)


def test_gradients_that_nobody_wants(monkeypatch):
    rows_at_a_time(monkeypatch, 4)
    expected = results(block, case(torch.float32))[1:]
    for wanted in range(5):
        inputs = case(torch.float32)
        inputs[wanted].requires_grad_()
        y = block(*inputs)
        y.backward(normal(*y.shape, seed=100))  # the gradient that `results` gives
        for number, tensor in enumerate(inputs):
            assert (tensor.grad is not None) == (number == wanted)
        assert torch.equal(inputs[wanted].grad, expected[wanted])


def test_no_rows():
    _, *weights = case(torch.float32)
    x = torch.empty(0, 16, device=DEVICE, requires_grad=True)
    for weight in weights:
        weight.requires_grad_()
    block(x, *weights).sum().backward()
    assert x.grad.shape == (0, 16)
    assert all(torch.equal(weight.grad, torch.zeros_like(weight)) for weight in weights)


def test_opcheck():
    inputs = tuple(tensor.requires_grad_() for tensor in case(torch.float32))
    torch.library.opcheck(torch.ops.vblackwell.feed_forward_block, (*inputs[:2], EPS, *inputs[2:], True))
    x, norm, *weights = [tensor.detach() for tensor in inputs]
    torch.library.opcheck(
        torch.ops.vblackwell.feed_forward_block_backward, (x, x, norm, EPS, *weights, [True, True, False, True, True])
    )


def test_refusals():
    x, norm, gate, up, down = case(torch.float32)
    with pytest.raises(ConfigurationError, match=r"weights \(16,\), \(24, 16\), \(24, 16\), \(24, 16\)"):
        block(x, norm, gate, up, down.t())
    with pytest.raises(ConfigurationError, match="do not fit"):
        block(x[..., :8], norm, gate, up, down)
    with pytest.raises(ConfigurationError, match="must match"):
        block(x, norm, gate, up.bfloat16(), down)


@pytest.mark.gpu
def test_memory_in_backward():
    """Three tensors of (M, I) at a time, of a chunk where that is more than `MAX_BYTES`."""
    width, inner = 256, 4096
    rows = 4 * module.MAX_BYTES // (2 * inner)
    x = normal(rows, width, dtype=torch.bfloat16).requires_grad_()
    norm = torch.ones(width, dtype=torch.bfloat16, device="cuda").requires_grad_()
    shapes = [(inner, width), (inner, width), (width, inner)]
    weights = [(normal(*shape, dtype=torch.bfloat16) / 16).requires_grad_() for shape in shapes]
    y = block(x, norm, *weights)
    dy = torch.ones_like(y)
    torch.cuda.synchronize()
    torch.cuda.reset_peak_memory_stats()
    before = torch.cuda.memory_allocated()
    y.backward(dy)
    gradients = rows * width * 2 + 3 * inner * width * 2
    narrow = 2 * rows // 4 * width * 2  # the norm's output and its gradient, of a chunk
    workspace = 40 << 20  # cuBLAS's
    assert torch.cuda.max_memory_allocated() - before <= 3 * module.MAX_BYTES + narrow + gradients + workspace
