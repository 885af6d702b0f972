"""Where there is no GPU, Triton's kernels run in its interpreter:
it must be on before anything (transformers, say) imports triton.

With ``-n`` the process that was started runs no test: it hands them to others, which wait until it has begun, so that
it does without torch and triton.
"""

import collections
import gc
import importlib.util
import itertools
import os
import signal
import sys
from collections.abc import Callable, Generator, Iterator, Mapping, Sequence
from pathlib import Path

import pytest

from tests.cli.forks import ForkServer

if "PYTEST_XDIST_WORKER" in os.environ or "-n" not in sys.argv or "-n 0" in " ".join(sys.argv):
    import torch

    if not torch.cuda.is_available():
        os.environ.setdefault("TRITON_INTERPRET", "1")
        if os.environ["TRITON_INTERPRET"] == "1" and importlib.util.find_spec("triton"):
            from tests.interpreter import repair

            repair()

    # One thread a test process: tensors here are small, and threads that wait for each other on a busy machine cost
    # more.
    torch.set_num_threads(1)

# A shell starts what it runs in the background with Ctrl-C ignored, and Python then leaves it so: tests that send it
# would wait in vain.
if signal.getsignal(signal.SIGINT) is signal.SIG_IGN:
    signal.signal(signal.SIGINT, signal.default_int_handler)


def pytest_addoption(parser: pytest.Parser, pluginmanager: pytest.PytestPluginManager) -> None:
    """pyproject.toml limits each test's time.
    Where pytest-timeout is not installed, nothing does, and that is no error.
    """
    if not pluginmanager.has_plugin("timeout"):
        parser.addini("timeout", "seconds that a test may take (pytest-timeout)")


@pytest.hookimpl(wrapper=True)
def pytest_collection() -> Generator[None, object, object]:
    """What is imported here stays: a million objects that full collections need not walk through, at some 0.3 s a time,
    now or later.
    """
    gc.disable()
    try:
        return (yield)
    finally:
        gc.enable()
        gc.collect()
        gc.freeze()
        gc.set_threshold(20_000, 20, 20)  # looking every 700 objects takes a twenty-fifth of the time


def showing(rows: Sequence[Mapping[str, int]], columns: int) -> set[int]:
    """Places of rows, few, that show every combination of values that any ``columns`` columns have in ``rows``."""
    shown = [set(itertools.combinations(row.items(), columns)) for row in rows]
    missing, used, chosen = set().union(*shown), collections.Counter(), set()
    while missing:
        best = max(
            range(len(rows)),
            key=lambda place: (len(shown[place] & missing), -sum(used[value] for value in rows[place].items())),
        )
        chosen.add(best)
        missing -= shown[best]
        used.update(rows[best].items())
    return chosen


@pytest.hookimpl(tryfirst=True)
def pytest_collection_modifyitems(items: list[pytest.Item]) -> None:
    """What `each_value` and `each_pair` leave out is slow."""
    for name, columns in (("each_value", 1), ("each_pair", 2)):
        tests = collections.defaultdict(list)
        for item in items:
            if item.get_closest_marker(name) and not item.get_closest_marker("slow"):
                tests[item.nodeid.partition("[")[0]].append(item)
        for same in tests.values():
            rows = [{name: id(value) for name, value in item.callspec.params.items()} for item in same]
            chosen = showing(rows, columns)
            for place, item in enumerate(same):
                if place not in chosen:
                    item.add_marker(pytest.mark.slow)


@pytest.fixture(scope="session")
def forks(tmp_path_factory: pytest.TempPathFactory) -> Iterator[tuple[ForkServer, dict[str, str]]]:
    """What forks processes that need not import torch again, which takes seconds, and its environment."""
    folder = tmp_path_factory.mktemp("forks")
    left_out = ("WORLD_SIZE", "COLUMNS", "TRITON_INTERPRET")  # as on users' machines, and kernels can be compiled there
    environment = {name: value for name, value in os.environ.items() if name not in left_out}
    environment |= {"XDG_CACHE_HOME": str(folder / "cache"), "OMP_NUM_THREADS": "1"}
    server = ForkServer(folder, environment)
    yield server, environment
    server.close()


@pytest.fixture
def program(forks: tuple[ForkServer, dict[str, str]], tmp_path: Path) -> Iterator[Callable[..., str]]:
    """``program(text, *words, NAME=value)``: what a Python program prints that runs in a separate process,
    and ends well, or with ``code``.
    """
    server, _ = forks

    def run(text: str, *words: str, code: int = 0, **environment: str) -> str:
        path = tmp_path / "program.py"
        path.write_text(f"import sys\nsys.path.insert(0, {str(Path(__file__).parents[1])!r})\n{text}", encoding="utf-8")
        child = server.start([str(path), *words], tmp_path, environment)
        assert child.wait() == code, child.stderr.read_text(encoding="utf-8")[-2000:]
        return child.stdout.read_text(encoding="utf-8")

    yield run
    server.end_children()
