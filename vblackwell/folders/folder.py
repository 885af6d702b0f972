"""Hugging Face folders: found by path or hub id, written, and their JSON, tokenizers and tables read.

What is written opens with the Auto classes of ``transformers``. Files of pickled objects (``.bin``, ``.pt``) are
refused, because opening them runs their code; of a hub's repository, only configuration, tokenizer and safetensors are
fetched.
"""

import json
from collections.abc import Iterable, Iterator
from pathlib import Path
from typing import Any

import torch
from tokenizers import Tokenizer
from torch import Tensor

from vblackwell.errors import ConfigurationError, CorruptData, VBError, nearest_path
from vblackwell.folders.commit import CommitFolder
from vblackwell.folders.hub import cached_or_fetched, is_hub_id
from vblackwell.folders.tensor_file import SafetensorsShards, TensorFile, TensorSpec
from vblackwell.units import GiB

ADAPTER_CONFIG = "adapter_config.json"  # of peft
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
    tensors: Iterator[tuple[str, Tensor]],
    tokenizer: Tokenizer | None = None,
    max_shard_bytes: int = 5 * GiB,
    *,
    generation: bool = True,
) -> None:
    """Writes a Hugging Face folder, with files that ``AutoTokenizer`` opens for ``tokenizer``.

    ``config`` is what config.json says, and with ``generation`` generation_config.json; ``specs`` are all tensors,
    which come in the order of ``SafetensorsShards.names``.
    """
    specs = list(specs)
    kinds = {str(spec.dtype).removeprefix("torch.") for spec in specs if spec.dtype.is_floating_point}
    folder.add_json("config.json", config | ({"dtype": kinds.pop()} if len(kinds) == 1 else {}))
    if generation:
        ends = {key: config[key] for key in TOKENS if config.get(key) is not None}
        folder.add_json(GENERATION, {"_from_model_config": True, **ends})
    if tokenizer is not None:
        settings: dict[str, Any] = {"tokenizer_class": "PreTrainedTokenizerFast", "clean_up_tokenization_spaces": False}
        end, longest = config.get("eos_token_id"), config.get("max_position_embeddings")
        if end is not None:  # models may stop at several
            settings["eos_token"] = tokenizer.id_to_token(end[0] if isinstance(end, list) else end)
        if longest is not None:
            settings["model_max_length"] = longest
        folder.add("tokenizer.json", tokenizer.to_str(pretty=True).encode())
        folder.add_json("tokenizer_config.json", settings)
    with SafetensorsShards(folder, "model", specs, max_shard_bytes) as shards:
        for _ in shards.names:
            shards.write(*next(tensors))  # which checks the name


def copy_tokenizer(folder: CommitFolder, source: Path) -> None:
    """Adds the tokenizer's files of the folder ``source`` as they are; raises ConfigurationError for none."""
    found = [source / name for name in _TOKENIZER_FILES if (source / name).is_file()]
    if not found:
        raise ConfigurationError(f"tokenizer {source}: none of the files of one is there; give the folder with them")
    for path in found:
        folder.add(path.name, path.read_bytes())


def read_tokenizer(path: Path) -> Tokenizer:
    """The tokenizer in ``path``, a ``tokenizer.json`` or a folder that holds one; raises ConfigurationError."""
    file = path / "tokenizer.json" if path.is_dir() else path
    if not file.is_file():
        hint = "give a tokenizer.json or a folder that holds one; AutoTokenizer's save_pretrained writes it"
        raise ConfigurationError(f"tokenizer {path}: there is no file {file}; {hint}")
    try:
        tokenizer = Tokenizer.from_str(file.read_text(encoding="utf-8"))
    except Exception as error:  # the library raises bare Exception for whatever is wrong in the file
        said = f"is not one that `tokenizers` reads ({error}); write it again"
        said = f"cannot be read: {error.strerror or error}" if isinstance(error, OSError) else said
        raise ConfigurationError(f"tokenizer {file} {said}") from error
    tokenizer.no_truncation()
    tokenizer.no_padding()
    return tokenizer


