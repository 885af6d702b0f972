"""A linear whose weight is in two parts: rounded straight through while it trains, packed for inference, its fine part movable.

Before ``quantize()`` it has an ordinary parameter, and forward multiplies by that parameter rounded (two_part.py); what
the rounding keeps is made at the first forward, so making a model of such layers costs nothing. After, or from the
first forward on in mode 'inference', packed buffers stand for it (packed_linear.py), 8.5 bits a weight. Then
``drop_fine()`` gives the fine half away, for a lower level or another time, and the layer answers from the coarse one
until ``attach_fine()``.
"""

from __future__ import annotations

from typing import Any

import torch
from torch import Tensor, nn

from vblackwell.errors import ConfigurationError
from vblackwell.kernels.runtime.registry import computes_at_once
from vblackwell.nn.linear.packed_linear import PackedLinear
from vblackwell.nn.linear.packed_weight import FINE, STATE_NAMES, PlacedWeight, pack
from vblackwell.nn.linear.rounded import Rounded
from vblackwell.nn.linear.two_part import BITS, DRIFT_THRESHOLD, REFRESH_EVERY, Settings, VirtualBlackwellAdapter
from vblackwell.numerics.formats import format_named
from vblackwell.numerics.separation import SeparatedTensor


class VBOptimizedLinear(PackedLinear):
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

    state_names = (*STATE_NAMES, FINE)
    packed_by = "precision"

    def __init__(
        self, in_features: int, out_features: int, bias: bool = True, mode: str = "auto", *, precision: str = "two-part",
        refresh_every: int = REFRESH_EVERY, drift_threshold: float = DRIFT_THRESHOLD,
        device: torch.device | str | None = None, dtype: torch.dtype | None = None,
    ) -> None:  # fmt: skip
        settings = Settings(mode, precision, refresh_every, drift_threshold)
        form = format_named("nvfp4" if precision == "two-part" else precision)
        super().__init__(in_features, out_features, bias, form, device, dtype)
        self.settings = settings
        self._adapter: VirtualBlackwellAdapter | None = None

    @classmethod
    def from_linear(cls, linear: nn.Linear, settings: Settings) -> VBOptimizedLinear:
        """A layer on the very parameters of ``linear``: nothing is copied, ties and optimizers stay."""
        sizes, bias = (linear.in_features, linear.out_features), linear.bias is not None
        layer = cls(*sizes, bias, precision=settings.precision, device="meta")
        layer.settings = settings
        layer._share(linear)
        return layer

    @classmethod
    def from_separated(cls, packed: SeparatedTensor, bias: nn.Parameter | None) -> VBOptimizedLinear:
        """A packed layer of mode 'inference' on these very parts, moved into its device's layout."""
        n, k = packed.shape
        layer = cls(k, n, bias is not None, "inference", device="meta", dtype=packed.dtype)
        layer.bias = bias
        layer._adopt(packed)
        return layer

    @property
    def packs_to(self) -> str:
        """The precision that the weight is packed to."""
        return self.settings.precision

    @property
    def has_fine(self) -> bool:
        """Whether the layer is packed and its fine part is here."""
        return self.weight_fine is not None

    @property
    def bits(self) -> float:
        """Bits a weight once packed, scales included."""
        return BITS[self.settings.precision]

    def quantize(self) -> VBOptimizedLinear:
        """Packs the weight and lets go of the original; on a packed layer it changes nothing. Returns the layer.

        Raises:
            ConfigurationError: the weight has inf or NaN. The layer stays as it was.
        """
        weight = self.weight  # another thread may be at it as well
        if weight is not None:
            self._adopt(pack(weight, self.settings.precision, self._name()))
        return self

    def drop_fine(self) -> Tensor:
        """Gives the fine part away as bytes in the layout of the layer's device, and computes from the coarse one from now on.

        Raises:
            ConfigurationError: the layer is not packed, or has no fine part.
        """
        fine = self.weight_fine
        if fine is None:
            raise ConfigurationError(f"{self._name()} has no fine part to drop: quantize() a layer in two parts first")
        self.weight_fine = None
        return fine

    def attach_fine(self, fine: Tensor) -> None:
        """Takes what ``drop_fine`` gave back, on the layer's device, without copying it.

        Raises:
            ConfigurationError: the layer is not packed in nvfp4, or the bytes are of another shape, type or device.
        """
        codes = self.weight_codes
        if self.weight is not None or not self._layout.startswith("nvfp4"):
            raise ConfigurationError(f"{self._name()} has no coarse part that a fine one could refine")
        if fine.shape != codes.shape or fine.dtype != codes.dtype or fine.device != codes.device:
            raise ConfigurationError(
                f"{self._name()}: a fine part of {fine.dtype} {tuple(fine.shape)} on {fine.device}, expected "
                f"{codes.dtype} {tuple(codes.shape)} on {codes.device}"
            )
        self.weight_fine = fine

    def forward(self, x: Tensor) -> Tensor:
        """(..., K) -> (..., N), in the type of ``x`` or of autocast."""
        if self.weight is not None and self.settings.mode == "inference":
            self.quantize()
        weight = self.weight
        if weight is None:
            return self._placed().linear(x, self.bias, "none", self.out_features, self.in_features)
        return self._adapting().compress(weight, x, "weight", self.bias)

    def rounded_for(self, x: Tensor) -> Rounded | None:
        """What training multiplies ``x`` by, for several layers of one input; None where the layer is to be called."""
        own = self._parameters  # attributes of a module cost a search each
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
        packed_bytes = sum(tensor.nbytes for tensor in self._placed().tensors()) if self.weight is None else 0
        return {"steps": 0, "renewals": 0, "packings": 0, "drift": None, "cached_bytes": 0} | held | {
            "shape": (self.out_features, self.in_features),
            "precision": self.settings.precision,
            "packed": self.is_quantized,
            "has_fine": self.has_fine,
            "weight_bytes": packed_bytes if self.weight is None else self.weight.nbytes,
        }  # fmt: skip

    def extra_repr(self) -> str:
        packed = f"packed={self._layout}{' + fine' if self.has_fine else ''}"
        state, bias = packed if self.is_quantized else self.settings.mode, self.bias is not None
        return f"{self.in_features}, {self.out_features}, bias={bias}, {self.settings.precision}, {state}"

    def __getstate__(self) -> dict[str, Any]:  # of copies and files: caches belong to one weight
        return self.__dict__ | {"_adapter": None}

    def _forget(self) -> None:
        self._adapter = None

    def hold(self, placed: PlacedWeight) -> None:
        super().hold(placed)
        self._adapter = None
