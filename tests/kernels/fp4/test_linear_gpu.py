"""On a GPU: every backend against float64, equal bits on repetition, poisoned outputs, graphs, compilation."""

import itertools

import pytest
import torch

from tests.kernels.emulation import A100, error_over_bound, random_weight
from vblackwell.errors import Unsupported
from vblackwell.kernels.fp4 import launch as fp4_launch
from vblackwell.kernels.fp4 import mma_plan, reference, wgmma_plan
from vblackwell.kernels.fp4.linear import fp4_linear, fp4_linear_dx, workspace_bytes
from vblackwell.kernels.runtime.registry import use_backend

pytestmark = pytest.mark.gpu
SHAPES = [(40, 136), (200, 1000), (1056, 4096), (33, 77), (9000, 512)]


def on_gpu(format: str, n: int, k: int):
    w_NK, tiled = random_weight(format, n, k)
    return w_NK.cuda(), tuple(tensor.cuda() for tensor in tiled)


@pytest.mark.parametrize("dtype", [torch.bfloat16, torch.float16])
@pytest.mark.parametrize("m", [1, 2, 5, 8, 16, 31, 64, 100, 200, 300])
@pytest.mark.parametrize(("n", "k"), SHAPES)
def test_fp32_sums_within_the_bound_and_repeatable(n, k, m, dtype):
    w_NK, tiled = on_gpu("nvfp4" if dtype == torch.bfloat16 else "mxfp4", n, k)
    x_MK = torch.randn(m, k, device="cuda").to(dtype)
    runs = []
    gpu = fp4_launch.gpu_of(x_MK.device)
    if m <= 16:
        plan = mma_plan.plan_mma(m, n, k, gpu)
        runs.append(lambda: fp4_launch.run_mma(plan, x_MK, tiled, None, "none", n, torch.float32))
    if m <= 256:  # as where there are no clusters
        ampere = mma_plan.plan_mma(m, n, k, A100)
        runs.append(lambda: fp4_launch.run_mma(ampere, x_MK, tiled, None, "none", n, torch.float32))
    if torch.cuda.get_device_capability() == (9, 0):
        wide = wgmma_plan.plan_wgmma(m, n, k, gpu)
        runs.append(lambda: fp4_launch.run_wgmma(wide, x_MK, tiled, None, "none", n, torch.float32))
    for run in runs:
        torch.full((m, n), torch.nan, device="cuda")  # what the next allocation of this size is likely to hold
        y_MN = run()
        assert error_over_bound(y_MN, x_MK, w_NK) <= 1
        assert torch.equal(y_MN, run())


@pytest.mark.parametrize("m", [1, 8, 16, 64, 300, 3000])
@pytest.mark.parametrize("activation", ["none", "gelu", "silu", "relu"])
def test_op_against_the_reference(m, activation):
    n, k = 1000, 512
    w_NK, tiled = on_gpu("mxfp4", n, k)
    w_NK, tiled = w_NK / 2**8, (tiled[0], tiled[1], tiled[2] / 2**8)
    x, bias = torch.randn(m, k, device="cuda").bfloat16(), torch.randn(n, device="cuda").bfloat16()
    y = fp4_linear(x, *tiled, bias, "mxfp4-tiled", activation, n, k)
    exact = reference.activate(x.double() @ w_NK.double().t() + bias.double(), activation)
    # one rounding to bf16, 2^-9 of the value, or two where cuBLAS rounds before the activation (slope at most 1.13)
    assert ((y.double() - exact).abs() <= 2**-7 * exact.abs() + 2**-7).all()


def taken_bytes(run, y_bytes: int) -> int:
    """Of the allocator during a call that was made once before, next to its output."""
    run()
    torch.cuda.synchronize()
    before = torch.cuda.memory_allocated()
    torch.cuda.reset_peak_memory_stats()
    run()
    return torch.cuda.max_memory_allocated() - before - y_bytes


@pytest.mark.parametrize("m", [1, 16, 17, 40, 128, 129])
def test_no_call_takes_more_than_is_predicted(m):
    n, k = 4096, 1024
    _, tiled = on_gpu("nvfp4", n, k)
    x_MK = torch.randn(m, k, device="cuda").bfloat16()
    gpu = fp4_launch.gpu_of(x_MK.device)
    taken = taken_bytes(lambda: fp4_linear(x_MK, *tiled, None, "nvfp4-tiled", "none", n, k), 2 * m * n)
    predicted = workspace_bytes(m, n, k, x_MK.dtype, gpu)
    assert taken == predicted if m <= 128 else taken <= predicted  # of sizes that the allocator does not round
    ampere = mma_plan.plan_mma(m, n, k, A100)
    taken = taken_bytes(lambda: fp4_launch.run_mma(ampere, x_MK, tiled, None, "none", n), 2 * m * n)
    assert taken == 4 * ampere.left_sums(m, n)


