"""The structure of a checkout in numbers: ``python -m tests.structure`` prints a table, ``--json`` the same as JSON.

Two kinds of number. *Read* from the sources: files, lines, folders, import circles, words of the README. *Traced* while
a tiny model is put into a stack and trained on the CPU: which files and functions of the package one call to
`enable_vgpu_stack_optimization`, and one training step, go through. Runs of one checkout agree in all but the functions
of a step with updates on level 0: 319 or 326 at the same commit, by which thread is first.

The package is used by its public names alone, so the same script measures a checkout whose files lie elsewhere:

    PYTHONPATH=OTHER python tests/structure.py --root OTHER --json > before.json
    python -m tests.structure --before before.json

`tests/test_layering.py` reads the import graph from here.
"""

from __future__ import annotations

import argparse
import ast
import functools
import inspect
import json
import os
import sys
import tempfile
import threading
from collections.abc import Callable, Iterable, Iterator
from contextlib import contextmanager
from dataclasses import dataclass, field
from pathlib import Path
from types import FrameType
from typing import Any

PACKAGE = "vblackwell"
AREAS = (PACKAGE, "tests", "benchmarks")
MAX_COLUMNS = 120
Graph = dict[Path, set[Path]]

# -- read from the sources ---------------------------------------------------------------------------------------------


def sources(root: Path, area: str, *suffixes: str) -> list[Path]:
    """Files of an area ('vblackwell', 'tests', 'benchmarks') relative to ``root``, with one of the suffixes ('.py')."""
    found = (path for path in (root / area).rglob("*") if path.suffix in suffixes and "__pycache__" not in path.parts)
    return sorted(path.relative_to(root) for path in found)


def num_lines(root: Path, paths: Iterable[Path]) -> int:
    """Lines of all files together, comments and blank ones included."""
    return sum(len((root / path).read_text(encoding="utf-8").splitlines()) for path in paths)


def long_lines(root: Path, paths: Iterable[Path]) -> list[str]:
    """'path:line' of every line over 120 columns."""
    return [
        f"{path}:{number}"
        for path in paths
        for number, line in enumerate((root / path).read_text(encoding="utf-8").splitlines(), 1)
        if len(line) > MAX_COLUMNS
    ]


def folder_sizes(paths: Iterable[Path]) -> dict[Path, int]:
    """Files directly in each folder, ``__init__.py`` not counted, the largest folder first."""
    sizes: dict[Path, int] = {}
    for path in paths:
        if path.name != "__init__.py":
            sizes[path.parent] = sizes.get(path.parent, 0) + 1
    return dict(sorted(sizes.items(), key=lambda item: (-item[1], item[0])))


@functools.cache
def imported_modules(path: Path) -> list[tuple[int, int, str, tuple[str, ...]]]:
    """(line, dots, module, names) of every import in a file: at its top, in a function or under TYPE_CHECKING."""
    found: list[tuple[int, int, str, tuple[str, ...]]] = []
    for node in ast.walk(ast.parse(path.read_text(encoding="utf-8"))):
        if isinstance(node, ast.Import):
            found += [(node.lineno, 0, alias.name, ()) for alias in node.names]
        elif isinstance(node, ast.ImportFrom):
            found.append((node.lineno, node.level, node.module or "", tuple(alias.name for alias in node.names)))
    return found


def import_graph(root: Path, areas: Iterable[str] = (PACKAGE,)) -> Graph:
    """For each Python file the files that it imports, wherever in the file the import stands.

    Importing ``a.b`` also runs ``a/__init__.py``; that is not counted, only an import that names it. A script's folder
    is on its path, so files of benchmarks may name each other without their folder.
    """
    files = {path for area in areas for path in sources(root, area, ".py")}

    def file_of(folder: Path, dotted: str) -> Path | None:
        path = folder.joinpath(*dotted.split(".")) if dotted else folder
        return next((file for file in (path.with_suffix(".py"), path / "__init__.py") if file in files), None)

    graph: Graph = {}
    for path in sorted(files):
        targets = graph[path] = set()
        for _, dots, module, names in imported_modules(root / path):
            bases = [path.parents[dots - 1]] if dots else [Path("."), path.parent, Path(path.parts[0])]
            for base in bases:
                found = [
                    file_of(base, f"{module}.{name}".strip(".")) or file_of(base, module) for name in names or ("",)
                ]
                if any(found):
                    targets.update(file for file in found if file is not None)
                    break
        targets.discard(path)
    return graph


