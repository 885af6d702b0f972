"""Where settings come from: flags, over the YAML file, over the resumed run's, over the preset's recipe, over defaults.

Values are text on the command line and typed in YAML; both pass through `convert`, so the same mistake gets the same
sentence.
"""

from __future__ import annotations

import dataclasses
import types
import typing
from pathlib import Path
from typing import Any

from vblackwell.errors import ConfigurationError, nearest
from vblackwell.train.config import TrainConfig, flag_of
from vblackwell.train.runfolder import read_stored_config

# A preset's recipe. Rates fall with width as practice has it (GPT-3's table). `tiny` is meant to be watched: it learns
# the shape of Python from the standard library's sources in a few minutes on two CPU cores.
RECIPES: dict[str, dict[str, Any]] = {
    "tiny": {
        "batch_size": 8, "seq_length": 128, "learning_rate": 3e-3, "beta2": 0.99, "max_steps": 600,
        "checkpoint_every": 200, "eval_every": 100,
    },
    "small": {"batch_size": 8, "seq_length": 512, "learning_rate": 1e-3, "epochs": 1.0},
    "medium": {"batch_size": 8, "seq_length": 1024, "learning_rate": 6e-4, "epochs": 1.0},
    "large": {"batch_size": 8, "seq_length": 1024, "learning_rate": 4e-4, "epochs": 1.0},
    "xl": {"batch_size": 8, "seq_length": 2048, "learning_rate": 2e-4, "epochs": 1.0, "checkpoint_every": 500},
    "7b": {"batch_size": 8, "seq_length": 2048, "learning_rate": 1.5e-4, "epochs": 1.0, "checkpoint_every": 500},
}  # fmt: skip
# A model that has been trained: a preset's rate would undo that. Adapters begin at zero and bear more.
FINE_TUNING: dict[str, Any] = {"learning_rate": 2e-5}
ADAPTERS: dict[str, Any] = {"learning_rate": 2e-4}

EXCLUSIVE = ("max_steps", "epochs")
_TRUE, _FALSE = ("true", "yes", "on", "1"), ("false", "no", "off", "0")


def resolve(flags: dict[str, Any]) -> TrainConfig:
    """The settings that ``flags`` (field to value as given; ``config`` for ``--config``) ask for.

    Raises:
        ConfigurationError: an unknown preset, file or key, or a value out of range.
    """
    file_values = _with_auto_batch(_named(flags.get("config")))
    flags = _with_auto_batch({name: value for name, value in flags.items() if name != "config"})
    explicit = file_values | flags
    stored = _stored(explicit)
    preset = str(explicit.get("preset", stored.get("preset", TrainConfig.preset)))
    if preset not in RECIPES:
        raise ConfigurationError(
            f"preset {preset!r} is unknown: choose one of {', '.join(RECIPES)}{nearest(preset, RECIPES)}"
        )
    recipe = RECIPES[preset]
    if explicit.get("model"):
        recipe = ADAPTERS if explicit.get("lora") is not None else FINE_TUNING
    values: dict[str, Any] = {}
    for layer in (recipe, stored, file_values, flags):
        if any(layer.get(name) is not None for name in EXCLUSIVE):
            values = {name: value for name, value in values.items() if name not in EXCLUSIVE}
        values |= layer
    return TrainConfig(**{name: convert(name, value) for name, value in values.items()})


def _with_auto_batch(values: dict[str, Any]) -> dict[str, Any]:
    """``batch_size: auto`` as the switch that it stands for; the number is then that of the layers below."""
    if values.get("batch_size") != "auto":
        return values
    return {name: value for name, value in values.items() if name != "batch_size"} | {"auto_batch_size": True}


def _stored(explicit: dict[str, Any]) -> dict[str, Any]:
    """The settings of the run that is to be resumed; empty if there is none yet."""
    if not explicit.get("out") or not convert("resume", explicit.get("resume", False)):
        return {}
    stored = read_stored_config(Path(str(explicit["out"]))) or {}
    return {name: value for name, value in stored.items() if name in TrainConfig.__dataclass_fields__}


def _named(config: str | None) -> dict[str, Any]:
    """What ``--config`` brings: a preset's name, or a file's values."""
    if config is None:
        return {}
    if config in RECIPES:
        return {"preset": config}
    path = Path(config)
    if path.suffix in (".yaml", ".yml") or path.is_file():
        return read_yaml(path)
    raise ConfigurationError(
        f"--config {config!r} is neither a preset ({', '.join(RECIPES)}) nor a YAML file{nearest(config, RECIPES)}"
    )


