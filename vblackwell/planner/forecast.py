"""What each way of training takes of a machine: memory by traces and the engine's placement, seconds by its lanes.

On a GPU level 0 shares the process's memory with activations: what they leave, with a margin, is its capacity. Without
one, level 0 is an arena of a stated size, activations lie outside it, and all lanes are the same cores, one after
another. `vb estimate` and `vb train --vgpu-auto` both ask here: what one says fits, the other accepts.
"""

import functools
from collections.abc import Callable, Mapping
from contextlib import suppress
from dataclasses import dataclass, replace

from torch import nn

from vblackwell.errors import InsufficientMemory, Unsupported
from vblackwell.machine.gpus import RUNTIME_BYTES, context_bytes, find_gpu
from vblackwell.machine.limits import DISK_THREAD_BYTES
from vblackwell.machine.rates import Rates, assumed_rates
from vblackwell.offload.layout import placement as layout
from vblackwell.offload.layout.forecast import (
    FastestUpdates,
    StepForecast,
    Update,
    checkpoint_bytes,
    fastest_updates,
    forecast_step,
    layers_of,
    step_bytes,
)
from vblackwell.offload.layout.groups import (
    Formats,
    Group,
    bytes_when_resident,
    find_groups,
    moment_ranges,
    num_elements,
    weight_ranges,
)
from vblackwell.offload.layout.lanes import disk_hidden_from, simulate
from vblackwell.planner.memory_estimate import NOT_STATE, P99_BYTES, Run, part_of
from vblackwell.planner.placement import Bounds, Choice, Lacking, Plan, Prediction, Space, make_plan
from vblackwell.trace.allocator import replay
from vblackwell.trace.trace import Trace, peak_with_gradients
from vblackwell.trace.work import phase_seconds, streaming_work
from vblackwell.units import MiB, align_up, format_bytes

# Three streamed decoders on an H200 reserved 3 % more, 2 % less and 7 % more than predicted (docs/journal/estimate.md)
STREAMED_P99 = 1.08
RESIDENT_P99 = 1.03
ADAMW_BYTES = 34  # a parameter, that AdamW on a GPU reads and writes, with the norm of its gradient
# The first groups finish backward last and are needed first: nothing else hides their transfers (journal/offload.md).
TURN_GROUPS = 3
WIDE_GRADIENT = 4  # bytes of a resident parameter's gradient
PLENTY = 1 << 50
ANY_RATES = assumed_rates(find_gpu("H200"))  # for bytes alone


@dataclass(frozen=True)
class Machine:
    """What a run may take and how fast it is. ``undo``: updates can be rolled back, as the trainer's can; ``may_clip``:
    steps may clip; ``disk``: asked for the disk level's bytes/s where a choice uses one (None: those of ``rates``)."""

    bounds: Bounds
    rates: Rates
    has_gpu: bool = True
    undo: bool = True
    may_clip: bool = True
    disk: Callable[[], tuple[float, float]] | None = None
    capability: tuple[int, int] = (8, 0)


@dataclass(frozen=True)
class Placed:
    """A choice with its sizes: bytes of the GPU, expected and to plan for; of a streamed one those of level 0 among
    them, and its step."""

    choice: Choice
    gpu: int
    p99: int
    level0: int = 0
    step: StepForecast | None = None
    waiting: int = 0

    @property
    def disk(self) -> int:
        return 0 if self.step is None else self.step.bytes_of(2) - self.step.shadow_bytes(2)

    @property
    def threads(self) -> int:
        """Bytes of RAM that the disk level takes for its threads."""
        return DISK_THREAD_BYTES if self.step is not None and self.step.lanes.uses_disk else 0