def circles(graph: dict[Path, set[Path]]) -> list[list[Path]]:
    """Sets of two or more nodes each of which reaches all others of its set (Tarjan's strongly
    connected components).
    """
    index: dict[Path, int] = {}
    low: dict[Path, int] = {}
    stack: list[Path] = []
    found: list[list[Path]] = []

    def visit(node: Path) -> None:
        index[node] = low[node] = len(index)
        stack.append(node)
        for target in sorted(graph.get(node, ())):
            if target not in index:
                visit(target)
                low[node] = min(low[node], low[target])
            elif target in stack:
                low[node] = min(low[node], index[target])
        if low[node] == index[node]:
            at = stack.index(node)
            component, stack[at:] = stack[at:], []
            if len(component) > 1:
                found.append(sorted(component))

    sys.setrecursionlimit(max(sys.getrecursionlimit(), 10_000))
    for node in sorted(graph):
        if node not in index:
            visit(node)
    return found


def sibling_graphs(graph: Graph) -> dict[Path, Graph]:
    """For each folder: which of its files and sub-folders import from which others of them."""
    found: dict[Path, Graph] = {}
    for path, targets in graph.items():
        for target in targets:
            shared = next(folder for folder in path.parents if folder in target.parents)
            depth = len(shared.parts)
            ours, theirs = (Path(*file.parts[: depth + 1]) for file in (path, target))
            found.setdefault(shared, {}).setdefault(ours, set()).add(theirs)
    return found


def package_circles(graph: Graph) -> list[list[Path]]:
    """Circles among the files and sub-folders of one folder in which a sub-folder takes part."""
    return [
        circle
        for siblings in sibling_graphs(graph).values()
        for circle in circles(siblings)
        if any(path.suffix != ".py" for path in circle)
    ]


def read_sources(root: Path) -> dict[str, Any]:
    """What can be said of a checkout without running it."""
    measured: dict[str, Any] = {}
    python = {area: sources(root, area, ".py") for area in AREAS}
    kernels = sources(root, PACKAGE, ".cu", ".cuh")
    measured["package files (py)"] = len(python[PACKAGE])
    measured["package files (cu, cuh)"] = len(kernels)
    measured["package lines (py)"] = num_lines(root, python[PACKAGE])
    measured["package lines (cu, cuh)"] = num_lines(root, kernels)
    for area in AREAS[1:]:
        measured[f"{area} files (py)"] = len(python[area])
        measured[f"{area} lines (py)"] = num_lines(root, python[area])
    graph = import_graph(root, (PACKAGE, "benchmarks"))
    between_files, between_packages = circles(graph), package_circles(graph)
    measured["import circles between files"] = len(between_files)
    measured["files in them"] = sum(map(len, between_files))
    measured["import circles between packages"] = len(between_packages)
    measured["packages in them"] = sum(map(len, between_packages))
    folders = {area: folder_sizes(sources(root, area, ".py", ".cu", ".cuh")) for area in AREAS}
    for area, sizes in folders.items():
        folder, size = next(iter(sizes.items()))
        measured[f"largest folder of {area}"] = f"{size} ({folder.as_posix()})"
    measured["folders over 20 files"] = sum(size > 20 for sizes in folders.values() for size in sizes.values())
    for area in AREAS:
        paths = sources(root, area, ".py", ".cu", ".cuh")
        measured[f"lines over {MAX_COLUMNS} columns, {area}"] = len(long_lines(root, paths))
    measured["words of README.md"] = len((root / "README.md").read_text(encoding="utf-8").split())
    measured["circles"] = {
        "files": [[path.as_posix() for path in circle] for circle in between_files],
        "packages": [[path.as_posix() for path in circle] for circle in between_packages],
    }
    return measured


