"""A frozen FP4 linear whose packed bytes are parameters, so that a stack moves them as it moves any weight.

`adapted_linear` is an adapter around such a base in few passes over memory: ``x W^T + s (x A^T) B^T``, the second
product added where the first lies. What backward needs is kept by a separate operation before the product: torch's
checkpointing stops at the last tensor that is kept, so that a layer's last product is not computed again for nothing.
M rows, K in features, N out features, R rank.
"""

from collections.abc import Mapping
from typing import Any

import torch
from torch import Tensor, nn

from vblackwell.kernels.fp4 import layout
from vblackwell.kernels.fp4.linear import fp4_linear_dx
from vblackwell.nn.linear.fused_fp4 import FusedFP4Linear
from vblackwell.nn.linear.packed_linear import (
    FINE,
    PARTS,
    ROW_TOP,
    PackedLinear,
    PlacedWeight,
    is_transposed,
    pack,
    place,
    rounding,
    sizes_of,
    turned,
)
from vblackwell.nn.linear.two_part import VBOptimizedLinear
from vblackwell.numerics.formats import Format, format_named
from vblackwell.numerics.packed import PackedTensor


class StoredFP4Linear(PackedLinear):
    """What ``linear`` computes, with a frozen packed weight; gradients pass through to ``x``.

    ``tiled`` is the layout of the fused kernels, for nvfp4 and mxfp4; ``fine`` nvfp4 with a fine part; ``w4a8`` and
    ``w4a4`` as for `FusedFP4Linear`, tiled. The bytes are the parameters ``parts``, on meta until they are known.
    """

    def __init__(
        self,
        linear: nn.Linear,
        format: str | Format = "nvfp4",
        *,
        tiled: bool = False,
        fine: bool = False,
        w4a8: bool = False,
        w4a4: bool = False,
    ) -> None:
        (n, k), self.transposed = sizes_of(linear), is_transposed(linear)
        form = format_named(format) if isinstance(format, str) else format
        super().__init__(k, n, form)
        self.dtype, self.training = linear.weight.dtype, linear.training
        codes, scales = (form.codes_shape(n, k), form.codes_dtype), (form.scales_shape(n, k), form.scale_dtype)
        if tiled or rounding(w4a8, w4a4):
            self.layout = layout.tiled_name(form.name)
            codes, scales = ((shape, torch.uint8) for shape in layout.shapes(self.layout, n, k))
        self._views = dict(zip(PARTS, (codes, scales, ((), torch.float32)), strict=True))
        self._views |= {FINE: codes} if fine else {ROW_TOP: ((n,), torch.uint8)} if w4a8 else {}
        self.parts, self.w4a8, self.w4a4 = tuple(self._views), w4a8, w4a4
        for name, (shape, kind) in self._views.items():
            size = torch.Size(shape).numel() * kind.itemsize
            held = nn.Parameter(torch.zeros(size, dtype=torch.uint8, device="meta"), requires_grad=False)
            self.register_parameter(name, held)
        self.bias = linear.bias
        if self.bias is not None:
            self.bias.requires_grad_(False)

    def placed(self, parts: Mapping[str, Tensor] | None = None) -> PlacedWeight:
        """The packed weight as views of ``parts``, by default of the layer's own bytes, on level 0 then."""
        held = {name: getattr(self, name) for name in self.parts} if parts is None else parts
        views = {name: held[name].view(kind).view(shape) for name, (shape, kind) in self._views.items()}
        codes, scales, tensor_scale = (views[name] for name in PARTS)
        return PlacedWeight(self.layout, codes, scales, tensor_scale, views.get(FINE), views.get(ROW_TOP), self.w4a4)

    @property
    def weight_shape(self) -> tuple[int, int]:
        """Of the weight that it stands for, as files have it: (N, K), or (K, N) for transformers' `Conv1D`."""
        sizes = (self.out_features, self.in_features)
        return (sizes[1], sizes[0]) if self.transposed else sizes

    def bytes_of(self, weight: Tensor, name: str) -> dict[str, Tensor]:
        """The bytes of each part that ``weight``, of `weight_shape`, becomes, packed on its device; raises as
        `quantize`."""
        return self.bytes_of_packed(pack(turned(weight, self.transposed), self.form.name, name), name)

    def bytes_of_packed(self, packed: PackedTensor, name: str) -> dict[str, Tensor]:
        """The bytes of each part of a packed weight; Unsupported where the tiled layout, w4a8 or w4a4 cannot take
        its values."""
        if checks := rounding(self.w4a8, self.w4a4):
            checks.check_packed(packed, name)
        placed = place(packed, layout.is_tiled(self.layout), checks)
        tensors = dict(zip(self.parts, placed.tensors(), strict=True))
        return {part: tensor.contiguous().reshape(-1).view(torch.uint8) for part, tensor in tensors.items()}

    def over(self, parts: Mapping[str, Tensor]) -> FusedFP4Linear | VBOptimizedLinear:
        """A packed linear that computes from these bytes where they lie; for a linear without a bias."""
        assert self.bias is None
        placed = self.placed(parts)
        kind = FusedFP4Linear if placed.fine is None else VBOptimizedLinear
        made = (self.in_features, self.out_features, False, *kind.packed_as)
        layer = kind(*made, device="meta", dtype=self.dtype)
        layer.form = self.form
        layer.hold(placed)
        return layer

    def weight_of(self, parts: Mapping[str, Tensor]) -> Tensor:
        """The fp32 matrix that bytes stand for; the reverse of `bytes_of`, rounded to the format."""
        return turned(self.canonical(self.placed(parts), torch.float32).dequantize(), self.transposed)


