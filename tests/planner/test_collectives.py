"""The costs of collectives against collectives that are carried out:
pieces of real numbers, moved step by step, ports counted.
"""

from __future__ import annotations

import random
from collections import defaultdict

import pytest

import vblackwell as vb
from vblackwell.errors import ConfigurationError
from vblackwell.planner.several_gpus import OPERATIONS, TOPOLOGIES, Cost, Link, cost_of, grid_of

Pieces = dict[tuple[int, ...], int]  # what a GPU holds: number of a piece (all-to-all: from, to) to its value


class Machine:
    """p GPUs; each step sends some pieces, and lasts a latency and the busiest port's bytes."""

    def __init__(self, holds: list[Pieces], piece_bytes: float) -> None:
        self.holds, self.piece_bytes, self.steps, self.num_bytes = holds, piece_bytes, 0, 0.0

    def step(
        self, messages: list[tuple[int, int, list[tuple[int, ...]]]], add: bool = False, give: bool = False
    ) -> None:
        """(from, to, pieces) all at once. ``add``: to what is there. ``give``: the sender keeps no copy."""
        out, into = defaultdict(int), defaultdict(int)
        moved = [
            (source, to, {piece: self.holds[source][piece] for piece in pieces}) for source, to, pieces in messages
        ]
        for source, to, found in moved:
            out[source] += len(found)
            into[to] += len(found)
            if give:
                for piece in found:
                    del self.holds[source][piece]
        for _, to, found in moved:
            for piece, value in found.items():
                self.holds[to][piece] = value + (self.holds[to].get(piece, 0) if add else 0)
        self.steps += 1
        self.num_bytes += max([*out.values(), *into.values()]) * self.piece_bytes


def rings(members: list[list[int]], machine: Machine, owned: dict[int, list[tuple[int, ...]]], reduce: bool) -> None:
    """A ring all-gather of what each member owns, in all rings at once;
    or, with ``reduce``, a reduce-scatter onto the owners.
    """
    size = len(members[0])
    for k in range(size - 1):
        messages = []
        for ring in members:
            for place, gpu in enumerate(ring):
                # Gather: what I own goes round. Reduce: the sum for an owner starts after it and ends there.
                owner = ring[(place - k - 1) % size] if reduce else ring[(place - k) % size]
                messages.append((gpu, ring[(place + 1) % size], owned[owner]))
        machine.step(messages, add=reduce, give=reduce)


def lines_of(p: int, topology: str) -> list[list[list[int]]]:
    """The rings of each phase of a gather."""
    if topology == "ring":
        return [[list(range(p))]]
    rows, columns = grid_of(p)
    across = [[row * columns + column for column in range(columns)] for row in range(rows)]
    down = [[row * columns + column for row in range(rows)] for column in range(columns)]
    return [across, down]


def gather(machine: Machine, p: int, topology: str) -> None:
    owned = {gpu: [(gpu,)] for gpu in range(p)}
    if topology == "all_to_all":
        machine.step([(a, b, owned[a]) for a in range(p) for b in range(p) if a != b])
        return
    for lines in lines_of(p, topology):
        if len(lines[0]) > 1:
            rings(lines, machine, owned, reduce=False)
        for line in lines:
            together = [piece for gpu in line for piece in owned[gpu]]
            owned |= dict.fromkeys(line, together)


def scatter(machine: Machine, p: int, topology: str) -> None:
    """Ends with each GPU holding the sum of piece number gpu, and nothing else that counts."""
    if topology == "all_to_all":
        machine.step([(a, b, [(b,)]) for a in range(p) for b in range(p) if a != b], add=True, give=True)
        return
    phases = lines_of(p, topology)
    wanted: list[dict[int, list[tuple[int, ...]]]] = []
    owned = {gpu: [(gpu,)] for gpu in range(p)}
    for lines in phases:  # what each would have gathered so far, to be run backwards
        wanted.append(dict(owned))
        for line in lines:
            owned |= dict.fromkeys(line, [piece for gpu in line for piece in owned[gpu]])
    for lines, want in zip(reversed(phases), reversed(wanted), strict=True):
        if len(lines[0]) > 1:
            rings(lines, machine, want, reduce=True)


