"""Packed weights in the compressed-tensors layout, which vLLM and ``transformers`` read, out and in.

=======  ====================  =======================================================================================
format   its name there        entries of a linear ``NAME``
=======  ====================  =======================================================================================
nvfp4    nvfp4-pack-quantized  weight_packed uint8, weight_scale E4M3, weight_global_scale fp32 (1,): 1 / tensor scale
mxfp4    mxfp4-pack-quantized  weight_packed uint8, weight_scale uint8 (E8M0)
int4     pack-quantized        weight_packed int32 (8 codes a word), weight_scale bf16, weight_shape int64
int8     pack-quantized        weight_packed int32 (4 codes a word, excess 128), weight_scale fp32, weight_shape int64
nf4      none; ``vblackwell``  our own four entries: no other reader knows blocks of nf4 in safetensors
=======  ====================  =======================================================================================

That package divides by the global scale where we multiply by the tensor scale: the same bits for a power of two, which
``mse`` always chooses, and up to one fp32 rounding apart for ``max``. It wants rows to be a multiple of the block, so
other layers stay as they are. It decodes nvfp4 and mxfp4 to bf16, so the other tensors of such a folder are bf16 too. A
linear in two parts has nvfp4's entries and ``weight_fine``, which readers that do not know it pass over.
"""

import re
from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass
from math import prod
from typing import Any

import torch
from torch import Tensor

from vblackwell.errors import CorruptData, Unsupported
from vblackwell.folders.tensor_file import TensorSpec
from vblackwell.numerics.formats import FORMATS, Format, format_named
from vblackwell.numerics.packed import PackedTensor

PACKED, SCALE, GLOBAL, SHAPE = "weight_packed", "weight_scale", "weight_global_scale", "weight_shape"
FINE = "weight_fine"
TWO_PARTS = "two_parts"  # in config.json's quantization_config: names of the linears that have the entry
KINDS = {"nvfp4": "nvfp4-pack-quantized", "mxfp4": "mxfp4-pack-quantized"}
KINDS |= dict.fromkeys(("int4", "int8"), "pack-quantized")
_FP4 = ("nvfp4", "mxfp4")
OWN_METHOD = "vblackwell"


@dataclass(frozen=True)
class PackedLinears:
    """The linears that a folder holds packed to ``form``: by name, whether one has a second, fine part."""

    form: Format
    fine: Mapping[str, bool]


def packed_linears(config: Mapping[str, Any], linears: Iterable[str]) -> PackedLinears:
    """Those of a model's ``linears``, by name, that a ``quantization_config`` says are packed; raises Unsupported as
    `format_of_config`."""
    form, fine = format_of_config(config), set(config.get(TWO_PARTS) or ())
    left = [str(each) for each in config.get("ignore") or ()]
    names, patterns = set(left), [re.compile(each[3:]) for each in left if each.startswith("re:")]
    chosen = [name for name in linears if name not in names and not any(each.match(name) for each in patterns)]
    return PackedLinears(form, {name: name in fine for name in chosen})


def not_trained(folder: object, config: Mapping[str, Any]) -> Unsupported:
    """What to say where packed weights, of a ``quantization_config``, would have to be trained."""
    try:
        format_of_config(config)
    except Unsupported as error:  # nor used
        return Unsupported(f"the weights of {folder} are quantised: {error}")
    kind = str(config.get("format") or config.get("quant_method"))
    kind = next((name for name, other in KINDS.items() if other == kind and name in _FP4), kind)
    ways = "add --lora 16 (lora=vb.Lora(16)) to train adapters over them, or give the folder that it was packed from"
    return Unsupported(f"{folder} is packed ({kind}), and packed weights are not trained: {ways}")


def runs_in(form: Format, dtype: torch.dtype) -> torch.dtype:
    """The type that a folder in ``form``, made of one in ``dtype``, has to be in for transformers to run it."""
    return torch.bfloat16 if form.name in _FP4 else dtype


