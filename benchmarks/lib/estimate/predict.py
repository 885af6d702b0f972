"""What `vblackwell.planner` expects of a case: traced on meta, replayed through the allocator's rules. CPU only."""

from __future__ import annotations

import os
from dataclasses import asdict, replace
from typing import Any

import torch

from benchmarks.lib.estimate.cases import Case
from benchmarks.lib.estimate.models import build
from vblackwell.machine.gpus import RUNTIME_BYTES, context_bytes, find_gpu
from vblackwell.machine.rates import Rates, rates_of
from vblackwell.planner.forecast import PLENTY, STREAMED_P99, estimate_offload
from vblackwell.planner.memory_estimate import OPTIMIZERS, P99_BYTES, Batches, Run, estimate_trace, fits
from vblackwell.planner.model_spec import ModelSpec
from vblackwell.trace.allocator import replay
from vblackwell.trace.trace import Trace, trace_training
from vblackwell.trace.work import host_seconds, phase_seconds, reading_seconds
from vblackwell.units import MiB

STEP = 2 * MiB  # to which the smallest cap is searched: what the allocator's segments are rounded to


def trace_case(case: Case, capability: tuple[int, int]) -> Trace:
    """Two steps of ``case`` on tensors without bytes."""
    built = build(case)
    autocast = torch.bfloat16 if case.precision == "autocast" else None
    return trace_training(
        built.model,
        built.batch("cuda"),
        built.loss,
        OPTIMIZERS[case.optimizer],
        autocast=autocast,
        capability=capability,
    )


def chosen_batch(case: Case, capability: tuple[int, int]) -> int:
    """The largest batch that is predicted to fit the case's card."""

    def at(batch: int) -> Trace:
        return trace_case(replace(case, batch=batch), capability)

    return Batches(at).largest(lambda size, trace: fits(trace, case.card_bytes, capability, case.expandable))


def smallest_cap(trace: Trace, low: int, high: int, expandable: bool) -> int:
    """The smallest limit on reserved bytes under which the replay succeeds, to `STEP`; ``high`` is known to."""
    while high - low > STEP:
        middle = (low + high) // 2
        low, high = (low, middle) if replay(trace, middle, expandable).fits else (middle, high)
    return high


def predict(
    case: Case,
    capability: tuple[int, int],
    with_cap: bool = False,
    gpu: str = "H200",
    measured: dict[str, Any] | None = None,
) -> dict[str, Any]:
    """The estimate of ``case`` as JSON values; for a card, of the batch that it chooses first.

    Args:
        gpu: whose rates step times go by, unless ``measured`` are there (``asdict`` of `Rates`).
    """
    if case.card_bytes and not case.batch:
        case = replace(case, batch=chosen_batch(case, capability))
    trace = trace_case(case, capability)
    found: dict[str, Any] = {"case": asdict(case)}
    if case.stack:
        found |= _through_stack(case, trace, capability)
    else:
        estimate = estimate_trace(trace, capability, case.expandable)
        found |= estimate.as_dict()
        rates = Rates.from_dict(measured) if measured else rates_of(find_gpu(gpu))
        found |= seconds_of(trace, rates)
        if with_cap:
            found["smallest_cap"] = smallest_cap(trace, estimate.allocated - STEP, estimate.reserved, case.expandable)
    return found


def predict_without_gpu(**arguments: Any) -> dict[str, Any]:
    """`predict` in a process that is shown no GPU, as on a laptop: it may not need one."""
    os.environ["CUDA_VISIBLE_DEVICES"] = ""
    return predict(**arguments)


def seconds_of(trace: Trace, rates: Rates) -> dict[str, float]:
    """Of a step, and of the GPU and of the host alone."""
    never = 1e-15
    on_gpu = sum(phase_seconds(trace.work, replace(rates, issue_seconds=never)).values())
    on_host = sum(host_seconds(each, rates) for each in trace.work)
    step = max(on_gpu, on_host) + reading_seconds(trace.work, rates)
    return {"step_seconds": step, "gpu_seconds": on_gpu, "host_seconds": on_host}


def _through_stack(case: Case, trace: Trace, capability: tuple[int, int]) -> dict[str, Any]:
    spec = ModelSpec(
        case.family, lambda dtype: build(case).model, 1, lambda model, batch: build(case).loss(model, batch)
    )
    run = Run(spec, case.seq, case.optimizer, case.precision, case.checkpointing, capability)
    context = context_bytes(capability) + RUNTIME_BYTES
    bare = estimate_offload(run, trace, case.batch, PLENTY, PLENTY, 0)
    room = int((case.level0_bytes + bare.step) * STREAMED_P99) + P99_BYTES + 1
    stack = estimate_offload(run, trace, case.batch, context + room, PLENTY, 0)
    if stack.refused:
        raise ValueError(f"the stack refuses: {stack.refused}")
    total = stack.level0 + stack.step
    reserved = total + stack.fragmentation
    return {
        "parameters": trace.num_parameters,
        "allocated": total,
        "reserved": reserved,
        "context": context,
        "peak_p50": reserved + context,
        "peak_p99": int(reserved * STREAMED_P99) + P99_BYTES + context,
        "host": stack.host,
        "level0": stack.level0,
    }
