"""The packing kernels against the oracle, byte for byte, for every format and search: random weights, ties, zeros,
extremes, short rows; codes, both parts, values rounded straight through, tiles.
"""

from __future__ import annotations

import sys
from functools import partial

import pytest
import torch

from tests.kernels.pointwise.oracle import DEVICE, poisoned
from vblackwell.errors import ConfigurationError, CorruptData, Unsupported
from vblackwell.kernels.fp4 import encode, layout
from vblackwell.kernels.runtime.registry import use_backend
from vblackwell.nn.linear.packed_linear import tiled
from vblackwell.numerics import fp4, separation
from vblackwell.numerics.formats import E2M1_VALUES, FORMATS
from vblackwell.numerics.packed import PackedTensor
from vblackwell.numerics.round_trip import round_trip

# What overflows or is not a number on purpose, in numpy's words.
pytestmark = pytest.mark.filterwarnings("ignore:(invalid value|overflow) encountered in:RuntimeWarning")
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


def ties(rows: int) -> torch.Tensor:
    """Rows of 64 whose elements lie half-way between two integers, or two values of nf4, times their scale."""
    halves = torch.randint(-7, 7, (rows, 64), generator=torch.Generator().manual_seed(11)) + 0.5
    halves[:, ::32] = 7.0
    table = torch.tensor(FORMATS["nf4"].values)
    place = torch.randint(15, (rows, 64), generator=torch.Generator().manual_seed(12))
    between = (table[place] + table[place + 1]) / 2
    between[:, 0] = 1.0
    return torch.cat((halves, between, halves[:, :32] * 127 / 7), 1)


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


def subnormal(dtype: torch.dtype) -> torch.Tensor:
    """Every size of a type's subnormal numbers, alone, next to each other and next to its smallest normal one."""
    info = torch.finfo(dtype)
    steps = round(1 / info.eps)  # of the smallest number, to the smallest normal one
    places = torch.randint(-steps, steps + 1, (ROWS, 80), generator=torch.Generator().manual_seed(20))
    w = places.double() * info.tiny * info.eps
    w[0], w[1], w[2] = info.tiny * info.eps, -info.tiny * info.eps, 0.0
    w[2, ::7], w[3, :16], w[4, -3:] = info.tiny, info.tiny, -info.tiny
    return w.to(dtype)


def finite(dtype: torch.dtype) -> torch.Tensor:
    """The largest finite numbers of a type, and those before them: alone, among ordinary ones, and both signs."""
    info, w = torch.finfo(dtype), drawn(8, 80, seed=21).double()
    before = info.max * (1 - info.eps / 2)
    w[0], w[1], w[2], w[3] = info.max, info.min, before, 1.0
    w[3, 5], w[4, 70], w[5, ::2], w[5, 1::2] = info.max, info.min, info.max, info.min
    w[6] = torch.linspace(-1, 1, 80).double() * info.max
    return w.to(dtype)


def blank(dtype: torch.dtype) -> torch.Tensor:
    """Blocks of zeros alone, of either sign or both, between blocks with values, and at the end of short rows."""
    w = drawn(8, 2 * 128 + 9, seed=22)
    w[0], w[1], w[2, ::2], w[2, 1::2] = 0.0, -0.0, 0.0, -0.0
    w[3, :128], w[4, 128:256], w[5, 256:], w[6, 16:] = -0.0, 0.0, -0.0, -0.0
    w[7, ::5] = -0.0  # next to values
    return w.to(dtype)


HALVES = {"bf16": torch.bfloat16, "fp16": torch.float16}
CASES = {
    "bf16": lambda: drawn(ROWS, 208).mul(0.02).bfloat16(),
    "fp32": lambda: drawn(9, 7 * 16 + 5, seed=7),  # a short last block
    "half": lambda: drawn(ROWS - 7, 64, seed=8).half(),
    "grid": lambda: grid(ROWS + 10),
    "ties": lambda: ties(ROWS),
    "spread": lambda: spread(ROWS),
    "outliers": lambda: outliers(ROWS),
    "equal": lambda: torch.full((4, 64), 0.3),
    "zeros": lambda: torch.zeros(3, 70),
    "subnormal": lambda: drawn(8, 32, seed=9) * 1e-39,
    "smallest": lambda: torch.full((2, 64), -(2.0**-149)),
    "large": lambda: drawn(8, 32, seed=10) * 1e35,
    "largest": lambda: (drawn(8, 64, seed=13) * 1.3e38).clamp(-3.4e38, 3.4e38),  # decoded values may leave fp32
    "column": lambda: drawn(37, 1, seed=14),
    "experts": lambda: drawn(3, 5, 40, seed=15),
    "transposed": lambda: drawn(70, 5, seed=16).t(),
    "alone": lambda: torch.tensor(-3.0),
    **{f"{name} subnormal": partial(subnormal, dtype) for name, dtype in HALVES.items()},
    **{f"{name} finite": partial(finite, dtype) for name, dtype in (*HALVES.items(), ("fp32", torch.float32))},
    **{f"{name} blank": partial(blank, dtype) for name, dtype in (*HALVES.items(), ("fp32", torch.float32))},
    "negative zeros": lambda: torch.full((3, 70), -0.0).bfloat16(),
    "long": lambda: drawn(2, 3 * 128 + 77, seed=17) * torch.linspace(0.1, 3, 461),  # int8 by rows: in several chunks
}
SPECIAL = [case for case in CASES if case.endswith(("subnormal", "finite", "blank", "zeros"))]
SIZES = [("int4", 128), ("int8", 2), ("int8", 48), ("int8", 200)]  # of blocks, other than the default


