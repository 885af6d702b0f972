"""Inputs that are nearly right: flags, settings, headers, tables and lines with a few drawn changes.
None ends in a traceback.
"""

from __future__ import annotations

import json
import random
import struct
from collections.abc import Callable, Iterator
from functools import partial
from pathlib import Path
from typing import Any

from tests.faults.case import Case, Try
from tests.faults.damage import GENERATE, QUANTIZE, STREAMED, TUNE, model_of
from tests.faults.lab import MEMORY_BYTES, Lab, Place, is_done_or_refused

TRIES = 500
# What a value is replaced with. Numbers that only ask for more work than there is time for are left out.
VALUES: list[Any] = [
    None,
    True,
    False,
    0,
    1,
    2,
    3,
    -1,
    7.5,
    1e-9,
    1e308,
    -0.0,
    2**63,
    -(2**63),
    10**400,
    "",
    " ",
    "0",
    "-1",
    "nan",
    "inf",
    "1e999",
    "true",
    "null",
    "auto",
    "none",
    "\u0000",
    "\ud800",
    "x" * 5000,
    "../..",
    "/dev/null",
    "~",
    "%s%n",
    "{}",
    "[]",
    "{",
    "[" * 300,
    "--help",
    "١٢",
    "１",
    [],
    {},
    [[]],
    {"a": {"b": [1, None]}},
    [1, "a", None],
    "all(",
    "(",
    "*",
    "[a-",
    "(?P<x",
    "8GiB",
    "-8GiB",
    "8 giBBs",
    "8e9",
    "NaNGiB",
    "1..2",
    "0x10",
]
SMALL = {"max_steps": 1, "eval_sequences": 1, "sample_tokens": 0, "batch_size": 2, "seq_length": 16, "vocab_size": 300}


def _text(value: Any) -> str:
    return value if isinstance(value, str) else json.dumps(value)


def _clean(text: str) -> str:
    """What an argument of a process may hold."""
    return (
        text.replace("\x00", "NUL")
        .encode(errors="surrogateescape" if "\ud800" not in text else "replace")
        .decode(errors="replace")
    )


def mutated_bytes(data: bytes, draw: random.Random) -> bytes:
    """A few bytes changed, taken out, doubled, put elsewhere, or cut off."""
    found = bytearray(data)
    for _ in range(draw.choice((1, 1, 2, 5, 20))):
        if not found:
            break
        at, size = draw.randrange(len(found)), draw.choice((1, 1, 2, 8, 40))
        kind = draw.randrange(6)
        if kind == 0:
            found[at] ^= 1 << draw.randrange(8)
        elif kind == 1:
            del found[at : at + size]
        elif kind == 2:
            found[at:at] = found[at : at + size]
        elif kind == 3:
            found[at:at] = bytes(draw.randrange(256) for _ in range(size))
        elif kind == 4:
            found[at : at + 1] = draw.choice(
                [b"[", b"]", b"{", b"}", b'"', b",", b":", b"\n", b"-", b"9", b"\xff", b"\x00", b"\\"]
            )
        elif draw.random() < 0.2:
            del found[at:]
    return bytes(found)


def mutated_value(value: Any, draw: random.Random) -> Any:
    """A JSON value with one of its parts replaced, removed, doubled or renamed."""
    if isinstance(value, dict) and value and draw.random() < 0.85:
        key = draw.choice(sorted(value))
        changed = dict(value)
        kind = draw.randrange(5)
        if kind == 0:
            del changed[key]
        elif kind == 1:
            changed[draw.choice((key + "_", "", key.upper(), "x" * 300))] = changed.pop(key)
        else:
            changed[key] = mutated_value(value[key], draw)
        return changed
    if isinstance(value, list) and value and draw.random() < 0.7:
        at = draw.randrange(len(value))
        return value[:at] + draw.choice(([], [mutated_value(value[at], draw)], [value[at]] * 2)) + value[at + 1 :]
    return draw.choice(VALUES)


# -- what is mutated ---------------------------------------------------------------------------------------------------


