"""One model on several GPUs: tensor parallelism layer by layer, sharded data parallelism, a pipeline; what each costs.

Compute is that of one GPU, divided as the strategy divides it; collectives cost what `parallel.collectives` says.

*Tensor* (Shoeybi et al., Megatron-LM, 2019; the 2-D form after Xu et al., An Efficient 2D Method, 2021). X (M, K) times
W (K, N), elements of b bytes, p GPUs. What is not divided between layers is whole on every GPU (R), else divided by
features (S):

========  =======  ==========================================  ==========================================
layer     from/to  forward                                     backward
========  =======  ==========================================  ==========================================
column    R to S   nothing                                     all-reduce of M K b (from S: gather before,
                                                               reduce-scatter here)
row       S to R   all-reduce of M N b                         nothing (from R: all-gather of M K b)
hybrid    R to R   all-reduce of M (N / c) b among r GPUs,     all-reduce of M (K / r) b among c GPUs,
                   all-gather of M N b among c                 all-gather of M K b among r
========  =======  ==========================================  ==========================================

An S that must become an R is gathered, as are queries, keys and values before attention where heads do not divide. The
cheapest chain of choices is found exactly, by dynamic programming.

*FSDP* (Rajbhandari et al., ZeRO, 2020; Zhao et al., PyTorch FSDP, 2023): every GPU has its own batch; a unit's weights
are gathered before its forward and, but for the last, before its backward, one unit ahead, and its gradients reduced
and scattered after it; on one port.

*Pipeline* (Huang et al., GPipe, 2019; Narayanan et al., 2021): stages of consecutive units, m micro-batches; forwards,
then backwards, pass the stages and the links between them as a flow shop of equal jobs.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass, replace
from functools import partial

from vblackwell.errors import ConfigurationError
from vblackwell.planner.parallel.collectives import Cost, Link, cost_of, grid_of
from vblackwell.planner.parallel.layers import Layer, Size, legal_degree

KINDS = ("column", "row", "hybrid")
Net = tuple[int, str, Link]  # so many GPUs, their topology, the port of each
MICRO_BATCHES_A_STAGE = 4
NOTHING = Cost()
SMALL_SHARE = 0.01  # of the largest layer's elements: a router, a classifier; left whole on every GPU


@dataclass(frozen=True)
class Unit:
    """What is gathered, or put on a stage, as one: bytes of weights, seconds of its compute on one GPU."""

    weight_bytes: int
    forward: float
    backward: float


@dataclass(frozen=True)
class Workload:
    """A training step on one GPU that holds everything; ``layers`` and ``units`` in the order of the forward."""

    layers: tuple[Layer, ...]
    units: tuple[Unit, ...]
    parameters: int  # elements of all weights
    tokens: int  # in a step
    width: int  # bytes of an element of an activation
    products: float  # seconds of matrix products and attention
    others: float  # seconds of all else
    optimizer: float  # seconds of its operators
    state_bytes: int
    activation_bytes: int  # activations, logits, workspace at their most
    boundary_bytes: int  # of the activation between two blocks
    recompute: bool = False  # blocks run their forward twice
    sizes: tuple[Size, ...] = ()  # what a tensor-parallel group should divide
    attention: float = 0.0  # seconds of that alone


@dataclass(frozen=True)
class Strategy:
    """A step of ``tokens`` on several GPUs, or why it is ``refused``."""

    name: str  # 'tensor', 'tensor xN', 'column', 'row', 'hybrid', 'fsdp' or 'pipeline'
    step_seconds: float = 0.0
    tokens: int = 0
    communication_seconds: float = 0.0  # in which a GPU's port works
    exposed_seconds: float = 0.0  # of these, in which its compute waits
    sent_bytes: float = 0.0  # by each GPU
    # Tokens a second over those of as many GPUs that hold everything and send nothing; as each of those runs the whole
    # optimizer, sharded data can pass 1.
    efficiency: float = 0.0
    gpu_bytes: int = 0  # most that one holds, activations of a tensor-parallel step counted whole
    layers: tuple[tuple[str, str], ...] = ()  # (name, kind) of each layer, where layers are divided
    refused: str | None = None


def strategies(work: Workload, num_gpus: int, topology: str = "ring", link: Link | None = None) -> list[Strategy]:
    """All of them, the fastest first, those that are not possible last."""
    check_several(num_gpus, topology)
    net = num_gpus, topology, link or Link()
    found = [_tensor(work, net, KINDS, "tensor"), *(_tensor(work, net, (kind,), kind) for kind in KINDS)]
    if work.layers and 1 < (degree := legal_degree(work.sizes, num_gpus)) < num_gpus:
        found.append(_tensor(work, net, KINDS, f"tensor x{degree}", num_gpus // degree))
    found += [_fsdp(work, net), _pipeline(work, net)]
    alone = num_gpus * work.tokens / (work.products + work.others + work.optimizer)
    found = [
        each if each.refused else replace(each, efficiency=each.tokens / each.step_seconds / alone) for each in found
    ]
    return sorted(found, key=lambda each: (each.refused is not None, -each.efficiency))


def check_several(num_gpus: int, topology: str) -> None:
    """Raises ConfigurationError for fewer than two GPUs, or an unknown topology."""
    if isinstance(num_gpus, bool) or not isinstance(num_gpus, int) or not 2 <= num_gpus <= 1 << 16:
        raise ConfigurationError(f"{num_gpus} GPUs: a plan for several needs 2 to 65536")
    cost_of("all_reduce", 1, num_gpus, topology)


# -- tensor parallelism ------------------------------------------------------------------------------------------------


def layer_cost(
    layer: Layer, kind: str, divided: bool, width: int, num_gpus: int, topology: str = "ring"
) -> tuple[Cost, Cost]:
    """(forward, backward) of one layer; ``divided``: its input arrives as S. Its output is the table's."""
    cost = partial(cost_of, num_gpus=num_gpus, topology=topology)
    made, taken = layer.rows * layer.out_features * width, layer.rows * layer.in_features * width
    gathered = cost("all_gather", taken) if divided else NOTHING
    if kind == "column":
        return gathered, cost("reduce_scatter" if divided else "all_reduce", taken)
    if kind == "row":
        return cost("all_reduce", made), NOTHING if divided else cost("all_gather", taken)
    if kind == "hybrid":
        rows, columns = grid_of(num_gpus)
        forward = cost("all_reduce", made / columns, num_gpus=rows) + cost("all_gather", made, num_gpus=columns)
        backward = cost("all_reduce", taken / rows, num_gpus=columns) + cost("all_gather", taken, num_gpus=rows)
        return gathered + forward, backward
    return gathered, NOTHING  # whole


