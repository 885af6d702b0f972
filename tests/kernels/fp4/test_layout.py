"""The tiled layout: what it stores is what it was given, and the kernels' decode finds it."""

import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st

from vblackwell.errors import ConfigurationError, Unsupported
from vblackwell.kernels.fp4 import layout, reference
from vblackwell.numerics.formats import FORMATS

MASK, PAIR_3_MULTIPLIER = 0x81C081C0, (1 << 2) + (1 << 7) + (1 << 12)


def test_decode_of_a_word_finds_all_eight_codes():
    """The eight operations of cuda/decode.cuh in Python, on every code in every place and on random words."""
    codes = torch.stack([torch.full((8,), code) for code in range(16)]).to(torch.uint8)
    codes = torch.cat([codes, torch.randint(0, 16, (1000, 8), dtype=torch.uint8)])
    words = layout.pack_words(codes, layout.WORD_FIELDS).to(torch.int64) & 0xFFFFFFFF
    pairs = [((words << by) | (words >> (32 - by))) & 0xFFFFFFFF & MASK for by in layout.PAIR_ROTATIONS]
    pairs.append(((words & 0x001B001B) * PAIR_3_MULTIPLIER) & MASK)
    for code in range(8):
        half = (pairs[code // 2] >> (16 * (code % 2))) & 0xFFFF
        assert torch.equal(((half >> 6) & 7) | ((half >> 15) << 3), codes[:, code].to(torch.int64))
    for fields in (layout.WORD_FIELDS, layout.FINE_FIELDS):
        assert torch.equal(layout.unpack_words(layout.pack_words(codes, fields), fields), codes)


@settings(max_examples=25, deadline=None)
@given(st.sampled_from(["nvfp4", "mxfp4"]), st.integers(1, 70), st.integers(1, 150), st.integers(0, 2**32))
def test_round_trip(format, n, k, seed):
    generator = torch.Generator().manual_seed(seed)
    form = FORMATS[format]
    codes = torch.randint(0, 256, form.codes_shape(n, k), dtype=torch.uint8, generator=generator)
    low, high = (0, 127) if format == "nvfp4" else (100, 118)
    scales = torch.randint(low, high, form.scales_shape(n, k), dtype=torch.uint8, generator=generator)
    scale = torch.tensor(0.37 if format == "nvfp4" else 1.0)
    tiled = layout.to_tiled(codes, scales, scale, format, n, k)
    back_codes, back_scales, back_scale = layout.from_tiled(*tiled, format + "-tiled", n, k)
    assert torch.equal(back_scale, scale)
    unpacked = torch.stack((codes & 15, codes >> 4), dim=-1).view(n, scales.shape[1], -1)
    live = (unpacked & 7).amax(-1) > 0 if format == "mxfp4" else scales > 0
    assert torch.equal(back_scales[live], scales[live])
    blocks = torch.where(live[..., None], unpacked, 0) if format == "nvfp4" else unpacked
    if format == "nvfp4":
        packed = blocks.view(n, -1)
        assert torch.equal(back_codes, packed[:, ::2] | (packed[:, 1::2] << 4))
    w = reference.dequantize(codes, scales, scale, format, n, k)
    assert torch.equal(reference.dequantize(*tiled, format + "-tiled", n, k), w)


def test_every_e4m3_scale_times_every_code():
    codes = torch.tensor([[0x10, 0x32, 0x54, 0x76, 0x98, 0xBA, 0xDC, 0xFE]], dtype=torch.uint8).repeat(127, 1)
    scales = torch.arange(127, dtype=torch.uint8)[:, None]
    tiled = layout.to_tiled(codes, scales, torch.tensor(1.0), "nvfp4", 127, 16)
    expected = torch.tensor(FORMATS["nvfp4"].values) * scales.view(torch.float8_e4m3fn).float()
    assert torch.equal(reference.dequantize(*tiled, "nvfp4-tiled", 127, 16), expected)


def test_bits_a_weight():
    code_shape, scale_shape = layout.shapes("nvfp4-tiled", 4096, 4096)
    bits = 8 * (torch.Size(code_shape).numel() + torch.Size(scale_shape).numel())
    assert bits == 4.5 * 4096 * 4096


def test_an_mxfp4_block_of_zeros_does_not_widen_the_span():
    codes = torch.full((1, 32), 0x11, dtype=torch.uint8)
    codes[:, 16:] = 0
    scales = torch.tensor([[127, 0]], dtype=torch.uint8)
    tiled = layout.to_tiled(codes, scales, torch.tensor(1.0), "mxfp4", 1, 64)
    assert torch.equal(
        reference.dequantize(*tiled, "mxfp4-tiled", 1, 64),
        reference.dequantize(codes, scales, tiled[2] * 0 + 1, "mxfp4", 1, 64),
    )


def test_refusals():
    codes = torch.full((1, 32), 0x11, dtype=torch.uint8)
    one = torch.tensor(1.0)
    with pytest.raises(Unsupported, match=r"span 2\^18"):
        layout.to_tiled(codes, torch.tensor([[127, 109]], dtype=torch.uint8), one, "mxfp4", 1, 64)
    with pytest.raises(Unsupported, match="NaN"):
        layout.to_tiled(codes, torch.tensor([[127, 255]], dtype=torch.uint8), one, "mxfp4", 1, 64)
    with pytest.raises(Unsupported, match="NaN"):
        layout.to_tiled(codes, torch.full((1, 4), 0x7F, dtype=torch.uint8), one, "nvfp4", 1, 64)
    with pytest.raises(ConfigurationError, match="do not belong"):
        layout.to_tiled(codes, torch.zeros(1, 4, dtype=torch.uint8), one, "nvfp4", 1, 80)
    with pytest.raises(ConfigurationError, match="nf4"):
        layout.tiled_name("nf4")
