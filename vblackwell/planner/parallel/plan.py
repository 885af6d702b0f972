"""``vb estimate --gpus N``: the strategies of `vblackwell.planner.parallel.strategies` as a table or JSON."""

from __future__ import annotations

import re
from collections import Counter
from dataclasses import asdict, dataclass, replace
from typing import Any

import torch
from torch import nn

from vblackwell.machine.gpus import KnownGPU, context_bytes
from vblackwell.machine.rates import BOTH_SHARE, Rates, rates_of
from vblackwell.offload.layout.groups import EXACT, find_groups
from vblackwell.planner.memory_estimate import NOT_STATE, Run, peak_of, state_bytes
from vblackwell.planner.parallel.collectives import Link
from vblackwell.planner.parallel.layers import VOCABULARY, Size, legal_degree, linear_layers, undivided, with_heads
from vblackwell.planner.parallel.strategies import Strategy, Unit, Workload, strategies
from vblackwell.trace.causal_lm import plain_batches
from vblackwell.trace.trace import Trace
from vblackwell.trace.work import phase_seconds
from vblackwell.units import format_bytes

NO_ISSUE = 1e-12  # seconds: operators are issued while others run


@dataclass(frozen=True)
class ParallelPlan:
    """What cards joined by ``link`` make of a run, the fastest first; ``room``: bytes of one; ``sizes``: to divide."""

    num_gpus: int
    topology: str
    link: str
    room: int
    strategies: tuple[Strategy, ...]
    sizes: tuple[Size, ...] = ()

    def as_dict(self) -> dict[str, Any]:
        rows: list[dict[str, Any]] = []
        for each in self.strategies:
            values = asdict(each) | {"layers": dict(each.layers), "fits": self.fits(each)}
            name, refused = values.pop("name"), values.pop("refused")
            rows.append({"strategy": name} | ({"refused": refused} if refused else values))
        return {
            "num_gpus": self.num_gpus, "topology": self.topology, "link": self.link, "strategies": rows,
            "tensor_sizes": {size.name: size.count for size in self.sizes},
            "tensor_degree": legal_degree(self.sizes, self.num_gpus),
        }  # fmt: skip

    def fits(self, strategy: Strategy) -> bool:
        return strategy.gpu_bytes <= self.room

    def cells(self, each: Strategy) -> list[str]:
        """Of one that is possible: tokens/s, efficiency, waiting, sent a GPU, one holds, whether it fits."""
        return [
            f"{each.tokens / each.step_seconds:,.0f}", f"{each.efficiency:.0%}",
            f"{each.exposed_seconds / each.step_seconds:.0%}", format_bytes(int(each.sent_bytes)),
            format_bytes(each.gpu_bytes), "fits" if self.fits(each) else "does not fit",
        ]  # fmt: skip

    def lines(self) -> list[str]:
        found = [
            f"  on {self.num_gpus} such GPUs ({self.topology}; {self.link}):",
            f"    {'':<10}{'tokens/s':>10}{'efficiency':>12}{'waiting':>9}{'sent a GPU':>12}{'one holds':>11}",
        ]
        for each in self.strategies:
            row = f" not possible: {each.refused}"
            if not each.refused:
                speed, efficiency, waiting, sent, held, fits = self.cells(each)
                row = f"{speed:>10}{efficiency:>12}{waiting:>9}{sent:>12}{held:>11}  {fits}"
            found.append(f"    {each.name:<10}{row}")
        tensor = next((each for each in self.strategies if each.name.startswith("tensor") and each.layers), None)
        if tensor is not None:  # equal layers of all blocks in one word
            counts = Counter((re.sub(r"\.\d+\.", ".*.", name), kind) for name, kind in tensor.layers)
            words = (f"{name} {kind}{f' (x{n})' if n > 1 else ''}" for (name, kind), n in counts.items())
            found.append(f"    {tensor.name}: {', '.join(words)}")
        return [*found, f"    {self.division()}"] if self.sizes else found

    def division(self) -> str:
        """What the GPUs divide for tensor parallelism and what they do not, and what follows from that."""
        bad = undivided(self.sizes, self.num_gpus)
        *rest, last = map(str, bad or self.sizes)
        listed = f"{', '.join(rest)} and {last}" if rest else last
        said = f"tensor parallelism: {self.num_gpus} GPUs {'do not divide' if bad else 'divide'} {listed}"
        if not bad:
            return said
        if all(size.name == VOCABULARY for size in bad):
            return f"{said}: the head is divided by its input features, or whole on every GPU"
        possible = any(each.name == "tensor" and not each.refused for each in self.strategies)
        if possible and any(size.is_heads for size in bad):
            said += "; 'tensor' gathers before attention, which every GPU computes whole; both are counted"
        if (degree := legal_degree(self.sizes, self.num_gpus)) > 1:
            return f"{said}; 'tensor x{degree}' is groups of {degree} GPUs, which do, each with a separate batch"
        good = [each for each in range(2, 2 * self.num_gpus + 1) if legal_degree(self.sizes, each) == each]
        near = [n for n in good if n < self.num_gpus][-1:] + [n for n in good if n > self.num_gpus][:1]
        take = " or ".join(map(str, near)) or "other"
        return f"{said}; no part of {self.num_gpus} GPUs divides: take {take} GPUs for tensor parallelism"


