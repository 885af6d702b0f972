"""Writes the README's file tree from the first sentence of each module: `python docs/file_tree.py`.

A tree kept by hand is wrong after a week. tests/docs/test_readme.py fails when this script would change it.
"""

from __future__ import annotations

import ast
import re
from pathlib import Path

ROOT = Path(__file__).parent.parent
START, END = "<!-- file tree: docs/file_tree.py writes it -->\n```\n", "```\n<!-- end of file tree -->"
WIDTH = 104


def first_sentence(path: Path) -> str:
    """What the file says it is, up to the first full stop; if that is long, up to the last pause that fits."""
    text = path.read_text(encoding="utf-8")
    if path.suffix == ".py":
        said = ast.get_docstring(ast.parse(text)) or ""
    else:  # C++ and CUDA begin with a comment
        said = re.sub(r"^\s*(//+|/\*+|\*+/?) ?", "", text.split("\n\n")[0], flags=re.MULTILINE)
    sentence = re.split(r"(?<=[\w)`\"'])\.(?=\s|$)", " ".join(said.split()), maxsplit=1)[0]
    sentence = sentence.replace("``", "").replace("`", "").strip()
    if len(sentence) > WIDTH:
        pauses = [match.start() for match in re.finditer(r"[,;:]? (?=[a-z(])|[,;:] ", sentence[:WIDTH])]
        commas = [at for at in pauses if sentence[at] in ",;:"]
        sentence = sentence[: (commas or pauses)[-1]]
    return sentence


def lines() -> list[str]:
    """The tree, a line a file."""
    found = []
    package = ROOT / "vblackwell"
    folders = [package, *sorted(path for path in package.rglob("*") if path.is_dir() and path.name != "__pycache__")]
    for folder in folders:
        files = sorted(path for path in folder.iterdir() if path.suffix in (".py", ".cu", ".cuh"))
        if not files:
            continue
        name = folder.relative_to(ROOT).as_posix() + "/"
        about = first_sentence(folder / "__init__.py") if (folder / "__init__.py").exists() else ""
        found.append(f"{name:<26} {about}".rstrip())
        for path in files:
            if path.name != "__init__.py":
                found.append(f"  {path.name:<24} {first_sentence(path)}".rstrip())
    return found


def with_tree(readme: str) -> str:
    """``readme`` with a fresh tree between the markers."""
    before, rest = readme.split(START)
    after = rest.split(END)[1]
    return before + START + "\n".join(lines()) + "\n" + END + after


if __name__ == "__main__":
    path = ROOT / "README.md"
    path.write_text(with_tree(path.read_text(encoding="utf-8")), encoding="utf-8")
