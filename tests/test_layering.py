"""The structure that keeps the package readable: who imports whom, no circles, small folders, short files and lines.

The order is that of docs/architecture.md. What is not yet as it should be stands in the ``KNOWN_`` tables, which may
only shrink: something new that is wrong fails, and so does an entry that is wrong no longer ("remove it").
"""

from __future__ import annotations

import ast
import functools
import re
from pathlib import Path

import pytest

from tests.structure import (
    AREAS,
    MAX_COLUMNS,
    PACKAGE,
    Graph,
    circles,
    folder_sizes,
    import_graph,
    imported_modules,
    long_lines,
    package_circles,
    sources,
    stays,
)

ROOT = Path(__file__).parents[1]
MAX_FILES_IN_A_FOLDER = 20
MAX_LINES_IN_A_FILE = 600

# -- the order ---------------------------------------------------------------------------------------------------------

GROUND = {"errors", "units", "machine", "numerics"}
MODULES = GROUND | {"kernels", "memory", "nn", "folders", "trace", "distributed"}
PLANS = MODULES | {"planner", "offload"}
PROGRAMS = PLANS | {"generate", "data"}
EVERYTHING = PROGRAMS | {"serve", "train", "tools"}

# For a folder, its files and sub-folders, and which others of them each may import. A path allows only what lies below
# it.
ORDER: dict[str, dict[str, set[str]]] = {
    PACKAGE: {
        "errors": set(),
        "units": {"errors"},
        "machine": {"errors", "units"},
        "numerics": {"errors", "units"},
        "kernels": GROUND,
        "memory": GROUND | {"kernels/fp4"},
        "nn": GROUND | {"kernels", "memory"},
        "folders": GROUND | {"memory"},
        "trace": GROUND | {"kernels"},
        "distributed": GROUND | {"memory"},
        "offload": GROUND | {"nn", "memory", "kernels", "trace", "distributed"},
        "planner": GROUND | {"offload/layout", "trace", "nn", "folders"},
        "generate": PLANS,
        "data": PLANS,
        "serve": PROGRAMS,
        "train": PROGRAMS,
        "tools": PROGRAMS,
        "cli": EVERYTHING | {"__init__"},
        "__main__": {"cli"},
        "__init__": EVERYTHING,
    },
    f"{PACKAGE}/kernels": {
        "runtime": set(),
        "fp4": {"runtime"},
        "attention": {"runtime"},
        "pointwise": {"runtime"},
        "optimizer": {"runtime"},
    },
    f"{PACKAGE}/nn": {
        "linear": set(),
        "attention": {"linear"},
        "decoder": {"linear", "attention"},
        "convert": {"linear", "attention", "decoder"},
    },
    f"{PACKAGE}/offload": {
        "layout": set(),
        "storage": {"layout"},
        "movement": {"layout", "storage"},
    },
}
# Of a folder whose other files have no order but that they form no circle: what each may not import.
NEVER: dict[str, dict[str, set[str]]] = {
    f"{PACKAGE}/memory": {"*": {"cache"}},
    f"{PACKAGE}/offload": {"step": {"engine", "api"}, "engine": {"api"}},
}

# -- what is not yet in order ------------------------------------------------------------------------------------------

# (importer, imported): imports that point up or sideways, or close a circle.
KNOWN_IMPORTS: set[tuple[str, str]] = set()
# Files in folders of more than 20.
KNOWN_FOLDERS: dict[str, int] = {}
# Files of more than 600 lines.
KNOWN_LONG_FILES: set[str] = {
    "tests/offload/movement/test_activations.py",
    "tests/offload/test_faults.py",
    "tests/offload/test_model_in_use.py",
}


@functools.cache
def graph() -> Graph:
    return import_graph(ROOT, (PACKAGE, "benchmarks"))


def may_import(importer: Path, imported: Path) -> bool:
    """Whether the order of the smallest folder that holds both allows it."""
    folder = next(parent for parent in importer.parents if parent in imported.parents)
    depth = len(folder.parts)
    ours = importer.parts[depth].removesuffix(".py")
    theirs = Path(*imported.parts[depth:]).with_suffix("")
    if any(theirs.is_relative_to(path) for path in _forbidden(folder.as_posix(), ours)):
        return False
    order = ORDER.get(folder.as_posix(), {})
    return ours not in order or any(theirs.is_relative_to(path) for path in order[ours])


