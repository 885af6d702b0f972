"""Linear layers of one normalised input that keep the input alone."""

import pytest
import torch
from torch.nn import functional

from tests.kernels.pointwise.oracle import TOLERANCE, errors, normal, poisoned, results
from vblackwell.errors import ConfigurationError
from vblackwell.kernels.pointwise import normed_linears as module
from vblackwell.kernels.pointwise.normed_linears import normed_linears
from vblackwell.kernels.pointwise.rms_norm import rms_norm
from vblackwell.kernels.pointwise.shared_input import shared_input_linears
from vblackwell.kernels.runtime.registry import use_backend

EPS = 1e-5


def case(dtype: torch.dtype) -> list[torch.Tensor]:
    """x, the norm's weight, and three weights."""
    weights = [normal(n, 16, dtype=dtype, seed=n) / 4 for n in (8, 4, 12)]
    return [normal(3, 5, 16, dtype=dtype), 1 + normal(16, dtype=dtype, seed=8) / 4, *weights]


def together(x, norm, *weights):
    return normed_linears(x, norm, EPS, list(weights))


def plain(x, norm, *weights):
    n = functional.rms_norm(x, (16,), norm, EPS)
    return tuple(functional.linear(n, weight) for weight in weights)


def separately(x, norm, *weights):
    return shared_input_linears(rms_norm(x, norm, EPS), list(weights))


@pytest.mark.parametrize("dtype", TOLERANCE)
def test_against_float64(dtype):
    # the norm and each output are rounded, the input's gradient after each of three products and behind the norm
    assert max(errors(together, "rms_norm", case(dtype), plain)) <= 4 * TOLERANCE[dtype]


@pytest.mark.parametrize("dtype", TOLERANCE)
def test_bits_of_separate_operations(dtype):
    with use_backend("rms_norm", "triton"), poisoned():
        ours, apart = results(together, case(dtype)), results(separately, case(dtype))
    assert len(ours) == 3 + 5 and all(torch.equal(a, b) for a, b in zip(ours, apart, strict=True))


def test_it_keeps_its_arguments_and_no_more():
    inputs = [tensor.requires_grad_() for tensor in case(torch.float32)]
    kept = []
    with torch.autograd.graph.saved_tensors_hooks(lambda tensor: kept.append(tensor.shape), lambda _: None):
        together(*inputs)
    assert sorted(kept) == sorted(tensor.shape for tensor in inputs)


def test_gradients_that_nobody_wants():
    expected = results(together, case(torch.float32))[3:]
    for wanted in range(5):
        inputs = case(torch.float32)
        inputs[wanted].requires_grad_()
        outputs = together(*inputs)
        torch.autograd.backward(outputs, [normal(*y.shape, seed=100 + i) for i, y in enumerate(outputs)])
        for number, tensor in enumerate(inputs):
            assert (tensor.grad is not None) == (number == wanted)
        # `results` goes back from one output after the other, whose gradients are then added in another order
        torch.testing.assert_close(inputs[wanted].grad, expected[wanted], rtol=1e-5, atol=1e-5)


def test_opcheck():
    inputs = tuple(tensor.requires_grad_() for tensor in case(torch.float32))
    x, norm, *weights = inputs
    torch.library.opcheck(module._normed_linears, (x, norm, EPS, weights))
    x, norm, *weights = [tensor.detach() for tensor in inputs]
    dys = [normal(3, 5, n, seed=n) for n in (8, 4, 12)]
    needed = [True, True, True, False, True]
    torch.library.opcheck(module._normed_linears_backward, (dys, x, norm, EPS, weights, needed))


def test_refusals():
    x, norm, *weights = case(torch.float32)
    with pytest.raises(ConfigurationError, match="do not fit"):
        together(x, norm, weights[0].bfloat16())
    with pytest.raises(ConfigurationError, match="do not fit"):
        together(x, norm[:8], *weights)
    with pytest.raises(ConfigurationError, match="do not fit"):
        together(x, norm, weights[0][:, :8])
