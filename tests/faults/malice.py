"""Folders and files made to do harm: none of their code runs, nothing outside them is read, and each is refused in a
line.

What would run leaves a file "canary" in the folder of the try.
"""

from __future__ import annotations

import json
import os
import pickle
import struct
from collections.abc import Callable, Iterator
from functools import partial
from pathlib import Path
from typing import Any

from tests.faults.case import Case, Try
from tests.faults.damage import COMMANDS, GENERATE, QUANTIZE, STREAMED, TUNE, model_of, sharded
from tests.faults.lab import MEMORY_BYTES, Lab, Place, is_done_or_refused, is_refused

CANARY = "canary"
Change = Callable[[Path], None]


class _Touch:
    """What a pickle runs when it is opened."""

    def __reduce__(self) -> tuple[Callable[[str], int], tuple[str]]:
        return os.system, (f"touch {CANARY}",)


def _try(place: Place, words: tuple[str, ...], change: Change, harmless: bool) -> None:
    model = model_of(place)
    (model / "manifest.json").unlink()
    change(model)
    data = ("--data", str(place.lab.corpus)) if words[0] == "train" and "--data" not in words else ()
    ended = place.vb(*words, *data, limits={"RLIMIT_DATA": MEMORY_BYTES})
    assert not list(place.folder.rglob(CANARY)), f"its code ran\n{ended}"
    if harmless:
        is_done_or_refused(ended)
    else:
        is_refused(ended)


def _edit(name: str, **values: Any) -> Change:
    """Values set in a JSON file of the folder."""

    def change(model: Path) -> None:
        path = model / name
        path.write_text(json.dumps(json.loads(path.read_text()) | values))

    return change


# -- code --------------------------------------------------------------------------------------------------------------

CODE = f'import os\nos.system("touch {CANARY}")\nopen("{CANARY}", "w")\n'


def _pickled(name: str, alone: bool) -> Change:
    def change(model: Path) -> None:
        (model / name).write_bytes(pickle.dumps(_Touch()))
        if alone:
            (model / "model.safetensors").unlink()

    return change


def _own_code(file: str, **values: Any) -> Change:
    def change(model: Path) -> None:
        for name in ("modeling_x.py", "configuration_x.py", "tokenization_x.py"):
            (model / name).write_text(CODE)
        _edit(file, **values)(model)

    return change


def _custom_generate(model: Path) -> None:
    (model / "custom_generate").mkdir()
    (model / "custom_generate/generate.py").write_text(CODE)


AUTO = {
    "AutoConfig": "configuration_x.X", "AutoModelForCausalLM": "modeling_x.X", "AutoModel": "modeling_x.X",
    "AutoTokenizer": ["tokenization_x.X", "tokenization_x.X"],
}  # fmt: skip


def code(lab: Lab, seed: int) -> Iterator[Try]:
    changes: dict[str, tuple[Change, bool]] = {
        "pytorch_model.bin next to the weights": (_pickled("pytorch_model.bin", False), True),
        "pytorch_model.bin alone": (_pickled("pytorch_model.bin", True), False),
        "model.pt alone": (_pickled("model.pt", True), False),
        "a pickle as model.safetensors": (_pickled("model.safetensors", False), False),
        "a pickle as tokenizer.json": (_pickled("tokenizer.json", False), True),
        "a pickle as training_args.bin": (_pickled("training_args.bin", False), True),
        "auto_map in config.json": (_own_code("config.json", auto_map=AUTO), True),
        "auto_map of an unknown model": (
            _own_code("config.json", auto_map=AUTO, model_type="x", architectures=["X"]),
            False,
        ),
        "auto_map in tokenizer_config.json": (
            _own_code("tokenizer_config.json", auto_map=AUTO, tokenizer_class="X"),
            True,
        ),
        "custom_generate": (_custom_generate, True),
    }
    for what, (change, harmless) in changes.items():
        for title, words in {**COMMANDS, "generate --chat": (*GENERATE, "--chat")}.items():
            yield Try(f"{title}: {what}", partial(_try, words=words, change=change, harmless=harmless))


# -- templates ---------------------------------------------------------------------------------------------------------

