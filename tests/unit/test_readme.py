"""The README tells the truth where a machine can check it."""

import importlib.util
import re
from pathlib import Path

ROOT = Path(__file__).parent.parent.parent
README = (ROOT / "README.md").read_text(encoding="utf-8")


def test_the_file_tree_is_the_tree():
    spec = importlib.util.spec_from_file_location("file_tree", ROOT / "docs/file_tree.py")
    assert spec is not None and spec.loader is not None
    script = importlib.util.module_from_spec(spec)
    spec.loader.exec_module(script)
    assert script.with_tree(README) == README, "run `python docs/file_tree.py`"


def test_paths_and_commands_exist():
    for path in re.findall(r"`((?:tests|docs|examples|benchmarks)/[\w./]*)`|\]\((docs/[\w.]+)\)", README):
        name = path[0] or path[1]
        assert (ROOT / name).exists(), name
    from vblackwell.cli import COMMANDS

    assert set(re.findall(r"^vb (\w+)", README, re.MULTILINE)) <= set(COMMANDS)
    targets = set(re.findall(r"^([\w-]+):", (ROOT / "Makefile").read_text(), re.MULTILINE))
    assert set(re.findall(r"`?make ([\w-]+)`", README)) <= targets


def test_flags_exist():
    from vblackwell.train.config import TrainConfig, flag_of

    known = {flag_of(name) for name in TrainConfig.__dataclass_fields__} | {"--debug", "--help", "--prompt"}
    known |= set(re.findall(r'"(--[a-z][a-z0-9-]+)"', (ROOT / "vblackwell/cli.py").read_text(encoding="utf-8")))
    assert set(re.findall(r"(?<!\S)`?(--[a-z][a-z0-9-]+)", README)) <= known
