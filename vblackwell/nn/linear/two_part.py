"""Weights in two parts: rounded straight through while they train, packed for inference.

Training rounds the weight at each forward, on scales that are renewed every ``refresh_every`` steps, or when the weight
has drifted; a step is a backward pass that reached the weight. Inference packs once, and again when the weight has
changed: in place, by an optimizer, or (each time) because it streams. Who writes through ``.data`` calls `forget`.
"""

import functools
import weakref
from collections import OrderedDict
from collections.abc import Callable
from dataclasses import dataclass, field
from typing import Any, Self

import torch
from torch import Tensor
from torch.nn import functional
from torch.optim.optimizer import register_optimizer_step_post_hook

from vblackwell.errors import ConfigurationError, UnknownKey, check_known, nearest
from vblackwell.kernels.fp4.two_part_round import renewed_scales, rounded, two_part_round_trip
from vblackwell.kernels.runtime.registry import computes_at_once
from vblackwell.nn.linear.packed_linear import FINE, STATE_NAMES, PackableLinear, PlacedWeight, pack, place
from vblackwell.nn.linear.rounded import Rounded, fp4_round_trip, rounded_linears
from vblackwell.numerics.formats import format_named
from vblackwell.numerics.separation import Scales

MODES = ("auto", "training", "inference")
BITS = {"two-part": 8.5, "nvfp4": 4.5, "int8": 8.0}
DRIFT_EVERY = 10  # steps between two measurements of the drift: a pass over the weight each


@dataclass(frozen=True)
class Settings:
    """What layers and adapters have in common; ConfigurationError for a value out of range. 'auto' trains where
    gradients are on and the weight wants one, and computes from packed parts elsewhere.
    """

    mode: str = "auto"
    precision: str = "two-part"  # or 'nvfp4', 'int8'
    refresh_every: int = 100  # steps between renewals of the kept scales
    drift_threshold: float = 0.05  # change of blocks' largest magnitudes that renews them sooner, up to 1

    def __post_init__(self) -> None:
        check_known("mode", self.mode, MODES)
        check_known("precision", self.precision, BITS)
        # True is an int to Python; numpy's floats are floats.
        every, drift = self.refresh_every, self.drift_threshold
        if isinstance(every, bool) or not isinstance(every, int) or every < 1:
            raise ConfigurationError(f"refresh_every {every!r} must be a whole number of steps from 1 on")
        if isinstance(drift, bool) or not isinstance(drift, (int, float)) or not 0 < drift <= 1:
            raise ConfigurationError(f"drift_threshold {drift!r} is out of range: above 0 (always renew) and up to 1")

    @classmethod
    def of(cls, mode: str, quantization: bool, fp4: bool, **renewal: Any) -> "Settings":
        """With the precision that two switches mean; ConfigurationError where both are off."""
        if not (fp4 or quantization):
            raise ConfigurationError("enable_quantization and enable_fp4 are both off: switch one of them on")
        return cls(mode, ("two-part" if quantization else "nvfp4") if fp4 else "int8", **renewal)

    def trains(self, weight: Tensor) -> bool:
        return self.mode == "training" or (self.mode == "auto" and torch.is_grad_enabled() and weight.requires_grad)


@functools.cache
def _optimizer_steps() -> list[int]:
    """How many steps any optimizer has taken, from the first question on: fused ones, and our kernels, change weights
    without a new version of the tensor.
    """
    steps = [0]

    def count_step(*_: Any) -> None:
        steps[0] += 1

    register_optimizer_step_post_hook(count_step)
    return steps


