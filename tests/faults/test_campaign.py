"""The campaign's cases in the suite: of each a sample that is drawn from a fixed seed. `make faults` tries all."""

from __future__ import annotations

import shutil
from collections.abc import Iterator

import pytest

from tests.faults.campaign import attempt
from tests.faults.cases import CASES
from tests.faults.lab import Lab

SEED = 35
# What the run meets in these it meets in others as well: an ENOSPC or EIO, a SIGKILL, a second start, another bit.
LIKE_OTHERS = {
    *("kill-at-random", "kill-elsewhere", "kill-in-the-caches", "killed-holder", "out-of-memory-kill"),
    *("failing-sync", "filled-disk", "small-disk", "small-spill-disk", "no-inodes", "flip-in-spill-file"),
    *("two-signals", "two-runs-one-cache", "damaged-newest-checkpoint"),
}

if shutil.which("cc") is None and shutil.which("gcc") is None:
    pytest.skip("the faults need a C compiler", allow_module_level=True)


@pytest.fixture(scope="module")
def lab(tmp_path_factory: pytest.TempPathFactory) -> Iterator[Lab]:
    folder = tmp_path_factory.mktemp("lab")
    lab = Lab(folder, folder / "corpus.py")
    yield lab
    lab.close()


@pytest.mark.parametrize(
    "case",
    [
        pytest.param(case, id=case.name, marks=[pytest.mark.slow] * (case.name in LIKE_OTHERS))
        for case in CASES
        if case.sample
    ],
)
def test_a_drawn_fault_costs_nothing(lab, case):
    reason = case.missing()
    if reason is not None:
        pytest.skip(reason)
    said = {tried.label: attempt(lab, tried) for tried in case.drawn(lab, SEED, case.sample)}
    broken = {label: words for label, words in said.items() if words is not None}
    assert said and not broken, "\n\n".join(f"{label}: {words}" for label, words in broken.items())
