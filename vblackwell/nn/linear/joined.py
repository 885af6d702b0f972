"""Tensors that lie one behind the other in one storage, seen as one."""

from __future__ import annotations

from torch import Tensor


def joined(parts: list[Tensor]) -> Tensor | None:
    """The tensor whose rows (first dimension) are those of ``parts``, as a view without gradients; None if they do not lie so."""
    first, end = parts[0], parts[0].data_ptr()
    for part in parts:
        if part.data_ptr() != end or not part.is_contiguous():
            return None
        end += part.nbytes
    begin, row = first.storage_offset() * first.itemsize, first.shape[1:]
    if begin + end - first.data_ptr() > first.untyped_storage().nbytes():  # neighbours by chance
        return None
    # Not the first's own strides: those of a dimension of one say nothing.
    strides = [row[place:].numel() for place in range(len(row) + 1)]
    return first.detach().as_strided((sum(len(part) for part in parts), *row), strides)
