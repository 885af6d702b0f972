"""The phases of a layer group: only the transitions of the table are possible."""

from __future__ import annotations

import pytest

from vblackwell.offload.movement.state import GroupState, Phase


@pytest.mark.parametrize(
    "phases",
    [
        [Phase.LOADING, Phase.LOADED, Phase.STORED],
        [Phase.LOADING, Phase.LOADED, Phase.EARLY, Phase.LOADING, Phase.LOADED],
        [Phase.EARLY, Phase.STORED, Phase.DUE, Phase.UPDATING, Phase.STORED],
    ],
)
def test_a_group_goes_through_its_phases(phases: list[Phase]):
    state = GroupState()
    for phase in phases:
        state.to(phase)
        assert state.phase is phase


@pytest.mark.parametrize(
    ("before", "after"),
    [
        (Phase.STORED, Phase.LOADED),  # nothing was copied
        (Phase.EARLY, Phase.DUE),  # one step's update after another's that was neither committed nor rolled back
        (Phase.EARLY, Phase.EARLY),
        (Phase.DUE, Phase.STORED),  # the step's update would be lost
        (Phase.UPDATING, Phase.LOADING),  # a load that is not ordered after the update
    ],
)
def test_other_transitions_are_refused(before: Phase, after: Phase):
    state = GroupState(phase=before)
    with pytest.raises(AssertionError, match=f"{before.name} to {after.name}"):
        state.to(after)
