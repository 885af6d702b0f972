"""Hugging Face folders, out and in, without holding a model twice.

Out: ``config.json``, ``generation_config.json``, the tokenizer's files and safetensors under the model's own names, so
that ``transformers`` opens the folder with its Auto classes. In: tensors are read one at a time; what is missing, too
many or of another shape is found from the tables before the first byte of a weight is touched, so that a wrong folder
cannot leave a model half loaded. Files of pickled objects (``.bin``, ``.pt``) are refused: opening them runs their
code.
"""

from __future__ import annotations

import json
from collections.abc import Iterable, Iterator
from pathlib import Path
from typing import TYPE_CHECKING, Any

import torch
from safetensors import SafetensorError, safe_open
from torch import Tensor, nn

from vblackwell.errors import ConfigurationError, CorruptData, Unsupported
from vblackwell.folders.commit import CommitFolder
from vblackwell.folders.shards import DTYPES, SafetensorsShards, TensorSpec
from vblackwell.units import GiB

if TYPE_CHECKING:
    from tokenizers import Tokenizer

GENERATION = "generation_config.json"
TOKENS = ("bos_token_id", "eos_token_id", "pad_token_id")
MAX_NAMED = 5  # names in a message
_TOKENIZER_FILES = (
    "tokenizer.json", "tokenizer_config.json", "special_tokens_map.json", "added_tokens.json", "vocab.json",
    "merges.txt", "tokenizer.model", "chat_template.jinja", "chat_template.json",
)  # fmt: skip


def save_model(
    folder: CommitFolder,
    config: dict[str, Any],
    specs: Iterable[TensorSpec],
    tensors: Iterator[tuple[str, Tensor]] | dict[str, Tensor],
    tokenizer: Tokenizer | None = None,
    max_shard_bytes: int = 5 * GiB,
    *,
    generation: bool = True,
) -> None:
    """Writes a Hugging Face folder.

    Args:
        folder: the commit to write into.
        config: what ``config.json`` says.
        specs: every tensor that will be written.
        tensors: the tensors by name, or an iterator over all of them in the order of ``SafetensorsShards.names``.
        tokenizer: written as files that ``AutoTokenizer`` opens.
        max_shard_bytes: of one weight file.
        generation: write a generation_config.json from ``config`` too.

    Raises:
        DiskError: the disk refused.
    """
    specs = list(specs)
    kinds = {str(spec.dtype).removeprefix("torch.") for spec in specs if spec.dtype.is_floating_point}
    folder.add_json("config.json", config | ({"dtype": kinds.pop()} if len(kinds) == 1 else {}))
    if generation:
        ends = {key: config[key] for key in TOKENS if config.get(key) is not None}
        folder.add_json(GENERATION, {"_from_model_config": True, **ends})
    if tokenizer is not None:
        end = config.get("eos_token_id")
        end = end[0] if isinstance(end, list) else end  # models may stop at several
        save_tokenizer(folder, tokenizer, end, config.get("max_position_embeddings"))
    with SafetensorsShards(folder, "model", specs, max_shard_bytes) as shards:
        for name in shards.names:
            tensor = tensors[name] if isinstance(tensors, dict) else _expect(name, tensors)
            shards.write(name, tensor)


def _expect(name: str, tensors: Iterator[tuple[str, Tensor]]) -> Tensor:
    found, tensor = next(tensors)
    assert found == name, f"expected {name}, got {found}"
    return tensor


def save_tokenizer(
    folder: CommitFolder, tokenizer: Tokenizer, eos_token_id: int | None, max_length: int | None
) -> None:
    """Writes ``tokenizer.json`` and the ``tokenizer_config.json`` that makes ``AutoTokenizer`` open it."""
    folder.add("tokenizer.json", tokenizer.to_str(pretty=True).encode())
    settings: dict[str, Any] = {"tokenizer_class": "PreTrainedTokenizerFast", "clean_up_tokenization_spaces": False}
    if eos_token_id is not None:
        settings["eos_token"] = tokenizer.id_to_token(eos_token_id)
    if max_length is not None:
        settings["model_max_length"] = max_length
    folder.add_json("tokenizer_config.json", settings)


