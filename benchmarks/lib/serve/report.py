"""Rows: what was measured, next to the floor and the aim of issue 30."""

from __future__ import annotations

from dataclasses import asdict, dataclass
from typing import Any

WIDTH = 55
HEAD = f"{'':{WIDTH}}{'value':>10}{'floor':>9}{'aim':>9}"


@dataclass(frozen=True)
class Row:
    """``value`` in ``unit``, None where it was not measured; ``note`` says why, or what it is made of. ``more``: where
    more of it is better."""

    section: str
    model: str
    what: str
    value: float | None
    unit: str = ""
    floor: float | None = None
    aim: float | None = None
    more: bool = False
    note: str = ""

    @property
    def verdict(self) -> str:
        if self.value is None:
            return "NOT MEASURED"
        if self.floor is None:
            return ""
        sign = 1 if self.more else -1
        if not sign * self.value >= sign * self.floor:
            return "MISSED"
        return "aim met" if self.aim is not None and sign * self.value >= sign * self.aim else "floor met"

    def line(self) -> str:
        words = f"{self.model} {self.what}" + (f", {self.unit}" if self.unit else "")
        sign = ">=" if self.more else "<="
        goals = "".join(f"{'' if goal is None else f'{sign}{goal:.3g}':>9}" for goal in (self.floor, self.aim))
        value = "" if self.value is None else f"{self.value:.4g}"
        return f"{words:{WIDTH}}{value:>10}{goals}  {self.verdict} {self.note}".rstrip()

    def cells(self) -> dict[str, Any]:
        """For the CSV file."""
        return asdict(self) | {"verdict": self.verdict}
