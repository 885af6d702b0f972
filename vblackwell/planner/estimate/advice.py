"""What ``vb estimate`` advises: the run that was asked about, traced and replayed again in other ways."""

from __future__ import annotations

from collections.abc import Callable, Iterator
from dataclasses import replace
from functools import partial

import torch
from torch import nn

from vblackwell.errors import ConfigurationError, Unsupported
from vblackwell.machine.gpus import RUNTIME_BYTES, context_bytes
from vblackwell.machine.measured import rates_of
from vblackwell.machine.rates import Rates
from vblackwell.nn.convert.causal_lm import accelerate_causal_lm
from vblackwell.planner.advice import Advice, Way, advise
from vblackwell.planner.estimate.result import Estimated
from vblackwell.planner.estimator import PLENTY, OffloadEstimate, Run, estimate_offload
from vblackwell.planner.memory_estimate import estimate_trace
from vblackwell.trace.causal_lm import language_loss
from vblackwell.trace.trace import Trace
from vblackwell.trace.work import Work, phase_seconds

MOST_SHOWN = 6
NARROW = "products in bf16"
NARROW_WEIGHTS = "weights and products in bf16; vb train keeps fp32 masters beside them"
FUSED_BYTES = 28  # a parameter, that a fused AdamW reads and writes
FOREACH = ("adamw", "adamw-for-loop")
FUSED_STACK = "an offload stack, vb.accelerate_causal_lm(model)"


def _traced_ways(
    run: Run, batch_size: int, rates: Rates | None, gpu_bytes: int | None, below: tuple[int, int]
) -> list[Way]:  # fmt: skip
    """The run on fused operators, and in bf16: a trace of the run as it is shows neither.

    Args:
        gpu_bytes: of the GPU whose level 0 an offload stack may have; None: no stack is looked at. below: as for `advice_of`.
    """
    found = _fused_operators(run, batch_size, rates, gpu_bytes, below)
    if run.precision == "fp32":
        found += _traced("--precision autocast", replace(run, precision="autocast"), batch_size, rates, NARROW)
        found += (
            [] if found else _traced("--precision bf16", replace(run, precision="bf16"), batch_size, rates, NARROW_WEIGHTS)
        )  # fmt: skip
    return found


def _smaller_batches(run: Run, batch_size: int, rates: Rates | None) -> Iterator[Way]:
    if batch_size > 1:
        smaller = batch_size // 2
        change = f"batches of {smaller}, gradients of {-(-batch_size // smaller)} added up"
        yield from _traced(change, run, smaller, rates)


def advice_of(estimated: Estimated, below: tuple[int, int] = (PLENTY, 0)) -> tuple[Advice, ...]:
    """What would save memory or time, each line with its numbers; memory first where it does not fit.

    Args:
        below: bytes of RAM and of disk that an offload stack may take.
    """
    run = estimated.run
    rates = None if estimated.card is None else rates_of(estimated.card)
    now = _way("", run, estimated.trace, estimated.batch_size, rates)
    changed = replace(run, checkpointing=True)
    recomputing = None if run.checkpointing else _trace_of(changed, estimated.batch_size)
    ways = list(_ways(estimated, rates))
    if recomputing is not None:
        ways.append(_way("--gradient-checkpointing", changed, recomputing, estimated.batch_size, rates))
    smaller = list(_smaller_batches(run, estimated.batch_size, rates))
    traced = _traced_ways(run, estimated.batch_size, rates, estimated.gpu_bytes, below)
    lacks_a_stack = estimated.stack is not None and estimated.stack.refused is not None
    ways += [way for way in traced if lacks_a_stack or not way.change.startswith(FUSED_STACK)]
    ways += smaller
    ways += _streamed(estimated)
    if recomputing is not None:
        ways += _streamed_recomputing(estimated, changed, recomputing, below)
    tokens = estimated.batch_size * run.seq_length
    found = advise(now, ways, tokens, for_memory=estimated.fits is False)
    return tuple(found[:MOST_SHOWN])


def _way(change: str, run: Run, trace: Trace, batch_size: int, rates: Rates | None, also: str = "") -> Way:
    tokens = batch_size * run.seq_length
    memory = estimate_trace(trace, run.capability, run.expandable)
    seconds = None if rates is None else sum(phase_seconds(trace.work, rates).values()) / tokens
    return Way(change, memory.peak_p50, seconds, sum(each.flops for each in trace.work) / tokens, also)


