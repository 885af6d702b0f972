"""Opens a folder with packed linears: ours, or a weight-only compressed-tensors one. The packed bytes go straight into
layers that compute from them, of a model on one device or one that streams (nn/linear/stored_fp4.py).
"""

from __future__ import annotations

import re
from collections import defaultdict
from collections.abc import Mapping
from dataclasses import replace
from pathlib import Path
from typing import Any

import torch
from torch import Tensor, nn

from vblackwell.errors import ConfigurationError, CorruptData
from vblackwell.folders.compressed_tensors import FINE, PACKED, TWO_PARTS, entry_specs, format_of_config, from_entries
from vblackwell.folders.folder import load_specs, load_state, read_config, stored_dtype
from vblackwell.folders.weights import FolderWeights, build_on_meta
from vblackwell.nn.convert.linears import install_packed, linear_of, replace_modules
from vblackwell.nn.decoder.config import DecoderConfig, not_supported_reasons
from vblackwell.nn.decoder.decoder import Decoder
from vblackwell.nn.linear.stored_fp4 import StoredFP4Linear, stored_part
from vblackwell.numerics.formats import Format
from vblackwell.numerics.packed import PackedTensor


class PackedTables:
    """What a quantised folder holds, from its config.json and the tables of its files: the ``form`` of packed linears,
    ``specs`` of all tensors by name, the ``linears`` that are packed, those of them that have a ``fine`` part, and
    ``entries``, the tensors that stand for them. Raises as `load_quantized`.
    """

    def __init__(self, folder: Path) -> None:
        self.folder, self.config = folder, read_config(folder)
        stated = self.config.get("quantization_config") or {}
        self.form: Format = format_of_config(stated)
        self.specs = load_specs(folder)
        self.linears = {name.removesuffix(f".{PACKED}") for name in self.specs if name.endswith(f".{PACKED}")}
        self.fine = set(stated.get(TWO_PARTS) or ())
        self._kinds = set(entry_specs(self.form, 1, 1))
        if lost := {f"{name}.{FINE}" for name in self.fine} - self.specs.keys():
            raise CorruptData(f"{folder} lacks {len(lost)} fine parts that its config.json names, e.g. {min(lost)}")
        self.entries = {f"{name}.{kind}" for name in self.linears for kind in self.kinds_of(name)} & self.specs.keys()

    def kinds_of(self, linear: str) -> set[str]:
        """Local names of the entries of a packed linear."""
        return self._kinds | ({FINE} if linear in self.fine else set())


def build_resident(folder: Path) -> nn.Module:
    """The model that ``folder``/config.json describes, quantised or not, on the meta device in eval mode."""
    config = {key: value for key, value in read_config(folder).items() if key != "quantization_config"}
    if not not_supported_reasons(config):
        return Decoder(DecoderConfig.from_hf(config), device="meta").eval()
    return build_on_meta(folder, None, quantized=True).eval()


def stays_fp32(model: Any, name: str) -> bool:
    """Whether transformers keeps tensor ``name`` in fp32 in a half-precision model, and its code computes with that."""
    patterns = getattr(model, "_keep_in_fp32_modules_strict", None) or ()
    return any(re.search(pattern.replace("*", ".*"), name) for pattern in patterns)  # anywhere, as there


def load_quantized(folder: Path, device: torch.device | str = "cpu", dtype: torch.dtype | None = None) -> nn.Module:
    """The model in a quantised Hugging Face folder, in eval mode; ``dtype`` of the weights that are not packed, or as
    stored. Raises Unsupported: a quantisation that is not read here; ConfigurationError, CorruptData: tensors are
    missing, too many, of another shape, or do not fit each other.
    """
    tables = PackedTables(folder)
    stored = dtype or stored_dtype(tables.config)
    model, waiting = build_resident(folder), defaultdict[str, dict[str, Tensor]](dict)
    plain = tables.specs.keys() - tables.entries  # transformers may have some under other names: stacked experts
    elsewhere = plain - model.state_dict().keys() if hasattr(model, "base_model_prefix") else set[str]()
    for name, tensor in load_state(folder, names=tables.specs.keys() - elsewhere, device=device):
        linear, _, entry = name.rpartition(".")
        if name not in tables.entries:
            _assign(model, name, _cast(model, name, tensor, dtype))
            continue
        waiting[linear][entry] = tensor
        if waiting[linear].keys() == tables.kinds_of(linear):
            install_packed(model, linear, _packed_of(waiting.pop(linear), tables.form, stored, linear))
    for linear, entries in waiting.items():
        from_entries(entries, tables.form, stored, linear)  # raises: an entry is missing
    if elsewhere:  # what transformers makes of them, in RAM; FolderMismatch where they are not the model's
        with FolderWeights(model, folder, elsewhere) as weights:
            targets, tensors = model.state_dict(), {}
            for name in weights.names:
                empty = torch.empty(targets[name].shape, dtype=weights.dtype_of(name))
                tensors[name] = _cast(model, name, empty, dtype)
                weights(name, tensors[name])
        for name, tensor in tensors.items():
            _assign(model, name, tensor)
    tie: Any = getattr(model, "tie_weights", None)
    if tie is not None:
        tie()
    missing = [name for name, tensor in model.named_parameters() if tensor.is_meta]
    if missing:
        raise ConfigurationError(f"{folder} does not fit the model: it lacks {', '.join(missing[:5])}")
    return model.to(device).eval()


