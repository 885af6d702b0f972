"""A linear whose weight is packed. Its bytes are the parts of ``weight_*``, stored in one of two ways: as buffers that
replace a parameter (`PackableLinear`), or as frozen parameters that a stack moves (stored_fp4.py).

In a state dict, and on the CPU, a weight in buffers has the canonical layout (numerics/packed.py), as entries of
tensors alone (``weight_meta`` is JSON as bytes), whatever layout a GPU's buffers have. Either kind of checkpoint loads
into a layer in either state. Not a subclass of ``nn.Linear``: libraries that find one read ``.weight``.
"""

import json
import warnings
from collections.abc import Callable, Mapping
from dataclasses import dataclass, replace
from types import ModuleType
from typing import Any, Self, cast

import torch
from torch import Tensor, nn

from vblackwell.errors import ConfigurationError, CorruptData, Unsupported
from vblackwell.kernels.fp4 import encode, layout
from vblackwell.kernels.fp4 import w4a4 as fp4_inputs
from vblackwell.kernels.fp4 import w4a8 as fp8_inputs
from vblackwell.kernels.fp4.linear import fp4_linear
from vblackwell.kernels.fp4.two_part import two_part_linear
from vblackwell.numerics.formats import Format
from vblackwell.numerics.packed import PackedTensor

PARTS = CODES, SCALES, TENSOR_SCALE = ("weight_codes", "weight_scales", "weight_tensor_scale")
FINE, ROW_TOP, META = "weight_fine", "weight_row_top", "weight_meta"
STATE_NAMES = (*PARTS, META)
_ENTRIES = {"codes": CODES, "block_scales": SCALES, "tensor_scale": TENSOR_SCALE, "fine": FINE}
_SHUFFLE_ELEMENTS = 1 << 20


@dataclass(frozen=True, eq=False)
class PlacedWeight:
    layout: str  # the format with its layout: 'nvfp4', or 'nvfp4-tiled'
    codes: Tensor  # with the scales the coarse part, or the only one
    scales: Tensor
    tensor_scale: Tensor
    fine: Tensor | None = None  # None where there is none, or it is elsewhere
    row_top: Tensor | None = None  # of a weight that computes by w4a8; follows from the scales
    w4a4: bool = False

    def tensors(self) -> list[Tensor]:
        held = (self.codes, self.scales, self.tensor_scale, self.fine, self.row_top)
        return [tensor for tensor in held if tensor is not None]

    def linear(self, x: Tensor, bias: Tensor | None, activation: str, n: int, k: int) -> Tensor:
        """``activation(x W^T + bias)``, with the fine part where it is there, or by w4a8 or w4a4."""
        scales, rest = (self.scales, self.tensor_scale), (bias, self.layout, activation, n, k)
        if self.row_top is not None:
            return fp8_inputs.fp4_linear_w4a8(x, self.codes, *scales, self.row_top, bias, activation, n, k)
        if self.fine is None:
            return (fp4_inputs.fp4_linear_w4a4 if self.w4a4 else fp4_linear)(x, self.codes, *scales, *rest)
        return two_part_linear(x, self.codes, self.fine, *scales, *rest)


def is_transposed(linear: nn.Module) -> bool:
    """Whether it is transformers' `Conv1D` (GPT-2's): a linear whose weight is stored as (inputs, outputs)."""
    return type(linear).__name__ == "Conv1D" and hasattr(linear, "nf") and "weight" in linear._parameters


def sizes_of(linear: Any) -> tuple[int, int]:
    """Outputs and inputs (N, K) of an ``nn.Linear`` or a `Conv1D`."""
    return (linear.nf, linear.weight.shape[0]) if is_transposed(linear) else (linear.out_features, linear.in_features)


def turned(weight: Tensor, transposed: bool) -> Tensor:
    """From how files have the weight of a linear to (N, K), or back."""
    return weight.t().contiguous() if transposed else weight


def pack(weight: Tensor, precision: str, name: str) -> PackedTensor:
    """``weight`` packed as 'two-part', or in a format; raises as `encode.quantize`."""
    if precision == "two-part":
        return encode.separate(weight, name=name)
    return encode.quantize(weight, precision, name=name)


