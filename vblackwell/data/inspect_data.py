"""``vb train --inspect-data``: the first rows as the model will see them, token by token, and which are learnt."""

from __future__ import annotations

from collections.abc import Iterator
from typing import TYPE_CHECKING

import numpy as np

from vblackwell.nn.decoder.decoder import IGNORED_TARGET

if TYPE_CHECKING:
    from tokenizers import Tokenizer

    from vblackwell.data.dataset import Dataset

ROWS = 2


def inspect_lines(dataset: Dataset, tokenizer: Tokenizer) -> Iterator[str]:
    """A line a position of the first rows: place in its document, number and text of the token, and of the next where it is learnt."""
    for row, arrays in enumerate(zip(*dataset.batch(np.arange(min(ROWS, len(dataset)))), strict=True)):
        inputs, targets = (array.tolist() for array in arrays[:2])
        places = arrays[2].tolist() if len(arrays) > 2 else range(len(inputs))
        last = max((at for at, target in enumerate(targets) if target != IGNORED_TARGET), default=0)
        learnt = sum(target != IGNORED_TARGET for target in targets)
        yield f"row {row}: {learnt} of {len(inputs)} positions learn the token that follows"
        yield f"{'at':>6} {'token':>7}  {'text':<24} learns"
        for place, number, target in list(zip(places, inputs, targets, strict=True))[: last + 1]:
            text = repr(tokenizer.decode([number], skip_special_tokens=False))
            shown = "" if target == IGNORED_TARGET else repr(tokenizer.decode([target], skip_special_tokens=False))
            yield f"{place:>6} {number:>7}  {text:<24} {shown}".rstrip()
        if last + 1 < len(inputs):
            yield f"       (nothing is learnt in the {len(inputs) - last - 1} positions behind)"