def _flags(place: Place, draw: random.Random) -> list[str]:
    """A command with one to three flags given drawn values."""
    import dataclasses

    from vblackwell.train.config import TrainConfig, flag_of

    costly = {
        "max_steps", "epochs", "eval_sequences", "sample_tokens", "vocab_size", "accumulation_steps", "out", "data",
        "profile", "vgpu_auto", "preset", "batch_size", "seq_length", "auto_batch_size", "auto_seq_length",
    }  # fmt: skip
    fields = [field.name for field in dataclasses.fields(TrainConfig) if field.name not in costly]
    words = place.training() + ["--out", "run", "--max-steps", "1"]
    for name in draw.sample(fields, draw.choice((1, 1, 2, 3))):
        words += draw.choice(
            (
                [flag_of(name), _clean(_text(draw.choice(VALUES)))],
                [f"{flag_of(name)}={_clean(_text(draw.choice(VALUES)))}"],
                [flag_of(name)],
            )
        )
    if draw.random() < 0.2:
        words.insert(draw.randrange(1, len(words)), _clean(_text(draw.choice(VALUES))))
    return words


def _other_flags(place: Place, draw: random.Random) -> list[str]:
    model_of(place)
    flags = {
        GENERATE: [
            "--top-k", "--top-p", "--min-p", "--temperature", "--seed", "--prefill-chunk", "--fast-memory",
            "--host-memory", "--disk-memory", "--disk-path", "--adapter", "--fp4-layers", "--keep", "--assignment",
            "--use-fp4", "--device",
        ],
        QUANTIZE: [
            "--format", "--block-size", "--scale-search", "--pattern", "--keep", "--assignment", "--max-bits",
            "--budget", "--device",
        ],
        ("estimate", "tiny", "--gpu-memory", "8GiB", "--no-advice"): [
            "--gpu", "--gpu-memory", "--optimizer", "--precision", "--host-memory", "--disk-memory", "--topology",
            "--html",
        ],
    }  # fmt: skip
    words = draw.choice(sorted(flags, key=str))
    changed = list(words)
    for flag in draw.sample(flags[words], draw.choice((1, 1, 2))):
        changed += [flag, _clean(_text(draw.choice(VALUES)))]
    return changed


def _settings(place: Place, draw: random.Random) -> list[str]:
    """A YAML file of settings."""
    good = SMALL | {
        "data": str(place.lab.corpus),
        "out": "run",
        "device": "cpu",
        "learning_rate": 0.01,
        "checkpoint_every": 1,
        "tensorboard": False,
        "architecture": {"num_layers": 2, "hidden_size": 32, "intermediate_size": 64, "num_heads": 2},
        "warmup_steps": 0,
        "seed": 1,
        "fast_memory": "128KiB",
        "host_memory": "512KiB",
        "update": "auto",
        "betas": 1,
        "precision": "fp32",
        "fp4_layers": "all",
    }
    del good["betas"]
    path = place.folder / "run.yaml"
    if draw.random() < 0.5:
        path.write_bytes(
            mutated_bytes("".join(f"{key}: {json.dumps(value)}\n" for key, value in good.items()).encode(), draw)
        )
    else:
        bounded = {key: value for key, value in good.items() if key not in SMALL}
        changed = mutated_value(bounded, draw)
        changed = changed | SMALL if isinstance(changed, dict) else changed
        path.write_text(json.dumps(changed), encoding="utf-8")  # JSON is YAML
    small = [word for name, value in SMALL.items() for word in (f"--{name.replace('_', '-')}", str(value))]
    return ["train", "--config", "run.yaml", *small, "--out", "run"]


def _folder_json(place: Place, draw: random.Random) -> list[str]:
    """A JSON file of a model's folder."""
    model = model_of(place)
    (model / "manifest.json").unlink()
    path = model / draw.choice(
        ("config.json", "config.json", "tokenizer.json", "tokenizer_config.json", "generation_config.json")
    )
    if draw.random() < 0.4:
        path.write_bytes(mutated_bytes(path.read_bytes(), draw))
    else:
        path.write_text(json.dumps(mutated_value(json.loads(path.read_text()), draw)))
    return _with_data(place, draw.choice((GENERATE, STREAMED, TUNE, QUANTIZE)))


