"""What the suite itself does where it runs."""

import ast
import subprocess
from pathlib import Path
from types import SimpleNamespace

import pytest

from tests.conftest import pytest_addoption
from tests.structure import PACKAGE, sources


@pytest.mark.parametrize(("plugins", "added"), [({"timeout"}, []), (set(), ["timeout"])])
def test_a_machine_without_pytest_timeout_runs_it(plugins, added):
    """Its option in pyproject.toml would be unknown there, which pytest warns of, and warnings are errors."""
    names = []
    parser = SimpleNamespace(addini=lambda name, help: names.append(name))
    pytest_addoption(parser, SimpleNamespace(has_plugin=plugins.__contains__))
    assert names == added


UNSAFE_MODULES = {"pickle", "dill", "cloudpickle", "multiprocessing"}
UNSAFE_NAMES = {"fork", "forkpty", "ProcessPoolExecutor"}


def ways_to_fork_or_unpickle(text: str) -> set[str]:
    """Modules that ``text`` imports and names that it uses which do either."""
    found = set[str]()
    for node in ast.walk(ast.parse(text)):
        match node:
            case ast.Import(names=names):
                modules = [alias.name for alias in names]
            case ast.ImportFrom(module=str(module), names=names):
                modules = [f"{module}.{alias.name}" for alias in names]
            case ast.Attribute(attr=name) | ast.Name(id=name):
                found |= {name} & UNSAFE_NAMES
                modules = [ast.unparse(node)] if name == "load" else []
            case _:
                continue
        for module in modules:
            parts = module.split(".")
            if module == "torch.multiprocessing.reductions.StorageWeakRef":  # a weak reference, and no process
                continue
            if parts[0] in UNSAFE_MODULES or parts[:2] == ["torch", "multiprocessing"] or module == "torch.load":
                found.add(module)
            found |= {parts[-1]} & UNSAFE_NAMES
    return found


@pytest.mark.parametrize(
    "text",
    [
        "import pickle",
        "from multiprocessing import Pool",
        "from torch import multiprocessing",
        "import torch.multiprocessing as mp",
        "from torch.multiprocessing import spawn",
        "from concurrent.futures import ProcessPoolExecutor",
        "import concurrent.futures\nconcurrent.futures.ProcessPoolExecutor()",
        "from os import fork as split",
        "import os\nos.forkpty()",
        "import torch\ntorch.load('x')",
    ],
)
def test_each_way_to_fork_or_to_unpickle_is_seen(text: str):
    assert ways_to_fork_or_unpickle(text)


def test_the_package_neither_forks_nor_unpickles():
    """A forked child lacks the threads of native libraries while it has their locks, and a pickle runs code."""
    root = Path(__file__).parents[1]
    words = {*UNSAFE_MODULES, *UNSAFE_NAMES, "torch.load"}
    for path in sources(root, PACKAGE, ".py"):
        text = (root / path).read_text(encoding="utf-8")
        if any(word in text for word in words):  # parsing every file takes seconds
            assert not ways_to_fork_or_unpickle(text), path


OTHER_FOLDERS = {"benchmarks", "cli", "docs", "faults", "first_hour"}  # tests of more than a folder of the package


def test_tests_lie_where_the_package_has_what_they_test():
    root = Path(__file__).parents[1]
    folders = {path.parent.relative_to("tests") for path in sources(root, "tests", ".py") if path.match("test_*.py")}
    elsewhere = {folder.as_posix() for folder in folders if not (root / PACKAGE / folder).is_dir()}
    assert elsewhere == OTHER_FOLDERS, elsewhere ^ OTHER_FOLDERS


def test_the_gpu_suite_is_one_command():
    """It brings no environment, eight processes share the GPU, and pytest-benchmark may be installed there."""
    words = subprocess.run(
        ["make", "-n", "--no-print-directory", "test-gpu"],
        cwd=Path(__file__).parents[1],
        check=True,
        capture_output=True,
        text=True,
    ).stdout
    (line,) = words.splitlines()
    assert " -m pytest " in line and "venv" not in line
    for part in ("-n 12", "-p no:benchmark", "-rs", "gpu or multi_gpu or (slow and not each_value and not each_pair)"):
        assert part in line