_Chain = tuple[float, Cost, tuple[str, ...]]  # the best way to a layout: seconds, cost of both directions, kinds so far


def _cheapest(work: Workload, net: Net, kinds: Sequence[str]) -> _Chain | str:
    """The chain of choices with the least communication; or in words the layer that none of ``kinds`` can divide."""

    def then(chain: _Chain, forward: Cost, backward: Cost, repeats: int, *kind: str) -> _Chain:
        seconds, cost, kinds = chain
        more = sum([forward] * repeats, start=backward)
        return seconds + more.seconds(link), cost + more, kinds + kind

    p, topology, link = net
    largest = max(layer.elements for layer in work.layers)
    cuts = {"column": (1, p), "row": (p, 1), "hybrid": grid_of(p)}  # input and output features, into so many parts
    repeats = 2 if work.recompute else 1  # the forward is computed, and communicated, so often
    best: dict[bool, _Chain] = {False: (0.0, NOTHING, ())}  # by whether the output is divided
    gather_before = NOTHING
    for index, layer in enumerate(work.layers):
        allowed = [
            kind
            for kind in kinds
            if layer.in_features % cuts[kind][0] == 0 and all(part % cuts[kind][1] == 0 for part in layer.parts)
        ]
        if layer.elements <= SMALL_SHARE * largest:
            allowed = ["whole"]
        if not allowed:
            made = " + ".join(f"{part:,}" for part in layer.parts)
            return f"{layer.name}, {layer.in_features:,} to {made} features, does not divide by {p} GPUs"
        following: dict[bool, _Chain] = {}
        for divided, chain in best.items():
            if divided and not (layer.joined and _divides(work.layers[index - 1].heads, p)):
                divided, chain = False, then(chain, gather_before, NOTHING, repeats)  # whole for what lies between
            for kind in allowed:
                costs = layer_cost(layer, kind, divided, work.width, p, topology)
                grown, layout = then(chain, *costs, repeats, kind), kind == "column"
                if layout not in following or grown[0] < following[layout][0]:
                    following[layout] = grown
        best = following
        gather_before = cost_of("all_gather", layer.rows * layer.out_features * work.width, p, topology)
    if True in best:
        best[True] = then(best[True], gather_before, NOTHING, 1)
    return min(best.values(), key=lambda chain: chain[0])


def _divides(heads: Sequence[int], num_gpus: int) -> bool:
    return all(count % num_gpus == 0 for count in heads)


def _tensor(work: Workload, net: Net, kinds: Sequence[str], name: str, groups: int = 1) -> Strategy:
    """Every layer divided by the cheapest of ``kinds``. Products and the optimizer are divided, other operators counted
    whole. Attention is divided where queries, keys and values arrive so, by heads, or heads are not known. Each of
    ``groups`` of GPUs has its own batch; gradients are added up after the backward.
    """
    p, topology, link = net[0] // groups, *net[1:]
    if not work.layers:
        return Strategy(name, refused="no linear layers were found")
    chain = _cheapest(work, (p, topology, link), kinds)
    if isinstance(chain, str):
        return Strategy(name, refused=chain)
    dividing, cost, chosen = chain
    pairs = list(zip(work.layers, chosen, strict=True))
    inside = [kind == "column" and _divides(layer.heads, p) for layer, kind in pairs if layer.heads]
    whole = work.attention * inside.count(False) / max(1, len(inside))
    compute = (work.products - whole + work.optimizer) / p + whole + work.others
    share = min(1.0, sum(layer.elements for layer, kind in pairs if kind != "whole") / work.parameters)
    held = 1 - share + share / p  # by each GPU, of the states, and so of gradients as wide as weights
    summed = cost_of("all_reduce", held * sum(unit.weight_bytes for unit in work.units), groups, topology)
    summing = summed.seconds(link)
    return Strategy(
        name,
        compute + dividing + summing,
        groups * work.tokens,
        communication_seconds=dividing + summing,
        exposed_seconds=dividing + summing,
        sent_bytes=cost.num_bytes + summed.num_bytes,
        gpu_bytes=int(work.state_bytes * held + work.activation_bytes),
        layers=tuple((layer.name, kind) for layer, kind in pairs),
    )


