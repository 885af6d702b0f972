"""Bytes that changed, files that are cut short or gone:
in checkpoints, settings, caches, the spill file, and models' folders.
"""

from __future__ import annotations

import json
import os
import random
import re
import shutil
from collections.abc import Callable, Iterator
from functools import partial
from pathlib import Path

from tests.faults.case import Case, Try
from tests.faults.lab import (
    Lab,
    Place,
    ends_as_undisturbed,
    has_fired,
    is_done_or_refused,
    is_refused,
)
from tests.faults.shim import Rule

NEWEST, OLDER = "checkpoints/step-00000004", "checkpoints/step-00000002"
Damage = Callable[[Path, random.Random], None]


def flip_bit(path: Path, draw: random.Random) -> None:
    data = bytearray(path.read_bytes())
    data[draw.randrange(len(data))] ^= 1 << draw.randrange(8)
    path.write_bytes(data)


def cut(path: Path, draw: random.Random) -> None:
    os.truncate(path, draw.randrange(path.stat().st_size))


def empty(path: Path, draw: random.Random) -> None:
    os.truncate(path, 0)


def remove(path: Path, draw: random.Random) -> None:
    path.unlink()


def into_folder(path: Path, draw: random.Random) -> None:
    path.unlink()
    path.mkdir()


DAMAGES: dict[str, Damage] = {
    "flipped bit": flip_bit, "cut": cut, "emptied": empty, "missing": remove, "a folder in its place": into_folder,
}  # fmt: skip


def _files(folder: Path) -> list[str]:
    return sorted(path.relative_to(folder).as_posix() for path in folder.rglob("*") if path.is_file())


# -- checkpoints -------------------------------------------------------------------------------------------------------


def newest_checkpoint(lab: Lab, seed: int) -> Iterator[Try]:
    """The run goes on from the checkpoint before."""

    def damaged(place: Place, name: str, damage: Damage, number: int) -> None:
        place.copy_run(lab_run)
        damage(place.run / NEWEST / name, random.Random(f"{seed} {name} {number}"))
        ends_as_undisturbed(place)

    lab_run = lab.stopped
    for name in _files(lab_run / NEWEST):
        for what, damage in DAMAGES.items():
            for number in range(4 if damage is flip_bit else 1):
                yield Try(f"{name} {what} {number}", partial(damaged, name=name, damage=damage, number=number))


def all_checkpoints(lab: Lab, seed: int) -> Iterator[Try]:
    """With none intact the run is refused, and nothing is touched."""

    def damaged(place: Place, name: str, damage: Damage) -> None:
        place.copy_run(lab_run)
        for folder in (OLDER, NEWEST):
            damage(place.run / folder / name, random.Random(f"{seed} {name}"))
        before = {path: path.read_bytes() for path in place.run.rglob("*") if path.is_file() and path.name != ".lock"}
        is_refused(place.vb(*place.training()))
        after = {path: path.read_bytes() for path in place.run.rglob("*") if path.is_file() and path.name != ".lock"}
        assert after == before, "a refused resume changed something"

    lab_run = lab.stopped
    for name in _files(lab_run / NEWEST):
        for what, damage in DAMAGES.items():
            if name != "manifest.json" or damage not in (remove, into_folder):  # then they are no checkpoints at all
                yield Try(f"{name} {what}", partial(damaged, name=name, damage=damage))


def next_to_checkpoints(lab: Lab, seed: int) -> Iterator[Try]:
    """What else lies in a run's folder: the resumed run has the same bits, or is refused."""

    def damaged(place: Place, name: str, damage: Damage, number: int) -> None:
        place.copy_run(lab_run)
        damage(place.run / name, random.Random(f"{seed} {name} {number}"))
        ended = place.vb("train", "--resume", "--out", "run")  # all settings from the folder
        is_done_or_refused(ended)
        if ended.code == 0:
            same_weights(place)

    def same_weights(place: Place) -> None:
        assert place.numbers().weights == lab.undisturbed[0].weights, "other weights, and nothing was said"

    def digit(place: Place, position: int) -> None:
        place.copy_run(lab_run)
        path = place.run / "settings.json"
        text = path.read_text()
        other = str((int(text[position]) + 3) % 10)
        path.write_text(text[:position] + other + text[position + 1 :])
        ended = place.vb("train", "--resume", "--out", "run", limits={"RLIMIT_DATA": 6 << 30})
        is_done_or_refused(ended)
        if ended.code == 0:
            same_weights(place)

    def replaced(place: Place, name: str, text: str) -> None:
        place.copy_run(lab_run)
        (place.run / name).write_text(text)
        ended = place.vb("train", "--resume", "--out", "run")
        is_done_or_refused(ended)
        if ended.code == 0:
            same_weights(place)

    lab_run = lab.stopped
    for name in ("settings.json", "metrics.jsonl"):
        for what, damage in DAMAGES.items():
            for number in range(12 if damage is flip_bit else 1):
                if not (
                    name == "settings.json" and damage in (remove, empty)
                ):  # then the flags alone count: no run of ours
                    yield Try(f"{name} {what} {number}", partial(damaged, name=name, damage=damage, number=number))
    text = (lab_run / "settings.json").read_text()
    numbers = [match.start() for match in re.finditer(r"(?<=[ .\d])\d(?=[\d.,e\n])", text)]
    for position in numbers:
        line = text[: position + 1].rpartition("\n")[2].strip()
        yield Try(f"a digit of {line}", partial(digit, position=position))
    others = {
        "a list": "[1, 2]",
        "a number": "3",
        "nested": "[" * 3000 + "]" * 3000,
        "other keys": '{"step": "four"}\n',
    }
    for what, content in others.items():
        for name in ("settings.json", "metrics.jsonl"):
            yield Try(f"{name} is {what}", partial(replaced, name=name, text=content))


