"""What linears that can be packed have in common: a parameter until then, and from then on bytes in buffers.

``weight`` is ``None`` once it is packed. The buffers are left out of torch's own state-dict handling, because a GPU
holds them in the kernels' layout and a state dict in the published one (packed_weight.py). Either kind of checkpoint
loads into a layer in either state. Moving a layer moves the bytes, and lays them out anew where the device asks for
another layout; casting it casts parameters.

Not a subclass of ``nn.Linear``: libraries that find one read ``.weight``, and here there may be none.
"""

from __future__ import annotations

import math
from collections.abc import Callable, Mapping
from typing import Any

import torch
from torch import Tensor, nn

from vblackwell.errors import ConfigurationError
from vblackwell.nn.linear.packed_weight import (
    CODES,
    FINE,
    PARTS,
    STATE_NAMES,
    PlacedWeight,
    copied,
    from_state,
    place,
    to_state,
    unplace,
)
from vblackwell.numerics.formats import Format
from vblackwell.numerics.packed import PackedTensor
from vblackwell.numerics.separation import SeparatedTensor


class PackedLinear(nn.Module):
    """A linear with a weight that can be packed; a subclass has the ``forward`` and decides when to pack.

    Args:
        in_features, out_features: K and N, any size.
        bias: whether there is one.
        form: format of the packed weight, or of its coarse part.
        device, dtype: of the parameters, as for ``nn.Linear``.

    Raises:
        ConfigurationError: a size below 1.
    """

    weight: nn.Parameter | None
    bias: nn.Parameter | None
    weight_codes: Tensor
    weight_scales: Tensor
    weight_tensor_scale: Tensor
    weight_fine: Tensor | None
    buffer_names: tuple[str, ...] = (*PARTS, FINE)
    state_names: tuple[str, ...] = STATE_NAMES  # entries that stand for a packed weight
    packed_by = "format"  # the argument that decides what the weight is packed to

    def __init__(
        self, in_features: int, out_features: int, bias: bool, form: Format, device: torch.device | str | None,
        dtype: torch.dtype | None,
    ) -> None:  # fmt: skip
        super().__init__()
        if in_features < 1 or out_features < 1:
            raise ConfigurationError(f"a linear of {in_features} -> {out_features} features: both must be at least 1")
        self.in_features, self.out_features, self.form = in_features, out_features, form
        self.weight = nn.Parameter(torch.empty(out_features, in_features, device=device, dtype=dtype))
        self.bias = nn.Parameter(torch.empty(out_features, device=device, dtype=dtype)) if bias else None
        for name in self.buffer_names:
            self.register_buffer(name, None, persistent=False)
        self._layout = form.name  # of the buffers: the format, with '-tiled' where they are tiled
        self._dtype = self.weight.dtype
        self.reset_parameters()

    def reset_parameters(self) -> None:
        """Draws weight and bias as ``nn.Linear`` does, in its order. A packed layer keeps its weight."""
        if self.weight is not None:
            nn.init.kaiming_uniform_(self.weight, a=math.sqrt(5))
        if self.bias is not None:
            bound = 1 / math.sqrt(self.in_features)
            nn.init.uniform_(self.bias, -bound, bound)

    def _share(self, linear: nn.Linear) -> None:
        """Takes the very parameters of ``linear``: nothing is copied, ties and optimizers stay."""
        weight = linear.weight
        assert isinstance(weight, nn.Parameter)
        self.weight, self.bias, self._dtype = weight, linear.bias, weight.dtype
        self.train(linear.training)

    @property
    def is_quantized(self) -> bool:
        """Whether the weight is packed."""
        return self.weight is None

    @property
    def packed(self) -> PackedTensor | SeparatedTensor | None:
        """The packed weight in its canonical layout; ``None`` before ``quantize()``. On a GPU this makes a copy."""
        if self.weight is not None:
            return None
        return unplace(self._placed(), self.form, (self.out_features, self.in_features), self._dtype)

    @property
    def packs_to(self) -> str:
        """What the weight is packed to: a format, or 'two-part'."""
        return self.form.name

    def _name(self) -> str:
        return f"weight of {type(self).__name__}({self.in_features} -> {self.out_features})"

    def _placed(self) -> PlacedWeight:
        return PlacedWeight(
            self._layout, self.weight_codes, self.weight_scales, self.weight_tensor_scale, self.weight_fine
        )

    def _adopt(self, packed: PackedTensor | SeparatedTensor) -> None:
        """Becomes a packed layer of ``packed``, laid out for its device."""
        self.hold(place(packed, tiles=False))

    def hold(self, placed: PlacedWeight) -> None:
        """Becomes a packed layer that computes from these very tensors."""
        self._layout = placed.layout
        self.weight_codes, self.weight_scales, self.weight_tensor_scale = (
            placed.codes,
            placed.scales,
            placed.tensor_scale,
        )
        self.weight_fine = placed.fine
        self.weight = None  # last: a thread that sees no weight finds all that stands for it

    def _forget(self) -> None:
        """Drops what a subclass keeps of a weight, which is about to change."""

    def _drop_packed(self, device: torch.device) -> None:
        """Becomes an unpacked layer with an uninitialised weight."""
        for name in self.buffer_names:
            setattr(self, name, None)
        shape = (self.out_features, self.in_features)
        self.weight = nn.Parameter(torch.empty(shape, dtype=self._dtype, device=device))

    def _apply(self, fn: Callable[[Tensor], Tensor], recurse: bool = True) -> PackedLinear:
        """Moves packed bytes without converting them: ``.half()`` is for parameters, scales keep their types."""
        self._forget()
        if self.weight is not None:
            super()._apply(fn, recurse)
            self._dtype = self.weight.dtype
            return self
        buffers = {name: tensor for name in self.buffer_names if (tensor := getattr(self, name)) is not None}
        probe = fn(torch.empty(0, dtype=self._dtype, device=buffers[CODES].device))
        for name in self.buffer_names:
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
        self, state_dict: Mapping[str, Any], prefix: str, local_metadata: Mapping[str, Any], strict: bool,
        missing_keys: list[str], unexpected_keys: list[str], error_msgs: list[str],
    ) -> None:  # fmt: skip
        self._forget()
        device = self.weight_codes.device if self.weight is None else self.weight.device
        own = {prefix + name for name in self.state_names}
        rest = {key: value for key, value in state_dict.items() if key not in own}
        if len(rest) < len(state_dict):
            packed = from_state({key: state_dict[key] for key in own & state_dict.keys()}, prefix)
            self._check_loaded(packed, prefix)
            assign = local_metadata.get("assign_to_params_buffers", False)
            self._adopt(packed if assign else copied(packed, device))
        elif self.weight is None and prefix + "weight" in state_dict:
            self._drop_packed(device)
        elif self.weight is None and strict:
            missing_keys.extend(prefix + name for name in STATE_NAMES)
        super()._load_from_state_dict(rest, prefix, local_metadata, strict, missing_keys, unexpected_keys, error_msgs)

    def _check_loaded(self, packed: PackedTensor | SeparatedTensor, prefix: str) -> None:
        found = "two-part" if isinstance(packed, SeparatedTensor) else packed.format
        # A layer in two parts takes a file of its coarse part alone.
        if found != self.packs_to and (found, self.packs_to) != ("nvfp4", "two-part"):
            raise ConfigurationError(
                f"{prefix}weight is packed as {found}, this layer is for {self.packs_to}: "
                f"make it with {self.packed_by}={found!r}"
            )
        if packed.shape != (self.out_features, self.in_features):
            raise ConfigurationError(
                f"{prefix}weight is packed with shape {packed.shape}, this layer's is "
                f"{(self.out_features, self.in_features)}: the checkpoint belongs to another model"
            )