def rounding(w4a8: bool = False, w4a4: bool = False) -> ModuleType | None:
    """The module whose `check_shape`, `check_packed` and `check_device` say what inputs rounded so go with; None where
    they are not rounded. Raises ConfigurationError for both."""
    if w4a8 and w4a4:
        raise ConfigurationError("w4a8 rounds inputs to FP8 and w4a4 to FP4: give one of them, or neither")
    return fp8_inputs if w4a8 else fp4_inputs if w4a4 else None


def place(packed: PackedTensor, tiles: bool = False, by: ModuleType | None = None) -> PlacedWeight:
    """Tiled on CUDA where the format has tiles and the values fit, or with a warning as it is; with ``tiles``, or
    inputs rounded ``by`` a module of `rounding` whose `check_packed` takes the weight, anywhere, or Unsupported."""
    if tiles or by is not None:
        placed = tiled(packed)
        row_top = fp8_inputs.row_tops(placed.scales, packed.n, packed.k) if by is fp8_inputs else None
        return replace(placed, row_top=row_top, w4a4=by is fp4_inputs)
    if packed.device.type == "cuda" and packed.format in ("nvfp4", "mxfp4"):
        try:
            return tiled(packed)
        except Unsupported as error:  # of extreme range: there are backends for the canonical layout too
            slow = f"a weight of {packed.n} x {packed.k} is not laid out for the fused kernels, and computes slowly"
            warnings.warn(f"{slow}: {error}", stacklevel=2)
    return PlacedWeight(packed.format, packed.codes, packed.block_scales, packed.tensor_scale, packed.fine)


