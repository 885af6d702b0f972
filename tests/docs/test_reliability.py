"""The page that tells what was tried to break a run: what is typed in it stays when it is written anew."""

from __future__ import annotations

from pathlib import Path

from tests.faults.cases import CASES
from tests.faults.page import HEAD, KERNELS, rewrite

PAGE = Path(__file__).parents[2] / "docs" / "reliability.md"


def test_writing_keeps_what_is_said_of_kernels(tmp_path):
    path = tmp_path / "page.md"
    path.write_text(f"old\n{KERNELS}\nchecked\n", encoding="utf-8")
    rewrite(path, "new\n")
    assert path.read_text(encoding="utf-8") == f"new\n{KERNELS}\nchecked\n"
    rewrite(tmp_path / "first.md", "new\n")
    assert (tmp_path / "first.md").read_text(encoding="utf-8") == "new\n"


def test_the_page_tells_every_case():
    page = PAGE.read_text(encoding="utf-8")
    assert page.startswith(HEAD) and page.count(KERNELS) == 1
    for case in CASES:
        assert f"| `{case.name}` | {case.fault} | {case.holds} |" in page.replace("\\|", "|"), case.name
