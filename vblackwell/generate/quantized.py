"""The weights of a folder with packed linears: ours, or a weight-only compressed-tensors one. Packed bytes stay packed,
in layers that compute from them.
"""

from collections.abc import Iterable
from dataclasses import dataclass
from pathlib import Path

import torch
from torch import Tensor, nn

from vblackwell.errors import ConfigurationError
from vblackwell.folders import compressed_tensors
from vblackwell.folders.folder import read_config
from vblackwell.folders.weights import FolderWeights
from vblackwell.nn.convert.linears import linear_of, replace_modules
from vblackwell.nn.linear.packed_linear import rounding, sizes_of
from vblackwell.nn.linear.stored_fp4 import StoredFP4Linear, stored_part
from vblackwell.numerics.packed import PackedTensor


@dataclass(frozen=True)
class Packing:
    """Linears that are packed to ``format`` while a model is opened: ``layers`` and ``keep`` say which, as for
    `convert`."""

    format: str = "nvfp4"
    layers: str = "all"
    keep: str | None = None


def open_folder(model: nn.Module, folder: Path) -> FolderWeights:
    """The weight files of ``folder``, quantised or not, matched with ``model``; raises as `FolderWeights` and
    `PackedWeights`."""
    return (PackedWeights if read_config(folder).get("quantization_config") else FolderWeights)(model, folder)


def refuse_unpacked(folder: Path) -> None:
    """Raises ConfigurationError where ``folder`` has no packed linears, for which alone rounded activations are."""
    if not read_config(folder).get("quantization_config"):
        remedy = "add --use-fp4 (fp4='mxfp4', or for w4a4 'nvfp4'), or give a folder of vb quantize with that --format"
        flags = "--fp8-activations (w4a8) and --fp4-activations (w4a4)"
        raise ConfigurationError(f"{folder}: {flags} are for packed linears, it has none: {remedy}")


class PackedWeights(FolderWeights):
    """As `FolderWeights`, of a folder some of whose ``linears`` are packed to ``form``. Raises Unsupported for a
    quantisation that is not read here, ConfigurationError where they are not the model's, CorruptData where entries are
    missing or do not fit each other."""

    def __init__(self, model: nn.Module, folder: Path) -> None:
        stated = read_config(folder).get("quantization_config") or {}
        self.form = compressed_tensors.format_of_config(stated)
        self._fine = set[str](stated.get(compressed_tensors.TWO_PARTS) or ())
        self.linears: list[str] = []
        self._device = torch.device("cpu")
        super().__init__(model, folder)

    def _plain_names(self) -> Iterable[str]:
        ending, plain = f".{compressed_tensors.PACKED}", set(self._files)
        self.linears = sorted(name.removesuffix(ending) for name in self._files if name.endswith(ending))
        for name in self.linears:
            linear, kinds = linear_of(self._model, name), self._kinds(name)
            found = {kind: self._files[f"{name}.{kind}"] for kind in kinds if f"{name}.{kind}" in self._files}
            compressed_tensors.check_entries(found, self.form, name, fine=name in self._fine)
            wanted = compressed_tensors.entry_specs(self.form, *sizes_of(linear))
            packed = found[compressed_tensors.PACKED].shape
            if packed != wanted[compressed_tensors.PACKED].shape:
                raise ConfigurationError(f"{name} is {linear}, its packed weight {packed}: that is of another model")
            plain -= {f"{name}.{kind}" for kind in kinds}
        return plain

    def _kinds(self, linear: str) -> set[str]:
        return set(compressed_tensors.entry_specs(self.form, 1, 1, fine=linear in self._fine))

    def _wants(self, name: str) -> bool:
        return name.removesuffix(".weight") not in self.linears

    def packed(self, linear: str, dtype: torch.dtype, device: torch.device | str) -> PackedTensor:
        """The packed weight of a linear, which stands for one in ``dtype``; raises CorruptData, DiskError."""
        entries = {kind: self._files[f"{linear}.{kind}"].load().to(device) for kind in self._kinds(linear)}
        return compressed_tensors.from_entries(entries, self.form, dtype, linear)

    def store_linears(self, device: torch.device, **rounds: bool) -> None:
        """Puts a `StoredFP4Linear` in the place of each packed linear, laid out for the kernels of ``device``. Raises
        ConfigurationError where ``w4a8`` or ``w4a4`` does not take one of them."""
        checks = rounding(**rounds)
        self._device, tiled = device, device.type == "cuda" and self.form.name in ("nvfp4", "mxfp4")
        replacements: dict[nn.Module, nn.Module] = {}
        for name in self.linears:
            linear, how = linear_of(self._model, name), {"fine": name in self._fine, **rounds}
            if checks:
                form = "two-part" if how["fine"] else self.form.name
                checks.check_shape(form, *sizes_of(linear), f"{name}.weight")
            replacements[linear] = StoredFP4Linear(linear, self.form, tiled=tiled, **how)
        replace_modules(self._model, replacements)

    def __call__(self, name: str, out: Tensor) -> None:
        """As `FolderWeights`; a part of a `StoredFP4Linear` gets its bytes. Raises CorruptData, Unsupported for values
        that the layout of the GPU's kernels cannot hold."""
        stored = stored_part(self._model, name)
        if stored is None:
            super().__call__(name, out)
            return
        linear, owner, _ = stored
        if name not in self._ready:  # the first of its parts
            parts = linear.bytes_of_packed(self.packed(owner, linear.dtype, self._device), f"{owner}.weight")
            self._ready |= {f"{owner}.{part}": value for part, value in parts.items()}
        out.copy_(self._ready.pop(name))
