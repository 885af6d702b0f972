"""What is wrong with a model's folder, its tokenizer or the prompts for it, said before anything large is opened.

``transformers`` alone may draw random numbers for tensors that no file has, raise anything for a value in config.json,
and unpickle a file. Here tables of files and a model without bytes are enough to know.
"""

from __future__ import annotations

from pathlib import Path
from typing import TYPE_CHECKING

import torch

from vblackwell.errors import ConfigurationError
from vblackwell.folders.commit import MANIFEST
from vblackwell.folders.folder import find_folder, is_hub_id, read_config, read_json, read_tokenizer
from vblackwell.folders.weights import FolderWeights, build_on_meta
from vblackwell.units import format_bytes

if TYPE_CHECKING:
    from tokenizers import Tokenizer

MAX_PROMPTS_BYTES = 256 << 20
LIMITS = ("max_position_embeddings", "n_positions")


def check_request(
    model: str, prompt: str | None = None, prompts: str | None = None, max_new_tokens: int = 0, *, weights: bool = True
) -> None:
    """Look at what ``vb generate`` was asked for; anything but one of ``prompt`` and ``prompts`` is for the command to
    refuse. ``weights``: look at the tables of the folder's files too; False where the caller opens it and does.

    Raises ConfigurationError for a prompt that, alone or with what is to be added, is longer than the model's limit,
    with file and line; for a tokenizer that is missing, unreadable or larger than the model's vocabulary; for a wrong
    config.json; for pickled files. FolderMismatch, CorruptData, Unsupported as `FolderWeights`.
    """
    folder = Path(model)
    if not folder.exists() and is_hub_id(model):
        folder = find_folder(model)
    if not (folder / "config.json").is_file() or "model_type" not in read_json(folder / "config.json"):
        return  # a run: the command looks for its newest whole checkpoint
    if weights:
        check_weights(folder)
    tokenizer = read_tokenizer(folder)
    check_tokenizer(folder, tokenizer)
    if (prompt is None) == (prompts is None):
        return
    placed = [("--prompt", prompt)] if prompt is not None else prompt_lines(Path(prompts or ""))
    config = read_config(folder)
    name = next((name for name in LIMITS if isinstance(config.get(name), int)), None)
    if name is None:
        return
    for place, text in placed:
        length, limit = len(tokenizer.encode(text).ids), config[name]
        stated = f"the model's limit is {limit} ({name} in {folder / 'config.json'})"
        remedy = f"{stated}: shorten it to at most {limit - 1}"
        if length < limit:
            total = length + max_new_tokens
            remedy = f"with {max_new_tokens} new ones {total}, {stated}: ask for at most {limit - length}"
        if length + max(max_new_tokens, 1) > limit:
            raise ConfigurationError(f"{place}: the prompt has {length} tokens, {remedy}")


def check_weights(folder: Path) -> None:
    """Whether the files of ``folder`` hold what its config.json says; raises as `build_on_meta` and `FolderWeights`.
    What we wrote has hashes, checked elsewhere, and what is quantised has other tensors: neither is looked at."""
    if not (folder / MANIFEST).is_file() and not read_config(folder).get("quantization_config"):
        FolderWeights(build_on_meta(folder, torch.float32), folder).__exit__(None, None, None)


def check_tokenizer(folder: Path, tokenizer: Tokenizer, source: Path | None = None, *, remedy: str = "") -> None:
    """Whether every token of ``tokenizer``, from ``source`` if not ``folder``, has a row in the model's embedding;
    raises ConfigurationError, with ``remedy`` (how another is given) at its end."""
    path = source or folder
    file = path / "tokenizer.json" if path.is_dir() else path
    size = max(tokenizer.get_vocab(with_added_tokens=True).values(), default=0) + 1
    rows = read_config(folder).get("vocab_size")
    if isinstance(rows, int) and size > rows:
        raise ConfigurationError(
            f"{file} has {size} tokens, {folder / 'config.json'} a vocab_size of {rows}: give the tokenizer that the "
            f"model was trained with{remedy}"
        )


def prompt_lines(path: Path) -> list[tuple[str, str]]:
    """(file and line, text) of each prompt in a file that has one a line; raises ConfigurationError."""
    try:
        with path.open("rb") as file:
            data = file.read(MAX_PROMPTS_BYTES + 1)  # a device may have no end
        if len(data) > MAX_PROMPTS_BYTES:
            raise ValueError(f"it has more than {format_bytes(MAX_PROMPTS_BYTES)}")
        lines = data.decode("utf-8").splitlines()
    except (OSError, ValueError) as error:
        raise ConfigurationError(
            f"--prompts {path} cannot be read ({error}): give a text file with a prompt a line"
        ) from error
    found = [(f"{path}: line {number}", line) for number, line in enumerate(lines, 1) if line.strip()]
    if not found:
        raise ConfigurationError(f"--prompts {path} holds no prompt: write one a line")
    return found