def _forbidden(folder: str, child: str) -> set[str]:
    never = NEVER.get(folder, {})
    return never.get(child, set()) | (never.get("*", set()) if (ROOT / folder / f"{child}.py").exists() else set())


def against_order() -> set[tuple[str, str]]:
    """(importer, imported) of every import that the order does not allow."""
    return {
        (path.as_posix(), target.as_posix())
        for path, targets in graph().items()
        for target in targets
        if not may_import(path, target)
    }


def without(edges: set[tuple[str, str]]) -> Graph:
    return {
        path: {target for target in targets if (path.as_posix(), target.as_posix()) not in edges}
        for path, targets in graph().items()
    }


def listed(items: object) -> str:
    """Ready to be pasted into a table above."""
    assert isinstance(items, set)
    return "\n" + "\n".join(f"    {item!r}," for item in sorted(items)).replace("'", '"')


def test_every_part_has_a_place_in_the_order():
    parts = {path.parts[1].removesuffix(".py") for path in sources(ROOT, PACKAGE, ".py")}
    assert parts <= set(ORDER[PACKAGE]), f"give these a place: {parts - set(ORDER[PACKAGE])}"
    for folder in (f"{PACKAGE}/kernels", f"{PACKAGE}/nn"):
        parts = {path.name for path in (ROOT / folder).iterdir() if (path / "__init__.py").exists()}
        assert parts <= set(ORDER[folder]), f"give these a place in {folder}: {parts - set(ORDER[folder])}"


def test_imports_are_absolute():
    relative = [
        f"{path}:{line}"
        for path in sources(ROOT, PACKAGE, ".py")
        for line, dots, _, _ in imported_modules(ROOT / path)
        if dots
    ]
    assert not relative, relative


def test_imports_point_down():
    wrong = against_order() - KNOWN_IMPORTS
    assert not wrong, f"these imports point up or sideways:{listed(wrong)}"


def test_there_is_no_circle():
    """Between files, and between the files and sub-folders of a folder;
    at run time, in a function or for types alone.
    """
    rest = without(KNOWN_IMPORTS)
    assert not circles(rest), f"files import each other: {circles(rest)}"
    assert not package_circles(rest), f"folders import each other: {package_circles(rest)}"


def test_what_is_known_is_still_so():
    """An import leaves KNOWN_IMPORTS when it is gone, or in order and in no circle without the others."""
    gone = KNOWN_IMPORTS - {
        (path.as_posix(), target.as_posix()) for path, targets in graph().items() for target in targets
    }
    assert not gone, f"no longer there, remove from KNOWN_IMPORTS:{listed(gone)}"
    upward = against_order()
    for pair in sorted(KNOWN_IMPORTS - upward):
        rest = without(KNOWN_IMPORTS - {pair})
        assert circles(rest) or package_circles(rest), f"closes no circle, remove from KNOWN_IMPORTS: {pair}"


def test_folders_are_small():
    large = {
        folder.as_posix(): size
        for area in AREAS
        for folder, size in folder_sizes(sources(ROOT, area, ".py", ".cu", ".cuh")).items()
        if size > MAX_FILES_IN_A_FOLDER
    }
    assert not KNOWN_FOLDERS.keys() - large.keys(), f"remove from KNOWN_FOLDERS: {KNOWN_FOLDERS.keys() - large.keys()}"
    grown = {folder: size for folder, size in large.items() if size > KNOWN_FOLDERS.get(folder, 0)}
    assert not grown, f"over {MAX_FILES_IN_A_FOLDER} files, or more than before: {grown}"


def test_files_are_short():
    """Files near 200 lines, none over 600. A limit for mistakes: nothing is packed to stay under it."""
    paths = [path for area in AREAS for path in sources(ROOT, area, ".py", ".cu", ".cuh")]
    long = {
        path.as_posix()
        for path in paths
        if len((ROOT / path).read_text(encoding="utf-8").splitlines()) > MAX_LINES_IN_A_FILE
    }
    assert not KNOWN_LONG_FILES - long, f"remove from KNOWN_LONG_FILES:{listed(KNOWN_LONG_FILES - long)}"
    assert not long - KNOWN_LONG_FILES, f"over {MAX_LINES_IN_A_FILE} lines:{listed(long - KNOWN_LONG_FILES)}"


def test_lines_are_short():
    long = [line for area in AREAS for line in long_lines(ROOT, sources(ROOT, area, ".py", ".cu", ".cuh"))]
    assert not long, f"over {MAX_COLUMNS} columns: {long}"


