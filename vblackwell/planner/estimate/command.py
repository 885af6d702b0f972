"""``vb estimate``: what training a model will take of a GPU, as a table, JSON or a page. Nothing is run, and nothing
else is written.
"""

from __future__ import annotations

import gc
import json
import sys
from collections.abc import Iterator
from contextlib import contextmanager
from dataclasses import dataclass, replace
from pathlib import Path

from vblackwell.errors import ConfigurationError, VBError
from vblackwell.machine.gpus import NUM_SMS, RUNTIME_BYTES, KnownGPU, context_bytes, find_gpu
from vblackwell.machine.rates import rates_of
from vblackwell.nn.decoder.presets import GPT2_VOCAB_SIZE, PRESETS
from vblackwell.planner.estimate.advice import advice_of
from vblackwell.planner.estimate.measured import measure_run
from vblackwell.planner.estimate.parallel import parallel_plan
from vblackwell.planner.estimate.result import Estimated, Speed
from vblackwell.planner.memory_estimate import estimate_trace
from vblackwell.planner.model_spec import check_batch, find_model
from vblackwell.planner.offload_estimate import (
    PLENTY,
    OffloadEstimate,
    estimate_offload,
    minimum_gpu_bytes,
    streamed_seconds,
    streams_on,
)
from vblackwell.planner.parallel.strategies import check_several
from vblackwell.planner.run import Run
from vblackwell.trace.trace import Trace, Untraceable
from vblackwell.trace.work import phase_seconds
from vblackwell.units import MiB, TiB, format_bytes, parse_bytes

MIN_GPU, MAX_GPU = MiB, 16 * TiB
FROZEN_BY_PYTHON = 1000  # at least as many objects as 3.12 itself freezes at its start; 3.11 and 3.13 freeze none


@contextmanager
def frozen_objects() -> Iterator[None]:
    """What is alive now, some hundred thousand objects of libraries, is not looked through for garbage meanwhile.

    Where the caller has frozen objects they stay so: there is no way to unfreeze the others alone.
    """
    ours = gc.get_freeze_count() < FROZEN_BY_PYTHON
    if ours:
        gc.freeze()
    try:
        yield
    finally:
        if ours:
            gc.unfreeze()


def estimate_command(
    model: str,
    gpu: str | None,
    gpu_memory: str | None,
    batch_size: int,
    seq_length: int,
    optimizer: str,
    precision: str,
    gradient_checkpointing: bool,
    expandable_segments: bool,
    host_memory: str | None,
    disk_memory: str | None,
    as_json: bool,
    gpus: int | None = None,
    topology: str = "ring",
    html: str | None = None,
    advice: bool = True,
) -> int:
    """Print the estimate; 0. A model of a factory that cannot be traced is trained for two steps here instead.

    Args:
        html: file for the same as a page.
        advice: say what would save memory or time, where it does not fit or the card is known; each line costs a trace.

    Raises:
        ConfigurationError: bad input, or a GPU below what the model needs at any batch size.
    """
    check_batch(batch_size, seq_length)
    card, gpu_bytes = card_of(gpu, gpu_memory)
    if gpus is not None and card is None:
        raise ConfigurationError(
            "--gpus plans for cards whose speed is known: give --gpu as well, e.g. --gpu 'RTX 3090'"
        )
    if gpus is not None:
        check_several(gpus, topology)
    page = None if html is None else _page_path(html)
    host = PLENTY if host_memory is None else some_bytes(host_memory, "--host-memory")
    disk = parse_bytes(disk_memory, "--disk-memory") if disk_memory else 0
    decoders = {
        name: preset.decoder_config(GPT2_VOCAB_SIZE, max_position=seq_length) for name, preset in PRESETS.items()
    }
    spec = find_model(model, decoders, seq_length)
    if spec.note is not None:
        print(spec.note, file=sys.stderr, flush=True)
    capability, num_sms = (card.capability, card.num_sms) if card else ((8, 0), NUM_SMS)
    run = Run(spec, seq_length, optimizer, precision, gradient_checkpointing, capability, expandable_segments, num_sms)
    wants_stack = bool(host_memory or disk_memory)
    question = Question(model, run, batch_size, card, gpu_bytes, host, disk, wants_stack, gpus, topology, advice)
    run.model()  # brings the libraries that it needs
    with frozen_objects():
        estimated = question.answer()
    if page is not None:
        write_page(page, estimated)
    print(json.dumps(estimated.report(), indent=2) if as_json else estimated.table())
    return 0


