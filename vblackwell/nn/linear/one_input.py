"""Linears of one input as one product, and with the RMSNorm before them; on CUDA only, where every module is plain.

Without gradients, weights or packed tiles that lie one after the other in memory are one product: at one row a packed
product of 4096 x 4096 takes an H200 5.5 us, of which its bytes need 2.2. What computes several projections of one
normalised input takes an `Unnormed` in its place, and nothing but `linears_of_one_input` reads it.
"""

import math
from dataclasses import dataclass
from typing import Any

import torch
from torch import Tensor, nn
from torch.nn import functional
from torch.nn.modules.module import _global_forward_hooks

from vblackwell.kernels.fp4 import w4a8
from vblackwell.kernels.fp4.layout import TILE_N, is_tiled
from vblackwell.kernels.fp4.linear import fp4_linear
from vblackwell.kernels.fp4.norm import MAX_ROWS, fp4_norm_linear, max_rows
from vblackwell.kernels.pointwise.linears import feed_forward_block, normed_linears, shared_input_linears
from vblackwell.kernels.pointwise.rows import swiglu, swiglu_linear
from vblackwell.kernels.runtime.registry import runs_triton
from vblackwell.nn.linear.fused_fp4 import FusedFP4Linear
from vblackwell.nn.linear.rounded import Rounded, rounded_linears, rounded_swiglu_linear

MIN_FIELD = 9  # of an E5M3 scale that is also a normal E4M3 one: 2^-6


def is_plain(linear: nn.Module) -> bool:
    """Whether ``linear`` is the product with its weight alone: no bias, no hooks, no other class or forward."""
    return is_linear(linear) and linear.bias is None


def is_linear(module: nn.Module) -> bool:
    """The same, with a bias or without."""
    return type(module) is nn.Linear and "forward" not in module.__dict__ and not hooked(module)


def hooked(module: nn.Module) -> bool:
    """Whether a call of ``module`` runs more than its forward."""
    forward = module._forward_hooks or module._forward_pre_hooks
    return bool(forward or module._backward_hooks or module._backward_pre_hooks)


def output_is_read(module: nn.Module) -> bool:
    """Whether hooks get what ``module`` gives: also in the second pass of a checkpoint, which throws it away itself."""
    hooks = [*module._forward_hooks.values(), *_global_forward_hooks.values()]
    return any(not getattr(hook, "ignores_output", False) for hook in hooks)


def may_fuse(x: Tensor, *linears: nn.Module) -> bool:
    """Whether our operators may multiply ``x`` by the linears' weights: CUDA, plain, of one type, that of autocast too
    where it is on.
    """
    kind = x.device.type
    if not x.is_cuda or (torch.is_autocast_enabled(kind) and torch.get_autocast_dtype(kind) != x.dtype):
        return False
    return all(is_plain(linear) and linear.weight.dtype == x.dtype for linear in linears)  # type: ignore[union-attr]


@dataclass(frozen=True, eq=False)
class Unnormed:
    """Rows (..., D) and the RMSNorm over D that they have not been through: for linears that compute it themselves."""

    x: Tensor
    norm: nn.RMSNorm
    recomputed: bool = False  # plain linears, norm computed with them and once more in backward; else packed ones

    @property
    def shape(self) -> torch.Size:
        return self.x.shape

    def linears(self, linears: tuple[Any, ...]) -> list[Tensor]:
        x, norm = self.x, self.norm
        if self.recomputed:
            weights = [linear.weight for linear in linears]
            return normed_linears(x, norm.weight, _epsilon(norm, norm.weight), weights)
        joint = joint_product(x, norm, linears)
        return joint or [_product(x, norm, linear.placed_arguments()) for linear in linears]


def linears_of_one_input(x: Tensor | Unnormed, *linears: nn.Module) -> list[Tensor]:
    """``[linear(x) for linear in linears]``; on CUDA as one operation, or one product where weights lie together."""
    if not isinstance(x, Tensor):
        return x.linears(linears)
    if may_fuse(x, *linears):
        weights: list[Tensor] = [linear.weight for linear in linears]  # type: ignore[misc]
        joint = None if torch.is_grad_enabled() else joined(weights)
        if joint is not None:
            return list(functional.linear(x, joint).split([weight.shape[0] for weight in weights], -1))
        if torch.is_grad_enabled():  # else there is nothing to share
            return shared_input_linears(x, weights)
    products = None if torch.is_grad_enabled() else joint_product(x, None, linears)
    if products is not None:
        return products
    found = rounded_of(x, linears)
    return [linear(x) for linear in linears] if found is None else list(rounded_linears(x, found))


def rounded_of(x: Tensor, linears: tuple[nn.Module, ...]) -> list[Rounded] | None:
    """What layers that round their weights multiply ``x`` by; None where one is no such layer, or is not training."""
    found: list[Rounded] = []
    for linear in linears:
        give: Any = getattr(type(linear), "rounded_for", None)
        if give is None or hooked(linear) or (rounded := give(linear, x)) is None:
            return None
        found.append(rounded)
    return found