def _ways(estimated: Estimated, rates: Rates | None) -> Iterator[Way]:
    run, batch_size, trace = estimated.run, estimated.batch_size, estimated.trace
    if not run.expandable:
        changed = replace(run, expandable=True)
        yield _way("PYTORCH_ALLOC_CONF=expandable_segments:True", changed, trace, batch_size, rates)
    if run.optimizer in FOREACH:
        yield _way("torch.optim.AdamW(fused=True)", run, fused(trace), batch_size, rates)


def _fused_operators(
    run: Run, batch_size: int, rates: Rates | None, gpu_bytes: int | None, below: tuple[int, int]
) -> list[Way]:  # fmt: skip
    """A model of transformers on fused operators and without the logits of a batch, and a stack under it, recomputing only if it must."""
    if run.subject.loss is not language_loss:
        return []  # ours runs on them in any case
    changed = replace(run, subject=replace(run.subject, build=partial(_accelerated, run.subject.build)))
    trace = _trace_of(changed, batch_size)
    if trace is None:
        return []
    found = [_way("vb.accelerate_causal_lm(model)", changed, trace, batch_size, rates)]
    if gpu_bytes is None:
        return found
    for recomputes in (False,) if run.checkpointing else (False, True):
        if recomputes:
            changed = replace(changed, checkpointing=True)
            trace = _trace_of(changed, batch_size)
        stack = None if trace is None else estimate_offload(changed, trace, gpu_bytes, *below)
        if trace is not None and stack is not None and not stack.refused:
            change = f"{FUSED_STACK}{', --gradient-checkpointing' * recomputes} (vb train --vgpu-auto)"
            work = sum(each.flops for each in trace.work) / (batch_size * run.seq_length)
            found.append(replace(_stacked(change, changed, stack, None), work=work))
            break
    return found


def _accelerated(build: Callable[[torch.dtype], nn.Module], dtype: torch.dtype) -> nn.Module:
    model = build(dtype)
    accelerate_causal_lm(model)
    return model


def fused(trace: Trace) -> Trace:
    """``trace`` with one kernel for the optimizer: nothing is made in its step but states, and every parameter passes once."""
    ends = [index for index, _, _ in trace.marks[1:]] + [len(trace.events)]
    made = {
        event
        for (start, _, phase), end in zip(trace.marks, ends, strict=True)
        if phase == "optimizer"
        for event in trace.events[start:end]
        if event >= 0 and trace.categories[event] == "workspace"
    }
    events = tuple(event for event in trace.events if (event if event >= 0 else ~event) not in made)
    update = Work("optimizer", 0.0, FUSED_BYTES * trace.trainable, 4)
    return replace(trace, events=events, work=(*(each for each in trace.work if each.phase != "optimizer"), update))


def _traced(change: str, run: Run, batch_size: int, rates: Rates | None, also: str = "") -> Iterator[Way]:
    trace = _trace_of(run, batch_size)
    if trace is not None:
        yield _way(change, run, trace, batch_size, rates, also)


def _trace_of(run: Run, batch_size: int) -> Trace | None:
    try:
        return run.trace(batch_size)
    except (ConfigurationError, Unsupported):
        return None  # this model cannot be run so: nothing to advise


def _streamed(estimated: Estimated) -> Iterator[Way]:
    """Through an offload stack, where the estimate has one."""
    stack, speed = estimated.stack, estimated.speed
    if stack is None or stack.refused:
        return
    seconds = None if speed is None or speed.streamed is None else 1 / speed.streamed
    yield _stacked("an offload stack (vb train --vgpu-auto)", estimated.run, stack, seconds)


def _streamed_recomputing(estimated: Estimated, run: Run, trace: Trace, below: tuple[int, int]) -> Iterator[Way]:
    """The stack with ``trace``, of the same step with checkpointing, where it does not fit without."""
    if estimated.gpu_bytes is None or estimated.stack is None or not estimated.stack.refused:
        return
    stack = estimate_offload(run, trace, estimated.gpu_bytes, *below)
    if not stack.refused:
        change = "an offload stack with --gradient-checkpointing (vb train --vgpu-auto)"
        tokens = estimated.batch_size * run.seq_length
        yield replace(_stacked(change, run, stack, None), work=sum(each.flops for each in trace.work) / tokens)


def _stacked(change: str, run: Run, stack: OffloadEstimate, seconds: float | None) -> Way:
    peak = context_bytes(run.capability) + RUNTIME_BYTES + stack.level0 + stack.step + stack.fragmentation
    disk = f" and {stack.disk / 2**30:.1f} GiB of disk" if stack.disk else ""
    return Way(change, peak, seconds, also=f"{stack.host / 2**30:.1f} GiB of RAM{disk}")
