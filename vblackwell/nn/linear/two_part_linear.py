"""A linear whose weight is in two parts: rounded straight through while it trains, packed for inference, its fine part movable.

Before ``quantize()`` it has an ordinary parameter, and forward multiplies by that parameter rounded (two_part.py); what the rounding
keeps is
made at the first forward, so making a model of such layers costs nothing. After, or from the first forward on in mode 'inference',
``weight`` is ``None`` and packed buffers stand for it, 8.5 bits a weight. Then ``drop_fine()`` gives the fine half away, for a lower
level or another time, and the layer answers from the coarse one until ``attach_fine()`` brings it back.

A state dict has ``weight``, or the entries of a packed one (fp4_state.py) with ``weight_fine``; either kind loads into a layer in either
state.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping
from typing import Any

import torch
from torch import Tensor, nn

from vblackwell.errors import ConfigurationError, CorruptData
from vblackwell.kernels.fp4 import layout
from vblackwell.kernels.runtime.registry import computes_at_once
from vblackwell.nn.linear.draw import draw_as_linear
from vblackwell.nn.linear.fp4_state import META, STATE_NAMES, from_state, to_state
from vblackwell.nn.linear.rounded import Rounded
from vblackwell.nn.linear.two_part import (
    BITS,
    DRIFT_THRESHOLD,
    REFRESH_EVERY,
    PlacedParts,
    Settings,
    VirtualBlackwellAdapter,
    pack,
    place_parts,
    unplace_parts,
)
from vblackwell.numerics.formats import format_named
from vblackwell.numerics.packed import PackedTensor
from vblackwell.numerics.separation import SeparatedTensor

FINE = "weight_fine"
_BUFFERS = ("weight_codes", "weight_scales", "weight_tensor_scale", FINE)


class VBOptimizedLinear(nn.Module):
    """``x W^T + b`` with a weight in two parts.

    Args:
        in_features, out_features: K and N, any size.
        bias: whether there is one.
        mode: 'auto', 'training' or 'inference'; see `Settings`.
        precision: 'two-part' (8.5 bits), 'nvfp4' (4.5) or 'int8' (8).
        refresh_every, drift_threshold: when kept scales are renewed; see `Settings`.
        device, dtype: of the parameters, as for ``nn.Linear``.

    Raises:
        ConfigurationError: a size below 1, or a value that `Settings` refuses.
    """

    weight: nn.Parameter | None
    bias: nn.Parameter | None
    weight_codes: Tensor | None

    def __init__(
        self, in_features: int, out_features: int, bias: bool = True, mode: str = "auto", *, precision: str = "two-part",
        refresh_every: int = REFRESH_EVERY, drift_threshold: float = DRIFT_THRESHOLD,
        device: torch.device | str | None = None, dtype: torch.dtype | None = None,
    ) -> None:  # fmt: skip
        super().__init__()
        if in_features < 1 or out_features < 1:
            raise ConfigurationError(f"a linear of {in_features} -> {out_features} features: both must be at least 1")
        self.settings = Settings(mode, precision, refresh_every, drift_threshold)
        self.in_features, self.out_features = in_features, out_features
        self.weight = nn.Parameter(torch.empty(out_features, in_features, device=device, dtype=dtype))
        self.bias = nn.Parameter(torch.empty(out_features, device=device, dtype=dtype)) if bias else None
        for name in _BUFFERS:
            self.register_buffer(name, None, persistent=False)
        self._layout, self._dtype = "", self.weight.dtype
        self._adapter: VirtualBlackwellAdapter | None = None
        self.reset_parameters()

    def reset_parameters(self) -> None:
        """Draws weight and bias as ``nn.Linear`` does; a packed layer keeps its weight."""
        draw_as_linear(self.weight, self.bias, self.in_features)

    @classmethod
    def from_linear(cls, linear: nn.Linear, settings: Settings) -> VBOptimizedLinear:
        """A layer on the very parameters of ``linear``: nothing is copied, ties and optimizers stay."""
        layer = cls(linear.in_features, linear.out_features, linear.bias is not None, device="meta")
        weight = linear.weight
        assert isinstance(weight, nn.Parameter)
        layer.settings, layer.weight, layer.bias, layer._dtype = settings, weight, linear.bias, weight.dtype
        return layer.train(linear.training)

    @classmethod
    def from_separated(cls, packed: SeparatedTensor, bias: nn.Parameter | None) -> VBOptimizedLinear:
        """A packed layer of mode 'inference' on these very parts, moved into its device's layout."""
        n, k = packed.shape
        layer = cls(k, n, bias is not None, "inference", device="meta", dtype=packed.dtype)
        layer.bias = bias
        layer._adopt(place_parts(packed))
        return layer

    @property
    def is_quantized(self) -> bool:
        """Whether the weight is packed."""
        return self.weight is None

    @property
    def has_fine(self) -> bool:
        """Whether the layer is packed and its fine part is here."""
        return getattr(self, FINE) is not None

    @property
    def bits(self) -> float:
        """Bits a weight once packed, scales included."""
        return BITS[self.settings.precision]

    @property
    def packed(self) -> SeparatedTensor | PackedTensor | None:
        """The packed weight in its canonical layout, without a fine part that was dropped; None before ``quantize()``."""
        if self.weight is not None:
            return None
        form = format_named(layout.canonical_name(self._layout))
        return unplace_parts(self._parts(), form, (self.out_features, self.in_features), self._dtype)

    def quantize(self) -> VBOptimizedLinear:
        """Packs the weight and lets go of the original; on a packed layer it changes nothing. Returns the layer.

        Raises:
            ConfigurationError: the weight has inf or NaN. The layer stays as it was.
        """
        weight = self.weight  # another thread may be at it as well
        if weight is not None:
            parts = place_parts(pack(weight, self.settings.precision, self._name()))
            self._adopt(parts)
        return self

    def drop_fine(self) -> Tensor:
        """Gives the fine part away as bytes in the layout of the layer's device, and computes from the coarse one from now on.

        Raises:
            ConfigurationError: the layer is not packed, or has no fine part.
        """
        fine = getattr(self, FINE)
        if fine is None:
            raise ConfigurationError(f"{self._name()} has no fine part to drop: quantize() a layer in two parts first")
        setattr(self, FINE, None)
        return fine

    def attach_fine(self, fine: Tensor) -> None:
        """Takes what ``drop_fine`` gave back, on the layer's device, without copying it.

        Raises:
            ConfigurationError: the layer is not packed in nvfp4, or the bytes are of another shape, type or device.
        """
        codes = self.weight_codes
        if codes is None or not self._layout.startswith("nvfp4"):
            raise ConfigurationError(f"{self._name()} has no coarse part that a fine one could refine")
        if fine.shape != codes.shape or fine.dtype != codes.dtype or fine.device != codes.device:
            raise ConfigurationError(
                f"{self._name()}: a fine part of {fine.dtype} {tuple(fine.shape)} on {fine.device}, expected "
                f"{codes.dtype} {tuple(codes.shape)} on {codes.device}"
            )
        setattr(self, FINE, fine)

    def forward(self, x: Tensor) -> Tensor:
        """(..., K) -> (..., N), in the type of ``x`` or of autocast."""
        if self.weight is not None and self.settings.mode == "inference":
            self.quantize()
        weight = self.weight
        if weight is None:
            return self._parts().linear(x, self.bias, "none", self.out_features, self.in_features)
        return self._adapting().compress(weight, x, "weight", self.bias)

    def rounded_for(self, x: Tensor) -> Rounded | None:
        """What training multiplies ``x`` by, for whoever computes several layers of one input; None where the layer is to be called."""
        own = self._parameters  # by their names alone each would cost a search
        weight = own.get("weight")
        if weight is None or own.get("bias") is not None or not torch.is_grad_enabled() or not computes_at_once():
            return None
        adapter = self._adapter or self._adapting()
        if torch.is_autocast_enabled(x.device.type) or not adapter.trains(weight):
            return None
        return adapter.rounding(weight, "weight", x.dtype)

    def _adapting(self) -> VirtualBlackwellAdapter:
        adapter = self._adapter
        if adapter is None:
            adapter = self._adapter = VirtualBlackwellAdapter(self.settings, max_weights=1)
        return adapter

    def stats(self) -> dict[str, Any]:
        """Shape, precision, whether it is packed, bytes held, and what the adapter knows; a few numbers whatever the size."""
        held = next(iter(self._adapter.stats().values()), {}) if self._adapter is not None else {}
        packed_bytes = sum(tensor.nbytes for tensor in self._parts().tensors()) if self.weight is None else 0
        return {"steps": 0, "renewals": 0, "packings": 0, "drift": None, "cached_bytes": 0} | held | {
            "shape": (self.out_features, self.in_features),
            "precision": self.settings.precision,
            "packed": self.is_quantized,
            "has_fine": self.has_fine,
            "weight_bytes": packed_bytes if self.weight is None else self.weight.nbytes,
        }  # fmt: skip

    def extra_repr(self) -> str:
        state = (
            f"packed={self._layout}{' + fine' if self.has_fine else ''}" if self.is_quantized else self.settings.mode
        )
        return (
            f"{self.in_features}, {self.out_features}, bias={self.bias is not None}, {self.settings.precision}, {state}"
        )

    def _name(self) -> str:
        return f"weight of {type(self).__name__}({self.in_features} -> {self.out_features})"

    def _parts(self) -> PlacedParts:
        return PlacedParts(self._layout, *(getattr(self, name) for name in _BUFFERS))

    def _adopt(self, parts: PlacedParts) -> None:
        self._layout = parts.layout
        tensors = (parts.codes, parts.scales, parts.tensor_scale, parts.fine)
        for name, tensor in zip(_BUFFERS, tensors, strict=True):
            setattr(self, name, tensor)
        self.weight, self._adapter = None, None  # last: whoever sees no weight finds all that stands for it

    def _drop_packed(self, device: torch.device) -> None:
        for name in _BUFFERS:
            setattr(self, name, None)
        shape = (self.out_features, self.in_features)
        self.weight = nn.Parameter(torch.empty(shape, dtype=self._dtype, device=device))

    def __getstate__(self) -> dict[str, Any]:  # of copies and files: caches belong to one weight
        return self.__dict__ | {"_adapter": None}

    def _apply(self, fn: Callable[[Tensor], Tensor], recurse: bool = True) -> VBOptimizedLinear:
        """Moves packed bytes without converting them: ``.half()`` is for parameters."""
        self._adapter = None
        if self.weight is not None:
            super()._apply(fn, recurse)
            self._dtype = self.weight.dtype
            return self
        before, buffers = self.packed, {name: getattr(self, name) for name in _BUFFERS}
        assert before is not None
        for name in _BUFFERS:
            setattr(self, name, None)
        probe = fn(torch.empty(0, dtype=self._dtype, device=before.device))
        super()._apply(fn, recurse)
        for name, tensor in buffers.items():
            setattr(self, name, tensor)
        if probe.dtype.is_floating_point:
            self._dtype = probe.dtype
        if probe.device != before.device:
            self._adopt(place_parts(before.to(probe.device)))
        return self

    def _save_to_state_dict(self, destination: dict[str, Any], prefix: str, keep_vars: bool) -> None:
        super()._save_to_state_dict(destination, prefix, keep_vars)
        packed = self.packed
        if packed is None:
            return
        coarse = packed.coarse if isinstance(packed, SeparatedTensor) else packed
        entries = to_state(coarse)
        if isinstance(packed, SeparatedTensor):
            entries[FINE] = packed.fine
        destination.update({prefix + name: tensor for name, tensor in entries.items()})

    def _load_from_state_dict(
        self, state_dict: Mapping[str, Any], prefix: str, local_metadata: Mapping[str, Any], strict: bool,
        missing_keys: list[str], unexpected_keys: list[str], error_msgs: list[str],
    ) -> None:  # fmt: skip
        held = self.weight if self.weight is not None else self.weight_codes
        assert held is not None
        names = (*STATE_NAMES, FINE)
        rest = {key: value for key, value in state_dict.items() if key.removeprefix(prefix) not in names}
        if len(rest) < len(state_dict) and prefix + META in state_dict:
            packed = self._checked(from_state(state_dict, prefix), state_dict.get(prefix + FINE), prefix)
            self._adopt(place_parts(packed.to(held.device)))
        elif self.weight is None and prefix + "weight" in state_dict:
            self._drop_packed(held.device)
        elif self.weight is None and strict:
            missing_keys.extend(prefix + name for name in STATE_NAMES)
        self._adapter = None
        super()._load_from_state_dict(rest, prefix, local_metadata, strict, missing_keys, unexpected_keys, error_msgs)

    def _checked(self, coarse: PackedTensor, fine: Tensor | None, prefix: str) -> SeparatedTensor | PackedTensor:
        shape = (self.out_features, self.in_features)
        if coarse.shape != shape:
            raise ConfigurationError(
                f"{prefix}weight is packed with shape {coarse.shape}, this layer's is {shape}: the checkpoint belongs to another model"
            )
        wanted = "nvfp4" if self.settings.precision == "two-part" else self.settings.precision
        if coarse.format != wanted or (fine is not None and self.settings.precision != "two-part"):
            raise ConfigurationError(
                f"{prefix}weight is packed as {coarse.format}{' with a fine part' if fine is not None else ''}, this layer is for "
                f"{self.settings.precision}: make it with the precision of the file"
            )
        copied = PackedTensor(
            coarse.form, coarse.shape, coarse.dtype, **{k: v.clone() for k, v in coarse.tensors().items()}
        )
        if fine is None:
            return copied
        separated = SeparatedTensor(copied, fine.clone())
        try:
            separated.check()
        except CorruptData as error:
            raise CorruptData(f"{prefix}{FINE}: {error}") from error
        return separated
