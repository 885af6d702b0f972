"""Levels that hold keys in fewer bytes: the same bits without loss, stated ones with;
damage and fullness are typed errors.
"""

import pytest
import torch

import vblackwell as vb
from tests.sqnr import sqnr
from vblackwell.errors import ConfigurationError, CorruptData, InsufficientMemory, UnknownKey
from vblackwell.memory.cache.single import CODECS, CompressedVGPULevel
from vblackwell.numerics.fp4 import quantize

pytest.importorskip("zstandard", reason="the extra 'compressed' is not installed")


@pytest.fixture(params=["cpu", "ssd"])
def level(request, tmp_path):
    path = str(tmp_path) if request.param == "ssd" else None
    made = CompressedVGPULevel(1, 4, request.param, path=path)
    yield made
    made.close()


VALUES = {
    "weights": torch.randn(300, 257, generator=torch.Generator().manual_seed(0)).mul(0.02).bfloat16(),
    "moments": torch.randn(1 << 17, generator=torch.Generator().manual_seed(1)).pow(3).mul(1e-6),
    "integers": torch.arange(1000).view(10, 100),
    "bytes": torch.randint(0, 256, (12_345,), dtype=torch.uint8),
    "flags": torch.tensor([True, False, True]),
    "doubles": torch.randn(7, dtype=torch.float64),
    "scalar": torch.tensor(3.5),
    "nothing": torch.empty(0, 3),
    "nan": torch.tensor([float("nan"), float("inf"), -0.0]),
}


def test_every_bit_comes_back(level):
    for key, value in VALUES.items():
        level.put(key, value)
    for key, value in VALUES.items():
        again = level.get(key)
        assert again.dtype == value.dtype and again.shape == value.shape
        assert (
            again.numpy(force=True).tobytes() == value.numpy().tobytes()
            if value.dtype != torch.bfloat16
            else torch.equal(again, value)
        )
    used = level.used_bytes
    assert used < sum(value.nbytes for value in VALUES.values())
    for key, most in (("weights", VALUES["weights"].nbytes / 1.2), ("bytes", 12_345)):
        level.remove(key)
        assert used - level.used_bytes <= most + 4096  # whole pages are counted
        used = level.used_bytes
    packed = quantize(VALUES["weights"])
    level.put("packed", packed)
    assert torch.equal(level.get("packed").dequantize(), packed.dequantize())


@pytest.mark.parametrize("dtype", [torch.bfloat16, torch.float32, torch.uint8])
def test_any_number_of_elements(level, dtype):
    for count in (1, 249, 250, 251, 2500, 100_000):
        value = torch.randn(count, generator=torch.Generator().manual_seed(count)).mul(9).to(dtype)
        level.put("value", value)
        assert torch.equal(level.get("value"), value)


@pytest.mark.parametrize(("codec", "ratio", "floor"), [("fp4", 3.3, 20)])
def test_marked_keys_are_rounded(level, codec, ratio, floor):
    w = VALUES["weights"]
    level.put("w", w, codec=codec)
    again = level.get("w")
    assert again.dtype == w.dtype and sqnr(w, again) > floor and level.used_bytes - 4096 < w.nbytes / ratio
    for value in (VALUES["integers"], VALUES["nan"]):
        with pytest.raises(ConfigurationError):
            level.put("w", value, codec=codec)
    assert torch.equal(level.get("w"), again)  # what was refused changed nothing


def test_a_flipped_bit_is_an_error_and_a_full_level_keeps_what_it_has():
    with pytest.raises(ConfigurationError, match="codec"):
        CompressedVGPULevel(codec="zip")
    assert vb.CompressedVGPULevel is CompressedVGPULevel and CODECS == ("lossless", "fp4")
    level = CompressedVGPULevel(1, 0.1, "cpu")
    level.put("a", VALUES["weights"][:20])
    level.put("b", VALUES["weights"][:20], codec="fp4")
    for key in "ab":
        extent = level._entries[key][1]
        bytes_ = level._place.view(extent)
        for at in (0, extent.num_bytes // 2, extent.num_bytes - 1):
            bytes_[at] ^= 4
            with pytest.raises(CorruptData, match=f"'{key}'.*differ"):
                level.get(key)
            bytes_[at] ^= 4
        assert level.get(key).shape == (20, 257)
    used = level.used_bytes
    with pytest.raises(InsufficientMemory):
        level.put("a", torch.randn(100_000))
    assert level.used_bytes == used and torch.equal(level.get("a"), VALUES["weights"][:20])
    with pytest.raises(UnknownKey, match="did you mean 'a'"):
        level.get("aa")
    level.remove("a")
    assert "a" not in level and level.used_bytes < used
    level.close()


def test_bytes_that_do_not_shrink_take_their_own_size():
    level, value = CompressedVGPULevel(0, 1, "cpu"), torch.randint(0, 256, (1 << 20,), dtype=torch.uint8)
    level.put("noise", value)  # which zstd would make larger than the level
    assert level.used_bytes == level.capacity_bytes and torch.equal(level.get("noise"), value)
    level.close()
