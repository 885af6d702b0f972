"""On a GPU: the codecs give the CPU's bits, a packed layer takes the documented memory, and states move both ways."""

import copy

import pytest
import torch

from tests.sqnr import sqnr
from vblackwell.errors import Unsupported
from vblackwell.kernels.fp4.w4a8 import MIN_ROWS
from vblackwell.nn.linear.fused_fp4 import FusedFP4Linear
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


def layer_in(state: str) -> FusedFP4Linear:
    """A layer of 512 -> 256 on the GPU: 'plain', 'use_fp4', 'packed', or 'w4a8' (packed, on FP8 arithmetic)."""
    torch.manual_seed(0)
    options = {"format": "mxfp4", "use_fp4": state == "use_fp4", "w4a8": state == "w4a8"}
    layer = FusedFP4Linear(512, 256, activation="gelu", device="cuda", **options)
    return layer if state in ("plain", "use_fp4") else layer.quantize()


def skip_without_fp8(state: str) -> None:
    if state == "w4a8" and torch.cuda.get_device_capability() < (8, 9):
        pytest.skip("no FP8 tensor cores")


def rows_for(state: str) -> int:
    """As many as w4a8 rounds."""
    return MIN_ROWS if state == "w4a8" else 8


# torch 2.11 warns of itself when inductor is imported under Python 3.12.
@pytest.mark.filterwarnings("ignore:.torch.jit.script:DeprecationWarning")
@pytest.mark.parametrize("state", ["plain", "use_fp4", "packed", "w4a8"])
def test_autocast_one_graph_and_replay(state):
    skip_without_fp8(state)
    layer, x = layer_in(state), torch.randn(rows_for(state), 512, device="cuda")
    # without autocast's cache, whose cast weights a replay would read after they are gone
    with torch.no_grad(), torch.autocast("cuda", dtype=torch.bfloat16, cache_enabled=False):
        expected = layer(x)
        assert expected.dtype == torch.bfloat16
        compiled = torch.compile(layer, fullgraph=True)(x)
        graph = torch.cuda.CUDAGraph()
        with torch.cuda.graph(graph):
            y = layer(x)
    # inductor may round between product and activation where eager does, or not: 2^-8 of the largest term
    torch.testing.assert_close(compiled, expected, rtol=2**-7, atol=2**-7)
    y.fill_(torch.nan)
    graph.replay()
    assert torch.equal(y, expected)


@pytest.mark.filterwarnings("ignore:.torch.jit.script:DeprecationWarning")
@pytest.mark.filterwarnings("ignore:The CUDA Graph is empty")  # the compiler's first one, of nothing
def test_many_rows_of_w4a8_in_graphs_that_the_compiler_makes():
    """Those look for memory in their pool that they do not know of."""
    skip_without_fp8("w4a8")
    layer, x = layer_in("w4a8"), torch.randn(1024, 512, device="cuda", dtype=torch.bfloat16)
    with torch.no_grad():
        wanted = layer(x)
        compiled = torch.compile(layer, mode="reduce-overhead", fullgraph=True)
        for _ in range(4):
            torch.compiler.cudagraph_mark_step_begin()
            assert torch.equal(compiled(x), wanted)


@pytest.mark.parametrize("state", ["packed", "w4a8"])
def test_a_frozen_base_passes_gradients_in_copies_too(state):
    skip_without_fp8(state)
    base = layer_in(state).freeze()
    assert not any(parameter.requires_grad for parameter in base.parameters())
    results = []
    for layer in (base, copy.deepcopy(base), copy.deepcopy(base).cpu().cuda()):
        torch.manual_seed(1)
        x = torch.randn(rows_for(state), 512, device="cuda", dtype=torch.bfloat16).requires_grad_()
        y = layer(x)
        y.backward(torch.ones_like(y))
        results.append((y, x.grad))
    for y, grad in results[1:]:
        assert torch.equal(y, results[0][0]) and torch.equal(grad, results[0][1])
    assert results[0][1].isfinite().all() and results[0][1].abs().sum() > 0


def test_w4a8_is_the_packed_layer_but_for_rounded_activations():
    skip_without_fp8("w4a8")
    fast, exact = layer_in("w4a8"), layer_in("packed")
    assert torch.equal(fast.packed.dequantize(), exact.packed.dequantize())
    for rows in (1, 17, MIN_ROWS - 1):
        x = torch.randn(rows, 512, device="cuda", dtype=torch.bfloat16)
        assert torch.equal(exact(x), fast(x))
    for rows in (MIN_ROWS, 1024, 2049):
        x = torch.randn(rows, 512, device="cuda", dtype=torch.bfloat16)
        assert not torch.equal(exact(x), fast(x))
        assert (
            sqnr(exact(x).float(), fast(x).float()) > 27
        )  # 31 dB of E4M3, less what bf16 and gelu add at small values
    with pytest.raises(Unsupported, match="float32"):
        fast(torch.randn(MIN_ROWS, 512, device="cuda"))
