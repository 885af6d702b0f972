"""``vb estimate`` without flags of a run: the ways in which a machine trains, adapts and runs one model, or the largest
known models that it does so with, and how fast.

A model is built without bytes, traced, placed by the offload runtime's own code and timed by the simulation of its
lanes; without a model, from the largest that its states do not already rule out down to the first that fits.

- *train*: all weights, AdamW, bf16 with fp32 masters, checkpointing; 16 x 1,024 tokens a step, in few forwards.
- *adapters*: LoRA of rank 16 on every linear over a frozen base in bf16, or packed to nvfp4; the same batch. A machine
  without a GPU trains in fp32, all weights and adapters, as `vb train` there.
- *run*: one text of at most 2,048 tokens, linears in bf16, or packed to nvfp4. A token reads its keys and
  values and all weights once, of experts those that it meets; what does not stay on the GPU crosses the link, experts
  that it does not meet as well, or comes from the disk, meanwhile.
- *plain*: PyTorch alone: fp32, AdamW, one sequence of 1,024 tokens a step.
"""

import functools
import itertools
from collections import defaultdict
from collections.abc import Callable, Iterable, Mapping
from dataclasses import dataclass, replace
from typing import Any, NamedTuple

import torch
from torch import nn

from vblackwell.errors import InsufficientMemory, Unsupported
from vblackwell.folders.compressed_tensors import PackedLinears
from vblackwell.nn.convert.linears import find_linears, store_linears, store_packed
from vblackwell.nn.convert.lora import Lora, add_adapters
from vblackwell.nn.convert.training import fuse
from vblackwell.offload.layout.generation import (
    CacheShape,
    cache_shape,
    divide_level0,
    token_bytes,
    workspace_bytes,
)
from vblackwell.offload.layout.groups import EXACT, find_groups
from vblackwell.planner.forecast import RESIDENT_P99, Forecast, Machine, Placed
from vblackwell.planner.known_models import KNOWN_MODELS, NUM_PARAMETERS
from vblackwell.planner.memory_estimate import P99_BYTES, Run, allocatable_bytes
from vblackwell.planner.model_spec import of_config, packed_in
from vblackwell.planner.placement import FAST, Choice, Lacking, Space, lane_words
from vblackwell.trace.allocator import replay
from vblackwell.trace.causal_lm import build_causal_lm, language_batch
from vblackwell.trace.layers import change_alike, copy_on_meta
from vblackwell.trace.trace import Trace, trace_forward
from vblackwell.trace.work import MEMORY_SHARE, phase_seconds
from vblackwell.units import format_bytes

TASKS = ("train", "adapters", "run")  # of the largest models
WAYS = {  # of one model
    "run-bf16": "run in bf16",
    "run": "run in FP4",
    "adapters-bf16": "train adapters over bf16",
    "adapters": "train adapters over FP4",
    "train-streamed": "train all weights, streamed",
    "train-resident": "train all weights, resident",
    "plain": "plain PyTorch in fp32",
}
WORDS = {**WAYS, "train": "train all weights"}
PACKED_WAYS = {
    "run": "run, as it is packed",
    "adapters": "train adapters over it, as it is packed",
}  # of a packed folder
PLACEMENTS = ("resident", "streamed")
SEQ_LENGTH, SEQUENCES, POSITIONS, RANK = 1024, 16, 2048, 16
BATCHES = ((16, 1), (4, 4), (1, 16))  # sequences in a forward, forwards in a step
MIN_SPEED = {"train": 50.0, "adapters": 50.0, "run": 1.0}  # tokens a second: 1.8 million in ten hours, a slow reader
# Bytes a parameter, at the least: weight, remainder of the master and moments; gradients as well; in nvfp4; packed.
MIN_STATE, MIN_RESIDENT, MIN_NVFP4, MIN_PACKED = 12.0, 18.0, 0.5625, 0.5
MIN_PLAIN = 16.0  # fp32 weights, gradients and moments
GROWS = 0.9  # of a step's bytes, that grow with its forward
NOTHING = Trace((), (), (), (), 0, 0)
TRACED = (9, 0)  # of all capabilities alike: cuBLAS's workspace is its largest, 32 MiB
Fields = Mapping[str, Any]  # of a config.json


@dataclass(frozen=True)
class Fit:
    """A model that a machine has room for: ``how`` is where things are, in words; ``resident``: nothing passes over the
    link for lack of room; bytes of ``gpu``, ``host``, ``disk`` without the CUDA context; ``at_once``: tokens of the
    longest text, and of a forward, for which that holds."""

    task: str
    model: str
    parameters: int
    tokens_per_second: float
    gpu: int
    host: int
    disk: int
    resident: bool
    how: str
    at_once: int = 0
    batch: tuple[int, int, int] | None = None


