"""What ``vb estimate`` advises: the run traced and replayed in other ways, what each saves in bytes or seconds, and
what it costs.

What saves neither noticeably is not said. No number, no advice.
"""

from __future__ import annotations

from collections.abc import Callable, Iterable, Iterator
from dataclasses import dataclass, replace
from functools import partial

import torch
from torch import nn

from vblackwell.errors import ConfigurationError, Unsupported
from vblackwell.machine.gpus import RUNTIME_BYTES, context_bytes
from vblackwell.machine.rates import Rates, rates_of
from vblackwell.nn.convert.causal_lm import accelerate_causal_lm
from vblackwell.planner.estimate.result import Advice, Estimated
from vblackwell.planner.forecast import PLENTY, OffloadEstimate, estimate_offload
from vblackwell.planner.memory_estimate import Run, estimate_trace
from vblackwell.trace.causal_lm import language_loss
from vblackwell.trace.trace import Trace
from vblackwell.trace.work import Work, phase_seconds
from vblackwell.units import GiB, format_bytes, format_seconds

MAX_SHOWN = 6
MIN_SHARE = 0.02  # of the peak, or of the step: what saves less is within what predictions are off by
NARROW = "products in bf16"
NARROW_WEIGHTS = "weights and products in bf16; vb train keeps fp32 masters in addition"
FUSED_BYTES = 28  # a parameter, that a fused AdamW reads and writes
FOREACH = ("adamw", "adamw-for-loop")
RECOMPUTING = "--gradient-checkpointing"
FUSED = "vb.accelerate_causal_lm(model)"
FUSED_STACK = f"an offload stack, {FUSED}"


@dataclass(frozen=True)
class Way:
    """One way to run.

    Attributes:
        change: what to say to get it; for the present way anything.
        peak: bytes of the GPU. seconds: of a token, None where the GPU's speed is not known. work: operations of a
            token.
        also: what it costs in addition, as measured, with where.
    """

    change: str
    peak: int
    seconds: float | None = None
    work: float = 0.0
    also: str = ""


def advise(now: Way, others: Iterable[Way], tokens: int, *, for_memory: bool) -> list[Advice]:
    """What of ``others`` saves at least `MIN_SHARE` of the peak or of the time, the most first.

    Args:
        tokens: a step, for costs in seconds.
        for_memory: whether memory is what is missing; otherwise time comes first.
    """
    found = []
    for other in others:
        saved_bytes, saved_time = now.peak - other.peak, None
        if now.seconds is not None and other.seconds is not None:
            saved_time = 1 - other.seconds / now.seconds
        if saved_bytes >= MIN_SHARE * now.peak or (saved_time or 0.0) >= MIN_SHARE:
            found.append(Advice(other.change, saved_bytes, saved_time, _cost(now, other, tokens), other.peak))
    return sorted(found, key=lambda each: -each.saved_bytes if for_memory else -(each.saved_time or 0.0))


def _cost(now: Way, other: Way, tokens: int) -> str:
    costs = []
    if other.peak > now.peak * (1 + MIN_SHARE):
        costs.append(f"{format_bytes(other.peak - now.peak)} of the GPU")
    if now.seconds is not None and other.seconds is not None:
        longer = other.seconds / now.seconds - 1
        if longer >= MIN_SHARE / 2:
            more = format_seconds((other.seconds - now.seconds) * tokens)
            costs.append(f"{longer:.0%} more time ({more} in {tokens:,} tokens)")
    elif other.work > now.work * (1 + MIN_SHARE / 2):
        costs.append(f"{other.work / now.work - 1:.0%} more operations")
    costs += [other.also] if other.also else []
    return ", ".join(costs) or "nothing that was measured"


def advice_of(estimated: Estimated, below: tuple[int, int] = (PLENTY, 0)) -> tuple[Advice, ...]:
    """What would save memory or time, each line with its numbers; memory first where it does not fit.

    Args:
        below: bytes of RAM and of disk that an offload stack may take.
    """
    ways = _Ways(estimated, below)
    now = ways.way("", estimated.run, estimated.trace)
    found = advise(now, ways.others(), ways.tokens, for_memory=estimated.fits is False)
    return tuple(found[:MAX_SHOWN])