def must_accept(name: str, capability: tuple[int, int]) -> bool:
    """Whether a backend exists for GPUs of this kind, from the architecture alone: not from what the backend says of
    itself.
    """
    return {"mma": capability >= (8, 0), "wgmma": capability == (9, 0), "dequantize": True, "reference": True}[name]


@pytest.mark.parametrize("name", ["mma", "wgmma", "dequantize", "reference"])
def test_backends_agree(name):
    """Each backend over rows for which one or another is preferred; one that refuses all of them is absent, which must
    be expected.
    """
    accepted = []
    for format, n, k in itertools.product(("nvfp4", "mxfp4"), (256, 9000), (512,)):
        w_NK, tiled = on_gpu(format, n, k)
        for m in (1, 8, 64, 300):
            x = torch.randn(m, k, device="cuda").bfloat16()
            exact = x.double() @ w_NK.double().t()
            with use_backend("fp4_linear", name):
                try:
                    y = fp4_linear(x, *tiled, None, f"{format}-tiled", "none", n, k)
                except Unsupported:
                    continue
            accepted.append((format, n, m))
            # rounding to bf16: 2^-9 / sqrt(3) relative RMS, twice where the weight is rounded too
            assert (y.double() - exact).norm() / exact.norm() < 5e-3
    if must_accept(name, torch.cuda.get_device_capability()):
        assert {format for format, _, _ in accepted} == {"nvfp4", "mxfp4"}, accepted
        assert any(m == 8 for _, _, m in accepted), accepted
    else:
        assert not accepted


# torch 2.11 warns of itself when inductor is imported under Python 3.12.
@pytest.mark.filterwarnings("ignore:.torch.jit.script:DeprecationWarning")
@pytest.mark.parametrize("m", [1, 16, 64])
def test_graph_and_compile(m):
    n, k = 512, 256
    _, tiled = on_gpu("nvfp4", n, k)
    x = torch.randn(m, k, device="cuda").bfloat16()
    layer = lambda x: fp4_linear(x, *tiled, None, "nvfp4-tiled", "gelu", n, k)  # noqa: E731
    expected = layer(x)
    assert torch.equal(torch.compile(layer, fullgraph=True)(x), expected)
    graph = torch.cuda.CUDAGraph()
    with torch.cuda.graph(graph):
        y = layer(x)
    y.fill_(torch.nan)
    graph.replay()
    assert torch.equal(y, expected)


@pytest.mark.parametrize("m", [1, 16, 64, 300])
def test_a_direct_call_gives_the_bits_of_the_op(m):
    """Twice, on another stream the second time: what is kept of the first call is of the shape alone."""
    n, k = 512, 256
    _, tiled = on_gpu("nvfp4", n, k)
    x, bias = torch.randn(2, m, k, device="cuda").bfloat16(), torch.randn(n, device="cuda").bfloat16()
    for stream in (torch.cuda.current_stream(), torch.cuda.Stream()):
        stream.wait_stream(torch.cuda.current_stream())
        with torch.cuda.stream(stream):
            found = []
            for function in (fp4_linear, torch.ops.vblackwell.fp4_linear.default):
                mine, its_bias = x.clone().requires_grad_(), bias.clone().requires_grad_()
                y = function(mine, *tiled, its_bias, "nvfp4-tiled", "silu", n, k)
                y.float().square().sum().backward()
                found.append((y.detach(), mine.grad, its_bias.grad))
        stream.synchronize()
        assert all(torch.equal(ours, theirs) for ours, theirs in zip(*found, strict=True))


@pytest.mark.multi_gpu
@pytest.mark.skipif(torch.cuda.device_count() < 2, reason="needs two GPUs")
def test_a_call_goes_to_the_gpu_of_its_tensors():
    n, k = 512, 256
    _, tiled = on_gpu("nvfp4", n, k)
    for m in (1, 64):
        x = torch.randn(m, k, device="cuda").bfloat16()
        there = [tensor.to("cuda:1") for tensor in (x, *tiled)]
        y = fp4_linear(*there, None, "nvfp4-tiled", "none", n, k)
        assert y.device == torch.device("cuda:1") and torch.cuda.current_device() == 0
        assert torch.equal(y.cpu(), fp4_linear(x, *tiled, None, "nvfp4-tiled", "none", n, k).cpu())


def test_dx_is_dy_times_the_packed_weight():
    n, k = 512, 256
    w_NK, tiled = on_gpu("mxfp4", n, k)
    dy = torch.randn(100, n, device="cuda").bfloat16()
    assert torch.equal(fp4_linear_dx(dy, *tiled, "mxfp4-tiled", n, k), dy @ w_NK.bfloat16())
