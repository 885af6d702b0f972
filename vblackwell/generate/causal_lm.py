"""Causal models of transformers, from a folder or hub id into a stack, and out again as a folder; nothing is held
twice."""

import json
from collections.abc import Callable, Iterator
from functools import partial
from itertools import chain
from pathlib import Path
from typing import Any

import torch
from torch import Tensor, nn

from vblackwell.errors import ConfigurationError, Unsupported
from vblackwell.folders.commit import CommitFolder
from vblackwell.folders.folder import GENERATION, copy_tokenizer, find_folder, save_model
from vblackwell.folders.tensor_file import TensorSpec, spec_of
from vblackwell.folders.weights import build_on_meta
from vblackwell.generate.adapters import adapt, adapted, read_lora, whole_tensors
from vblackwell.generate.quantized import Packing, open_folder, packing_over, refuse_unpacked
from vblackwell.memory.cache.stack import VGPUStack
from vblackwell.nn.convert.lora import Lora
from vblackwell.offload.api import enable_vgpu_stack_optimization, offload_of
from vblackwell.offload.storage.initialize import Initialize
from vblackwell.units import GiB


def load_causal_lm(
    model: str | Path,
    stack: VGPUStack,
    name: str = "model",
    *,
    dtype: torch.dtype = torch.float32,
    trainable: bool = True,
    attention: str | None = None,
    lora: Lora | None = None,
    adapter: str | Path | None = None,
    fp4: str | None = None,
    fp4_layers: str = "all",
    keep: str | None = None,
    w4a8: bool = False,
    w4a4: bool = False,
    seed: int = 0,
    revision: str | None = None,
    trust_remote_code: bool = False,
    **placement: Any,
) -> nn.Module:
    """The causal model in a Hugging Face folder, read straight into ``stack``'s levels, in training mode. Everything
    that does not fit is found before the first weight is read. No pickled file is opened.

    Args:
        model: a folder with config.json and safetensors; or a hub id ``owner/name``, with its ``revision``.
        dtype: of the parameters; the files' values are cast to it. Trainable ones keep fp32 masters whatever it is.
        trainable: False freezes all parameters: no masters, gradients or states are kept for them. Then, or with
            ``lora``, a folder may be one of packed linears (`vb quantize`, compressed-tensors), which stay packed.
        attention: transformers' ``attn_implementation``; by default what it chooses.
        lora: train these adapters, which begin by ``seed``, over the frozen model (`save_adapter` writes them,
            `save_causal_lm` the model with them merged); or go on from, or use, those in the folder ``adapter``.
        fp4: the format that frozen linears are packed to ('nvfp4'), with ``lora`` or not ``trainable``. fp4_layers,
            keep: which linears, as for `convert`. Of a folder that is packed to it already it changes nothing.
        w4a8: products of many rows with packed linears, which are mxfp4, round their inputs to FP8
            (`vb docs numerics`).
        w4a4: the same to FP4, with linears in nvfp4 or mxfp4.
        trust_remote_code: run code that lies in the folder, where the architecture is not one of transformers'.
        placement: the keywords of `enable_vgpu_stack_optimization`: ``compute_dtype``, ``states`` and so on;
            ``accelerate`` is False unless it is given.

    Raises:
        ConfigurationError: no such folder, or the id cannot be had; no causal model; a ``dtype`` or ``lora`` that
            is none; fp4 without lora; an adapter for another base; w4a8 or w4a4 of linears that it does not take, or
            both.
        FolderMismatch, CorruptData: tensors are missing, too many, or of another shape, all named; a damaged file.
        Unsupported: an architecture that transformers does not know; quantised weights, trainable or of another kind;
            w4a8 on a GPU without FP8, w4a4 on one without FP4, or of blocks too far apart.
        InsufficientMemory: the levels cannot hold the model.
    """
    _check_dtype(dtype)
    if lora is not None and not isinstance(lora, Lora):
        raise ConfigurationError(f"lora={lora!r} is no Lora: give lora=Lora(rank), e.g. lora=Lora(16)")
    if adapter is not None:
        if lora is not None:
            raise ConfigurationError("lora= begins adapters, adapter= brings them: give one")
        lora = read_lora(Path(adapter))
    if fp4 is not None and lora is None and trainable:
        raise ConfigurationError(
            "fp4= packs what is frozen: give lora=Lora(rank) or trainable=False, or convert(model)"
        )
    folder = find_folder(model, revision)
    rounds = {"w4a8": w4a8, "w4a4": w4a4}
    if any(rounds.values()) and fp4 is None:
        refuse_unpacked(folder)
    frozen = not trainable or lora is not None
    made = build_on_meta(folder, dtype, attention=attention, trust_remote_code=trust_remote_code, quantized=frozen)
    made.requires_grad_(trainable)
    with open_folder(made, folder) as weights:
        weights.load_buffers()
        asked = None if fp4 is None else Packing(fp4, fp4_layers, keep)
        packing = packing_over(folder, weights.packing, asked)
        initialize: Initialize = weights
        if lora is not None or packing is not None:
            values = None if adapter is None else Path(adapter)
            initialize = adapt(
                made, weights, lora, packing, stack.level0_device, name=str(model), seed=seed, values=values, **rounds
            )
            if not trainable:
                made.requires_grad_(False)
        placement.setdefault("accelerate", False)
        return enable_vgpu_stack_optimization(made, stack, name, initialize=initialize, **placement)