class WhatFits:
    """Answers for any number of machines; ``models``: names of `KNOWN_MODELS`, or fields of others by their names;
    ``say``: told what is being tried."""

    def __init__(
        self,
        models: Iterable[str] | Mapping[str, Fields] = KNOWN_MODELS,
        say: Callable[[str], None] = lambda text: None,
    ) -> None:
        self._say = say
        self._fields: dict[str, Fields] = {
            name: models[name] if isinstance(models, Mapping) else KNOWN_MODELS[name] for name in models
        }
        self._traces = defaultdict[str, dict[tuple[bool, int], Trace]](dict)
        # Built once each for the model that is being asked about.
        self._model = functools.lru_cache(maxsize=1)(self._build)
        self._runs = functools.lru_cache(maxsize=len(WAYS))(self._run_of)
        self.parameters = functools.cache(self._count)
        self._packs = functools.cache(lambda name: _has_packable(self._model(name)))
        self.packing = functools.cache(lambda name: packed_in(self._fields[name], self._model(name)))
        self.packed_bytes = functools.cache(self._packed_bytes)
        self._decoding = functools.cache(self._decode)
        self._positions = functools.cache(self._positions_of)

    def largest(self, task: str, place: Machine) -> list[Fit]:
        """The largest model for ``task`` of `TASKS`, and the largest that stays on the GPU if that is another."""
        found: list[Fit] = []
        for name in sorted(self._fields, key=self.parameters, reverse=True):
            fit = self.fit(task, name, place, only_resident=bool(found))
            if fit is not None and fit.tokens_per_second >= MIN_SPEED[task]:
                found.append(fit)
                if fit.resident:
                    break
        return found

    def ways(self, name: str, place: Machine) -> dict[str, Fit | Lacking]:
        """How ``name`` fits ``place`` in each of `WAYS`, or what it lacks; a packed folder in those that it can be."""
        found: dict[str, Fit | Lacking] = {}
        if self.packing(name) is not None:
            return {way: self._way(way, name, place) for way in PACKED_WAYS}
        for way in WAYS:
            packs = way not in ("run", "adapters") or self._packs(name)
            found[way] = self._way(way, name, place) if packs else Lacking("has no linear that is packed")
        return found

    def fit(self, task: str, name: str, place: Machine, only_resident: bool = False) -> Fit | None:
        """How ``name`` fits ``place``; None where it does not, or could not be fast enough."""
        if not self._is_candidate(task, name, place, only_resident):
            return None
        placements = ("resident",) if only_resident else PLACEMENTS
        found = self._way(task, name, place, placements, fast_enough=MIN_SPEED[task])
        return None if isinstance(found, Lacking) or (only_resident and not found.resident) else found

    def _way(
        self,
        way: str,
        name: str,
        place: Machine,
        placements: tuple[str, ...] = PLACEMENTS,
        fast_enough: float = 0.0,
    ) -> Fit | Lacking:
        """``fast_enough``: below so many tokens a second it may say no more than that."""
        self._say(f"{words_of(way, place)}: {name}")
        task, _, kind = way.partition("-")
        try:
            if task == "plain":
                return self._plain(name, place)
            if task == "run":
                return self._run(way, name, place, packed=not kind)
            return self._train(way, name, place, (kind,) if kind in PLACEMENTS else placements, fast_enough)
        except Unsupported as error:
            return Lacking(f"is refused: {error}")

    def _is_candidate(self, task: str, name: str, place: Machine, only_resident: bool) -> bool:
        """Whether neither bytes rule ``name`` out nor the least seconds of products, and of what must cross a link."""
        parameters, rates, bounds = self.parameters(name), place.rates, place.bounds
        trains = task == "train"
        least = MIN_PACKED if "quantization_config" in self._fields[name] else MIN_NVFP4
        state = parameters * (MIN_STATE if trains else least)
        room = bounds.gpu + (0 if only_resident else bounds.host + bounds.disk)
        if state > room or (only_resident and trains and parameters * _resident_bytes(place) > room):
            return False
        if only_resident and not trains:
            margin = (RESIDENT_P99, P99_BYTES) if task == "adapters" and place.has_gpu else (1.0, 0)
            if int(self.packed_bytes(name) * margin[0]) + margin[1] > room:
                return False
        if task == "run":
            passing = state - bounds.gpu
            return passing <= 0 or rates.up / passing >= MIN_SPEED[task]
        on_disk = state - bounds.gpu - bounds.host
        ways = 1 / rates.disk_read + (1 / rates.disk_write if trains else 0.0)
        fields = self._fields[name]  # of experts a token meets the chosen ones, at least
        experts = fields.get("num_local_experts") or fields.get("num_experts") or 1
        active = parameters * fields.get("num_experts_per_tok", 1) / experts
        by_disk = SEQUENCES * SEQ_LENGTH / (on_disk * ways) if on_disk > 0 else float("inf")
        products = rates.matmul_half if place.has_gpu else rates.matmul_fp32
        return min(by_disk, rates.product_share * products / (6 * active)) >= MIN_SPEED[task]

    def _positions_of(self, name: str) -> int:
        """That the model knows; those of a text where its configuration does not say."""
        found = getattr(_text_config(self._model(name)), "max_position_embeddings", None)
        return found if isinstance(found, int) and found > 0 else POSITIONS

    def _run_of(self, name: str, kind: str, on_gpu: bool = True) -> Run:
        """``kind``: 'plain', 'train', or of `WAYS` that train adapters."""
        length = min(SEQ_LENGTH, self._positions(name))
        spec = replace(
            of_config(dict(self._fields[name]), name, length), name=f"{name} {kind}{'' if on_gpu else ' on a CPU'}"
        )
        plain = kind == "plain"

        def prepare(model: nn.Module, dtype: torch.dtype) -> None:
            """As ``vb train`` does: adapters with ``--lora 16``, over FP4 with ``--use-fp4``."""
            if kind.startswith("adapters"):
                add_adapters(model, Lora(RANK))
                model.to(dtype).train()
            if kind == "adapters":
                _pack(model, on_gpu, self.packing(name))
            fuse(model)

        def prepared(dtype: torch.dtype) -> nn.Module:
            model = copy_on_meta(self._model(name))
            if kind == "train":
                model.requires_grad_(True).train()
                model = model if on_gpu else model.to(dtype)  # which would round the buffers as well
            self._change(name, model, lambda model: prepare(model, dtype))
            return model

        spec = spec if plain else replace(spec, build=prepared)
        precision = "bf16" if on_gpu and not plain else "fp32"
        return Run(spec, length, precision=precision, checkpointing=not plain, capability=TRACED, expandable=True)

    def _train(
        self, way: str, name: str, place: Machine, placements: tuple[str, ...], fast_enough: float
    ) -> Fit | Lacking:
        kind = way if way.startswith("adapters") else "train"
        bounds, parameters = place.bounds, self.parameters(name)
        if kind == "train":  # what needs no trace to be said
            resident = placements == ("resident",)
            least_bytes = int(parameters * (_resident_bytes(place) if resident else MIN_STATE))
            room = bounds.gpu if resident else bounds.gpu + bounds.host + bounds.disk
            if least_bytes > room:
                return Lacking(FAST[place.has_gpu] if resident else "RAM and disk", least_bytes - room)
        run = self._runs(name, kind, place.has_gpu)
        forecast = Forecast(run, place, traces=self._traces[run.spec.name], steps=1)  # traces depend on no machine
        least = Choice(placements[-1], *BATCHES[-1], True, activations="host")
        if placements == ("resident",) and isinstance(lacking := forecast.predict(least), Lacking):
            return lacking
        # No trace where not even without activations there is room.
        on_level0 = replace(least, activations="level0")
        lacks = {batch: _lacks_at_least(forecast, on_level0, batch, placements) for batch in BATCHES}
        batches = [batch for batch, found in lacks.items() if found is None]
        if not batches:
            return next(found for found in lacks.values() if found is not None)
        middle = replace(least, batch_size=batches[len(batches) // 2][0])
        trace, growing = forecast.trace(True, middle.batch_size), GROWS / middle.batch_size
        growing *= forecast.step_bytes(middle, trace) - forecast.step_bytes(least, NOTHING)
        kept = ("level0", "host") if "streamed" in placements else ("level0",)  # checkpoints in RAM if they must
        for batch, activations in itertools.product(batches, kept):
            tokens = batch[0] * batch[1] * run.seq_length
            if _least_disk_seconds(forecast, least, batch) * fast_enough > tokens:
                return Lacking("is too slow")  # as are those of fewer sequences
            if place.has_gpu and batch[0] > middle.batch_size:  # is it worth a trace?
                tried = replace(least, batch_size=batch[0], activations=activations)
                taken = max(batch[0] * growing, forecast.least_activations(tried))
                if taken > bounds.gpu or _lacks_at_least(forecast, tried, batch, placements):
                    continue
            space = Space((batch,), (True,), placements, activations=(activations,))
            try:
                plan = forecast.plan(space, in_full=False)
            except InsufficientMemory:
                continue
            found, resident = plan.prediction, plan.choice.placement == "resident"
            how = "resident" if resident else f"streamed, {lane_words(found.bottleneck, place.has_gpu)} busiest"
            if plan.choice.accumulation_steps > 1:
                how += f", {plan.choice.accumulation_steps} forwards a step"
            sizes = found.gpu, found.host, found.disk
            shape = run.seq_length, *batch
            return Fit(
                way, name, parameters, found.tokens_per_second, *sizes, resident, how, shape[0] * shape[1], shape
            )
        lacking = lacks[BATCHES[-1]] or forecast.predict(least)
        return lacking if isinstance(lacking, Lacking) else Lacking("memory")

    def _plain(self, name: str, place: Machine) -> Fit | Lacking:
        """PyTorch alone, which keeps everything on the GPU."""
        room, parameters = allocatable_bytes(place.bounds.gpu, 0), self.parameters(name)
        if parameters * MIN_PLAIN > room:
            return Lacking(FAST[place.has_gpu], int(parameters * MIN_PLAIN) - room)
        run = self._runs(name, "plain")
        traces = self._traces[run.spec.name]
        if (False, 1) not in traces:
            traces[False, 1] = run.trace(1)
        taken = replay(traces[False, 1], None, expandable=True).peak_reserved
        if taken > room:
            return Lacking(FAST[place.has_gpu], taken - room)
        speed = run.seq_length / sum(phase_seconds(traces[False, 1].work, place.rates).values())
        shape = run.seq_length, 1, 1
        return Fit("plain", name, parameters, speed, taken, 0, 0, True, "resident", run.seq_length, shape)

    def _run(self, way: str, name: str, place: Machine, packed: bool) -> Fit | Lacking:
        shape, stays, sizes, per_token, work = self._decoding(name, packed, place.capability, place.has_gpu)
        bounds, rates = place.bounds, place.rates
        workspace = workspace_bytes(bounds.gpu) if place.has_gpu else 0  # else it is outside fast memory
        free, whole = bounds.gpu - workspace, sum(sizes)
        if whole > bounds.host + bounds.disk:
            return Lacking("RAM and disk", whole - bounds.host - bounds.disk)
        least = 2 * max(sizes) + (shape.num_bytes if stays else 0)
        if free < least:
            return Lacking(FAST[place.has_gpu], least - free)
        try:
            budget = divide_level0(free, list(sizes), shape, per_token, workspace)
            if stays:
                budget = replace(budget, weight_bytes=free - shape.num_bytes, cached_layers=shape.layers)
        except InsufficientMemory as error:
            return Lacking(FAST[place.has_gpu], error.needed_bytes - error.available_bytes)
        kept = min(whole, budget.weight_bytes)
        cached = shape.num_bytes * budget.cached_layers // shape.layers
        passing = whole - kept + shape.num_bytes - cached
        on_disk = max(0, whole - bounds.host)
        compute = sum(phase_seconds(work, rates).values()) + shape.num_bytes / (MEMORY_SHARE * rates.memory)
        slowest = max(compute, passing / rates.up, min(on_disk, passing) / rates.disk_read)
        how = f"{format_bytes(passing)} a token over the link" if passing else "resident"
        how += f", {format_bytes(min(on_disk, passing))} of it from the disk" if on_disk and passing else ""
        levels = kept + cached + workspace, min(whole, bounds.host), on_disk
        longer = max(0, free - kept - cached) // (shape.layers * shape.position_bytes)
        longer = longer if budget.cached_layers == shape.layers else 0
        at_once = min(self._positions(name), shape.positions + longer)
        return Fit(way, name, self.parameters(name), 1 / slowest, *levels, passing == 0, how, at_once)

    def _decode(self, name: str, packed: bool, capability: tuple[int, int], tiled: bool) -> "_Decoding":
        model: Any = self._model(name)
        if packed:
            model = self._packed(name, tiled)
        positions = min(POSITIONS, self._positions(name))
        plain = cache_shape(model.config, 1, positions, torch.bfloat16)
        shape = plain or cache_shape(model.config, 1, positions, torch.bfloat16, windows=True)
        if shape is None:
            raise Unsupported("keys and values of these layers are not counted: not all of them attend plainly")
        sizes = tuple(group.num_bytes for group in find_groups(model, None, None, EXACT)[0])
        batch, config = language_batch(self._fields[name]["vocab_size"], 1, 1), _text_config(model)
        work = trace_forward(model, batch, lambda m, batch: m(input_ids=batch["input_ids"]).logits, capability)
        return _Decoding(shape, plain is None, sizes, token_bytes(config, 2), work)

    def _count(self, name: str) -> int:
        known = NUM_PARAMETERS.get(name) if self._fields[name] == KNOWN_MODELS.get(name) else None
        return known or sum(parameter.numel() for parameter in self._model(name).parameters())

    def _build(self, name: str) -> nn.Module:
        """In bf16 on meta, frozen and in eval mode; nobody changes it."""
        return build_causal_lm(dict(self._fields[name]), name, torch.bfloat16).requires_grad_(False).eval()

    def _packed(self, name: str, tiled: bool) -> nn.Module:
        model = copy_on_meta(self._model(name))
        self._change(name, model, lambda model: _pack(model, tiled, self.packing(name)))
        return model

    def _change(self, name: str, model: nn.Module, change: Callable[[nn.Module], object]) -> None:
        """``change`` the ``model``, of equal layers one; a packed folder says of each linear how it is packed."""
        change_alike(model, change) if self.packing(name) is None else change(model)

    def _packed_bytes(self, name: str) -> int:
        tiled = self.packing(name) is None  # else the bytes are the folder's
        return sum(parameter.nbytes for parameter in self._packed(name, tiled).parameters())


class _Decoding(NamedTuple):
    """Sizes of the cache, whether it is transformers' own, which stays on the GPU, and of the groups, workspace of a
    token, and the work of one."""

    shape: CacheShape
    stays: bool
    sizes: tuple[int, ...]
    token_bytes: int
    work: Any


def _lacks_at_least(
    forecast: Forecast, choice: Choice, batch: tuple[int, int], placements: Iterable[str]
) -> Lacking | None:
    """What ``choice`` with such steps lacks on a GPU even without activations, wherever it is updated."""
    if not forecast.machine.has_gpu:
        return None
    one = replace(choice, batch_size=batch[0], accumulation_steps=batch[1])
    found: Placed | Lacking | None = None
    for placement, update in itertools.product(placements, ("host", "device", "auto")):  # the last takes seconds
        found = forecast.place(replace(one, placement=placement, update=update), NOTHING)
        if not isinstance(found, Lacking):
            return None
    return found


def _least_disk_seconds(forecast: Forecast, choice: Choice, batch: tuple[int, int]) -> float:
    """Of a step that reads, in each forward and each backward, the weights that neither RAM nor the GPU holds and no
    earlier pass left on the GPU."""
    bounds = forecast.machine.bounds
    read = sum(group.num_bytes for group in forecast.groups(choice)) - bounds.host - 2 * bounds.gpu
    return 2 * batch[1] * max(0, read) / forecast.machine.rates.disk_read


def _resident_bytes(place: Machine) -> float:
    """Of a parameter that is trained where it is kept, at the least."""
    return MIN_RESIDENT if place.has_gpu else MIN_STATE


def words_of(way: str, place: Machine) -> str:
    """A way in words."""
    said = WORDS[way]
    return said if place.has_gpu or not way.startswith("adapters") else said.replace("bf16", "fp32")


def _text_config(model: Any) -> Any:
    """The configuration of what reads text."""
    return model.config.get_text_config(decoder=True)


def _has_packable(model: nn.Module) -> bool:
    return None in find_linears(model, transposed=True).values()


def _pack(model: nn.Module, tiled: bool = True, packing: PackedLinears | None = None) -> None:
    if packing is not None:
        store_packed(model, packing.fine, packing.form, tiled=tiled)
    elif _has_packable(model):
        store_linears(model, "all", None, "nvfp4", tiled=tiled)


HEADS = ("", "model", "parameters", "tokens/s", "GPU", "RAM", "disk", "")


def row_of(fit: Fit) -> tuple[str, ...]:
    """What tables show, below `HEADS`."""
    gpu, host, disk = (format_bytes(size) for size in (fit.gpu, fit.host, fit.disk))
    sizes = gpu, host, disk if fit.disk else "-"
    return WORDS[fit.task], fit.model, f"{fit.parameters / 1e9:.1f}B", speed_of(fit), *sizes, fit.how


def speed_of(fit: Fit) -> str:
    """Tokens a second, to two digits below ten."""
    return f"{fit.tokens_per_second:,.0f}" if fit.tokens_per_second >= 10 else f"{fit.tokens_per_second:.2g}"