def assert_same(found: PackedTensor, expected: PackedTensor) -> None:
    assert found.meta() == expected.meta() and found.tensors().keys() == expected.tensors().keys()
    for name, tensor in expected.tensors().items():
        assert torch.equal(found.tensors()[name].cpu(), tensor), name


def by_kernel(w: torch.Tensor, *how, **options) -> PackedTensor:
    with use_backend("fp4_encode", "triton"), poisoned():
        return encode.quantize(w.to(DEVICE), *how, **options)


@pytest.mark.each_value
@pytest.mark.parametrize("search", ["mse", "max"])
@pytest.mark.parametrize("format", FORMATS)
@pytest.mark.parametrize("case", CASES)
def test_the_bytes_are_those_of_the_oracle(case, format, search):
    w = CASES[case]()
    assert_same(by_kernel(w, format, search), fp4.quantize(w, format, search))


@pytest.mark.each_value
@pytest.mark.parametrize("search", ["mse", "max"])
@pytest.mark.parametrize(("format", "size"), SIZES)
def test_blocks_of_other_sizes(format, size, search):
    w = drawn(3, 461, seed=18)
    options = {"block_size": size}
    assert_same(by_kernel(w, format, search, **options), fp4.quantize(w, format, search, **options))


@pytest.mark.parametrize(("search", "factor"), [("max", 0.37), ("max", 1e-4), ("mse", 0.5), ("mse", 64.0)])
def test_a_shared_tensor_scale(search, factor):
    """Blocks that saturate, and blocks whose scale is zero."""
    w = outliers(ROWS)
    scale = fp4.quantize(w, "nvfp4", search).tensor_scale * factor
    expected = fp4.quantize(w, "nvfp4", search, tensor_scale=scale)
    assert_same(by_kernel(w, "nvfp4", search, tensor_scale=scale), expected)


@pytest.mark.each_value
@pytest.mark.parametrize("search", ["mse", "max"])
@pytest.mark.parametrize("case", ["bf16", "fp32", "grid", "spread", "outliers", "experts", "largest", *SPECIAL])
def test_both_parts_in_one_pass(case, search):
    w = CASES[case]()
    with use_backend("fp4_encode", "triton"):
        assert_same(encode.separate(w.to(DEVICE), search), separation.separate(w, search))


@pytest.mark.each_value
@pytest.mark.parametrize("dtype", [torch.float32, torch.float64, torch.float16, torch.bfloat16], ids=str)
@pytest.mark.parametrize("format", FORMATS)
@pytest.mark.parametrize("case", [case for case in CASES if case not in ("experts", "alone")])
def test_values_are_those_of_the_oracle(case, format, dtype):
    w, form = CASES[case](), FORMATS[format]
    with use_backend("fp4_round_trip", "triton"), poisoned():
        found = encode.round_trip(w.to(DEVICE), form, dtype).cpu()
    expected = round_trip(w, form, dtype)
    assert found.dtype == dtype and torch.equal(found, expected)
    assert torch.equal(found.signbit(), expected.signbit()), "zeros have signs"


@pytest.mark.each_value
@pytest.mark.parametrize("format", FORMATS)
@pytest.mark.parametrize("bad", [torch.nan, -torch.nan, torch.inf, -torch.inf])
def test_values_are_nan_throughout_where_one_is_not_finite(format, bad):
    w = drawn(5, 70)
    w[3, 5] = bad
    for dtype in (torch.float32, torch.bfloat16):
        with use_backend("fp4_round_trip", "triton"):
            assert encode.round_trip(w.to(DEVICE, dtype), FORMATS[format], dtype).isnan().all()
    with pytest.raises(ConfigurationError, match="1 inf or NaN elements of 350"):
        by_kernel(w, format)


