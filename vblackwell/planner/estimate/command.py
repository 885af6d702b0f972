"""``vb estimate``: what training a model will take of a GPU, as a table, JSON or a page."""

import gc
import json
import sys
from collections.abc import Iterable, Iterator
from dataclasses import dataclass, replace
from pathlib import Path

from vblackwell.errors import ConfigurationError, Unsupported
from vblackwell.machine.gpus import NUM_SMS, RUNTIME_BYTES, KnownGPU, context_bytes, find_gpu
from vblackwell.machine.rates import rates_of
from vblackwell.nn.decoder.config import PRESET_BATCHES, PRESETS
from vblackwell.planner.estimate.measured import measure_run
from vblackwell.planner.estimate.result import Advice, Estimated
from vblackwell.planner.forecast import PLENTY, OffloadEstimate, estimate_offload, minimum_gpu_bytes
from vblackwell.planner.memory_estimate import Run, estimate_trace, fits
from vblackwell.planner.model_spec import check_batch, fields_of, find_model, positions_of
from vblackwell.planner.several_gpus import check_several, sharded_step
from vblackwell.trace.trace import Trace, Untraceable
from vblackwell.trace.work import Work, phase_seconds
from vblackwell.units import GiB, MiB, TiB, format_bytes, format_seconds, parse_bytes

MIN_GPU, MAX_GPU = MiB, 16 * TiB
BATCH_SIZE, SEQ_LENGTH = 8, 1024


def estimate_command(
    model: str,
    gpu: str | None = None,
    gpu_memory: str | None = None,
    batch_size: int | None = None,
    seq_length: int | None = None,
    optimizer: str = "adamw",
    precision: str = "fp32",
    gradient_checkpointing: bool = False,
    expandable_segments: bool = False,
    host_memory: str | None = None,
    disk_memory: str | None = None,
    as_json: bool = False,
    gpus: int | None = None,
    topology: str = "ring",
    html: str | None = None,
    advice: bool = True,
) -> int:
    """Print the estimate, and write it to ``html`` as a page; 0. A factory's model that cannot be traced is trained for
    two steps here. ``batch_size``, ``seq_length``: None for those that ``vb train`` gives a preset, and of other models
    for 8 sequences of 1024 tokens, or what the model learnt if that is less. ``advice``: say what would save memory or
    time, where it does not fit or the card is known. Objects that are there when it begins to trace are never looked
    through for garbage again. Raises ConfigurationError for bad input, or a GPU below what the model needs at any batch
    size."""
    size, length, learnt = defaults_of(model)
    batch_size = size if batch_size is None else batch_size
    seq_length = length if seq_length is None else seq_length
    check_batch(batch_size, seq_length)
    card = find_gpu(gpu) if gpu else None
    gpu_bytes = card.total_bytes if card else None
    if gpu_memory is not None:
        gpu_bytes = parse_bytes(gpu_memory, "--gpu-memory")
        if not MIN_GPU <= gpu_bytes <= MAX_GPU:
            between = f"between {format_bytes(MIN_GPU)} and {format_bytes(MAX_GPU)}, with a unit, e.g. 8GiB"
            raise ConfigurationError(f"--gpu-memory {gpu_memory} is no GPU: give {between}")
    if gpus is not None:
        if card is None:
            raise ConfigurationError("--gpus plans for a card of known speed: give one too, e.g. --gpu 'RTX 3090'")
        check_several(gpus, topology)
    page = None if html is None else Path(html)
    if page is not None and (page.is_dir() or not page.absolute().parent.is_dir()):
        wrong = f"{page.absolute().parent} is no folder" if not page.is_dir() else "it is a folder"
        raise ConfigurationError(f"--html {html}: {wrong}; give a file in a folder that exists")
    host = PLENTY if host_memory is None else some_bytes(host_memory, "--host-memory")
    below = host, parse_bytes(disk_memory, "--disk-memory") if disk_memory else 0
    decoders = {name: replace(preset, max_position=seq_length) for name, preset in PRESETS.items()}
    spec = find_model(model, decoders, seq_length)
    if learnt is not None and seq_length == learnt:
        spec = replace(spec, note=bounded_by(model, learnt))
    if spec.note is not None:
        print(spec.note, file=sys.stderr, flush=True)
    capability, num_sms = (card.capability, card.num_sms) if card else ((8, 0), NUM_SMS)
    run = Run(spec, seq_length, optimizer, precision, gradient_checkpointing, capability, expandable_segments, num_sms)
    _ = run.model  # built here, because it brings the libraries that it needs
    gc.freeze()
    gc.enable()
    least = None if gpu_bytes is None or gpus is not None else minimum_gpu_bytes(run, gpu_bytes)
    if least is not None:
        said = f"--gpu-memory {format_bytes(gpu_bytes or 0)} is below the minimum for {model}"
        raise ConfigurationError(f"{said}, about {format_bytes(least[0])} at any batch size: {least[1]}")
    found = _traced(run, batch_size, card, gpu_bytes, only_traced=gpus is not None)
    if gpu_bytes is not None:
        found = _on_gpu(found, gpu_bytes, below, wants_stack=bool(host_memory or disk_memory))
    if gpus is not None and card is not None and gpu_bytes is not None:
        found = replace(found, several=sharded_step(run, found.trace, batch_size, card, gpu_bytes, gpus, topology))
    elif advice and found.measured is None and (found.fits is False or card is not None):
        found = replace(found, advice=advice_of(found, below))
    if page is not None:
        from vblackwell.planner.estimate.page import page_of

        try:
            page.write_text(page_of(found), encoding="utf-8")
        except OSError as error:
            raise ConfigurationError(f"--html {page}: {error.strerror}; give a file that can be written") from error
    print(json.dumps(found.report(), indent=2) if as_json else found.table())
    return 0