def copy_tokenizer(folder: CommitFolder, source: Path) -> None:
    """Adds the tokenizer's files of the model folder ``source``, as they are.

    Raises:
        ConfigurationError: there are none.
    """
    found = [source / name for name in _TOKENIZER_FILES if (source / name).is_file()]
    if not found:
        raise ConfigurationError(
            f"tokenizer {source}: none of the files of one is there; give the folder that has them"
        )
    for path in found:
        folder.add(path.name, path.read_bytes())


def read_tokenizer(path: Path) -> Tokenizer:
    """The tokenizer in ``path``: a ``tokenizer.json``, or a folder that holds one, as Hugging Face's do.

    Raises:
        ConfigurationError: there is none, or `tokenizers` cannot read it.
    """
    from tokenizers import Tokenizer

    file = path / "tokenizer.json" if path.is_dir() else path
    if not file.is_file():
        hint = "give a tokenizer.json or a folder that holds one; AutoTokenizer's save_pretrained writes it"
        raise ConfigurationError(f"tokenizer {path}: there is no file {file}; {hint}")
    try:
        tokenizer = Tokenizer.from_str(file.read_text(encoding="utf-8"))
    except OSError as error:
        raise ConfigurationError(f"tokenizer {file} cannot be read: {error.strerror or error}") from error
    except Exception as error:  # the library raises bare Exception for whatever is wrong in the file
        raise ConfigurationError(
            f"tokenizer {file} is not one that `tokenizers` reads ({error}); write it again"
        ) from error
    tokenizer.no_truncation()
    tokenizer.no_padding()
    return tokenizer


def read_json(path: Path) -> dict[str, Any]:
    """A JSON object from a model folder.

    Raises:
        ConfigurationError: the file is missing.
        CorruptData: it is no JSON object.
    """
    if path.exists() and not path.is_file():  # a device may never end
        raise ConfigurationError(f"{path} is no file; give a folder that holds a model")
    try:
        value = json.loads(path.read_text(encoding="utf-8"))
    except OSError as error:
        raise ConfigurationError(f"{path}: {error.strerror}; give a folder that holds a model") from error
    except (ValueError, RecursionError) as error:
        raise CorruptData(f"{path} is not JSON ({error}); fetch or write the folder again") from error
    if not isinstance(value, dict):
        raise CorruptData(f"{path} holds no JSON object; fetch or write the folder again")
    return value


def read_config(folder: Path) -> dict[str, Any]:
    """``config.json`` of a model folder."""
    return read_json(folder / "config.json")


def stored_dtype(config: dict[str, Any]) -> torch.dtype:
    """What config.json says that the weights are.

    Raises:
        ConfigurationError: it names no type of torch's.
    """
    name = config.get("dtype") or config.get("torch_dtype") or "float32"
    dtype = getattr(torch, str(name).removeprefix("torch."), None)
    if not isinstance(dtype, torch.dtype):
        raise ConfigurationError(f"config.json says dtype {name!r}, which is none of torch's")
    return dtype


def tensor_files(folder: Path, prefix: str = "model") -> list[Path]:
    """The safetensors files of ``prefix``: the single one, or those that the index names.

    Raises:
        ConfigurationError: there are none.
        CorruptData: the index names a file that is missing, or one outside the folder.
    """
    single, index = folder / f"{prefix}.safetensors", folder / f"{prefix}.safetensors.index.json"
    if single.is_file():
        return [single]
    if not index.is_file():
        pickled = sorted(path.name for kind in ("*.bin", "*.pt", "*.pth") for path in folder.glob(kind))
        hint = f"; {pickled[0]} is pickled and may run code: convert it with save_pretrained" if pickled else ""
        raise ConfigurationError(f"{folder} holds no {prefix}.safetensors and no index of shards{hint}")
    places = read_json(index).get("weight_map")
    if not isinstance(places, dict) or not all(isinstance(name, str) for name in places.values()):
        raise CorruptData(f"{index} has no weight_map of file names; fetch or write the folder again")
    outside = [name for name in places.values() if name in ("", "..") or Path(name).name != name]
    if outside:
        raise CorruptData(f"{index} names {outside[0]!r}, which is not a file of the folder; fetch the folder again")
    files = [folder / name for name in sorted(set(places.values()))]
    missing = [path.name for path in files if not path.is_file()]
    if missing:
        raise CorruptData(
            f"{folder} lacks {some_names(missing)}, named in {index.name}; fetch or write the folder again"
        )
    return files