def save_causal_lm(
    model: nn.Module,
    folder: str | Path,
    *,
    tokenizer: str | Path | None = None,
    dtype: torch.dtype | None = None,
    max_shard_bytes: int = 5 * GiB,
) -> Path:
    """Write a causal model of transformers, in a stack or not, as a folder that ``from_pretrained`` opens: one
    parameter at a time, adapters merged, under the names and shapes of the architecture's published folders. It appears
    whole or not at all; one of ours that has the name is replaced.

    ``tokenizer``: folder, or hub id, whose tokenizer's files are copied; ``dtype``: of what is written, by default the
    masters' (fp32), else the parameters'. Raises ConfigurationError: none of transformers' models, a ``dtype`` that is
    not floating point, a folder without a tokenizer, or what has the name is not ours; DiskError: no space, or the
    disk failed; a folder that was there is as before; Unsupported: the published tensors cannot be made from one
    parameter at a time.
    """
    made: Any = model
    if not hasattr(made, "config") or not hasattr(made, "base_model_prefix"):
        raise ConfigurationError(
            f"{type(model).__name__} is none of transformers' models: export_state gives its tensors"
        )
    _check_dtype(dtype)
    path, source = Path(folder).absolute(), None if tokenizer is None else find_folder(tokenizer)
    plan = PublishedTensors(made, dtype)
    needed = sum(spec.size_bytes for spec in plan.specs) + (64 << 20)
    generation = getattr(made, "generation_config", None)
    with CommitFolder(path.parent, path.name, needed) as commit:
        if generation is not None:
            commit.add_json(GENERATION, json.loads(generation.to_json_string()))
        if source is not None:
            copy_tokenizer(commit, source)
        save_model(
            commit, config_json(model), plan.specs, plan.tensors(), None, max_shard_bytes, generation=generation is None
        )
    return path


def _check_dtype(dtype: torch.dtype | None) -> None:
    """Raises ConfigurationError: weights cast to it would be cut to integers, or it is no type at all."""
    if dtype is not None and not (isinstance(dtype, torch.dtype) and dtype.is_floating_point):
        raise ConfigurationError(
            f"dtype={dtype!r} is no floating-point type of torch: give torch.float32, torch.bfloat16 or torch.float16"
        )


def config_json(model: nn.Module) -> dict[str, Any]:
    """The config.json of a model of transformers."""
    made: Any = model
    return json.loads(made.config.to_json_string()) | {"architectures": [type(model).__name__]}


class PublishedTensors:
    """A model's tensors, ``specs`` in the order of `tensors`, as its architecture's folders have them; ``dtype`` by
    default the masters' (fp32), else the parameters'."""

    def __init__(self, model: Any, dtype: torch.dtype | None = None) -> None:
        self._model, self._dtype = model, dtype
        self._revert: Callable[[dict[str, Tensor]], dict[str, Tensor]] = dict  # a `Decoder`'s names are the published
        if hasattr(model, "base_model_prefix"):
            from transformers.core_model_loading import revert_weight_conversion

            self._revert = partial(revert_weight_conversion, model)
        params, self._values = whole_tensors(model)
        self._buffers = [
            (f"{prefix}.{key}" if prefix else key, buffer)
            for prefix, module in model.named_modules()
            for key, buffer in module._buffers.items()
            if buffer is not None and buffer.numel() and key not in module._non_persistent_buffers_set
        ]
        shapes = [
            (name, torch.empty(tensor.shape, dtype=self._type_of(tensor), device="meta"))
            for name, tensor in [*params, *self._buffers]
        ]
        parts = [part for name, shape in shapes for part in self._revert({name: shape}).items()]
        whole = self._revert(dict(shapes))
        if {name: tensor.shape for name, tensor in whole.items()} != {name: tensor.shape for name, tensor in parts}:
            raise Unsupported(
                f"{type(model).__name__}: its published tensors join several parameters, which cannot be written one "
                "at a time; release(model) and use its save_pretrained"
            )
        sizes = [tensor.dtype.itemsize for _, tensor in parts]
        if sizes != sorted(sizes, reverse=True):
            raise Unsupported(f"{type(model).__name__} mixes types in what is saved: give dtype=")
        self.specs: list[TensorSpec] = [spec_of(name, tensor) for name, tensor in parts]

    def tensors(self) -> Iterator[tuple[str, Tensor]]:
        """Names and values, a parameter's at a time."""
        for name, value in chain(self._values(), ((name, buffer.detach().cpu()) for name, buffer in self._buffers)):
            cast = self._dtype is not None and value.is_floating_point()
            yield from self._revert({name: value.to(self._dtype) if cast else value}).items()

    def _type_of(self, tensor: Tensor) -> torch.dtype:
        if not tensor.is_floating_point():
            return tensor.dtype
        if adapted(self._model) is not None:
            return self._dtype or torch.float32
        trained = isinstance(tensor, nn.Parameter) and tensor.requires_grad and offload_of(self._model) is not None
        return self._dtype or (torch.float32 if trained else tensor.dtype)
