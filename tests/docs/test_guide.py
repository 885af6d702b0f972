"""Every command that the README and the pages of docs name is one that the command line takes, flag by flag."""

from __future__ import annotations

import re
import shlex
from pathlib import Path
from typing import Any

import pytest

from vblackwell import cli
from vblackwell.train.config import resolve

ROOT = Path(__file__).parents[2]
GUIDE = ROOT / "docs" / "guide.md"
PAGES = [ROOT / "README.md", *(path for path in sorted((ROOT / "docs").glob("*.md")) if path.name != "cli.md")]
COMMAND = re.compile(r"`(vb [^`]+)`|^(?:\$ )?(vb .+)$", re.MULTILINE)


class Parsed(Exception):
    """What a command line means; raised instead of running it."""


def commands() -> list[str]:
    """Whole commands: names alone, such as `vb bench MODEL`, say which command is meant and are no lines to type."""
    found = [first or second for page in PAGES for first, second in COMMAND.findall(page.read_text(encoding="utf-8"))]
    return sorted(
        {" ".join(command.split()) for command in found if re.match(r"vb \w.* --", " ".join(command.split()))}
    )


def parsed(monkeypatch: pytest.MonkeyPatch, command: str) -> dict[str, Any]:
    parse = cli._parse

    def stop(parser: Any, words: list[str]) -> Any:
        raise Parsed(parse(parser, words))

    monkeypatch.setattr(cli, "_parse", stop)
    with pytest.raises(Parsed) as found:
        cli._dispatch(shlex.split(command, comments=True)[1:])
    return found.value.args[0]


def test_there_is_a_command_for_every_branch():
    sections = GUIDE.read_text(encoding="utf-8").split("\n## ")[1:]
    assert [section.partition("?")[0] for section in sections[:4]] == [
        "What does my machine do at all",
        "Short of memory",
        "Long sequences",
        "After speed",
    ]
    for section in sections[:4]:
        for step in re.split(r"\n\d\. ", section)[1:]:
            assert "`vb " in step, step


@pytest.mark.parametrize("command", commands())
def test_the_command_line_takes_it(monkeypatch, command, tmp_path):
    given = parsed(monkeypatch, command)
    if command.startswith("vb train"):
        monkeypatch.chdir(tmp_path)
        Path("FOLDER").mkdir()
        if "resume" in given:  # the run goes on that is there
            Path(given["out"], "checkpoints").mkdir(parents=True)
        assert resolve(given) is not None  # values too


def test_a_flag_that_is_gone_would_be_seen(monkeypatch):
    with pytest.raises(cli.ConfigurationError, match="no flag --weight-memory"):
        cli._dispatch(["train", "--weight-memory", "4GiB"])