TEMPLATES = {
    "globals": "{{ cycler.__init__.__globals__.os.system('touch canary') }}",
    "subclasses": "{% for c in ''.__class__.__mro__[1].__subclasses__() %}{% if 'Popen' in c.__name__ %}"
    "{{ c('touch canary', shell=True) }}{% endif %}{% endfor %}",
    "self": "{{ self._TemplateReference__context.cycler.__init__.__globals__.os.system('touch canary') }}",
    "format": "{{ '{0.__class__.__init__.__globals__}'.format(messages) }}",
    "import": "{% import 'os' as os %}{{ os.system('touch canary') }}",
    "include": "{% include '/etc/passwd' %}",
    "divides by zero": "{{ 1 // 0 }}",
    "a long string": "{{ 'x' * 10**10 }}",
    "a long list": "{{ [0] * 10**10 }}",
    "a huge power": "{{ 10 ** 10 ** 8 }}",
    "a huge range": "{% for i in range(10**12) %}x{% endfor %}",
    "ranges in ranges": "{% for i in range(99999) %}{% for j in range(99999) %}x{% endfor %}{% endfor %}",
    "recursion": "{% macro f() %}{{ f() }}{% endmacro %}{{ f() }}",
    "no end": "{% for i in range(3) %}",
    "nested": "{{ " + "(" * 4000 + "1" + ")" * 4000 + " }}",
    "a width": "{{ '%1000000000d' % 1 }}",
    "a filter's width": "{{ 'x'|center(10000000000) }}",
    "raises": "{{ raise_exception('touch') }}",
    "no text": "{{ messages.gone.gone }}",
    "not UTF-8": "\udcff",
}


def templates(lab: Lab, seed: int) -> Iterator[Try]:
    def written(model: Path, text: str) -> None:
        (model / "chat_template.jinja").write_bytes(text.encode(errors="surrogateescape"))

    def trained(place: Place, text: str) -> None:
        talks = [
            {"messages": [{"role": "user", "content": f"say {i}"}, {"role": "assistant", "content": "yes"}]}
            for i in range(30)
        ]
        (place.folder / "talks.jsonl").write_text("".join(json.dumps(talk) + "\n" for talk in talks))
        _try(place, (*TUNE, "--data", "talks.jsonl"), partial(written, text=text), harmless=True)

    for what, text in TEMPLATES.items():
        yield Try(
            f"generate --chat: {what}",
            partial(_try, words=(*GENERATE, "--chat"), change=partial(written, text=text), harmless=True),
        )
        yield Try(f"train on conversations: {what}", partial(trained, text=text))


# -- tables of tensors -------------------------------------------------------------------------------------------------


def _with_table(
    edit: Callable[[dict[str, Any], int], Any], length: int | None = None, raw: bytes | None = None
) -> Change:
    """The weights' file with another table in front of the same bytes."""

    def change(model: Path) -> None:
        path = model / "model.safetensors"
        old = path.read_bytes()
        (size,) = struct.unpack("<Q", old[:8])
        body = old[8 + size :]
        table = edit(json.loads(old[8 : 8 + size]), len(body))
        text = (
            raw
            if raw is not None
            else (table if isinstance(table, str) else json.dumps(table)).encode(errors="surrogatepass")
        )
        path.write_bytes(struct.pack("<Q", len(text) if length is None else length) + text + body)

    return change


def _first(table: dict[str, Any], **values: Any) -> dict[str, Any]:
    name = next(key for key in table if key != "__metadata__" and table[key]["shape"])
    return table | {name: table[name] | values}


HEADERS: dict[str, Change] = {
    "a length of 2^64 - 1": _with_table(lambda table, size: table, length=2**64 - 1),
    "a length of 2^62": _with_table(lambda table, size: table, length=2**62),
    "a length of 99 MB": _with_table(lambda table, size: table, length=99_000_000),
    "a length of 0": _with_table(lambda table, size: table, length=0),
    "overlapping tensors": _with_table(
        lambda table, size: {
            key: entry
            if key == "__metadata__"
            else entry | {"data_offsets": [0, entry["data_offsets"][1] - entry["data_offsets"][0]]}
            for key, entry in table.items()
        }
    ),
    "offsets beyond the end": _with_table(lambda table, size: _first(table, data_offsets=[size, size + 128])),
    "offsets of 2^63": _with_table(lambda table, size: _first(table, data_offsets=[2**63, 2**63 + 128])),
    "offsets below zero": _with_table(lambda table, size: _first(table, data_offsets=[-128, 0])),
    "offsets the wrong way round": _with_table(lambda table, size: _first(table, data_offsets=[128, 0])),
    "offsets as text": _with_table(lambda table, size: _first(table, data_offsets=["0", "128"])),
    "one offset": _with_table(lambda table, size: _first(table, data_offsets=[0])),
    "a shape of 2^62 elements": _with_table(lambda table, size: _first(table, shape=[2**31, 2**31])),
    "a shape that overflows to zero": _with_table(lambda table, size: _first(table, shape=[2**32, 2**32])),
    "a shape below zero": _with_table(lambda table, size: _first(table, shape=[-1, 32])),
    "a shape of fractions": _with_table(lambda table, size: _first(table, shape=[1.5, 2.0])),
    "a thousand dimensions": _with_table(lambda table, size: _first(table, shape=[1] * 1000)),
    "an unknown type": _with_table(lambda table, size: _first(table, dtype="F17")),
    "a type that is a list": _with_table(lambda table, size: _first(table, dtype=["F32"])),
    "a table that is a list": _with_table(lambda table, size: "[1, 2]"),
    "a table of null": _with_table(lambda table, size: "null"),
    "an entry of null": _with_table(lambda table, size: table | {"x": None}),
    "metadata of numbers": _with_table(lambda table, size: table | {"__metadata__": {"a": 1}}),
    "one name twice": _with_table(lambda table, size: json.dumps(table)[:-1] + "," + json.dumps(table)[1:]),
    "nested a hundred thousand deep": _with_table(lambda table, size: "[" * 100_000 + "]" * 100_000),
    "not UTF-8": _with_table(lambda table, size: table, raw=b'{"\xff\xfe": 1}'),
    "a name with NUL": _with_table(
        lambda table, size: {f"{key}\x00": entry for key, entry in table.items() if key != "__metadata__"}
    ),
    "an empty table": _with_table(lambda table, size: {}),
}


