"""A linear layer that trains in full precision, or straight through FP4, and then computes from a packed weight.

Before ``quantize()`` it is ``activation(x W^T + b)`` on an ordinary parameter. After, ``weight`` is ``None``: the packed
weight lives in buffers, is never trained, and one fused op does the work; gradients still reach ``x`` and the bias, which
is what adapters over a frozen base need. The buffers are left out of torch's own state-dict handling, because a GPU holds
them in the kernels' layout and a state dict in the published one (``fp4_state.py``); loading accepts either kind of
checkpoint in either state, so a model need not be quantised to load a quantised file.

With ``w4a8`` a packed mxfp4 layer computes on FP8 tensor cores: the same weights, inputs rounded to E4M3 by rows (kernels/fp4/w4a8.py). It
changes numbers, so it is never chosen for the user, and what cannot run that way is refused, when the layer is packed.

Not a subclass of ``nn.Linear``: libraries that find one reach for ``.weight``, and here there may be none.

With ``DistributedDataParallel`` over packed layers pass ``broadcast_buffers=False``: the packed weights are equal on all
ranks and would be sent at every step.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping
from typing import Any

import torch
from torch import Tensor, nn
from torch.nn import functional

from vblackwell.errors import ConfigurationError
from vblackwell.kernels.fp4.linear import fp4_linear
from vblackwell.kernels.fp4.reference import ACTIVATIONS, activate
from vblackwell.kernels.fp4.w4a8 import check_device, check_packed, check_shape, fp4_linear_w4a8, row_tops_for_w4a8
from vblackwell.nn.linear.draw import draw_as_linear
from vblackwell.nn.linear.fp4_state import (
    CODES,
    SCALES,
    STATE_NAMES,
    TENSOR_SCALE,
    Placed,
    from_state,
    place,
    to_state,
    unplace,
)
from vblackwell.nn.linear.straight_through import fp4_round_trip
from vblackwell.numerics.formats import check_search, format_named
from vblackwell.numerics.fp4 import quantize
from vblackwell.numerics.packed import PackedTensor

_ROW_TOP = "weight_row_top"  # for w4a8 alone; follows from the scales, so no state dict has it
_BUFFERS = (CODES, SCALES, TENSOR_SCALE, _ROW_TOP)


class FusedFP4Linear(nn.Module):
    """``activation(x W^T + b)`` with a weight that can be packed.

    Args:
        in_features: K. Any size; blocks are padded out of sight.
        out_features: N.
        bias: whether there is one.
        activation: 'none', 'relu', 'gelu' (with erf) or 'silu'.
        format: 'nvfp4', 'mxfp4', 'nf4', 'int4' or 'int8': what ``quantize()`` packs to.
        scale_search: 'mse' or 'max'; default: 'max' with ``use_fp4``, so that packing keeps the trained numbers, else 'mse'.
        use_fp4: multiply by the weight rounded to ``format`` while training, too; its gradient goes straight through.
        w4a8: once packed, round inputs to E4M3 and multiply on FP8 tensor cores; for mxfp4.
        device, dtype: of the parameters, as for ``nn.Linear``.

    Raises:
        ConfigurationError: a size below 1, an unknown activation, format or search, or w4a8 with another format than mxfp4 or
            with sizes that are no multiples of 16.
    """

    weight: nn.Parameter | None
    bias: nn.Parameter | None
    weight_codes: Tensor
    weight_scales: Tensor
    weight_tensor_scale: Tensor
    weight_row_top: Tensor

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
        device: torch.device | str | None = None,
        dtype: torch.dtype | None = None,
    ) -> None:
        super().__init__()
        if in_features < 1 or out_features < 1:
            raise ConfigurationError(f"a linear of {in_features} -> {out_features} features: both must be at least 1")
        if activation not in ACTIVATIONS:
            raise ConfigurationError(f"activation {activation!r} is not known: choose one of {', '.join(ACTIVATIONS)}")
        self.in_features, self.out_features, self.activation, self.use_fp4 = (
            in_features,
            out_features,
            activation,
            use_fp4,
        )
        self.form = format_named(format)
        self.w4a8 = w4a8
        if w4a8:
            self._check_w4a8()
        self.scale_search = check_search(scale_search or ("max" if use_fp4 else "mse"))
        self.weight = nn.Parameter(torch.empty(out_features, in_features, device=device, dtype=dtype))
        self.bias = nn.Parameter(torch.empty(out_features, device=device, dtype=dtype)) if bias else None
        for name in _BUFFERS:
            self.register_buffer(name, None, persistent=False)
        self._layout = self.form.name  # of the buffers: the format, with '-tiled' where they are tiled
        self._dtype = self.weight.dtype
        self.reset_parameters()

    def reset_parameters(self) -> None:
        """Draws weight and bias as ``nn.Linear`` does. A packed layer keeps its weight."""
        draw_as_linear(self.weight, self.bias, self.in_features)

    @classmethod
    def from_linear(cls, linear: nn.Linear, activation: str = "none", **options: Any) -> FusedFP4Linear:
        """A layer on the very parameters of ``linear``; ``options`` as for the constructor."""
        layer = cls(
            linear.in_features, linear.out_features, linear.bias is not None, activation, device="meta", **options
        )
        weight = linear.weight
        assert isinstance(weight, nn.Parameter)
        layer.weight, layer.bias, layer._dtype = weight, linear.bias, weight.dtype
        return layer.train(linear.training)

    @classmethod
    def from_packed(
        cls, packed: PackedTensor, bias: Tensor | None = None, activation: str = "none", *, w4a8: bool = False
    ) -> FusedFP4Linear:
        """A packed layer of a packed (N, K) matrix; a bias that is no parameter becomes a frozen one.

        Raises:
            ConfigurationError: ``packed`` is not a matrix, or not for w4a8.
            Unsupported: with w4a8, as ``quantize``.
        """
        if len(packed.shape) != 2:
            raise ConfigurationError(
                f"a packed tensor of shape {packed.shape} is no weight of a linear: it must be (N, K)"
            )
        layer = cls(packed.k, packed.n, bias is not None, activation, format=packed.format, w4a8=w4a8, device="meta")
        layer.bias = bias if bias is None or isinstance(bias, nn.Parameter) else nn.Parameter(bias, requires_grad=False)
        layer._adopt(packed)
        return layer

    @property
    def is_quantized(self) -> bool:
        """Whether the weight is packed."""
        return self.weight is None

    @property
    def packed(self) -> PackedTensor | None:
        """The packed weight in its canonical layout; ``None`` before ``quantize()``. On a GPU this makes a copy."""
        if self.weight is not None:
            return None
        return unplace(self._placed(), self.form, (self.out_features, self.in_features), self._dtype)

    def quantize(self, *, tensor_scale: Tensor | None = None) -> FusedFP4Linear:
        """Packs the weight and lets go of the original; on a packed layer it changes nothing. Returns the layer.

        An optimizer or a variable that still holds the old parameter keeps its memory: drop those first.

        Args:
            tensor_scale: nvfp4's, shared with other layers; see ``numerics.fp4.joint_tensor_scale``.

        Raises:
            ConfigurationError: the weight has inf or NaN, or a dtype that cannot be packed.
            Unsupported: with w4a8, exponents in a row span more than E4M3 holds, or a GPU without FP8. The layer stays as it was.
        """
        if self.weight is not None:
            if self.w4a8:
                check_device(self.weight.device, self._name())  # before the search for scales
            form, search, name = self.form.name, self.scale_search, self._name()
            self._adopt(quantize(self.weight, form, search, tensor_scale=tensor_scale, name=name))
        return self

    def use_w4a8(self, enabled: bool = True) -> FusedFP4Linear:
        """Multiplies on FP8 tensor cores from now on, or no longer; for layers that came packed. Returns the layer.

        Raises:
            ConfigurationError, Unsupported: as the constructor and ``quantize``. The layer stays as it was.
        """
        if enabled:
            self._check_w4a8()
        packed = self.packed
        if packed is not None and enabled:
            check_packed(packed, self._name())
        self.w4a8 = enabled
        if packed is not None:
            self._adopt(packed)
        return self

    def freeze(self) -> FusedFP4Linear:
        """Packs the layer and freezes its bias: a base for adapters. Gradients pass through to ``x``. Returns the layer."""
        if self.bias is not None:
            self.bias.requires_grad_(False)
        return self.quantize()

    def forward(self, x: Tensor) -> Tensor:
        """(..., K) -> (..., N), in the dtype of ``x`` or of autocast."""
        if self.weight is None:
            placed = (self.weight_codes, self.weight_scales, self.weight_tensor_scale)
            shape = (self.out_features, self.in_features)
            if self.w4a8:
                return fp4_linear_w4a8(x, *placed, self.weight_row_top, self.bias, self.activation, *shape)
            return fp4_linear(x, *placed, self.bias, self._layout, self.activation, *shape)
        if torch.is_autocast_enabled(x.device.type):
            x = x.to(torch.get_autocast_dtype(x.device.type))
        weight = fp4_round_trip(self.weight, self.form.name, x.dtype) if self.use_fp4 else self.weight
        return activate(functional.linear(x, weight, self.bias), self.activation)

    def extra_repr(self) -> str:
        state = f"packed={self._layout}" if self.is_quantized else f"format={self.form.name}, use_fp4={self.use_fp4}"
        return (
            f"{self.in_features}, {self.out_features}, bias={self.bias is not None}, "
            f"activation={self.activation}, {state}" + (", w4a8=True" if self.w4a8 else "")
        )

    def _name(self) -> str:
        return f"weight of {type(self).__name__}({self.in_features} -> {self.out_features})"

    def _check_w4a8(self) -> None:
        check_shape(self.form.name, self.out_features, self.in_features, self._name())

    def _placed(self) -> Placed:
        return Placed(self._layout, self.weight_codes, self.weight_scales, self.weight_tensor_scale)

    def _adopt(self, packed: PackedTensor) -> None:
        """Becomes a packed layer of ``packed``, laid out for its device."""
        if self.w4a8:
            check_packed(packed, self._name())
        self.weight = None  # first: shuffling into tiles then has the original's room
        placed = place(packed, tiles=self.w4a8)
        self.form, self._dtype, self._layout = packed.form, packed.dtype, placed.name
        shape = (self.out_features, self.in_features)
        tops = row_tops_for_w4a8(placed.scales, *shape) if self.w4a8 else None
        for name, tensor in zip(_BUFFERS, (placed.codes, placed.scales, placed.tensor_scale, tops), strict=True):
            setattr(self, name, tensor)

    def _drop_packed(self, device: torch.device) -> None:
        """Becomes an unpacked layer with an uninitialised weight."""
        for name in _BUFFERS:
            setattr(self, name, None)
        shape = (self.out_features, self.in_features)
        self.weight = nn.Parameter(torch.empty(shape, dtype=self._dtype, device=device))

    def _apply(self, fn: Callable[[Tensor], Tensor], recurse: bool = True) -> FusedFP4Linear:
        """Moves packed bytes without converting them: ``.half()`` is for parameters, scales keep their types."""
        if self.weight is not None:
            super()._apply(fn, recurse)
            self._dtype = self.weight.dtype
            return self
        buffers = {name: tensor for name in _BUFFERS if (tensor := getattr(self, name)) is not None}
        probe = fn(torch.empty(0, dtype=self._dtype, device=buffers[CODES].device))
        if self.w4a8:
            check_device(probe.device, self._name())
        for name in _BUFFERS:
            setattr(self, name, None)
        super()._apply(fn, recurse)
        for name, tensor in buffers.items():
            moved = fn(tensor.reshape(-1).view(torch.uint8))
            setattr(self, name, moved.view(tensor.dtype).reshape(tensor.shape))
        if probe.dtype.is_floating_point:
            self._dtype = probe.dtype
        if probe.device != buffers[CODES].device and probe.device.type != "meta":
            packed = self.packed
            assert packed is not None
            self._adopt(packed)
        return self

    def _save_to_state_dict(self, destination: dict[str, Any], prefix: str, keep_vars: bool) -> None:
        super()._save_to_state_dict(destination, prefix, keep_vars)
        packed = self.packed
        if packed is not None:
            destination.update({prefix + name: tensor for name, tensor in to_state(packed).items()})

    def _load_from_state_dict(
        self,
        state_dict: Mapping[str, Any],
        prefix: str,
        local_metadata: Mapping[str, Any],
        strict: bool,
        missing_keys: list[str],
        unexpected_keys: list[str],
        error_msgs: list[str],
    ) -> None:
        device = self.weight_codes.device if self.weight is None else self.weight.device
        rest = {key: value for key, value in state_dict.items() if key.removeprefix(prefix) not in STATE_NAMES}
        if len(rest) < len(state_dict):
            packed = self._checked(from_state(state_dict, prefix), prefix)
            assign = local_metadata.get("assign_to_params_buffers", False)
            self._adopt(packed if assign else _copied(packed, device))
        elif self.weight is None and prefix + "weight" in state_dict:
            self._drop_packed(device)
        elif self.weight is None and strict:
            missing_keys.extend(prefix + name for name in STATE_NAMES)
        super()._load_from_state_dict(rest, prefix, local_metadata, strict, missing_keys, unexpected_keys, error_msgs)

    def _checked(self, packed: PackedTensor, prefix: str) -> PackedTensor:
        if packed.format != self.form.name:
            raise ConfigurationError(
                f"{prefix}weight is packed as {packed.format}, this layer is for {self.form.name}: "
                f"make it with format={packed.format!r}"
            )
        if packed.shape != (self.out_features, self.in_features):
            raise ConfigurationError(
                f"{prefix}weight is packed with shape {packed.shape}, this layer's is "
                f"{(self.out_features, self.in_features)}: the checkpoint belongs to another model"
            )
        return packed


def _copied(packed: PackedTensor, device: torch.device) -> PackedTensor:
    """A copy that shares no memory with the state dict it came from."""
    copies = {name: torch.empty_like(tensor, device=device).copy_(tensor) for name, tensor in packed.tensors().items()}
    return PackedTensor(packed.form, packed.shape, packed.dtype, **copies)
