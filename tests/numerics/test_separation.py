"""Weights in two parts: levels, signal to noise, kept scales, and what is refused."""

from dataclasses import replace
from fractions import Fraction

import pytest
import torch

from tests.kernels.pointwise.oracle import DEVICE
from tests.sqnr import sqnr
from vblackwell.errors import ConfigurationError, CorruptData
from vblackwell.kernels.fp4.two_part_round import two_part_round_trip
from vblackwell.memory.cache.stack import VGPUStack
from vblackwell.numerics.fp4 import quantize
from vblackwell.numerics.packed import PackedTensor, unpack_nibbles
from vblackwell.numerics.rounding import decode_scales
from vblackwell.numerics.separation import (
    FORM,
    refine,
    renewed_scales,
    round_to_parts,
    separate,
    training_scales,
)

E2M1 = [Fraction(value) for value in ("0", "1/2", "1", "3/2", "2", "3", "4", "6")]


def gaussian(n: int, k: int, seed: int = 0) -> torch.Tensor:
    return torch.randn(n, k, generator=torch.Generator().manual_seed(seed)) * 0.02


def test_signal_to_noise_and_bits():
    """The floor of 43 dB, above int8 by rows; the coarse part is nvfp4's own, byte for byte."""
    w_NK = gaussian(256, 1024)
    separated, coarse = separate(w_NK), quantize(w_NK, "nvfp4")
    assert sqnr(w_NK, separated.dequantize()) >= 43
    assert sqnr(w_NK, separated.dequantize()) > sqnr(w_NK, quantize(w_NK, "int8", "max").dequantize()) + 1
    for name, tensor in coarse.tensors().items():
        assert torch.equal(tensor, separated.coarse.tensors()[name])
    assert 8 * separated.nbytes / w_NK.numel() == pytest.approx(8.5, abs=0.001)


@pytest.mark.parametrize("search", ["mse", "max"])
def test_fine_codes_are_the_nearest_levels_of_their_cell(search):
    """Against rational arithmetic over all 16 levels: a code's cell, steps of a sixteenth of the gap to either side."""
    w_NK = gaussian(3, 40, seed=1)
    separated = separate(w_NK, search)
    coarse, decoded = separated.coarse, separated.dequantize(torch.float32)
    codes = unpack_nibbles(coarse.codes)
    scales = decode_scales(coarse.block_scales, FORM).repeat_interleave(16, 1)
    for row in range(3):
        for column in range(40):
            code, scale = (
                int(codes[row, column]),
                Fraction(float(scales[row, column])) * Fraction(float(coarse.tensor_scale)),
            )
            sign = -1 if code & 8 else 1
            m = code & 7
            value = E2M1[m]
            up = (E2M1[m + 1] if m < 7 else Fraction(8)) - value
            down = value - E2M1[m - 1] if m else Fraction(0)
            levels = [
                value + Fraction(j, 16) * (up if j >= 0 else down) for j in (range(0, 8) if m == 0 else range(-8, 8))
            ]
            best = min(abs(Fraction(float(w_NK[row, column])) - sign * level * scale) for level in levels)
            ours = abs(Fraction(float(w_NK[row, column])) - Fraction(float(decoded[row, column])))
            assert ours <= best + abs(Fraction(float(decoded[row, column]))) * Fraction(1, 2**23)


