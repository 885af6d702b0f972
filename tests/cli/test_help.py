"""The pages of --help and --help-all, and the words that people type in other ways."""

from __future__ import annotations

import re

import pytest

from vblackwell.cli import COMMANDS, main, make_parser
from vblackwell.errors import ConfigurationError
from vblackwell.train.config import RECIPES, TrainConfig, read_yaml, resolve
from vblackwell.units import MiB, parse_bytes

LONG = [name for name, command in COMMANDS.items() if command.shown]


def page_of(capsys, monkeypatch, *words: str, columns: int = 80) -> list[str]:
    monkeypatch.setenv("COLUMNS", str(columns))
    assert main([*words]) == 0
    return capsys.readouterr().out.splitlines()


def entries(lines: list[str]) -> dict[str, str]:
    """What a page says of each flag, by the flags as they are printed."""
    found, name = dict[str, str](), ""
    for line in lines:
        if line.startswith("  --"):
            name, _, text = line.strip().partition("  ")
            found[name] = text
        elif name and line.startswith("    "):
            found[name] += f" {line.strip()}"
        else:
            name = ""
    return {name: text.strip() for name, text in found.items()}


def flags_in(lines: list[str]) -> set[str]:
    return set(re.findall(r"--[a-z][\w-]*", " ".join(entries(lines))))


def flags_of(name: str) -> dict[str, list[str]]:
    """By field: the flags that the pages show."""
    found = {}
    for action in make_parser(name)._actions:
        if action.option_strings and action.help != "==SUPPRESS==" and action.dest != "help":
            switch = isinstance(action.default, bool)
            found[action.dest] = [
                each for each in action.option_strings if not switch or each.startswith("--no-") == action.default
            ]
    return found


@pytest.mark.parametrize("name", COMMANDS)
@pytest.mark.parametrize("columns", [80, 120])
def test_pages_fit_and_all_has_all(name, columns, capsys, monkeypatch):
    everything = page_of(capsys, monkeypatch, name, "--help-all", columns=columns)
    short = page_of(capsys, monkeypatch, name, "--help", columns=columns)
    assert max(map(len, everything + short)) <= columns
    assert name != "train" or max(map(len, everything)) > columns - 5  # text as wide as there is room
    flags = flags_of(name)
    assert flags_in(everything) == {flag for each in flags.values() for flag in each}
    shown = COMMANDS[name].shown
    assert flags_in(short) == {flag for field, each in flags.items() if not shown or field in shown for flag in each}
    assert short == page_of(capsys, monkeypatch, name, "-h", columns=columns)


@pytest.mark.parametrize("name", LONG)
def test_a_long_page_shows_what_matters_in_groups(name, capsys, monkeypatch):
    lines = page_of(capsys, monkeypatch, name, "--help")
    parser, command = make_parser(name), COMMANDS[name]
    fields = [action.dest for action in parser._actions]
    assert set(command.shown) <= set(fields) and {field for _, field in command.groups} <= set(fields)
    assert 9 <= len(command.shown) <= 14
    left_out = len(flags_of(name)) + ("model" in fields and "--model" not in flags_of(name).get("model", ()))
    titles = [title for title, _ in command.groups]
    said = [line[:-1] for line in lines if line.endswith(":") and not line.startswith(" ")]
    assert len(said) > 2 and said == [title for title in titles if title in said]
    last = re.fullmatch(rf"vb {name} --help-all shows the other (\d+) flags.", lines[-1])
    assert last is not None and left_out - int(last[1]) in (len(command.shown), len(command.shown) - 1)


def test_commands_of_many_flags_have_a_short_page():
    for name in COMMANDS:
        assert (len(flags_of(name)) > 15) == (name in LONG), name


def test_train_says_its_defaults(capsys, monkeypatch):
    said = entries(page_of(capsys, monkeypatch, "train", "--help"))
    assert all(re.search("[Dd]efault|unless given", text) for text in said.values()), said
    assert said["--batch-size VALUE"].endswith("default: the preset's, else 8.")
    assert said["--max-steps VALUE"] == "Optimizer steps in all; default: the preset's."
    everything = entries(page_of(capsys, monkeypatch, "train", "--help-all"))
    assert everything["--no-tensorboard"].endswith("; default: on.") and everything["--profile"].endswith("off.")
    assert everything["--beta1 VALUE"].endswith("; default: 0.9.")