class Forecast:
    """Predicts choices for one run, in its compute type, on one machine; traces and models are made once each.

    Args:
        masters: 'exact' or 'stochastic', as `Formats` has them.
        traces: of forward and backward by checkpointing and batch size; what is missing is traced, for ``steps`` steps.
    """

    def __init__(
        self,
        run: Run,
        machine: Machine,
        masters: str = "exact",
        traces: dict[tuple[bool, int], Trace] | None = None,
        steps: int = 2,
    ) -> None:
        self.run, self.machine, self._masters, self._steps = run, machine, masters, steps
        self.traces = {} if traces is None else traces
        self._seconds = functools.cache(self._phase_seconds)
        self._groups = functools.cache(lambda formats: find_groups(self.model, None, None, formats))
        self._resident_bytes = functools.cache(lambda formats: bytes_when_resident(self.model, None, formats))
        self._updates = functools.cache(self._fastest_updates)
        self._token_bytes = functools.cache(lambda: checkpoint_bytes(self.model, 1))
        # Asked for twice: whether a disk is used, and to predict.
        self._placed: dict[tuple[Machine, Choice], Placed | Lacking] = {}

    @property
    def model(self) -> nn.Module:
        """The run's, which nobody may change."""
        return self.run.model

    @functools.cached_property
    def _parameters(self) -> list[nn.Parameter]:
        return list(self.model.parameters())

    def trace(self, checkpointing: bool, batch_size: int) -> Trace:
        """What forward and backward allocate."""
        key = checkpointing, batch_size
        if key not in self.traces:
            run = self.run if checkpointing == self.run.checkpointing else self.run.like(checkpointing=checkpointing)
            self.traces[key] = run.trace(batch_size, optimizes=False, steps=self._steps)
        return self.traces[key]

    def _phase_seconds(self, choice: tuple[bool, int], streaming: float, updates: float) -> Mapping[str, float]:
        work = (*self.trace(*choice).work, *streaming_work(streaming))
        return phase_seconds(work, self.machine.rates, waits=not self.machine.has_gpu, updates=updates)

    def least_seconds(self, choice: Choice) -> float:
        """A token's share of compute alone, or of the CPU's updates alone: the longer, or their sum on one CPU."""
        compute, cpu = self._compute_seconds(choice), 0.0
        if choice.placement != "resident":  # whole groups are updated on the host: a little less than the share, maybe
            cpu = max(0.0, choice.host_share - 0.1) * self._trained(choice) / self.machine.rates.cpu_adamw
        return (max(compute, cpu) if self.machine.has_gpu else compute + cpu) / self._tokens(choice)

    def predict(self, choice: Choice, in_full: bool = False) -> tuple[Choice, Prediction] | Lacking:
        """The choice with its sizes and what it takes, ``in_full`` also what only people ask for; or what it lacks."""
        placed = self.place(choice)
        if isinstance(placed, Lacking):
            return placed
        if placed.step is not None:
            return placed.choice, self._streamed_prediction(placed, placed.step, in_full)
        rates, trained = self.machine.rates, self._trained(choice)
        update = trained * ADAMW_BYTES / rates.memory if self.machine.has_gpu else trained / rates.cpu_adamw
        seconds = self._compute_seconds(choice) + update
        return placed.choice, Prediction(placed.gpu, placed.p99, 0, 0, seconds, self._tokens(choice), {"gpu": 1.0})

    def place(self, choice: Choice, trace: Trace | None = None) -> Placed | Lacking:
        """Where the bytes of ``choice`` are, or what it lacks; ``trace``: of its step, where only the bytes matter."""
        if trace is not None:
            return self._place(choice, trace)
        key = self.machine, choice
        if key not in self._placed:
            self._placed[key] = self._place(choice)
        return self._placed[key]

    def _place(self, choice: Choice, trace: Trace | None = None) -> Placed | Lacking:
        formats = Formats(choice.states, self._masters)
        try:
            if choice.placement == "resident":
                return self._place_resident(self._decided(choice), formats, trace)
            return self._place_streamed(choice, formats, trace)
        except InsufficientMemory as error:
            lacking = max(0, error.needed_bytes - error.available_bytes)  # 0: whole groups do not fill what is free
            return Lacking("memory", lacking, f"is refused: {error}")
        except Unsupported as error:
            return Lacking(f"is refused: {error}")

    def plan(self, space: Space, *, in_full: bool = True) -> Plan:
        """The fastest choice of ``space``, ``in_full`` as for `predict`. Raises InsufficientMemory where none fits, and
        Untraceable."""
        bounds, rates = self.machine.bounds, self.machine.rates
        plan = make_plan(
            self.choices(space), self.least_seconds, self.predict, bounds, rates.source, self.machine.has_gpu
        )
        if not in_full:
            return plan
        again = self.predict(plan.choice, in_full=True)
        assert not isinstance(again, Lacking), "it fitted a moment ago"
        chosen = "auto" in space.updates and isinstance(plan.choice.update, float)
        return replace(plan, prediction=again[1], updates=self._updates_of(plan.choice) if chosen else None)

    def choices(self, space: Space) -> list[Choice]:
        """Those of ``space``. Where 'auto' says nothing of what bounds a step, all updates in one place are tried too:
        without a GPU instead, as one lane waits for the other, and where a disk is used, if only for lack of RAM."""
        found = dict[Choice, None]()
        for each in space.choices():
            places: tuple[Update, ...] = (each.update,)
            if each.update == "auto" and each.placement == "streamed" and each.states == "fp32":
                places = ("auto",) * self.machine.has_gpu
                places += ("host", "device") if not self.machine.has_gpu or self._uses_disk(each) else ()
            found |= {replace(each, update=place): None for place in places}
        return list(found)

    def _uses_disk(self, choice: Choice) -> bool:
        """Or would, if it fitted."""
        if not self.machine.bounds.disk:
            return False
        placed = self.place(choice)
        return isinstance(placed, Lacking) or (placed.step is not None and placed.step.lanes.uses_disk)

    def _decided(self, choice: Choice) -> Choice:
        """``choice`` with a stated update: for 'auto' that which a run on a GPU would choose. Raises as `place`."""
        if choice.update != "auto":
            return choice
        update: Update = "device"
        if choice.placement == "streamed" and choice.states == "fp32":
            update = self._updates_of(choice)(choice.accumulation_steps, self.machine.undo)
        return replace(choice, update=update)

    def _updates_of(self, choice: Choice) -> FastestUpdates:
        waiting = self._input_bytes(choice) * len(layers_of(self.groups(choice))) if choice.activations == "host" else 0
        formats = Formats(choice.states, self._masters)
        return self._updates(self.machine, choice.checkpointing, formats, waiting)

    def _fastest_updates(self, machine: Machine, checkpointing: bool, formats: Formats, waiting: int) -> FastestUpdates:
        bounds, rates = machine.bounds, machine.rates
        capacities = [bounds.gpu, bounds.host] + ([bounds.disk] if bounds.disk else [])
        options = layout.StreamingOptions(activation_bytes=waiting, formats=formats)
        levels = layout.spaces(capacities, on_gpu=True)
        measured = rates.up_both, rates.cpu_adamw
        return fastest_updates(self.model, levels, options, lambda: measured, self._groups(formats))

    def _seconds_of(self, choice: Choice) -> Mapping[str, float]:
        streaming = updates = 0.0
        if choice.placement == "streamed":
            rates, share, count = self.machine.rates, choice.host_share, choice.accumulation_steps
            shares = (0.0, 1.0) if choice.update == "auto" else (share,)  # not decided yet: at least this
            streaming = min(rates.streaming_issues(len(self.groups(choice)), each) for each in shares)
            # Without a rollback the last gradient is added where its update is.
            on_level0 = count - 1 if self.machine.undo else max(0, count - 2)
            sums = share * (count - 1) + (1 - share) * on_level0
            updates = (share + sums / rates.adds_per_update) * self._trained(choice) / rates.cpu_adamw / count
        return self._seconds((choice.checkpointing, choice.batch_size), streaming, updates)

    def _compute_seconds(self, choice: Choice) -> float:
        return choice.accumulation_steps * sum(self._seconds_of(choice).values())

    def groups(self, choice: Choice) -> list[Group]:
        return self._groups(Formats(choice.states, self._masters))[0]

    def _trained(self, choice: Choice) -> int:
        return sum(num_elements(group) for group in self.groups(choice) if group.trainable())

    def _tokens(self, choice: Choice) -> int:
        return choice.batch_size * choice.accumulation_steps * self.run.seq_length

    def _place_resident(self, choice: Choice, formats: Formats, trace: Trace | None) -> Placed | Lacking:
        machine, groups = self.machine, self.groups(choice)
        (level0,) = layout.spaces([machine.bounds.gpu], on_gpu=machine.has_gpu)
        ranges = weight_ranges(groups) + moment_ranges([group for group in groups if group.trainable()])
        gpu = sum(level0.held_bytes(group.size_of(kind)) for group, kind in ranges)
        asked = max(gpu, self._resident_bytes(formats))  # with gradients, which no arena holds
        p99 = asked
        if machine.has_gpu:
            held = choice.accumulation_steps > 1
            width = min((p.element_size() for p in self._parameters if p.requires_grad), default=WIDE_GRADIENT)
            trace = trace or self.trace(choice.checkpointing, choice.batch_size)
            gpu += peak_with_gradients(trace, WIDE_GRADIENT / min(WIDE_GRADIENT, width), held)
            p99 = int(gpu * RESIDENT_P99) + P99_BYTES
        if p99 > machine.bounds.gpu:
            return Lacking("GPU memory" if machine.has_gpu else "fast memory", p99 - machine.bounds.gpu)
        return Placed(replace(choice, level0_bytes=min(align_up(asked, MiB), machine.bounds.gpu)), gpu, p99)

    def _place_streamed(self, choice: Choice, formats: Formats, trace: Trace | None) -> Placed | Lacking:
        """With the sizes of ``choice``, if it has some. Raises InsufficientMemory where a level is too small."""
        machine, bounds = self.machine, self.machine.bounds
        timed, trace = trace is None, trace or self.trace(choice.checkpointing, choice.batch_size)
        step = self.step_bytes(choice, trace) if machine.has_gpu else 0
        free = bounds.gpu if not machine.has_gpu else int((bounds.gpu - P99_BYTES) / STREAMED_P99) - step
        if free <= 0:
            return Lacking("GPU memory for activations, logits and workspace", -free + 1)
        choice = self._decided(choice)  # seconds of simulations, for a batch that may fit
        seconds = self._seconds_of(choice) if timed else {}
        choice = choice if choice.level0_bytes else self._sized(choice, free)
        inputs = self._input_bytes(choice) if choice.activations == "host" else 0
        waiting = inputs * len(layers_of(self.groups(choice)))
        options = layout.StreamingOptions(update=choice.update, activation_bytes=waiting, formats=formats)
        found = forecast_step(
            self.model,
            [choice.level0_bytes, bounds.host] + ([bounds.disk] if bounds.disk else []),
            replace(options, weight_bytes=choice.weight_bytes, resident_bytes=choice.resident_bytes),
            seconds,
            input_bytes=inputs,
            micro_batches=choice.accumulation_steps,
            undo=machine.undo,
            on_gpu=machine.has_gpu,
            host_norms=machine.may_clip and not machine.has_gpu,  # a GPU takes the norms before gradients leave it
            groups=self._groups(formats),
        )
        level0 = min(found.bytes_of(0), choice.level0_bytes)  # what it lets in ends at its capacity
        gpu, choice = level0 + step, replace(choice, weight_bytes=found.lanes.weight_budget)
        p99 = int(gpu * STREAMED_P99) + P99_BYTES if machine.has_gpu else gpu
        return Placed(choice, gpu, p99, level0, found, waiting)

    def _streamed_prediction(self, placed: Placed, found: StepForecast, in_full: bool) -> Prediction:
        machine, lanes = self.machine, found.lanes
        bounds, rates = machine.bounds, machine.rates
        tokens, in_full = self._tokens(placed.choice), in_full and machine.has_gpu
        if machine.disk is not None and lanes.uses_disk:
            disk_read, disk_write = machine.disk()
            rates = replace(rates, disk_read=disk_read, disk_write=disk_write)
        host = found.bytes_of(1) + placed.waiting
        times = simulate(lanes, rates)
        seconds, busy = times.step_seconds, {lane: share for lane, share in times.busy.items() if share}
        if not machine.has_gpu:  # every lane is the same cores, and one works after the other
            together = sum(busy.values())
            seconds, busy = together * seconds, {lane: share / together for lane, share in busy.items()}
        written = sum(group.disk_write for group in lanes.groups)
        gpu, p99 = min(placed.gpu, bounds.gpu), min(placed.p99, bounds.gpu)
        clipped = simulate(replace(lanes, clips=True), rates).step_seconds if in_full and machine.may_clip else None
        hidden = disk_hidden_from(lanes, rates, tokens) if in_full and written else 0
        sizes = gpu, p99, host, placed.disk
        return Prediction(*sizes, seconds, tokens, busy, clipped, written, hidden, placed.waiting, placed.threads)

    def _sized(self, choice: Choice, free: int) -> Choice:
        """How ``free`` bytes of level 0 are divided: ring, gradients leaving, a few weights, the turn, more."""
        groups = self.groups(choice)
        largest = max((group.num_bytes for group in groups), default=1)
        on_level0 = layout.groups_on_level0(groups, choice.update)
        on_gpu = self.machine.has_gpu
        ring = layout.ring_bytes(on_level0, free, on_gpu=on_gpu) if on_level0 else 0
        trained = max((group.num_bytes for group in groups if group.trainable()), default=0)
        most = (layout.MAX_IN_FLIGHT, layout.MAX_LOCKED)
        slack = min(sum(layout.places(each, trained, free, on_gpu=on_gpu) for each in most) * trained, free // 3)
        whole = sum(group.num_bytes for group in groups)
        left, for_residents = free - ring - slack, int(layout.MAX_RESIDENT * free) - ring
        keeps = bool(on_level0) and not self.machine.undo
        few = min(whole, layout.CUDA_GROUPS * largest)
        turn = layout.groups_kept(groups[:TURN_GROUPS], min(left - few, for_residents)) if keeps else []
        resident = sum(layout.state_bytes(group) for group in turn)
        loaded = whole - sum(group.num_bytes for group in turn)
        weights = max(1, min(left - resident, loaded))
        if keeps and left - resident > loaded:
            states = sum(layout.state_bytes(group) for group in groups) - whole
            kept = layout.groups_kept(groups, max(0, min(left - whole, for_residents, states)))
            resident = max(resident, sum(layout.state_bytes(group) for group in kept))
        needed = free if resident > 0 else min(free, ring + slack + weights + 2 * largest)
        return replace(choice, level0_bytes=needed, weight_bytes=weights, resident_bytes=resident)

    def least_activations(self, choice: Choice) -> int:
        """Bytes of inputs of checkpointed layers that are on level 0 at once, known without a trace."""
        if choice.activations == "host" or not choice.checkpointing:
            return 0
        widest = max(param.element_size() for param in self._parameters)  # perhaps a scale in fp32
        inputs = self._input_bytes(choice) // widest * min(widest, self.run.dtype.itemsize)
        return inputs * len(layers_of(self.groups(choice)))

    def step_bytes(self, choice: Choice, trace: Trace) -> int:
        """Activations, logits, workspace, and a parameter's gradient before its group's buffer takes it."""
        inputs = self._input_bytes(choice) if choice.activations == "host" else 0
        return step_bytes(trace, self.groups(choice), inputs, self.machine.bounds.gpu, on_gpu=self.machine.has_gpu)

    def _input_bytes(self, choice: Choice) -> int:
        return self._token_bytes() * choice.batch_size * self.run.seq_length


@dataclass(frozen=True)
class OffloadEstimate:
    """What a streamed run holds, or why it does not fit (``refused``): bytes of level 0, of activations, logits and
    workspace (``step``), of what is reserved beyond both, of RAM, of disk; its speed, where the card's is known; the
    step's forecast, and the ``rates`` of that card."""

    level0: int = 0
    host: int = 0
    disk: int = 0
    step: int = 0
    fragmentation: int = 0
    refused: str | None = None
    tokens_per_second: float | None = None
    bottleneck: str | None = None
    forecast: StepForecast | None = None
    rates: Rates | None = None


def estimate_offload(
    run: Run, trace: Trace, batch_size: int, gpu_bytes: int, ram_bytes: int, disk_bytes: int, rates: Rates | None = None
) -> OffloadEstimate:
    """What the fastest streamed plan for ``run`` takes; without ``rates``, of the one with all of AdamW on the GPU."""
    own = trace.without(trace.born_in("optimizer"))  # the engine's AdamW takes the place of torch's
    own = replace(own, work=tuple(each for each in trace.work if each.phase != "optimizer"))
    free = gpu_bytes - context_bytes(run.capability) - RUNTIME_BYTES
    host = max(ram_bytes // 2, ram_bytes - DISK_THREAD_BYTES) if disk_bytes else ram_bytes
    machine = Machine(Bounds(free, host, disk_bytes), rates or ANY_RATES)
    forecast = Forecast(run, machine, traces={(run.checkpointing, batch_size): own})
    one = Choice("streamed", batch_size, 1, run.checkpointing)
    choice, found = one, None
    if rates:  # by which the fastest is chosen
        space = Space(((batch_size, 1),), (run.checkpointing,), (one.placement,))
        with suppress(InsufficientMemory):  # what it lacks is said below
            plan = forecast.plan(space, in_full=False)
            choice, found = plan.choice, plan.prediction
    placed = forecast.place(choice)
    if isinstance(placed, Lacking):
        step = forecast.step_bytes(one, own)
        said = f"the step of this batch alone takes {format_bytes(step)} of the GPU's {format_bytes(gpu_bytes)}"
        return OffloadEstimate(step=step, refused=f"{str(placed).removeprefix('is refused: ')}; {said}")
    assert placed.step is not None
    step = placed.step  # without shadows, which take what is free
    return OffloadEstimate(
        level0=placed.level0,
        host=step.bytes_of(1) - step.shadow_bytes(1) + placed.waiting + placed.threads,
        disk=placed.disk,
        step=placed.gpu - placed.level0,
        fragmentation=_holes(trace),
        tokens_per_second=None if found is None or rates is None else found.tokens_per_second,
        bottleneck=None if found is None or rates is None else found.bottleneck,
        forecast=step,
        rates=rates and forecast.machine.rates,
    )


def _holes(trace: Trace) -> int:
    """What the segments of a streamed run's step hold beyond it: expandable ones, as its stack asks for."""
    alone = part_of(trace, NOT_STATE, outside="optimizer")
    return replay(alone, None, expandable=True).peak_reserved - alone.peak(trace.sizes)


def minimum_gpu_bytes(run: Run, gpu_bytes: int = 0) -> tuple[int, str] | None:
    """The GPU below which nothing trains this model, and what sets it; None: one of ``gpu_bytes`` streams it."""
    forecast = Forecast(run, Machine(Bounds(0, PLENTY), ANY_RATES))
    context = context_bytes(run.capability) + RUNTIME_BYTES
    nothing, choice = Trace((), (), (), (), 0, 0), Choice("streamed", 1, 1, run.checkpointing)
    level0, lacking = gpu_bytes - context, None
    while True:
        forecast.machine = replace(forecast.machine, bounds=Bounds(level0, PLENTY))
        found = forecast.place(choice, nothing)
        if not isinstance(found, Lacking) or not found.num_bytes:
            break
        level0, lacking = level0 + max(MiB, found.num_bytes), found
    if lacking is None:
        return None
    # What a level lacks, without what is free at that moment and without the runtime's remedy.
    setting = str(lacking).partition(" free, and ")[2].partition(": raise ")[0] or str(lacking)
    taken = f"the CUDA context takes {format_bytes(context)} with the runtime's kernels and streams"
    setting = setting.replace(" there (", " next to what stays there (")
    return context + level0, f"{taken}, and streaming needs {format_bytes(level0)} of GPU memory: {setting}"
