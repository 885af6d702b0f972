"""Conversations about the functions of Python's standard library: the question shows a signature, the answer is the
docstring.

``python benchmarks/lib/docstring_chat.py chat.jsonl`` writes them for the running Python, the same bytes each time:
sources are parsed, nothing is imported or run. A docstring's first paragraph is the answer. Every answer occurs once,
so that what is held out is not among what is learnt; the order is that of a hash, so that the last lines, which ``vb
train`` holds out, are of every module.
"""

from __future__ import annotations

import ast
import hashlib
import json
import sys
from collections.abc import Iterable, Iterator
from pathlib import Path

sys.path.insert(0, str(Path(__file__).resolve().parents[2]))

from vblackwell.data.documents import find_text

ANSWER_CHARACTERS = range(20, 201)
QUESTION_CHARACTERS = range(1, 201)
LEFT_OUT = frozenset(("test", "tests", "idlelib", "lib2to3", "turtledemo"))  # not what people call

Talk = dict[str, str]


def talks(files: Iterable[tuple[str, Path]]) -> list[Talk]:
    """Alpaca records of the public functions and methods in ``files``, pairs of a module's name and its source."""
    found: dict[str, str] = {}  # questions by answers
    for module, path in files:
        for name, function, text in _documented(ast.parse(path.read_text(encoding="utf-8")), module):
            question = f"What does {name} do?\n\ndef {function.name}({ast.unparse(function.args)}):"
            answer = " ".join(text.split("\n\n")[0].split())
            if len(answer) in ANSWER_CHARACTERS and len(question) in QUESTION_CHARACTERS:
                found.setdefault(answer, question)
    pairs = sorted(found.items(), key=lambda pair: hashlib.sha256("\n".join(pair).encode()).digest())
    made = []
    for answer, question in pairs:
        instruction, signature = question.split("\n\n")
        made.append({"instruction": instruction, "input": signature, "output": answer})
    return made


def _documented(tree: ast.AST, prefix: str) -> Iterator[tuple[str, ast.FunctionDef | ast.AsyncFunctionDef, str]]:
    for node in ast.iter_child_nodes(tree):
        name = getattr(node, "name", "_")
        if isinstance(node, ast.ClassDef):
            yield from _documented(node, f"{prefix}.{name}")
        elif isinstance(node, ast.FunctionDef | ast.AsyncFunctionDef) and not name.startswith("_"):
            text = ast.get_docstring(node)
            if text:
                yield f"{prefix}.{name}", node, text


def standard_library() -> list[tuple[str, Path]]:
    """Names and sources of the running Python's modules, without its tests and demonstrations."""
    source = find_text(None)
    named = [(path.relative_to(source.root), path) for path in source.files]
    return [
        (".".join(name.with_suffix("").parts).removesuffix(".__init__"), path)
        for name, path in named
        if not LEFT_OUT.intersection(name.parts)
        and not any(part.startswith("_") and part != "__init__.py" for part in name.parts)
    ]


def write(path: Path, records: list[Talk]) -> None:
    path.write_text("".join(json.dumps(record) + "\n" for record in records), encoding="utf-8")


if __name__ == "__main__":
    if len(sys.argv) != 2:
        raise SystemExit(__doc__)
    made = talks(standard_library())
    write(Path(sys.argv[1]), made)
    print(f"{sys.argv[1]}: {len(made)} conversations, Python {sys.version.split()[0]}")
