"""What codecs guarantee beyond rounding: shapes, accuracy, memory, joint scales, storage and what is refused."""

import json

import pytest
import torch

import vblackwell
from tests.sqnr import sqnr
from vblackwell.errors import ConfigurationError, CorruptData, Unsupported
from vblackwell.kernels.fp4 import encode
from vblackwell.kernels.fp4.encode import FP4Codec
from vblackwell.numerics import fp4
from vblackwell.numerics.formats import FORMATS
from vblackwell.numerics.fp4 import joint_tensor_scale, quantize
from vblackwell.numerics.packed import PackedTensor, pack_nibbles, unpack_nibbles

ALL = list(FORMATS)


def gaussian(*shape, seed=0):
    return torch.randn(shape, generator=torch.Generator().manual_seed(seed))


def laplace(*shape):
    """Difference of two exponentials."""
    u = torch.rand(2, *shape, generator=torch.Generator().manual_seed(1)).clamp_min(1e-7)
    return u[0].log() - u[1].log()


# The floors are those of the published project goals; 256 x 1024 samples put the sampling error near 0.03 dB.
@pytest.mark.parametrize(
    ("format", "search", "gaussian_floor", "laplace_floor"),
    [
        ("nvfp4", "mse", 21.6, 21.5),
        ("nvfp4", "max", 20.3, 20.5),
        ("mxfp4", "mse", 18.9, 18.1),
        ("nf4", "max", 20.6, 19.6),
        ("nf4", "mse", 20.6, 19.6),
    ],
)
def test_accuracy_in_decibels(format, search, gaussian_floor, laplace_floor):
    for w, floor in ((gaussian(256, 1024), gaussian_floor), (laplace(256, 1024), laplace_floor)):
        assert sqnr(w, quantize(w, format, search).dequantize()) >= floor


@pytest.mark.parametrize("format", ALL)
def test_any_shape_with_padding_never_seen(format):
    codec = FP4Codec(format)
    for shape in ((), (1,), (5,), (3, 7), (2, 3, 33), (4, 64), (1, 129), (65, 1)):
        w = gaussian(*shape, seed=3)
        codes, scale = codec.encode(w)
        decoded = codec.decode(codes, scale)
        assert decoded.shape == w.shape and decoded.dtype == w.dtype
        rows = w.reshape(-1, w.shape[-1] if w.ndim else 1)
        alone = torch.cat([quantize(row, format, tensor_scale=_ts(format, scale)).dequantize() for row in rows])
        assert torch.equal(decoded.flatten(), alone.flatten()), "a row does not depend on its neighbours"


def _ts(format, scale):
    return scale.tensor_scale if format == "nvfp4" else None


@pytest.mark.parametrize("format", ALL)
@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16, torch.float16])
def test_dtype_is_kept_and_values_are_those_of_the_float32_encoder(format, dtype):
    w = gaussian(8, 96).to(dtype)
    packed = quantize(w, format)
    assert packed.dequantize().dtype == dtype
    exact = quantize(w.float(), format).dequantize()
    assert torch.equal(packed.dequantize(torch.float32), exact)
    assert torch.equal(packed.dequantize(), exact.to(dtype))


def test_searched_nvfp4_is_exact_in_bfloat16():
    packed = quantize(gaussian(64, 256), "nvfp4", "mse")
    assert torch.equal(packed.dequantize(torch.bfloat16).float(), packed.dequantize(torch.float32))


@pytest.mark.parametrize("format", ALL)
def test_views_encode_like_copies(format):
    """Strides and autograd change nothing."""
    w = gaussian(96, 80)
    assert torch.equal(quantize(w.t(), format).codes, quantize(w.t().contiguous(), format).codes)
    assert torch.equal(quantize(w, format).codes, quantize(w.clone().requires_grad_(), format).codes)


@pytest.mark.each_value
@pytest.mark.parametrize("format", ALL)
@pytest.mark.parametrize("search", ["max", "mse"])
def test_tiles_change_no_bit(format, search, monkeypatch):
    w = gaussian(37, 210)
    whole = quantize(w, format, search)
    monkeypatch.setattr(fp4, "_CPU_TILE_ELEMENTS", 100)  # less than a row: cuts along both dimensions
    tiled = quantize(w, format, search)
    assert torch.equal(tiled.codes, whole.codes)
    assert torch.equal(tiled.block_scales, whole.block_scales)


@pytest.mark.parametrize(
    ("format", "bits"), [("nvfp4", 4.5), ("mxfp4", 4.25), ("nf4", 4.5), ("int4", 4.5), ("int8", 8.1)]
)
def test_bits_a_weight(format, bits):
    assert 8 * quantize(gaussian(64, 512), format).nbytes / (64 * 512) <= bits + 0.01


def test_block_sizes():
    w = gaussian(4, 256)
    assert quantize(w, "int4", block_size=128).block_scales.shape == (4, 2)
    assert quantize(w, "int8").block_scales.shape == (4, 1)
    assert quantize(w, "int8", block_size=64).block_scales.shape == (4, 4)
    for format, size in (("nvfp4", 32), ("int4", 48), ("int8", 3), ("int8", -2)):
        with pytest.raises(ConfigurationError, match="block"):
            quantize(w, format, block_size=size)