@dataclass(eq=False)
class _Cache:
    """What is kept of one weight, detached: scales while it trains, packed parts for inference, never both."""

    settings: Settings
    shape: tuple[int, int]
    scales: Scales | None = None
    parts: PlacedWeight | None = None
    source: tuple[Any, ...] = ()
    owner: weakref.ref[Tensor] | None = field(default=None, repr=False)
    steps: int = 0
    measured_at: int = 0
    renewed_at: int = 0
    renewals: int | Tensor = 0
    packings: int = 0
    drift: Tensor | None = field(default=None, repr=False)

    def product(self, weight: Tensor, x: Tensor, name: str, bias: Tensor | None) -> Tensor:
        if not self.settings.trains(weight):
            parts: PlacedWeight = self._packed(weight, name)  # pyright: ignore[reportAttributeAccessIssue]
            return parts.linear(x, bias, "none", *self.shape)
        if torch.is_autocast_enabled(x.device.type):
            x = x.to(torch.get_autocast_dtype(x.device.type))
        if not computes_at_once():
            value = self._traced(weight, x.dtype)  # pyright: ignore[reportAttributeAccessIssue]
            return functional.linear(x, value, bias)
        found = self.rounding(weight, x.dtype)
        if not torch.is_grad_enabled():
            return functional.linear(x, found.value, bias)
        return rounded_linears(x, (found,), bias)[0]

    def rounding(self, weight: Tensor, dtype: torch.dtype) -> Rounded:
        # Of the two ops that of formats has a gradient.
        source = weight if self.settings.precision == "two-part" else weight.detach()
        return Rounded(weight, self._rounded(source, dtype, rounded), self.count_step)

    @torch.compiler.disable
    def _traced(self, weight: Tensor, dtype: torch.dtype) -> Tensor:
        """As `rounding`, by operations that a trace sees."""
        value = self._rounded(weight, dtype, two_part_round_trip)
        if value.requires_grad:
            value.register_hook(lambda _: self.count_step())
        return value

    def _rounded(self, weight: Tensor, dtype: torch.dtype, to_parts: Callable[..., Tensor]) -> Tensor:
        self.parts = self.owner = None
        if self.settings.precision != "two-part":
            return fp4_round_trip(weight, self.settings.precision, dtype)
        scales = self._current_scales(weight)
        return to_parts(weight, scales.block, scales.tensor, dtype)

    def count_step(self) -> None:
        self.steps += 1

    def _current_scales(self, weight: Tensor) -> Scales:
        kept, steps = self.scales, self.steps
        due = kept is None or kept.block.device != weight.device
        due = due or steps - self.renewed_at >= self.settings.refresh_every
        if due or steps - self.measured_at >= DRIFT_EVERY:
            threshold = self.settings.drift_threshold
            with torch.no_grad():
                self.scales, drift = renewed_scales(weight, None if due else kept, threshold)
                self.measured_at = steps
                if due:
                    self.renewed_at, self.renewals = steps, self.renewals + 1
                else:
                    self.drift, self.renewals = drift, self.renewals + (drift > threshold).to(torch.int32)
        assert self.scales is not None
        return self.scales

    @torch.compiler.disable
    @torch.no_grad()
    def _packed(self, weight: Tensor, name: str) -> PlacedWeight:
        version = None if weight.is_inference() else weight._version
        source = (weight.data_ptr(), weight.device, version, _optimizer_steps()[0] if weight.requires_grad else 0)
        streams = "_vb_binding" in weight.__dict__  # its memory comes and goes, and may come back with other numbers
        if self.parts is None or self.owner is None or self.owner() is not weight or self.source != source or streams:
            with torch.inference_mode(False):
                self.parts, self.scales = place(pack(weight, self.settings.precision, name)), None
            self.source, self.owner = source, weakref.ref(weight)
            self.packings += 1
        return self.parts

    def stats(self) -> dict[str, Any]:
        drift = None if self.drift is None else float(self.drift)
        counts = {"steps": self.steps, "renewals": int(self.renewals), "packings": self.packings}
        held = [] if self.parts is None else self.parts.tensors()
        held += [] if self.scales is None else [self.scales.block, self.scales.tensor]
        return {"shape": self.shape, **counts, "drift": drift, "cached_bytes": sum(tensor.nbytes for tensor in held)}

    def __getstate__(self) -> dict[str, Any]:  # of copies and files, for which addresses and references are nothing
        return self.__dict__ | {"owner": None}