# -- sharded data parallelism, pipeline --------------------------------------------------------------------------------


def _fsdp(work: Workload, net: Net) -> Strategy:
    """All states divided; weights gathered and gradients scattered unit by unit; a batch on every GPU."""
    if not work.units:
        return Strategy("fsdp", refused="no layer groups were found")
    p, topology, link = net
    gather = [cost_of("all_gather", unit.weight_bytes, p, topology) for unit in work.units]
    scatter = [cost_of("reduce_scatter", unit.weight_bytes, p, topology) for unit in work.units]
    port = compute = begun = 0.0  # when each is free; when the compute before began
    for unit, cost in zip(work.units, gather, strict=True):
        port = max(port, begun) + cost.seconds(link)
        begun = max(compute, port)
        compute = begun + unit.forward
    ready = compute  # the last unit's weights are there
    for index in reversed(range(len(work.units))):
        if index < len(work.units) - 1:
            ready = max(port, begun) + gather[index].seconds(link)
            # The gradient before goes after the gather that was asked for first.
            port = max(ready, compute) + scatter[index + 1].seconds(link)
        begun = max(compute, ready)
        compute = begun + work.units[index].backward
    port = max(port, compute) + scatter[0].seconds(link)
    total = sum([*gather, *gather[:-1], *scatter], start=NOTHING)
    ideal = sum(unit.forward + unit.backward for unit in work.units)
    held = work.state_bytes / p + 3 * max(unit.weight_bytes for unit in work.units) + work.activation_bytes
    return Strategy(
        "fsdp",
        port + work.optimizer / p,
        p * work.tokens,
        communication_seconds=total.seconds(link),
        exposed_seconds=max(0.0, port - ideal),
        sent_bytes=total.num_bytes,
        gpu_bytes=int(held),
    )


def stages_of(units: Sequence[Unit], count: int) -> list[list[Unit]]:
    """``units`` cut into ``count`` runs so that the slowest takes least, by halving the time that is allowed."""

    def cut(most: float) -> list[list[Unit]]:
        runs: list[list[Unit]] = [[]]
        taken = 0.0
        for index, (unit, time) in enumerate(zip(units, times, strict=True)):
            must_end = len(units) - index <= count - len(runs)  # every stage needs one
            if runs[-1] and (taken + time > most or must_end):
                runs.append([])
                taken = 0.0
            runs[-1].append(unit)
            taken += time
        return runs

    times = [unit.forward + unit.backward for unit in units]
    low, high = max(times), sum(times)
    for _ in range(60):
        middle = (low + high) / 2
        low, high = (low, middle) if len(cut(middle)) <= count else (middle, high)
    return cut(high)


def flow_seconds(stages: Sequence[float], link_seconds: float, jobs: int) -> float:
    """Equal jobs through stages and the links between them, each doing one at a time."""
    through = [*stages, *[link_seconds] * (len(stages) - 1)]
    return sum(through) + (jobs - 1) * max(through)


def _pipeline(work: Workload, net: Net) -> Strategy:
    """Stages of consecutive units; ``work.tokens`` in each micro-batch."""
    p, _, link = net
    micro_batches = MICRO_BATCHES_A_STAGE * p
    if len(work.units) < p:
        return Strategy("pipeline", refused=f"{len(work.units)} layer groups do not make {p} stages")
    stages = stages_of(work.units, p)
    passing = Cost(1, work.boundary_bytes).seconds(link)
    times = [sum(unit.forward for unit in stage) for stage in stages], [sum(u.backward for u in s) for s in stages]
    seconds = sum(flow_seconds(each, passing, micro_batches) for each in times)
    weights = [sum(unit.weight_bytes for unit in stage) for stage in stages]
    share = max(weights) / max(1, sum(weights))
    ideal = micro_batches * sum(unit.forward + unit.backward for unit in work.units) / p
    return Strategy(
        "pipeline",
        seconds + work.optimizer * share,
        micro_batches * work.tokens,
        communication_seconds=2 * micro_batches * passing,
        exposed_seconds=max(0.0, seconds - ideal),
        sent_bytes=2 * micro_batches * work.boundary_bytes,
        gpu_bytes=int(work.state_bytes * share + work.activation_bytes),
    )