def load_specs(folder: Path, prefix: str = "model") -> dict[str, TensorSpec]:
    """Name, shape and type of every tensor of ``prefix``, from the files' tables alone."""
    specs = {}
    for path in tensor_files(folder, prefix):
        with _opened(path) as file:
            for name in file.keys():  # noqa: SIM118 (not a dict)
                table = file.get_slice(name)
                if table.get_dtype() not in DTYPES:
                    raise Unsupported(
                        f"{path}: {name} is {table.get_dtype()}, which this version cannot read; convert it"
                    )
                specs[name] = TensorSpec(name, tuple(table.get_shape()), DTYPES[table.get_dtype()])
    return specs


def load_state(
    folder: Path, prefix: str = "model", names: Iterable[str] | None = None, device: torch.device | str = "cpu"
) -> Iterator[tuple[str, Tensor]]:
    """Every tensor of ``prefix``, or those in ``names``, one at a time, on ``device``.

    Raises:
        ConfigurationError: the folder holds no such files.
        CorruptData: a file is missing or cannot be read.
    """
    wanted = None if names is None else set(names)
    for path in tensor_files(folder, prefix):
        with _opened(path, device) as file:
            for name in file.keys():  # noqa: SIM118 (not a dict)
                if wanted is None or name in wanted:
                    yield name, file.get_tensor(name)


def _opened(path: Path, device: torch.device | str = "cpu") -> Any:
    try:
        return safe_open(path, framework="pt", device=str(device))
    except (SafetensorError, OSError) as error:
        raise CorruptData(
            f"{path} is not a readable safetensors file ({error}); fetch or write the folder again"
        ) from error


def check_names(expected: dict[str, tuple[int, ...]], found: dict[str, TensorSpec], folder: Path) -> None:
    """Compares the tensors that a model wants with those that a folder has.

    Raises:
        ConfigurationError: some are missing, too many or of another shape; all three kinds are named.
    """
    missing = [name for name in expected if name not in found]
    extra = [name for name in found if name not in expected]
    misshapen = [
        f"{name} {found[name].shape} instead of {shape}"
        for name, shape in expected.items()
        if name in found and found[name].shape != shape
    ]
    kinds = (("lacks", missing), ("has in excess", extra), ("has in another shape", misshapen))
    reasons = [f"{word} {some_names(names)}" for word, names in kinds if names]
    if reasons:
        raise ConfigurationError(
            f"{folder} does not fit the model: it {'; it '.join(reasons)}. Give the folder it came from"
        )


def load_weights(model: nn.Module, folder: Path) -> None:
    """Copies the folder's weights into ``model``, a tensor at a time, cast to the model's types.

    A tied parameter needs to be in the folder under one of its names.

    Raises:
        ConfigurationError: names or shapes differ; nothing was copied then.
        CorruptData: a file cannot be read.
    """
    targets = dict(model.state_dict(keep_vars=True))
    found = {name: spec for name, spec in load_specs(folder).items() if not name.endswith("rotary_emb.inv_freq")}
    present = {id(tensor) for name, tensor in targets.items() if name in found}
    expected = {name: tensor for name, tensor in targets.items() if name in found or id(tensor) not in present}
    check_names({name: tuple(tensor.shape) for name, tensor in expected.items()}, found, folder)
    with torch.no_grad():
        for name, tensor in load_state(folder, names=found):
            targets[name].copy_(tensor)


def some_names(names: list[str]) -> str:
    """The first few of ``names``, and how many there are beyond."""
    shown = ", ".join(names[:MAX_NAMED])
    return shown if len(names) <= MAX_NAMED else f"{shown} and {len(names) - MAX_NAMED} more"
