"""Models with low-rank adapters in a stack: their first bytes, and what is written of them, under peft's names: the
adapter alone, or the merged model (of a packed base its packed numbers, which the adapter was trained with).

An adapter's file keeps in the metadata, which peft passes over, how its base was packed, and a digest of its weights:
of the first and last numbers of every tensor, by name and rounded to bf16, so that it does not matter how a folder is
cut into files and whether it is in fp32 or bf16; a tied head and buffers that are computed are left out.
"""

import json
import re
import warnings
import weakref
from collections.abc import Callable, Iterator, Mapping
from contextlib import ExitStack
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import torch
import xxhash
from torch import Tensor, nn

from vblackwell.errors import ConfigurationError, Unsupported
from vblackwell.folders.chat_prompt import CHAT_TEMPLATE
from vblackwell.folders.commit import MANIFEST, CommitFolder
from vblackwell.folders.compressed_tensors import PackedLinears
from vblackwell.folders.folder import ADAPTER_CONFIG, load_state, read_json, some_names, stored_dtype, tensor_files
from vblackwell.folders.hub import is_hub_id
from vblackwell.folders.tensor_file import SafetensorsShards, TensorFile, TensorSpec, bytes_of
from vblackwell.folders.weights import FolderWeights
from vblackwell.generate.quantized import PackedWeights, Packing
from vblackwell.nn.convert.linears import HEAD, find_linears, store_linears, store_packed
from vblackwell.nn.convert.lora import Lora, add_adapters, base_name, file_name, fill_adapter, is_adapter
from vblackwell.nn.linear.packed_linear import pack, turned
from vblackwell.nn.linear.stored_fp4 import stored_part
from vblackwell.offload.api import offload_of
from vblackwell.offload.engine import Offload
from vblackwell.offload.state import export_state
from vblackwell.offload.storage.initialize import Initialize

BASE, PACKED = "vblackwell.base", "vblackwell.packed"  # in the metadata
# Arguments of `load_causal_lm`, next to ``fp4``, that are kept with an adapter, by the flags that mean them.
FLAGS = {
    "w4a8": "--fp8-activations", "w4a4": "--fp4-activations", "fp4_layers": "--fp4-layers", "keep": "--keep",
}  # fmt: skip
CONFIG = "config.json"
ADAPTER_FILE = "adapter_model"
_NUMBERS = 128  # at either end of each tensor
_OPTIONAL = rf"(?:{HEAD})|rotary_emb\.inv_freq$|\.attn\.(masked_)?bias$"
# Of peft's settings: what makes an adapter compute something else than x A^T B^T, or train more than A and B.
_MORE = (
    "use_dora", "use_rslora", "use_qalora", "use_bdlora", "rank_pattern", "alpha_pattern", "modules_to_save",
    "target_parameters", "bias", "lora_bias", "alora_invocation_tokens", "arrow_config", "kasa_config",
    "monteclora_config", "layer_replication",
)  # fmt: skip
_PLAIN_BEGINNINGS = (None, True, False, "gaussian", "eva", "orthogonal", "mica")  # others begin by changing the base


@dataclass(frozen=True)
class Adapted:
    """What was done to a model: peft's ``config``; ``packed`` linears of the base, with the reason where that is not
    so; ``base``: fingerprint of its weights; ``how``: as of `how_packed`; ``stored``: the type of its folder's weights,
    None where they are packed there."""

    lora: Lora
    config: dict[str, Any]
    packed: dict[str, str | None]
    base: str
    how: str
    stored: torch.dtype | None


_adapted: weakref.WeakKeyDictionary[nn.Module, Adapted] = weakref.WeakKeyDictionary()


def adapted(model: nn.Module) -> Adapted | None:
    """What `adapt` did to ``model``; None if it did nothing."""
    return _adapted.get(model)


