"""RMSNorm, alone and after an addition."""

import pytest
import torch
from torch.nn import functional
from torch.utils.checkpoint import checkpoint

from tests.kernels.pointwise.oracle import DEVICE, TOLERANCE, errors, normal, poisoned
from vblackwell.errors import ConfigurationError, Unsupported
from vblackwell.kernels.pointwise import rows as module
from vblackwell.kernels.pointwise.rows import add_rms_norm, rms_norm
from vblackwell.kernels.runtime.registry import use_backend

EPS = 1e-5
SHAPES = [(1, 3), (3, 7, 37), (5, 128), (2, 4096), (33, 100), (0, 16)]
DTYPES = list(TOLERANCE)


@pytest.mark.each_value
@pytest.mark.parametrize("dtype", DTYPES)
@pytest.mark.parametrize("shape", SHAPES, ids=str)
def test_against_float64(shape, dtype):
    inputs = [normal(*shape, dtype=dtype), normal(shape[-1], dtype=dtype, seed=1)]
    assert max(errors(lambda x, w: rms_norm(x, w, EPS), "rms_norm", inputs)) <= TOLERANCE[dtype]


@pytest.mark.gpu
@pytest.mark.parametrize("dtype", DTYPES)
@pytest.mark.parametrize("shape", [(16384, 2560), (1000, 8192), (3, 65536), (100_000, 128), (70_001, 64)], ids=str)
def test_against_float64_at_full_size(shape, dtype):
    test_against_float64(shape, dtype)
    test_sum_against_float64(shape, dtype)


@pytest.mark.each_value
@pytest.mark.parametrize("dtype", DTYPES)
@pytest.mark.parametrize("shape", SHAPES, ids=str)
def test_sum_against_float64(shape, dtype):
    inputs = [normal(*shape, dtype=dtype), normal(*shape, dtype=dtype, seed=2), normal(shape[-1], dtype=dtype, seed=1)]

    def plain(x, residual, w):
        total = x + residual
        total = total + (total.to(dtype).double() - total).detach()  # rounded as the plain addition rounds
        return functional.rms_norm(total, w.shape, w, EPS), total

    assert max(errors(lambda x, r, w: add_rms_norm(x, r, w, EPS), "rms_norm", inputs, plain)) <= TOLERANCE[dtype]


def test_many_rows_meet_in_the_weights_gradient(monkeypatch):
    """More rows than programs, both ways: each sums several tiles, and the last program's are partly beyond the end."""
    from vblackwell.kernels.pointwise import rows_triton

    monkeypatch.setattr(rows_triton, "BACKWARD_PROGRAMS", 3)
    monkeypatch.setattr(rows_triton, "FORWARD_PROGRAMS", 5)
    assert rows_triton.tiles_of(12, 3) == (4, 3) and rows_triton.tiles_of(12, 5) == (3, 4)
    inputs = [normal(2 * 11 + 1, 2048), normal(2048, seed=1)]
    assert max(errors(lambda x, w: rms_norm(x, w, EPS), "rms_norm", inputs)) <= TOLERANCE[torch.float32]


def test_types_promote_and_strides_are_taken():
    x, w = normal(4, 6, 24, dtype=torch.bfloat16), normal(24, seed=1)
    with use_backend("rms_norm", "triton"):
        y = rms_norm(x.transpose(0, 1), w, EPS)
    assert y.dtype == torch.float32 and y.shape == (6, 4, 24)
    torch.testing.assert_close(y, functional.rms_norm(x.float().transpose(0, 1), (24,), w, EPS), rtol=1e-6, atol=1e-6)


@pytest.mark.parametrize("frozen", ["input", "weight"])
def test_gradients_that_nobody_wants(frozen):
    x, w = normal(3, 8).requires_grad_(frozen != "input"), normal(8, seed=1).requires_grad_(frozen != "weight")
    with use_backend("rms_norm", "triton"):
        y, total = add_rms_norm(x, x.detach(), w, EPS)
        (total.sum() if frozen == "weight" else y.sum()).backward()
    if frozen == "weight":
        assert w.grad is None and torch.equal(x.grad, torch.ones_like(x))
    else:
        assert x.grad is None and w.grad is not None


def test_checkpoint_and_saved_tensor_hooks_change_no_bit():
    grads = []
    for through in (lambda f, *args: f(*args), lambda f, *args: checkpoint(f, *args, use_reentrant=False)):
        x, w = normal(5, 16).requires_grad_(), normal(16, seed=1).requires_grad_()
        hooks = torch.autograd.graph.saved_tensors_hooks(lambda tensor: tensor.clone(), lambda tensor: tensor)
        with use_backend("rms_norm", "triton"), hooks, poisoned():
            y, total = through(lambda a, b: add_rms_norm(a, a * 2, b, EPS), x, w)
            (y.square().sum() + total.sum()).backward()
        grads.append((x.grad, w.grad))
    assert all(torch.equal(a, b) for a, b in zip(*grads, strict=True))


def test_opcheck_and_compile():
    x, w = normal(3, 24).requires_grad_(), normal(24, seed=1).requires_grad_()
    torch.library.opcheck(torch.ops.vblackwell.rms_norm, (x, None, w, EPS))
    torch.library.opcheck(torch.ops.vblackwell.rms_norm, (x, x.detach(), w, EPS))
    compiled = torch.compile(
        lambda a, b: module._rms_norm(a, a * 2, b, EPS)[0] * 3, fullgraph=True, backend="aot_eager"
    )
    expected = torch.autograd.grad((module._rms_norm(x, x * 2, w, EPS)[0] * 3).sum(), (x, w))
    for got, right in zip(torch.autograd.grad(compiled(x, w).sum(), (x, w)), expected, strict=True):
        assert torch.equal(got, right)


@pytest.mark.skipif(DEVICE == "cuda", reason="about the CPU")
def test_on_the_cpu_it_is_torch():
    x, w = normal(3, 24), normal(24, seed=1)
    assert torch.equal(rms_norm(x, w, EPS), functional.rms_norm(x, (24,), w, EPS))
    with use_backend("rms_norm", "triton"), pytest.raises(Unsupported, match="float64"):
        rms_norm(x.double(), w.double(), EPS)


def test_refusals():
    with pytest.raises(ConfigurationError, match="weight of"):
        rms_norm(normal(3, 8), normal(7), EPS)
    with pytest.raises(ConfigurationError, match="residual"):
        add_rms_norm(normal(3, 8), normal(1, 8), normal(8), EPS)
