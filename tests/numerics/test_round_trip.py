"""The straight-through rounding against the codec, bit for bit: random, on boundaries and next to them, extreme, not
finite.

Both ways are tested here: that of a CPU, which looks for elements to compare again, and that of a GPU, which compares
all.
"""

import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st
from hypothesis.extra.numpy import arrays

from vblackwell.numerics import round_trip as module
from vblackwell.numerics.formats import FORMATS, Format
from vblackwell.numerics.fp4 import quantize
from vblackwell.numerics.round_trip import max_tensor_scale, round_trip

E2M1_BOUNDARIES = (0.25, 0.75, 1.25, 1.75, 2.5, 3.5, 5.0)


@pytest.fixture(params=["as a CPU", "as a GPU"])
def way(request, monkeypatch):
    monkeypatch.setattr(module, "_may_look", lambda tensor: request.param == "as a CPU")


def assert_same_bits(w, form: Format):
    dtype = torch.float32
    expected = quantize(w.contiguous(), form.name, "max").dequantize(dtype)
    got = round_trip(w, form, dtype)
    wrong = (got.view(torch.int32) != expected.view(torch.int32)).nonzero()
    assert len(wrong) == 0, (len(wrong), w[tuple(wrong[0])], got[tuple(wrong[0])], expected[tuple(wrong[0])])


def neighbours(w: torch.Tensor) -> torch.Tensor:
    """(..., 5): ``w`` in fp32 with the two floats on each side."""
    near = w.to(torch.float32)
    above = torch.nextafter(near, torch.tensor(torch.inf))
    below = torch.nextafter(near, torch.tensor(-torch.inf))
    further = torch.nextafter(above, torch.tensor(torch.inf)), torch.nextafter(below, torch.tensor(-torch.inf))
    return torch.stack([further[1], below, near, above, further[0]], -1)


@pytest.mark.parametrize("form", FORMATS.values(), ids=FORMATS)
@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16, torch.float16])
def test_random_weights(form, dtype, way):
    generator = torch.Generator().manual_seed(0)
    for shape, spread in (((64, 512), 1.0), ((33, 77), 0.02), ((7, 1), 3.0)):
        assert_same_bits((torch.randn(shape, generator=generator) * spread).to(dtype), form)


# 126 scales x 7 boundaries x 5 floats around each, under tensor scales of all kinds: few bits, many, bf16's, fp16's,
# large and tiny.
@pytest.mark.parametrize("amax", [2688.0, 1.0, 3.0, 0.0371, 1.9999999, 5.8125, 2.0**-110 * 1.7, 2.0**100 * 1.3])
def test_nvfp4_around_every_boundary_of_every_scale(amax, way):
    form = FORMATS["nvfp4"]
    scale = torch.arange(1, 127, dtype=torch.uint8).view(torch.float8_e4m3fn).to(torch.float64)
    amax = torch.tensor(amax, dtype=torch.float32)
    unit = scale * max_tensor_scale(amax, form).double()
    points = neighbours(unit[:, None] * torch.tensor(E2M1_BOUNDARIES, dtype=torch.float64)).flatten(1)  # (126, 35)
    blocks = torch.nn.functional.pad(points, (0, 10)).view(126, 3, 15)
    largest = (unit * 6).float().clamp_max(amax)[:, None, None].expand(-1, 3, 1)
    w = torch.cat([largest, blocks * torch.tensor([1.0, -1.0] * 7 + [1.0])], -1).view(-1, 16)
    w = torch.cat([w, torch.full((1, 16), amax.item())])
    u = (w / max_tensor_scale(amax, form)).view(-1, 16)[:378].view(126, 48) / scale.float()[:, None]
    on = torch.isin(u.abs().double(), torch.tensor(E2M1_BOUNDARIES, dtype=torch.float64))
    exact = torch.isin(w[:378].view(126, 48).abs().double() / unit[:, None], torch.tensor(E2M1_BOUNDARIES).double())
    assert (on & ~exact).any() or amax in (2688.0,)  # quotients that fp32 puts on a boundary next to which they are
    assert_same_bits(w, form)


