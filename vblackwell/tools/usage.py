"""What ``vb COMMAND --help`` prints: flags in groups with titles, each with its default, in the terminal's width."""

import argparse
import re
import shutil
import textwrap
from collections.abc import Collection, Mapping, Sequence

MIN_COLUMNS, MAX_COLUMNS = 60, 120
COLUMN = 28  # where a flag's text begins
_SAID = re.compile(r"\b[Dd]efault\b|[Uu]nless given")


def usage_lines(
    command: str,
    summary: str,
    actions: Sequence[argparse.Action],
    groups: Sequence[tuple[str, str]],
    shown: Collection[str] = (),
    defaults: Mapping[str, str] | None = None,
) -> list[str]:
    """The page of ``command``.

    Args:
        actions: its flags in order. groups: a title and the name (``dest``) of the flag that a group begins with.
        shown: names of the flags to show, the others being for ``--help-all``; empty for all of them.
        defaults: in words, by name, where a flag's own is not all of it.
    """
    columns = max(MIN_COLUMNS, min(MAX_COLUMNS, shutil.get_terminal_size().columns))
    actions = [each for each in actions if each.help != argparse.SUPPRESS and each.dest != "help"]
    places = "".join(f" {_place(each)}" for each in actions if not each.option_strings)
    lines = [f"usage: {command}{places} [--flag value ...]", "", *textwrap.wrap(summary, columns)]
    titles, title, left_out = {name: title for title, name in groups}, "", 0
    said = None
    for action in actions:
        title = titles.get(action.dest, title)
        if shown and action.dest not in shown:
            left_out += 1
            continue
        if title != said:
            lines += ["", *([f"{title}:"] if title else [])]
            said = title
        lines += _entry(action, (defaults or {}).get(action.dest), columns)
    more = f"{command} --help-all shows the other {left_out} flags."
    return [*lines, "", more] if left_out else lines


def _place(action: argparse.Action) -> str:
    name = action.metavar if isinstance(action.metavar, str) else action.dest.upper()
    return f"[{name}]" if action.nargs == "?" else f"{name} ..." if action.nargs == "+" else name


def _entry(action: argparse.Action, default: str | None, columns: int) -> list[str]:
    """A flag, its values and its default."""
    switch, value = any(each.startswith("--no-") for each in action.option_strings), action.metavar or "VALUE"
    # Of a switch what changes something; both where neither is the default.
    off = action.default if switch else None
    flags = [each for each in action.option_strings if off is None or each.startswith("--no-") == off]
    name = ", ".join(flags) + ("" if switch else f" {value}") if flags else _place(action)
    text = str(action.help or "")
    if default is None and action.default is not None:
        default = ("on" if action.default else "off") if switch else str(action.default)
    if action.required and action.option_strings:
        text = f"{text.removesuffix('.')}; required."
    if default is not None and not _SAID.search(text):
        text = f"{text.removesuffix('.')}; default: {default}."
    wrapped = textwrap.wrap(text, columns - COLUMN, break_long_words=False, break_on_hyphens=False)
    head = f"  {name}"
    if len(head) > COLUMN - 2:
        return [head, *(" " * COLUMN + line for line in wrapped)]
    return [f"{head:<{COLUMN}}{wrapped[0] if wrapped else ''}", *(" " * COLUMN + line for line in wrapped[1:])]