def read_yaml(path: Path) -> dict[str, Any]:
    """Settings of a YAML file, keys as the flags with '-' or '_'.

    Raises:
        ConfigurationError: the file is missing, not UTF-8, not YAML, or has a key that no setting has.
    """
    import yaml

    if path.exists() and not (path.is_file() or path.is_fifo()):  # a device may never end
        raise ConfigurationError(f"--config {path} is no file; give a YAML file")
    try:
        loaded = yaml.safe_load(path.read_text(encoding="utf-8"))
    except OSError as error:
        raise ConfigurationError(f"--config {path}: {error.strerror}; give an existing YAML file") from error
    except UnicodeDecodeError as error:
        raise ConfigurationError(f"--config {path}: byte {error.start} is not UTF-8; save the file as UTF-8") from error
    except Exception as error:  # its own, and what Python raises at a date or a number that is none
        raise ConfigurationError(f"--config {path} is not YAML: {' '.join(str(error).split())}") from error
    if loaded is None:
        return {}
    if not isinstance(loaded, dict):
        raise ConfigurationError(
            f"--config {path} holds {type(loaded).__name__}, not keys and values, e.g. 'max_steps: 200'"
        )
    known = [field.name for field in dataclasses.fields(TrainConfig)]
    values = {}
    for key, value in loaded.items():
        # Not printed before it is known to be plain: a few nested aliases are a text of any length.
        if not all(map(_is_plain, value.values() if isinstance(value, dict) else (value,))):
            raise ConfigurationError(
                f"--config {path}: key {key!r} holds a list, or lists or mappings in one: write one value"
            )
        name = str(key).replace("-", "_")
        if name not in known:
            raise ConfigurationError(
                f"--config {path}: key {key!r} is no setting: remove or rename it{nearest(name, known)}"
            )
        values[name] = value
    return values


def _is_plain(value: Any) -> bool:
    return not isinstance(value, (list, tuple, dict, set))


def convert(field: str, value: Any) -> Any:
    """``value`` as the type of ``field``; text is read as the command line means it."""
    wanted = _type_of(field)
    if value is None or not isinstance(value, str):
        if wanted is bool and not isinstance(value, bool):
            raise ConfigurationError(f"{flag_of(field)} {value!r} is not true or false: write one of them")
        if wanted is dict and value is not None and not isinstance(value, dict):
            raise ConfigurationError(f"{flag_of(field)} {value!r} is not a mapping: write e.g. {{num_layers: 4}}")
        if wanted is str and value is not None:
            raise ConfigurationError(f"{flag_of(field)} {value!r} is not text: put it in quotes")
        return float(value) if wanted is float and isinstance(value, int) and not isinstance(value, bool) else value
    if wanted is bool:
        if value.lower() not in _TRUE + _FALSE:
            raise ConfigurationError(f"{flag_of(field)} {value!r} is not true or false: write one of them")
        return value.lower() in _TRUE
    if wanted in (int, float):
        try:
            return wanted(value)
        except ValueError:
            kind = "a whole number" if wanted is int else "a number"
            raise ConfigurationError(f"{flag_of(field)} {value!r} is not {kind}: give one") from None
    if wanted is dict:
        return _mapping(field, value)
    return value


def _mapping(field: str, text: str) -> dict[str, Any]:
    import yaml

    try:
        loaded = yaml.safe_load(text)
    except Exception:  # as in a file
        loaded = None
    if not isinstance(loaded, dict) or not all(map(_is_plain, (*loaded, *loaded.values()))):
        raise ConfigurationError(f"{flag_of(field)} {text!r} is not a mapping: write e.g. '{{num_layers: 4}}'")
    return loaded


def _type_of(field: str) -> type | None:
    """bool, int, float, str or dict; None for sizes and choices, which are checked where the config is made."""
    hint = typing.get_type_hints(TrainConfig)[field]
    options = typing.get_args(hint) if isinstance(hint, types.UnionType) else (hint,)
    plain = [typing.get_origin(option) or option for option in options if option is not type(None)]
    return plain[0] if len(plain) == 1 and plain[0] in (bool, int, float, str, dict) else None
