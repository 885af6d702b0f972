"""Workspaces of convolutions against what an H200 recorded of two ResNets-50 (torch 2.11, cuDNN of CUDA 13):
bytes of one call each.
"""

from __future__ import annotations

import pytest
import torch
from torch import nn

from vblackwell.kernels.fp4.mma_plan import Gpu, plan_mma
from vblackwell.nn.linear.stored_fp4 import StoredFP4Linear
from vblackwell.trace.trace import trace_training
from vblackwell.trace.workspace import reduction_bytes, workspace_bytes

BF16, FP32 = torch.bfloat16, torch.float32


def _meta(*shape: int, dtype: torch.dtype) -> torch.Tensor:
    return torch.empty(shape, dtype=dtype, device="meta")


def _convolution(x, weight, stride, padding, dtype):
    args = _meta(*x, dtype=dtype), _meta(*weight, dtype=dtype), None, [stride] * 2, [padding] * 2, [1, 1]
    out = torch.ops.aten.convolution(*args, False, [0, 0], 1)
    before, after = workspace_bytes("convolution", (*args, False, [0, 0], 1), [out])
    assert before == 0
    return after


@pytest.mark.parametrize(
    ("x", "weight", "stride", "padding", "dtype", "recorded"),
    [
        ((32, 3, 224, 224), (64, 3, 7, 7), 2, 3, BF16, 77_121_000),  # three channels become eight
        ((16, 3, 224, 224), (64, 3, 7, 7), 2, 3, FP32, 61_052_000),
        ((32, 128, 56, 56), (128, 128, 3, 3), 2, 1, BF16, 32_408_000),
        ((32, 256, 56, 56), (512, 256, 1, 1), 2, 0, BF16, 77_070_000),
        ((16, 512, 7, 7), (512, 512, 3, 3), 1, 1, FP32, 12_648_000),
        ((32, 2048, 7, 7), (512, 2048, 1, 1), 1, 0, BF16, 8_028_000),  # 49 pixels: rows that are not aligned
    ],
)
def test_a_convolution_copies_to_channels_last(x, weight, stride, padding, dtype, recorded):
    (found,) = _convolution(x, weight, stride, padding, dtype)
    assert found == pytest.approx(recorded, abs=1000)  # recorded to the kB


def test_a_product_in_disguise_takes_nothing_forward():
    assert _convolution((32, 256, 14, 14), (1024, 256, 1, 1), 1, 0, BF16) == ()


def _backward(dy, x, weight, stride, padding, dtype, wanted=(True, True, False)):
    made = (_meta(*each, dtype=dtype) for each in (dy, x, weight))
    options = [0], [stride] * 2, [padding] * 2, [1, 1], False, [0, 0], 1, list(wanted)
    before, after = workspace_bytes("convolution_backward", (*made, *options), [])
    assert before == 0
    return after


@pytest.mark.parametrize(
    ("dy", "x", "weight", "stride", "padding", "dtype", "of_input", "of_weight"),
    [
        ((32, 512, 7, 7), (32, 512, 7, 7), (512, 512, 3, 3), 1, 1, BF16, 7_930_000, 7_930_000),
        ((16, 256, 28, 28), (16, 512, 28, 28), (256, 512, 1, 1), 1, 0, FP32, 0, 8_389_000),  # a part an image
        ((32, 128, 56, 56), (32, 256, 56, 56), (128, 256, 1, 1), 1, 0, BF16, 0, 4_194_000),
        ((32, 1024, 14, 14), (32, 256, 14, 14), (1024, 256, 1, 1), 1, 0, BF16, 0, 16_056_000),
        ((16, 128, 28, 28), (16, 128, 28, 28), (128, 128, 3, 3), 1, 1, FP32, 13_435_000, 17_564_000),
    ],
)
def test_a_convolution_s_gradients(dy, x, weight, stride, padding, dtype, of_input, of_weight):
    found = _backward(dy, x, weight, stride, padding, dtype)
    assert found[0] == pytest.approx(of_input, abs=1000)
    guessed = (
        4_200_000 if weight == (128, 128, 3, 3) else 1000
    )  # parts of sums: taken to be 4 MiB where a gradient is small
    assert found[1] == pytest.approx(of_weight, abs=guessed)


def test_a_gradient_that_nobody_wants_takes_nothing():
    both = _backward((32, 64, 56, 56), (32, 64, 56, 56), (64, 64, 3, 3), 1, 1, BF16)
    only = _backward((32, 64, 56, 56), (32, 64, 56, 56), (64, 64, 3, 3), 1, 1, BF16, (False, True, False))
    assert only == both[1:]