class PackedWeights(FolderWeights):
    """As `FolderWeights`, of a folder whose linears are packed: ``model`` gets a `StoredFP4Linear` in the place of
    each, laid out for the kernels where ``device``, level 0's, is a GPU. Raises as `load_quantized`.
    """

    def __init__(self, model: nn.Module, folder: Path, device: torch.device | str = "cpu") -> None:
        self._packed = tables = PackedTables(folder)
        self._device = torch.device(device)
        form = tables.form
        tiled = self._device.type == "cuda" and form.name in ("nvfp4", "mxfp4")
        for name in sorted(tables.linears):
            linear: Any = linear_of(model, name)
            lost = sorted(kind for kind in tables.kinds_of(name) if f"{name}.{kind}" not in tables.specs)
            if lost:
                raise CorruptData(f"{name} lacks its entry {lost[0]!r}: the folder is incomplete")
            wanted = entry_specs(form, linear.out_features, linear.in_features)[PACKED].shape
            found = tables.specs[f"{name}.{PACKED}"].shape
            if found != wanted:
                raise ConfigurationError(
                    f"{name} is {linear}, its packed weight {found} instead of {wanted}: the file belongs to another "
                    "model"
                )
            stored = StoredFP4Linear(linear, form, tiled=tiled, fine=name in tables.fine)
            replace_modules(model, {linear: stored})
        super().__init__(model, folder, tables.specs.keys() - tables.entries)

    def __call__(self, name: str, out: Tensor) -> None:
        """As `FolderWeights`; a part of a packed linear gets its bytes. Raises CorruptData where a linear's entries do
        not fit each other, Unsupported for values that the layout of the GPU's kernels cannot hold."""
        stored = stored_part(self._model, name)
        if stored is None:
            super().__call__(name, out)
            return
        linear, owner, _ = stored
        if name not in self._ready:  # the first of its parts
            entries = {kind: self.load(f"{owner}.{kind}").to(self._device) for kind in self._packed.kinds_of(owner)}
            packed = _packed_of(entries, self._packed.form, linear.dtype, owner)
            if packed.shape != (linear.out_features, linear.in_features):
                raise CorruptData(f"{owner} is packed with shape {packed.shape}, {linear} wants another")
            self._ready |= {f"{owner}.{part}": value for part, value in linear.bytes_of_packed(packed).items()}
        out.copy_(self._ready.pop(name))

    def _wants(self, name: str) -> bool:
        return stored_part(self._model, name) is None


def _packed_of(entries: Mapping[str, Tensor], form: Format, dtype: torch.dtype, linear: str) -> PackedTensor:
    packed = replace(from_entries(entries, form, dtype, linear), fine=entries.get(FINE))
    try:
        packed.check()
    except CorruptData as error:
        raise CorruptData(f"{linear}.{FINE}: {error}") from error
    return packed


def _cast(model: nn.Module, name: str, tensor: Tensor, dtype: torch.dtype | None) -> Tensor:
    """``tensor`` in ``dtype``, or fp32 where the model computes with it in that."""
    if not tensor.is_floating_point():
        return tensor
    return tensor.float() if stays_fp32(model, name) else tensor if dtype is None else tensor.to(dtype)


def _assign(model: nn.Module, name: str, tensor: Tensor) -> None:
    """Puts ``tensor`` where the parameter or buffer ``name`` is, without a copy."""
    path, _, leaf = name.rpartition(".")
    try:
        module = model.get_submodule(path)
    except AttributeError:
        module = None
    known = None if module is None else {**module._parameters, **module._buffers}.get(leaf)
    if module is None or known is None:
        raise ConfigurationError(f"the folder has {name}, the model that its config.json describes does not")
    if known.shape != tensor.shape:
        raise ConfigurationError(f"{name} has shape {tuple(tensor.shape)}, the model wants {tuple(known.shape)}")
    if leaf in module._parameters:
        module._parameters[leaf] = nn.Parameter(tensor, requires_grad=tensor.is_floating_point())
    else:
        module._buffers[leaf] = tensor
