"""The README tells the truth where a machine can check it."""

import importlib
import re
from pathlib import Path

import pytest

ROOT = Path(__file__).parent.parent.parent
README = (ROOT / "README.md").read_text(encoding="utf-8")
CHINESE = (ROOT / "README.zh-CN.md").read_text(encoding="utf-8")
PAGES = [ROOT / "README.md", ROOT / "README.zh-CN.md", ROOT / "CHANGELOG.md", *sorted((ROOT / "docs").rglob("*.md"))]
MAX_WORDS, MAX_UNRELEASED_WORDS = 1200, 900


def test_it_is_short():
    assert len(README.split()) <= MAX_WORDS


@pytest.mark.parametrize("page", PAGES, ids=lambda page: page.relative_to(ROOT).as_posix())
def test_links_lead_somewhere(page: Path):
    """Files of this repository, and headings in them."""
    for link in re.findall(r"\]\(([^)\s]+)\)", page.read_text(encoding="utf-8")):
        name, _, heading = link.partition("#")
        if "://" in link:
            continue
        target = page if not name else page.parent / name
        assert target.exists(), link
        if heading:
            titles = re.findall(r"^#+ (.*)", target.read_text(encoding="utf-8"), re.MULTILINE)
            assert heading in {re.sub(r"[^\w\- ]", "", title.lower()).replace(" ", "-") for title in titles}, link


def test_every_page_is_linked():
    """From the README; the journal from its folder's name there."""
    for page in (ROOT / "docs").glob("*.md"):
        assert f"(docs/{page.name})" in README, page.name
    assert "`docs/journal/`" in README


def test_paths_and_commands_exist():
    for path in re.findall(r"`((?:tests|docs|examples|benchmarks)/[\w./]*)`|\]\((docs/[\w.]+)\)", README):
        name = path[0] or path[1]
        assert (ROOT / name).exists(), name
    from vblackwell.cli import COMMANDS

    named = set(re.findall(r"^\$ vb (\w+)|`vb (\w+)", README, re.MULTILINE))
    assert {first or second for first, second in named} <= set(COMMANDS)
    targets = set(re.findall(r"^([\w-]+):", (ROOT / "Makefile").read_text(), re.MULTILINE))
    assert set(re.findall(r"`?make ([\w-]+)`", README)) <= targets


def test_flags_exist():
    from vblackwell.cli import COMMANDS, make_parser

    known = {flag for name in COMMANDS for action in make_parser(name)._actions for flag in action.option_strings}
    assert set(re.findall(r"(?<!\S)`?(--[a-z][a-z0-9-]+)", README)) <= known


def _blocks(text: str) -> list[str]:
    """Blocks of code without their comments, which are translated."""
    found = re.findall(r"^```\w*\n(.*?)^```", text, re.DOTALL | re.MULTILINE)
    return [re.sub(r"\s+#.*", "", block) for block in found]


def _mentions(text: str) -> set[str]:
    """Code within sentences, and what is linked to."""
    text = re.sub(r"^```.*?^```", "", text, flags=re.DOTALL | re.MULTILINE)
    return set(re.findall(r"`([^`\n]+)`", text)) | set(re.findall(r"\]\(([^)#]+)(?:#\w+)?\)", text))


def test_the_chinese_readme_has_the_same_commands():
    """Every block of code, every flag, path, link and measured number;
    headings and rows of tables in the same number.
    """
    assert _blocks(CHINESE) == _blocks(README) and len(_blocks(README)) >= 4
    assert _mentions(CHINESE) - {"README.md"} == _mentions(README) - {"README.zh-CN.md"}
    for pattern in (r"^#+ ", r"^\|", r"^- "):
        counts = [len(re.findall(pattern, text, re.MULTILINE)) for text in (CHINESE, README)]
        assert counts[0] == counts[1] > 0, pattern
    assert set(re.findall(r"\d+\.\d+", CHINESE)) == set(re.findall(r"\d+\.\d+", README))
    assert "(README.zh-CN.md)" in README.split("##")[0] and "(README.md)" in CHINESE.split("##")[0]


def test_every_example_is_listed():
    guide = (ROOT / "docs/guide.md").read_text(encoding="utf-8")
    named = set(re.findall(r"^\| `(examples/\w+\.py)`", guide, re.MULTILINE))
    assert named == {f"examples/{path.name}" for path in (ROOT / "examples").glob("*.py")}


def test_what_is_unreleased_is_read_in_five_minutes():
    changes = (ROOT / "CHANGELOG.md").read_text(encoding="utf-8").split("\n## Unreleased\n")[1].split("\n## ")[0]
    assert len(changes.split()) <= MAX_UNRELEASED_WORDS


@pytest.mark.parametrize("page", [path for path in PAGES if "journal" not in path.parts], ids=lambda page: page.name)
def test_names_can_be_imported(page: Path):
    """Of the public names that a page mentions, and of the imports in its Python."""
    import vblackwell

    text = page.read_text(encoding="utf-8")
    for name in re.findall(r"\bvb\.([A-Za-z_]\w*)", text):
        assert hasattr(vblackwell, name), name
    for module, names in re.findall(r"^from (vblackwell[\w.]*) import (.*)$", text, re.MULTILINE):
        imported = importlib.import_module(module)
        assert all(hasattr(imported, name) for name in names.split(", ")), (module, names)