def defaults_of(model: str) -> tuple[int, int, int | None]:
    """Sequences and tokens of each that are meant where nothing is said about them, and the positions that the model
    learnt, if they bound that length."""
    if model in PRESETS:
        return *PRESET_BATCHES[model], None
    limit = positions_of(fields_of(model) or {})
    return (BATCH_SIZE, SEQ_LENGTH, None) if limit is None or limit >= SEQ_LENGTH else (BATCH_SIZE, limit, limit)


def bounded_by(model: str, learnt: int) -> str:
    """What is said of a default length that `defaults_of` has bounded."""
    return f"{model} learnt {learnt} positions (max_position_embeddings): --seq-length is {learnt} by default"


def some_bytes(text: str, flag: str) -> int:
    """The size that ``flag`` was given, above 0."""
    found = parse_bytes(text, flag)
    if not found:
        raise ConfigurationError(f"{flag} {text}: nothing runs without RAM; give e.g. 32GiB, or leave the flag out")
    return found


def _traced(run: Run, batch_size: int, card: KnownGPU | None, gpu_bytes: int | None, only_traced: bool) -> Estimated:
    measured = None
    try:
        trace = run.step(batch_size)
    except Untraceable as error:
        if run.spec.make is None:
            raise Untraceable(f"{error}; give it as package.module:factory to have two steps of it measured") from error
        if only_traced:
            raise Untraceable(f"{error}; --gpus divides a traced step: leave it out") from error
        print(f"{error}; two real steps are measured instead", file=sys.stderr, flush=True)
        measured = measure_run(run, batch_size)
        trace = measured.trace
    memory = estimate_trace(trace, run.capability, run.expandable)
    return Estimated(run, batch_size, trace, memory, card, gpu_bytes, measured=measured)


