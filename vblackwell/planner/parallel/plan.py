"""``vb estimate --gpus N``: the strategies of `vblackwell.planner.parallel.strategies` for a run, as a table or JSON."""

from __future__ import annotations

import re
from collections import Counter
from collections.abc import Sequence
from dataclasses import asdict, dataclass, replace
from typing import Any

import torch
from torch import nn

from vblackwell.machine.gpus import KnownGPU, context_bytes
from vblackwell.machine.rates import Rates, rates_of
from vblackwell.offload.layout.groups import EXACT, find_groups
from vblackwell.planner.memory_estimate import NOT_STATE, Run, peak_of
from vblackwell.planner.parallel.collectives import peer_link
from vblackwell.planner.parallel.layers import (
    VOCABULARY,
    Layer,
    Size,
    legal_degree,
    linear_layers,
    undivided,
    with_heads,
)
from vblackwell.planner.parallel.strategies import Strategy, Unit, Workload, strategies
from vblackwell.trace.causal_lm import plain_batches
from vblackwell.trace.trace import Trace
from vblackwell.trace.work import phase_seconds
from vblackwell.units import format_bytes

NO_ISSUE = 1e-12  # seconds: operators are issued while others run


@dataclass(frozen=True)
class ParallelPlan:
    """What several cards of one kind make of a run.

    Attributes:
        strategies: the fastest first. link: in words. room: bytes of a GPU for a strategy.
        sizes: that a tensor-parallel group should divide.
    """

    num_gpus: int
    topology: str
    link: str
    room: int
    strategies: tuple[Strategy, ...]
    sizes: tuple[Size, ...] = ()

    @property
    def degree(self) -> int:
        """The most of these GPUs that may share one copy of the weights so that all but the vocabulary divides."""
        return legal_degree(self.sizes, self.num_gpus)

    def as_dict(self) -> dict[str, Any]:
        """Plain values; ``fits`` next to each strategy."""
        rows: list[dict[str, Any]] = []
        for each in self.strategies:
            row: dict[str, Any] = {"strategy": each.name}
            if each.refused:
                row["refused"] = each.refused
            else:
                values = asdict(each) | {"layers": dict(each.layers), "fits": self.fits(each)}
                row |= {name: value for name, value in values.items() if name not in ("name", "refused")}
            rows.append(row)
        return {
            "num_gpus": self.num_gpus, "topology": self.topology, "link": self.link, "strategies": rows,
            "tensor_sizes": {size.name: size.count for size in self.sizes}, "tensor_degree": self.degree,
        }  # fmt: skip

    def fits(self, strategy: Strategy) -> bool:
        """Whether one GPU holds its part."""
        return strategy.gpu_bytes <= self.room

    def lines(self) -> list[str]:
        """The same for people."""
        found = [
            f"  on {self.num_gpus} such GPUs ({self.topology}; {self.link}):",
            f"    {'':<10}{'tokens/s':>10}{'efficiency':>12}{'waiting':>9}{'sent a GPU':>12}{'one holds':>11}",
        ]
        for each in self.strategies:
            if each.refused:
                found.append(f"    {each.name:<10} not possible: {each.refused}")
                continue
            waiting, sent = each.exposed_seconds / each.step_seconds, format_bytes(int(each.sent_bytes))
            found.append(
                f"    "
                f"{each.name:<10}{each.tokens / each.step_seconds:>10,.0f}{each.efficiency:>12.0%}{waiting:>9.0%}{sent:>12}"
                f"{format_bytes(each.gpu_bytes):>11}  {'fits' if self.fits(each) else 'does not fit'}"
            )
        tensor = next((each for each in self.strategies if each.name.startswith("tensor") and each.layers), None)
        found += [f"    {line}" for line in self.division()]
        return found + ([f"    {tensor.name}: {', '.join(_brief(tensor.layers))}"] if tensor else [])

    def division(self) -> list[str]:
        """What the GPUs divide and what they do not, and what follows from that, a line each."""
        bad, p, degree = undivided(self.sizes, self.num_gpus), self.num_gpus, self.degree
        if not bad:
            return [f"tensor parallelism: {_listed(self.sizes)} divide by {p} GPUs"] if self.sizes else []
        found = [f"tensor parallelism: {_listed(bad)} do{'es' if _is_one(bad) else ''} not divide by {p} GPUs"]
        if all(size.name == VOCABULARY for size in bad):
            return [f"{found[0]}: the head is divided by its input features, or whole on every GPU"]
        possible = any(each.name == "tensor" and not each.refused for each in self.strategies)
        if possible and any(size.is_heads for size in bad):
            found.append("'tensor' gathers before attention, which every GPU computes whole; both are counted")
        if degree > 1:
            found.append(
                f"'tensor x{degree}' is {p // degree} groups of {degree} GPUs, which do divide; each has a separate "
                "batch"
            )
        else:
            found.append(
                f"no part of {p} GPUs divides: take {_listed(self._others(), 'or')} GPUs for tensor parallelism"
            )
        return found

    def _others(self) -> list[str]:
        """Numbers of GPUs near this one that divide all but the vocabulary."""
        below = [each for each in range(2, self.num_gpus) if legal_degree(self.sizes, each) == each]
        above = [
            each for each in range(self.num_gpus + 1, 2 * self.num_gpus + 1) if legal_degree(self.sizes, each) == each
        ]
        return [str(each) for each in (*below[-1:], *above[:1])] or ["other"]


