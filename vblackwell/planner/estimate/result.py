"""What ``vb estimate`` found out about one run, as a table for people and as JSON values."""

from dataclasses import asdict, dataclass
from typing import Any

from vblackwell.machine.gpus import KnownGPU
from vblackwell.planner.estimate.measured import Measured
from vblackwell.planner.forecast import OffloadEstimate
from vblackwell.planner.memory_estimate import P99_BYTES, P99_PERCENT, MemoryEstimate, Run
from vblackwell.planner.placement import lane_words
from vblackwell.planner.several_gpus import ShardedStep
from vblackwell.trace.trace import Trace
from vblackwell.units import format_bytes

# Of 21 placements of a small decoder (docs/journal/estimate.md), whose steps waited for the host.
STREAMED_ERROR = (
    "on an H200 streamed steps with AdamW on the GPU were predicted up to 9 % too fast, and with some of it on the CPU "
    "more"
)
SHOWN = {
    "weights": "weights", "gradients": "gradients", "optimizer": "optimizer states", "activations": "activations",
    "logits_and_loss": "logits and loss", "workspace": "workspace", "fragmentation": "fragmentation",
    "context": "CUDA context",
}  # fmt: skip


def both_units(num_bytes: int) -> str:
    """With GB, in which vendors and papers count, from one on."""
    return format_bytes(num_bytes) + (f" ({num_bytes / 1e9:.1f} GB)" if num_bytes >= 1e9 else "")


@dataclass(frozen=True)
class Advice:
    """A change that pays: ``saved_bytes`` of the GPU's peak, which comes to ``peak_bytes``; its cost in words."""

    change: str
    saved_bytes: int
    saved_time: float | None
    cost: str
    peak_bytes: int

    def __str__(self) -> str:
        peak = f" (peak {format_bytes(self.peak_bytes)})"
        saved = [f"{format_bytes(self.saved_bytes)} of the GPU{peak}"] if self.saved_bytes > 0 else []
        if self.saved_time is not None and self.saved_time > 0:
            saved.append(f"{self.saved_time:.0%} of the time")
        return f"{self.change}: saves {' and '.join(saved)}; costs {self.cost}"