@dataclass(frozen=True)
class Question:
    """A run, and the machine that it is meant for.

    Attributes:
        model: as the user calls it. card, gpu_bytes: of the GPU; None where none was named.
        host, disk: bytes that an offload stack may take. wants_stack: it is asked about even if the run fits without.
        gpus, topology: how many such cards, and how they are joined. advice: whether that is wanted.
    """

    model: str
    run: Run
    batch_size: int
    card: KnownGPU | None
    gpu_bytes: int | None
    host: int
    disk: int
    wants_stack: bool
    gpus: int | None
    topology: str
    advice: bool

    def answer(self) -> Estimated:
        """The estimate.

        Raises:
            ConfigurationError: a GPU below what the model needs at any batch size.
        """
        run, gpu_bytes = self.run, self.gpu_bytes
        if gpu_bytes is not None and self.gpus is None and not streams_on(run, gpu_bytes):
            least, why = minimum_gpu_bytes(run)
            raise ConfigurationError(
                f"--gpu-memory {format_bytes(gpu_bytes)} is below the minimum for {self.model}, about "
                f"{format_bytes(least)} at any "
                f"batch size: {why}"
            )
        found = self._estimated()
        is_asked = self.advice and self.gpus is None and found.measured is None
        if is_asked and (found.fits is False or self.card is not None):
            return replace(found, advice=advice_of(found, (self.host, self.disk)))
        return found

    def _estimated(self) -> Estimated:
        run, gpu_bytes, measured = self.run, self.gpu_bytes, None
        try:
            trace = run.trace(self.batch_size)
        except Untraceable as error:
            if run.spec.make is None:
                raise Untraceable(
                    f"{error}; give it as package.module:factory to have two steps of it measured"
                ) from error
            if self.gpus is not None:
                raise Untraceable(f"{error}; --gpus divides a traced step: leave it out") from error
            print(f"{error}; two real steps are measured instead", file=sys.stderr, flush=True)
            measured = measure_run(run, self.batch_size)
            trace = measured.trace
        memory = estimate_trace(trace, run.capability, run.expandable)
        found = Estimated(self.model, run, self.batch_size, trace, memory, self.card, gpu_bytes, measured=measured)
        if gpu_bytes is None:
            return found
        found = replace(found, fits=run.fits(trace, gpu_bytes))
        if measured is None:
            found = replace(found, largest=0 if memory.state_bytes > gpu_bytes else run.largest_batch(gpu_bytes))
        if not found.fits or self.wants_stack:
            found = replace(found, stack=estimate_offload(run, trace, gpu_bytes, self.host, self.disk))
        if self.card is None or measured is not None:
            return found
        found = replace(found, speed=self._speed(self.card, gpu_bytes, trace, found.stack))
        if self.gpus is None:
            return found
        several = parallel_plan(run, trace, self.batch_size, self.card, gpu_bytes, self.gpus, self.topology)
        return replace(found, parallel=several)

    def _speed(self, card: KnownGPU, gpu_bytes: int, trace: Trace, stack: OffloadEstimate | None) -> Speed:
        """Resident from the trace's work; streamed, if ``stack`` holds the run, from a simulation of the lanes."""
        run, rates, tokens = self.run, rates_of(card), self.batch_size * self.run.seq_length
        resident = tokens / sum(phase_seconds(trace.work, rates).values())
        alone = Speed(resident, None, None, rates.source)
        if stack is None or stack.refused:
            return alone
        left = gpu_bytes - context_bytes(run.capability) - RUNTIME_BYTES - stack.step
        try:
            times = streamed_seconds(run, trace, [left, self.host, *([self.disk] if self.disk else [])], rates)
        except VBError:  # a share of the updates on the host takes more RAM than all on level 0, which fitted
            return alone
        return Speed(resident, tokens / times.step_seconds, times.bottleneck, rates.source)


def _page_path(html: str) -> Path:
    path = Path(html)
    if not path.absolute().parent.is_dir():
        raise ConfigurationError(
            f"--html {html}: {path.absolute().parent} is no folder; give a file in one that exists"
        )
    if path.is_dir():
        raise ConfigurationError(f"--html {html}: it is a folder; give a file")
    return path


def some_bytes(text: str, flag: str) -> int:
    """The size that ``flag`` was given.

    Raises:
        ConfigurationError: no size, or 0.
    """
    found = parse_bytes(text, flag)
    if not found:
        raise ConfigurationError(
            f"{flag} {text}: nothing runs without RAM; give a size, e.g. 32GiB, or leave the flag out"
        )
    return found


def write_page(path: Path, estimated: Estimated) -> None:
    """The page of ``estimated`` in ``path``, which is replaced.

    Raises:
        ConfigurationError: the file cannot be written.
    """
    from vblackwell.planner.estimate.page import page_of

    try:
        path.write_text(page_of(estimated), encoding="utf-8")
    except OSError as error:
        raise ConfigurationError(f"--html {path}: {error.strerror}; give a file that can be written") from error


def card_of(gpu: str | None, gpu_memory: str | None) -> tuple[KnownGPU | None, int | None]:
    """The card that is meant, and its bytes.

    Raises:
        ConfigurationError: an unknown card, or a size that no GPU has.
    """
    card = find_gpu(gpu) if gpu else None
    if gpu_memory is None:
        return card, card.total_bytes if card else None
    num_bytes = parse_bytes(gpu_memory, "--gpu-memory")
    if not MIN_GPU <= num_bytes <= MAX_GPU:
        raise ConfigurationError(
            f"--gpu-memory {gpu_memory} is no GPU: give between {format_bytes(MIN_GPU)} and {format_bytes(MAX_GPU)}, "
            "with a unit, "
            "e.g. 8GiB"
        )
    return card, num_bytes