def adapt(
    model: nn.Module,
    weights: FolderWeights,
    lora: Lora | None,
    packing: Packing | PackedLinears | None,
    device: torch.device,
    *,
    name: str,
    seed: int = 0,
    values: Path | None = None,
    **rounds: bool,
) -> Initialize:
    """Freeze ``model``, which is on meta, and put adapters around its linears, in place, if ``lora`` says which; what
    fills it then: ``weights`` its own parameters, by the names that they have now. ``name``: path or hub id of the
    base; linears that ``packing`` selects are packed on ``device``, one at a time (or are as the folder holds them
    packed), on a GPU as the fused kernels want it, or ``rounds``, ``w4a8`` or ``w4a4``; the adapters begin with the
    folder ``values``, or what ``seed`` draws. Raises ConfigurationError: targets or layers that the model lacks,
    another base; Unsupported: peft is not installed."""
    config, packed = put_adapters(model, lora, packing, name, on_gpu=device.type == "cuda", **rounds)
    fitting = None
    if lora is not None:
        how = how_packed(packing, **rounds)
        stored = None if isinstance(packing, PackedLinears) else stored_dtype(weights.folder)
        _adapted[model] = made = Adapted(lora, config, packed, fingerprint(weights.folder), how, stored)
        if values is not None:
            fitting = _fitting(model, values, weights.folder)  # what has other shapes is told by those
            check_base(values, weights.folder, name)
            _compare_packing(values, made.how)
    return _filling(model, weights, seed, device, fitting)


def put_adapters(
    model: nn.Module,
    lora: Lora | None,
    packing: Packing | PackedLinears | None,
    name: str,
    *,
    on_gpu: bool,
    **rounds: bool,
) -> tuple[dict[str, Any], dict[str, str | None]]:
    """What `adapt` makes of a ``model`` on meta, without what fills it: peft's configuration, and the linears that were
    packed, with the reason where one was not. Raises as `adapt`."""
    model.requires_grad_(False)
    config = {} if lora is None else add_adapters(model, lora, name)
    if packing is None:
        return config, {}
    if isinstance(packing, PackedLinears):
        store_packed(model, packing.fine, packing.form, tiled=on_gpu, **rounds)
        return config, dict.fromkeys(packing.fine) | dict.fromkeys(find_linears(model), "so in the folder")
    tiled = on_gpu and packing.format in ("nvfp4", "mxfp4")
    return config, store_linears(model, packing.layers, packing.keep, packing.format, tiled=tiled, **rounds)


def _read_config(adapter: Path) -> dict[str, Any]:
    """The adapter_config.json of the folder ``adapter``; ConfigurationError, CorruptData."""
    file = adapter / ADAPTER_CONFIG
    if not file.exists():
        said = f"{adapter} holds no {ADAPTER_CONFIG}" if adapter.is_dir() else f"{adapter}: no such folder"
        raise ConfigurationError(f"{said}; give the folder of an adapter, of vb train --lora or of peft")
    return read_json(file)


def read_lora(folder: Path) -> Lora:
    """What the adapter in ``folder``, peft's or ours, is; raises ConfigurationError where there is none, CorruptData
    for a damaged adapter_config.json, Unsupported where it is more than low-rank matrices around linears."""
    file, found = folder / ADAPTER_CONFIG, _read_config(folder)
    other = [name for name in _MORE if found.get(name) not in (None, False, {}, [], "none")]
    begun, targets = found.get("init_lora_weights"), found.get("target_modules")
    other += [] if begun in _PLAIN_BEGINNINGS else [f"init_lora_weights {begun!r}, which changes the base"]
    if found.get("peft_type") != "LORA" or other or not isinstance(targets, list):
        what = f"{', '.join(other)}" if other else f"peft_type {found.get('peft_type')!r}, target_modules {targets!r}"
        raise Unsupported(f"{file}: {what}: only plain LoRA with a list of targets is read; merge it with peft first")
    try:
        return Lora(int(found["r"]), float(found["lora_alpha"]), float(found.get("lora_dropout") or 0), tuple(targets))
    except (KeyError, TypeError, ValueError) as error:
        raise ConfigurationError(f"{file}: {error}; write the adapter again") from error


