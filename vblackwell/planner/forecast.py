"""What each way of training a model would take of a machine: memory from traces and the engine's own placement, seconds
from its lanes.

On a GPU level 0 shares the process's memory with activations: what they leave, with a margin, is level 0's capacity.
Without one, level 0 is an arena of a stated size, activations lie outside it, and all lanes are the same cores, one
after another.
"""

from __future__ import annotations

import functools
from collections.abc import Callable, Mapping
from dataclasses import dataclass, replace

from torch import nn

from vblackwell.errors import InsufficientMemory, Unsupported
from vblackwell.machine.limits import disk_thread_bytes
from vblackwell.machine.rates import Rates
from vblackwell.nn.convert.model import convert
from vblackwell.nn.convert.training import fuse
from vblackwell.offload.layout.forecast import StepForecast, forecast_step
from vblackwell.offload.layout.formats import Formats, range_bytes, supports
from vblackwell.offload.layout.groups import Group, find_groups
from vblackwell.offload.layout.lanes import LaneTimes, disk_hidden_from, simulate
from vblackwell.offload.layout.pieces import num_elements
from vblackwell.offload.layout.placement import (
    AHEAD,
    CUDA_GROUPS,
    MAX_LOCKED,
    MAX_RESIDENT,
    NEWEST,
    RING_GROUPS,
    RING_SHARE,
    StreamingOptions,
    groups_kept,
    passing_bytes,
    state_bytes,
)
from vblackwell.planner.memory_estimate import P99_BYTES
from vblackwell.planner.placement import Bounds, Choice, Lacking, Plan, Prediction, Space, make_plan
from vblackwell.planner.run import Run
from vblackwell.trace.causal_lm import language_batch, plain_batches
from vblackwell.trace.trace import Trace, trace_training
from vblackwell.trace.work import phase_seconds, streaming_work
from vblackwell.units import MiB, align_up

# Three streamed decoders on an H200 reserved 3 % more, 2 % less and 7 % more than predicted (docs/journal/estimate.md)
STREAMED_P99 = 1.08
RESIDENT_P99 = 1.03
ADAMW_BYTES = 34  # a parameter, that AdamW on a GPU reads and writes, with the norm of its gradient
GRADIENTS_LEAVING = 2  # gradients of the largest group on level 0: one is made while the one before leaves
# The first groups, which finish backward last and are needed first: with their states on level 0 nothing hides their
# transfers, and the same bytes of loaded weights save less (docs/journal/offload.md).
TURN_GROUPS = 3
WIDE_GRADIENT = 4  # bytes of a resident parameter's gradient


@dataclass(frozen=True)
class Machine:
    """What a run may take and how fast it is.

    Attributes:
        has_gpu: level 0 is a GPU. undo: updates can be rolled back, as the trainer's can. may_clip: steps may clip.
        disk: bytes/s that the disk level reads and writes, asked where a choice uses one; None: those of ``rates``.
    """

    bounds: Bounds
    rates: Rates
    has_gpu: bool = True
    undo: bool = True
    may_clip: bool = True
    disk: Callable[[], tuple[float, float]] | None = None


