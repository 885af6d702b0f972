"""A line of a benchmark's table: a value, its floor and aim, and whether they are met."""

from __future__ import annotations

WIDTH = 66


def goal_header() -> str:
    """Above `goal_line`s."""
    return f"{'ours':{WIDTH}} {'value':>7}   floor / aim"


def goal_line(words: str, value: float, floor: float, aim: float) -> str:
    """``words`` and ``value``, of which more is better."""
    said = "aim met" if value >= aim else "floor met" if value >= floor else "MISSED"
    return f"{words:{WIDTH}} {value:7.3f}   {floor:g} / {aim:g}  {said}"
