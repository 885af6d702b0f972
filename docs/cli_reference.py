"""Writes docs/cli.md, every flag of every command, from the parsers of vblackwell/cli.py: `python
docs/cli_reference.py`.

tests/docs/test_cli_reference.py fails when this script would change the page.
"""

from __future__ import annotations

import argparse
from collections.abc import Iterator
from pathlib import Path

from vblackwell.cli import COMMANDS, make_parser

PAGE = Path(__file__).with_name("cli.md")
INTRODUCTION = """# The command line

<!-- written by docs/cli_reference.py -->

`vb COMMAND --help` prints a command's part of this page. A flag without a value is a switch, and `--no-FLAG` turns it
off. Sizes are written with a unit, e.g. `8GiB`. The defaults of `vb train` hold where the preset or `--model` has none.

What is refused is one line on standard error and exit code 2; `--debug` shows where it came from. Exit code 1 is an
internal error, 130 a command that was interrupted, 143 a run that SIGTERM stopped.
"""


def page() -> str:
    """The whole page."""
    return INTRODUCTION + "".join(f"\n{section(name)}" for name in COMMANDS)


def section(name: str) -> str:
    """Command ``name``: its summary and a table of its flags."""
    lines = [f"## vb {name}", "", COMMANDS[name].summary, "", "| flag | default | |", "|---|---|---|"]
    lines += [row(action) for action in actions(name)]
    return "\n".join(lines) + "\n"


def actions(name: str) -> Iterator[argparse.Action]:
    """What the parser of command ``name`` takes, in its order, without --help and what that does not show."""
    shown = (action for action in make_parser(name)._actions if action.help != argparse.SUPPRESS)
    return (action for action in shown if action.dest != "help")


def row(action: argparse.Action) -> str:
    """A flag's line of the table."""
    is_switch = isinstance(action.default, bool)
    flags = [flag for flag in action.option_strings if not flag.startswith("--no-")] or [action.dest.upper()]
    default = f"`{action.default}`" if action.default is not None and not is_switch else ""
    if is_switch:
        default = "on" if action.default else "off"
    elif action.required and action.option_strings:
        default = "required"
    text = (action.help or "").replace("|", "\\|")
    return f"| {', '.join(f'`{flag}`' for flag in flags)} | {default} | {text} |"


if __name__ == "__main__":
    PAGE.write_text(page(), encoding="utf-8")