def _on_gpu(found: Estimated, gpu_bytes: int, below: tuple[int, int], wants_stack: bool) -> Estimated:
    """Whether it fits, the largest batch that does, how fast; a stack, where it does not fit or it is asked for."""
    run, trace, rates = found.run, found.trace, None
    found = replace(found, fits=fits(trace, gpu_bytes, run.capability, run.expandable))
    if found.measured is None:
        found = replace(found, largest=0 if found.memory.state_bytes > gpu_bytes else run.largest_batch(gpu_bytes))
        rates = rates_of(found.card) if found.card else None
    if rates is not None:
        resident = found.batch_size * run.seq_length / sum(phase_seconds(trace.work, rates).values())
        found = replace(found, resident=resident, rates=rates.source)
    if not found.fits or wants_stack:
        fused = None if found.measured is not None else traced_or_none(run.fused, found.batch_size)
        streamed = (run, trace) if fused is None else (run.fused, fused)
        found = replace(found, stack=estimate_offload(*streamed, found.batch_size, gpu_bytes, *below, rates))
    return found


def traced_or_none(run: Run, batch_size: int) -> Trace | None:
    """Its step; None where this model cannot be run so."""
    try:
        return run.step(batch_size)
    except (ConfigurationError, Unsupported):
        return None


MAX_SHOWN = 6
MIN_SHARE = 0.02  # of the peak, or of the step: what saves less is within what predictions are off by
NARROW_WEIGHTS = "weights and products in bf16; vb train keeps fp32 masters in addition"
FUSED_BYTES = 28  # a parameter, that a fused AdamW reads and writes
RECOMPUTING = "--gradient-checkpointing"
FUSED = "vb.accelerate_causal_lm(model)"


@dataclass(frozen=True)
class Way:
    """A way to run: bytes of the GPU, seconds (None: not known) and operations of a token; ``also``: other costs."""

    change: str
    peak: int
    seconds: float | None = None
    work: float = 0.0
    also: str = ""


def advise(now: Way, others: Iterable[Way], tokens: int, *, for_memory: bool) -> list[Advice]:
    """What of ``others`` saves `MIN_SHARE` of the peak or of the time of ``tokens``, the most first."""
    found = []
    for other in others:
        saved_bytes, saved_time, costs = now.peak - other.peak, None, []
        if other.peak > now.peak * (1 + MIN_SHARE):
            costs.append(f"{format_bytes(-saved_bytes)} of the GPU")
        if now.seconds is not None and other.seconds is not None:
            saved_time, longer = 1 - other.seconds / now.seconds, other.seconds / now.seconds - 1
            if longer >= MIN_SHARE / 2:
                more = format_seconds((other.seconds - now.seconds) * tokens)
                costs.append(f"{longer:.0%} more time ({more} in {tokens:,} tokens)")
        elif other.work > now.work * (1 + MIN_SHARE / 2):
            costs.append(f"{other.work / now.work - 1:.0%} more operations")
        if saved_bytes >= MIN_SHARE * now.peak or (saved_time or 0.0) >= MIN_SHARE:
            cost = ", ".join(filter(None, [*costs, other.also])) or "nothing that was measured"
            found.append(Advice(other.change, saved_bytes, saved_time, cost, other.peak))
    return sorted(found, key=lambda each: -each.saved_bytes if for_memory else -(each.saved_time or 0.0))


def advice_of(estimated: Estimated, below: tuple[int, int] = (PLENTY, 0)) -> tuple[Advice, ...]:
    """What would save memory or time; ``below``: bytes of RAM and of disk that an offload stack may take."""
    ways = _Ways(estimated, below)
    (now,) = ways.plain("", estimated.run, estimated.trace, peak=estimated.memory.peak_p50)
    return tuple(advise(now, ways.others(), ways.tokens, for_memory=estimated.fits is False)[:MAX_SHOWN])