def _fitting(model: nn.Module, folder: Path, base: Path) -> dict[str, Tensor]:
    """The adapter's tensors in ``folder``, by parameter name; ConfigurationError where ``model`` wants others."""
    wanted = {file_name(name): (name, param.shape) for name, param in model.named_parameters() if is_adapter(name)}
    held = dict(load_state(folder, ADAPTER_FILE))
    misshapen = [name for name in wanted if name in held and held[name].shape != wanted[name][1]]
    wrong = {
        "lacks": [*(wanted.keys() - held.keys())],
        "has in excess": [*(held.keys() - wanted.keys())],
        "has": [f"{name} {tuple(held[name].shape)} instead of {tuple(wanted[name][1])}" for name in misshapen],
    }
    reasons = [f"it {verb} {some_names(sorted(names))}" for verb, names in wrong.items() if names]
    if reasons:
        raise ConfigurationError(f"{folder} holds an adapter for another base than {base}: {'; '.join(reasons)}")
    return {wanted[name][0]: value for name, value in held.items()}


def _filling(
    model: nn.Module, weights: FolderWeights, seed: int, device: torch.device, values: dict[str, Tensor] | None
) -> Initialize:
    ready: dict[str, Tensor] = {}

    def fill(name: str, out: Tensor) -> None:
        stored = stored_part(model, name)
        if is_adapter(name):
            fill_adapter(name, out, seed) if values is None else out.copy_(values[name])
        elif stored is None:
            weights(base_name(name), out)
        else:
            linear, owner, _ = stored
            if name not in ready:  # the first of three parts
                weight_name = base_name(f"{owner}.weight")
                if isinstance(weights, PackedWeights):
                    packed = weights.packed(weight_name.removesuffix(".weight"), linear.dtype, device)
                else:
                    weight = turned(weights.read(weight_name, linear.dtype, device), linear.transposed)
                    packed = pack(weight, linear.form.name, weight_name)
                parts = linear.bytes_of_packed(packed, weight_name)
                ready.update({f"{owner}.{part}": tensor for part, tensor in parts.items()})
            out.copy_(ready.pop(name))

    return fill


def whole_tensors(model: nn.Module) -> tuple[list[tuple[str, Tensor]], Callable[[], Iterator[tuple[str, Tensor]]]]:
    """Names and tensors (shapes and types) of ``model`` without its adapters' modules, merged, and packed ones as the
    matrices that they stand for, in the order in which they can be had; and what yields names and values, one
    parameter at a time."""
    entries: list[tuple[str, Tensor]] = [*export_order(model)]
    if adapted(model) is None and not any(stored_part(model, name) for name, _ in entries):
        return entries, lambda: ((name, state["weight"]) for name, state in export_state(model))
    shapes: dict[str, tuple[int, ...]] = {}
    for name, param in entries:
        stored = stored_part(model, name)
        if stored is not None:
            linear, owner, part = stored
            if part == linear.parts[-1]:
                shapes[f"{owner}.weight"] = linear.weight_shape
        elif not is_adapter(name):
            shapes[name] = tuple(param.shape)
    like: dict[str, Any] = {"dtype": torch.float32, "device": "meta"}
    return [(base_name(name), torch.empty(shape, **like)) for name, shape in shapes.items()], lambda: _merged(model)


def _merged(model: nn.Module) -> Iterator[tuple[str, Tensor]]:
    made = adapted(model)
    small = {name: state["weight"].float() for name, state in export_state(model, only=is_adapter)}
    parts: dict[str, Tensor] = {}
    for name, state in export_state(model, only=lambda name: not is_adapter(name)):
        weight, stored = state["weight"], stored_part(model, name)
        if stored is not None:
            linear, owner, part = stored
            parts[part] = weight
            if part != linear.parts[-1]:
                continue
            name, weight, parts = f"{owner}.weight", linear.weight_of(parts), {}
        owner, _, leaf = name.rpartition(".base_layer.")
        a_RK, b_NR = (small.get(f"{owner}.{matrix}.default.weight") for matrix in ("lora_A", "lora_B"))
        weight = weight.float()
        if made is not None and leaf == "weight" and a_RK is not None and b_NR is not None:
            delta_NK = (b_NR @ a_RK) * made.lora.scale
            weight = weight + (delta_NK.t() if made.config.get("fan_in_fan_out") else delta_NK)
        yield base_name(name), weight


