"""Queries, keys, values and masks that tests of the dispatcher share."""

from __future__ import annotations

import torch
from torch import Tensor


def qkv(heads=4, kv_heads=4, queries=9, keys=9, head=16, device="cpu", dtype=torch.float32) -> list[Tensor]:
    generator = torch.Generator().manual_seed(3)
    shapes = ((2, queries, heads, head), (2, keys, kv_heads, head), (2, keys, kv_heads, head))
    return [torch.randn(shape, generator=generator).to(device, dtype).transpose(1, 2) for shape in shapes]


def with_gradients(function, tensors) -> list[Tensor]:
    leaves = [x.detach().requires_grad_() for x in tensors]
    out = 1 * function(
        *leaves
    )  # autograd's thread has no CUDA context before its first kernel: cuBLAS would warn of it
    dout = torch.randn(out.shape, generator=torch.Generator().manual_seed(4)).to(out)
    return [out.detach(), *torch.autograd.grad(out, leaves, dout)]


def masks(queries, keys, device="cpu"):
    seen = torch.rand(2, 1, queries, keys, generator=torch.Generator().manual_seed(5)) > 0.3
    seen[..., 0] = True  # what rows that see nothing give is asked elsewhere
    seen = seen.to(device)
    added = torch.randn(queries, keys, generator=torch.Generator().manual_seed(6)).to(device)
    return {"boolean": seen, "padding": seen[:, :, :1], "added": added, "transposed": added.T.contiguous().T}
