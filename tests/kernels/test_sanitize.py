"""What `make sanitize` runs, without a GPU:
no kernel is forgotten, Triton's cases run in the interpreter, reports are read.
"""

import ast
import re
from pathlib import Path

import pytest

from tests.kernels import sanitize, sanitized
from vblackwell.kernels.runtime import nvrtc

PACKAGE = Path(nvrtc.__file__).parents[2]
TRITON = [name for name, case in sanitized.CASES.items() if all("." in kernel for kernel in case.kernels)]
HOPPER = "attention_hopper"


def shipped() -> set[str]:
    """CUDA kernels by name, and Triton's that are launched by module and name."""
    found = set()
    for path in (PACKAGE / "kernels").rglob("*.cu*"):
        text = re.sub(r"//.*|^#.*", "", path.read_text(), flags=re.MULTILINE)
        names = re.findall(r"__global__\s+(?:void|__\w+__\([^)]*\)|\s)*(\w+)\(", text)
        assert text.count("__global__") == len(names), path
        found |= set(names)
    texts = [(path.stem, path.read_text()) for path in PACKAGE.rglob("*.py")]
    trees = [(stem, ast.parse(text)) for stem, text in texts if "jit" in text]  # parsing every file takes seconds
    jitted = {
        (stem, node.name)
        for stem, tree in trees
        for node in ast.walk(tree)
        if isinstance(node, ast.FunctionDef) and any("jit" in ast.unparse(each) for each in node.decorator_list)
    }
    # A kernel that is launched is named in the host's code, of its own module or of one that imports it.
    named = re.compile(r"\b(?:" + "|".join({name for _, name in jitted}) + r")\b")
    trees += [(stem, ast.parse(text)) for stem, text in texts if "jit" not in text and named.search(text)]
    for stem, tree in trees:
        names = {name: module for module, name in jitted if module == stem}
        for node in ast.walk(tree):
            if isinstance(node, ast.ImportFrom):
                module = str(node.module).rpartition(".")[2]
                names |= {each.name: module for each in node.names if (module, each.name) in jitted}
        for node in tree.body:
            if isinstance(node, (ast.FunctionDef, ast.ClassDef)) and (stem, node.name) not in jitted:
                used = {each.id for each in ast.walk(node) if isinstance(each, ast.Name)}
                found |= {f"{names[name]}.{name}" for name in used if name in names}
    return found


def test_every_kernel_is_in_the_selection():
    named = {kernel for case in sanitized.CASES.values() for kernel in case.kernels}
    ours = named - set(sanitized.REDUCED_KERNELS)
    assert len(ours) >= 40 and shipped() == ours


@pytest.mark.parametrize("name", [name for name in TRITON if name != HOPPER])
def test_cases_launch_what_they_say(name):
    assert sanitized.run(name) == []


RACE = """========= COMPUTE-SANITIZER
========= Error: Race reported between Read access at attend_hopper+0x120 in hopper.py:{}
=========     and Write access at attend_hopper+0xa5e0 in hopper.py:{} [12 hazards]
=========
case attention_hopper took 3.5 s
========= Error: Race reported between Read access at handed_over_in_a_race+0x90 in false_reports.cu:58
=========     and Write access at handed_over_in_a_race+0x120 in false_reports.cu:58 [8 hazards]
=========
========= Error: Race reported between Read access at {}+0x90 in false_reports.cu:56
=========     and Write access at {}+0x120 in false_reports.cu:56 [8 hazards]
=========
case reduced took 0.1 s
all cases ran
========= RACECHECK SUMMARY: 3 hazards displayed (3 errors, 0 warnings)
"""
HOPPER_RULE, W4A8_RULE, MMA_RULE = sanitize.FALSE_REPORTS


def judged(lines, also):
    found = sanitize.read(RACE.format(*lines, also, also), sanitize.ERRORS)
    assert found.total == 3 and not found.failure and found.seconds == {"attention_hopper": 3.5, "reduced": 0.1}
    standing, said, missed = sanitize.verdict(found.reports)
    assert missed == ["racecheck: sees no race in counted_in_a_race, which is one"]
    return [report.kernel(["attend_hopper"]) for report in standing], said


def test_reports_are_false_only_where_their_barriers_are_reported_alone():
    """On Triton's own lines, and while the same barriers are reported where there is no race."""
    first, parting = sorted(HOPPER_RULE.numbers("hopper.py"))
    kept, said = judged((parting, first), "handed_over_beside_part")
    assert kept == [] and "1 reports are false" in said[0]
    assert judged((parting, first), "handed_over_by_whole") == (["attend_hopper"], [])
    assert judged((200, first), "handed_over_beside_part") == (["attend_hopper"], [])


def test_every_line_of_a_false_report_is_there():
    """A line that was rewritten is to be judged anew."""
    assert len(W4A8_RULE.numbers("w4a8.cu")) == 4
    assert [len(MMA_RULE.numbers(name)) for name in ("ptx.cuh", "fp4_mma.cu", "norm_rows.cuh")] == [
        2,
        1,
        1,
    ]  # a statement of two lines
    assert not MMA_RULE.numbers("w4a8.cu")
    kernels = set(sanitized.REDUCED_KERNELS)
    assert {name for rule in sanitize.FALSE_REPORTS for name in (rule.reported, rule.held)} <= kernels
    assert set(sanitize.RACES) <= kernels
    text = sanitized.REDUCED.read_text()
    assert all(f"({name}, " in text for name in kernels)


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
    assert [report.kernel(["adamw"]) for report in found.reports] == ["adamw"] and not found.failure
    assert "2 errors, of which 1" in sanitize.read(MEMORY.format(2), sanitize.ERRORS).failure
    assert "exit status 0" in sanitize.read(MEMORY.format(1), 0).failure
    assert "did not end" in sanitize.read(MEMORY.format(1).replace("all cases ran", ""), 1).failure
    assert not sanitize.read("all cases ran\n========= ERROR SUMMARY: 0 errors\n", 0).failure


def test_each_case_is_run_once():
    names = list(sanitized.CASES)
    assert sorted(name for group in sanitize.groups(names) for name in group) == sorted(names)
