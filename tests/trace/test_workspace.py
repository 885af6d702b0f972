"""Workspaces of convolutions against what an H200 recorded of two ResNets-50 (torch 2.11, cuDNN of CUDA 13):
bytes of one call each.
"""

from __future__ import annotations

import pytest
import torch

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
