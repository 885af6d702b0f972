"""Which model an adapter was trained over: a digest of the base's weights, kept in the adapter's file.

Adapters of one rank fit every base of the same sizes, so shapes cannot tell them apart; a base that was trained further has all of them.
The digest is of the first and last numbers of every tensor, by name and rounded to bf16: it is the same however a folder is cut into
files, whoever wrote its config.json, and whether its weights are kept in fp32 or bf16; a copy in fp16 was rounded otherwise, and a
quantised one says nothing of what it was made from. It lies in the metadata of the
safetensors file, which peft passes over. What some folders of one model hold and others do not is left out: the head, where it is
tied, and buffers that are computed.
"""

from __future__ import annotations

import re
import warnings
from contextlib import ExitStack
from pathlib import Path

import torch
import xxhash

from vblackwell.errors import ConfigurationError
from vblackwell.folders.folder import read_json, tensor_files
from vblackwell.folders.hub import is_hub_id
from vblackwell.folders.tensor_file import StoredTensor, TensorFile
from vblackwell.nn.convert.linears import HEAD

BASE = "vblackwell.base"  # in the metadata
CONFIG = "config.json"
ADAPTER_CONFIG = "adapter_config.json"
ADAPTER_FILE = "adapter_model"
_NUMBERS = 128  # at either end of each tensor
_OPTIONAL = rf"(?:{HEAD})|rotary_emb\.inv_freq$|\.attn\.(masked_)?bias$"


def fingerprint(folder: Path) -> str:
    """Tells the weights in ``folder`` from others; reads 256 numbers of each tensor.

    Raises:
        CorruptData: a file is cut short, or its table is none.
        DiskError: a file cannot be read.
    """
    digest = xxhash.xxh3_128()
    with ExitStack() as opened:
        files = [opened.enter_context(TensorFile(path)) for path in tensor_files(folder)]
        stored = {name: tensor for file in files for name, tensor in file.tensors.items()}
        for name in sorted(stored):
            tensor = stored[name]
            if not re.search(_OPTIONAL, name.removesuffix(".weight")):
                digest.update(f"{name} {tensor.shape} ".encode())
                for start in (0, -_NUMBERS):
                    digest.update(_numbers(tensor, start))
    return digest.hexdigest()


def _numbers(tensor: StoredTensor, start: int) -> bytes:
    count, itemsize = tensor.size_bytes // tensor.dtype.itemsize, tensor.dtype.itemsize
    start = max(0, count + start) if start < 0 else start
    held = torch.empty(min(_NUMBERS, count - start), dtype=tensor.dtype)
    into = memoryview(held.view(torch.uint8).numpy())  # pyright: ignore[reportArgumentType]
    tensor.file.read(into, tensor.begin + start * itemsize)
    if held.dtype.is_floating_point:
        held = held.to(torch.bfloat16)
    return held.view(torch.uint8).numpy().tobytes()


def check_base(adapter: Path, base: Path, base_name: str) -> None:
    """Whether the adapter in the folder ``adapter`` was made for the model in ``base``, as far as it tells.

    One that we wrote holds its base's fingerprint. Of one by peft, the base that its adapter_config.json names is compared where it is a
    folder on this machine; two hub ids that differ are warned of, because copies and quantised versions of a base have ids of their own,
    and so is a quantised folder other than the one that an adapter of ours was made for.

    Args:
        base_name: what the user called the base: a path or a hub id.

    Raises:
        ConfigurationError: it was made for another.
    """
    found = fingerprint(base)
    for path in tensor_files(adapter, ADAPTER_FILE):
        with TensorFile(path) as file:
            stated = file.metadata.get(BASE)
        if stated is not None:
            if stated != found and "quantization_config" in read_json(base / CONFIG):
                warnings.warn(
                    f"{path} was trained over other weights than the quantised ones in {base}, and these do not tell what they were "
                    "made from: if that is another model, what is written will be wrong",
                    UserWarning,
                    stacklevel=2,
                )
            elif stated != found:
                raise ConfigurationError(
                    f"{adapter} holds an adapter for another base than {base}: {path.name} was trained over weights with the fingerprint "
                    f"{stated}, those of {base} have {found}; give the model that it was trained over as --model"
                )
            return
    named = read_json(adapter / ADAPTER_CONFIG).get("base_model_name_or_path")
    if not isinstance(named, str) or not named:
        return
    theirs = Path(named)
    if (theirs / CONFIG).is_file() and any(theirs.glob("model*.safetensors")):
        if fingerprint(theirs) != found:
            raise ConfigurationError(
                f"{adapter} holds an adapter for another base than {base}: {adapter / ADAPTER_CONFIG} names {named}, whose weights are "
                "others; give that as --model"
            )
    elif is_hub_id(named) and is_hub_id(base_name) and named != base_name:
        warnings.warn(
            f"{adapter / ADAPTER_CONFIG} says that the adapter is for {named}, and the model is {base_name}: "
            "if that is no copy of it, what is written will be wrong",
            UserWarning,
            stacklevel=2,
        )
