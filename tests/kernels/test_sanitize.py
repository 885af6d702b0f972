"""What `make sanitize` runs, without a GPU: no kernel is forgotten, Triton's cases run in the interpreter, reports are read."""

import ast
import re
from pathlib import Path

import pytest

from tests.kernels import sanitize, sanitized
from vblackwell.kernels import nvrtc

PACKAGE = Path(nvrtc.__file__).parents[1]
TRITON = [name for name, case in sanitized.CASES.items() if all("." in kernel for kernel in case.kernels)]
HOPPER = "attention_hopper"


def shipped() -> set[str]:
    """CUDA kernels by name, and Triton's that are launched by module and name."""
    found = set()
    for path in (PACKAGE / "kernels/cuda").iterdir():
        text = re.sub(r"//.*|^#.*", "", path.read_text(), flags=re.MULTILINE)
        names = re.findall(r"__global__\s+(?:void|__\w+__\([^)]*\)|\s)*(\w+)\(", text)
        assert text.count("__global__") == len(names), path
        found |= set(names)
    jitted, launched = {}, set()
    for path in PACKAGE.rglob("*.py"):
        for node in ast.walk(ast.parse(path.read_text())):
            if isinstance(node, ast.FunctionDef) and any("jit" in ast.unparse(each) for each in node.decorator_list):
                jitted.setdefault(node.name, set()).add(path.stem)
            if isinstance(node, ast.Call) and isinstance(node.func, ast.Subscript):
                launched.add((path.stem, ast.unparse(node.func.value).rpartition(".")[2]))
    for stem, name in launched:
        modules = jitted.get(name, set())
        found |= {f"{module}.{name}" for module in (modules & {stem} or modules)}
    return found


def test_every_kernel_is_in_the_selection():
    named = {kernel for case in sanitized.CASES.values() for kernel in case.kernels}
    ours = {kernel for kernel in named if not kernel.startswith("handed_over")}
    assert len(ours) > 40 and shipped() == ours


@pytest.mark.parametrize("name", [name for name in TRITON if name != HOPPER])
def test_cases_launch_what_they_say(name):
    assert sanitized.run(name) == []


RACE = """========= COMPUTE-SANITIZER
case attention_hopper took 3.5 s
all cases ran
========= Error: Race reported between Read access at attend_hopper+0x120 in attention_hopper.py:{}
=========     and Write access at attend_hopper+0xa5e0 in attention_hopper.py:{} [12 hazards]
=========
========= Error: Race reported between Read access at handed_over_{}+0x90
=========     and Write access at handed_over_{}+0x120 [8 hazards]
=========
========= RACECHECK SUMMARY: 2 hazards displayed (2 errors, 0 warnings)
"""


@pytest.mark.parametrize(
    ("lines", "also", "standing"),
    [
        ("own", "as_triton", []),
        ("own", "by_barrier_0", ["attend_hopper"]),  # nothing says that the tool takes such barriers for none
        ((200, "own"), "as_triton", ["attend_hopper"]),
    ],
)
def test_only_races_of_triton_s_own_barriers_are_false(lines, also, standing):
    own = sorted(sanitize.own_lines())
    assert len(own) == 2
    lines = [
        own[-1 if line == "own" else 0] if line == "own" else line
        for line in (lines if lines != "own" else ["own"] * 2)
    ]
    found = sanitize.read(RACE.format(*lines, also, also), sanitize.ERRORS)
    assert found.total == 2 and not found.failure and found.seconds == {"attention_hopper": 3.5}
    left, said = sanitize.verdict(found.reports)
    assert [report.kernel for report in left] == standing
    assert any(f"handed_over_{also}: 1 reports" in line for line in said)


MEMORY = """========= COMPUTE-SANITIZER
========= Invalid __global__ read of size 4 bytes
=========     at adamw+0x340 in adamw.cu:12
=========     by thread (3,0,0) in block (0,0,0)
=========
all cases ran
========= ERROR SUMMARY: {} error
"""


def test_reports_are_read_and_what_is_not_understood_fails():
    found = sanitize.read(MEMORY.format(1), sanitize.ERRORS)
    assert [report.kernel for report in found.reports] == ["adamw"] and not found.failure
    assert "2 errors, of which 1" in sanitize.read(MEMORY.format(2), sanitize.ERRORS).failure
    assert "exit status 0" in sanitize.read(MEMORY.format(1), 0).failure
    assert "did not end" in sanitize.read(MEMORY.format(1).replace("all cases ran", ""), 1).failure
    assert not sanitize.read("all cases ran\n========= ERROR SUMMARY: 0 errors\n", 0).failure


def test_each_case_is_run_once():
    names = list(sanitized.CASES)
    assert sorted(name for group in sanitize.groups(names) for name in group) == sorted(names)
