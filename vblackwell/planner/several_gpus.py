"""``vb estimate --gpus N``: a step on several GPUs that divide all states among them (fully sharded data parallelism).

After Rajbhandari et al. (ZeRO, 2020) and Zhao et al. (PyTorch FSDP, 2023): every GPU has a batch; a layer group's
weights are gathered before its forward and, but for the last, before its backward, one group ahead, and its gradients
reduced and scattered after it; on one port. Compute is that of one GPU. Dividing layers themselves (tensor and pipeline
parallelism) is for models whose states fit that way: torchtitan.

Collectives cost what the alpha-beta model says: a message takes a latency and its bytes over the rate of a GPU's port.
One port a GPU, both ways at once; a step of a collective lasts as long as its busiest port. Rings after Patarasuk and
Yuan (Bandwidth optimal all-reduce, 2009); meshes, along rows and then columns, after Chan et al. (Collective
communication, 2007, "bucket" algorithms); direct exchange after the same and Thakur, Rabenseifner and Gropp (2005).
"""

from collections.abc import Sequence
from dataclasses import asdict, dataclass
from typing import Any

from torch import nn

from vblackwell.errors import ConfigurationError, check_known
from vblackwell.machine.gpus import KnownGPU, context_bytes
from vblackwell.machine.rates import BOTH_SHARE, rates_of
from vblackwell.offload.layout.groups import EXACT, find_groups
from vblackwell.planner.memory_estimate import NOT_STATE, Run, peak_of, state_bytes
from vblackwell.trace.trace import Trace
from vblackwell.trace.work import phase_seconds
from vblackwell.units import format_bytes

TOPOLOGIES = ("ring", "mesh", "all_to_all")
OPERATIONS = ("all_reduce", "all_gather", "reduce_scatter", "all_to_all")


@dataclass(frozen=True)
class Link:
    """A GPU's port to its peers, each way. By default as copies over an H200's link (64 KiB took 19 us, the bytes alone
    1.2), and PCIe 4.0 x16 at the share of its nominal rate that they reach."""

    latency_seconds: float = 10e-6
    bytes_per_second: float = 0.87 * 31.5e9

    def __post_init__(self) -> None:
        if not self.latency_seconds >= 0 or not self.bytes_per_second > 0:
            found = f"a link of {self.latency_seconds} s and {self.bytes_per_second} bytes/s"
            raise ConfigurationError(f"{found}: give a latency of at least 0, a rate above 0")


@dataclass(frozen=True)
class Cost:
    """Steps in a row, and the bytes that a port sends in all of them."""

    steps: int = 0
    num_bytes: float = 0.0

    def __add__(self, other: "Cost") -> "Cost":
        return Cost(self.steps + other.steps, self.num_bytes + other.num_bytes)

    def seconds(self, link: Link) -> float:
        return self.steps * link.latency_seconds + self.num_bytes / link.bytes_per_second


def grid_of(num_gpus: int) -> tuple[int, int]:
    """(rows, columns) of the squarest mesh of ``num_gpus``; a prime number is one row."""
    rows = next(each for each in range(int(num_gpus**0.5), 0, -1) if num_gpus % each == 0)
    return rows, num_gpus // rows


def cost_of(operation: str, num_bytes: float, num_gpus: int, topology: str = "ring") -> Cost:
    """Steps and bytes of one collective of n bytes (all-reduce: on every GPU; all-gather: gathered; reduce-scatter:
    before; all-to-all: one GPU's) on p GPUs, a mesh of r rows and c columns:

    ============== ============================= ======================================= ==============================
    steps, bytes   ring                          mesh                                    all_to_all
    ============== ============================= ======================================= ==============================
    all_gather     p - 1, n (p - 1) / p          r + c - 2, n (p - 1) / p                1, n (p - 1) / p
    reduce_scatter the same                      the same                                the same
    all_reduce     the two above, one after the other
    all_to_all     p - 1, n (p - 1) / 2          r + c - 2, n (r + c - 2) / 2            1, n (p - 1) / p
    ============== ============================= ======================================= ==============================

    An all-to-all on a ring passes the pieces on: in its step k every GPU still has p - k of them to send. Raises
    ConfigurationError for an unknown operation or topology, fewer than one GPU, negative bytes.
    """
    check_known("operation", operation, OPERATIONS)
    check_known("topology", topology, TOPOLOGIES)
    if isinstance(num_gpus, bool) or not isinstance(num_gpus, int) or num_gpus < 1:
        raise ConfigurationError(f"num_gpus is {num_gpus!r}: give a whole number of at least 1")
    if not num_bytes >= 0:
        raise ConfigurationError(f"num_bytes is {num_bytes}: give at least 0")
    if num_gpus == 1:
        return Cost()
    rows, columns = grid_of(num_gpus) if topology == "mesh" else (1, num_gpus)
    steps = 1 if topology == "all_to_all" else rows + columns - 2
    if operation == "all_to_all" and topology != "all_to_all":
        return Cost(steps, num_bytes * (rows + columns - 2) / 2)
    one = Cost(steps, num_bytes * (num_gpus - 1) / num_gpus)
    return one + one if operation == "all_reduce" else one


def communication_cost(
    num_bytes: float, num_gpus: int, topology: str = "ring", operation: str = "all_reduce", link: Link | None = None
) -> float:
    """Seconds of a collective of ``num_bytes``, those of the whole tensor, among ``num_gpus``, by `cost_of`'s formulas.

    Args:
        topology: 'ring', 'mesh' (rings along rows, then along columns) or 'all_to_all' (every GPU reaches every other).
        operation: 'all_reduce', 'all_gather', 'reduce_scatter' or 'all_to_all'.
        link: of each GPU; None: `Link`'s defaults. Errors are those of `cost_of`.
    """
    return cost_of(operation, num_bytes, num_gpus, topology).seconds(link or Link())