def final_as_file(lab: Lab, seed: int) -> Iterator[Try]:
    def in_the_way(place: Place, name: str) -> None:
        place.copy_run(lab.stopped)
        path = place.run / name
        if path.is_dir():
            shutil.rmtree(path)
        path.write_text("mine")
        is_refused(place.vb(*place.training()))
        assert path.read_text() == "mine"

    for name in ("final", "checkpoints"):
        yield Try(name, partial(in_the_way, name=name))


# -- caches ------------------------------------------------------------------------------------------------------------


def caches(lab: Lab, seed: int) -> Iterator[Try]:
    """What is damaged is built again: the run does not notice."""

    def damaged(place: Place, name: str, damage: Damage, number: int) -> None:
        cache = {"XDG_CACHE_HOME": str(place.folder / "cache")}
        first = place.vb(*place.training("--max-steps", "1"), **cache)
        assert first.code == 0, first
        shutil.rmtree(place.run)
        (path,) = (place.folder / "cache").rglob(name)
        damage(path, random.Random(f"{seed} {name} {number}"))
        ends_as_undisturbed(place, **cache)

    for name in ("tokenizer.json", "tokens.bin"):
        for what, damage in DAMAGES.items():
            for number in range(8 if damage is flip_bit else 1):
                yield Try(f"{name} {what} {number}", partial(damaged, name=name, damage=damage, number=number))


# -- the spill file ----------------------------------------------------------------------------------------------------


def spill_reads(lab: Lab, seed: int) -> Iterator[Try]:
    """A disk that gives back other bits."""

    def flipped(place: Place, number: int) -> None:
        rule = Rule("read", " (deleted)", number, "flip")
        ended = place.vb(*place.training(), rules=[rule])
        has_fired(ended, [rule])
        is_refused(ended)
        ends_as_undisturbed(place)

    total = sum(call.kind == "read" and "(deleted)" in call.path for call in lab.undisturbed[1])
    for number in sorted(random.Random(f"{seed} spill").sample(range(2, total), 16)):
        yield Try(f"read {number} of {total}", partial(flipped, number=number))


def spill_bytes(lab: Lab, seed: int) -> Iterator[Try]:
    """A bit flipped in the unnamed file itself, through /proc/PID/fd,
    while the process is stopped between two steps.
    """

    def flipped(place: Place, number: int) -> None:
        child = place.start(*place.training(), rules=[Rule("write", "metrics.jsonl", 2, "pause")])
        place.wait_until_paused(child)
        descriptors = Path(f"/proc/{child.pid}/fd")
        (spill,) = {
            path.resolve(): path for path in descriptors.iterdir() if os.readlink(path).endswith(" (deleted)")
        }.values()
        with spill.open("r+b", buffering=0) as file:
            size = os.fstat(file.fileno()).st_size
            draw = random.Random(f"{seed} {number}")
            for _ in range(40):  # much of the file is kept free: some of these are bytes that are in use
                offset = draw.randrange(min(size, 800 << 10))
                byte = os.pread(file.fileno(), 1, offset)[0]
                os.pwrite(file.fileno(), bytes([byte ^ 1 << draw.randrange(8)]), offset)
        place.go_on(child)
        is_refused(place.end(child))
        ends_as_undisturbed(place)

    for number in range(8):
        yield Try(f"bits {number}", partial(flipped, number=number))


# -- models' folders ---------------------------------------------------------------------------------------------------

GENERATE = ("generate", "--model", "model", "--prompt", "def", "--max-new-tokens", "2", "--device", "cpu")
STREAMED = (*GENERATE, "--fast-memory", "64KiB", "--host-memory", "1MiB")
TUNE = (
    *("train", "--model", "model", "--max-steps", "1", "--sample-tokens", "0", "--eval-sequences", "4"),
    *("--seq-length", "32", "--batch-size", "2", "--no-tensorboard", "--device", "cpu", "--out", "tuned"),
)
QUANTIZE = ("quantize", "--model", "model", "--out", "packed", "--scale-search", "max", "--device", "cpu")
COMMANDS = {"generate": GENERATE, "generate, streamed": STREAMED, "train --model": TUNE, "quantize": QUANTIZE}