@pytest.mark.parametrize("search", ["max", "mse"])
def test_fused_projections_share_a_tensor_scale(search):
    q, k = gaussian(16, 64), gaussian(8, 64, seed=1) * 300
    scale = joint_tensor_scale([q, k], "nvfp4", search)
    joined = quantize(torch.cat([q, k]), "nvfp4", search)
    parts = [quantize(w, "nvfp4", search, tensor_scale=scale) for w in (q, k)]
    assert torch.equal(scale, joined.tensor_scale)
    assert torch.equal(torch.cat([part.codes for part in parts]), joined.codes)
    assert torch.equal(torch.cat([part.block_scales for part in parts]), joined.block_scales)


def test_zero_tensor_stays_zero():
    for format in ALL:
        for search in ("max", "mse"):
            assert torch.equal(quantize(torch.zeros(3, 70), format, search).dequantize(), torch.zeros(3, 70))


def test_nibbles_low_first():
    codes = torch.tensor([[1, 2, 15, 0]], dtype=torch.uint8)
    assert pack_nibbles(codes).tolist() == [[0x21, 0x0F]]
    assert torch.equal(unpack_nibbles(pack_nibbles(codes)), codes)


@pytest.mark.parametrize("format", ALL)
def test_stored_tensors_and_meta_are_everything(format):
    w = gaussian(2, 5, 40).bfloat16()
    packed = quantize(w, format)
    again = PackedTensor.from_tensors(packed.tensors(), json.loads(json.dumps(packed.meta())))
    assert torch.equal(again.dequantize(), packed.dequantize())
    assert again.shape == (2, 5, 40) and again.format == format and again.nbytes == packed.nbytes
    assert packed.to("cpu") is packed


def test_damaged_or_foreign_storage_is_refused():
    packed = quantize(gaussian(4, 32), "nvfp4")
    with pytest.raises(Unsupported, match="version 2"):
        PackedTensor.from_tensors(packed.tensors(), packed.meta() | {"version": 2})
    with pytest.raises(ConfigurationError, match="fp3"):
        PackedTensor.from_tensors(packed.tensors(), packed.meta() | {"format": "fp3"})
    with pytest.raises(CorruptData, match="codes is"):
        PackedTensor.from_tensors(packed.tensors(), packed.meta() | {"shape": [4, 64]})
    with pytest.raises(CorruptData, match="block_scales is"):
        PackedTensor.from_tensors(packed.tensors() | {"block_scales": packed.codes}, packed.meta())
    with pytest.raises(CorruptData, match="block_size"):
        PackedTensor.from_tensors(packed.tensors(), {"version": 1, "format": "nvfp4"})
    with pytest.raises(CorruptData, match="tensor_scale"):
        PackedTensor.from_tensors({"codes": packed.codes, "block_scales": packed.block_scales}, packed.meta())


@pytest.mark.parametrize(
    ("tensor", "words"),
    [
        (torch.ones(4, 4, dtype=torch.float64), "float64.*float"),
        (torch.ones(4, 4, dtype=torch.int32), "int32"),
        (torch.empty(0, 16), "empty"),
        (torch.empty(16, 0), "empty"),
        (torch.tensor([1.0, torch.inf]), "1 inf or NaN"),
        (torch.tensor([1.0, torch.nan, -torch.inf]), "2 inf or NaN"),
        (torch.empty(4, 4, device="meta"), "meta"),
    ],
)
@pytest.mark.parametrize("format", ALL)
def test_what_cannot_be_encoded_is_refused(tensor, words, format):
    with pytest.raises(ConfigurationError, match=words):
        FP4Codec(format).encode(tensor)


def test_bad_arguments_are_refused():
    w = gaussian(2, 16)
    with pytest.raises(ConfigurationError, match="nvfp4, mxfp4"):
        FP4Codec("fp4")
    with pytest.raises(ConfigurationError, match="mse, max"):
        FP4Codec("nvfp4", "best")
    codes, scale = FP4Codec("mxfp4").encode(w)
    with pytest.raises(ConfigurationError, match="mxfp4.*nvfp4"):
        FP4Codec("nvfp4").decode(codes, scale)
    with pytest.raises(CorruptData, match="codes is"):
        FP4Codec("mxfp4").decode(codes[:1], scale)
    with pytest.raises(ConfigurationError, match="no tensor scale"):
        quantize(w, "mxfp4", tensor_scale=torch.tensor(1.0))
    with pytest.raises(ConfigurationError, match="power of two"):
        quantize(w, "nvfp4", tensor_scale=torch.tensor(0.3))
    for bad in (0.0, -1.0, torch.inf, torch.nan, 1e-40):
        with pytest.raises(ConfigurationError, match="normal positive"):
            quantize(w, "nvfp4", "max", tensor_scale=torch.tensor(bad))
    with pytest.raises(ConfigurationError, match="one float32"):
        quantize(w, "nvfp4", "max", tensor_scale=torch.ones(2))
    with pytest.raises(ConfigurationError, match="at least one"):
        joint_tensor_scale([])


def test_public_names():
    assert (
        vblackwell.FP4Codec is FP4Codec
        and vblackwell.quantize is encode.quantize
        and vblackwell.separate is encode.separate
        and vblackwell.PackedTensor is PackedTensor
    )