def adapter_specs(model: nn.Module) -> list[TensorSpec]:
    """What an adapter's file holds, in the order of `export_state`; ConfigurationError where there are no adapters."""
    if adapted(model) is None:
        raise ConfigurationError(f"{type(model).__name__} has no adapters: load it with lora=Lora(rank)")
    entries = [(name, param) for name, param in export_order(model) if is_adapter(name)]
    return [TensorSpec(file_name(name), tuple(param.shape), torch.float32) for name, param in entries]


def export_order(model: nn.Module) -> list[tuple[str, nn.Parameter]]:
    """Names and parameters in the order of `export_state`."""
    engine = offload_of(model)
    if isinstance(engine, Offload):
        return [(slot.name, slot.param) for slot in engine.slots()]
    return list(model.named_parameters())


def write_adapter(
    folder: CommitFolder, model: nn.Module, states: Iterator[tuple[str, dict[str, Tensor]]] | None = None
) -> None:
    """Write adapter_config.json and adapter_model.safetensors, in fp32, into ``folder``. ``states``: `export_state` of
    the adapters, where its reader wants to see them too."""
    specs, made = adapter_specs(model), adapted(model)
    assert made is not None
    folder.add_json(ADAPTER_CONFIG, made.config)
    values = export_state(model, only=is_adapter) if states is None else states
    with SafetensorsShards(folder, ADAPTER_FILE, specs, metadata={BASE: made.base, PACKED: made.how}) as shards:
        for name, state in values:
            shards.write(file_name(name), state["weight"].float())


def save_adapter(
    model: nn.Module,
    folder: str | Path,
    *,
    chat_template: str | None = None,
    more: Mapping[str, Any] | None = None,
) -> Path:
    """Write the adapters of ``model`` as a folder that ``peft.PeftModel.from_pretrained`` opens, whole or not at all;
    an adapter's folder that has the name is replaced. ``chat_template``: of the conversations that they were trained
    on; ``more``: values by the names of JSON files. Raises ConfigurationError: the model has none, or what has the
    name holds something else; DiskError: no space, or the disk failed; a folder that was there is as before."""
    path = Path(folder).absolute()
    needed = sum(spec.size_bytes for spec in adapter_specs(model)) + (1 << 20)
    if (path / MANIFEST).is_file() and not (path / ADAPTER_CONFIG).is_file():
        raise ConfigurationError(f"{path} holds something else than an adapter: choose another folder")
    with CommitFolder(path.parent, path.name, needed) as commit:
        write_adapter(commit, model)
        if chat_template is not None:
            commit.add(CHAT_TEMPLATE, chat_template.encode())
        for file, value in (more or {}).items():
            commit.add_json(file, value)
    return path


def fingerprint(folder: Path) -> str:
    """Tells the weights in ``folder`` from others; reads 256 numbers of each tensor. Raises CorruptData, DiskError."""
    digest = xxhash.xxh3_128()
    with ExitStack() as opened:
        files = [opened.enter_context(TensorFile(path)) for path in tensor_files(folder)]
        stored = {name: tensor for file in files for name, tensor in file.tensors.items()}
        for name in sorted(stored):
            tensor = stored[name]
            if re.search(_OPTIONAL, name.removesuffix(".weight")):
                continue
            digest.update(f"{name} {tensor.shape} ".encode())
            itemsize = tensor.dtype.itemsize
            count = tensor.size_bytes // itemsize
            for start in (0, max(0, count - _NUMBERS)):
                held = torch.empty(min(_NUMBERS, count - start), dtype=tensor.dtype)
                tensor.file.read(bytes_of(held), tensor.begin + start * itemsize)
                digest.update(bytes_of(held.bfloat16() if held.is_floating_point() else held))
    return digest.hexdigest()


