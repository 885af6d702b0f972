"""``silu(gate) * up``."""

import pytest
import torch
from torch.nn import functional

from tests.kernels.pointwise.oracle import DEVICE, TOLERANCE, errors, normal, poisoned, relative
from vblackwell.errors import ConfigurationError
from vblackwell.kernels.pointwise import rows as module
from vblackwell.kernels.pointwise.rows import swiglu, swiglu_backward, swiglu_linear
from vblackwell.kernels.runtime.registry import use_backend

SHAPES = [(1,), (3, 7, 37), (2, 4099), (0, 5)]


@pytest.mark.each_value
@pytest.mark.parametrize("dtype", TOLERANCE)
@pytest.mark.parametrize("shape", SHAPES, ids=str)
def test_against_float64(shape, dtype):
    inputs = [normal(*shape, dtype=dtype) * 4, normal(*shape, dtype=dtype, seed=1)]
    assert max(errors(swiglu, "swiglu", inputs)) <= TOLERANCE[dtype]


@pytest.mark.parametrize("dtype", TOLERANCE)
def test_halves_of_one_tensor(dtype):
    inputs = [normal(5, 2, 266, dtype=dtype)]
    assert max(errors(lambda both: swiglu(*both.chunk(2, -1)), "swiglu", inputs)) <= TOLERANCE[dtype]


def test_more_rows_than_a_grid_takes(monkeypatch):
    from vblackwell.kernels.pointwise import rows_triton

    monkeypatch.setattr(rows_triton, "MAX_ROWS", 3)
    with poisoned():
        test_halves_of_one_tensor(torch.float32)
        gate, up = normal(10, 266).chunk(2, -1)
        product = swiglu_backward(torch.ones(1, 1, device=DEVICE).expand(10, 133), gate, up, True)[2]
    assert relative(product, functional.silu(gate.double()) * up) <= TOLERANCE[torch.float32]


@pytest.mark.gpu
def test_halves_of_very_many_rows():
    gate, up = normal(70_000, 32, dtype=torch.bfloat16).chunk(2, -1)
    assert torch.equal(swiglu(gate, up), swiglu(gate.contiguous(), up.contiguous()))


@pytest.mark.gpu
@pytest.mark.parametrize("dtype", TOLERANCE)
def test_full_size(dtype):
    test_against_float64((16384, 6912), dtype)


@pytest.mark.filterwarnings(
    "ignore:overflow encountered:RuntimeWarning"
)  # numpy's, in the interpreter; the result is right
def test_far_from_zero():
    """exp overflows and vanishes: silu is x or 0, its slope 1 or 0."""
    gate = torch.tensor([-1e4, -100.0, -88.0, 0.0, 88.0, 100.0, 1e4], device=DEVICE)
    inputs = [gate, torch.ones_like(gate)]
    with use_backend("swiglu", "triton"):
        got = swiglu(*inputs)
        dgate, _, _ = swiglu_backward(torch.ones_like(gate), *inputs, False)
    torch.testing.assert_close(got, functional.silu(gate), rtol=1e-6, atol=1e-30)
    torch.testing.assert_close(dgate[[0, 3, 6]], torch.tensor([0.0, 0.5, 1.0], device=DEVICE), rtol=1e-6, atol=1e-30)


def test_backward_gives_the_product_again():
    gate, up, dy = (normal(3, 50, dtype=torch.bfloat16, seed=seed) for seed in range(3))
    with use_backend("swiglu", "triton"), poisoned():
        forward = swiglu(gate, up)
        dgate, dup, product = swiglu_backward(dy, gate, up, True)
        without = swiglu_backward(dy, gate, up, False)
    assert torch.equal(product, forward)
    assert torch.equal(dgate, without[0]) and torch.equal(dup, without[1]) and without[2].numel() == 0
    assert relative(dup, dy.double() * functional.silu(gate.double())) <= TOLERANCE[torch.bfloat16]


@pytest.mark.parametrize("dtype", TOLERANCE)
def test_with_the_linear_after_it(dtype):
    inputs = [normal(3, 5, 37, dtype=dtype), normal(3, 5, 37, dtype=dtype, seed=1), normal(8, 37, dtype=dtype, seed=2)]
    plain = lambda gate, up, weight: (functional.silu(gate) * up) @ weight.t()  # noqa: E731
    fused = lambda gate, up, weight: swiglu_linear(gate, up, weight, True)  # noqa: E731
    # the product is rounded before it is multiplied, forward and backward, and the result again
    assert max(errors(fused, "swiglu", inputs, plain)) <= 2 * TOLERANCE[dtype]
    with use_backend("swiglu", "triton"):
        unwanted = swiglu_linear(*inputs, wanted=False)
        assert unwanted.shape == (3, 5, 8)
        kept = []
        with torch.autograd.graph.saved_tensors_hooks(lambda tensor: kept.append(tensor.shape), lambda _: None):
            fused(*(tensor.requires_grad_() for tensor in inputs))
    assert sorted(kept) == sorted(tensor.shape for tensor in inputs)


def test_opcheck_and_compile():
    gate, up = normal(3, 24).requires_grad_(), normal(3, 24, seed=1).requires_grad_()
    torch.library.opcheck(torch.ops.vblackwell.swiglu, (gate, up))
    torch.library.opcheck(torch.ops.vblackwell.swiglu_backward, (gate.detach(), gate.detach(), up.detach(), True))
    torch.library.opcheck(torch.ops.vblackwell.swiglu_linear, (gate, up, normal(5, 24, seed=2).requires_grad_(), True))
    compiled = torch.compile(lambda a, b: module._swiglu(a, b) * 3, fullgraph=True, backend="aot_eager")
    expected = torch.autograd.grad((module._swiglu(gate, up) * 3).sum(), (gate, up))
    for got, right in zip(torch.autograd.grad(compiled(gate, up).sum(), (gate, up)), expected, strict=True):
        assert torch.equal(got, right)


@pytest.mark.skipif(DEVICE == "cuda", reason="about the CPU")
def test_on_the_cpu_it_is_torch():
    gate, up = normal(3, 24), normal(3, 24, seed=1)
    assert torch.equal(swiglu(gate, up), functional.silu(gate) * up)


def test_refusals():
    with pytest.raises(ConfigurationError, match="must match"):
        swiglu(normal(3, 8), normal(3, 7))
    with pytest.raises(ConfigurationError, match="must match"):
        swiglu(normal(3, 8), normal(3, 8, dtype=torch.bfloat16))
    with pytest.raises(ConfigurationError, match="must match"):
        swiglu_linear(normal(3, 8), normal(3, 8), normal(5, 8, dtype=torch.bfloat16), True)
    with pytest.raises(ConfigurationError, match="do not fit"):
        swiglu_linear(normal(3, 8), normal(3, 8), normal(8, 5), True)
