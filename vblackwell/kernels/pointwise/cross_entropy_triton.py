"""Triton kernels of cross_entropy.py: a program reads its row of logits twice (mostly from the L2) and writes it once."""
# What @triton.jit makes of a function has no type.
# pyright: reportCallIssue=false, reportGeneralTypeIssues=false

from __future__ import annotations

import torch
import triton
import triton.language as tl
from torch import Tensor

from vblackwell.kernels.runtime.registry import on_device

BLOCK = 4096
WARPS = 8


@triton.jit
def _loss_and_gradient(
    logits_ptr, target_ptr, loss_ptr, stride, ignore_index, z_loss,
    WORDS: tl.constexpr, GRADIENTS: tl.constexpr, BLOCK: tl.constexpr,
):  # fmt: skip
    row = tl.program_id(0).to(tl.int64)
    logits_ptr += row * stride
    target = tl.load(target_ptr + row)
    column = tl.arange(0, BLOCK)
    dtype = logits_ptr.dtype.element_ty
    if target == ignore_index:
        tl.store(loss_ptr + row, 0.0)
        if GRADIENTS:
            for start in range(0, WORDS, BLOCK):
                tl.store(logits_ptr + start + column, tl.zeros([BLOCK], dtype), start + column < WORDS)
    else:
        # Read before anything is overwritten: the reductions below are barriers.
        known = (target >= 0) & (target < WORDS)
        at_target = tl.load(logits_ptr + target, known, other=float("nan")).to(tl.float32)
        highest = float("-inf")
        total = 0.0
        for start in range(0, WORDS, BLOCK):
            x = tl.load(logits_ptr + start + column, start + column < WORDS, other=float("-inf")).to(tl.float32)
            higher = tl.maximum(highest, tl.max(x, 0))
            total = total * tl.exp(highest - higher) + tl.sum(tl.exp(x - higher), 0)
            highest = higher
        lse = highest + tl.log(total)
        tl.store(loss_ptr + row, lse - at_target + z_loss * lse * lse)
        if GRADIENTS:
            factor = 1.0 + 2.0 * z_loss * lse
            for start in range(0, WORDS, BLOCK):
                inside = start + column < WORDS
                x = tl.load(logits_ptr + start + column, inside, other=float("-inf")).to(tl.float32)
                gradient = tl.exp(x - lse) * factor - tl.where(start + column == target, 1.0, 0.0)
                tl.store(logits_ptr + start + column, gradient.to(dtype), inside)


@triton.jit
def _scale(x_ptr, factor_ptr, y_ptr, count, BLOCK: tl.constexpr):
    at = tl.program_id(0).to(tl.int64) * BLOCK + tl.arange(0, BLOCK)
    x = tl.load(x_ptr + at, at < count, other=0.0).to(tl.float32)
    y = x * tl.load(factor_ptr).to(tl.float32)
    tl.store(y_ptr + at, y.to(y_ptr.dtype.element_ty), at < count)


def loss_and_gradient_(
    logits_CV: Tensor, targets_C: Tensor, loss_C: Tensor, ignore_index: int, z_loss: float, gradients: bool
) -> None:
    """Writes the loss of each row, and with ``gradients`` its gradient over the logits; rows of adjacent elements."""
    rows, words = logits_CV.shape
    if rows:
        with on_device(logits_CV):
            _loss_and_gradient[(rows,)](
                logits_CV, targets_C.contiguous(), loss_C, logits_CV.stride(0), ignore_index, z_loss,
                WORDS=words, GRADIENTS=gradients, BLOCK=min(BLOCK, triton.next_power_of_2(words)), num_warps=WARPS,
            )  # fmt: skip


def scale(x: Tensor, factor: Tensor, out: Tensor | None = None) -> Tensor:
    """``x * factor`` with one rounding, into ``out`` if given; contiguous, ``factor`` of one element on the same
    device.
    """
    x = x.contiguous()
    y = torch.empty_like(x) if out is None else out
    count = x.numel()
    if count:
        with on_device(x):
            _scale[(triton.cdiv(count, 2048),)](x, factor, y, count, BLOCK=2048, num_warps=4)
    return y