def given(*words: str) -> TrainConfig:
    from vblackwell.cli import _parse

    return resolve(_parse(make_parser("train"), list(words)))


def test_a_rate_by_its_usual_name():
    assert given("--lr", "3e-4") == given("--learning-rate", "3e-4") and given("--lr=0.5").learning_rate == 0.5


def test_what_is_trained_without_a_flag(tmp_path, monkeypatch):
    monkeypatch.chdir(tmp_path)
    for preset in RECIPES:
        assert given(preset) == given("--config", preset)
    (tmp_path / "folder").mkdir()
    (tmp_path / "my.yaml").write_text("max_steps: 3\nhost_memory: 8GiB")
    (tmp_path / "small.yaml").write_text("preset: small")
    assert given("small.yaml") == given("--config", "small")
    assert given("folder") == given("--model", "folder") and given("owner/name") == given("--model", "owner/name")
    assert given("my.yaml", "--lr", "1") == given("--config", "my.yaml", "--lr", "1")
    assert given("folder", "--config", "my.yaml") == given("--model", "folder", "--config", "my.yaml")
    for words, said in (
        (("tiny", "--config", "small"), "vb train tiny means --config tiny, and 'small' is given too: drop one"),
        (("folder", "--model", "other"), "vb train folder means --model folder, and 'other' is given too"),
        (("--config", "tiny", "--model", "folder"), "--config tiny is a preset's .*, --model folder .*: drop one"),
        (("folder", "--config", "tiny"), "--config tiny is a preset's .*, --model folder .*: drop one"),
        (("tiny", "--model", "folder"), "--config tiny is a preset's .*, --model folder .*: drop one"),
        (("folder", "--config", "small.yaml"), "small.yaml: 'preset' is random weights .* a model is given: drop one"),
        (("tinny",), r"'tinny' is neither a preset \(tiny, .*\) nor a folder; did you mean 'tiny'\?; to train"),
        (("llama-3-8b",), "to train a published model, give the folder or hub id of its weights"),
    ):
        with pytest.raises(ConfigurationError, match=said):
            given(*words)


@pytest.mark.parametrize(
    "words",
    [
        ("train", "--fast-memory"), ("train", "--host-memory"), ("train", "--disk-memory"),
        ("generate", "--prompt", "a", "--model", "gone", "--device", "cpu", "--fast-memory"),
        ("generate", "--prompt", "a", "--model", "gone", "--device", "cpu", "--host-memory"),
        ("generate", "--prompt", "a", "--model", "gone", "--device", "cpu", "--disk-memory"),
        ("estimate", "tiny", "--gpu-memory"), ("estimate", "gpt2", "--gpu", "4070", "--ram"),
        ("estimate", "gpt2", "--gpu", "4070", "--disk"), ("estimate", "tiny", "--disk-memory"),
    ],
    ids=" ".join,
)  # fmt: skip
def test_a_size_without_a_unit_is_asked_for_one(words, capsys):
    assert main([*words, "4"]) == 2
    said = capsys.readouterr().err
    assert f"{words[-1]} 4 means 4 bytes, for it has no unit: write 4GiB, 4MiB or, if you mean that, 4B" in said


def test_what_is_a_size_of_bytes(tmp_path):
    assert parse_bytes("8000000000") == 8_000_000_000 and parse_bytes("0") == 0 and parse_bytes("4B") == 4
    assert parse_bytes(str(MiB)) == MiB and parse_bytes(4) == 4  # of a program, which knows what it says
    for text in ("4", "0.5", str(MiB - 1)):
        with pytest.raises(ConfigurationError, match="has no unit"):
            parse_bytes(text)
    (tmp_path / "my.yaml").write_text("fast_memory: 4")
    with pytest.raises(ConfigurationError, match="--fast-memory 4 means 4 bytes"):
        resolve({"config": str(tmp_path / "my.yaml")})
    (tmp_path / "my.yaml").write_text("fast_memory: 8000000000")
    assert read_yaml(tmp_path / "my.yaml")["fast_memory"] == "8000000000"
    assert resolve({"config": str(tmp_path / "my.yaml")}).fast_memory == 8_000_000_000
