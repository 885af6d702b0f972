"""The worked examples of docs/contributing.md run as they stand."""

from __future__ import annotations

import re
from pathlib import Path
from typing import Any

import torch

from vblackwell import cli

PAGE = (Path(__file__).parents[2] / "docs/contributing.md").read_text(encoding="utf-8")


def example(title: str) -> dict[str, Any]:
    """What the Python of the section ``title`` defines."""
    section = PAGE.split(f"## {title}\n")[1].split("\n## ")[0]
    (code,) = re.findall(r"^```python\n(.*?)^```", section, re.DOTALL | re.MULTILINE)
    names: dict[str, Any] = {"__name__": "example"}
    exec(compile(code, title, "exec"), names)
    return names


def test_a_level():
    level = example("Add a level")["SharedLevel"](1 << 20)
    source = torch.arange(1000)
    extent = level.allocate(source.nbytes)
    level.write(extent, source).wait()
    out = torch.empty_like(source)
    level.read(extent, out).wait()
    assert torch.equal(out, source) and level.view(extent).is_shared()
    assert level.used_bytes == 8000
    level.free(extent)
    assert level.used_bytes == 0 and extent.handle == []
    level.close()


def test_a_kernel():
    names = example("Add a kernel")
    assert torch.equal(names["result"], torch.full((1, 4), 2.0))
    (reason,) = names["TABLE"][0].refusals(names["here"])
    assert "12.0" in reason and "0.0" in reason


def test_an_architecture(capsys):
    example("Add an architecture")
    lines = [line.split() for line in capsys.readouterr().out.splitlines()]
    assert ["norm", "*", "fused"] in lines
    assert any(words[:3] == ["linear", "*", "FusedFP4Linear,"] for words in lines)


def test_a_command(monkeypatch, capsys):
    monkeypatch.setattr(cli, "COMMANDS", dict(cli.COMMANDS))
    example("Add a command")
    assert cli.main(["count", "--words", "one two three"]) == 0
    assert capsys.readouterr().out == "3\n"
    assert cli.main(["count", "--wrds", "one"]) == 2
