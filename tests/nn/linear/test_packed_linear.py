"""What packing a layer needs in addition to the layer, and what the packed layer holds, for every format."""

import pytest
import torch

from tests.nn.linear.peak_bytes import PeakBytes
from vblackwell.nn.linear import fused_fp4 as linear_module
from vblackwell.nn.linear import packed_linear
from vblackwell.nn.linear.fused_fp4 import FusedFP4Linear
from vblackwell.numerics import fp4
from vblackwell.numerics.fp4 import quantize

FOUR_BIT = ["nvfp4", "mxfp4", "nf4", "int4"]
CASES = [
    pytest.param(*case, marks=() if case[0] == "nvfp4" and case[3] == "mse" else pytest.mark.slow)  # all share its code
    for case in (
        *[(format, torch.float32, 625, "mse") for format in FOUR_BIT],
        ("int8", torch.float32, 750, "mse"),  # the result alone is a quarter
        *[(format, torch.bfloat16, 3500, "max") for format in FOUR_BIT],
    )
]


@pytest.mark.parametrize(("format", "dtype", "rows", "search"), CASES)
def test_quantising_needs_a_third_of_the_layer_in_extra(format, dtype, rows, search, monkeypatch):
    """Tiles are scaled down with the layer."""
    monkeypatch.setattr(fp4, "_CPU_TILE_ELEMENTS", 1 << 14)
    w = torch.empty(rows, 2048, dtype=dtype).normal_(generator=torch.Generator().manual_seed(0))
    with PeakBytes(w) as peak:
        packed = quantize(w, format, search)
    assert packed.nbytes <= peak.peak <= 0.35 * w.nbytes  # the packed tensor itself is counted


@pytest.mark.parametrize(
    ("format", "dtype"),
    [
        ("nvfp4", torch.float32),
        pytest.param("mxfp4", torch.bfloat16, marks=pytest.mark.slow),
        pytest.param("nvfp4", torch.bfloat16, marks=pytest.mark.slow),
        pytest.param("mxfp4", torch.float32, marks=pytest.mark.slow),
    ],
)
def test_a_layer_becomes_tiles_in_the_room_that_its_weight_leaves(format, dtype, monkeypatch):
    """A GPU's way of packing a layer, with its memory counted on the CPU;
    tiles and bands scaled down with the layer.
    """
    rows, columns = 1000, 1024
    monkeypatch.setattr(linear_module, "place", lambda packed, by: packed_linear.place(packed, True, by))
    monkeypatch.setattr(packed_linear, "_SHUFFLE_ELEMENTS", 1 << 14)
    monkeypatch.setattr(fp4, "_CPU_TILE_ELEMENTS", 1 << 11)
    with PeakBytes() as memory:
        layer = FusedFP4Linear(columns, rows, bias=False, format=format, scale_search="max", dtype=dtype)
        assert layer.weight is not None
        size, before = layer.weight.nbytes, memory.now
        memory.peak = before
        layer.quantize()
        assert before >= size and memory.peak > before
        assert memory.peak - before <= 0.35 * size
        held = memory.now - (before - size)
    assert layer.layout == f"{format}-tiled"
    assert 8 * held / (rows * columns) <= 4.6 * 1024 / 1000  # 1000 rows are stored as 32 bands of 32


@pytest.mark.parametrize("format", FOUR_BIT)
def test_a_packed_layer_holds_few_bits(format):
    layer = FusedFP4Linear(512, 512, bias=False, format=format).quantize()
    assert 8 * sum(buffer.nbytes for buffer in layer.buffers()) / 512**2 <= 4.6
