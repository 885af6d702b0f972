"""``vb estimate``: what training a model will take of a GPU, as a table or JSON. Nothing is run and nothing is written."""

from __future__ import annotations

import json
from typing import Any

from vblackwell.errors import ConfigurationError
from vblackwell.estimator import (
    PLENTY,
    OffloadEstimate,
    Run,
    check_batch,
    estimate_offload,
    find_subject,
    minimum_gpu_bytes,
    streams_on,
)
from vblackwell.plan.estimate import P99_BYTES, P99_PERCENT, MemoryEstimate, estimate_trace
from vblackwell.plan.gpus import KnownGPU, find_gpu
from vblackwell.train.estimate_speed import Speed, speed_of
from vblackwell.train.presets import GPT2_VOCAB_SIZE, PRESETS
from vblackwell.units import MiB, TiB, format_bytes, parse_bytes

LEAST_GPU, MOST_GPU = MiB, 16 * TiB
SHOWN = (
    ("weights", "weights"), ("gradients", "gradients"), ("optimizer", "optimizer states"), ("activations", "activations"),
    ("logits_and_loss", "logits and loss"), ("workspace", "workspace"), ("fragmentation", "fragmentation"), ("context", "CUDA context"),
)  # fmt: skip


def estimate_command(
    model: str, gpu: str | None, gpu_memory: str | None, batch_size: int, seq_length: int, optimizer: str, precision: str,
    gradient_checkpointing: bool, expandable_segments: bool, host_memory: str | None, disk_memory: str | None, as_json: bool,
) -> int:  # fmt: skip
    """Print the estimate; 0.

    Raises:
        ConfigurationError: bad input, or a GPU below what the model needs at any batch size.
    """
    check_batch(batch_size, seq_length)
    card, gpu_bytes = _card(gpu, gpu_memory)
    decoders = {
        name: preset.decoder_config(GPT2_VOCAB_SIZE, max_position=seq_length) for name, preset in PRESETS.items()
    }
    run = Run(
        find_subject(model, decoders, seq_length), seq_length, optimizer, precision, gradient_checkpointing,
        card.capability if card else (8, 0), expandable_segments,
    )  # fmt: skip
    if gpu_bytes is not None and not streams_on(run, gpu_bytes):
        least, why = minimum_gpu_bytes(run)
        raise ConfigurationError(
            f"--gpu-memory {format_bytes(gpu_bytes)} is below the minimum for {model}, about {format_bytes(least)} at any "
            f"batch size: {why}"
        )
    trace = run.trace(batch_size)
    found = estimate_trace(trace, run.capability, expandable_segments)
    ok = None if gpu_bytes is None else run.fits(trace, gpu_bytes)
    largest = None if gpu_bytes is None else 0 if found.state_bytes > gpu_bytes else run.largest_batch(gpu_bytes)
    stack = None
    host = parse_bytes(host_memory, "--host-memory") if host_memory else PLENTY
    disk = parse_bytes(disk_memory, "--disk-memory") if disk_memory else 0
    if gpu_bytes is not None and (not ok or host_memory or disk_memory):
        stack = estimate_offload(run, trace, gpu_bytes, host, disk)
    speed = None
    if card is not None and gpu_bytes is not None:
        speed = speed_of(run, trace, batch_size, card, gpu_bytes, stack, host, disk)
    assumptions = _assumptions(run, batch_size, card, speed)
    if as_json:
        print(json.dumps(_report(model, found, ok, largest, stack, gpu_bytes, speed, assumptions), indent=2))
    else:
        print(_table(model, run, batch_size, found, ok, largest, stack, gpu_bytes, speed, assumptions))
    return 0


def _card(gpu: str | None, gpu_memory: str | None) -> tuple[KnownGPU | None, int | None]:
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


def _assumptions(run: Run, batch_size: int, card: KnownGPU | None, speed: Speed | None) -> list[str]:
    where = card.name if card else "a GPU"
    context = "measured on an H200" if run.capability[0] == 9 else "assumed from the architecture, not measured"
    found = [
        f"two training steps of {batch_size} x {run.seq_length} tokens, {run.precision}, torch's {run.optimizer}, gradients set to None",
        f"{where} of compute capability {run.capability[0]}.{run.capability[1]}; its CUDA context is {context}",
        f"P99 adds {P99_PERCENT} % of what is reserved and {format_bytes(P99_BYTES)} for what is not modelled",
    ]
    if speed is not None:
        found.append(f"speeds by {speed.rates}; streamed without the host's own time, on an H200 6 % too fast")
    return found


def _report(
    model: str, found: MemoryEstimate, ok: bool | None, largest: int | None, stack: OffloadEstimate | None, gpu_bytes: int | None,
    speed: Speed | None, assumptions: list[str],
) -> dict[str, Any]:  # fmt: skip
    values = found.as_dict()
    parameters = values.pop("parameters")
    plan: dict[str, Any] = {"largest_batch_size": largest}
    if stack is not None:
        plan["offload"] = {"refused": stack.refused} if stack.refused else _levels(stack)
    if speed is not None:
        plan["speed"] = speed.as_dict()
    tokens_per_second = None if speed is None else speed.resident if ok else speed.streamed
    return {
        "model": model, "parameters": parameters, "bytes": values, "gpu_bytes": gpu_bytes, "fits": ok,
        "tokens_per_second": tokens_per_second,
        "plan": plan, "assumptions": assumptions,
    }  # fmt: skip


def _levels(stack: OffloadEstimate) -> dict[str, int]:
    return {"level0": stack.level0, "host": stack.host, "disk": stack.disk, "activations_and_workspace": stack.step}


def _table(
    model: str, run: Run, batch_size: int, found: MemoryEstimate, ok: bool | None, largest: int | None, stack: OffloadEstimate | None,
    gpu_bytes: int | None, speed: Speed | None, assumptions: list[str],
) -> str:  # fmt: skip
    values = found.as_dict()
    lines = [
        f"{model}: {found.parameters:,} parameters, batch {batch_size} x {run.seq_length} tokens, {run.precision}, {run.optimizer}",
        "",
    ]
    lines += [f"  {text:<18}{format_bytes(values[name]):>12}" for name, text in SHOWN]
    lines += [
        f"  {'peak (P50)':<18}{format_bytes(found.peak_p50):>12}",
        f"  {'plan for (P99)':<18}{format_bytes(found.peak_p99):>12}",
        "",
    ]
    lines.append(
        f"  weights, gradients and optimizer states in full: {format_bytes(found.state_bytes)} ({found.state_bytes / 1e9:.1f} GB)"
    )
    if gpu_bytes is not None:
        lines.append(
            f"  {'fits' if ok else 'does not fit'} {format_bytes(gpu_bytes)}; largest batch that does: {largest or 'none'}"
        )
    if stack is not None and stack.refused:
        lines.append(f"  with an offload stack it does not fit either: {stack.refused}")
    elif stack is not None:
        disk = f", {format_bytes(stack.disk)} of disk" if stack.disk else ""
        lines.append(
            f"  with an offload stack: {format_bytes(stack.level0)} of level 0 and {format_bytes(stack.step)} of activations and "
            f"workspace on the GPU, {format_bytes(stack.host)} of RAM{disk}"
        )
    if speed is not None and ok:
        lines.append(f"  about {speed.resident:,.0f} tokens/s")
    if speed is not None and speed.streamed is not None:
        lines.append(f"  about {speed.streamed:,.0f} tokens/s streamed; busiest: {speed.bottleneck}")
    return "\n".join([*lines, "", *(f"  assumes {text}" for text in assumptions)])