def tiled(packed: PackedTensor) -> PlacedWeight:
    """The tiled layout of an nvfp4 or mxfp4 tensor; Unsupported where it cannot hold the values. Without a kernel, rows
    go in bands, because shuffling takes several bytes a weight; those of mxfp4 share the exponent of the scale.
    """
    n, k, name = packed.n, packed.k, layout.tiled_name(packed.format)
    if (tensors := encode.tiles(packed)) is not None:
        return PlacedWeight(name, *tensors)
    if packed.fine is not None:
        parts = (packed.codes, packed.fine, packed.block_scales, packed.tensor_scale)
        codes, fine, scales, tensor_scale = layout.parts_to_tiled(*parts, n, k)
        return PlacedWeight(layout.TILED_PARTS, codes, scales, tensor_scale, fine)
    band_rows = layout.TILE_N * max(1, _SHUFFLE_ELEMENTS // (layout.TILE_N * k))
    top = layout.live_exponents(packed.codes, packed.block_scales)[1] if packed.format == "mxfp4" else None
    codes, scales = (packed.codes.new_empty(shape) for shape in layout.shapes(name, n, k))
    tensor_scale = packed.tensor_scale
    for row in range(0, n, band_rows):
        rows = slice(row, min(n, row + band_rows))
        bands = slice(row // layout.TILE_N, -(-rows.stop // layout.TILE_N))
        canonical = (packed.codes[rows], packed.block_scales[rows], packed.tensor_scale, packed.format)
        codes[bands], scales[bands], tensor_scale = layout.to_tiled(*canonical, rows.stop - row, k, top)
    return PlacedWeight(name, codes, scales, tensor_scale)


def from_state(entries: Mapping[str, Tensor], prefix: str) -> PackedTensor:
    """The packed weight that a state dict has under ``prefix``; CorruptData where entries lack or do not fit."""
    missing = [name for name in STATE_NAMES if prefix + name not in entries]
    if missing:
        raise CorruptData(f"packed weight {prefix}weight lacks {', '.join(missing)}: the file is incomplete")
    try:
        meta = json.loads(bytes(entries[prefix + META].cpu().tolist()))
    except (ValueError, TypeError) as error:
        raise CorruptData(f"{prefix}{META} is not the description of a packed weight ({error})") from error
    found = {key: entries[prefix + name] for key, name in _ENTRIES.items() if prefix + name in entries}
    try:
        return PackedTensor.from_tensors(found, meta)
    except CorruptData as error:
        raise CorruptData(f"the entries {prefix}weight_*: {error}") from error


class PackedLinear(nn.Module):
    """A linear of K -> N features whose weight, or its coarse part, is packed to ``form``, in the layout ``layout``:
    the format's name, with '-tiled' where it is tiled. ``dtype`` is that of the weight before.
    """

    bias: nn.Parameter | None
    weight_codes: Tensor
    weight_scales: Tensor
    weight_tensor_scale: Tensor
    weight_fine: Tensor | None

    def __init__(self, in_features: int, out_features: int, form: Format) -> None:
        super().__init__()
        if in_features < 1 or out_features < 1:
            raise ConfigurationError(f"a linear of {in_features} -> {out_features} features: both must be at least 1")
        self.in_features, self.out_features, self.form = in_features, out_features, form
        self.layout, self.dtype = form.name, torch.float32

    def placed(self) -> PlacedWeight:
        held = self._buffers  # attributes of a module cost a search each
        return PlacedWeight(self.layout, *[cast(Any, held[name]) for name in (*PARTS, FINE)])

    def canonical(self, placed: PlacedWeight, dtype: torch.dtype) -> PackedTensor:
        """The weight in the layout of files again, as one of ``dtype``."""
        codes, scales, tensor_scale, fine = placed.codes, placed.scales, placed.tensor_scale, placed.fine
        shape = self.out_features, self.in_features
        if layout.is_tiled(placed.layout) and fine is not None:
            codes, fine, scales, tensor_scale = layout.parts_from_tiled(codes, fine, scales, tensor_scale, *shape)
        elif layout.is_tiled(placed.layout):
            codes, scales, tensor_scale = layout.from_tiled(codes, scales, tensor_scale, placed.layout, *shape)
            tensor_scale = tensor_scale.clone()  # a copy like the others: layers laid together share theirs
        return PackedTensor(self.form, shape, dtype, codes, scales, tensor_scale, fine)

    def forward(self, x: Tensor) -> Tensor:
        """(..., K) -> (..., N), in the dtype of ``x`` or of autocast."""
        return self.placed().linear(x, self.bias, "none", self.out_features, self.in_features)

    def extra_repr(self) -> str:
        return f"{self.in_features}, {self.out_features}, bias={self.bias is not None}, packed={self.layout}"


class PackableLinear(PackedLinear):
    """A linear with a parameter ``weight`` that can be packed: from then on buffers stand for it."""

    weight: nn.Parameter | None
    buffer_names: tuple[str, ...] = (*PARTS, FINE)
    state_names: tuple[str, ...] = STATE_NAMES  # entries that stand for a packed weight
    packed_by = "format"  # the argument that decides what the weight is packed to
    packed_as: tuple[str, ...] = ()  # what `from_packed` gives the constructor after ``bias``, unless it is told

    def __init__(self, in_features: int, out_features: int, bias: bool, form: Format, **factory: Any) -> None:
        super().__init__(in_features, out_features, form)
        self.weight = nn.Parameter(torch.empty(out_features, in_features, **factory))
        self.bias = nn.Parameter(torch.empty(out_features, **factory)) if bias else None
        self.dtype = self.weight.dtype
        self._drop_buffers()
        self.reset_parameters()

    def reset_parameters(self) -> None:
        """Draws weight and bias as ``nn.Linear`` does. A packed layer keeps both."""
        if self.weight is not None:
            nn.Linear.reset_parameters(self)  # type: ignore[arg-type]

    @classmethod
    def from_linear(cls, linear: nn.Linear, **options: Any) -> Self:
        """A layer on the very parameters of ``linear``; ``options`` as for the constructor."""
        make: Any = cls
        layer = make(linear.in_features, linear.out_features, linear.bias is not None, device="meta", **options)
        layer.weight, layer.bias, layer.dtype = linear.weight, linear.bias, linear.weight.dtype
        return layer.train(linear.training)

    @classmethod
    def from_packed(cls, packed: PackedTensor, bias: Tensor | None = None, *how: Any, **options: Any) -> Self:
        """A packed layer of a packed (N, K) matrix, moved into its device's layout; a bias that is no parameter becomes
        a frozen one. ``how`` and ``options`` as for the constructor, after its ``bias``.
        """
        if len(packed.shape) != 2:
            raise ConfigurationError(f"a packed tensor of shape {packed.shape} is no weight of a linear: give (N, K)")
        make, options = cast(Any, cls), options | {cls.packed_by: packed.precision, "dtype": packed.dtype}
        layer = make(packed.k, packed.n, bias is not None, *(how or cls.packed_as), device="meta", **options)
        layer.bias = bias if bias is None or isinstance(bias, nn.Parameter) else nn.Parameter(bias, requires_grad=False)
        layer._adopt(packed)
        return layer

    @property
    def is_quantized(self) -> bool:
        return self.weight is None

    @property
    def packed(self) -> PackedTensor | None:
        """The packed weight in its canonical layout; ``None`` before ``quantize()``. On a GPU this makes a copy."""
        return self.canonical(self.placed(), self.dtype) if self.weight is None else None

    @property
    def packs_to(self) -> str:
        return self.form.name

    def _name(self) -> str:
        return f"weight of {type(self).__name__}({self.in_features} -> {self.out_features})"

    def _adopt(self, packed: PackedTensor) -> None:
        self.hold(place(packed))

    def hold(self, placed: PlacedWeight) -> None:
        """Becomes a packed layer that computes from these very tensors."""
        self.layout, self.weight_codes, self.weight_scales = placed.layout, placed.codes, placed.scales
        self.weight_tensor_scale, self.weight_fine = placed.tensor_scale, placed.fine
        self.weight = None  # last: a thread that sees no weight finds all that stands for it

    def _drop_buffers(self) -> None:
        for name in self.buffer_names:
            self.register_buffer(name, None, persistent=False)

    def _forget(self) -> None:
        """Drops what a subclass keeps of a weight, which is about to change."""

    def _apply(self, fn: Callable[[Tensor], Tensor], recurse: bool = True) -> Self:
        """Moves packed bytes without converting them: ``.half()`` is for parameters, scales keep their types."""
        self._forget()
        if self.weight is not None:
            super()._apply(fn, recurse)
            self.dtype = self.weight.dtype
            return self
        buffers = {name: tensor for name in self.buffer_names if (tensor := getattr(self, name)) is not None}
        probe = fn(torch.empty(0, dtype=self.dtype, device=buffers[CODES].device))
        self._drop_buffers()
        super()._apply(fn, recurse)
        for name, tensor in buffers.items():
            moved = fn(tensor.reshape(-1).view(torch.uint8))
            setattr(self, name, moved.view(tensor.dtype).reshape(tensor.shape))
        if probe.dtype.is_floating_point:
            self.dtype = probe.dtype
        packed = self.packed if probe.device not in (buffers[CODES].device, torch.device("meta")) else None
        if packed is not None:
            self._adopt(packed)
        return self

    def _save_to_state_dict(self, destination: dict[str, Any], prefix: str, keep_vars: bool) -> None:
        super()._save_to_state_dict(destination, prefix, keep_vars)
        if (packed := self.packed) is not None:
            destination.update({prefix + _ENTRIES[name]: tensor for name, tensor in packed.tensors().items()})
            meta = bytearray(json.dumps(packed.coarse.meta()).encode())
            destination[prefix + META] = torch.frombuffer(meta, dtype=torch.uint8)

    def _load_from_state_dict(
        self,
        state_dict: dict[str, Any],
        prefix: str,
        local_metadata: dict[str, Any],
        strict: bool,
        missing_keys: list[str],
        unexpected_keys: list[str],
        error_msgs: list[str],
    ) -> None:
        self._forget()
        device = self.weight_codes.device if self.weight is None else self.weight.device
        shape, own = (self.out_features, self.in_features), {prefix + name for name in self.state_names}
        others = {key: value for key, value in state_dict.items() if key not in own}
        if len(others) < len(state_dict):
            packed = from_state({key: state_dict[key] for key in own & state_dict.keys()}, prefix)
            found = packed.precision
            # A layer in two parts takes a file of its coarse part alone.
            if found != self.packs_to and (found, self.packs_to) != ("nvfp4", "two-part"):
                wanted = f"this layer is for {self.packs_to}: make it with {self.packed_by}={found!r}"
                raise ConfigurationError(f"{prefix}weight is packed as {found}, {wanted}")
            if packed.shape != shape:
                wanted = f"this layer's is {shape}: the checkpoint belongs to another model"
                raise ConfigurationError(f"{prefix}weight is packed with shape {packed.shape}, {wanted}")
            self._adopt(packed if local_metadata.get("assign_to_params_buffers") else packed.to(device, copy=True))
        elif self.weight is None and prefix + "weight" in state_dict:
            self._drop_buffers()
            self.weight = nn.Parameter(torch.empty(shape, dtype=self.dtype, device=device))
        elif self.weight is None and strict:
            missing_keys.extend(prefix + name for name in STATE_NAMES)
        rest = strict, missing_keys, unexpected_keys, error_msgs
        super()._load_from_state_dict(others, prefix, local_metadata, *rest)