# -- traced while it runs ----------------------------------------------------------------------------------------------


@dataclass
class Calls:
    """Calls of the package's functions, in order: (file, function).

    Frames of modules, class bodies, comprehensions and lambdas are not functions that a reader looks for, and are left
    out.
    """

    folder: str
    entries: list[tuple[str, str]] = field(default_factory=list)
    threads: Callable[[int], bool] | None = None  # whose calls are recorded, by identity; None: nobody's

    def profile(self, frame: FrameType, event: str, _: object) -> None:
        """For `sys.setprofile`."""
        if event != "call" or self.threads is None:
            return
        code = frame.f_code
        if not code.co_filename.startswith(self.folder) or not code.co_flags & inspect.CO_OPTIMIZED:
            return
        if not code.co_name.startswith("<") and self.threads(threading.get_ident()):
            self.entries.append((code.co_filename[len(self.folder) :], code.co_qualname))

    @contextmanager
    def recorded(self, threads: Callable[[int], bool]) -> Iterator[None]:
        """Record the calls in those threads."""
        self.threads = threads
        try:
            yield
        finally:
            self.threads = None


def stays(files: Iterable[str]) -> tuple[int, int]:
    """(stays, returns): a stay is a longest run in one file, a return a stay in a file that was left before."""
    runs: list[str] = []
    for file in files:
        if not runs or runs[-1] != file:
            runs.append(file)
    return len(runs), len(runs) - len(set(runs))


PLACES = {
    "host": ("host", "home"),
    "level 0": ("device", "level0"),
}  # where AdamW runs: a word, and what checkouts call it
LEVEL0_MB, HOST_MB, DISK_MB = 0.125, 16, 64  # level 0 holds three of the model's five groups
REPEATS = 5


def tiny_model() -> Any:
    """Four checkpointed blocks and a head: 5 groups of at most 37 KiB."""
    from torch import Tensor, nn
    from torch.utils.checkpoint import checkpoint

    class Tiny(nn.Module):
        def __init__(self) -> None:
            super().__init__()
            blocks = [nn.Sequential(nn.Linear(48, 96), nn.GELU(), nn.Linear(96, 48)) for _ in range(4)]
            self.layers = nn.ModuleList(blocks)
            self.head = nn.Linear(48, 7)

        def forward(self, x_BD: Tensor) -> Tensor:
            for layer in self.layers:
                x_BD = x_BD + checkpoint(layer, x_BD, use_reentrant=False)
            return self.head(x_BD)

    return Tiny()


def trace_run(calls: Calls, update: str) -> tuple[list[tuple[str, str]], set[tuple[str, str]]]:
    """Calls of `enable_vgpu_stack_optimization` in order, and functions of the third training step, of one small run.

    The step is the usual one: clipping is on and does not bite, updates may begin in backward. Its updates are waited
    for, so that what the worker's thread does for it is in it.
    """
    import torch

    import vblackwell as vb

    enable, release = vb.enable_vgpu_stack_optimization, vb.release
    main = threading.get_ident()
    levels = [
        {"capacity_mb": LEVEL0_MB, "device": "cpu"},
        {"capacity_mb": HOST_MB, "device": "cpu"},
        {"capacity_mb": DISK_MB, "device": "ssd", "path": tempfile.gettempdir()},
    ]
    torch.manual_seed(0)
    model, stack = tiny_model(), vb.VGPUStack({"levels": levels})
    x_BD, y_B = torch.randn(16, 48), torch.randint(7, (16,))
    try:
        with calls.recorded(lambda thread: thread == main):
            enable(model, stack, placement="streamed", update=update)
        enabled, calls.entries = calls.entries, []
        optimizer = vb.VGPUAdamW(model.parameters(), max_grad_norm=1e3, update_in_backward=True)
        for step in range(3):
            with calls.recorded((lambda _: True) if step == 2 else (lambda _: False)):
                torch.nn.functional.cross_entropy(model(x_BD), y_B).backward()
                optimizer.step()
                optimizer.zero_grad()
        with calls.recorded(lambda thread: thread != main):
            model.state_dict()  # waits for the updates
        stepped, calls.entries = set(calls.entries), []
        release(model)
    finally:
        stack.close()
    return enabled, stepped