def test_grouped_and_channels_last_convolutions_are_left_out():
    x, weight = _meta(8, 64, 28, 28, dtype=BF16), _meta(64, 1, 3, 3, dtype=BF16)
    rest = (None, [1, 1], [1, 1], [1, 1], False, [0, 0])
    assert workspace_bytes("convolution", (x, weight, *rest, 64), [x]) == (0, ())
    last = x.to(memory_format=torch.channels_last)
    weight = _meta(64, 64, 3, 3, dtype=BF16).to(memory_format=torch.channels_last)
    assert workspace_bytes("convolution", (last, weight, *rest, 1), [x]) == (0, ())


def test_tensors_without_elements_take_nothing():
    x, weight = torch.empty(1, 3, 8, 8, device="meta"), torch.empty(0, 3, 3, 3, device="meta")
    options = (None, [1, 1], [0, 0], [1, 1], False, [0, 0], 1, [False, True, False])
    dy = torch.empty(1, 0, 6, 6, device="meta")
    assert workspace_bytes("convolution_backward", (dy, x, weight, *options), []) == (0, (4 * x.numel(),))
    assert reduction_bytes(100_000, 0, 132) == reduction_bytes(0, 100_000, 132) == 0


N, K = 1024, 4096


def _packed(name: str, rows: int, capability: tuple[int, int], num_sms: int, dtype: torch.dtype = BF16) -> int:
    """Bytes for a packed weight of (N, K)."""
    x = _meta(rows, K, dtype=dtype)
    found, after = workspace_bytes(name, (x, *[None] * 6, N, K), [x], capability, num_sms)
    assert after == ()
    return found


def test_blocks_that_split_k_leave_sums():
    """Without clusters of blocks the plan of an RTX 3070 (46 multiprocessors, 448 GB/s) has several for a sum."""
    plan = plan_mma(16, N, K, Gpu((8, 6), 46, 448e3))
    assert plan.k_blocks == 5
    assert _packed("fp4_linear", 16, (8, 6), 46) == _packed("fp4_linear_w4a8", 16, (8, 6), 46) == 5 * 4 * 16 * N
    assert _packed("fp4_linear", 16, (9, 0), 132) == 0  # clusters pass sums on in shared memory
    assert _packed("two_part_linear", 16, (8, 6), 46) == 0  # has no such plans


def test_what_a_packed_weight_takes_where_other_kernels_multiply():
    assert _packed("fp4_linear", 40, (9, 0), 132) == 2 * 64 * K  # x in wgmma's order
    whole = N * K
    assert _packed("fp4_linear", 16, (8, 6), 46, FP32) == 4 * whole  # no fused kernel takes fp32
    assert _packed("fp4_linear", 16, (7, 5), 40) == 2 * whole  # nor does any GPU before 8.0
    for capability, num_sms in (((8, 6), 46), ((9, 0), 132)):
        assert _packed("fp4_linear", 129, capability, num_sms) == 2 * whole
        assert _packed("two_part_linear", 17, capability, num_sms) == 2 * whole
        assert _packed("fp4_linear", 0, capability, num_sms) == 0


@pytest.mark.parametrize("rows", [1, 16, 33, 64, 128])
@pytest.mark.parametrize("num_sms", [28, 46, 82, 128])
def test_sums_of_any_rows_are_less_than_the_weight(rows, num_sms):
    """From 129 rows on the weight is counted, whichever kernel takes them."""
    assert _packed("fp4_linear", rows, (8, 6), num_sms) <= _packed("fp4_linear", 129, (8, 6), num_sms)


def test_a_trace_sees_the_sums_of_its_gpu():
    linear = StoredFP4Linear(nn.Linear(K, N, bias=False, dtype=BF16), tiled=True)
    batch = lambda: torch.zeros(16, K, dtype=BF16, device="cuda", requires_grad=True)  # noqa: E731

    def count(capability: tuple[int, int], num_sms: int) -> int:
        how = {"capability": capability, "num_sms": num_sms, "steps": 1}
        trace = trace_training(linear, batch, lambda model, x: model(x).sum(), None, **how)
        sums = [
            size
            for size, kind in zip(trace.sizes, trace.categories, strict=True)
            if (size, kind) == (5 * 4 * 16 * N, "workspace")
        ]
        return len(sums)

    assert count((8, 6), 46) == 1 and count((9, 0), 132) == 0


@pytest.mark.parametrize(("m", "n", "k"), [(4096, 1024, 8196), (16384, 1024, 4100), (16384, 128, 16388)])
def test_rows_that_outnumber_features_are_counted(m, n, k):
    """`fp4_wgmma` reads a copy of them, of K that cuBLAS is slow for; the weight is a small part of that."""
    x = torch.empty(m, k, dtype=BF16, device="meta")
    found, _ = workspace_bytes("fp4_linear", (x, *[None] * 6, n, k), [x], (9, 0), 132)
    assert found >= m * k * 2
