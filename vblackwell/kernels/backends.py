"""The backends of the FP4 ops, in order of preference, with what each refuses."""

from __future__ import annotations

import torch
from torch import Tensor

from vblackwell.kernels import reference
from vblackwell.kernels.dispatch import Backend, Request, choose, request_of


def _none(request: Request) -> list[str]:
    return []


def _dequantize_reference(
    codes: Tensor, block_scales: Tensor, tensor_scale: Tensor, format: str, n: int, k: int, dtype: torch.dtype
) -> Tensor:
    return reference.dequantize(codes, block_scales, tensor_scale, format, n, k).to(dtype)


DEQUANTIZE: tuple[Backend, ...] = (Backend("reference", _none, _dequantize_reference),)


def dequantized(
    codes: Tensor, block_scales: Tensor, tensor_scale: Tensor, format: str, n: int, k: int, like: Tensor
) -> Tensor:
    """The weight in the type and on the device of ``like``, by the best backend."""
    request = request_of(like.new_empty((1, k)), format, n, k)
    backend = choose("fp4_dequantize", DEQUANTIZE, request)
    return backend.run(codes, block_scales, tensor_scale, format, n, k, like.dtype)


def _dx_dequantize(
    dy_MN: Tensor, codes: Tensor, block_scales: Tensor, tensor_scale: Tensor, format: str, n: int, k: int
) -> Tensor:
    return dy_MN @ dequantized(codes, block_scales, tensor_scale, format, n, k, dy_MN)


LINEAR: tuple[Backend, ...] = (Backend("reference", _none, reference.linear),)
LINEAR_DX: tuple[Backend, ...] = (Backend("dequantize", _none, _dx_dequantize),)
