"""Finding a model on disk, verified if we committed it, and opening it: on one device, or in a stack, where what of
level 0 is not kept free for keys, values and workspace holds layers that stay. Every folder is opened in one way: a
model on the meta device, its files matched with that (`open_folder`), and each tensor read to where it goes.
"""

from pathlib import Path
from typing import Any

import torch
from torch import Tensor, nn

from vblackwell.errors import ConfigurationError, CorruptData
from vblackwell.folders.commit import MANIFEST, first_intact, newest_complete, verify_folder
from vblackwell.folders.folder import (
    ADAPTER_CONFIG,
    find_folder,
    read_config,
    read_json,
    stored_dtype,
    trained_steps,
)
from vblackwell.folders.weights import build_on_meta, stays_fp32
from vblackwell.generate.causal_lm import load_causal_lm
from vblackwell.generate.quantized import PackedWeights, Packing, open_folder, packing_over, refuse_unpacked
from vblackwell.generate.steps import lay_out_for_decoding
from vblackwell.memory.cache.stack import VGPUStack
from vblackwell.nn.convert.assignment import Assignment, apply_assignment
from vblackwell.nn.convert.causal_lm import accelerate_causal_lm
from vblackwell.nn.convert.linears import head_and, install_packed, linear_of, select_linears
from vblackwell.nn.decoder.config import DecoderConfig, not_supported_reasons
from vblackwell.nn.decoder.decoder import Decoder
from vblackwell.nn.linear.packed_linear import is_transposed, pack, turned
from vblackwell.nn.linear.two_part import VBOptimizedLinear
from vblackwell.offload.layout.generation import workspace_bytes

FINAL, ADAPTER = "final", "adapter"
CHECKPOINTS = "checkpoints"


def resolve_model(model: str | Path) -> tuple[Path, list[CorruptData]]:
    """The model folder that a path or hub id means: itself, or the newest intact one of a run, and what was wrong with
    the newer ones. Raises ConfigurationError where there is nothing to open, CorruptData where all of it is damaged."""
    path = find_folder(model)
    config = path / "config.json"
    if config.is_file() and "model_type" in read_json(config):  # a run's own settings lie under the same name
        if (path / MANIFEST).is_file():
            verify_folder(path)
        return path, []
    candidates = [*newest_complete(path), *newest_complete(path / CHECKPOINTS), path / FINAL]
    candidates = [folder for folder in candidates if (folder / MANIFEST).is_file()]
    adapters = [each for each in (path, path / ADAPTER, *candidates) if (each / ADAPTER_CONFIG).is_file()]
    candidates = [each for each in candidates if each not in adapters]
    if adapters and not candidates:
        said = "an adapter and no merged model: give that as --adapter instead, which writes over its own base"
        raise ConfigurationError(f"--model {path} holds {said}: --adapter {adapters[0]}")
    if not candidates:
        raise ConfigurationError(
            f"--model {path} holds neither a model's config.json nor a complete checkpoint of a run"
        )
    candidates.sort(key=lambda folder: (folder / MANIFEST).stat().st_mtime_ns, reverse=True)
    found, problems = first_intact(candidates)
    if found is None:
        raise CorruptData(f"every checkpoint of {path} is damaged: {'; '.join(map(str, problems))}")
    if found == path / FINAL and path / ADAPTER in adapters:
        merged, now = trained_steps(found), trained_steps(path / ADAPTER)
        if None not in (merged, now) and merged != now:
            anew = f"vb train --resume --out {path} --max-steps {now} --merge bf16"
            raise ConfigurationError(
                f"{found} is of step {merged}, and the adapter beside it of step {now}: name the one that you mean, "
                f"{path / ADAPTER} or {found}, or merge anew: {anew}"
            )
    return found, problems


def model_on_meta(folder: Path, dtype: torch.dtype | None = None, *, quantized: bool = False) -> nn.Module:
    """The model that ``folder``/config.json describes, on the meta device in training mode: a ``Decoder`` where that
    computes it, else what ``transformers`` makes of it. Arguments and errors as for `build_on_meta`."""
    config = read_config(folder)
    if quantized:
        config.pop("quantization_config", None)
    if not_supported_reasons(config):
        return build_on_meta(folder, dtype, quantized=quantized)
    try:
        shape = DecoderConfig.from_hf(config)
    except (ConfigurationError, TypeError, ValueError) as error:
        file, advice = folder / "config.json", "give the config.json that the weights were published with"
        raise ConfigurationError(f"{file}: {error}; {advice}") from error
    return Decoder(shape, device="meta", dtype=dtype)