class _Ways:
    def __init__(self, estimated: Estimated, below: tuple[int, int]) -> None:
        self.estimated, self.below, self.batch_size = estimated, below, estimated.batch_size
        self.tokens = estimated.batch_size * estimated.run.seq_length
        self.rates = None if estimated.card is None else rates_of(estimated.card)

    def others(self) -> Iterator[Way]:
        run, trace, stack = self.estimated.run, self.estimated.trace, self.estimated.stack
        changed, fused = run.like(checkpointing=True), run.fused
        recomputing = None if run.checkpointing else self._trace_of(changed)
        if not run.expandable:
            yield from self.plain("PYTORCH_ALLOC_CONF=expandable_segments:True", run.like(expandable=True), trace)
        if run.optimizer in ("adamw", "adamw-for-loop"):
            yield from self.plain("torch.optim.AdamW(fused=True)", run, with_fused_step(trace))
        yield from self.plain(RECOMPUTING, changed, recomputing)
        # Without a batch's logits; ours runs on them in any case.
        traced = [] if fused is run else list(self.plain(FUSED, fused, self._trace_of(fused)))
        for precision, also in (("autocast", "products in bf16"), ("bf16", NARROW_WEIGHTS)):
            if run.precision == "fp32" and (precision == "autocast" or not traced):
                narrow = run.like(precision=precision)
                traced += self.plain(f"--precision {precision}", narrow, self._trace_of(narrow), also)
        yield from traced
        if self.batch_size > 1:
            smaller = self.batch_size // 2
            change = f"--batch-size {smaller} --accumulation-steps {-(-self.batch_size // smaller)}"
            yield from self.plain(change, run, self._trace_of(run, smaller), batch_size=smaller)
        if stack is not None and not stack.refused:
            yield self._stacked("", stack)
        elif stack is not None and not run.checkpointing:
            again = fused.like(checkpointing=True)
            found = None if fused is run else self._trace_of(again)
            changed, recomputing = (changed, recomputing) if found is None else (again, found)
            yield from self._streamed(RECOMPUTING, changed, recomputing)

    def _trace_of(self, run: Run, batch_size: int = 0) -> Trace | None:
        return traced_or_none(run, batch_size or self.batch_size)

    def plain(
        self, change: str, run: Run, trace: Trace | None, also: str = "", batch_size: int = 0, peak: int = 0
    ) -> Iterator[Way]:
        if trace is not None:
            tokens = (batch_size or self.batch_size) * run.seq_length
            peak = peak or estimate_trace(trace, run.capability, run.expandable).peak_p50
            seconds = None if self.rates is None else sum(phase_seconds(trace.work, self.rates).values()) / tokens
            yield Way(change, peak, seconds, _flops(trace) / tokens, also)

    def _streamed(self, change: str, run: Run, trace: Trace | None) -> Iterator[Way]:
        if trace is not None and self.estimated.gpu_bytes is not None:
            stack = estimate_offload(run, trace, self.batch_size, self.estimated.gpu_bytes, *self.below)
            if not stack.refused:
                yield replace(self._stacked(f" {change}", stack), work=_flops(trace) / self.tokens)

    def _stacked(self, change: str, stack: OffloadEstimate) -> Way:
        context = context_bytes(self.estimated.run.capability) + RUNTIME_BYTES
        disk = f" and {stack.disk / GiB:.1f} GiB of disk" if stack.disk else ""
        seconds = None if stack.tokens_per_second is None else 1 / stack.tokens_per_second
        peak = context + stack.level0 + stack.step + stack.fragmentation
        said, also = f"vb train --vgpu-auto{change} (an offload stack)", f"{stack.host / GiB:.1f} GiB of RAM{disk}"
        return Way(said, peak, seconds, also=also)


def _flops(trace: Trace) -> float:
    return sum(each.flops for each in trace.work)


def with_fused_step(trace: Trace) -> Trace:
    """``trace`` with one kernel for the optimizer: it makes nothing but states, and every parameter passes once."""
    made = {index for index in trace.born_in("optimizer") if trace.categories[index] == "workspace"}
    rest = tuple(each for each in trace.work if each.phase != "optimizer")
    return replace(trace.without(made), work=(*rest, Work("optimizer", 0.0, FUSED_BYTES * trace.trainable, 4)))