def read_json(path: Path) -> dict[str, Any]:
    """A JSON object from a model folder; raises ConfigurationError for no file, CorruptData for none."""
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
    """The config.json of a model's ``folder``; ConfigurationError, CorruptData. That of a run holds it one below."""
    inner = folder / "final"
    if (inner / "config.json").is_file() and not (folder / "config.json").exists():
        raise ConfigurationError(f"{folder} is the folder of a run, not of a model: give {inner}")
    adapter = folder / ADAPTER_CONFIG
    if adapter.is_file() and not (folder / "config.json").exists():
        named = read_json(adapter).get("base_model_name_or_path")
        base = f"its base, {named}" if named else "the folder of its base"
        raise ConfigurationError(f"{folder} holds an adapter and no model: give {base}")
    return read_json(folder / "config.json")


def trained_steps(folder: Path) -> int | None:
    """Of what ``vb train`` exported, the step; None where the folder does not say it."""
    try:
        state = read_json(folder / "trainer.json").get("state")
    except VBError:
        return None
    step = state.get("step") if isinstance(state, dict) else None
    return step if isinstance(step, int) else None


def stored_dtype(folder: Path) -> torch.dtype:
    """What the weights in ``folder`` are: what config.json says, else as the first of the files' floats is stored;
    raises ConfigurationError where it names no type of torch's, and as `tensor_files`."""
    config = read_config(folder)
    name = config.get("dtype") or config.get("torch_dtype")
    if name is None:
        kinds = (spec.dtype for spec in load_specs(folder).values())
        return next((dtype for dtype in kinds if dtype.is_floating_point), torch.float32)
    dtype = getattr(torch, str(name).removeprefix("torch."), None)
    if not isinstance(dtype, torch.dtype):
        raise ConfigurationError(f"{folder / 'config.json'} says dtype {name!r}, which is none of torch's")
    return dtype


def tensor_files(folder: Path, prefix: str = "model") -> list[Path]:
    """The safetensors files of ``prefix``: the single one, or those that the index names. Raises ConfigurationError for
    none, CorruptData where the index names one that is missing or outside the folder."""
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
    if missing := [path.name for path in files if not path.is_file()]:
        raise CorruptData(
            f"{folder} lacks {some_names(missing)}, named in {index.name}; fetch or write the folder again"
        )
    return files


def load_specs(folder: Path) -> dict[str, TensorSpec]:
    """Name, shape and type of every tensor, from the files' tables alone."""
    specs = {}
    for path in tensor_files(folder):
        with TensorFile(path) as file:
            for name, found in sorted(file.tensors.items()):
                specs[name] = TensorSpec(name, found.shape, found.dtype)
    return specs


def load_state(folder: Path, prefix: str = "model") -> Iterator[tuple[str, Tensor]]:
    """Every tensor of ``prefix`` by name, one at a time; raises as `tensor_files`."""
    for path in tensor_files(folder, prefix):
        with TensorFile(path) as file:
            for name, stored in file.tensors.items():
                yield name, stored.load()


def some_names(names: list[str]) -> str:
    """The first few of ``names``, and how many there are beyond."""
    shown = ", ".join(names[:MAX_NAMED])
    return shown if len(names) <= MAX_NAMED else f"{shown} and {len(names) - MAX_NAMED} more"


PATTERNS = ["*.json", "*.safetensors", "*.jinja", "*.txt", "tokenizer.model"]
LEFT_OUT = ["*/*", "consolidated*"]  # the same weights once more in other forms, as large as those that are read


def find_folder(model: str | Path, revision: str | None = None) -> Path:
    """The folder that ``model`` means: one of that name, or a hub id ``owner/name``.

    ``revision`` is a branch, tag or commit of a hub id; by default the main branch (as it was when it was cached).
    Raises ConfigurationError where it is neither, or not in the cache and not to be downloaded, with a remedy.
    """
    path = Path(model)
    if path.is_dir():
        return path
    if isinstance(model, Path) or path.exists() or not is_hub_id(model):
        raise ConfigurationError(
            f"{model}: no such folder; give a Hugging Face folder with config.json and safetensors, a run folder of vb "
            f"train, or a hub id owner/name{nearest_path(path)}"
        )
    from huggingface_hub import snapshot_download

    def fetched(**options: Any) -> Path:
        found = Path(snapshot_download(model, revision=revision, **options))
        if not (found / "config.json").is_file():  # a cache may hold any part of a repository
            raise ConfigurationError("no config.json")
        tensor_files(found)
        return found

    return cached_or_fetched(model, fetched, allow_patterns=PATTERNS, ignore_patterns=LEFT_OUT)
