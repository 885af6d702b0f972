"""``vb estimate``: what training a model will take of a GPU, as a table, JSON or a page. Nothing is run, and nothing
else is written.
"""

from __future__ import annotations

import gc
import json
import sys
from collections.abc import Iterator
from contextlib import contextmanager
from dataclasses import replace
from pathlib import Path

from vblackwell.errors import ConfigurationError
from vblackwell.machine.gpus import NUM_SMS, KnownGPU, find_gpu
from vblackwell.machine.rates import rates_of
from vblackwell.nn.decoder.config import GPT2_VOCAB_SIZE, PRESETS
from vblackwell.planner.estimate.advice import advice_of
from vblackwell.planner.estimate.measured import measure_run
from vblackwell.planner.estimate.result import Estimated
from vblackwell.planner.forecast import PLENTY, estimate_offload, minimum_gpu_bytes
from vblackwell.planner.memory_estimate import Run, estimate_trace, fits
from vblackwell.planner.model_spec import check_batch, find_model
from vblackwell.planner.parallel.plan import parallel_plan
from vblackwell.planner.parallel.strategies import check_several
from vblackwell.trace.trace import Untraceable
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
    card = find_gpu(gpu) if gpu else None
    gpu_bytes = _gpu_bytes(card, gpu_memory)
    if gpus is not None and card is None:
        raise ConfigurationError(
            "--gpus plans for cards whose speed is known: give --gpu as well, e.g. --gpu 'RTX 3090'"
        )
    if gpus is not None:
        check_several(gpus, topology)
    page = None if html is None else _page_path(html)
    below = (
        PLENTY if host_memory is None else some_bytes(host_memory, "--host-memory"),
        parse_bytes(disk_memory, "--disk-memory") if disk_memory else 0,
    )
    decoders = {
        name: preset.decoder_config(GPT2_VOCAB_SIZE, max_position=seq_length) for name, preset in PRESETS.items()
    }
    spec = find_model(model, decoders, seq_length)
    if spec.note is not None:
        print(spec.note, file=sys.stderr, flush=True)
    capability, num_sms = (card.capability, card.num_sms) if card else ((8, 0), NUM_SMS)
    run = Run(spec, seq_length, optimizer, precision, gradient_checkpointing, capability, expandable_segments, num_sms)
    run.model()  # brings the libraries that it needs
    with frozen_objects():
        least = None if gpu_bytes is None or gpus is not None else minimum_gpu_bytes(run, gpu_bytes)
        if least is not None:
            raise ConfigurationError(
                f"--gpu-memory {format_bytes(gpu_bytes or 0)} is below the minimum for {model}, about "
                f"{format_bytes(least[0])} at any batch size: {least[1]}"
            )
        found = _traced(model, run, batch_size, card, gpu_bytes, is_traced_alone=gpus is not None)
        if gpu_bytes is not None:
            found = _on_gpu(found, gpu_bytes, below, wants_stack=bool(host_memory or disk_memory))
        if gpus is not None and card is not None and gpu_bytes is not None:
            several = parallel_plan(run, found.trace, batch_size, card, gpu_bytes, gpus, topology)
            found = replace(found, parallel=several)
        elif advice and found.measured is None and (found.fits is False or card is not None):
            found = replace(found, advice=advice_of(found, below))
    if page is not None:
        _write_page(page, found)
    print(json.dumps(found.report(), indent=2) if as_json else found.table())
    return 0


def _traced(
    model: str, run: Run, batch_size: int, card: KnownGPU | None, gpu_bytes: int | None, is_traced_alone: bool
) -> Estimated:
    """The run's trace and peak; measured where it cannot be traced, unless ``is_traced_alone``."""
    measured = None
    try:
        trace = run.trace(batch_size)
    except Untraceable as error:
        if run.spec.make is None:
            raise Untraceable(f"{error}; give it as package.module:factory to have two steps of it measured") from error
        if is_traced_alone:
            raise Untraceable(f"{error}; --gpus divides a traced step: leave it out") from error
        print(f"{error}; two real steps are measured instead", file=sys.stderr, flush=True)
        measured = measure_run(run, batch_size)
        trace = measured.trace
    memory = estimate_trace(trace, run.capability, run.expandable)
    return Estimated(model, run, batch_size, trace, memory, card, gpu_bytes, measured=measured)


def _on_gpu(found: Estimated, gpu_bytes: int, below: tuple[int, int], wants_stack: bool) -> Estimated:
    """Whether it fits, the largest batch that does, how fast; and an offload stack, where it does not or it is asked for."""
    run, trace = found.run, found.trace
    found = replace(found, fits=fits(trace, gpu_bytes, run.capability, run.expandable))
    rates = None if found.card is None or found.measured is not None else rates_of(found.card)
    if found.measured is None:
        found = replace(found, largest=0 if found.memory.state_bytes > gpu_bytes else run.largest_batch(gpu_bytes))
    if rates is not None:
        resident = found.batch_size * run.seq_length / sum(phase_seconds(trace.work, rates).values())
        found = replace(found, resident=resident, rates=rates.source)
    if not found.fits or wants_stack:
        found = replace(found, stack=estimate_offload(run, trace, found.batch_size, gpu_bytes, *below, rates))
    return found


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


def _write_page(path: Path, estimated: Estimated) -> None:
    from vblackwell.planner.estimate.page import page_of

    try:
        path.write_text(page_of(estimated), encoding="utf-8")
    except OSError as error:
        raise ConfigurationError(f"--html {path}: {error.strerror}; give a file that can be written") from error


def _gpu_bytes(card: KnownGPU | None, gpu_memory: str | None) -> int | None:
    if gpu_memory is None:
        return card.total_bytes if card else None
    num_bytes = parse_bytes(gpu_memory, "--gpu-memory")
    if not MIN_GPU <= num_bytes <= MAX_GPU:
        raise ConfigurationError(
            f"--gpu-memory {gpu_memory} is no GPU: give between {format_bytes(MIN_GPU)} and {format_bytes(MAX_GPU)}, "
            "with a unit, e.g. 8GiB"
        )
    return num_bytes
