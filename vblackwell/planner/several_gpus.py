"""``vb estimate --gpus N``: a step on several GPUs that divide all states among them (fully sharded data parallelism).

After Rajbhandari et al. (ZeRO, 2020) and Zhao et al. (PyTorch FSDP, 2023): every GPU has a batch; a layer group's
weights are gathered before its forward and, but for the last, before its backward, one group ahead, and its gradients
reduced and scattered after it; on one port. Compute is that of one GPU, collectives cost what `planner.collectives`
says. Dividing layers themselves (tensor and pipeline parallelism) is for models whose states fit that way: torchtitan.
"""

from collections.abc import Sequence
from dataclasses import asdict, dataclass
from typing import Any

from torch import nn

from vblackwell.errors import ConfigurationError
from vblackwell.machine.gpus import KnownGPU, context_bytes
from vblackwell.machine.rates import BOTH_SHARE, rates_of
from vblackwell.offload.layout.groups import EXACT, find_groups
from vblackwell.planner.collectives import Cost, Link, cost_of
from vblackwell.planner.memory_estimate import NOT_STATE, Run, peak_of, state_bytes
from vblackwell.trace.trace import Trace
from vblackwell.trace.work import phase_seconds
from vblackwell.units import format_bytes


@dataclass(frozen=True)
class Unit:
    """What is gathered as one: bytes of weights, seconds of its compute on one GPU."""

    weight_bytes: int
    forward: float
    backward: float


@dataclass(frozen=True)
class ShardedStep:
    """A step of ``tokens`` on ``num_gpus`` cards, joined in ``topology`` by ``link``, each with ``room`` free bytes."""

    num_gpus: int
    topology: str
    link: str
    room: int
    tokens: int  # of all GPUs
    step_seconds: float
    communication_seconds: float  # in which a GPU's port works
    exposed_seconds: float  # of these, in which its compute waits
    sent_bytes: float  # by each GPU
    efficiency: float  # of as many GPUs that hold all and send nothing: above 1 where dividing the optimizer saves more
    gpu_bytes: int  # most that one holds

    @property
    def fits(self) -> bool:
        return self.gpu_bytes <= self.room

    def as_dict(self) -> dict[str, Any]:
        return asdict(self) | {"fits": self.fits}

    def lines(self) -> list[str]:
        return [
            f"on {self.num_gpus} such GPUs that divide all states (FSDP; {self.topology}; {self.link}):",
            f"  {self.tokens / self.step_seconds:,.0f} tokens/s, {self.efficiency:.0%} of as many resident GPUs; "
            f"{self.exposed_seconds / self.step_seconds:.0%} of the step waits; each sends "
            f"{format_bytes(int(self.sent_bytes))} and holds {format_bytes(self.gpu_bytes)}, which "
            f"{'fits' if self.fits else 'does not fit'}",
        ]


def check_several(num_gpus: int, topology: str) -> None:
    """Raises ConfigurationError for fewer than two GPUs, or an unknown topology."""
    if isinstance(num_gpus, bool) or not isinstance(num_gpus, int) or not 2 <= num_gpus <= 1 << 16:
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
    units = _units(run.model(), forward, compute - forward)
    total, sent, exposed = flow(units, num_gpus, topology, Link(bytes_per_second=rate))
    step = compute + exposed + optimizer / num_gpus
    held = state_bytes(trace) / num_gpus + 3 * max(unit.weight_bytes for unit in units)
    return ShardedStep(
        num_gpus,
        topology,
        f"{kind}, {rate / 1e9:.0f} GB/s each way by the data sheet of {card.name}",
        gpu_bytes - context_bytes(run.capability),
        num_gpus * batch_size * run.seq_length,
        step,
        communication_seconds=total,
        exposed_seconds=exposed,
        sent_bytes=sent,
        efficiency=(compute + optimizer) / step,
        gpu_bytes=int(held + peak_of(trace, NOT_STATE, outside="optimizer")),
    )


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
