"""Fused kernels run on the GPU that holds their tensors, whichever is the current one: Triton itself would
take that.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator
from contextlib import contextmanager

import pytest
import torch
from torch import Tensor

from vblackwell.kernels.pointwise import rows_triton
from vblackwell.kernels.runtime import triton_launch


def rms_norm(*inputs: Tensor) -> list[Tensor]:
    x, y = inputs
    normed, total, scale = rows_triton.rms_norm(x, y, x[0].contiguous(), 1e-5)
    return [normed, total, *rows_triton.rms_norm_backward(normed, y, total, x[0].contiguous(), scale, True)]


def swiglu(*inputs: Tensor) -> list[Tensor]:
    x, y = inputs
    found = [rows_triton.swiglu(x, y), *rows_triton.swiglu_backward(x, x, y, True)]
    in_place = [x.clone(), x.clone(), y.clone()]
    rows_triton.swiglu_backward_in_place(*in_place)
    return found + in_place


def rotary(*inputs: Tensor) -> list[Tensor]:
    x, y = inputs
    tables = x[:4].cos(), x[:4].sin()
    return list(rows_triton.rotate(x.view(1, 2, 4, 16), y.view(1, 2, 4, 16), *tables, False))


def cross_entropy(*inputs: Tensor) -> list[Tensor]:
    logits, y = inputs[0].clone(), inputs[1]
    loss = torch.empty(8, device=logits.device)
    targets = torch.arange(8, device=logits.device)
    rows_triton.loss_and_gradient_(logits, targets, loss, -100, True)
    return [loss, logits, rows_triton.scale(y, loss[:1])]


OPS: list[tuple[Callable[..., list[Tensor]], int]] = [(rms_norm, 3), (swiglu, 3), (rotary, 1), (cross_entropy, 2)]


def inputs(device: str) -> list[Tensor]:
    return [torch.randn(8, 16, generator=torch.Generator().manual_seed(seed)).to(device) for seed in (1, 2)]


@pytest.mark.parametrize(("op", "launches"), OPS)
def test_every_launch_is_on_its_tensors_device(
    op: Callable[..., list[Tensor]], launches: int, monkeypatch: pytest.MonkeyPatch
):
    device = "cuda" if torch.cuda.is_available() else "cpu"
    asked = []

    @contextmanager
    def on_device(x: Tensor) -> Iterator[None]:
        asked.append(x.device.type)
        yield

    monkeypatch.setattr(triton_launch, "on_device", on_device)
    op(*inputs(device))
    assert asked == [device] * launches


@pytest.mark.gpu
@pytest.mark.parametrize("op", [op for op, _ in OPS])
def test_on_the_second_gpu_while_the_first_is_current(op: Callable[..., list[Tensor]]):
    if torch.cuda.device_count() < 2:
        pytest.skip("needs two GPUs")
    first, second = op(*inputs("cuda:0")), op(*inputs("cuda:1"))
    torch.cuda.synchronize(1)
    assert all(torch.equal(a.cpu(), b.cpu()) for a, b in zip(first, second, strict=True))