class Forecast:
    """Predicts choices for one run on one machine. Traces and models are made once each.

    Args:
        run: the model in its compute type; its ``checkpointing`` is each choice's, and its optimizer is the package's
            own.
        masters: 'exact' or 'stochastic', as `Formats` has them.
        fp4_layers, keep: which linears a choice with ``fp4`` converts (`vblackwell.nn.convert`).
        fused: the run puts its model onto fused operators (`vblackwell.nn.convert.training.fuse`).
    """

    def __init__(
        self,
        run: Run,
        machine: Machine,
        masters: str = "exact",
        fp4_layers: str = "all",
        keep: str | None = None,
        fused: bool = False,
    ) -> None:
        self.run, self.machine, self._masters, self._fused = run, machine, masters, fused
        self._fp4 = fp4_layers, keep
        self.model = functools.cache(self._model)
        self.trace = functools.cache(self._trace)
        self.seconds = functools.cache(self._seconds)
        self.groups = functools.cache(self._groups_of)

    def _model(self, checkpointing: bool, fp4: bool) -> nn.Module:
        run = replace(self.run, checkpointing=checkpointing)
        model = run.model()
        if fp4:
            convert(model, fp4_layers=self._fp4[0], keep=self._fp4[1], attention=None, fused=False)
        if self._fused:
            fuse(model)
        return model

    def _trace(self, checkpointing: bool, fp4: bool, batch_size: int) -> Trace:
        run = self.run
        batch = language_batch(run.spec.vocab_size, batch_size, run.seq_length)
        model = self.model(checkpointing, fp4)  # brings transformers in, before its questions are answered
        with plain_batches():
            return trace_training(model, batch, run.spec.loss, None, capability=run.capability, num_sms=run.num_sms)

    def _seconds(
        self, checkpointing: bool, fp4: bool, batch_size: int, streaming: float, updates: float = 0.0
    ) -> Mapping[str, float]:
        """Of a micro-batch's phases, while the CPU updates for ``updates`` seconds."""
        work = self.trace(checkpointing, fp4, batch_size).work
        work = (*work, *streaming_work(streaming))
        return phase_seconds(work, self.machine.rates, waits=not self.machine.has_gpu, updates=updates)

    # -- one choice --------------------------------------------------------------------------------------------------

    def least_seconds(self, choice: Choice) -> float:
        """A token's share of compute alone, or of the CPU's updates alone: the longer, or their sum on one CPU."""
        rates, groups = self.machine.rates, self._groups(choice)
        trained = sum(num_elements(group) for group in groups if group.trainable())
        compute = choice.accumulation_steps * sum(self._seconds_of(choice).values())
        tokens = self._tokens(choice)
        if choice.placement == "resident":
            return compute / tokens
        cpu = (
            max(0.0, share_on_host(choice) - 0.1) * trained / rates.cpu_adamw
        )  # whole groups: a little less than the share, maybe
        return (max(compute, cpu) if self.machine.has_gpu else compute + cpu) / tokens

    def predict(self, choice: Choice, in_full: bool = False) -> tuple[Choice, Prediction] | Lacking:
        """The choice with its sizes, and what it takes; or what it lacks. ``in_full``: also what only people ask for."""
        try:
            formats = Formats(choice.states, self._masters)
            if not supports(formats, [p.dtype for p in self.model(choice.checkpointing, choice.fp4).parameters()]):
                return Lacking(f"is refused: {choice.states} states need bf16 or fp32 weights")
            if choice.placement == "resident":
                return self._resident(choice, formats)
            return self._streamed(choice, formats, in_full)
        except InsufficientMemory as error:
            return Lacking("memory", max(1, error.needed_bytes - error.available_bytes), f"is refused: {error}")
        except Unsupported as error:
            return Lacking(f"is refused: {error}")

    def fits(self, choice: Choice, trace: Trace) -> bool:
        """Whether ``choice`` has room, where ``trace`` is what its forward and backward allocate."""
        formats = Formats(choice.states, self._masters)
        if choice.placement == "resident":
            return self._resident_bytes(choice, formats, trace)[1] <= self.machine.bounds.gpu
        try:
            return not isinstance(self._foreseen(choice, formats, trace, {}), Lacking)
        except (InsufficientMemory, Unsupported):
            return False

    def _trace_of(self, choice: Choice) -> Trace:
        return self.trace(choice.checkpointing, choice.fp4, choice.batch_size)

    def _seconds_of(self, choice: Choice) -> Mapping[str, float]:
        streaming = updates = 0.0
        if choice.placement == "streamed":
            rates, groups = self.machine.rates, self._groups(choice)
            streaming = rates.streaming_issues(len(groups), share_on_host(choice))
            trained = sum(num_elements(group) for group in groups if group.trainable())
            share, count = share_on_host(choice), choice.accumulation_steps
            # Without a rollback the last one's is added where its update is.
            on_level0 = count - 1 if self.machine.undo else max(0, count - 2)
            sums = share * (count - 1) + (1 - share) * on_level0
            updates = (share + sums / rates.adds_per_update) * trained / rates.cpu_adamw / count
        return self.seconds(choice.checkpointing, choice.fp4, choice.batch_size, streaming, updates)

    def _groups(self, choice: Choice) -> list[Group]:
        return self.groups(choice.checkpointing, choice.fp4, choice.states)

    def _groups_of(self, checkpointing: bool, fp4: bool, states: str) -> list[Group]:
        return find_groups(self.model(checkpointing, fp4), None, None, Formats(states, self._masters))[0]

    def _tokens(self, choice: Choice) -> int:
        return choice.batch_size * choice.accumulation_steps * self.run.seq_length

    # -- resident ----------------------------------------------------------------------------------------------------

    def _resident(self, choice: Choice, formats: Formats) -> tuple[Choice, Prediction] | Lacking:
        machine, rates = self.machine, self.machine.rates
        gpu, p99, books = self._resident_bytes(choice, formats, self._trace_of(choice))
        if p99 > machine.bounds.gpu:
            return Lacking("GPU memory" if machine.has_gpu else "level 0", p99 - machine.bounds.gpu)
        trained = sum(num_elements(group) for group in self._groups(choice) if group.trainable())
        update = trained * ADAMW_BYTES / rates.memory if machine.has_gpu else trained / rates.cpu_adamw
        seconds = choice.accumulation_steps * sum(self._seconds_of(choice).values()) + update
        prediction = Prediction(gpu, p99, 0, 0, seconds, self._tokens(choice), {"gpu": 1.0})
        return replace(choice, level0_bytes=align_up(books, MiB)), prediction

    def _resident_bytes(self, choice: Choice, formats: Formats, trace: Trace) -> tuple[int, int, int]:
        """What the GPU is expected to hold, what to plan for, and what the stack asks level 0 to have; the last alone
        without a GPU.
        """
        state = trained = 0
        widths = [4]
        for param in self.model(choice.checkpointing, choice.fp4).parameters():
            width, count = param.element_size(), param.numel()
            state += count * width
            if param.requires_grad:
                widths.append(width)
                trained += count
                master = {2: 2, 4: 0}.get(width, 4) if not formats.stochastic else 0
                state += count * master + sum(range_bytes(kind, count, width) for kind in formats.moments)
        books = state + trained * (WIDE_GRADIENT + 2)
        if not self.machine.has_gpu:
            return state, books, books  # gradients are outside the arena, but asked for
        gpu = state + peak_with_gradients(trace, WIDE_GRADIENT / min(widths), held=choice.accumulation_steps > 1)
        return gpu, int(gpu * RESIDENT_P99) + P99_BYTES, books

    # -- streamed ----------------------------------------------------------------------------------------------------

    def _streamed(self, choice: Choice, formats: Formats, in_full: bool) -> tuple[Choice, Prediction] | Lacking:
        found = self._foreseen(choice, formats, self._trace_of(choice), self._seconds_of(choice))
        if isinstance(found, Lacking):
            return found
        sized, foreseen, gpu, waiting = found
        has_gpu, most = self.machine.has_gpu, self.machine.bounds.gpu
        p99 = int(gpu * STREAMED_P99) + P99_BYTES if has_gpu else gpu
        # Copies for a rollback take the RAM that is free, and inputs of checkpoints come before them.
        rollback = foreseen.bytes_by_level.get("undo", [0, 0])[1]
        host = foreseen.bytes_of(1) + waiting
        host -= min(rollback, max(0, host - self.machine.bounds.host))
        # What level 0 lets in ends at its capacity.
        timed = self._timed(sized, foreseen, min(gpu, most), min(p99, most), host, in_full)
        return sized, replace(timed, waiting=waiting)

    def _foreseen(
        self, choice: Choice, formats: Formats, trace: Trace, seconds: Mapping[str, float]
    ) -> tuple[Choice, StepForecast, int, int] | Lacking:
        """The choice with sizes (its own, if it has some), where its bytes are, those on the GPU, and those of
        checkpoints in RAM.

        Raises:
            InsufficientMemory: level 0 or the levels below are too small.
        """
        machine, bounds = self.machine, self.machine.bounds
        step = self._step_bytes(choice, trace) if machine.has_gpu else 0
        free = bounds.gpu if not machine.has_gpu else int((bounds.gpu - P99_BYTES) / STREAMED_P99) - step
        if free <= 0:
            return Lacking("GPU memory for activations, logits and workspace", -free + 1)
        choice = choice if choice.level0_bytes else self._sized(choice, free)
        inputs = self._input_bytes(choice) if choice.activations == "host" else 0
        waiting = inputs * self._num_blocks(choice)
        options = StreamingOptions(
            update=choice.update,
            weight_bytes=choice.weight_bytes,
            resident_bytes=choice.resident_bytes,
            activation_bytes=waiting,
            formats=formats,
        )
        capacities = [choice.level0_bytes, bounds.host] + ([bounds.disk] if bounds.disk else [])
        found = forecast_step(
            self.model(choice.checkpointing, choice.fp4),
            capacities,
            options,
            seconds,
            input_bytes=inputs,
            micro_batches=choice.accumulation_steps,
            undo=machine.undo,
            name="GPU" if machine.has_gpu else "arena",
            host_norms=machine.may_clip and not machine.has_gpu,  # a GPU takes the norms before gradients leave it
        )
        return choice, found, found.bytes_of(0) + step, waiting

    def _timed(self, choice: Choice, found: StepForecast, gpu: int, p99: int, host: int, in_full: bool) -> Prediction:
        machine, tokens = self.machine, self._tokens(choice)
        rates = machine.rates
        uses_disk = found.lanes.uses_disk
        if machine.disk is not None and uses_disk:
            disk_read, disk_write = machine.disk()
            rates = replace(rates, disk_read=disk_read, disk_write=disk_write)
        times = self._times(found, rates)
        clipped = None
        if in_full and machine.may_clip and machine.has_gpu:
            clipped = simulate(replace(found.lanes, clips=True), rates).step_seconds
        written = sum(group.disk_write for group in found.lanes.groups)
        hidden = disk_hidden_from(found.lanes, rates, tokens) if in_full and written and machine.has_gpu else 0
        return Prediction(
            gpu,
            p99,
            host,
            found.bytes_of(2),
            times.step_seconds,
            tokens,
            {lane: share for lane, share in times.busy.items() if share},
            clipped,
            written,
            hidden,
            threads=disk_thread_bytes() if uses_disk else 0,
        )

    def _times(self, found: StepForecast, rates: Rates) -> LaneTimes:
        """Of a step; without a GPU every lane is the same cores, and one works after the other."""
        times = simulate(found.lanes, rates)
        if self.machine.has_gpu:
            return times
        share = sum(times.busy.values())
        return replace(
            times,
            step_seconds=share * times.step_seconds,
            busy={lane: part / share for lane, part in times.busy.items()},
        )

    def _sized(self, choice: Choice, free: int) -> Choice:
        """How ``free`` bytes of level 0 are divided: a ring, gradients on their way, a few weights, the turn, more of
        either.
        """
        groups = self._groups(choice)
        largest = max((group.num_bytes for group in groups), default=1)
        passing = max((passing_bytes(group) for group in groups if group.trainable()), default=0)
        ring = 0 if choice.update == "home" else min(int(RING_GROUPS * passing), int(free * RING_SHARE))
        slack = min((GRADIENTS_LEAVING + MAX_LOCKED) * largest, free // 3)
        whole = sum(group.num_bytes for group in groups)
        left = free - ring - slack
        keeps = choice.update != "home" and not self.machine.undo
        few = min(whole, CUDA_GROUPS * largest)
        turn = groups_kept(groups[:TURN_GROUPS], min(left - few, int(MAX_RESIDENT * free) - ring)) if keeps else []
        resident = sum(state_bytes(group) for group in turn)
        loaded = whole - sum(group.num_bytes for group in turn)
        weights = max(1, min(left - resident, loaded))
        if keeps and left - resident > loaded:
            states = sum(state_bytes(group) for group in groups) - whole
            room = max(0, min(left - whole, int(MAX_RESIDENT * free) - ring, states))
            resident = max(
                resident, sum(state_bytes(group) for group in groups_kept(groups, room))
            )  # whole groups, the first ones
        needed = free if resident > 0 else min(free, ring + slack + weights + 2 * largest)
        return replace(choice, level0_bytes=needed, weight_bytes=weights, resident_bytes=resident)

    def _step_bytes(self, choice: Choice, trace: Trace) -> int:
        """Activations, logits and workspace on the GPU, and a parameter's gradient before its group's buffer takes it."""
        model = self.model(choice.checkpointing, choice.fp4)
        gradient = max((p.numel() * p.element_size() for p in model.parameters() if p.requires_grad), default=0)
        found = peak_with_gradients(trace, 0.0) + gradient
        if choice.activations == "host":
            found -= max(0, self._num_blocks(choice) - NEWEST - AHEAD) * self._input_bytes(choice)
        return max(gradient, found)

    def _num_blocks(self, choice: Choice) -> int:
        groups = self._groups(choice)
        most = max(len(group.slots) for group in groups)
        return sum(len(group.slots) * 2 > most for group in groups)

    def _input_bytes(self, choice: Choice) -> int:
        """Of a block's input: tokens by hidden size, in the compute type."""
        model: nn.Module = self.model(choice.checkpointing, choice.fp4)
        config = getattr(model, "config", None)
        hidden = getattr(getattr(config, "get_text_config", lambda: config)(), "hidden_size", None)
        if hidden is None:
            raise Unsupported("the hidden size of the model is not known, so checkpoints' inputs cannot be counted")
        width = max(p.element_size() for p in model.parameters())
        return choice.batch_size * self.run.seq_length * int(hidden) * width


def share_on_host(choice: Choice) -> float:
    """Of the updates."""
    found = {"level0": 0.0, "home": 1.0}.get(str(choice.update), choice.update)
    assert isinstance(found, float)
    return found


def peak_with_gradients(trace: Trace, widened: float, held: bool = False) -> int:
    """Most bytes of activations, logits, workspace and gradients at one time; gradients ``widened`` times as wide as
    they were traced.

    Args:
        held: earlier micro-batches' gradients are there all the time.
    """
    live = most = 0
    base = int(trace.total("gradients") * widened / max(1, _steps(trace))) if held else 0
    for event in trace.events:
        index = event if event >= 0 else ~event
        category = trace.categories[index]
        if category in ("weights", "optimizer") or (held and category == "gradients"):
            continue
        size = int(trace.sizes[index] * widened) if category == "gradients" else trace.sizes[index]
        live += size if event >= 0 else -size
        most = max(most, live)
    return base + most


def _steps(trace: Trace) -> int:
    return 1 + max((step for _, step, _ in trace.marks), default=0)


def plan_of(run: Run, space: Space, machine: Machine, forecast: Forecast | None = None) -> Plan:
    """The fastest choice of ``space`` for ``run`` on ``machine``.

    Raises:
        InsufficientMemory: none fits.
        Untraceable: the model cannot be traced.
    """
    made = forecast or Forecast(run, machine)
    plan = make_plan(space.choices(), made.least_seconds, made.predict, machine.bounds, machine.rates.source)
    again = made.predict(plan.choice, in_full=True)
    assert not isinstance(again, Lacking), "it fitted a moment ago"
    return replace(plan, prediction=again[1])
