"""Imports inside the package point down only, are absolute, and form no cycles (docs/architecture.md)."""

import ast
from pathlib import Path

import vblackwell

PACKAGE = Path(vblackwell.__file__).parent
LAYERS = {
    "units": 0, "errors": 0,
    "hardware": 1, "numerics": 1,
    "memory": 2, "kernels": 2, "plan": 2, "distributed": 2,
    "nn": 3, "artifacts": 3, "offload": 3.5, "subject": 3.5,
    "infer": 4, "estimator": 4, "train": 4.5,
    "cli": 5, "__main__": 6,
}  # fmt: skip
GROUND = {"units", "errors"}  # these two know each other and nothing else
ALLOWED = {
    "memory": {"numerics", "hardware"},
    "kernels": {"numerics", "hardware"},
    "plan": {"hardware"},
    "distributed": {"hardware"},
    "nn": {"kernels", "memory", "numerics", "distributed", "hardware"},
    "artifacts": {"memory", "hardware", "numerics"},
    "offload": {"nn", "memory", "kernels", "plan", "distributed", "hardware", "numerics"},
}


def _imports(path: Path) -> list[tuple[int, str]]:
    """(line, dotted module) of every import of this package in ``path``, relative ones as '.'."""
    found = []
    for node in ast.walk(ast.parse(path.read_text())):
        if isinstance(node, ast.Import):
            found += [(node.lineno, alias.name) for alias in node.names]
        elif isinstance(node, ast.ImportFrom):
            found.append((node.lineno, "." if node.level else str(node.module)))
    return [(line, name) for line, name in found if name == "." or name.split(".")[0] == "vblackwell"]


def _part(path: Path) -> str:
    return path.relative_to(PACKAGE).parts[0].removesuffix(".py")


def test_every_part_has_a_layer():
    parts = {_part(path) for path in PACKAGE.rglob("*.py")} - {"__init__"}
    assert parts <= set(LAYERS), f"give these a layer: {parts - set(LAYERS)}"


def test_imports_point_down():
    wrong = []
    for path in PACKAGE.rglob("*.py"):
        part = _part(path)
        if part == "__init__":
            continue
        for line, name in _imports(path):
            where = f"{path.relative_to(PACKAGE)}:{line}"
            if name == ".":
                wrong.append(f"{where}: relative import")
                continue
            target = name.split(".")[1] if "." in name else "__init__"
            if target == part or target in GROUND or (part, target) == ("cli", "__init__"):
                continue
            if target == "__init__":
                wrong.append(f"{where}: imports the package's root")
            elif LAYERS[target] >= LAYERS[part] or (part in ALLOWED and target not in ALLOWED[part]):
                wrong.append(f"{where}: {part} may not import {target}")
    assert not wrong, "\n".join(wrong)


def test_no_file_is_too_long():
    """Files near 200 lines, none over 600; kernels excepted. A limit for mistakes: nothing is packed to stay under it."""
    long = [
        f"{path.relative_to(PACKAGE)}: {count}"
        for path in PACKAGE.rglob("*.py")
        if _part(path) != "kernels" and (count := len(path.read_text().splitlines())) > 600
    ]
    assert not long, long
