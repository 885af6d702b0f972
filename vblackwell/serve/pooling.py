"""The rows (S, D) that a model has for a text, after its last norm, as one vector (D,): that of the last token, or the
mean of all. A text's rows come in one or several passes, and the vector must not depend on which: the sum is of whole
numbers, which no order of adding changes.
"""

from typing import Literal

from torch import Tensor

from vblackwell.errors import CorruptData

STEP, MAX_ROW = 2.0**-24, 2.0**16  # what is summed, and its largest number: 2**22 rows fit 63 bits
Rows = Literal["last", "mean"]


def add_rows(how: Rows, before_D: Tensor | None, rows_SD: Tensor) -> Tensor:
    """What is kept of a text with these rows, after ``before_D`` was of those before them. Raises CorruptData for
    numbers that are not finite, or beyond `MAX_ROW`."""
    if not bool((rows_SD.abs() <= MAX_ROW).all()):
        said = "not finite, or too large for a mean: its weights are damaged or overflow in this type; try fp32"
        raise CorruptData(f"the model's rows are {said}")
    if how == "last":
        return rows_SD[-1].float()
    sum_D = (rows_SD.double() / STEP).round().long().sum(0)
    return sum_D if before_D is None else before_D + sum_D


def vector_of(how: Rows, kept_D: Tensor, count: int) -> Tensor:
    """The vector of a text of ``count`` tokens, fp32 on the CPU."""
    return (kept_D if how == "last" else (kept_D.double() * (STEP / count)).float()).cpu()
