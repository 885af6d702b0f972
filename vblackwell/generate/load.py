"""Finding a model on disk, verified if we committed it, and opening it: on one device, or in a stack, where what of
level 0 is not kept free for keys, values and workspace holds layers that stay.
"""

from __future__ import annotations

from pathlib import Path
from typing import Any

import torch
from torch import nn

from vblackwell.errors import ConfigurationError, CorruptData
from vblackwell.folders.checked import check_weights
from vblackwell.folders.commit import MANIFEST, newest_complete, verify_folder
from vblackwell.folders.folder import load_state, read_config, read_json, stored_dtype
from vblackwell.folders.weights import FolderWeights
from vblackwell.generate.causal_lm import load_causal_lm
from vblackwell.generate.quantized import load_quantized
from vblackwell.generate.steps import lay_out_for_decoding
from vblackwell.memory.cache.stack import VGPUStack
from vblackwell.nn.convert.assignment import Assignment, apply_assignment
from vblackwell.nn.convert.causal_lm import accelerate_causal_lm
from vblackwell.nn.convert.linears import find_linears, head_and, install_packed
from vblackwell.nn.decoder.config import DecoderConfig, not_supported_reasons
from vblackwell.nn.decoder.decoder import Decoder
from vblackwell.nn.linear.packed_linear import pack
from vblackwell.nn.linear.two_part import VBOptimizedLinear
from vblackwell.offload.layout.generation import workspace_bytes

FINAL = "final"
CHECKPOINTS = "checkpoints"


def resolve_model(path: Path) -> tuple[Path, list[CorruptData]]:
    """The model folder that ``path`` means: itself, or the newest intact one of a run, and what was wrong with the
    newer ones. Raises ConfigurationError where there is nothing to open, CorruptData where all of it is damaged."""
    if not path.is_dir():
        raise ConfigurationError(
            f"--model {path}: no such folder; give a run folder of vb train or a Hugging Face folder"
        )
    config = path / "config.json"
    if config.is_file() and "model_type" in read_json(config):  # a run's own settings lie under the same name
        if (path / MANIFEST).is_file():
            verify_folder(path)
        return path, []
    candidates = [*newest_complete(path), *newest_complete(path / CHECKPOINTS), path / FINAL]
    candidates = [folder for folder in candidates if (folder / MANIFEST).is_file()]
    if not candidates:
        raise ConfigurationError(
            f"--model {path} holds neither a model's config.json nor a complete checkpoint of a run"
        )
    problems: list[CorruptData] = []
    for folder in sorted(candidates, key=lambda each: (each / MANIFEST).stat().st_mtime_ns, reverse=True):
        try:
            verify_folder(folder)
            return folder, problems
        except CorruptData as error:
            problems.append(error)
    raise CorruptData(f"every checkpoint of {path} is damaged: {'; '.join(map(str, problems))}")


def load_decoder(
    folder: Path, device: torch.device | str = "cpu", dtype: torch.dtype | None = None, *, fp4: str | None = None,
    fp4_layers: str = "all", keep: str | None = None,
) -> Decoder:  # fmt: skip
    """The ``Decoder`` in a Hugging Face folder; nothing is drawn, tensors are read one at a time. ``dtype``: of the
    weights, None as stored; ``fp4``: the format that linears (fp4_layers, but not keep) are packed to on ``device``.
    Raises Unsupported, FolderMismatch, ConfigurationError, CorruptData.
    """
    model = Decoder(DecoderConfig.from_hf(read_config(folder)), device="meta")
    with FolderWeights(model, folder) as weights:
        names = set(weights.names)
        if fp4 is None and dtype is None:
            dtype = weights.dtype_of("lm_head.weight")
    chosen = set[str]()
    if fp4 is not None:
        linears = find_linears(model, fp4_layers, head_and(keep))
        chosen = {name for name, reason in linears.items() if reason is None}
        if not chosen:
            raise ConfigurationError(f"{fp4_layers!r} selects no linear of {folder}")
    for name, tensor in load_state(folder, names=names, device=device):
        owner, _, leaf = name.rpartition(".")
        if fp4 is not None and owner in chosen:
            install_packed(model, owner, pack(tensor, fp4, name))
        else:
            value = torch.empty(tensor.shape, dtype=dtype or tensor.dtype, device=device).copy_(tensor)
            model.get_submodule(owner)._parameters[leaf] = nn.Parameter(value, requires_grad=fp4 is None)
    return model


