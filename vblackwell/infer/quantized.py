"""Opens a folder with packed linears: ours, or a weight-only compressed-tensors one that another tool wrote.

The packed bytes go straight into ``FusedFP4Linear`` layers, those of linears in two parts into `VBOptimizedLinear`; nothing is
decompressed.
"""

from __future__ import annotations

from collections import defaultdict
from pathlib import Path
from typing import Any

import torch
from torch import Tensor, nn

from vblackwell.artifacts.compressed import FINE, PACKED, TWO_PARTS, entry_specs, format_of_config, from_entries
from vblackwell.artifacts.folder import load_specs, load_state, read_config, stored_dtype
from vblackwell.artifacts.weights import FolderWeights
from vblackwell.errors import ConfigurationError, CorruptData
from vblackwell.nn.convert import install_packed
from vblackwell.nn.optimize import install_separated
from vblackwell.nn.skeleton import skeleton
from vblackwell.numerics.formats import Format
from vblackwell.numerics.separation import SeparatedTensor


def load_quantized(folder: Path, device: torch.device | str = "cpu", dtype: torch.dtype | None = None) -> nn.Module:
    """The model in a quantised Hugging Face folder, in eval mode.

    Args:
        folder: with ``config.json``, its ``quantization_config``, and safetensors.
        device: where the model goes.
        dtype: of the weights that are not packed; ``None``: as they are stored.

    Raises:
        Unsupported: a quantisation that is not read here.
        ConfigurationError: tensors are missing, too many, or of another shape.
        CorruptData: a file cannot be read, entries are missing, or do not fit each other.
    """
    config = read_config(folder)
    stated = config.get("quantization_config") or {}
    form, fine = format_of_config(stated), {f"{name}.{FINE}" for name in stated.get(TWO_PARTS) or ()}
    found = load_specs(folder)
    linears = {name.removesuffix(f".{PACKED}") for name in found if name.endswith(f".{PACKED}")}
    entry_names = set(entry_specs(form, 1, 1))
    if lost := fine - set(found):
        raise CorruptData(f"{folder} lacks {len(lost)} fine parts that its config.json names, e.g. {min(lost)}")
    stored = dtype or stored_dtype(config)
    model, waiting = skeleton(config), defaultdict[str, dict[str, Tensor]](dict)
    packed = {name for name in found if _is_entry(name, linears, entry_names) or name in fine}
    elsewhere = _named_otherwise(model, found.keys() - packed)
    for name, tensor in load_state(folder, names=found.keys() - elsewhere, device=device):
        linear, _, entry = name.rpartition(".")
        if name not in packed:
            _assign(model, name, tensor.to(dtype) if dtype and tensor.is_floating_point() else tensor)
            continue
        waiting[linear][entry] = tensor
        if len(waiting[linear]) == len(entry_names) + (f"{linear}.{FINE}" in fine):
            _install(model, linear, waiting.pop(linear), form, stored)
    for linear, entries in waiting.items():
        from_entries(entries, form, stored, linear)  # raises: an entry is missing
    if elsewhere:
        _convert(model, folder, elsewhere, dtype)
    _tie(model)
    missing = [name for name, tensor in model.named_parameters() if tensor.is_meta]
    if missing:
        raise ConfigurationError(f"{folder} does not fit the model: it lacks {', '.join(missing[:5])}")
    return model.to(device).eval()


def _install(model: nn.Module, linear: str, entries: dict[str, Tensor], form: Format, dtype: torch.dtype) -> None:
    packed, fine = from_entries(entries, form, dtype, linear), entries.get(FINE)
    if fine is None:
        install_packed(model, linear, packed)
        return
    separated = SeparatedTensor(packed, fine)
    try:
        separated.check()
        install_separated(model, linear, separated)
    except CorruptData as error:
        raise CorruptData(f"{linear}.{FINE}: {error}") from error


def _is_entry(name: str, linears: set[str], entry_names: set[str]) -> bool:
    """Whether the tensor is part of a packed linear."""
    linear, _, entry = name.rpartition(".")
    return linear in linears and entry in entry_names


def _named_otherwise(model: nn.Module, names: set[str]) -> set[str]:
    """Those of ``names`` that a model of transformers has under others: experts that it stacks, for example."""
    return names - model.state_dict().keys() if hasattr(model, "base_model_prefix") else set()


def _convert(model: nn.Module, folder: Path, names: set[str], dtype: torch.dtype | None) -> None:
    """Fills what transformers makes of the tensors ``names``, in RAM.

    Raises:
        FolderMismatch: they are not those of the model.
    """
    with FolderWeights(model, folder, names) as weights:
        targets, tensors = model.state_dict(), {}
        for name in weights.names:
            tensors[name] = torch.empty(targets[name].shape, dtype=dtype or weights.dtype_of(name))
            weights(name, tensors[name])
    for name, tensor in tensors.items():
        _assign(model, name, tensor)


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


def _tie(model: nn.Module) -> None:
    """Lets a model of ``transformers`` share the weights that its configuration ties."""
    tie: Any = getattr(model, "tie_weights", None)
    if tie is not None:
        tie()
