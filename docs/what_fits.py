"""Writes docs/what-fits.md: what cards of 8 to 141 GB train, adapt and run, as `vb estimate` without a model answers.

python docs/what_fits.py            # all cards; some minutes on two cores, no GPU is needed
"""

from __future__ import annotations

import sys
from pathlib import Path

from vblackwell.machine.gpus import context_bytes, find_gpu
from vblackwell.machine.limits import HOST_SHARE
from vblackwell.machine.rates import assumed_rates
from vblackwell.planner.forecast import Machine
from vblackwell.planner.placement import Bounds
from vblackwell.planner.what_fits import TASKS, Fit, WhatFits, row_of
from vblackwell.tools.what_fits import assumptions
from vblackwell.units import GiB

PATH = Path(__file__).with_name("what-fits.md")
# Card, and RAM and disk with it in GiB.
MACHINES = (
    ("RTX 3070", 64, 500), ("RTX 3060", 64, 500), ("RTX 3090", 64, 500), ("A6000", 128, 1000), ("A100 80GB", 256, 2000),
    ("H200", 256, 2000),
)  # fmt: skip
# One of each size: a page of neighbours would say little more.
MODELS = (
    "gpt2-medium", "qwen2.5-0.5b", "llama-3.2-1b", "llama-3.2-3b", "llama-3-8b", "qwen2.5-14b", "qwen2.5-32b",
    "llama-3-70b", "llama-3.1-405b",
)  # fmt: skip
HEAD = "| | model | parameters | tokens/s | GPU | RAM | disk | |\n|---|---|---:|---:|---:|---:|---:|---|"


def place(card: str, ram_gib: int, disk_gib: int) -> Machine:
    """The machine, as fast as data sheets let expect, wherever this runs."""
    known = find_gpu(card)
    bounds = Bounds(
        known.total_bytes - context_bytes(known.capability), int(ram_gib * GiB * HOST_SHARE), disk_gib * GiB
    )
    return Machine(bounds, assumed_rates(known), capability=known.capability)


def markdown(found: list[Fit]) -> list[str]:
    """The rows of a Markdown table."""
    return [f"| {' | '.join(row_of(fit))} |" for fit in found]


def section(answers: WhatFits, card: str, ram_gib: int, disk_gib: int) -> str:
    """One card's table."""
    known = find_gpu(card)
    where = place(card, ram_gib, disk_gib)
    rows = [row for task in TASKS for row in markdown(answers.largest(task, where))]
    gigabytes = round(known.total_bytes / (10**9 if known.total_bytes % GiB else GiB))
    title = f"## {gigabytes} GB: {card}, {ram_gib} GiB of RAM, {disk_gib} GiB of disk"
    command = f'vb estimate --gpu "{card}" --ram {ram_gib}GiB --disk {disk_gib}GiB'
    return "\n".join([title, "", f"`{command}`", "", HEAD, *rows])


def head() -> str:
    """What stands above the tables."""
    some = place(*MACHINES[0])
    notes = [line.replace(some.rates.source, "the data sheet of each card") for line in assumptions(some)]
    intro = (
        "# What fits\n\nThe largest known models that a card trains, adapts and runs. `docs/what_fits.py` writes this "
        "page from the code that places and times\na run; no card but an H200 was measured, and your machine's answer "
        "is `vb estimate` without a model.\n"
    )
    notes.append(f"chosen from {', '.join(MODELS)}; `vb estimate` knows more")
    return "\n".join([intro, *(f"- {line}" for line in notes), ""])


def card_of(section_text: str) -> str:
    """The card that a table is of, by its title."""
    return section_text.partition(": ")[2].partition(",")[0]


def write(found: str) -> None:
    """Put one card's table into the page, in the order of `MACHINES`."""
    old = PATH.read_text(encoding="utf-8").split("\n## ")[1:] if PATH.exists() else []
    parts = {card_of("## " + text): "## " + text.strip() for text in old} | {card_of(found): found}
    ordered = [parts[card] for card, _, _ in MACHINES if card in parts]
    PATH.write_text("\n".join([head(), *("\n" + part + "\n" for part in ordered)]).rstrip() + "\n", encoding="utf-8")


if __name__ == "__main__":
    answers = WhatFits(MODELS, say=lambda text: print(text, file=sys.stderr, flush=True))
    for machine in MACHINES:
        if len(sys.argv) == 1 or machine[0] in sys.argv[1:]:
            write(section(answers, *machine))
