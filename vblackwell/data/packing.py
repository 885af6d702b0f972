"""Sequences of many lengths into rows of one: best fit, longest first.

Plan only: which sequence goes into which row. Each takes the fullest row that still has room for it (Johnson's best fit decreasing,
at most 11/9 of the fewest rows possible and 6/9 of one more), so conversations of a few hundred tokens fill rows nearly whole.
"""

from __future__ import annotations

from bisect import bisect_left, insort

import numpy as np


def pack_rows(lengths: np.ndarray, row_length: int) -> list[list[int]]:
    """Indices of the sequences of each row; every sequence is in exactly one.

    Args:
        lengths: of the sequences, each at most ``row_length``.
        row_length: of a row.
    """
    rows: list[list[int]] = []
    open_rows: dict[int, list[int]] = {}  # rows by the room they have
    rooms: list[int] = []  # rooms that some row has, ascending
    for index in np.argsort(-lengths, kind="stable"):
        length = int(lengths[index])
        at = bisect_left(rooms, length)
        if at == len(rooms):
            rows.append([])
            row, room = len(rows) - 1, row_length
        else:
            room = rooms[at]
            row = open_rows[room].pop()
            if not open_rows[room]:
                del open_rows[room], rooms[at]
        rows[row].append(int(index))
        left = room - length
        if left:
            if left not in open_rows:
                insort(rooms, left)
            open_rows.setdefault(left, []).append(row)
    return rows