def not_packable_reasons(form: Format, n: int, k: int) -> list[str]:
    """Why a weight (n, k) cannot be stored in ``form``; empty if it can."""
    if form.name in KINDS and form.block_size is not None and k % form.block_size:
        return [f"its rows of {k} are no multiple of the block of {form.block_size}"]
    return []


def entry_specs(form: Format, n: int, k: int, *, fine: bool = False) -> dict[str, TensorSpec]:
    """What ``to_entries`` will return for a weight (n, k), and with ``fine`` its second part, by local name."""
    codes, scales = (form.codes_shape(n, k), torch.uint8), form.scales_shape(n, k)
    shape = ((2,), torch.int64)
    if form.name not in KINDS:
        table = {PACKED: codes, SCALE: (scales, form.scale_dtype), SHAPE: shape}
    elif form.name == "nvfp4":
        table = {GLOBAL: ((1,), torch.float32), PACKED: codes, SCALE: (scales, torch.float8_e4m3fn)}
    elif form.name == "mxfp4":
        table = {PACKED: codes, SCALE: (scales, torch.uint8)}
    else:
        codes = ((n, -(-k * form.bits // 32)), torch.int32)
        table = {SHAPE: shape, PACKED: codes, SCALE: (scales, form.scale_dtype)}
    if fine:
        table[FINE] = codes
    return {name: TensorSpec(name, tuple(sizes), dtype) for name, (sizes, dtype) in table.items()}


def to_entries(packed: PackedTensor) -> dict[str, Tensor]:
    """The tensors that stand for a packed matrix, by local name."""
    entries = {PACKED: packed.codes, SCALE: packed.block_scales}
    if packed.fine is not None:
        entries[FINE] = packed.fine
    if packed.format == "nvfp4":
        entries[GLOBAL] = packed.tensor_scale.reciprocal().reshape(1)
        entries[SCALE] = packed.block_scales.view(torch.float8_e4m3fn)
    if packed.format in _FP4:
        return entries
    if packed.format == "int4":
        entries[PACKED] = packed.codes.view(torch.int32)
    elif packed.format == "int8":
        codes = packed.codes.view(torch.uint8) ^ 0x80  # q + 128
        codes = torch.nn.functional.pad(codes, (0, -codes.shape[1] % 4))
        entries[PACKED] = codes.contiguous().view(torch.int32)
    return entries | {SHAPE: torch.tensor([packed.n, packed.k])}


def from_entries(entries: Mapping[str, Tensor], form: Format, dtype: torch.dtype, name: str) -> PackedTensor:
    """The packed matrix that ``to_entries``, or another tool, described; raises CorruptData for what does not fit."""
    check_entries(entries, form, name)
    codes, scales = entries[PACKED], entries[SCALE]
    n, k = codes.shape[0], codes.shape[1] * 8 // form.bits
    if SHAPE in entries:
        n, k = (int(size) for size in entries[SHAPE].flatten())
    one = torch.ones((), dtype=torch.float32, device=codes.device)
    if GLOBAL in entries:
        one = entries[GLOBAL].to(torch.float32).reciprocal().reshape(())
    if form.name == "int4":
        codes = codes.view(torch.uint8)
    elif form.name == "int8":
        codes = (codes.view(torch.uint8) ^ 0x80).view(torch.int8)[:, : form.codes_shape(n, k)[1]]
    scales = scales.view(torch.uint8) if form.name == "nvfp4" else scales.to(form.scale_dtype)
    packed = PackedTensor(form, (n, k), dtype, codes.contiguous(), scales, one, entries.get(FINE))
    try:
        packed.check()
    except CorruptData as error:
        raise CorruptData(f"the entries of {name}: {error}") from error
    return packed


def check_entries(entries: Mapping[str, Tensor | TensorSpec], form: Format, name: str, *, fine: bool = False) -> None:
    """Raises CorruptData where an entry of the linear ``name`` is missing, or is not of its kind."""
    wanted = set(entry_specs(form, 1, 1, fine=fine))
    if lacking := sorted(wanted - set(entries)):
        raise CorruptData(f"{name} lacks its entry {lacking[0]!r}: the folder is incomplete")
    kind, sizes = torch.int32 if form.name in ("int4", "int8") else torch.uint8, {GLOBAL: 1, SHAPE: 2}
    for entry in sorted(wanted):
        found, numbers = entries[entry], sizes.get(entry)
        if entry == PACKED and (len(found.shape) != 2 or found.dtype != kind):
            raise CorruptData(f"{name}.{entry} is {tuple(found.shape)} {found.dtype} instead of a matrix of {kind}")
        if numbers not in (None, prod(found.shape)):
            raise CorruptData(f"{name}.{entry} is {tuple(found.shape)} {found.dtype} instead of {numbers} numbers")


def quantization_config(
    form: Format, ignore: Iterable[str], two_parts: Iterable[str] = (), *, alone: bool = False
) -> dict[str, Any]:
    """What config.json says of linears in ``form``: ``ignore`` are the others, ``two_parts`` have a fine part;
    ``alone``: no other package may open the folder."""
    fine = {TWO_PARTS: sorted(two_parts)} if two_parts else {}
    if form.name not in KINDS or alone:
        size = {"block_size": form.block_size} if form.name in KINDS else {}
        return {"quant_method": OWN_METHOD, "format": form.name, "ignore": sorted(ignore), **size, **fine}
    weights: dict[str, Any] = {
        "num_bits": form.bits,
        "type": "float" if form.name in _FP4 else "int",
        "symmetric": True,
        "dynamic": False,
        "strategy": {"nvfp4": "tensor_group"}.get(form.name, "group" if form.block_size else "channel"),
        "group_size": form.block_size,
    }
    if form.name in _FP4:
        weights |= dict.fromkeys(("scale_dtype", "zp_dtype"), str(entry_specs(form, 1, 1)[SCALE].dtype))
    return {
        "quant_method": "compressed-tensors",
        "format": KINDS[form.name],
        "quantization_status": "compressed",
        "config_groups": {"group_0": {"targets": ["Linear"], "weights": weights, "format": KINDS[form.name]}},
        "ignore": sorted(ignore),
        **fine,
    }


def format_of_config(config: Mapping[str, Any]) -> Format:
    """The format that a ``quantization_config`` names; raises Unsupported for what is not ours."""
    method, kind = config.get("quant_method"), config.get("format")
    if method == OWN_METHOD and kind in FORMATS:
        return format_named(str(kind), config.get("block_size") if kind in ("int4", "int8") else None)
    if method != "compressed-tensors":
        raise Unsupported(f"quant_method {method!r} is not read here: open the folder with the tool that wrote it")
    groups: Sequence[Mapping[str, Any]] = list((config.get("config_groups") or {}).values())
    if len(groups) != 1 or groups[0].get("input_activations") or groups[0].get("output_activations"):
        raise Unsupported("only one group of weight-only quantised linears is read here: open the folder with vLLM")
    weights = groups[0].get("weights") or {}
    bits, strategy, size = (weights.get(name) for name in ("num_bits", "strategy", "group_size"))
    known = {
        ("nvfp4-pack-quantized", 4, "tensor_group", 16): "nvfp4",
        ("mxfp4-pack-quantized", 4, "group", 32): "mxfp4",
        ("pack-quantized", 4, "group", 32): "int4",
        ("pack-quantized", 4, "group", 128): "int4",
        ("pack-quantized", 8, "channel", None): "int8",
    }
    if weights.get("symmetric", True) is True and (name := known.get((kind, bits, strategy, size))):
        return format_named(name, size)
    if (kind, bits, strategy) == ("pack-quantized", 8, "group"):
        return format_named("int8", size)
    raise Unsupported(f"compressed-tensors {kind} with {dict(weights)} is not read here: open the folder with vLLM")