@pytest.mark.parametrize("amax", [127.0, 1.0, 3.0, 0.0371, 1.9999999, 5.8125, 2.0**-130, 2.0**-145, 2.0**100 * 1.3])
def test_int8_around_every_boundary(amax, way):
    amax = torch.tensor(amax, dtype=torch.float32)
    scale = amax.double() / 127
    points = neighbours(scale * (torch.arange(127) + 0.5)).flatten()
    for w in (torch.cat([amax[None], points, -points]), torch.cat([amax[None], points, points[:5]])):  # with 16 | K
        assert_same_bits(w[: len(w) // 16 * 16][None], FORMATS["int8"])
        assert_same_bits(w[None], FORMATS["int8"])


@pytest.mark.parametrize("exponent", [-140, -127, -20, 0, 90])
def test_int4_around_every_boundary_of_every_scale(exponent, way):
    largest = (
        torch.arange(128, 256, dtype=torch.float32) * 2.0**exponent
    )  # all significands of a bf16 scale, times 7 / 8
    points = neighbours((torch.arange(8) + 0.5).double() * (largest.double() / 7)[:, None]).flatten(1)[:, :31]
    assert_same_bits(torch.cat([largest[:, None], points.clamp_max(largest[:, None])], 1), FORMATS["int4"])
    points = neighbours((torch.arange(6) + 0.5).double() * (largest.double() / 7).bfloat16().double()[:, None])
    assert_same_bits(torch.cat([largest[:, None], points.flatten(1), -largest[:, None]], 1), FORMATS["int4"])


@pytest.mark.parametrize("exponent", [-149, -140, -127, -126, -3, 0, 100])
def test_mxfp4_around_every_boundary(exponent, way):
    points = neighbours(torch.tensor(E2M1_BOUNDARIES).double() * 2.0**exponent).flatten()
    for largest in (4.0, 5.999, 6.0, 7.999):
        w = torch.cat([torch.tensor([largest * 2.0**exponent]), points[:31]]), torch.cat([points[4:], points[:1]])
        for row in w:
            assert_same_bits(torch.cat([row, -row])[None], FORMATS["mxfp4"])


@pytest.mark.parametrize("largest", [1.0, 0.0371, 1.9999999, 3.0, 2.0**-130, 2.0**-146, 2.0**100])
def test_nf4_around_every_boundary_and_cell(largest, way):
    values = torch.tensor(FORMATS["nf4"].values, dtype=torch.float64)
    points = neighbours((values[1:] + values[:-1]) / 2 * largest).flatten()
    cells = neighbours((torch.arange(0, 2 * 4096 + 1, 7).double() / 4096 - 1) * largest).flatten()
    for w in (points, cells):
        w = torch.nn.functional.pad(w.clamp(-largest, largest), (0, -len(w) % 63)).view(-1, 63)
        assert_same_bits(torch.nn.functional.pad(w, (0, 1), value=largest), FORMATS["nf4"])


@pytest.mark.parametrize("form", FORMATS.values(), ids=FORMATS)
def test_blocks_without_values_or_scale(form, way):
    w = torch.randn(6, 128)
    w[0] = 0
    w[1, 16:] = -0.0
    w[2] *= 2.0**-30  # nvfp4: scales of zero
    w[3, ::2] *= 2.0**-140
    assert_same_bits(w, form)
    assert_same_bits(torch.zeros(3, 40), form)
    assert_same_bits(torch.full((2, 16), -(2.0**-149)), form)


@given(
    w=arrays("float32", (3, 70), elements=st.floats(-(2.0**120), 2.0**120, width=32)),
    name=st.sampled_from(list(FORMATS)),
    look=st.booleans(),
)
@settings(max_examples=120, deadline=None)
def test_any_weights(w, name, look):
    before = module._may_look
    module._may_look = lambda tensor: look
    try:
        assert_same_bits(torch.from_numpy(w), FORMATS[name])
    finally:
        module._may_look = before


@given(
    # magnitudes below 2^127, of both signs
    w=arrays("uint16", (2, 48), elements=st.integers(0, 0x7EFF) | st.integers(0x8000, 0xFEFF)),
    name=st.sampled_from(list(FORMATS)),
)
@settings(max_examples=200, deadline=None)
def test_any_bf16_weights(w, name):
    assert_same_bits(torch.from_numpy(w.view("int16")).view(torch.bfloat16), FORMATS[name])


@pytest.mark.parametrize("form", FORMATS.values(), ids=FORMATS)
@pytest.mark.parametrize("bad", [torch.nan, torch.inf, -torch.inf])
def test_not_finite_is_nan_throughout(form, bad, way):
    w = torch.randn(8, 64)
    w[3, 5] = bad
    assert round_trip(w, form, torch.bfloat16).isnan().all()


@pytest.mark.parametrize("form", FORMATS.values(), ids=FORMATS)
def test_tiles_do_not_show(form, monkeypatch):
    w = torch.randn(40, 200)
    whole = round_trip(w, form, torch.bfloat16)
    monkeypatch.setattr(module, "_TILE_ELEMENTS", 448)
    assert torch.equal(round_trip(w, form, torch.bfloat16), whole)
    assert torch.equal(round_trip(w.t().contiguous().t(), form, torch.bfloat16), whole)


@pytest.mark.parametrize("form", FORMATS.values(), ids=FORMATS)
def test_transposed_weights(form, way):
    assert_same_bits(torch.randn(64, 48).t(), form)


def test_few_elements_are_rounded_in_fp64(monkeypatch):
    """On a CPU fp64 takes several times as long as all the rest."""
    seen, w = [0], torch.randn(256, 1024).to(torch.bfloat16)
    for name in ("round_elements", "_round_halves_exactly"):
        whole = getattr(module, name)

        def count(first, *rest, whole=whole):
            seen[0] += first.numel()
            return whole(first, *rest)

        monkeypatch.setattr(module, name, count)
    for form in FORMATS.values():
        seen[0] = 0
        round_trip(w, form, torch.bfloat16)
        assert seen[0] < w.numel() / 25, form.name