def gated_product(gate: Tensor, up: Tensor, down: nn.Module, wanted: bool = True) -> Tensor:
    """``down(silu(gate) * up)``; on CUDA as one operation that keeps no product. ``wanted`` as for `swiglu_linear`."""
    if may_fuse(gate, down) and gate.dtype == up.dtype:
        return swiglu_linear(gate, up, down.weight, wanted)  # type: ignore[arg-type]
    alike = gate.is_cuda and gate.shape == up.shape and gate.dtype == up.dtype
    found = rounded_of(gate, (down,)) if alike else None
    return down(swiglu(gate, up)) if found is None else rounded_swiglu_linear(gate, up, found[0], wanted)


def joined(parts: list[Tensor]) -> Tensor | None:
    """The tensor whose rows (first dimension) are those of ``parts``, a view without gradients; None if not there."""
    first, end = parts[0], parts[0].data_ptr()
    for part in parts:
        if part.data_ptr() != end or not part.is_contiguous():
            return None
        end += part.nbytes
    begin, row = first.storage_offset() * first.itemsize, first.shape[1:]
    if begin + end - first.data_ptr() > first.untyped_storage().nbytes():  # neighbours by chance
        return None
    # Not the first's own strides: those of a dimension of one say nothing.
    strides = [row[place:].numel() for place in range(len(row) + 1)]
    return first.detach().as_strided((sum(len(part) for part in parts), *row), strides)


@torch.no_grad()
def lay_together(*linears: nn.Module) -> bool:
    """Let the weights of plain linears with one input lie one after the other; parameters keep names and identity.
    False, and nothing is done, where one of them is not plain, or in a stack.
    """
    weights = [linear.weight for linear in linears if is_plain(linear)]
    kinds = {(w.dtype, w.device, w.shape[1]) for w in weights}  # type: ignore[index]
    alike = len(weights) == len(linears) and len(kinds) == 1
    if not alike or any("_vb_binding" in w.__dict__ or "_vb_resident" in w.__dict__ for w in weights):
        return False
    joint = torch.cat(weights)  # type: ignore[arg-type]
    for weight, rows in zip(weights, joint.split([len(w) for w in weights]), strict=True):  # type: ignore[arg-type]
        weight.data = rows
    return True


def joint_packed(linears: tuple[nn.Module, ...]) -> tuple[Any, ...] | None:
    """What `fp4_linear` takes for all of them, where `lay_packed_together` has put their weights; or None."""
    layers = None if torch.compiler.is_compiling() else _packed_alike(linears)  # where tensors lie cannot be traced
    if layers is None or len({layer.weight_tensor_scale.data_ptr() for layer in layers}) > 1:
        return None
    codes, scales = joined([layer.weight_codes for layer in layers]), joined([layer.weight_scales for layer in layers])
    if codes is None or scales is None:
        return None
    first, rows = layers[0], sum(layer.out_features for layer in layers)
    return codes, scales, first.weight_tensor_scale, None, first.layout, "none", rows, first.in_features


def joint_product(x: Tensor, norm: nn.RMSNorm | None, linears: tuple[Any, ...]) -> list[Tensor] | None:
    """``linear(x)``, or ``linear(norm(x))``, of each, as views of one product; None where they do not lie together."""
    placed = joint_packed(linears)
    first = linears[0]
    if placed is None or ((first.w4a8 or first.w4a4) and x.numel() >= w4a8.MIN_ROWS * x.shape[-1]):
        return None
    return list(_product(x, norm, placed).split([linear.out_features for linear in linears], -1))


def _product(x: Tensor, norm: nn.RMSNorm | None, placed: tuple[Any, ...]) -> Tensor:
    return fp4_linear(x, *placed) if norm is None else fp4_norm_linear(x, norm.weight, _epsilon(norm, x), *placed)


@torch.no_grad()
def lay_packed_together(*linears: nn.Module) -> bool:
    """Let the tiles of packed linears with one input lie one after the other, so that one product computes them all.

    They share a tensor scale: block scales of the others, whose exponents have room, are moved down by the difference,
    a power of two, so no number changes. False, and nothing is done, where that cannot be. Waits for the device.
    """
    layers = _packed_alike(linears)
    if layers is None or len(layers) < 2:
        return False
    tensor_scales = [float(layer.weight_tensor_scale) for layer in layers]
    if not all(0 < tensor_scale < math.inf for tensor_scale in tensor_scales):  # of a damaged file
        return False
    fitting, largest = list[Tensor](), max(tensor_scales)
    for layer, tensor_scale in zip(layers, tensor_scales, strict=True):
        scales = _shifted(layer.weight_codes, layer.weight_scales, largest / tensor_scale)
        if scales is None:
            return False
        fitting.append(scales)
    bands, shared = [len(scales) for scales in fitting], torch.full_like(layers[0].weight_tensor_scale, largest)
    codes = torch.cat([layer.weight_codes for layer in layers]).split(bands)
    for layer, *own in zip(layers, codes, torch.cat(fitting).split(bands), strict=True):
        layer.weight_codes, layer.weight_scales, layer.weight_tensor_scale = *own, shared
        if layer.w4a8:
            layer.weight_row_top = w4a8.row_tops(layer.weight_scales, layer.out_features, layer.in_features)
    return True


