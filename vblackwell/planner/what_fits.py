"""``vb estimate`` without a model: the largest known models that a machine trains, adapts and runs, and how fast.

Every candidate is built without bytes, traced, placed by the offload runtime's own code and timed by the simulation of
its lanes, from the largest that its states do not already rule out down to the first that fits.

- *train*: all weights, AdamW, bf16 with fp32 masters, checkpointing; 16 x 1,024 tokens a step, in few forwards.
- *adapters*: LoRA of rank 16 on every linear over a frozen base packed to nvfp4; the same batch.
- *run*: one text of at most 2,048 tokens, linears packed to nvfp4. A token reads all weights and its keys and values
  once; what does not stay on the GPU crosses the link, or comes from the disk, meanwhile.
"""

import functools
import itertools
from collections import defaultdict
from collections.abc import Callable, Iterable
from dataclasses import dataclass, replace
from typing import Any

import torch
from torch import nn

from vblackwell.errors import InsufficientMemory
from vblackwell.nn.convert.linears import find_linears, store_linears
from vblackwell.nn.convert.lora import Lora, add_adapters
from vblackwell.offload.layout.generation import CacheShape, cache_shape, divide_level0, token_bytes, workspace_bytes
from vblackwell.offload.layout.groups import EXACT, find_groups
from vblackwell.planner.forecast import Forecast, Machine
from vblackwell.planner.memory_estimate import Run
from vblackwell.planner.model_spec import KNOWN_MODELS, of_config
from vblackwell.planner.placement import Space
from vblackwell.trace.causal_lm import build_causal_lm, language_batch
from vblackwell.trace.trace import Trace, trace_forward
from vblackwell.trace.work import MATMUL_SHARE, MEMORY_SHARE, phase_seconds
from vblackwell.units import format_bytes

WORDS = {"train": "train all weights", "adapters": "train adapters over FP4", "run": "run in FP4"}
TASKS = tuple(WORDS)
SEQ_LENGTH, SEQUENCES, POSITIONS, RANK = 1024, 16, 2048, 16
BATCHES = ((16, 1), (4, 4), (1, 16))  # sequences in a forward, forwards in a step
UPDATES: tuple[str | float, ...] = ("device", 0.35)
MIN_SPEED = {"train": 50.0, "adapters": 50.0, "run": 1.0}  # tokens a second: 1.8 million in ten hours, a slow reader
# Bytes a parameter, at the least: weight, remainder of the master and moments; gradients as well; of a packed weight.
MIN_STATE, MIN_RESIDENT, MIN_PACKED = 12.0, 18.0, 0.5
TRACED = (9, 0)  # of all capabilities alike: cuBLAS's workspace is its largest, 32 MiB


@dataclass(frozen=True)
class Fit:
    """A model that a machine has room for: ``how`` is where things are, in words; ``resident``: nothing passes over the
    link for lack of room; bytes of ``gpu``, ``host``, ``disk`` without the CUDA context."""

    task: str
    model: str
    parameters: int
    tokens_per_second: float
    gpu: int
    host: int
    disk: int
    resident: bool
    how: str


