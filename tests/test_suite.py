"""What the suite itself does where it runs."""

import ast
from pathlib import Path
from types import SimpleNamespace

import pytest

from tests.conftest import pytest_addoption
from tests.structure import PACKAGE, imported_modules, sources


@pytest.mark.parametrize(("plugins", "added"), [({"timeout"}, []), (set(), ["timeout"])])
def test_a_machine_without_pytest_timeout_runs_it(plugins, added):
    """Its option in pyproject.toml would be unknown there, which pytest warns of, and warnings are errors."""
    names = []
    parser = SimpleNamespace(addini=lambda name, help: names.append(name))
    pytest_addoption(parser, SimpleNamespace(has_plugin=plugins.__contains__))
    assert names == added


def test_the_package_neither_forks_nor_unpickles():
    """A forked child lacks the threads of native libraries while it has their locks, and a pickle runs code."""
    root = Path(__file__).parents[1]
    modules, calls = {"pickle", "dill", "cloudpickle", "multiprocessing"}, {"os.fork", "os.forkpty", "torch.load"}
    for path in sources(root, PACKAGE, ".py"):
        text = (root / path).read_text(encoding="utf-8")
        if not any(word in text for word in (*modules, "fork", "torch.load")):  # parsing every file takes seconds
            continue
        assert not modules & {module.split(".")[0] for _, _, module, _ in imported_modules(root / path)}, path
        tree = ast.walk(ast.parse(text))
        assert not calls & {ast.unparse(node.func) for node in tree if isinstance(node, ast.Call)}, path
