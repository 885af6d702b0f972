"""A model's folder from what the user wrote: a path, or a hub id such as ``Qwen/Qwen3-0.6B``.

Ids go through ``huggingface_hub``: its cache first, so that what was fetched once needs no network, then a download.
Only configuration, tokenizer and safetensors are fetched: no pickled weights, and no code.
"""

from __future__ import annotations

import re
from contextlib import suppress
from pathlib import Path

from vblackwell.errors import ConfigurationError, CorruptData
from vblackwell.folders.folder import tensor_files

PATTERNS = ["*.json", "*.safetensors", "*.jinja", "*.txt", "tokenizer.model"]
LEFT_OUT = ["*/*", "consolidated*"]  # the same weights once more in other forms, as large as those that are read
_ID = re.compile(r"[A-Za-z0-9][\w.-]*/[A-Za-z0-9][\w.-]*")


def find_folder(model: str | Path, revision: str | None = None) -> Path:
    """The folder that ``model`` means.

    Args:
        model: a folder; or, where there is none of this name, a hub id ``owner/name``.
        revision: branch, tag or commit of a hub id; by default the main branch (as it was when it was cached).

    Raises:
        ConfigurationError: neither; or the id is not in the cache and cannot be downloaded, with what to do about it.
    """
    path = Path(model)
    if path.is_dir():
        return path
    if isinstance(model, Path) or not is_hub_id(model):
        raise ConfigurationError(
            f"{model}: no such folder; give a Hugging Face folder with config.json and safetensors, or a hub id "
            "owner/name"
        )
    try:
        from huggingface_hub import snapshot_download
        from huggingface_hub.errors import HfHubHTTPError, HFValidationError, LocalEntryNotFoundError
    except ImportError as error:
        raise _without_hub(model) from error
    # Not in the cache: to be downloaded, as what is there in part. An id that cannot be one is told of there.
    with suppress(LocalEntryNotFoundError, HFValidationError):
        cached = Path(snapshot_download(model, revision=revision, local_files_only=True))
        if _lack(cached) is None:
            return cached
    try:
        found = Path(snapshot_download(model, revision=revision, allow_patterns=PATTERNS, ignore_patterns=LEFT_OUT))
        lack = _lack(found)  # without a network, what is in the cache may come back as it is
    except (HfHubHTTPError, LocalEntryNotFoundError, OSError, ValueError) as error:
        raise _not_to_be_had(model, (str(error).strip() or type(error).__name__).splitlines()[0]) from error
    if lack is not None:
        raise _not_to_be_had(model, lack)
    return found


def find_config(model: str, revision: str | None = None) -> Path:
    """The config.json of a hub id; no weights are fetched for it.

    Raises:
        ConfigurationError: it is not in the cache and cannot be downloaded, with what to do about it.
    """
    try:
        from huggingface_hub import hf_hub_download
        from huggingface_hub.errors import (
            EntryNotFoundError,
            HfHubHTTPError,
            HFValidationError,
            LocalEntryNotFoundError,
        )
    except ImportError as error:
        raise _without_hub(model) from error
    with suppress(LocalEntryNotFoundError, HFValidationError):
        return Path(hf_hub_download(model, "config.json", revision=revision, local_files_only=True))
    try:
        return Path(hf_hub_download(model, "config.json", revision=revision))
    except (HfHubHTTPError, EntryNotFoundError, OSError, ValueError) as error:
        raise _not_to_be_had(model, (str(error).strip() or type(error).__name__).splitlines()[0]) from error


def is_hub_id(model: str) -> bool:
    """Whether ``model`` has the form of a hub id, ``owner/name``."""
    return _ID.fullmatch(model) is not None


def _without_hub(model: str) -> ConfigurationError:
    return ConfigurationError(
        f"{model}: no such folder, and hub ids need the package huggingface_hub: pip install huggingface_hub"
    )


def _not_to_be_had(model: str, reason: str) -> ConfigurationError:
    return ConfigurationError(
        f"{model}: no such folder, not whole in huggingface_hub's cache, and not to be downloaded ({reason}). Where "
        f"there is a network run `hf download {model} --local-dir DIR`, bring DIR here and give it instead; or check "
        "the id"
    )


def _lack(folder: Path) -> str | None:
    """What is missing of a model, a cache may hold any part of a repository; None if nothing is."""
    if not (folder / "config.json").is_file():
        return "no config.json"
    try:
        tensor_files(folder)
    except (ConfigurationError, CorruptData) as error:
        return str(error)
    return None
