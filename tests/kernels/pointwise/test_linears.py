"""Linear layers of one input; and of one normalised input, that keep the input alone."""

import pytest
import torch
from torch.nn import functional

from tests.kernels.pointwise.oracle import DEVICE, TOLERANCE, errors, normal, poisoned, relative, results
from vblackwell.errors import ConfigurationError
from vblackwell.kernels.pointwise import linears as module
from vblackwell.kernels.pointwise.linears import normed_linears, shared_input_linears
from vblackwell.kernels.pointwise.rows import rms_norm, swiglu_linear
from vblackwell.kernels.runtime.registry import use_backend

EPS = 1e-5


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
    out = swiglu_linear(*shared_input_linears(x, [w, w]), w, True)
    out.sum().backward()
    assert out.shape == x.grad.shape == x.shape and not w.grad.any()


def test_opcheck_and_compile():
    x, *weights = (tensor.requires_grad_() for tensor in case(torch.float32))
    torch.library.opcheck(module.shared_input_linears, (x, weights))
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


# -- of one normalised input -------------------------------------------------------------------------------------------


def normed_case(dtype: torch.dtype) -> list[torch.Tensor]:
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
def test_normed_against_float64(dtype):
    # the norm and each output are rounded, the input's gradient after each of three products and after the norm
    assert max(errors(together, "rms_norm", normed_case(dtype), plain)) <= 4 * TOLERANCE[dtype]


@pytest.mark.parametrize("dtype", TOLERANCE)
def test_bits_of_separate_operations(dtype):
    with use_backend("rms_norm", "triton"), poisoned():
        ours, apart = results(together, normed_case(dtype)), results(separately, normed_case(dtype))
    assert len(ours) == 3 + 5 and all(torch.equal(a, b) for a, b in zip(ours, apart, strict=True))


def test_it_keeps_its_arguments_and_no_more():
    inputs = [tensor.requires_grad_() for tensor in normed_case(torch.float32)]
    kept = []
    with torch.autograd.graph.saved_tensors_hooks(lambda tensor: kept.append(tensor.shape), lambda _: None):
        together(*inputs)
    assert sorted(kept) == sorted(tensor.shape for tensor in inputs)


def test_gradients_that_nobody_wants_of_normed():
    expected = results(together, normed_case(torch.float32))[3:]
    for wanted in range(5):
        inputs = normed_case(torch.float32)
        inputs[wanted].requires_grad_()
        outputs = together(*inputs)
        torch.autograd.backward(outputs, [normal(*y.shape, seed=100 + i) for i, y in enumerate(outputs)])
        for number, tensor in enumerate(inputs):
            assert (tensor.grad is not None) == (number == wanted)
        # `results` goes back from one output after the other, whose gradients are then added in another order
        torch.testing.assert_close(inputs[wanted].grad, expected[wanted], rtol=1e-5, atol=1e-5)


def test_opcheck_of_normed():
    inputs = tuple(tensor.requires_grad_() for tensor in normed_case(torch.float32))
    x, norm, *weights = inputs
    torch.library.opcheck(module.normed_linears, (x, norm, EPS, weights))
    x, norm, *weights = [tensor.detach() for tensor in inputs]
    dys = [normal(3, 5, n, seed=n) for n in (8, 4, 12)]
    needed = [True, True, True, False, True]
    torch.library.opcheck(module._normed_linears_backward, (dys, x, norm, EPS, weights, needed))


def test_refusals_of_normed():
    x, norm, *weights = normed_case(torch.float32)
    with pytest.raises(ConfigurationError, match="do not fit"):
        together(x, norm, weights[0].bfloat16())
    with pytest.raises(ConfigurationError, match="do not fit"):
        together(x, norm[:8], *weights)
    with pytest.raises(ConfigurationError, match="do not fit"):
        together(x, norm, weights[0][:, :8])
