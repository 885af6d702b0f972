"""``vb estimate``: what training a model will take of a GPU, as a table, JSON or a page. Nothing is run, and nothing else is written."""

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
from vblackwell.nn.decoder.presets import GPT2_VOCAB_SIZE, PRESETS
from vblackwell.planner.estimate.advice import advice_of
from vblackwell.planner.estimate.measured import measure_run
from vblackwell.planner.estimate.parallel import parallel_plan
from vblackwell.planner.estimate.result import Estimated
from vblackwell.planner.estimate.speed import speed_of
from vblackwell.planner.estimator import (
    PLENTY,
    Run,
    check_batch,
    estimate_offload,
    find_subject,
    minimum_gpu_bytes,
    streams_on,
)
from vblackwell.planner.memory_estimate import estimate_trace
from vblackwell.planner.parallel.strategies import check_several
from vblackwell.trace.trace import Untraceable
from vblackwell.units import MiB, TiB, format_bytes, parse_bytes

LEAST_GPU, MOST_GPU = MiB, 16 * TiB
FROZEN_BY_PYTHON = 1000  # at least as many objects as 3.12 itself freezes at its start; 3.11 and 3.13 freeze none


@contextmanager
def set_aside() -> Iterator[None]:
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
    model: str, gpu: str | None, gpu_memory: str | None, batch_size: int, seq_length: int, optimizer: str, precision: str,
    gradient_checkpointing: bool, expandable_segments: bool, host_memory: str | None, disk_memory: str | None, as_json: bool,
    gpus: int | None = None, topology: str = "ring", html: str | None = None, advice: bool = True,
) -> int:  # fmt: skip
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
    if html is not None and not Path(html).absolute().parent.is_dir():
        raise ConfigurationError(
            f"--html {html}: {Path(html).absolute().parent} is no folder; give a file in one that exists"
        )
    if html is not None and Path(html).is_dir():
        raise ConfigurationError(f"--html {html}: it is a folder; give a file")
    decoders = {
        name: preset.decoder_config(GPT2_VOCAB_SIZE, max_position=seq_length) for name, preset in PRESETS.items()
    }
    host = PLENTY if host_memory is None else some_bytes(host_memory, "--host-memory")
    disk = parse_bytes(disk_memory, "--disk-memory") if disk_memory else 0
    asks_for_stack = bool(host_memory or disk_memory)
    subject = find_subject(model, decoders, seq_length)
    if subject.note is not None:
        print(subject.note, file=sys.stderr, flush=True)
    run = Run(
        subject, seq_length, optimizer, precision, gradient_checkpointing,
        card.capability if card else (8, 0), expandable_segments, card.num_sms if card else NUM_SMS,
    )  # fmt: skip
    run.model()  # brings the libraries that it needs
    with set_aside():
        estimated = _advised(
            model, run, batch_size, card, gpu_bytes, host, disk, asks_for_stack, gpus, topology, advice
        )
    if html is not None:
        write_page(Path(html), estimated)
    print(json.dumps(estimated.report(), indent=2) if as_json else estimated.table())
    return 0


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


def _advised(
    model: str, run: Run, batch_size: int, card: KnownGPU | None, gpu_bytes: int | None, host: int, disk: int,
    asks_for_stack: bool, gpus: int | None, topology: str, advice: bool,
) -> Estimated:  # fmt: skip
    if gpu_bytes is not None and gpus is None and not streams_on(run, gpu_bytes):
        least, why = minimum_gpu_bytes(run)
        raise ConfigurationError(
            f"--gpu-memory {format_bytes(gpu_bytes)} is below the minimum for {model}, about {format_bytes(least)} at any "
            f"batch size: {why}"
        )
    estimated = _estimated(model, run, batch_size, card, gpu_bytes, host, disk, asks_for_stack, gpus, topology)
    if advice and gpus is None and estimated.measured is None and (estimated.fits is False or card is not None):
        return replace(estimated, advice=advice_of(estimated, (host, disk)))
    return estimated


def _estimated(
    model: str, run: Run, batch_size: int, card: KnownGPU | None, gpu_bytes: int | None, host: int, disk: int,
    asks_for_stack: bool, gpus: int | None, topology: str,
) -> Estimated:  # fmt: skip
    measured = None
    try:
        trace = run.trace(batch_size)
    except Untraceable as error:
        if run.subject.make is None:
            raise Untraceable(f"{error}; give it as package.module:factory to have two steps of it measured") from error
        if gpus is not None:
            raise Untraceable(f"{error}; --gpus divides a traced step: leave it out") from error
        print(f"{error}; two real steps are measured instead", file=sys.stderr, flush=True)
        measured = measure_run(run, batch_size)
        trace = measured.trace
    found = estimate_trace(trace, run.capability, run.expandable)
    ok = None if gpu_bytes is None else run.fits(trace, gpu_bytes)
    largest = None
    if gpu_bytes is not None and measured is None:
        largest = 0 if found.state_bytes > gpu_bytes else run.largest_batch(gpu_bytes)
    stack = speed = parallel = None
    if gpu_bytes is not None and (not ok or asks_for_stack):
        stack = estimate_offload(run, trace, gpu_bytes, host, disk)
    if card is not None and gpu_bytes is not None and measured is None:
        speed = speed_of(run, trace, batch_size, card, gpu_bytes, stack, host, disk)
        if gpus is not None:
            parallel = parallel_plan(run, trace, batch_size, card, gpu_bytes, gpus, topology)
    return Estimated(
        model, run, batch_size, trace, found, card, gpu_bytes, ok, largest, stack, speed, parallel, measured=measured
    )  # fmt: skip


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
    if not LEAST_GPU <= num_bytes <= MOST_GPU:
        raise ConfigurationError(
            f"--gpu-memory {gpu_memory} is no GPU: give between {format_bytes(LEAST_GPU)} and {format_bytes(MOST_GPU)}, with a unit, "
            "e.g. 8GiB"
        )
    return card, num_bytes