class VirtualBlackwellAdapter:
    """Products with weights in two parts, by name; caches of the ``max_weights`` weights used last are kept."""

    def __init__(self, settings: Settings | None = None, *, max_weights: int = 4096) -> None:
        self.settings = settings or Settings()
        if max_weights < 1:
            raise ConfigurationError(f"max_weights {max_weights!r} must be at least 1")
        self.max_weights = max_weights
        self._caches: OrderedDict[str, _Cache] = OrderedDict()

    def register_weight(self, name: str, weight: Tensor) -> None:
        """Announce a weight (N, K) under ``name``, in place of what is there; nothing is computed before its use."""
        if weight.dim() != 2 or not weight.is_floating_point():
            found = f"{weight.dtype} {tuple(weight.shape)}"
            raise ConfigurationError(f"{name!r} is {found}: a weight is an (N, K) matrix of floating-point numbers")
        self._caches[name] = _Cache(self.settings, (weight.shape[0], weight.shape[1]))
        self._caches.move_to_end(name)
        while len(self._caches) > self.max_weights:
            self._caches.popitem(last=False)

    def compress(self, weight: Tensor, x: Tensor, name: str, bias: Tensor | None = None) -> Tensor:
        """``x W^T + bias``, (..., K) to (..., N) in the type of ``x`` or of autocast, with ``weight`` (N, K) rounded.
        Raises ConfigurationError for another shape than was registered, or inf or NaN when packing.
        """
        if name not in self._caches:  # never announced, or crowded out
            self.register_weight(name, weight)
        cache = self._caches[name]
        self._caches.move_to_end(name)
        if cache.shape != tuple(weight.shape):
            found = f"was registered with shape {cache.shape}, not {tuple(weight.shape)}"
            raise ConfigurationError(f"{name!r} {found}: register it again under its new shape")
        return cache.product(weight, x, name, bias)

    def forget(self, name: str | None = None) -> None:
        """Drop the caches of one weight, or of all; UnknownKey if nothing is registered under ``name``."""
        if name is None:
            self._caches.clear()
        elif self._caches.pop(name, None) is None:
            raise UnknownKey(f"{name!r} is not registered{nearest(name, self._caches)}")

    def stats(self) -> dict[str, dict[str, Any]]:
        """By name: ``shape``, ``steps``, ``renewals``, ``packings``, ``drift`` when last measured (None before),
        ``cached_bytes``. Waits for the device."""
        return {name: cache.stats() for name, cache in self._caches.items()}


def create_virtual_blackwell(
    mode: str = "auto",
    enable_quantization: bool = True,
    enable_fp4: bool = True,
    *,
    max_weights: int = 4096,
    **how: Any,
) -> VirtualBlackwellAdapter:
    """An adapter for weights by name; other arguments as of `enable_vb_optimization`."""
    return VirtualBlackwellAdapter(Settings.of(mode, enable_quantization, enable_fp4, **how), max_weights=max_weights)


