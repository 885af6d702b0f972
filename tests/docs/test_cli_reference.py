"""docs/cli.md has every flag of every command, as the parsers have them now."""

from __future__ import annotations

import argparse
import importlib.util
from pathlib import Path
from types import ModuleType

import pytest

from vblackwell.cli import COMMANDS, make_parser

DOCS = Path(__file__).parents[2] / "docs"


@pytest.fixture(scope="module")
def script() -> ModuleType:
    spec = importlib.util.spec_from_file_location("cli_reference", DOCS / "cli_reference.py")
    assert spec is not None and spec.loader is not None
    module = importlib.util.module_from_spec(spec)
    spec.loader.exec_module(module)
    return module


def test_the_page_is_current(script):
    assert script.PAGE.read_text(encoding="utf-8") == script.page(), "run `python docs/cli_reference.py`"


def test_every_flag_is_on_the_page(script):
    page = script.page()
    for name in COMMANDS:
        section = page.split(f"## vb {name}\n")[1].split("\n## ")[0]
        for action in make_parser(name)._actions:
            hidden = action.help == argparse.SUPPRESS
            for flag in () if hidden else action.option_strings:
                assert f"`{flag}`" in section or flag.startswith("--no-") or flag in ("-h", "--help"), (name, flag)