def _header(place: Place, draw: random.Random) -> list[str]:
    """The table of a safetensors file."""
    model = model_of(place)
    (model / "manifest.json").unlink()
    path = model / "model.safetensors"
    data = path.read_bytes()
    (size,) = struct.unpack("<Q", data[:8])
    table, body = data[8 : 8 + size], data[8 + size :]
    if draw.random() < 0.5:
        path.write_bytes(mutated_bytes(data[: 8 + size], draw) + body)
    else:
        text = json.dumps(mutated_value(json.loads(table), draw)).encode()
        path.write_bytes(struct.pack("<Q", len(text)) + text + body)
    return _with_data(place, draw.choice((GENERATE, STREAMED, TUNE, QUANTIZE)))


def _lines(place: Place, draw: random.Random) -> list[str]:
    """Lines of text, of conversations in each of their forms."""
    kinds: list[Any] = [
        {"text": "def f(x):\n    return x\n"},
        {"messages": [{"role": "user", "content": "say"}, {"role": "assistant", "content": "yes"}]},
        {"conversations": [{"from": "human", "value": "say"}, {"from": "gpt", "value": "yes"}]},
        {"instruction": "say", "input": "", "output": "yes"},
    ]
    good = draw.choice(kinds)
    lines = [json.dumps(good).encode()] * 40
    for _ in range(draw.choice((1, 1, 3))):
        at = draw.randrange(len(lines))
        if draw.random() < 0.5:
            lines[at] = json.dumps(mutated_value(good, draw)).encode()
        else:
            lines[at] = mutated_bytes(lines[at], draw)
    (place.folder / "data.jsonl").write_bytes(b"\n".join(lines) + b"\n")
    words = place.training("--data", "data.jsonl", "--max-steps", "1", "--checkpoint-every", "0")
    return words


def _stored(place: Place, draw: random.Random) -> list[str]:
    """The files of a run that is resumed."""
    place.copy_run(place.lab.stopped)
    path = place.run / draw.choice(
        (
            "settings.json",
            "metrics.jsonl",
            "checkpoints/step-00000004/manifest.json",
            "checkpoints/step-00000004/trainer.json",
        )
    )
    if draw.random() < 0.5 or path.suffix == ".jsonl":
        path.write_bytes(mutated_bytes(path.read_bytes(), draw))
    else:
        path.write_text(json.dumps(mutated_value(json.loads(path.read_text()), draw)))
    return place.training()


def _with_data(place: Place, words: tuple[str, ...]) -> list[str]:
    return [*words, *(("--data", str(place.lab.corpus)) if words[0] == "train" else ())]


KINDS: dict[str, Callable[[Place, random.Random], list[str]]] = {
    "flags of train": _flags, "flags of other commands": _other_flags, "YAML settings": _settings,
    "JSON of a folder": _folder_json, "safetensors table": _header, "jsonl lines": _lines, "files of a run": _stored,
}  # fmt: skip


def mutations(lab: Lab, seed: int) -> Iterator[Try]:
    def tried(place: Place, make: Callable[[Place, random.Random], list[str]], number: int) -> None:
        words = make(place, random.Random(f"{seed} {number}"))
        ended = place.vb(*words, limits={"RLIMIT_DATA": MEMORY_BYTES})
        try:
            is_done_or_refused(ended)
        except AssertionError as broken:
            raise AssertionError(f"{words}\n{_changed(place.folder)}\n{broken}") from None

    kinds = list(KINDS.items())
    for number in range(TRIES):
        what, make = kinds[number % len(kinds)]
        yield Try(f"{what} {number}", partial(tried, make=make, number=number))


def _changed(folder: Path) -> str:
    """What was mutated, shortly, for the report."""
    found = [path for path in (folder / "run.yaml", folder / "data.jsonl") if path.is_file()]
    return "\n".join(f"{path.name}: {path.read_bytes()[:600]!r}" for path in found)


CASES = [
    Case(
        "mutations",
        "drawn changes to flags, YAML settings, JSON of folders, safetensors tables, jsonl lines, and files of a "
        "resumed run",
        "exit 0, or exit 2 and one line; no traceback, no hang, no death",
        mutations,
        7,
    ),
]
