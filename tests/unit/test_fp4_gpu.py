"""On a GPU: the codecs give the CPU's bits, a packed layer keeps its promises on memory, and states move both ways."""

import copy

import pytest
import torch

from vblackwell.nn.linear import FusedFP4Linear
from vblackwell.numerics.fp4 import quantize
from vblackwell.numerics.round_trip import round_trip

pytestmark = pytest.mark.gpu
FORMATS = ["nvfp4", "mxfp4", "nf4", "int4", "int8"]


def weights():
    generator = torch.Generator().manual_seed(0)
    w = torch.randn(96, 200, generator=generator)
    yield w
    yield w.bfloat16()
    yield w.half()
    yield w * torch.exp2(torch.linspace(-30, 20, 96)).unsqueeze(1)
    yield w * 1e-40
    yield w * (torch.rand(96, 200, generator=generator) < 0.1)


@pytest.mark.parametrize("format", FORMATS)
@pytest.mark.parametrize("search", ["max", "mse"])
def test_the_bits_are_those_of_the_cpu(format, search):
    for w in weights():
        here, there = quantize(w, format, search), quantize(w.cuda(), format, search)
        for name, tensor in here.tensors().items():
            assert torch.equal(tensor, there.tensors()[name].cpu()), name
        assert torch.equal(here.dequantize(), there.dequantize().cpu())
        if search == "max":
            assert torch.equal(round_trip(w.cuda(), here.form, w.dtype).cpu(), here.dequantize())


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16])
@pytest.mark.parametrize("format", ["nvfp4", "mxfp4", "nf4", "int4"])
def test_memory_of_quantising_and_of_a_packed_layer(format, dtype):
    FusedFP4Linear(4096, 4096, bias=False, format=format, device="cuda", dtype=dtype).quantize()  # loads code, once
    layer = FusedFP4Linear(4096, 4096, bias=False, format=format, device="cuda", dtype=dtype)
    torch.cuda.synchronize()
    size, before = layer.weight.nbytes, torch.cuda.memory_allocated()
    torch.cuda.reset_peak_memory_stats()
    layer.quantize()
    assert torch.cuda.max_memory_allocated() - before <= 0.35 * size
    held = torch.cuda.memory_allocated() - (before - size)
    assert 8 * held / 4096**2 <= 4.6


@pytest.mark.parametrize("format", FORMATS)
def test_states_move_between_devices(format):
    torch.manual_seed(0)
    layer, x = FusedFP4Linear(200, 96, format=format).quantize(), torch.randn(5, 200)
    moved = copy.deepcopy(layer).cuda()
    for name, tensor in layer.state_dict().items():
        assert torch.equal(moved.state_dict()[name].cpu(), tensor), name
    back = copy.deepcopy(moved).cpu()
    assert torch.equal(back(x), layer(x))
    fresh = FusedFP4Linear(200, 96, format=format, device="cuda")
    fresh.load_state_dict(layer.state_dict())
    # TF32 is off by default for matmuls; 200 products in another order
    torch.testing.assert_close(fresh(x.cuda()).cpu(), layer(x), rtol=1e-4, atol=1e-4)
    torch.testing.assert_close(moved(x.cuda()), fresh(x.cuda()), rtol=0, atol=0)