class VBOptimizedLinear(PackableLinear):
    """``x W^T + b`` with a weight in two parts.

    Before ``quantize()`` forward multiplies by the parameter rounded. After, or from the first forward on in mode
    'inference', packed buffers stand for it, and ``drop_fine()`` gives the fine half away until ``attach_fine()``.

    Args:
        in_features, out_features, bias: K and N, any size, and whether there is a bias.
        mode, refresh_every, drift_threshold: see `Settings`.
        precision: 'two-part' (8.5 bits), 'nvfp4' (4.5) or 'int8' (8).
        device, dtype: of the parameters, as for ``nn.Linear``.

    Raises ConfigurationError for a size below 1, or a value that `Settings` refuses.
    """

    state_names = (*STATE_NAMES, FINE)
    packed_by, packed_as = "precision", ("inference",)

    def __init__(
        self,
        in_features: int,
        out_features: int,
        bias: bool = True,
        mode: str = "auto",
        *,
        precision: str = "two-part",
        device: Any = None,
        dtype: Any = None,
        **renewal: Any,
    ) -> None:
        settings = Settings(mode, precision, **renewal)
        form = format_named("nvfp4" if precision == "two-part" else precision)
        super().__init__(in_features, out_features, bias, form, device=device, dtype=dtype)
        self.settings = settings
        self._forget()

    @property
    def packs_to(self) -> str:
        return self.settings.precision

    @property
    def has_fine(self) -> bool:
        return self.weight_fine is not None

    def quantize(self) -> Self:
        """Packs the weight and lets go of the original, if it is finite; a packed layer stays. Returns the layer."""
        weight = self.weight  # another thread may be at it as well
        if weight is not None:
            self._adopt(pack(weight, self.settings.precision, self._name()))
        return self

    def drop_fine(self) -> Tensor:
        """Gives the fine part away, bytes in the layout of the layer's device, and computes from the coarse one."""
        fine = self.weight_fine
        if fine is None:
            raise ConfigurationError(f"{self._name()} has no fine part to drop: quantize() a layer in two parts first")
        self.weight_fine = None
        return fine

    def attach_fine(self, fine: Tensor) -> None:
        """Takes what ``drop_fine`` gave back, on the layer's device, without copying it."""
        codes = self.weight_codes
        if self.weight is not None or not self.layout.startswith("nvfp4"):
            raise ConfigurationError(f"{self._name()} has no coarse part that a fine one could refine")
        if fine.shape != codes.shape or fine.dtype != codes.dtype or fine.device != codes.device:
            found, wanted = (f"{each.dtype} {tuple(each.shape)} on {each.device}" for each in (fine, codes))
            raise ConfigurationError(f"{self._name()}: a fine part of {found}, expected {wanted}")
        self.weight_fine = fine

    def forward(self, x: Tensor) -> Tensor:
        """(..., K) -> (..., N), in the type of ``x`` or of autocast."""
        if self.weight is not None and self.settings.mode == "inference":
            self.quantize()
        weight = self.weight
        if weight is None:
            return super().forward(x)
        return self._cache.product(weight, x, "weight", self.bias)

    def rounded_for(self, x: Tensor) -> Rounded | None:
        """What training multiplies ``x`` by, for several layers of one input; None where the layer is to be called."""
        own = self._parameters  # attributes of a module cost a search each
        weight = own.get("weight")
        if weight is None or own.get("bias") is not None or not torch.is_grad_enabled() or not computes_at_once():
            return None
        if torch.is_autocast_enabled(x.device.type) or not self.settings.trains(weight):
            return None
        return self._cache.rounding(weight, x.dtype)

    def stats(self) -> dict[str, Any]:
        """Shape, precision, whether it is packed, bytes held, and the counts of `VirtualBlackwellAdapter.stats`."""
        held = sum(tensor.nbytes for tensor in (self.placed().tensors() if self.weight is None else [self.weight]))
        own = {"precision": self.settings.precision, "packed": self.is_quantized, "has_fine": self.has_fine}
        return self._cache.stats() | own | {"weight_bytes": held}

    def extra_repr(self) -> str:
        packed = f"packed={self.layout}{' + fine' if self.has_fine else ''}"
        kind = f"{self.settings.precision}, {packed if self.is_quantized else self.settings.mode}"
        return f"{self.in_features}, {self.out_features}, bias={self.bias is not None}, {kind}"

    def __getstate__(self) -> dict[str, Any]:  # of copies and files: caches belong to one weight
        return self.__dict__ | {"_cache": _Cache(self.settings, self._cache.shape)}

    def _forget(self) -> None:
        self._cache = _Cache(self.settings, (self.out_features, self.in_features))

    def hold(self, placed: PlacedWeight) -> None:
        super().hold(placed)
        self._forget()
