"""A case of the campaign: a fault, what must hold under it, and its tries."""

from __future__ import annotations

import random
from collections.abc import Callable, Iterable
from dataclasses import dataclass, field

from tests.faults.lab import Lab, Place


@dataclass(frozen=True)
class Try:
    """One fault in one place; ``run`` raises AssertionError where the contract is broken."""

    label: str
    run: Callable[[Place], None] = field(compare=False)


@dataclass(frozen=True)
class Case:
    """Faults of one kind.

    Attributes:
        name: a slug.
        fault: what is done, for the table.
        holds: what must hold, for the table.
        tries: all of them, of a lab and a seed.
        sample: how many of them the suite draws.
        missing: what this machine lacks for the case; None: nothing.
    """

    name: str
    fault: str
    holds: str
    tries: Callable[[Lab, int], Iterable[Try]]
    sample: int = 1
    missing: Callable[[], str | None] = lambda: None

    def drawn(self, lab: Lab, seed: int, count: int | None) -> list[Try]:
        """``count`` tries; None: all."""
        tries = list(self.tries(lab, seed))
        if count is None or count >= len(tries):
            return tries
        return random.Random(f"{seed} {self.name}").sample(tries, count)
