"""nvfp4's encoder and its tiles as kernels: the oracle's bytes, for random weights, ties, zeros and extremes."""

from __future__ import annotations

import pytest
import torch

from tests.kernels.pointwise.oracle import DEVICE
from vblackwell.kernels.fp4.encode import LARGEST_EXPONENT, nvfp4_encoder
from vblackwell.kernels.runtime.registry import use_backend
from vblackwell.nn.linear.packed_linear import tiled
from vblackwell.numerics.formats import E2M1_VALUES, format_named
from vblackwell.numerics.fp4 import quantize
from vblackwell.numerics.packed import PackedTensor

ROWS = 40 if DEVICE == "cuda" else 14  # the interpreter takes a millisecond for a few blocks


def drawn(*shape: int, seed: int = 0) -> torch.Tensor:
    return torch.randn(*shape, generator=torch.Generator().manual_seed(seed))


def grid(rows: int) -> torch.Tensor:
    """Blocks that some scale holds exactly, and blocks all of whose elements lie between two values of some scale."""
    values, places = (
        torch.tensor(E2M1_VALUES),
        torch.randint(16, (rows, 16), generator=torch.Generator().manual_seed(1)),
    )
    scales = 2.0 ** torch.randint(-6, 3, (rows, 1), generator=torch.Generator().manual_seed(2)).float()
    exact = values[places] * scales * 1.125
    halves = (values[places].abs() + 0.25) * scales
    return torch.cat((exact, halves), 1)


def spread(rows: int) -> torch.Tensor:
    """Magnitudes from far below any scale to the largest."""
    return drawn(rows, 32, seed=3) * 10.0 ** (16 * drawn(rows, 32, seed=4).clamp(-2.3, 2.3))


def outliers(rows: int) -> torch.Tensor:
    """One element far above the rest, whose error decides how far down the search goes."""
    w = drawn(rows, 48, seed=5) * 1e-3
    w[:, ::16] = drawn(rows, 3, seed=6) * 40
    w[0] = 0.0
    w[1] = -0.0
    w[2, 1:] = 0.0
    return w


CASES = {
    "bf16": lambda: drawn(ROWS, 208).mul(0.02).bfloat16(),
    "fp32": lambda: drawn(9, 7 * 16 + 5, seed=7),  # a short last block
    "half": lambda: drawn(ROWS - 7, 64, seed=8).half(),
    "grid": lambda: grid(ROWS + 10),
    "spread": lambda: spread(ROWS),
    "outliers": lambda: outliers(ROWS),
    "equal": lambda: torch.full((4, 64), 0.3),
    "subnormal": lambda: drawn(8, 32, seed=9) * 1e-39,
    "large": lambda: drawn(8, 32, seed=10) * 1e35,
}


@pytest.mark.parametrize("case", CASES)
def test_the_bytes_are_those_of_the_oracle(case):
    w = CASES[case]().to(DEVICE)
    expected = quantize(w)
    called = []

    def encoder(*arguments):
        with use_backend("nvfp4_encode", "triton"):
            made = nvfp4_encoder(*arguments)
        called.append(made)
        return made

    got = quantize(w, encoder=encoder)
    assert called[0] is not None
    assert torch.equal(got.block_scales, expected.block_scales)
    assert torch.equal(got.codes, expected.codes)
    assert torch.equal(got.tensor_scale, expected.tensor_scale)


def test_what_the_kernel_leaves_to_the_oracle():
    w = drawn(2, 32)
    with use_backend("nvfp4_encode", "triton"):
        assert nvfp4_encoder(w.to(DEVICE), format_named("nvfp4"), "max", 0) is None
        assert nvfp4_encoder(w.to(DEVICE), format_named("mxfp4"), "mse", 0) is None
        assert nvfp4_encoder(w.to(DEVICE), format_named("nvfp4"), "mse", LARGEST_EXPONENT + 1) is None
    assert nvfp4_encoder(w, format_named("nvfp4"), "mse", 0) is None  # on the CPU the oracle is the faster one
    assert torch.equal(quantize(w * 1e37, encoder=nvfp4_encoder).codes, quantize(w * 1e37).codes)


@pytest.mark.parametrize(("n", "k"), [(32, 64), (45, 208), (70, 23), (3, 130)])
def test_tiles_are_those_of_torch(n, k):
    packed = quantize(drawn(n, k, seed=n) * torch.exp(drawn(n, 1, seed=k) * 4))
    scales = packed.block_scales.clone()
    scales.view(-1)[:127] = torch.arange(min(127, scales.numel()), dtype=torch.uint8)  # every scale, zero among them
    packed = PackedTensor(packed.form, packed.shape, packed.dtype, packed.codes, scales, packed.tensor_scale).to(DEVICE)
    with use_backend("nvfp4_tile", "torch"):
        expected = tiled(packed)
    with use_backend("nvfp4_tile", "triton"):
        got = tiled(packed)
    assert got.layout == expected.layout and torch.equal(got.tensor_scale, expected.tensor_scale)
    assert torch.equal(got.codes, expected.codes) and torch.equal(got.scales, expected.scales)