class _Ways:
    """The ways to run what was estimated: with other flags, on fused operators, through an offload stack."""

    def __init__(self, estimated: Estimated, below: tuple[int, int]) -> None:
        self.estimated, self.below, self.run = estimated, below, estimated.run
        self.tokens = estimated.batch_size * estimated.run.seq_length
        self.rates: Rates | None = None if estimated.card is None else rates_of(estimated.card)

    def others(self) -> Iterator[Way]:
        run, trace, stack = self.run, self.estimated.trace, self.estimated.stack
        changed = replace(run, checkpointing=True)
        recomputing = None if run.checkpointing else self._trace_of(changed)
        if not run.expandable:
            yield self.way("PYTORCH_ALLOC_CONF=expandable_segments:True", replace(run, expandable=True), trace)
        if run.optimizer in FOREACH:
            yield self.way("torch.optim.AdamW(fused=True)", run, fused(trace))
        if recomputing is not None:
            yield self.way(RECOMPUTING, changed, recomputing)
        traced = list(self._on_fused_operators())
        if run.precision == "fp32":
            traced += self._traced("--precision autocast", replace(run, precision="autocast"), NARROW)
        if run.precision == "fp32" and not traced:
            traced += self._traced("--precision bf16", replace(run, precision="bf16"), NARROW_WEIGHTS)
        lacks_a_stack = stack is not None and stack.refused is not None
        yield from (way for way in traced if lacks_a_stack or not way.change.startswith(FUSED_STACK))
        if (batch_size := self.estimated.batch_size) > 1:
            smaller = batch_size // 2
            change = f"batches of {smaller}, gradients of {-(-batch_size // smaller)} added up"
            yield from self._traced(change, run, batch_size=smaller)
        if stack is not None and not stack.refused:
            yield self._stacked("an offload stack (vb train --vgpu-auto)", run, stack)
        elif stack is not None and recomputing is not None:
            change = f"an offload stack with {RECOMPUTING} (vb train --vgpu-auto)"
            yield from self._traced_stack(change, changed, recomputing)

    def _on_fused_operators(self) -> Iterator[Way]:
        """A model of transformers without the logits of a batch, and a stack under it, recomputing only if it must."""
        if self.run.spec.loss is not language_loss:
            return  # ours runs on them in any case
        run = replace(self.run, spec=replace(self.run.spec, build=partial(_accelerated, self.run.spec.build)))
        trace = self._trace_of(run)
        if trace is None:
            return
        yield self.way(FUSED, run, trace)
        stacked = list(self._traced_stack(f"{FUSED_STACK} (vb train --vgpu-auto)", run, trace))
        if not stacked and not run.checkpointing and self.estimated.gpu_bytes is not None:
            run = replace(run, checkpointing=True)
            trace = self._trace_of(run)
            stacked += self._traced_stack(f"{FUSED_STACK}, {RECOMPUTING} (vb train --vgpu-auto)", run, trace)
        yield from stacked

    def _trace_of(self, run: Run, batch_size: int | None = None) -> Trace | None:
        try:
            return run.trace(batch_size or self.estimated.batch_size)
        except (ConfigurationError, Unsupported):
            return None  # this model cannot be run so: nothing to advise

    def _traced(self, change: str, run: Run, also: str = "", batch_size: int | None = None) -> Iterator[Way]:
        trace = self._trace_of(run, batch_size)
        if trace is not None:
            yield self.way(change, run, trace, also, batch_size)

    def way(self, change: str, run: Run, trace: Trace, also: str = "", batch_size: int | None = None) -> Way:
        tokens = (batch_size or self.estimated.batch_size) * run.seq_length
        memory = estimate_trace(trace, run.capability, run.expandable)
        seconds = None if self.rates is None else sum(phase_seconds(trace.work, self.rates).values()) / tokens
        return Way(change, memory.peak_p50, seconds, _flops(trace) / tokens, also)

    def _traced_stack(self, change: str, run: Run, trace: Trace | None) -> Iterator[Way]:
        """An offload stack for the step that ``trace`` is of, if it fits."""
        estimated = self.estimated
        if trace is None or estimated.gpu_bytes is None:
            return
        stack = estimate_offload(run, trace, estimated.batch_size, estimated.gpu_bytes, *self.below)
        if not stack.refused:
            yield replace(self._stacked(change, run, stack), work=_flops(trace) / self.tokens)

    def _stacked(self, change: str, run: Run, stack: OffloadEstimate) -> Way:
        peak = context_bytes(run.capability) + RUNTIME_BYTES + stack.level0 + stack.step + stack.fragmentation
        disk = f" and {stack.disk / GiB:.1f} GiB of disk" if stack.disk else ""
        seconds = None if stack.tokens_per_second is None else 1 / stack.tokens_per_second
        return Way(change, peak, seconds, also=f"{stack.host / GiB:.1f} GiB of RAM{disk}")


def _flops(trace: Trace) -> float:
    return sum(each.flops for each in trace.work)


def _accelerated(build: Callable[[torch.dtype], nn.Module], dtype: torch.dtype) -> nn.Module:
    model = build(dtype)
    accelerate_causal_lm(model)
    return model


def fused(trace: Trace) -> Trace:
    """``trace`` with one kernel for the optimizer: nothing is made in its step but states, and every parameter passes
    once.
    """
    made = {index for index in trace.born_in("optimizer") if trace.categories[index] == "workspace"}
    rest = tuple(each for each in trace.work if each.phase != "optimizer")
    return replace(trace.without(made), work=(*rest, Work("optimizer", 0.0, FUSED_BYTES * trace.trainable, 4)))
