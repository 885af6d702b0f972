"""A linear layer that trains in full precision, or straight through FP4, and then computes from a packed weight.

``w4a8`` and ``w4a4`` change numbers, so they are never chosen for the user. With ``DistributedDataParallel`` over
packed layers pass ``broadcast_buffers=False``: the packed weights are equal on all ranks.
"""

from collections.abc import Callable
from typing import Any, Self, cast

import torch
from torch import Tensor
from torch.nn import functional

from vblackwell.errors import check_known
from vblackwell.kernels.fp4.encode import quantize
from vblackwell.kernels.fp4.linear import fp4_linear
from vblackwell.kernels.fp4.reference import ACTIVATIONS, activate
from vblackwell.kernels.fp4.w4a4 import fp4_linear_w4a4
from vblackwell.kernels.fp4.w4a8 import fp4_linear_w4a8
from vblackwell.nn.linear.packed_linear import ROW_TOP, PackableLinear, PlacedWeight, place, rounding
from vblackwell.nn.linear.rounded import fp4_round_trip
from vblackwell.numerics.formats import check_search, format_named
from vblackwell.numerics.packed import PackedTensor


class FusedFP4Linear(PackableLinear):
    """``activation(x W^T + b)`` with a weight that can be packed.

    Args:
        in_features, out_features, bias: K and N, any size, and whether there is a bias.
        activation: 'none', 'relu', 'gelu' (with erf) or 'silu'.
        format: 'nvfp4', 'mxfp4', 'nf4', 'int4' or 'int8': what ``quantize()`` packs to.
        scale_search: 'mse' or 'max'; default: 'max' with ``use_fp4``, so that packing keeps the trained numbers, else
            'mse'.
        use_fp4: multiply by the weight rounded to ``format`` while training, too; its gradient goes straight through.
        w4a8: once packed, round inputs of many rows to E4M3 and multiply on FP8 tensor cores; for mxfp4
            (kernels/fp4/w4a8.py).
        w4a4: once packed, round inputs of many rows to nvfp4 and multiply on FP4 tensor cores; for nvfp4 and mxfp4
            (kernels/fp4/w4a4.py).
        device, dtype: of the parameters, as for ``nn.Linear``.

    Raises ConfigurationError for a size below 1, an unknown activation, format or search, both w4a8 and w4a4, or one of
    them with a format or with sizes that its `check_shape` refuses.
    """

    weight_row_top: Tensor | None  # for w4a8 alone; follows from the scales, so no state dict has it
    buffer_names = (*PackableLinear.buffer_names, ROW_TOP)

    def __init__(
        self,
        in_features: int,
        out_features: int,
        bias: bool = True,
        activation: str = "none",
        *,
        format: str = "nvfp4",
        scale_search: str | None = None,
        use_fp4: bool = False,
        w4a8: bool = False,
        w4a4: bool = False,
        device: torch.device | str | None = None,
        dtype: torch.dtype | None = None,
    ) -> None:
        super().__init__(in_features, out_features, bias, format_named(format), device=device, dtype=dtype)
        check_known("activation", activation, ACTIVATIONS)
        self.activation, self.use_fp4, self.w4a8, self.w4a4 = activation, use_fp4, w4a8, w4a4
        self.scale_search = check_search(scale_search or ("max" if use_fp4 else "mse"))
        if checks := rounding(w4a8, w4a4):
            checks.check_shape(self.form.name, out_features, in_features, self._name())

    def quantize(self, *, tensor_scale: Tensor | None = None) -> Self:
        """Packs the weight and lets go of the original; on a packed layer it changes nothing. Returns the layer.

        ``tensor_scale`` is nvfp4's, shared with other layers; see ``numerics.fp4.joint_tensor_scale``. The layer stays
        as it was where the weight has inf or NaN, or a dtype that cannot be packed (ConfigurationError), or its values
        do not suit w4a8 or w4a4, or the GPU does not (Unsupported).
        """
        if self.weight is not None:
            if checks := rounding(self.w4a8, self.w4a4):
                checks.check_device(self.weight.device, self._name())  # before the search for scales
            # No name for the weight here: `_adopt` frees it before it lays out what was packed.
            how = {"tensor_scale": tensor_scale, "name": self._name()}
            self._adopt(quantize(self.weight, self.form.name, self.scale_search, **how))
        return self

    def freeze(self) -> Self:
        """Packs the layer and freezes its bias: a base for adapters, gradients pass to ``x``. Returns the layer."""
        if self.bias is not None:
            self.bias.requires_grad_(False)
        return self.quantize()

    def forward(self, x: Tensor) -> Tensor:
        """(..., K) -> (..., N), in the dtype of ``x`` or of autocast."""
        if self._parameters.get("weight", x) is None:  # attributes of a module cost a search each
            if self.w4a8:
                return self._by_w4a8(x)
            return (fp4_linear_w4a4 if self.w4a4 else fp4_linear)(x, *self.placed_arguments())
        if torch.is_autocast_enabled(x.device.type):
            x = x.to(torch.get_autocast_dtype(x.device.type))
        weight = cast(Tensor, self.weight)
        weight = fp4_round_trip(weight, self.form.name, x.dtype) if self.use_fp4 else weight
        return activate(functional.linear(x, weight, self.bias), self.activation)

    def placed_arguments(self) -> tuple[Any, ...]:
        """What `fp4_linear` takes after ``x``, of a packed layer."""
        held = self._buffers
        placed = (held["weight_codes"], held["weight_scales"], held["weight_tensor_scale"])
        return (*placed, self.bias, self.layout, self.activation, self.out_features, self.in_features)

    def _by_w4a8(self, x: Tensor) -> Tensor:
        placed = (self.weight_codes, self.weight_scales, self.weight_tensor_scale, self.weight_row_top)
        return fp4_linear_w4a8(x, *placed, self.bias, self.activation, self.out_features, self.in_features)

    def extra_repr(self) -> str:
        state = f"packed={self.layout}" if self.is_quantized else f"format={self.form.name}, use_fp4={self.use_fp4}"
        shape = f"{self.in_features}, {self.out_features}"
        rounds = ", w4a8=True" if self.w4a8 else ", w4a4=True" if self.w4a4 else ""
        return f"{shape}, bias={self.bias is not None}, activation={self.activation}, {state}{rounds}"

    def _adopt(self, packed: PackedTensor) -> None:
        if checks := rounding(self.w4a8, self.w4a4):
            checks.check_packed(packed, self._name())
        self.weight = None  # first: shuffling into tiles then has the original's memory
        self.form, self.dtype = packed.form, packed.dtype
        self.hold(place(packed, by=checks))

    def hold(self, placed: PlacedWeight) -> None:
        self.weight_row_top, self.w4a8, self.w4a4 = placed.row_top, placed.row_top is not None, placed.w4a4
        super().hold(placed)

    def _apply(self, fn: Callable[[Tensor], Tensor], recurse: bool = True) -> Self:
        if self.weight is None and (checks := rounding(self.w4a8, self.w4a4)):
            checks.check_device(fn(torch.empty(0, device=self.weight_codes.device)).device, self._name())
        return super()._apply(fn, recurse)