def _is_one(sizes: Sequence[Size]) -> bool:
    return len(sizes) == 1 and not sizes[0].is_heads


def _listed(words: Sequence[object], last: str = "and") -> str:
    """'a, b and c'."""
    texts = [str(each) for each in words]
    return f" {last} ".join(filter(None, [", ".join(texts[:-1]), texts[-1]]))


def _brief(layers: Sequence[tuple[str, str]]) -> list[str]:
    """Equal layers of all blocks in one word."""
    counts = Counter((re.sub(r"\.\d+\.", ".*.", name), kind) for name, kind in layers)
    return [f"{name} {kind}{f' (x{count})' if count > 1 else ''}" for (name, kind), count in counts.items()]


def parallel_plan(
    run: Run, trace: Trace, batch_size: int, card: KnownGPU, gpu_bytes: int, num_gpus: int, topology: str
) -> ParallelPlan:
    """Strategies for ``num_gpus`` such cards.

    Raises:
        ConfigurationError: fewer than two GPUs, or an unknown topology.
    """
    link, words = peer_link(card)
    work = workload_of(run, trace, batch_size, rates_of(card))
    found = tuple(strategies(work, num_gpus, topology, link))
    return ParallelPlan(num_gpus, topology, words, gpu_bytes - context_bytes(run.capability), found, work.sizes)


def workload_of(run: Run, trace: Trace, batch_size: int, rates: Rates) -> Workload:
    """What ``run`` is on one GPU that holds it."""
    model, tokens = run.model(), batch_size * run.seq_length
    layers, sizes = with_heads(model, _layers(run, model, batch_size))
    seconds = phase_seconds(trace.work, rates)
    optimizer = seconds.pop("optimizer", 0.0)
    unissued = replace(rates, issue_seconds=NO_ISSUE)
    multiplying = [each for each in trace.work if each.flops and each.phase != "optimizer"]
    products = phase_seconds(multiplying, unissued)
    attention = phase_seconds([each for each in multiplying if each.kind == "attention"], unissued)
    width = 4 if run.precision == "fp32" else 2
    state = trace.total("weights") + sum(peak_of(trace, (category,)) for category in ("gradients", "optimizer"))
    forward = seconds.get("forward", 0.0) + seconds.get("loss", 0.0)
    backward = sum(seconds.values()) - forward
    return Workload(
        layers=layers,
        units=_units(model, forward, backward),
        parameters=trace.num_parameters,
        tokens=tokens,
        width=width,
        products=sum(products.values()),
        others=max(0.0, forward + backward - sum(products.values())),
        optimizer=optimizer,
        state_bytes=state,
        activation_bytes=peak_of(trace, NOT_STATE, outside="optimizer"),
        boundary_bytes=tokens * (layers[-1].in_features if layers else 0) * width,
        recompute=run.checkpointing,
        sizes=sizes,
        attention=sum(attention.values()),
    )


def _layers(run: Run, model: nn.Module, batch_size: int) -> tuple[Layer, ...]:
    tokens = torch.zeros((batch_size, run.seq_length), dtype=torch.int64, device="meta")
    with plain_batches():
        return linear_layers(model, lambda: run.spec.loss(model, {"input_ids": tokens, "labels": tokens}))


def _units(model: nn.Module, forward: float, backward: float) -> tuple[Unit, ...]:
    """Layer groups, and of the step's seconds what their share of the parameters that multiply tokens is."""
    looked_up = {id(p) for m in model.modules() if isinstance(m, nn.Embedding) for p in m.parameters(recurse=False)}
    groups = find_groups(model, None, None, EXACT)[0]
    counts = [sum(slot.num_elements for slot in group.slots if id(slot.param) not in looked_up) for group in groups]
    total = sum(counts) or 1
    return tuple(
        Unit(group.num_bytes, forward * count / total, backward * count / total)
        for group, count in zip(groups, counts, strict=True)
    )