def headers(lab: Lab, seed: int) -> Iterator[Try]:
    # One name twice with the same entry, and metadata, do no harm.
    for what, change in HEADERS.items():
        for title, words in COMMANDS.items():
            harmless = what in ("one name twice", "metadata of numbers")
            yield Try(f"{title}: {what}", partial(_try, words=words, change=change, harmless=harmless))


# -- paths -------------------------------------------------------------------------------------------------------------


def _index(target: Callable[[Path], str]) -> Change:
    """A sharded folder whose index names a file elsewhere: the shard is there, with the right tensors."""

    def change(model: Path) -> None:
        (model / "manifest.json").write_text("{}")
        sharded(model)
        index = model / "model.safetensors.index.json"
        places = json.loads(index.read_text())
        first = "model-00001-of-00003.safetensors"
        outside = model.parent / "secret.safetensors"
        (model / first).rename(outside)
        places["weight_map"] = {
            key: target(outside) if name == first else name for key, name in places["weight_map"].items()
        }
        index.write_text(json.dumps(places))

    return change


INDICES: dict[str, Change] = {
    "names ../secret.safetensors": _index(lambda outside: f"../{outside.name}"),
    "names an absolute path": _index(str),
    "names a file through ./..": _index(lambda outside: f"./x/../../{outside.name}"),
    "names /dev/zero": _index(lambda outside: "/dev/zero"),
    "names a folder": _index(lambda outside: "."),
    "names nothing": _index(lambda outside: ""),
    "names NUL": _index(lambda outside: "a\x00b"),
}


def paths(lab: Lab, seed: int) -> Iterator[Try]:
    for what, change in INDICES.items():
        for title, words in COMMANDS.items():
            yield Try(f"{title}: the index {what}", partial(_try, words=words, change=change, harmless=False))

    def device(place: Place, words: tuple[str, ...]) -> None:
        model_of(place)
        is_refused(place.vb(*words, limits={"RLIMIT_DATA": MEMORY_BYTES}))

    for name in ("/dev/full", "/dev/zero", "/dev/null", "/proc/self/mem", "/"):
        yield Try(f"--assignment {name}", partial(device, words=(*QUANTIZE, "--assignment", name)))
        yield Try(f"--prompts {name}", partial(device, words=(*GENERATE[:3], "--prompts", name, "--device", "cpu")))
        yield Try(f"--tokenizer {name}", partial(device, words=("train", "--tokenizer", name, "--out", "run")))
        yield Try(f"--config {name}", partial(device, words=("train", "--config", name, "--out", "run")))
        yield Try(f"--adapter {name}", partial(device, words=(*GENERATE, "--adapter", name)))


# -- texts -------------------------------------------------------------------------------------------------------------