def sharded(folder: Path) -> None:
    """Split ``folder``'s weights into three shards with an index, as the hub has them: no manifest."""
    from safetensors.torch import load_file, save_file

    single = folder / "model.safetensors"
    weights = load_file(single)
    places = {}
    for number in range(3):
        name = f"model-{number + 1:05d}-of-00003.safetensors"
        part = {key: weights[key] for key in sorted(weights)[number::3]}
        save_file(part, folder / name, {"format": "pt"})
        places |= dict.fromkeys(part, name)
    single.unlink()
    (folder / "manifest.json").unlink()
    (folder / "model.safetensors.index.json").write_text(json.dumps({"metadata": {}, "weight_map": places}))


def model_of(place: Place) -> Path:
    """A copy of a trained folder, under the name that the commands use."""
    model = place.folder / "model"
    shutil.copytree(place.lab.finished / "final", model)
    return model


def our_folders(lab: Lab, seed: int) -> Iterator[Try]:
    """A folder that we wrote has hashes: any damage is named."""

    def damaged(place: Place, words: tuple[str, ...], name: str, damage: Damage) -> None:
        damage(model_of(place) / name, random.Random(f"{seed} {name}"))
        is_refused(place.vb(*words, *_data(place, words)))
        assert not (place.folder / "packed").exists() and not (place.folder / "tuned").exists()

    for title, words in COMMANDS.items():
        for name in ("model.safetensors", "config.json", "tokenizer.json"):
            for what, damage in DAMAGES.items():
                yield Try(f"{title}: {name} {what}", partial(damaged, words=words, name=name, damage=damage))


def foreign_folders(lab: Lab, seed: int) -> Iterator[Try]:
    """A shard of somebody else's folder that is cut short, gone, or has a table that is damaged."""

    def damaged(place: Place, words: tuple[str, ...], name: str, damage: Damage) -> None:
        model = model_of(place)
        sharded(model)
        damage(model / name, random.Random(f"{seed} {name}"))
        is_refused(place.vb(*words, *_data(place, words)))
        assert not (place.folder / "packed").exists() and not (place.folder / "tuned").exists()

    def one_length(path: Path, draw: random.Random) -> None:
        with path.open("r+b") as file:
            file.write(bytes([255]))

    for title, words in COMMANDS.items():
        for name in ("model-00001-of-00003.safetensors", "model-00003-of-00003.safetensors"):
            for what, damage in {
                "cut": cut,
                "emptied": empty,
                "missing": remove,
                "a table of another length": one_length,
            }.items():
                yield Try(f"{title}: {name} {what}", partial(damaged, words=words, name=name, damage=damage))


def _data(place: Place, words: tuple[str, ...]) -> tuple[str, ...]:
    return ("--data", str(place.lab.corpus)) if words[0] == "train" else ()


SAME = "exit 0, and the same bits as undisturbed"
CASES = [
    Case(
        "damaged-newest-checkpoint",
        "each file of the newest checkpoint: a flipped bit, cut, emptied, missing, a folder in its place",
        "the run goes on from the one before: the same bits as undisturbed",
        newest_checkpoint,
        1,
    ),
    Case(
        "damaged-checkpoints",
        "the same file of all checkpoints",
        "exit 2 and one line; nothing is changed",
        all_checkpoints,
        1,
    ),
    Case(
        "damaged-settings",
        "settings.json and metrics.jsonl: flipped bits, each digit, cut, other contents; resumed with --out alone",
        "the same weights, or exit 2 and one line",
        next_to_checkpoints,
        2,
    ),
    Case(
        "file-in-the-way",
        "a file where final/ and checkpoints/ belong",
        "exit 2 and one line; the file is untouched",
        final_as_file,
        1,
    ),
    Case(
        "damaged-cache",
        "each file of the caches: flipped bits, cut, emptied, missing",
        f"built again: {SAME}",
        caches,
        1,
    ),
    Case(
        "flip-on-spill-read",
        "a read of the spill file gives back one other bit",
        "exit 2 and one line; resumed: the same bits as undisturbed",
        spill_reads,
        1,
    ),
    Case(
        "flip-in-spill-file",
        "bits flipped in the unnamed file that /proc/PID/fd opens, between two steps",
        "exit 2 and one line; resumed: the same bits as undisturbed",
        spill_bytes,
        1,
    ),
    Case(
        "damaged-model",
        "files of a model that this package wrote, under generate, generate in a stack, train --model, quantize",
        "exit 2 and one line; nothing is written",
        our_folders,
        2,
    ),
    Case(
        "damaged-shard",
        "a shard of a foreign folder cut, emptied, missing, with a damaged table, under the same commands",
        "exit 2 and one line; nothing is written",
        foreign_folders,
        2,
    ),
]