class WhatFits:
    """Answers for any number of machines; ``models``: of `KNOWN_MODELS`; ``say``: told what is being tried."""

    def __init__(self, models: Iterable[str] = KNOWN_MODELS, say: Callable[[str], None] = lambda text: None) -> None:
        self._say, self._names = say, models
        self._traces = defaultdict[str, dict[tuple[bool, int], Trace]](dict)
        self.parameters = functools.cache(lambda name: sum(p.numel() for p in _causal_lm(name).parameters()))
        self._packed = functools.cache(lambda name: sum(p.nbytes for p in _pack(_causal_lm(name)).parameters()))
        self._decoding = functools.cache(_decoding)

    def largest(self, task: str, place: Machine) -> list[Fit]:
        """The largest model for ``task``, and the largest that stays on the GPU if that is another."""
        found: list[Fit] = []
        for name in sorted(self._names, key=self.parameters, reverse=True):
            fit = self.fit(task, name, place, only_resident=bool(found))
            if fit is not None and fit.tokens_per_second >= MIN_SPEED[task]:
                found.append(fit)
                if fit.resident:
                    break
        return found

    def fit(self, task: str, name: str, place: Machine, only_resident: bool = False) -> Fit | None:
        """How ``name`` fits ``place``; None where it does not, or could not be fast enough."""
        if not self._is_candidate(task, name, place, only_resident):
            return None
        self._say(f"{WORDS[task]}: {name}")
        if task == "run":
            fit = self._run(name, place)
            return None if fit is None or (only_resident and not fit.resident) else fit
        return self._train(task, name, place, ("resident",) if only_resident else ("resident", "streamed"))

    def _is_candidate(self, task: str, name: str, place: Machine, only_resident: bool) -> bool:
        """Whether neither bytes rule ``name`` out nor the least seconds of products, and of what must cross a link."""
        parameters, rates, bounds = self.parameters(name), place.rates, place.bounds
        trains = task == "train"
        state = parameters * (MIN_STATE if trains else MIN_PACKED)
        least = (parameters * MIN_RESIDENT if trains else self._packed(name)) if only_resident else state
        if least > bounds.gpu + (0 if only_resident else bounds.host + bounds.disk):
            return False
        if task == "run":
            passing = state - bounds.gpu
            return passing <= 0 or rates.up / passing >= MIN_SPEED[task]
        on_disk = state - bounds.gpu - bounds.host
        ways = 1 / rates.disk_read + (1 / rates.disk_write if trains else 0.0)
        fields = KNOWN_MODELS[name]  # of experts a token meets the chosen ones, at least
        active = parameters * fields.get("num_experts_per_tok", 1) / fields.get("num_local_experts", 1)
        by_disk = SEQUENCES * SEQ_LENGTH / (on_disk * ways) if on_disk > 0 else float("inf")
        return min(by_disk, MATMUL_SHARE * rates.matmul_half / (6 * active)) >= MIN_SPEED[task]

    def _train(self, task: str, name: str, place: Machine, placements: tuple[str, ...]) -> Fit | None:
        spec = replace(of_config(KNOWN_MODELS[name], name, SEQ_LENGTH), name=f"{name} {task}")
        if task == "adapters":
            spec = replace(spec, build=functools.partial(_adapted, name, place.has_gpu))
        run = Run(spec, SEQ_LENGTH, precision="bf16", capability=TRACED, expandable=True)
        forecast = Forecast(run, place, traces=self._traces[spec.name], steps=1)  # traces depend on no machine
        for batch, activations in itertools.product(BATCHES, ("level0", "host")):  # checkpoints in RAM if they must
            space = Space((batch,), (True,), placements, UPDATES, (activations,))
            try:
                plan = forecast.plan(space)
            except InsufficientMemory:
                continue
            found, resident = plan.prediction, plan.choice.placement == "resident"
            how = "resident" if resident else f"streamed, {found.bottleneck} busiest"
            if plan.choice.accumulation_steps > 1:
                how += f", {plan.choice.accumulation_steps} forwards a step"
            sizes = found.gpu, found.host, found.disk
            return Fit(task, name, self.parameters(name), found.tokens_per_second, *sizes, resident, how)
        return None

    def _run(self, name: str, place: Machine) -> Fit | None:
        shape, sizes, per_token, work = self._decoding(name, place.capability, place.has_gpu)
        bounds, rates = place.bounds, place.rates
        workspace = workspace_bytes(bounds.gpu)
        free, whole = bounds.gpu - workspace, sum(sizes)
        if whole > bounds.host + bounds.disk or free < 2 * max(sizes):
            return None
        try:
            budget = divide_level0(free, list(sizes), shape, per_token, workspace)
        except InsufficientMemory:
            return None
        kept = min(whole, budget.weight_bytes)
        cached = shape.num_bytes * budget.cached_layers // shape.layers
        passing = whole - kept + shape.num_bytes - cached
        on_disk = max(0, whole - bounds.host)
        compute = sum(phase_seconds(work, rates).values()) + shape.num_bytes / (MEMORY_SHARE * rates.memory)
        slowest = max(compute, passing / rates.up, min(on_disk, passing) / rates.disk_read)
        how = f"{format_bytes(passing)} a token over the link" if passing else "resident"
        how += f", {format_bytes(min(on_disk, passing))} of it from the disk" if on_disk and passing else ""
        levels = kept + cached + workspace, min(whole, bounds.host), on_disk
        return Fit("run", name, self.parameters(name), 1 / slowest, *levels, passing == 0, how)


def _decoding(name: str, capability: tuple[int, int], tiled: bool) -> tuple[CacheShape, tuple[int, ...], int, Any]:
    """Sizes of the cache and of the groups, workspace of a token, and the work of one."""
    model: Any = _pack(_causal_lm(name).requires_grad_(False), tiled)
    shape = cache_shape(model.config, 1, POSITIONS, torch.bfloat16)
    assert shape is not None, "known models attend plainly"
    sizes = tuple(group.num_bytes for group in find_groups(model, None, None, EXACT)[0])
    batch = language_batch(model.config.vocab_size, 1, 1)
    work = trace_forward(model.eval(), batch, lambda m, batch: m(input_ids=batch["input_ids"]).logits, capability)
    return shape, sizes, token_bytes(model.config, 2), work


def _causal_lm(name: str, dtype: torch.dtype = torch.bfloat16) -> nn.Module:
    return build_causal_lm(KNOWN_MODELS[name], name, dtype)


def _adapted(name: str, tiled: bool, dtype: torch.dtype) -> nn.Module:
    """As ``vb train --lora 16 --use-fp4`` makes it."""
    model = _causal_lm(name, dtype).requires_grad_(False)
    add_adapters(model, Lora(RANK))
    return _pack(model, tiled).to(dtype).train()


def _pack(model: nn.Module, tiled: bool = True) -> nn.Module:
    if None in find_linears(model).values():  # GPT-2's are transposed
        store_linears(model, "all", None, "nvfp4", tiled=tiled)
    return model


HEADS = ("", "model", "parameters", "tokens/s", "GPU", "RAM", "disk", "")


def row_of(fit: Fit) -> tuple[str, ...]:
    """What tables show, below `HEADS`."""
    speed = f"{fit.tokens_per_second:,.0f}" if fit.tokens_per_second >= 10 else f"{fit.tokens_per_second:.2g}"
    gpu, host, disk = (format_bytes(size) for size in (fit.gpu, fit.host, fit.disk))
    parameters = f"{fit.parameters / 1e9:.1f}B"
    return WORDS[fit.task], fit.model, parameters, speed, gpu, host, disk if fit.disk else "-", fit.how