def exchange(machine: Machine, p: int, topology: str) -> None:
    """Piece (a, b) goes from a to b."""
    if topology == "all_to_all":
        machine.step([(a, b, [(a, b)]) for a in range(p) for b in range(p) if a != b], give=True)
        return
    rows, columns = grid_of(p)
    for phase, lines in enumerate(lines_of(p, topology)):
        size = len(lines[0])
        for _ in range(size - 1):
            messages = []
            for line in lines:
                for place, gpu in enumerate(line):

                    def arrived(piece: tuple[int, ...], gpu: int = gpu, phase: int = phase) -> bool:
                        if topology == "ring":
                            return piece[1] == gpu
                        return piece[1] % columns == gpu % columns if phase == 0 else piece[1] == gpu

                    moving = [piece for piece in machine.holds[gpu] if not arrived(piece)]
                    messages.append((gpu, line[(place + 1) % size], moving))
            machine.step(messages, give=True)


def carried_out(operation: str, p: int, topology: str, num_bytes: float, draw: random.Random) -> Cost:
    """The operation itself; it fails if any GPU ends with the wrong numbers."""
    values = [[draw.randrange(1000) for _ in range(p)] for _ in range(p)]
    sums = {(piece,): sum(row[piece] for row in values) for piece in range(p)}
    if operation == "all_to_all":
        machine = Machine([{(a, b): values[a][b] for b in range(p)} for a in range(p)], num_bytes / p)
        exchange(machine, p, topology)
        assert machine.holds == [{(a, b): values[a][b] for a in range(p)} for b in range(p)]
    elif operation == "all_gather":
        machine = Machine([{(gpu,): values[gpu][gpu]} for gpu in range(p)], num_bytes / p)
        gather(machine, p, topology)
        assert all(held == {(gpu,): values[gpu][gpu] for gpu in range(p)} for held in machine.holds)
    else:
        machine = Machine([{(piece,): row[piece] for piece in range(p)} for row in values], num_bytes / p)
        scatter(machine, p, topology)
        assert machine.holds == [{(gpu,): sums[gpu,]} for gpu in range(p)]
        if operation == "all_reduce":
            gather(machine, p, topology)
            assert all(held == sums for held in machine.holds)
    return Cost(machine.steps, machine.num_bytes)


@pytest.mark.parametrize("topology", TOPOLOGIES)
@pytest.mark.parametrize("operation", OPERATIONS)
def test_costs_are_those_of_the_steps(operation, topology):
    draw = random.Random(7)
    for p in (2, 3, 4, 6, 8, 9, 12, 16):
        num_bytes = draw.randrange(1, 1000) * p
        expected = carried_out(operation, p, topology, num_bytes, draw)
        found = cost_of(operation, num_bytes, p, topology)
        assert found.steps == expected.steps, p
        assert found.num_bytes == pytest.approx(expected.num_bytes, rel=1e-12), p  # sums of floats in another order


def test_one_gpu_pays_nothing_and_more_of_anything_costs_more():
    for topology in TOPOLOGIES:
        assert vb.communication_cost(1 << 30, 1, topology) == 0.0
        costs = [vb.communication_cost(1 << 26, p, topology) for p in (2, 4, 16, 64)]
        assert costs == sorted(costs) and costs[0] > 0
        assert vb.communication_cost(1 << 27, 4, topology) > vb.communication_cost(1 << 26, 4, topology)
    small, many = 1024, 64
    assert (
        vb.communication_cost(small, many, "all_to_all")
        < vb.communication_cost(small, many, "mesh")
        < vb.communication_cost(small, many, "ring")
    )


def test_seconds_are_latency_and_bytes():
    link = Link(1e-3, 1e6)
    assert vb.communication_cost(4e6, 4, "ring", link=link) == pytest.approx(6 * 1e-3 + 6.0)
    assert vb.communication_cost(4e6, 4, "all_to_all", "all_gather", link) == pytest.approx(1e-3 + 3.0)


def test_refusals():
    for arguments, words in (
        ((1, 2, "rings"), "did you mean 'ring'"),
        ((1, 2, "ring", "all_reduces"), "did you mean 'all_reduce'"),
        ((-1, 2), "num_bytes is -1"),
        ((float("nan"), 2), "num_bytes is nan"),
        ((1, 0), "num_gpus is 0"),
        ((1, 2.5), "num_gpus is 2.5"),
    ):
        with pytest.raises(vb.ConfigurationError, match=words):
            vb.communication_cost(*arguments)


@pytest.mark.parametrize("given", [(-1e-6, 1e9), (1e-6, 0.0), (1e-6, float("nan"))])
def test_a_link_that_cannot_be_is_refused(given: tuple[float, float]):
    with pytest.raises(ConfigurationError, match="give a latency of at least 0, a rate above 0"):
        Link(*given)
