"""The weights of a folder with packed linears: ours, or a weight-only compressed-tensors one. Packed bytes stay packed,
in layers that compute from them.
"""

from collections.abc import Iterable
from dataclasses import dataclass
from pathlib import Path

import torch
from torch import nn

from vblackwell.errors import ConfigurationError
from vblackwell.folders import compressed_tensors
from vblackwell.folders.compressed_tensors import PackedLinears
from vblackwell.folders.folder import read_config
from vblackwell.folders.weights import FolderWeights
from vblackwell.nn.convert.linears import linear_of
from vblackwell.nn.linear.packed_linear import sizes_of
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


def packing_over(folder: object, held: PackedLinears | None, asked: Packing | None) -> Packing | PackedLinears | None:
    """How a model's linears are packed: as its ``folder`` holds them, or else as ``asked``. Raises ConfigurationError
    where both say, and not the same."""
    if held is None or asked is None:
        return held or asked
    if asked.format != held.form.name:
        said = f"is packed to {held.form.name} already, and --use-fp4 (fp4=) asks for {asked.format}"
        raise ConfigurationError(f"{folder} {said}: drop it, or give the folder that it was packed from")
    if asked.layers != Packing.layers or asked.keep is not None:
        said = "is packed already, and --fp4-layers and --keep choose what --use-fp4 packs"
        raise ConfigurationError(f"{folder} {said}: drop them, or give the folder that it was packed from")
    return held


def refuse_unpacked(folder: Path) -> None:
    """Raises ConfigurationError where ``folder`` has no packed linears, for which alone rounded activations are."""
    if not read_config(folder).get("quantization_config"):
        remedy = (
            "add --use-fp4 (in Python fp4='mxfp4', or 'nvfp4' for FP4 activations), or give a folder of vb quantize"
        )
        flags = "--fp8-activations and --fp4-activations"
        raise ConfigurationError(f"{folder}: {flags} are for packed linears, it has none: {remedy}")


class PackedWeights(FolderWeights):
    """As `FolderWeights`, of a folder some of whose linears are packed: ``packing`` says which, to what. Raises
    Unsupported for a quantisation that is not read here, ConfigurationError where they are not the model's, CorruptData
    where entries are missing or do not fit each other."""

    @property
    def packing(self) -> PackedLinears:
        return self._packing

    def _plain_names(self) -> Iterable[str]:
        stated, ending = read_config(self.folder).get("quantization_config") or {}, f".{compressed_tensors.PACKED}"
        form, fine = compressed_tensors.format_of_config(stated), set(stated.get(compressed_tensors.TWO_PARTS) or ())
        names = sorted(name.removesuffix(ending) for name in self._files if name.endswith(ending))
        self._packing = PackedLinears(form, {name: name in fine for name in names})
        plain = set(self._files)
        for name in names:
            linear, kinds = linear_of(self._model, name), self._kinds(name)
            found = {kind: self._files[f"{name}.{kind}"] for kind in kinds if f"{name}.{kind}" in self._files}
            compressed_tensors.check_entries(found, form, name, fine=name in fine)
            wanted = compressed_tensors.entry_specs(form, *sizes_of(linear))
            packed = found[compressed_tensors.PACKED].shape
            if packed != wanted[compressed_tensors.PACKED].shape:
                raise ConfigurationError(f"{name} is {linear}, its packed weight {packed}: that is of another model")
            plain -= {f"{name}.{kind}" for kind in kinds}
        return plain

    def _kinds(self, linear: str) -> set[str]:
        return set(compressed_tensors.entry_specs(self.packing.form, 1, 1, fine=self.packing.fine[linear]))

    def _wants(self, name: str) -> bool:
        return name.removesuffix(".weight") not in self.packing.fine

    def packed(self, linear: str, dtype: torch.dtype, device: torch.device | str) -> PackedTensor:
        """The packed weight of a linear, which stands for one in ``dtype``; raises CorruptData, DiskError."""
        entries = {kind: self._files[f"{linear}.{kind}"].load().to(device) for kind in self._kinds(linear)}
        return compressed_tensors.from_entries(entries, self.packing.form, dtype, linear)