@dataclass(frozen=True)
class Unit:
    """What is gathered as one: bytes of weights, seconds of its compute on one GPU."""

    weight_bytes: int
    forward: float
    backward: float


@dataclass(frozen=True)
class ShardedStep:
    """A step of ``tokens`` on ``num_gpus`` cards, joined in ``topology`` by ``link``, each with ``free_bytes``."""

    num_gpus: int
    topology: str
    link: str
    free_bytes: int
    tokens: int  # of all GPUs
    step_seconds: float
    communication_seconds: float  # in which a GPU's port works
    exposed_seconds: float  # of these, in which its compute waits
    sent_bytes: float  # by each GPU
    efficiency: float  # of as many GPUs that hold all and send nothing: above 1 where dividing the optimizer saves more
    gpu_bytes: int  # most that one holds

    @property
    def fits(self) -> bool:
        return self.gpu_bytes <= self.free_bytes

    def as_dict(self) -> dict[str, Any]:
        return asdict(self) | {"fits": self.fits}

    def lines(self) -> list[str]:
        speed = f"{self.tokens / self.step_seconds:,.0f} tokens/s, {self.efficiency:.0%} of as many resident GPUs"
        waits = f"{self.exposed_seconds / self.step_seconds:.0%} of the step waits"
        sends, holds = format_bytes(int(self.sent_bytes)), format_bytes(self.gpu_bytes)
        each = f"each sends {sends} and holds {holds}, which {'fits' if self.fits else 'does not fit'}"
        head = f"on {self.num_gpus} such GPUs that divide all states (FSDP; {self.topology}; {self.link}):"
        return [head, f"  {speed}; {waits}; {each}"]


def check_several(num_gpus: int, topology: str) -> None:
    """Raises ConfigurationError for fewer than two GPUs, or an unknown topology."""
    if not isinstance(num_gpus, int) or not 2 <= num_gpus <= 1 << 16:
        raise ConfigurationError(f"{num_gpus} GPUs: a plan for several needs 2 to 65536")
    cost_of("all_reduce", 1, num_gpus, topology)


def sharded_step(
    run: Run, trace: Trace, batch_size: int, card: KnownGPU, gpu_bytes: int, num_gpus: int, topology: str
) -> ShardedStep:
    """For such cards, joined by NVLink or else PCIe, at the share of the nominal rate that an H200's link reaches."""
    kind = "NVLink" if card.nvlink_bytes else "PCIe, through the host"
    rate = BOTH_SHARE * (card.nvlink_bytes or card.link_bytes)
    seconds = phase_seconds(trace.work, rates_of(card))
    optimizer = seconds.pop("optimizer", 0.0)
    forward = seconds.get("forward", 0.0) + seconds.get("loss", 0.0)
    compute = sum(seconds.values())
    units = _units(run.model, forward, compute - forward)
    total, sent, exposed = flow(units, num_gpus, topology, Link(bytes_per_second=rate))
    step = compute + exposed + optimizer / num_gpus
    held = state_bytes(trace) / num_gpus + 3 * max(unit.weight_bytes for unit in units)
    held += peak_of(trace, NOT_STATE, outside="optimizer")
    joined = f"{kind}, {rate / 1e9:.0f} GB/s each way by the data sheet of {card.name}"
    free, tokens = gpu_bytes - context_bytes(run.capability), num_gpus * batch_size * run.seq_length
    efficiency = (compute + optimizer) / step
    return ShardedStep(num_gpus, topology, joined, free, tokens, step, total, exposed, sent, efficiency, int(held))


def flow(units: Sequence[Unit], num_gpus: int, topology: str, link: Link) -> tuple[float, float, float]:
    """(seconds in which the port works, bytes that a GPU sends, seconds in which compute waits) of one step."""
    gather = [cost_of("all_gather", unit.weight_bytes, num_gpus, topology) for unit in units]
    scatter = [cost_of("reduce_scatter", unit.weight_bytes, num_gpus, topology) for unit in units]
    port = compute = begun = 0.0  # when each is free; when the compute before began
    for unit, cost in zip(units, gather, strict=True):
        port = max(port, begun) + cost.seconds(link)
        begun = max(compute, port)
        compute = begun + unit.forward
    ready = compute  # the last unit's weights are there
    for index in reversed(range(len(units))):
        if index < len(units) - 1:
            ready = max(port, begun) + gather[index].seconds(link)
            # The gradient before goes after the gather that was asked for first.
            port = max(ready, compute) + scatter[index + 1].seconds(link)
        begun = max(compute, ready)
        compute = begun + units[index].backward
    port = max(port, compute) + scatter[0].seconds(link)
    total = sum([*gather, *gather[:-1], *scatter], start=Cost())
    return total.seconds(link), total.num_bytes, max(0.0, port - sum(unit.forward + unit.backward for unit in units))


def _units(model: nn.Module, forward: float, backward: float) -> tuple[Unit, ...]:
    """Layer groups, with the share of the step's seconds that theirs of the parameters that multiply tokens is."""
    looked_up = {id(p) for m in model.modules() if isinstance(m, nn.Embedding) for p in m.parameters(recurse=False)}
    groups = find_groups(model, None, None, EXACT)[0]
    counts = [sum(slot.num_elements for slot in group.slots if id(slot.param) not in looked_up) for group in groups]
    total = sum(counts) or 1
    return tuple(
        Unit(group.num_bytes, forward * count / total, backward * count / total)
        for group, count in zip(groups, counts, strict=True)
    )
