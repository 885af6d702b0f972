"""`enable_vb_optimization` and `VBModelWrapper`: a model whose linears have weights in two parts.

Every chosen linear is replaced by a `VBOptimizedLinear` on the very same parameters: nothing is copied, dtypes, ties
and optimizers stay. Heads, tied weights and what linears.py lists are left alone.
"""

from __future__ import annotations

import sys
from typing import Any

from torch import nn

from vblackwell.nn.convert.linears import replace_linears, select_linears
from vblackwell.nn.linear.two_part import (
    BITS,
    DRIFT_THRESHOLD,
    REFRESH_EVERY,
    Settings,
    VBOptimizedLinear,
    precision_of,
)
from vblackwell.units import format_bytes

LARGE_ELEMENTS = 1 << 24  # layers that are named when they are replaced


def enable_vb_optimization(
    model: nn.Module, mode: str = "auto", enable_quantization: bool = True, enable_fp4: bool = True,
    replace_pattern: str = "all", *, refresh_every: int = REFRESH_EVERY, drift_threshold: float = DRIFT_THRESHOLD,
    verbose: bool = False,
) -> nn.Module:  # fmt: skip
    """Put weights in two parts into ``model``, in place, and return it.

    Args:
        mode: 'training' multiplies by rounded weights and trains the parameters straight through; 'inference' packs
            each layer at its first forward, or at ``quantize()``, and lets the parameter go; 'auto' trains where
            gradients are on, and packs in addition to the parameter where not.
        enable_quantization, enable_fp4: both: coarse + fine, 8.5 bits. FP4 alone: nvfp4, 4.5 bits. Quantisation alone:
            int8 by rows, 8 bits.
        replace_pattern: 'all', 'large' (a weight of 2^20 elements and more) or a regular expression searched for in
            module names.
        refresh_every, drift_threshold: when kept scales are renewed; see `Settings`.
        verbose: say on standard error how many layers were replaced, and name large ones with their sizes.

    Raises:
        ConfigurationError: a value that is refused, both switches off, or nothing selected. The model is as it was.
    """
    settings = Settings(mode, precision_of(enable_quantization, enable_fp4), refresh_every, drift_threshold)
    chosen: dict[str, nn.Linear] = select_linears(model, replace_pattern)
    if verbose:
        _say(chosen, settings)
    replace_linears(model, chosen, lambda linear: VBOptimizedLinear.from_linear(linear, settings))
    return model


def _say(chosen: dict[str, nn.Linear], settings: Settings) -> None:
    weights = sum(linear.weight.numel() for linear in chosen.values())
    held = sum(linear.weight.nbytes for linear in chosen.values())
    packed = int(weights * BITS[settings.precision] / 8)
    print(
        f"{settings.precision}: {len(chosen)} linears of {weights / 1e6:.1f} M weights, "
        f"{format_bytes(held)} now, {format_bytes(packed)} packed",
        file=sys.stderr,
    )
    for number, (name, linear) in enumerate(chosen.items(), 1):
        if linear.weight.numel() >= LARGE_ELEMENTS:
            shape = "x".join(str(size) for size in linear.weight.shape)
            print(f"  {number} of {len(chosen)}: {name} {shape}, {format_bytes(linear.weight.nbytes)}", file=sys.stderr)


class VBModelWrapper(nn.Module):
    """A model with weights in two parts, and what became of it. Calls and unknown attributes go to the model.

    Args: as `enable_vb_optimization`, which changes ``model`` in place.

    Attributes:
        model: the model.
        replaced_modules: the layers by name.

    Raises:
        ConfigurationError: as `enable_vb_optimization`.
    """

    model: nn.Module

    def __init__(
        self, model: nn.Module, mode: str = "auto", replace_pattern: str = "all", verbose: bool = False, *,
        enable_quantization: bool = True, enable_fp4: bool = True, refresh_every: int = REFRESH_EVERY,
        drift_threshold: float = DRIFT_THRESHOLD,
    ) -> None:  # fmt: skip
        super().__init__()
        self.model = enable_vb_optimization(
            model, mode, enable_quantization, enable_fp4, replace_pattern,
            refresh_every=refresh_every, drift_threshold=drift_threshold, verbose=verbose,
        )  # fmt: skip
        self.train(model.training)

    def __getattr__(self, name: str) -> Any:
        try:
            return super().__getattr__(name)
        except AttributeError:
            return getattr(super().__getattr__("model"), name)

    def forward(self, *args: Any, **kwargs: Any) -> Any:
        """The model's forward."""
        return self.model(*args, **kwargs)

    @property
    def replaced_modules(self) -> dict[str, VBOptimizedLinear]:
        """The layers in two parts, by their names in the model."""
        return {name: module for name, module in self.model.named_modules() if isinstance(module, VBOptimizedLinear)}

    def get_all_stats(self) -> dict[str, dict[str, Any]]:
        """`VBOptimizedLinear.stats` by name: a few numbers a replaced layer. Waits for the device."""
        return {name: layer.stats() for name, layer in self.replaced_modules.items()}

    def print_all_stats(self) -> None:
        """The statistics as a table on standard output."""
        stats = self.get_all_stats()
        width = max((len(name) for name in stats), default=4)
        columns = "{:{}}  {:>13}  {:>10}  {:>10}  {:>6}  {:>8}  {:>6}"
        print(columns.format("name", width, "shape", "weight", "cached", "steps", "renewals", "drift"))
        for name, row in stats.items():
            shape, drift = "x".join(str(size) for size in row["shape"]), row["drift"]
            sizes = (format_bytes(row[kind]) for kind in ("weight_bytes", "cached_bytes"))
            said = "" if drift is None else f"{drift:.3f}"
            print(columns.format(name, width, shape, *sizes, row["steps"], row["renewals"], said))
        weight, cached = (sum(row[column] for row in stats.values()) for column in ("weight_bytes", "cached_bytes"))
        print(f"{len(stats)} layers, {format_bytes(weight)} of weights, {format_bytes(cached)} of caches")
