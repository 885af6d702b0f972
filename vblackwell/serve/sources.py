"""What the models of a server are called, and which folders they are."""

import re
from collections.abc import Collection, Iterator, Mapping, Sequence
from contextlib import contextmanager
from pathlib import Path
from typing import Any

import torch

from vblackwell.errors import ConfigurationError, VBError, nearest
from vblackwell.folders.commit import MANIFEST
from vblackwell.folders.folder import ADAPTER_CONFIG, GENERATION, find_folder, load_specs, read_json, stored_dtype
from vblackwell.folders.hub import is_hub_id
from vblackwell.generate.adapters import trained_over
from vblackwell.generate.command import base_of
from vblackwell.generate.load import ADAPTER, FINAL, resolve_model

NAME = re.compile(r"[\w.:-]+(/[\w.:-]+)?")
MAX_NAME = 128
_CAST = (torch.float32, torch.bfloat16, torch.float16)  # floats that a folder's type replaces


def named(models: Sequence[str | Path]) -> dict[str, str | Path]:
    """What each model's name stands for; raises ConfigurationError for one that is there twice."""
    found: dict[str, str | Path] = {}
    for given in models:
        name, equals, source = str(given).partition("=")
        if not equals or isinstance(given, Path) or Path(str(given)).exists():
            source = given
            name = str(given) if _is_id(given) else Path(given).resolve().name
        if name in found:
            raise ConfigurationError(
                f"two models are named {name!r} ({found[name]} and {source}): give one as another-name={source}"
            )
        found[name] = source
    return found


def _is_id(given: str | Path) -> bool:
    return isinstance(given, str) and is_hub_id(given) and not Path(given).exists()


def check_names(models: Mapping[str, Any], pin: Collection[str], preload: Collection[str]) -> None:
    if not models:
        raise ConfigurationError("no model to serve: give a folder or a hub id, or name=folder")
    for name in models:
        if not NAME.fullmatch(name) or len(name) > MAX_NAME or ".." in name:
            said = f"letters, digits, '.', '-', '_' and ':', at most {MAX_NAME}, with one '/' at most inside"
            raise ConfigurationError(f"{name!r} is no name of a model ({said}): give it as name=folder")
    for what, names in (("pin", pin), ("preload", preload)):
        for name in names:
            if name not in models:
                choice = f"it is one of {', '.join(models)}{nearest(name, models)}"
                raise ConfigurationError(f"{what} {name!r} is no model that is served: {choice}")


def folders_of(model: str | Path) -> tuple[Path, Path | None]:
    """The folder of a model's weights, and that of an adapter over it; raises as `resolve_model` and `base_of`."""
    path = find_folder(model)
    merged = (path / "config.json").is_file() or (path / FINAL / MANIFEST).is_file()
    adapters = [each for each in (path, path / ADAPTER) if (each / ADAPTER_CONFIG).is_file()]
    if adapters and not merged:
        return resolve_model(base_of(str(adapters[0])))[0], adapters[0]
    return resolve_model(path)[0], None


def bytes_in_ram(folder: Path | None, adapter: Path | None) -> int:
    """Of weights and adapter, floats in the folder's type. Of a base that is packed as it is opened nothing is counted:
    what it takes is known later."""
    total = 0 if adapter is None else sum(path.stat().st_size for path in adapter.glob("*.safetensors"))
    if folder is None or (adapter is not None and "fp4" in trained_over(adapter)[1]):
        return total
    dtype = stored_dtype(folder)
    for spec in load_specs(folder).values():
        itemsize = dtype.itemsize if spec.dtype in _CAST else spec.dtype.itemsize
        total += spec.size_bytes * itemsize // spec.dtype.itemsize
    return total


def stated_ends(folder: Path | None) -> frozenset[int]:
    """The end tokens that the folder's generation_config.json names."""
    if folder is None or not (folder / GENERATION).is_file():
        return frozenset()
    stated = read_json(folder / GENERATION).get("eos_token_id")
    return frozenset(each for each in (stated if isinstance(stated, list) else [stated]) if isinstance(each, int))


@contextmanager
def naming(name: str) -> Iterator[None]:
    """Let an error say which model it is about."""
    try:
        yield
    except VBError as error:
        if not str(error).startswith(f"model {name!r}"):
            error.args = (f"model {name!r}: {error}", *error.args[1:])
        raise
