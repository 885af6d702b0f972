"""docs/what-fits.md says what docs/what_fits.py would write:
its head, its cards, and a card's quickest rows worked out again.
"""

from __future__ import annotations

import importlib.util
import re
import shlex
from pathlib import Path
from typing import Any

import pytest
import transformers

from vblackwell.machine.rates import assumed_rates
from vblackwell.planner.known_models import KNOWN_MODELS
from vblackwell.planner.what_fits import TASKS, WORDS, WhatFits
from vblackwell.tools import what_fits as command

ROOT = Path(__file__).parents[2]
PAGE = (ROOT / "docs" / "what-fits.md").read_text(encoding="utf-8")


def load() -> Any:
    spec = importlib.util.spec_from_file_location("what_fits_page", ROOT / "docs" / "what_fits.py")
    assert spec is not None and spec.loader is not None
    module = importlib.util.module_from_spec(spec)
    spec.loader.exec_module(module)
    return module


SCRIPT = load()


def section(card: str) -> str:
    return next(text for text in PAGE.split("\n## ")[1:] if SCRIPT.card_of("## " + text) == card)


def test_the_page_has_every_card_and_task():
    assert PAGE.startswith(SCRIPT.head())
    assert [SCRIPT.card_of("## " + text) for text in PAGE.split("\n## ")[1:]] == [
        card for card, _, _ in SCRIPT.MACHINES
    ]
    for card, ram, disk in SCRIPT.MACHINES:
        assert f'`vb estimate --gpu "{card}" --ram {ram}GiB --disk {disk}GiB`' in section(card)
        assert all(f"| {words} | " in section(card) for words in map(WORDS.get, TASKS))


@pytest.mark.parametrize("task", [pytest.param("run", marks=pytest.mark.slow), "train"])
def test_a_row_is_what_the_code_says(task):
    """Of the smallest card, the largest that stays on it."""
    rows = re.findall(rf"^\| {WORDS[task]} \| (\S+) .*$", section("RTX 3070"), re.MULTILINE)
    fit = WhatFits(SCRIPT.MODELS).fit(task, rows[-1], SCRIPT.place(*SCRIPT.MACHINES[0]), only_resident=True)
    assert fit is not None and SCRIPT.markdown([fit])[0] in section("RTX 3070").splitlines()


@pytest.mark.slow
def test_the_screen_of_one_model_is_what_is_printed(monkeypatch, capsys):
    """docs/estimate.md shows it up to what is to be typed."""
    pinned = re.findall(r"^transformers==(\S+)", (ROOT / "constraints.txt").read_text(encoding="utf-8"), re.MULTILINE)
    if [transformers.__version__] != pinned:
        pytest.skip(f"the page was printed with transformers {pinned[0]}, whose layers others need not equal")
    monkeypatch.setattr(command, "rates_of", assumed_rates)
    shown = (ROOT / "docs" / "estimate.md").read_text(encoding="utf-8").split("```\n")[1].split("\n...")[0].split("\n")
    model, *words = shlex.split(shown[0])[3:]
    gpu, ram, disk = words[1::2]
    assert command.ways_command(model, KNOWN_MODELS[model], gpu, ram, disk, as_json=False) == 0
    assert capsys.readouterr().out.startswith("\n".join(shown[1:]))
