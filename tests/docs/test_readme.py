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


CHINESE = (ROOT / "README.zh-CN.md").read_text(encoding="utf-8")


def _told(text: str) -> str:
    """The text without the file tree, which is not translated."""
    return re.sub(r"<!-- file tree.*?end of file tree -->", "", text, flags=re.DOTALL)


def _blocks(text: str) -> list[str]:
    """Blocks of code without their comments, which are translated."""
    found = re.findall(r"^```\w*\n(.*?)^```", _told(text), re.DOTALL | re.MULTILINE)
    return [re.sub(r"\s+#.*", "", block) for block in found]


def _mentions(text: str) -> set[str]:
    """Code within sentences, and what is linked to."""
    text = re.sub(r"^```.*?^```", "", _told(text), flags=re.DOTALL | re.MULTILINE)
    return set(re.findall(r"`([^`\n]+)`", text)) | set(re.findall(r"\]\(([^)#]+)(?:#\w+)?\)", text))


def test_the_chinese_readme_has_the_same_commands():
    """Every block of code, every flag, path, link and measured number; headings and rows of tables in the same number."""
    assert _blocks(CHINESE) == _blocks(README) and len(_blocks(README)) >= 4
    assert _mentions(CHINESE) - {"README.md"} == _mentions(README) - {"README.zh-CN.md"}
    for pattern in (r"^#+ ", r"^\|", r"^- "):
        counts = [len(re.findall(pattern, _told(text), re.MULTILINE)) for text in (CHINESE, README)]
        assert counts[0] == counts[1] > 0, pattern
    assert set(re.findall(r"\d+\.\d+", _told(CHINESE))) == set(re.findall(r"\d+\.\d+", _told(README)))
    assert "(README.zh-CN.md)" in README.split("##")[0] and "(README.md)" in CHINESE.split("##")[0]


def test_every_example_is_listed():
    for text in (README, CHINESE):
        named = set(re.findall(r"^\| `(examples/\w+\.py)`", text, re.MULTILINE))
        assert named == {f"examples/{path.name}" for path in (ROOT / "examples").glob("*.py")}