def stored_part(model: nn.Module, name: str) -> tuple[StoredFP4Linear, str, str] | None:
    """The stored linear that the parameter ``name`` is a part of, its name and the part; None for others."""
    owner, _, part = name.rpartition(".")
    if part not in (*PARTS, FINE, ROW_TOP):
        return None
    module = model.get_submodule(owner)
    return (module, owner, part) if isinstance(module, StoredFP4Linear) else None


def adapted_linear(x: Tensor, a_RK: Tensor, b_NR: Tensor, scale: float, base: StoredFP4Linear) -> Tensor:
    """(..., K) to (..., N), differentiable in ``x``, ``a_RK`` and ``b_NR``, all of one type."""
    placed = base.placed()
    assert placed.fine is None, "a base in two parts has no adapters"
    token, low = _Keep.apply(x, a_RK, b_NR, placed.tensors()[:3], scale, base)
    return _Product.apply(token, x.detach(), low, b_NR.detach(), placed, scale, base)  # type: ignore[return-value]


class _Keep(torch.autograd.Function):
    """``x A^T``, and something of the result's shape that takes no memory: its gradient is the result's."""

    @staticmethod
    def forward(ctx: Any, x: Tensor, a_RK: Tensor, b_NR: Tensor, *given: Any) -> tuple[Tensor, Tensor]:
        low = torch.matmul(x, a_RK.t())
        packed, ctx.scale, ctx.base = given
        ctx.save_for_backward(x, a_RK, b_NR, low, *packed)  # of a stack: they are read again in backward
        ctx.mark_non_differentiable(low)
        return x.new_zeros(()).expand(*x.shape[:-1], ctx.base.out_features), low

    @staticmethod
    def backward(ctx: Any, dy: Tensor, _: Any) -> Any:  # type: ignore[override]
        x, a_RK, b_NR, low, *packed = ctx.saved_tensors
        layout, n, k = ctx.base.layout, ctx.base.out_features, ctx.base.in_features
        dy_MN = dy.reshape(-1, n)
        dlow_MR = torch.mm(dy_MN, b_NR).mul_(ctx.scale)
        dx = da_RK = db_NR = None
        if ctx.needs_input_grad[0]:
            dx_MK = fp4_linear_dx(dy_MN, *packed, layout, n, k)
            dx = dx_MK.addmm_(dlow_MR, a_RK).view(x.shape)
        if ctx.needs_input_grad[1]:
            da_RK = torch.mm(dlow_MR.t(), x.reshape(-1, k))
        if ctx.needs_input_grad[2]:
            db_NR = torch.mm(dy_MN.t(), low.reshape(dy_MN.shape[0], -1)).mul_(ctx.scale)
        return dx, da_RK, db_NR, None, None, None


class _Product(torch.autograd.Function):
    @staticmethod
    def forward(ctx: Any, token: Tensor, x: Tensor, low: Tensor, b_NR: Tensor, *given: Any) -> Tensor:
        placed, scale, base = given
        y = placed.linear(x, None, "none", base.out_features, base.in_features)
        y.view(-1, base.out_features).addmm_(low.reshape(-1, low.shape[-1]), b_NR.t(), alpha=scale)
        return y

    @staticmethod
    def backward(ctx: Any, dy: Tensor) -> Any:  # type: ignore[override]
        return dy, None, None, None, None, None, None