def check_base(adapter: Path, base: Path, base_name: str) -> None:
    """Raises ConfigurationError where the adapter in the folder ``adapter`` was made for another model than that in
    ``base``, which the user called ``base_name``, as far as it tells.

    One that we wrote holds its base's fingerprint. Of one by peft, the base that it names is compared where that is a
    folder on this machine. Two hub ids that differ are a warning, for copies have other ids.
    """
    found, other = fingerprint(base), f"{adapter} holds an adapter for another base than {base}"
    for path, stated in _stated(adapter, BASE):
        if stated == found:
            return
        raise ConfigurationError(
            f"{other}: {path.name} was trained over weights with the fingerprint {stated}, those of {base} have "
            f"{found}; give the model that it was trained over as --model"
        )
    named = _read_config(adapter).get("base_model_name_or_path")
    if not isinstance(named, str) or not named:
        return
    file, theirs = adapter / ADAPTER_CONFIG, Path(named)
    if (theirs / CONFIG).is_file() and any(theirs.glob("model*.safetensors")):
        if fingerprint(theirs) != found:
            raise ConfigurationError(f"{other}: {file} names {named}, whose weights are others; give that as --model")
    elif is_hub_id(named) and is_hub_id(base_name) and named != base_name:
        said = f"{file} says that the adapter is for {named}, and the model is {base_name}: if that is no copy of it"
        warnings.warn(f"{said}, what is written will be wrong", UserWarning, stacklevel=2)


def how_packed(packing: Packing | PackedLinears | None, **rounds: bool) -> str:
    """The arguments of `load_causal_lm`, as JSON, that pack a base so, with ``w4a8`` or ``w4a4``; those that are not
    the defaults. What the base's folder holds packed takes none."""
    given: dict[str, Any] = dict(rounds)
    if isinstance(packing, Packing):
        given = {"fp4": packing.format, "fp4_layers": packing.layers, "keep": packing.keep, **rounds}
    defaults = {"fp4": None, "fp4_layers": Packing.layers, "keep": None, **dict.fromkeys(rounds, False)}
    return json.dumps({name: value for name, value in given.items() if value != defaults[name]})


def trained_over(adapter: Path) -> tuple[str | None, dict[str, Any]]:
    """The base that the adapter in the folder ``adapter`` names, a path or hub id, and the arguments of
    `load_causal_lm` that pack it as in training: none where it is not packed, or the adapter does not tell. Raises
    ConfigurationError where there is no adapter, CorruptData for one that is damaged."""
    named = _read_config(adapter).get("base_model_name_or_path")
    how = next((json.loads(how) for _, how in _stated(adapter, PACKED)), {})
    return (named if isinstance(named, str) and named else None), how


def packed_in_words(how: Mapping[str, Any]) -> str:
    """How a base is packed, of the arguments that `trained_over` gives: in the words of the commands' flags."""
    given = [flag if how[name] is True else f"{flag} {how[name]}" for name, flag in FLAGS.items() if name in how]
    said = f"packed to {how['fp4']}" if "fp4" in how else "as it is"
    return f"{said} with {' and '.join(given)}" if given else said


def _compare_packing(adapter: Path, now: str) -> None:
    """A warning where the base is packed otherwise than that over which the adapter was trained, which may be meant:
    peft has it unpacked. Files of peft, and of before this was kept, do not tell."""
    for _, before in _stated(adapter, PACKED):
        if before != now:
            was, here = (packed_in_words(json.loads(how)) for how in (before, now))
            said = f"{adapter} was trained over the base {was}, which here is {here}: it may do worse than in training"
            warnings.warn(
                f"{said}; give the same arguments (--use-fp4, {', '.join(FLAGS.values())})", UserWarning, stacklevel=2
            )
            return


def _stated(adapter: Path, key: str) -> Iterator[tuple[Path, str]]:
    """The adapter's files that have ``key`` in their metadata, and what it is."""
    for path in tensor_files(adapter, ADAPTER_FILE):
        with TensorFile(path) as file:
            stated = file.metadata.get(key)
        if stated is not None:
            yield path, stated
