"""What low-rank adapters are to be: a value, and the text of the ``--lora`` flag."""

from __future__ import annotations

import math
from dataclasses import dataclass
from typing import Any

from vblackwell.errors import ConfigurationError, nearest


@dataclass(frozen=True)
class Lora:
    """Adapters ``x W^T + (alpha / rank) x A^T B^T``.

    Args:
        rank: rows of A.
        alpha: scale, by default twice the rank.
        dropout: of what goes into A.
        targets: last parts of the names of linears; by default all but the output head.

    Raises:
        ConfigurationError: a value out of range.
    """

    rank: int
    alpha: float | None = None
    dropout: float = 0.0
    targets: tuple[str, ...] | None = None

    def __post_init__(self) -> None:
        if self.rank < 1:
            raise ConfigurationError(f"rank {self.rank} of adapters: give at least 1, e.g. --lora 16")
        if self.alpha is not None and not (math.isfinite(self.alpha) and self.alpha > 0):
            raise ConfigurationError(f"alpha {self.alpha} of adapters: give a positive number")
        if not 0 <= self.dropout < 1:
            raise ConfigurationError(f"dropout {self.dropout} of adapters: give a share of at least 0 and below 1")

    @property
    def scale(self) -> float:
        """What the product of B and A is multiplied by."""
        return (2 * self.rank if self.alpha is None else self.alpha) / self.rank

    @classmethod
    def parse(cls, text: str) -> Lora:
        """``'16'`` or ``'16,alpha=32,dropout=0.05,targets=q_proj+v_proj'``.

        Raises:
            ConfigurationError: anything else.
        """
        rank, *more = text.split(",")
        known, values = ("alpha", "dropout", "targets"), dict[str, Any]()
        try:
            for item in more:
                key, equals, value = item.strip().partition("=")
                if key not in known or not equals:
                    raise ConfigurationError(
                        f"--lora {text!r}: {item.strip()!r} is none of alpha=, dropout=, targets={nearest(key, known)}"
                    )
                values[key] = tuple(filter(None, value.split("+"))) if key == "targets" else float(value)
            return cls(int(rank), **values)
        except ValueError as error:
            if isinstance(error, ConfigurationError):
                raise
            example = "--lora 16 or --lora 16,alpha=32,dropout=0.05,targets=q_proj+v_proj"
            raise ConfigurationError(f"--lora {text!r} cannot be read: write e.g. {example}") from None