def _packed_alike(linears: tuple[nn.Module, ...]) -> list[FusedFP4Linear] | None:
    layers = [linear for linear in linears if isinstance(linear, FusedFP4Linear) and linear.is_quantized]
    if len(layers) < len(linears) or any(map(hooked, layers)):
        return None
    plain = all(layer.bias is None and layer.activation == "none" and is_tiled(layer.layout) for layer in layers)
    alike = len({(it.in_features, it.layout, it.w4a8, it.w4a4, it.weight_codes.device) for it in layers}) == 1
    return layers if plain and alike and all(layer.out_features % TILE_N == 0 for layer in layers[:-1]) else None


def _shifted(codes: Tensor, scales: Tensor, ratio: float) -> Tensor | None:
    """E5M3 scales divided by ``ratio`` >= 1; None where that is no power of two, or a scale is too small for it."""
    mantissa, exponent = math.frexp(ratio)
    if (down := exponent - 1) == 0 or mantissa != 0.5:
        return scales if ratio == 1 else None
    # A block of zeros may have any scale. Words of codes are [h][g][t][r][i] in a tile, scales [g][t][h r]
    # (kernels/fp4/layout.py).
    words = codes.contiguous().view(torch.int32).view(*scales.shape[:2], 2, 8, 4, 2, 2)
    scales = torch.where((words != 0).any(-1).permute(0, 1, 3, 4, 2, 5).reshape(scales.shape), scales, 0)
    live = scales[scales != 0]
    if live.numel() and (int(live.min()) >> 3) - down < MIN_FIELD:
        return None
    return torch.where(scales == 0, scales, scales - (down << 3))


def _epsilon(norm: nn.RMSNorm, x: Tensor) -> float:
    return norm.eps if norm.eps is not None else torch.finfo(x.dtype).eps


def normed(x: Tensor, norm: nn.RMSNorm, *linears: nn.Module, recompute: bool = False) -> Tensor | Unnormed:
    """``norm(x)`` for the linears, or ``x`` and the norm, where each is one kernel with it, and faster on this GPU; or
    may be, with ``recompute``, where plain linears compute it with them and once more in backward.
    """
    if recompute and isinstance(norm, nn.RMSNorm) and is_plain_norm(x, norm) and may_fuse(x, *linears):
        return Unnormed(x, norm, recomputed=True)
    if any(hooked(module) for module in (norm, *linears)) or not all(_goes_with(x, norm, linear) for linear in linears):
        return norm(x)
    columns, features = x.shape[-1], sum(linear.out_features for linear in linears)  # type: ignore[misc]
    few = x.numel() <= max_rows(_capability(x), features, columns) * columns
    return Unnormed(x, norm) if few else norm(x)


def _capability(x: Tensor) -> tuple[int, int]:
    """Not the registry's: torch.compile warns of a cached function."""
    return torch.cuda.get_device_capability(x.device) if x.is_cuda else (0, 0)


def _goes_with(x: Tensor, norm: nn.RMSNorm, linear: nn.Module) -> bool:
    if not isinstance(linear, FusedFP4Linear) or not linear.is_quantized or norm.weight is None:
        return False
    if not is_tiled(linear.layout) or x.numel() > MAX_ROWS * linear.in_features:
        return False
    if not (on_gpu(x) and x.dtype == norm.weight.dtype == torch.bfloat16) or torch.is_autocast_enabled(x.device.type):
        return False
    trained = any(each is not None and each.requires_grad for each in (x, norm.weight, linear.bias))
    return not (torch.is_grad_enabled() and trained)


def on_gpu(x: Tensor) -> bool:
    return x.is_cuda


def lean_feed_forward(
    x: Tensor, residual: Tensor, norm: nn.RMSNorm, mlp: nn.Module, linears: tuple[nn.Module, ...], wanted: bool
) -> Tensor | None:
    """``total + mlp(norm(total))`` of ``total = x + residual``, which alone is kept; None where modules must be called.

    ``linears`` are gate, up and down of ``mlp``, ``down(silu(gate) * up)``; without ``wanted`` the result is not used.
    """
    if not isinstance(norm, nn.RMSNorm) or not may_be_lean(x, norm, mlp, linears):
        return None
    gate, up, down = (linear.weight for linear in linears)
    eps = _epsilon(norm, norm.weight)
    return feed_forward_block(x + residual, norm.weight, eps, gate, up, down, wanted)  # type: ignore[arg-type]


def may_be_lean(x: Tensor, norm: Any, mlp: nn.Module, linears: tuple[nn.Module, ...]) -> bool:
    """Whether `feed_forward_block` may compute ``mlp(norm(x))``, which ``linears`` and the weight of ``norm`` are."""
    if hooked(mlp) or not is_plain_norm(x, norm) or not may_fuse(x, *linears):
        return False
    return runs_triton("rms_norm", x, x.shape[-1]) and runs_triton("swiglu", x, 0)


def is_plain_norm(x: Tensor, norm: Any) -> bool:
    return not hooked(norm) and norm.weight is not None and norm.weight.dtype == x.dtype