@pytest.mark.skipif(DEVICE == "cuda", reason="there the kernel is the default")
def test_on_the_cpu_the_oracle_is_the_faster_one(monkeypatch):
    monkeypatch.setitem(sys.modules, "vblackwell.kernels.fp4.encode_triton", None)  # importing it would raise
    w = drawn(2, 32)
    assert_same(encode.quantize(w), fp4.quantize(w))
    assert_same(encode.separate(w), separation.separate(w))
    assert torch.equal(encode.round_trip(w, FORMATS["int4"], w.dtype), round_trip(w, FORMATS["int4"], w.dtype))


@pytest.mark.gpu
@pytest.mark.parametrize("format", FORMATS)
def test_straight_through_rounding_is_two_launches(format):
    w, form = drawn(300, 1000).cuda(), FORMATS[format]
    encode.round_trip(w, form, torch.bfloat16)
    activities = [torch.profiler.ProfilerActivity.CUDA]
    with torch.profiler.profile(activities=activities, acc_events=True) as profile:  # else torch 2.11 warns
        encode.round_trip(w, form, torch.bfloat16)
        torch.cuda.synchronize()
    launched = [event.name for event in profile.events() if event.device_type == torch.autograd.DeviceType.CUDA]
    assert sorted(launched) == ["_encode", "_maxima"]


@pytest.mark.gpu
@pytest.mark.parametrize("search", ["mse", "max"])
@pytest.mark.parametrize("format", FORMATS)
def test_the_compiled_kernel_packs_every_case(format, search):
    """All of `CASES`, of which the interpreter has a selection, and both parts of nvfp4."""
    for case, make in CASES.items():
        w = make()
        with poisoned():
            found = encode.quantize(w.cuda(), format, search)
        assert_same(found, fp4.quantize(w, format, search))
        if format == "nvfp4":
            assert_same(encode.separate(w.cuda(), search), separation.separate(w, search))
        for dtype in (torch.float32, torch.bfloat16, torch.float16) if search == "max" and w.dim() == 2 else ():
            with poisoned():
                values = encode.round_trip(w.cuda(), FORMATS[format], dtype).cpu()
            expected = round_trip(w, FORMATS[format], dtype)
            same = torch.equal(values, expected) and torch.equal(values.signbit(), expected.signbit())
            assert same, f"{case} in {dtype}"


@pytest.mark.gpu
@pytest.mark.slow
@pytest.mark.parametrize("search", ["mse", "max"])
@pytest.mark.parametrize("format", FORMATS)
@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16])
def test_a_whole_layer(format, search, dtype):
    """Two million random weights: near ties of errors happen."""
    w = drawn(1024, 2048, seed=19).mul(0.02).to(dtype)
    assert_same(encode.quantize(w.cuda(), format, search), fp4.quantize(w, format, search))


def placed(packed: PackedTensor, backend: str):
    with use_backend("fp4_tile", backend):
        return tiled(packed.to(DEVICE))


@pytest.mark.parametrize("kind", ["nvfp4", "mxfp4", "two-part"])
@pytest.mark.parametrize(("n", "k"), [(32, 64), (45, 208), (70, 23), (3, 130)])
def test_tiles_are_those_of_torch(n, k, kind):
    w = drawn(n, k, seed=n) * torch.exp(drawn(n, 1, seed=k) * (4 if kind != "mxfp4" else 1))
    w[1], w[2, :23] = 0.0, -0.0  # blocks without a value
    packed = separation.separate(w) if kind == "two-part" else fp4.quantize(w, kind)
    if kind == "nvfp4":
        scales = packed.block_scales.clone()
        scales.view(-1)[:127] = torch.arange(min(127, scales.numel()), dtype=torch.uint8)  # every scale, zero too
        packed = PackedTensor(packed.form, packed.shape, packed.dtype, packed.codes, scales, packed.tensor_scale)
    expected, got = placed(packed, "torch"), placed(packed, "triton")
    assert got.layout == expected.layout and len(got.tensors()) == len(expected.tensors())
    for mine, other in zip(got.tensors(), expected.tensors(), strict=True):
        assert mine.shape == other.shape and mine.dtype == other.dtype and torch.equal(mine, other)


@pytest.mark.parametrize("backend", ["torch", "triton"])
def test_what_tiles_refuse(backend):
    far = torch.cat([drawn(1, 64), drawn(1, 64) * 2.0**40])
    with pytest.raises(Unsupported, match="span"):
        placed(fp4.quantize(far, "mxfp4"), backend)
    packed = fp4.quantize(drawn(4, 64), "nvfp4")
    for bad in (0x7F, 0x80):
        packed.block_scales[0, 0] = bad
        with pytest.raises(Unsupported, match="NaN|negative"):
            placed(packed, backend)
    parts = separation.separate(torch.zeros(2, 64))
    parts.fine[1, 3] = 0x78
    with pytest.raises(CorruptData, match="below zero"):
        placed(parts, backend)
    layout.check_fine(parts.codes[:1], parts.fine[:1])