@dataclass(frozen=True)
class Estimated:
    """A run and what it takes of the ``card`` or ``gpu_bytes`` that were asked about.

    Attributes:
        fits, largest: whether it does, and the largest batch that does; None where no size was given.
        resident: tokens/s with everything on the GPU, whether or not it fits, by ``rates`` of a known card.
        measured: the steps that were run, where the model could not be traced.
    """

    run: Run
    batch_size: int
    trace: Trace
    memory: MemoryEstimate
    card: KnownGPU | None = None
    gpu_bytes: int | None = None
    fits: bool | None = None
    largest: int | None = None
    stack: OffloadEstimate | None = None
    resident: float | None = None
    rates: str | None = None
    several: ShardedStep | None = None
    advice: tuple[Advice, ...] = ()
    measured: Measured | None = None

    @property
    def tokens_per_second(self) -> float | None:
        """Resident if it fits, else streamed; None where that is not known."""
        return self.resident if self.fits else self.stack.tokens_per_second if self.stack else None

    def title(self) -> str:
        run = self.run
        how = f"{run.precision}, {run.optimizer}{', gradient checkpointing' if run.checkpointing else ''}"
        batch = f"batch {self.batch_size} x {run.seq_length} tokens"
        return f"{run.spec.name}: {self.memory.parameters:,} parameters, {batch}, {how}"

    def assumptions(self) -> list[str]:
        """What the numbers rest on, a line each."""
        run = self.run
        found = [] if run.spec.note is None else [run.spec.note]
        if self.measured is not None:
            ran = f"two steps were run on {self.measured.where}, the second in {self.measured.step_seconds:.3g} s"
            replayed = "and their allocations replayed; other batches are not known"
            found.append(f"the model cannot be traced: {ran}, {replayed}")
        where = self.card.name if self.card else "a GPU"
        context = "measured on an H200" if run.capability[0] == 9 else "assumed from the architecture, not measured"
        found += [
            f"two training steps of {self.batch_size} x {run.seq_length} tokens, {run.precision}, torch's "
            f"{run.optimizer}, gradients set to None",
            f"{where} of compute capability {run.capability[0]}.{run.capability[1]}; its CUDA context is {context}",
            f"P99 adds {P99_PERCENT} % of what is reserved and {format_bytes(P99_BYTES)} for what is not modelled",
        ]
        if self.stack is not None and run.fused is not run:
            found.append("an offload stack runs the model on fused operators, as it does unless accelerate=False")
        if self.resident is not None:
            found.append(f"speeds by {self.rates}; {STREAMED_ERROR}")
        if self.several is not None:
            found.append("several GPUs by formulas alone, never measured here: every message 10 us")
        return found

    def report(self) -> dict[str, Any]:
        values, stack = self.memory.as_dict(), self.stack
        plan: dict[str, Any] = {"largest_batch_size": self.largest}
        if stack is not None and stack.refused:
            plan["offload"] = {"refused": stack.refused}
        elif stack is not None:
            names = "level0", "host", "disk", "activations_and_workspace", "fragmentation"
            sizes = stack.level0, stack.host, stack.disk, stack.step, stack.fragmentation
            plan["offload"] = dict(zip(names, sizes, strict=True))
        if self.resident is not None:
            streamed, bottleneck = (stack.tokens_per_second, stack.bottleneck) if stack else (None, None)
            plan["speed"] = {"resident": self.resident, "streamed": streamed, "bottleneck": bottleneck}
            plan["speed"]["rates"] = self.rates
        if self.several is not None:
            plan["several_gpus"] = self.several.as_dict()
        found: dict[str, Any] = {"model": self.run.spec.name, "parameters": values.pop("parameters"), "bytes": values}
        found |= {"gpu_bytes": self.gpu_bytes, "fits": self.fits, "tokens_per_second": self.tokens_per_second}
        found |= {"plan": plan, "advice": [asdict(each) for each in self.advice]}
        found["method"] = "traced" if self.measured is None else f"measured on {self.measured.where}"
        return found | {"assumptions": self.assumptions()}

    def plan_lines(self) -> list[str]:
        """What to do with it, a line each."""
        lines, stack = [], self.stack
        if self.gpu_bytes is not None:
            largest = "not known" if self.measured else self.largest or "none"
            fits = f"{'fits' if self.fits else 'does not fit'} {format_bytes(self.gpu_bytes)}"
            lines.append(f"{fits}; largest batch that does: {largest}")
        if stack is not None and stack.refused:
            lines.append(f"with an offload stack it does not fit either: {stack.refused}")
        elif stack is not None:
            disk = f", {format_bytes(stack.disk)} of disk" if stack.disk else ""
            level0, step, lost, host = map(format_bytes, (stack.level0, stack.step, stack.fragmentation, stack.host))
            held = f"{level0} of weights and buffers and {step} of activations and workspace on the GPU"
            lines.append(f"with an offload stack: {held}, about {lost} lost between them, {host} of RAM{disk}")
        if self.resident is not None and self.fits:
            lines.append(f"about {self.resident:,.0f} tokens/s")
        if stack is not None and stack.tokens_per_second is not None:
            lines.append(
                f"about {stack.tokens_per_second:,.0f} tokens/s streamed; busiest: {lane_words(stack.bottleneck or '')}"
            )
        if self.several is not None:
            lines += self.several.lines()
        return lines

    def table(self) -> str:
        values, state = self.memory.as_dict(), self.memory.state_bytes
        shown = SHOWN | {"peak_p50": "peak (P50)", "peak_p99": "plan for (P99)"}
        lines = [self.title(), "", "  of the peak:"]
        lines += [f"  {text:<18}{format_bytes(values[name]):>12}" for name, text in shown.items()]
        whole = f"weights, gradients and optimizer states in full: {both_units(state)}"
        lines += ["", *(f"  {line}" for line in [whole, *self.plan_lines()])]
        if self.advice:
            lines += ["", "  what would help:", *(f"    {each}" for each in self.advice)]
        return "\n".join([*lines, "", *(f"  assumes {text}" for text in self.assumptions())])