def trace(root: Path) -> dict[str, Any]:
    """Files and functions that one call and one training step go through, with updates on the host and on level 0."""
    sys.path.insert(0, str(root))
    import torch

    import vblackwell
    from vblackwell import ConfigurationError

    folder = Path(vblackwell.__file__).parent
    if folder != root / PACKAGE:
        raise SystemExit(f"{PACKAGE} comes from {folder}, not from {root}: run with PYTHONPATH={root}")
    torch.set_num_threads(1)
    calls = Calls(f"{folder}{os.sep}")
    threading.setprofile(calls.profile)
    sys.setprofile(calls.profile)
    measured: dict[str, Any] = {"functions": {}}
    try:
        for place, words in PLACES.items():
            for update in words:
                try:
                    trace_run(calls, update)  # the first run imports what it needs
                except ConfigurationError:
                    if update == words[-1]:
                        raise
                    continue
                break
            stepped: set[tuple[str, str]] = set()
            for _ in range(REPEATS):  # a thread is early or late: what is done in any of them
                enabled, functions = trace_run(calls, update)
                stepped |= functions
            first_calls = list(dict.fromkeys(enabled))
            files = [file for file, _ in first_calls]
            measured[f"step, updates on {place}: files"] = len({file for file, _ in stepped})
            measured[f"step, updates on {place}: functions"] = len(stepped)
            measured[f"enable, updates on {place}: files"] = len(set(files))
            measured[f"enable, updates on {place}: functions"] = len(first_calls)
            measured[f"enable, updates on {place}: names"] = len({name.rpartition(".")[2] for _, name in first_calls})
            measured[f"enable, updates on {place}: stays"], measured[f"enable, updates on {place}: returns"] = stays(
                files
            )
            every_call = stays(file for file, _ in enabled)
            measured[f"enable, updates on {place}: stays, returns of every call"] = "{}, {}".format(*every_call)
            measured["functions"][f"step, updates on {place}"] = sorted(f"{file}: {name}" for file, name in stepped)
            measured["functions"][f"enable, updates on {place}"] = [f"{file}: {name}" for file, name in first_calls]
    finally:
        sys.setprofile(None)
        threading.setprofile(None)  # pyright: ignore[reportArgumentType]
    return measured


# -- the table ---------------------------------------------------------------------------------------------------------


def table(measured: dict[str, Any], before: dict[str, Any] | None) -> str:
    """Markdown: a row for each number, with the one from before in front of it."""
    head = ["", "now"] if before is None else ["", "before", "now"]
    rows = [head, ["---"] * len(head)]
    for name, value in measured.items():
        if not isinstance(value, dict):
            rows.append([name, *([] if before is None else [str(before.get(name, ""))]), str(value)])
    return "\n".join(f"| {' | '.join(row)} |" for row in rows)


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--root", type=Path, default=Path(__file__).parents[1], help="the checkout; default: this one")
    parser.add_argument(
        "--json", action="store_true", help="print JSON, with the circles and functions that were counted"
    )
    parser.add_argument("--before", type=Path, help="a file that --json wrote, shown next to the numbers of now")
    words = parser.parse_args()
    root = words.root.resolve()
    measured = read_sources(root) | trace(root)
    if words.json:
        print(json.dumps(measured, indent=1))
    else:
        before = None if words.before is None else json.loads(words.before.read_text(encoding="utf-8"))
        print(table(measured, before))


if __name__ == "__main__":
    main()