YAML = {
    "os.system": "data: !!python/object/apply:os.system ['touch canary']\n",
    "subprocess": "data: !!python/object/new:subprocess.Popen [[touch, canary]]\n",
    "a module": "!!python/module:os\n",
    "a name": "data: !!python/name:os.system\n",
    "a billion laughs": "a: &a [x,x,x,x,x,x,x,x,x]\n"
    + "".join(f"{chr(98 + i)}: &{chr(98 + i)} [{','.join(['*' + chr(97 + i)] * 9)}]\n" for i in range(9)),
    "nested lists": "data: " + "[" * 5000 + "]" * 5000,
    "nested maps": "architecture: " + "{a: " * 3000 + "1" + "}" * 3000,
    "a cycle": "architecture: &a {num_layers: *a}\n",
    "a huge number": "max_steps: " + "9" * 5000,
    "a date": "max_steps: 2020-01-01\n",
    "bytes": "out: !!binary aGVsbG8=\n",
    "a set": "architecture: !!set {num_layers}\n",
    "control characters": "data: \x07\n",
    "two documents": "max_steps: 1\n---\nmax_steps: 2\n",
    "the same key twice": "max_steps: 0\nmax_steps: -1\n",
}


def yaml_files(lab: Lab, seed: int) -> Iterator[Try]:
    def read(place: Place, text: str) -> None:
        (place.folder / "run.yaml").write_text(text)
        ended = place.vb("train", "--config", "run.yaml", limits={"RLIMIT_DATA": MEMORY_BYTES})
        assert not (place.folder / CANARY).exists(), f"its code ran\n{ended}"
        is_refused(ended)

    def flag(place: Place, text: str) -> None:
        ended = place.vb("train", "--architecture", text, limits={"RLIMIT_DATA": MEMORY_BYTES})
        assert not (place.folder / CANARY).exists(), f"its code ran\n{ended}"
        is_refused(ended)

    for what, text in YAML.items():
        yield Try(what, partial(read, text=text))
        if "\x07" not in text:
            yield Try(f"--architecture: {what}", partial(flag, text=text.partition(": ")[2] or text))


def texts(lab: Lab, seed: int) -> Iterator[Try]:
    """JSON nested a hundred thousand deep, and lines without end, wherever a command reads them."""

    def data(place: Place, name: str, content: bytes) -> None:
        (place.folder / name).write_bytes(content)
        is_refused(place.vb(*place.training("--data", name), limits={"RLIMIT_DATA": MEMORY_BYTES}))

    deep = b'{"text": ' + b"[" * 100_000 + b"]" * 100_000 + b"}\n"
    for what, content in {
        "nested": deep,
        "nested conversations": b'{"messages": ' + b"[" * 100_000 + b"]" * 100_000 + b"}\n",
        "nested after a good line": b'{"text": "def"}\n' + deep,
        "a number of a million digits": b'{"text": ' + b"9" * 1_000_000 + b"}\n",
        "lone surrogate": b'{"text": "\\ud800"}\n' * 50,
        "NUL": b"\x00" * 5000,
    }.items():
        yield Try(f"jsonl: {what}", partial(data, name="data.jsonl", content=content))
    yield Try("parquet: no parquet", partial(data, name="data.parquet", content=b"PAR1" + b"\xff" * 500 + b"PAR1"))

    def nested(model: Path, name: str) -> None:
        (model / name).write_text("[" * 100_000 + "]" * 100_000)

    for name in ("config.json", "tokenizer.json", "tokenizer_config.json", "generation_config.json"):
        for title, words in {
            "generate": GENERATE,
            "streamed": STREAMED,
            "train --model": TUNE,
            "quantize": QUANTIZE,
        }.items():
            harmless = name in ("tokenizer_config.json", "generation_config.json") or (name, title) == (
                "tokenizer.json",
                "quantize",
            )
            yield Try(
                f"{title}: nested {name}",
                partial(_try, words=words, change=partial(nested, name=name), harmless=harmless),
            )


CASES = [
    Case(
        "code-in-a-folder",
        "pickles, auto_map, custom code next to or instead of weights, configuration, tokenizer",
        "no code of the folder runs; harmless or exit 2 and one line",
        code,
        3,
    ),
    Case(
        "chat-templates",
        "templates that escape, read files, recurse, or ask for 10^10 characters, under generate --chat and train",
        "no code runs, nothing hangs or takes the machine's memory; exit 2 and one line",
        templates,
        2,
    ),
    Case(
        "safetensors-tables",
        "tables with huge, overlapping, negative, missing or foreign entries",
        "exit 2 and one line",
        headers,
        3,
    ),
    Case(
        "paths-out-of-a-folder",
        "indices that name ../x, absolute paths, devices; devices as files of flags",
        "exit 2 and one line",
        paths,
        2,
    ),
    Case(
        "yaml-tags",
        "YAML with Python's tags, a billion laughs, nesting, cycles",
        "no code runs; exit 2 and one line",
        yaml_files,
        1,
    ),
    Case(
        "nested-texts",
        "JSON nested 100,000 deep, numbers of a million digits, NUL, in data and in a folder's files",
        "exit 2 and one line",
        texts,
        2,
    ),
]