@torch.no_grad()
def load_model(
    folder: Path,
    device: torch.device | str = "cpu",
    dtype: torch.dtype | None = None,
    packing: Packing | None = None,
    *,
    w4a8: bool = False,
    w4a4: bool = False,
) -> nn.Module:
    """The model in a Hugging Face folder on ``device``, in eval mode; read one tensor after the other. ``dtype``: of
    the weights, None as config.json says, for a ``Decoder`` as stored; linears that are packed there, or that
    ``packing`` selects, compute from packed weights, with ``w4a8`` and ``w4a4`` as of `load_causal_lm`. Raises as
    `model_on_meta`, `open_folder` and `install_packed`."""
    rounds = {"w4a8": w4a8, "w4a4": w4a4}
    if any(rounds.values()) and packing is None:
        refuse_unpacked(folder)
    model = model_on_meta(folder, dtype or stored_dtype(folder), quantized=True)
    with open_folder(model, folder) as weights:
        found = packing_over(folder, weights.packing, packing)
        packing = found if isinstance(found, Packing) else None
        as_stored = dtype is None and isinstance(model, Decoder) and not isinstance(weights, PackedWeights)
        chosen = (
            {} if packing is None else select_linears(model, packing.layers, head_and(packing.keep), transposed=True)
        )
        made: dict[Tensor, Tensor] = {}  # one that has several names stays one
        for name, target in weights.targets().items():
            owner, _, leaf = name.rpartition(".")
            if target not in made:
                in_fp32 = target.is_floating_point() and stays_fp32(model, name, target.dtype)
                wanted = torch.float32 if in_fp32 else target.dtype
                if as_stored:
                    wanted = weights.dtype_of("lm_head.weight" if packing is None else name)
                value = weights.read(name, wanted, device)
                if packing is not None and leaf == "weight" and owner in chosen:
                    weight = turned(value, is_transposed(chosen[owner]))
                    install_packed(model, owner, pack(weight, packing.format, name), **rounds)
                    continue
                made[target] = nn.Parameter(value, target.requires_grad) if isinstance(target, nn.Parameter) else value
            setattr(model.get_submodule(owner), leaf, made[target])
        if isinstance(weights, PackedWeights):
            for name in weights.packing.fine:
                packed = weights.packed(name, linear_of(model, name).weight.dtype, device)
                install_packed(model, name, packed, **rounds)
    return model.to(device).eval()


def open_resident(
    folder: Path,
    device: torch.device | str = "cpu",
    *,
    packing: Packing | None = None,
    assignment: Assignment | None = None,
    **rounds: Any,
) -> nn.Module:
    """A model for writing alone, all of it on ``device``, in eval mode, with packed linears or an ``assignment``'s;
    ``rounds`` and errors as for `load_model`. On a GPU a ``Decoder`` computes projections of one input as one product,
    and other architectures run on fused operators where these compute the same."""
    model = load_model(folder, device, packing=packing, **rounds)
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
    return model


def open_streamed(folder: Path, stack: VGPUStack, *, rows: int = 1, tokens: int = 0, **options: Any) -> nn.Module:
    """The model in ``folder``, in eval mode, its weights in ``stack``; packed linears stay packed. On a GPU bytes are
    kept free for keys and values of ``rows`` sequences of ``tokens``; the ``options`` as for `load_causal_lm`."""
    level, dtype = stack.levels[0], stored_dtype(folder)
    if stack.level0_device.type == "cuda":
        reserved = workspace_bytes(level.capacity_bytes) + cache_bytes(read_config(folder), rows, tokens, dtype)
        options["weight_bytes"] = max(0, level.capacity_bytes - reserved)  # `level0_for` divides anew for each text
    model = load_causal_lm(folder, stack, dtype=dtype, trainable=False, placement="streamed", **options)
    accelerate_causal_lm(model, loss=False)  # on a GPU: fewer launches, by which the host must stay ahead of the copies
    return model.eval()


def cache_bytes(config: dict[str, Any], rows: int, tokens: int, dtype: torch.dtype) -> int:
    """Keys and values of ``rows`` sequences of ``tokens``, by the usual names of sizes; 0 where they are not there."""
    layers = config.get("num_hidden_layers") or config.get("n_layer") or 0
    heads = config.get("num_attention_heads") or config.get("n_head")
    if not heads:
        return 0
    head = config.get("head_dim") or (config.get("hidden_size") or config.get("n_embd") or 0) // heads
    return 2 * layers * (config.get("num_key_value_heads") or heads) * head * dtype.itemsize * rows * tokens