def open_resident(
    folder: Path, device: torch.device | str = "cpu", *, fp4: str | None = None, assignment: Assignment | None = None,
    **packing: Any,
) -> nn.Module:  # fmt: skip
    """A model for writing alone, all of it on ``device``, in eval mode, with an ``assignment``'s or packed linears
    (``fp4`` and ``packing`` as for `load_decoder`, of a ``Decoder`` alone); raises as that. On a GPU a ``Decoder``
    computes projections of one input as one product, and other architectures run on fused operators where these
    compute the same.
    """
    model = load_model(folder, device) if fp4 is None else load_decoder(folder, device, fp4=fp4, **packing)
    if assignment is not None:
        for name in apply_assignment(model, assignment, "inference"):
            layer = model.get_submodule(name)
            assert isinstance(layer, VBOptimizedLinear)
            layer.quantize()
    if torch.device(device).type == "cuda":
        if isinstance(model, Decoder):
            lay_out_for_decoding(model.requires_grad_(False))
        else:
            accelerate_causal_lm(model, loss=False)  # a token of one text takes as long as its launches
    return model.eval()


def load_model(folder: Path, device: torch.device | str = "cpu", dtype: torch.dtype | None = None) -> nn.Module:
    """The model in a Hugging Face folder: a ``Decoder`` where that computes it, else what ``transformers`` makes of it.
    Raises as `load_decoder` and `check_weights`: what no file has, ``transformers`` would draw at random.
    """
    config = read_config(folder)
    if config.get("quantization_config"):
        return load_quantized(folder, device, dtype)
    if not not_supported_reasons(config):
        return load_decoder(folder, device, dtype)
    from transformers import AutoModelForCausalLM

    check_weights(folder)
    try:
        model: Any = AutoModelForCausalLM.from_pretrained(
            folder, dtype=dtype or "auto", local_files_only=True, trust_remote_code=False
        )
    except (ValueError, OSError) as error:
        raise ConfigurationError(f"transformers cannot open {folder} as a causal model: {error}") from error
    return model.to(device).eval()


def open_streamed(folder: Path, stack: VGPUStack, *, rows: int = 1, tokens: int = 0, **options: Any) -> nn.Module:
    """The model in ``folder``, in eval mode, its weights in ``stack``; packed linears stay packed. On a GPU bytes are
    kept free for keys and values of ``rows`` sequences of ``tokens``; the ``options`` as for `load_causal_lm`.
    """
    config, level = read_config(folder), stack.levels[0]
    if stack.level0_device.type == "cuda":
        reserved = workspace_bytes(level.capacity_bytes) + cache_bytes(config, rows, tokens)
        options["weight_bytes"] = max(0, level.capacity_bytes - reserved)  # `level0_for` divides anew for each text
    model = load_causal_lm(folder, stack, dtype=stored_dtype(config), trainable=False, placement="streamed", **options)
    accelerate_causal_lm(model, loss=False)  # on a GPU: fewer launches, by which the host must stay ahead of the copies
    return model.eval()


def cache_bytes(config: dict[str, Any], rows: int, tokens: int) -> int:
    """Keys and values of ``rows`` sequences of ``tokens``, by the usual names of sizes; 0 where they are not there."""
    layers = config.get("num_hidden_layers") or config.get("n_layer") or 0
    heads = config.get("num_attention_heads") or config.get("n_head")
    if not heads:
        return 0
    head = config.get("head_dim") or (config.get("hidden_size") or config.get("n_embd") or 0) // heads
    itemsize = stored_dtype(config).itemsize
    return 2 * layers * (config.get("num_key_value_heads") or heads) * head * itemsize * rows * tokens
