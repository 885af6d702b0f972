"""The order of use that is learned keeps its length, however the model's parts are called."""

from __future__ import annotations

from vblackwell.offload.layout.groups import MAX_PASS, AccessTrace


def test_a_pass_that_nobody_begins_does_not_grow_without_bound():
    trace = AccessTrace()
    for use in range(2 * MAX_PASS + 6):  # the root's forward never runs
        trace.use(use % 4)
    assert len(trace._current) == 6 and len(trace.last_pass) == MAX_PASS
    assert trace.upcoming(3) == [2, 3, 0] and trace.next_use(1) == 3
