"""The README's commands print what the README says they print, but for times and losses;
its Python runs as it stands.
"""

from __future__ import annotations

import re
import shlex
from pathlib import Path

import torch

README = (Path(__file__).parents[2] / "README.md").read_text(encoding="utf-8")


def shown() -> dict[str, tuple[list[str], list[str]]]:
    """Of each command with an output: its words, and the lines that are shown of what it prints."""
    found = {}
    for block in re.findall(r"^```\n\$ vb (.*?)\n```", README, re.DOTALL | re.MULTILINE):
        command, *lines = block.splitlines()
        found[command.split()[0]] = shlex.split(command), [line for line in lines if line.strip() and line != "..."]
    return found


def in_order(lines: list[str], printed: list[str]) -> None:
    """Each of ``lines`` is printed, after the one before."""
    rest = iter(printed)
    for line in lines:
        assert any(line == other for other in rest), f"not printed, or not there: {line!r} of {printed}"


def masked(line: str) -> str:
    """Without what differs from run to run: numbers, their units, waits where there were any, and widths of columns."""
    line = re.sub(r"^step \d+", "step #", line)
    line = re.sub(r"  waited \S+ s for it", "", line)
    line = re.sub(r"\d[\d.,:]*%?( (?:ms|s|B|[KMG]iB))?(?![\w/])", "#", line)
    return " ".join(line.split())


def test_three_commands_are_shown():
    assert list(shown()) == ["estimate", "train", "generate"]


def test_estimate(place):
    words, lines = shown()["estimate"]
    in_order(lines, [line for line in place.vb(*words).stdout.splitlines() if line.strip()])


def test_train_and_generate(place):
    """A step on a small corpus instead of forty on the standard library; which bytes lie where is the same."""
    words, lines = shown()["train"]
    short = ("--max-steps", "1", "--eval-sequences", "4", "--sample-tokens", "2", "--data", str(place.corpus))
    output = place.vb(*words, *short, "--device", "cpu")
    printed = [masked(line) for line in output.stdout.splitlines() + output.stderr.splitlines()]
    for line in lines:
        assert masked(line) in printed, f"{masked(line)!r} is not in {printed}"
    words, lines = shown()["generate"]
    assert place.vb(*words, "--max-new-tokens", "4").stdout.startswith(lines[0])


def test_the_python_trains():
    (code,) = re.findall(r"^```python\n(.*?)^```", README, re.DOTALL | re.MULTILINE)
    names = {"model": torch.nn.Sequential(torch.nn.Linear(8, 8), torch.nn.ReLU(), torch.nn.Linear(8, 1))}
    assert "8GiB" in code
    exec(code.replace("8GiB", "64MiB"), names)
    model, optimizer, stack = (names[name] for name in ("model", "optimizer", "stack"))
    before = [parameter.detach().clone() for parameter in model.parameters()]
    model(torch.ones(4, 8)).sum().backward()
    optimizer.step()
    optimizer.zero_grad()
    assert not all(torch.equal(old, new) for old, new in zip(before, model.parameters(), strict=True))
    stack.close()
