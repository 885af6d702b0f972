"""Linear layers of one input."""

import pytest
import torch

from tests.kernels.pointwise.oracle import DEVICE, TOLERANCE, normal, relative, results
from vblackwell.errors import ConfigurationError
from vblackwell.kernels.pointwise import shared_input as module
from vblackwell.kernels.pointwise.shared_input import shared_input_linears
from vblackwell.kernels.pointwise.swiglu import swiglu_linear


def case(dtype: torch.dtype) -> list[torch.Tensor]:
    return [normal(3, 5, 16, dtype=dtype), *(normal(n, 16, dtype=dtype, seed=n) for n in (8, 4, 12))]


@pytest.mark.parametrize("dtype", TOLERANCE)
def test_against_float64(dtype):
    fused = lambda x, *weights: shared_input_linears(x, list(weights))  # noqa: E731
    got, exact = results(fused, case(dtype)), results(fused, case(dtype), torch.float64)
    assert len(got) == 3 + 4
    # outputs and weight gradients are rounded once, the input's gradient after each of three products
    assert max(relative(a, b) for a, b in zip(got, exact, strict=True)) <= 3 * TOLERANCE[dtype]


@pytest.mark.skipif(DEVICE == "cuda", reason="cuBLAS may add in another order where it starts from a sum")
def test_bits_of_separate_linears_in_the_forward():
    x, *weights = case(torch.float32)
    for got, weight in zip(shared_input_linears(x, weights), weights, strict=True):
        assert torch.equal(got, torch.nn.functional.linear(x, weight))


def test_gradients_that_nobody_wants():
    x, *weights = case(torch.float32)
    x.requires_grad_(), weights[1].requires_grad_()
    outputs = shared_input_linears(x, weights)
    (outputs[0].sum() + outputs[2].sum()).backward()
    assert weights[0].grad is None and weights[1].grad is None
    torch.testing.assert_close(x.grad, (weights[0].sum(0) + weights[2].sum(0)).expand_as(x), rtol=1e-5, atol=1e-5)


@pytest.mark.parametrize("rows", [(0,), (2, 0)])
def test_no_rows(rows):
    """An expert to whom no token goes."""
    x, w = (tensor.requires_grad_() for tensor in (normal(*rows, 16), normal(16, 16)))
    out = swiglu_linear(*shared_input_linears(x, [w, w]), w)
    out.sum().backward()
    assert out.shape == x.grad.shape == x.shape and not w.grad.any()


def test_opcheck_and_compile():
    x, *weights = (tensor.requires_grad_() for tensor in case(torch.float32))
    torch.library.opcheck(module._shared_input_linears, (x, weights))
    compiled = torch.compile(
        lambda *args: shared_input_linears(args[0], list(args[1:]))[1], fullgraph=True, backend="aot_eager"
    )
    expected = torch.autograd.grad(shared_input_linears(x, weights)[1].sum(), (x, weights[1]))
    got = torch.autograd.grad(compiled(x, *weights).sum(), (x, weights[1]))
    for a, b in zip(got, expected, strict=True):
        torch.testing.assert_close(
            a, b, rtol=1e-5, atol=1e-5
        )  # traced, a transposed operand may meet another matrix kernel


def test_refusals():
    x, *weights = case(torch.float32)
    with pytest.raises(ConfigurationError, match="do not fit"):
        shared_input_linears(x, [weights[0], normal(4, 15)])
    with pytest.raises(ConfigurationError, match="do not fit"):
        shared_input_linears(x, [weights[0].bfloat16()])
