"""Fused ops against their plain expression in float64: outputs and every gradient, unwritten memory
poisoned with NaN.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator
from contextlib import contextmanager
from typing import Any

import torch
from torch import Tensor

from vblackwell.kernels.runtime.registry import use_backend

# On a GPU the kernels are compiled; without one they run in Triton's interpreter (tests/conftest.py).
DEVICE = "cuda" if torch.cuda.is_available() else "cpu"
# Largest relative RMS error. Half types: one rounding, at most 2^-8 (bf16) or 2^-11 (fp16) of each value. fp32: sums of
# up to a few thousand terms in another order, each of 2^-24.
TOLERANCE = {
    torch.bfloat16: 2**-8,
    torch.float16: 2**-11,
    torch.float32: 2e-6,
}


def normal(*shape: int, dtype: torch.dtype = torch.float32, seed: int = 0) -> Tensor:
    """Standard normal values, the same on every device."""
    return torch.randn(*shape, generator=torch.Generator().manual_seed(seed)).to(DEVICE, dtype)


@contextmanager
def poisoned() -> Iterator[None]:
    """Inside, memory that nobody has written is NaN."""
    before = torch.are_deterministic_algorithms_enabled()
    torch.use_deterministic_algorithms(True, warn_only=True)
    try:
        yield
    finally:
        torch.use_deterministic_algorithms(before)


def results(function: Callable[..., Any], inputs: list[Tensor], dtype: torch.dtype | None = None) -> list[Tensor]:
    """Outputs and gradients of all floating-point inputs, for output gradients that depend on the shapes alone.

    Args:
        dtype: compute in this type instead, on the same values.
    """
    leaves = [
        x.detach().to(dtype if x.is_floating_point() else None).requires_grad_(x.is_floating_point()) for x in inputs
    ]
    narrow = inputs[0].dtype
    outputs = function(*leaves)
    outputs = outputs if isinstance(outputs, (tuple, list)) else [outputs]
    for index, output in enumerate(outputs):
        gradient = normal(*output.shape, dtype=narrow, seed=100 + index) if output.dim() else torch.ones_like(output)
        torch.autograd.backward(output, gradient.to(output.dtype), retain_graph=True)
    return [*(output.detach() for output in outputs), *(leaf.grad for leaf in leaves if leaf.grad is not None)]


def errors(
    function: Callable[..., Any], op: str, inputs: list[Tensor], plain: Callable[..., Any] | None = None
) -> list[float]:
    """Relative RMS errors of the Triton kernels, which must give equal bits twice; NaN counts as infinite."""
    with use_backend(op, "triton"), poisoned():
        got, again = results(function, inputs), results(function, inputs)
    assert all(torch.equal(a, b) for a, b in zip(got, again, strict=True)), "not repeatable"
    exact = results(plain or function, inputs, torch.float64)
    assert len(got) == len(exact)
    return [relative(a, b) for a, b in zip(got, exact, strict=True)]


def relative(got: Tensor, exact: Tensor) -> float:
    """Relative RMS error; NaN counts as infinite."""
    assert got.shape == exact.shape
    norm = exact.double().norm().item()
    error = (got.double() - exact.double()).norm().item() / (norm or 1.0)
    return error if error == error else float("inf")
