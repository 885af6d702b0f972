"""What bench_attention.py prints of its rows: how many times as long others take, floors and aims."""

from __future__ import annotations

from typing import Any

from benchmarks.lib.results import WIDTH, goal_header, goal_line
from vblackwell.nn.attention.backends import BACKENDS

Rows = list[dict[str, Any]]
TIMES = ("forward_us", "backward_us", "both_us")
# floors and aims of forward and backward, by kind of case
GOALS = {
    "causal 128": ((1.15, 1.5), (0.8, 1.0)),
    "causal 64": ((1.0, 1.3), (0.8, 1.0)),
    "mask": ((1.2, 2.0), (1.0, 1.5)),
}
# Relative error of an output that is still right: bf16 rounds to 2^-9, and a sum of rounded probabilities comes to
# 2.3e-3.
WORST = 5e-3


def has_mask(name: str) -> bool:
    """Whether the case of this name reads a mask."""
    return name.startswith(("boolean", "additive"))


def runnable(systems: dict[str, dict[str, Any]]) -> dict[str, dict[str, Any]]:
    """A case's rows of what the dispatcher could run."""
    return {name: row for name, row in systems.items() if name in BACKENDS}


def by_case(rows: Rows) -> dict[str, dict[str, dict[str, Any]]]:
    found: dict[str, dict[str, dict[str, Any]]] = {}
    for row in rows:
        found.setdefault(row["case"], {})[row["system"]] = row
    return found


def ratios(rows: Rows) -> list[str]:
    """How many times as long every other system takes as the own kernel."""
    lines = [f"{'case':26} {'own over':16} {'forward':>8} {'backward':>8}"]
    for name, systems in by_case(rows).items():
        own = systems["triton"]
        for other in (n for n in systems if n not in ("triton", "dispatcher")):
            values = [systems[other][key] / own[key] for key in ("forward_us", "backward_us")]
            lines.append(f"{name:26} {other:16} {values[0]:8.2f} {values[1]:8.2f}")
    return lines


def goals(rows: Rows) -> list[str]:
    """A line a floor: its value, and whether it and the aim are met."""
    lines = [goal_header("ours")]
    for name, systems in by_case(rows).items():
        own, chosen, known = systems["triton"], systems["dispatcher"], runnable(systems)
        said = "right" if own["error"] <= WORST else "WRONG"  # as NaN is
        lines.append(f"{f'{name}: error of a head of the own forward':{WIDTH}} {own['error']:7.1e}   {WORST:g}  {said}")
        goal = next((g for kind, g in GOALS.items() if name.startswith(kind)), None)
        masked = has_mask(name)
        others = [n for n in systems if n == ("efficient" if masked else "flash")]
        for index, key in enumerate(TIMES):
            where = f"{name}: {key.removesuffix('_us')}"
            if (goal or masked) and others and key != "both_us":
                best = min(others, key=lambda other: systems[other][key])
                over = systems[best][key] / own[key]
                lines.append(goal_line(f"{where}, own over {best}", over, *(goal or GOALS["mask"])[index]))
            best = min(known, key=lambda other: known[other][key])
            ran = chosen["chosen_forward" if key == "forward_us" else "chosen"]
            words = f"{where}, dispatcher ({ran}) over the best ({best})"
            lines.append(goal_line(words, chosen["over_" + key.removesuffix("_us")], 0.98, 1.0))
    return lines
