"""The feed-forward that keeps its input alone."""

import pytest
import torch
from torch.nn import functional

from tests.kernels.fused_oracle import DEVICE, TOLERANCE, errors, normal, poisoned, results
from vblackwell.errors import ConfigurationError
from vblackwell.kernels import gated_mlp as module
from vblackwell.kernels.dispatch import use_backend
from vblackwell.kernels.gated_mlp import gated_mlp
from vblackwell.kernels.shared_input import shared_input_linears
from vblackwell.kernels.swiglu import swiglu_linear


def case(dtype: torch.dtype) -> list[torch.Tensor]:
    weights = [normal(*shape, dtype=dtype, seed=seed) / 4 for seed, shape in enumerate([(24, 16), (24, 16), (16, 24)])]
    return [normal(3, 5, 16, dtype=dtype, seed=9), *weights]


def plain(x, gate, up, down):
    return functional.linear(functional.silu(functional.linear(x, gate)) * functional.linear(x, up), down)


def separately(x, gate, up, down):
    """As the decoder computes it where gates are kept."""
    return swiglu_linear(*shared_input_linears(x, [gate, up]), down)


def rows_at_a_time(monkeypatch, count):
    """Chunks of ``count`` of `case`'s 15 rows."""
    monkeypatch.setattr(module, "ROW_STEP", count)
    monkeypatch.setattr(module, "MOST_BYTES", 1)


def test_chunks_cover_all_rows():
    assert module._chunks(16384, 6912 * 2) == [slice(0, 16384)]
    assert module._chunks(32768, 11008 * 2) == [slice(0, 11008), slice(11008, 22016), slice(22016, 32768)]
    assert module._chunks(0, 64) == [slice(0, 0)]
    for rows in (1, 255, 100_001):
        found = module._chunks(rows, 30_000)
        assert [each.start for each in found] == [0, *(each.stop for each in found[:-1])] and found[-1].stop == rows


@pytest.mark.parametrize("dtype", TOLERANCE)
@pytest.mark.parametrize("chunk", [100, 4])
def test_against_float64(dtype, chunk, monkeypatch):
    rows_at_a_time(monkeypatch, chunk)
    # gate and up, the product, and the result are rounded one after the other; weights' gradients once a chunk, of four
    assert max(errors(gated_mlp, "swiglu", case(dtype), plain)) <= (4 if chunk == 100 else 6) * TOLERANCE[dtype]


@pytest.mark.parametrize("dtype", TOLERANCE)
def test_bits_of_separate_operations(dtype):
    with use_backend("swiglu", "triton"), poisoned():
        together, apart = results(gated_mlp, case(dtype)), results(separately, case(dtype))
    assert len(together) == 5 and all(torch.equal(a, b) for a, b in zip(together, apart, strict=True))


def test_it_keeps_its_arguments_and_no_more():
    inputs = [tensor.requires_grad_() for tensor in case(torch.float32)]
    kept = []
    with torch.autograd.graph.saved_tensors_hooks(lambda tensor: kept.append(tensor.shape), lambda _: None):
        unwanted = gated_mlp(*inputs, wanted=False)
    assert unwanted.shape == inputs[0].shape
    assert sorted(kept) == sorted(tensor.shape for tensor in inputs)


def test_gradients_that_nobody_wants(monkeypatch):
    rows_at_a_time(monkeypatch, 4)
    expected = results(gated_mlp, case(torch.float32))[1:]
    for wanted in range(4):
        inputs = case(torch.float32)
        inputs[wanted].requires_grad_()
        y = gated_mlp(*inputs)
        y.backward(normal(*y.shape, seed=100))  # the gradient that `results` gives
        for number, tensor in enumerate(inputs):
            assert (tensor.grad is not None) == (number == wanted)
        assert torch.equal(inputs[wanted].grad, expected[wanted])


def test_no_rows():
    _, *weights = case(torch.float32)
    x = torch.empty(0, 16, device=DEVICE, requires_grad=True)
    weights[0].requires_grad_()
    gated_mlp(x, *weights).sum().backward()
    assert x.grad.shape == (0, 16) and torch.equal(weights[0].grad, torch.zeros_like(weights[0]))


def test_opcheck():
    inputs = tuple(tensor.requires_grad_() for tensor in case(torch.float32))
    torch.library.opcheck(module._gated_mlp, (*inputs, True))
    detached = [tensor.detach() for tensor in inputs]
    torch.library.opcheck(module._gated_mlp_backward, (detached[0], *detached, [True, False, True, True]))


def test_refusals():
    x, gate, up, down = case(torch.float32)
    with pytest.raises(ConfigurationError, match=r"weights \(24, 16\), \(24, 16\) and \(24, 16\)"):
        gated_mlp(x, gate, up, down.t())
    with pytest.raises(ConfigurationError, match="do not fit"):
        gated_mlp(x[..., :8], gate, up, down)
    with pytest.raises(ConfigurationError, match="must match"):
        gated_mlp(x, gate, up.bfloat16(), down)


@pytest.mark.gpu
def test_memory_in_backward():
    """Three tensors of (M, I) at a time, of a chunk where that is more than `MOST_BYTES`."""
    width, inner = 256, 4096
    rows = 4 * module.MOST_BYTES // (2 * inner)
    x = normal(rows, width, dtype=torch.bfloat16).requires_grad_()
    shapes = [(inner, width), (inner, width), (width, inner)]
    weights = [(normal(*shape, dtype=torch.bfloat16) / 16).requires_grad_() for shape in shapes]
    y = gated_mlp(x, *weights)
    dy = torch.ones_like(y)
    torch.cuda.synchronize()
    torch.cuda.reset_peak_memory_stats()
    before = torch.cuda.memory_allocated()
    y.backward(dy)
    gradients = rows * width * 2 + 3 * inner * width * 2
    assert torch.cuda.max_memory_allocated() - before <= 3 * module.MOST_BYTES + gradients + (
        40 << 20
    )  # and cuBLAS's workspace