def test_what_nvfp4_holds_stays_exact():
    packed = quantize(gaussian(16, 50), "nvfp4")
    exact = packed.dequantize()
    assert torch.equal(separate(exact).dequantize(), exact)
    assert bool((refine(packed, exact).fine == 0x88).all())
    assert torch.equal(separate(torch.zeros(3, 20)).dequantize(), torch.zeros(3, 20))


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16, torch.float16])
def test_shapes_dtypes_and_storage(dtype):
    w = gaussian(6, 35).view(2, 3, 35).to(dtype)
    separated = separate(w)
    assert separated.dequantize().dtype == dtype and separated.dequantize().shape == w.shape
    again = PackedTensor.from_tensors(separated.tensors(), separated.meta())
    assert torch.equal(again.dequantize(), separated.dequantize())
    with VGPUStack({"levels": [{"capacity_mb": 1, "device": "cpu"}, {"capacity_mb": 1, "device": "cpu"}]}) as stack:
        stack.register("coarse", separated.coarse, priority=9)  # resident, the fine part below
        stack.register("fine", separated.fine, priority=5)
        assert (stack.level_of("coarse"), stack.level_of("fine")) == (0, 1)
        joined = replace(stack.access("coarse"), fine=stack.access("fine"))
        assert torch.equal(joined.dequantize(), separated.dequantize())


def test_parts_that_do_not_belong_together_are_refused():
    separated = separate(gaussian(4, 32))
    with pytest.raises(CorruptData, match="without its fine part"):
        PackedTensor.from_tensors(separated.coarse.tensors(), separated.meta())
    with pytest.raises(CorruptData, match="expected torch.uint8"):
        replace(separated, fine=separated.fine[:2]).check()
    with pytest.raises(ConfigurationError, match="refines nvfp4 only"):
        replace(quantize(gaussian(4, 32), "mxfp4"), fine=separated.fine).check()
    with pytest.raises(ConfigurationError, match="inf or NaN"):
        separate(torch.tensor([[1.0, torch.inf]]))
    with pytest.raises(ConfigurationError, match="cannot be refined"):
        refine(separated.coarse, gaussian(4, 16))


@pytest.mark.parametrize("shape", [(5, 3), (7, 50), (3, 4099)], ids=str)
def test_training_rounds_to_the_nearest_number_of_all(shape):
    """No further from the weight than coarse and fine codes on the same scales, whose coarse code is rounded first."""
    w_NK = gaussian(*shape)
    scales, separated = training_scales(w_NK), separate(w_NK, "max")
    assert torch.equal(scales.block, separated.coarse.block_scales)
    rounded = round_to_parts(w_NK, scales, torch.float32)
    errors = [(other - w_NK).abs() for other in (rounded, separated.dequantize())]
    # fp32 quotients decide here and fp64 ones there: they differ by at most 2^-24 of a weight, at ties.
    assert bool((errors[0] <= errors[1] + w_NK.abs() * 2**-23).all())
    op = two_part_round_trip(w_NK.to(DEVICE), scales.block.to(DEVICE), scales.tensor.to(DEVICE), torch.float32)
    assert torch.equal(op.cpu(), rounded)


def test_scales_are_renewed_past_the_threshold_only():
    w_NK = gaussian(64, 256)
    kept = training_scales(w_NK)
    same, drift = renewed_scales(w_NK * 1.02, kept, 0.05)
    assert torch.equal(same.block, kept.block) and 0.015 < float(drift) < 0.05
    fresh, drift = renewed_scales(w_NK * 1.2, kept, 0.05)
    assert 0.15 < float(drift) < 0.25 and torch.equal(fresh.block, training_scales(w_NK * 1.2).block)
    assert sqnr(w_NK * 1.02, round_to_parts(w_NK * 1.02, kept, torch.float32)) >= 43
    poisoned, _ = renewed_scales(torch.full((1, 16), torch.nan), training_scales(torch.ones(1, 16)), 0.05)
    assert bool(round_to_parts(torch.ones(1, 16), poisoned, torch.float32).isnan().all())  # shown, never hidden


def test_no_limit_of_elements():
    """Beyond what `torch.quantile` takes, 2^24; of zeros, whose pages cost nothing."""
    w_NK = torch.zeros(1, (1 << 24) + 16, dtype=torch.bfloat16)
    w_NK[0, -1] = 3.0
    assert float(round_to_parts(w_NK[:, -32:], training_scales(w_NK[:, -32:]), torch.float32)[0, -1]) == pytest.approx(
        3, rel=0.02
    )
    assert training_scales(w_NK).block.shape == (1, (1 << 20) + 1)