def parallel_plan(
    run: Run, trace: Trace, batch_size: int, card: KnownGPU, gpu_bytes: int, num_gpus: int, topology: str
) -> ParallelPlan:
    """Strategies for ``num_gpus`` such cards, joined by NVLink where the card has it, else by PCIe, at the share of the
    nominal rate that an H200's PCIe link reaches both ways.
    """
    kind = "NVLink" if card.nvlink_bytes else "PCIe, through the host"
    rate = BOTH_SHARE * (card.nvlink_bytes or card.link_bytes)
    words = f"{kind}, {rate / 1e9:.0f} GB/s each way by the data sheet of {card.name}"
    work = _workload_of(run, trace, batch_size, rates_of(card))
    found = tuple(strategies(work, num_gpus, topology, Link(bytes_per_second=rate)))
    return ParallelPlan(num_gpus, topology, words, gpu_bytes - context_bytes(run.capability), found, work.sizes)


def _workload_of(run: Run, trace: Trace, batch_size: int, rates: Rates) -> Workload:
    """What ``run`` is on one GPU that holds it."""
    model, count = run.model(), batch_size * run.seq_length
    tokens = torch.zeros((batch_size, run.seq_length), dtype=torch.int64, device="meta")
    with plain_batches():
        layers = linear_layers(model, lambda: run.spec.loss(model, {"input_ids": tokens, "labels": tokens}))
    layers, sizes = with_heads(model, layers)
    seconds = phase_seconds(trace.work, rates)
    optimizer = seconds.pop("optimizer", 0.0)
    forward = seconds.get("forward", 0.0) + seconds.get("loss", 0.0)
    backward = sum(seconds.values()) - forward
    unissued = replace(rates, issue_seconds=NO_ISSUE)
    multiplying = [each for each in trace.work if each.flops and each.phase != "optimizer"]
    attending = [each for each in multiplying if each.kind == "attention"]
    products, attention = (sum(phase_seconds(work, unissued).values()) for work in (multiplying, attending))
    width = 4 if run.precision == "fp32" else 2
    return Workload(
        layers,
        _units(model, forward, backward),
        trace.num_parameters,
        count,
        width,
        products,
        others=max(0.0, forward + backward - products),
        optimizer=optimizer,
        state_bytes=state_bytes(trace),
        activation_bytes=peak_of(trace, NOT_STATE, outside="optimizer"),
        boundary_bytes=count * (layers[-1].in_features if layers else 0) * width,
        recompute=run.checkpointing,
        sizes=sizes,
        attention=attention,
    )


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