# Of what a table may consist; of calls, those of classes and of pytest's marks.
DATA = (ast.Constant, ast.List, ast.Tuple, ast.Dict, ast.Set, ast.Name, ast.Attribute, ast.Starred, ast.keyword)
OPERATORS = (ast.UnaryOp, ast.BinOp, ast.unaryop, ast.operator, ast.expr_context)


def is_table(node: ast.AST) -> bool:
    parts = list(ast.walk(node))
    calls = [ast.unparse(part.func).rpartition(".")[2] for part in parts if isinstance(part, ast.Call)]
    are_marks = all(name[0].isupper() or name in ("param", "parametrize") for name in calls)
    return are_marks and all(isinstance(part, (*DATA, *OPERATORS, ast.Call)) for part in parts)


def test_the_formatter_is_kept_from_tables_alone():
    wrong = []
    for path in (path for area in (*AREAS, "examples", "docs") for path in sources(ROOT, area, ".py")):
        text = (ROOT / path).read_text(encoding="utf-8")
        marked = re.finditer(r"# fmt: (skip|off)$", text, re.MULTILINE)
        lines = [text.count("\n", 0, each.start()) + 1 for each in marked]
        tables = set[int | None]()
        for node in ast.walk(ast.parse(text)) if lines else ():
            parts = (
                [node.value] if isinstance(node, ast.Assign | ast.AnnAssign) else getattr(node, "decorator_list", [])
            )
            tables |= {part.end_lineno for part in parts if part and is_table(part)}
        wrong += [f"{path}:{line}" for line in lines if line not in tables]
    assert not wrong, f"no tables of data, format them: {wrong}"


# -- the instrument ----------------------------------------------------------------------------------------------------


def written(folder: Path, **files: str) -> Path:
    """A checkout with these files in its package; '__' stands for '/'."""
    for name, text in files.items():
        path = folder / PACKAGE / f"{name.replace('__', '/')}.py"
        path.parent.mkdir(parents=True, exist_ok=True)
        path.write_text(text, encoding="utf-8")
    return folder


@pytest.mark.parametrize(
    "back",
    [
        "import vblackwell.a",
        "from vblackwell import a",
        "from vblackwell.a import name",
        "def f():\n    from vblackwell.a import name",
        "from typing import TYPE_CHECKING\nif TYPE_CHECKING:\n    from vblackwell.a import name",
        "from . import a",
    ],
)
def test_every_way_to_import_closes_a_circle(tmp_path: Path, back: str):
    root = written(tmp_path, a="import vblackwell.b", b="import vblackwell.c, os", c=back, d="import vblackwell.a")
    files = [Path(PACKAGE, f"{name}.py") for name in "abc"]
    assert circles(import_graph(root)) == [files]


def test_folders_in_a_circle_are_found_without_one_of_files(tmp_path: Path):
    root = written(
        tmp_path,
        x__a="import vblackwell.y.a",
        y__a="",
        y__b="import vblackwell.x.b",
        x__b="",
        z__a="import vblackwell.x.a",
    )
    assert not circles(import_graph(root))
    assert package_circles(import_graph(root)) == [[Path(PACKAGE, "x"), Path(PACKAGE, "y")]]


def test_a_return_is_a_stay_in_a_file_that_was_left():
    assert stays("aabacca") == (5, 2)


@pytest.mark.parametrize(
    ("importer", "imported", "allowed"),
    [
        ("offload/api", "nn/linear/rounded", True),
        ("nn/linear/rounded", "offload/api", False),
        ("planner/placement", "offload/layout/groups", True),
        ("planner/placement", "offload/engine", False),
        ("kernels/fp4/linear", "kernels/pointwise/swiglu", False),
        ("offload/storage/masters", "offload/layout/groups", True),
        ("offload/storage/masters", "offload/movement/weights", False),
        ("offload/movement/weights", "offload/engine", False),
        ("offload/engine", "offload/movement/weights", True),
        ("memory/pool", "memory/cache/stack", False),
        ("memory/cache/stack", "memory/pool", True),
        ("tools/bench", "train/run", False),
        ("nn/attention/layer", "nn/attention/backends", True),
    ],
)
def test_the_order(importer: str, imported: str, allowed: bool):
    assert may_import(Path(PACKAGE, f"{importer}.py"), Path(PACKAGE, f"{imported}.py")) == allowed
