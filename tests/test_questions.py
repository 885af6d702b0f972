"""Every answer in docs/contributing.md is a path and a name that exist."""

from __future__ import annotations

import ast
import re
from pathlib import Path

import pytest

ROOT = Path(__file__).parents[1]
PAGE = ROOT / "docs/contributing.md"
HEADING = "## Twenty questions of a stranger"
MIN_QUESTIONS = 20


def answers(page: str) -> dict[str, str]:
    """The table below the heading: question -> 'path:name'."""
    section = page.split(f"{HEADING}\n", 1)[1].split("\n## ", 1)[0]
    rows = [line.strip("| ").split(" | ") for line in section.splitlines() if line.startswith("|")]
    found: dict[str, str] = {}
    for question, *cells in rows[2:]:  # after the head and its rule
        assert len(cells) == 1 and re.fullmatch(r"`[^`]+`", cells[0].strip()), f"no `path:name` after {question!r}"
        assert question not in found, f"asked twice: {question!r}"
        found[question] = cells[0].strip().strip("`")
    return found


def defined(text: str) -> set[str]:
    """Names that a Python file defines at its top, and those of its classes as 'Class.name'."""
    found: set[str] = set()

    def visit(body: list[ast.stmt], prefix: str) -> None:
        for node in body:
            match node:
                case ast.FunctionDef() | ast.AsyncFunctionDef():
                    found.add(prefix + node.name)
                case ast.ClassDef():
                    found.add(prefix + node.name)
                    visit(node.body, f"{prefix}{node.name}.")
                case ast.Assign():
                    found.update(prefix + target.id for target in node.targets if isinstance(target, ast.Name))
                case ast.AnnAssign(target=ast.Name(id=name)):
                    found.add(prefix + name)
                case ast.If():
                    visit(node.body + node.orelse, prefix)

    visit(ast.parse(text).body, "")
    return found


def why_not(root: Path, answer: str) -> str | None:
    """What is wrong with an answer; None if its file is there and defines its name."""
    path, colon, name = answer.partition(":")
    if not colon or not name:
        return f"{answer!r} is not 'path:name'"
    if not (root / path).is_file():
        return f"there is no file {path}"
    text = (root / path).read_text(encoding="utf-8")
    if path.endswith(".py"):
        there = name in defined(text)
    else:  # a kernel, a device function, or a make target
        there = re.search(rf"\b{re.escape(name)}\s*\(|^{re.escape(name)}:", text, re.MULTILINE) is not None
    return None if there else f"{path} does not define {name}"


ANSWERS = answers(PAGE.read_text(encoding="utf-8"))


def test_there_are_twenty_questions():
    assert len(ANSWERS) >= MIN_QUESTIONS
    assert all(question.endswith("?") for question in ANSWERS)


@pytest.mark.parametrize("question", ANSWERS)
def test_the_answer_exists(question: str):
    assert why_not(ROOT, ANSWERS[question]) is None


@pytest.mark.parametrize(
    ("answer", "wrong"),
    [
        ("a.py:f", None),
        ("a.py:C.m", None),
        ("a.py:LIMIT", None),
        ("k.cu:multiply", None),
        ("a.py:m", "does not define m"),
        ("a.py:inner", "does not define inner"),
        ("a.py:named", "does not define named"),
        ("k.cu:mult", "does not define mult"),
        ("b.py:f", "no file b.py"),
        ("a.py", "is not 'path:name'"),
    ],
)
def test_what_is_missing_is_noticed(tmp_path: Path, answer: str, wrong: str | None):
    (tmp_path / "a.py").write_text(
        "import named\nLIMIT: int = 3\ndef f():\n    def inner(): ...\nclass C:\n    def m(self): ...\n"
    )
    (tmp_path / "k.cu").write_text("__global__ void multiply(int n) {}\n")
    said = why_not(tmp_path, answer)
    assert said is None if wrong is None else said is not None and wrong in said
