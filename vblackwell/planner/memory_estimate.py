"""A model and how it is trained, its trace, and from that numbers a user can act on: peak bytes by category, whether
they fit, and the largest batch that does.
"""

from __future__ import annotations

import warnings
from collections.abc import Callable, Iterable
from dataclasses import asdict, dataclass, replace
from typing import Any

import torch
from torch import nn

from vblackwell.errors import ConfigurationError, nearest
from vblackwell.machine.gpus import NUM_SMS, context_bytes
from vblackwell.nn.decoder.decoder import Decoder
from vblackwell.planner.model_spec import ModelSpec
from vblackwell.trace.allocator import replay
from vblackwell.trace.causal_lm import language_batch, plain_batches
from vblackwell.trace.trace import CATEGORIES, Trace, trace_training
from vblackwell.units import MiB

# What P99 adds to the reserved bytes for what is not modelled: kernels' own workspaces, other orders of frees
# (docs/journal/estimate.md).
P99_PERCENT, P99_BYTES = 3, 64 * MiB
PRECISIONS = ("fp32", "bf16", "autocast")
NOT_STATE = ("activations", "logits_and_loss", "workspace")
OPTIMIZERS: dict[str, Callable[[Iterable[nn.Parameter]], torch.optim.Optimizer]] = {
    "adamw": lambda parameters: torch.optim.AdamW(parameters),
    "adamw-fused": lambda parameters: torch.optim.AdamW(parameters, fused=True),
    "adamw-for-loop": lambda parameters: torch.optim.AdamW(parameters, foreach=False),
    "sgd": lambda parameters: torch.optim.SGD(parameters),
    "sgd-momentum": lambda parameters: torch.optim.SGD(parameters, momentum=0.9),
    "adafactor": lambda parameters: torch.optim.Adafactor(parameters),
}


def optimizer_named(name: str) -> Callable[[Iterable[nn.Parameter]], torch.optim.Optimizer]:
    """A maker of torch's optimizer of that name.

    Raises:
        ConfigurationError: no such optimizer.
    """
    if name not in OPTIMIZERS:
        raise ConfigurationError(f"optimizer {name!r} is none of {', '.join(OPTIMIZERS)}{nearest(name, OPTIMIZERS)}")
    return OPTIMIZERS[name]


@dataclass(frozen=True)
class Run:
    """A model and how it is trained.

    Args:
        optimizer: of `OPTIMIZERS`. precision: of `PRECISIONS`.
        capability: of the GPU. expandable: segments of the allocator. num_sms: multiprocessors of the GPU.
    """

    spec: ModelSpec
    seq_length: int
    optimizer: str = "adamw"
    precision: str = "fp32"
    checkpointing: bool = False
    capability: tuple[int, int] = (8, 0)
    expandable: bool = False
    num_sms: int = NUM_SMS

    def __post_init__(self) -> None:
        if self.precision not in PRECISIONS:
            raise ConfigurationError(
                f"precision {self.precision!r} is none of {', '.join(PRECISIONS)}{nearest(self.precision, PRECISIONS)}"
            )
        optimizer_named(self.optimizer)

    def model(self) -> nn.Module:
        """The module on meta."""
        return self.prepared(self.spec.build(torch.bfloat16 if self.precision == "bf16" else torch.float32))

    def prepared(self, model: Any) -> nn.Module:
        """``model`` with its checkpointing switched on, if that is asked for."""
        if self.checkpointing and isinstance(model, Decoder):
            model.gradient_checkpointing = True
        elif self.checkpointing and hasattr(model, "gradient_checkpointing_enable"):
            with warnings.catch_warnings():
                warnings.simplefilter("ignore")  # renamed in newer versions of transformers
                model.gradient_checkpointing_enable(gradient_checkpointing_kwargs={"use_reentrant": False})
        elif self.checkpointing:
            raise ConfigurationError(f"{self.spec.name} has no switch for gradient checkpointing: leave the flag out")
        if self.precision == "autocast" and isinstance(model, Decoder):
            raise ConfigurationError(
                "presets compute in bf16 from bf16 weights with fp32 masters, not under autocast: use --precision bf16"
            )
        return model

    def trace(self, batch_size: int) -> Trace:
        """What two steps with that batch allocate."""
        batch = language_batch(self.spec.vocab_size, batch_size, self.seq_length)
        model = self.model()
        with plain_batches():
            return trace_training(
                model,
                batch,
                self.spec.loss,
                optimizer_named(self.optimizer),
                autocast=torch.bfloat16 if self.precision == "autocast" else None,
                capability=self.capability,
                num_sms=self.num_sms,
            )

    def largest_batch(self, gpu_bytes: int) -> int:
        """The largest batch whose replay fits a GPU of that size with P99's margin; 0 where one sequence does not."""
        return Batches(self.trace).largest(lambda size, trace: fits(trace, gpu_bytes, self.capability, self.expandable))


@dataclass(frozen=True)
class MemoryEstimate:
    """Peak bytes of one training step on a GPU; the categories, fragmentation and context add up to ``peak_p50``.

    Attributes:
        parameters: elements of the model's weights.
        weights, gradients, optimizer, activations, logits_and_loss, workspace: bytes alive when most are allocated.
        fragmentation: reserved at its peak beyond those: rounding, holes, segments kept free.
        context: CUDA context and kernels, outside the allocator.
        peak_p50, peak_p99: bytes of the device that the process takes: expected, and what to plan for.
        allocated, reserved: peaks as torch counts them.
        state_bytes: weights, gradients and optimizer states in full, whether or not they are all alive at the peak.
    """

    parameters: int
    weights: int
    gradients: int
    optimizer: int
    activations: int
    logits_and_loss: int
    workspace: int
    fragmentation: int
    context: int
    peak_p50: int
    peak_p99: int
    allocated: int
    reserved: int
    state_bytes: int

    def as_dict(self) -> dict[str, int]:
        """The fields by name."""
        return asdict(self)


def allocatable_bytes(gpu_bytes: int, context: int) -> int:
    """Bytes that the allocator may reserve on a GPU of ``gpu_bytes`` so that a run still fits at P99."""
    return max(0, (gpu_bytes - context - P99_BYTES) * 100 // (100 + P99_PERCENT))


def fits(trace: Trace, gpu_bytes: int, capability: tuple[int, int], expandable: bool = False) -> bool:
    """Whether a replay succeeds on a GPU of ``gpu_bytes`` with P99's margin: free segments are given back where that
    helps.
    """
    return replay(trace, allocatable_bytes(gpu_bytes, context_bytes(capability)), expandable).fits


def estimate_trace(trace: Trace, capability: tuple[int, int] = (8, 0), expandable: bool = False) -> MemoryEstimate:
    """The peaks of ``trace`` on a GPU without a limit."""
    found = replay(trace, None, expandable)
    alive: set[int] = set()
    for event in trace.events[: found.peak_event + 1]:
        if event >= 0:
            alive.add(event)
        else:
            alive.discard(~event)
    split = {category: 0 for category in CATEGORIES}
    for index in alive:
        split[trace.categories[index]] += trace.sizes[index]
    context = context_bytes(capability)
    return MemoryEstimate(
        parameters=trace.num_parameters,
        **split,
        fragmentation=found.peak_reserved - sum(split.values()),
        context=context,
        peak_p50=found.peak_reserved + context,
        peak_p99=-(-found.peak_reserved * (100 + P99_PERCENT) // 100) + P99_BYTES + context,
        allocated=found.peak_allocated,
        reserved=found.peak_reserved,
        state_bytes=state_bytes(trace),
    )


def state_bytes(trace: Trace) -> int:
    """Weights, gradients and optimizer states in full."""
    return trace.total("weights") + peak_of(trace, ["gradients"]) + peak_of(trace, ["optimizer"])


def part_of(trace: Trace, categories: Iterable[str], outside: str | None = None) -> Trace:
    """``trace`` with nothing but storages of ``categories``; what phase ``outside`` allocates left out."""
    wanted = set(categories)
    others = {index for index, of in enumerate(trace.categories) if of not in wanted}
    return trace.without(others | (trace.born_in(outside) if outside else set()))


def peak_of(trace: Trace, categories: Iterable[str], outside: str | None = None) -> int:
    """Most bytes of these categories together at one time, before the allocator's rounding; arguments as `part_of`."""
    live = most = 0
    for event in part_of(trace, categories, outside).events:
        live += trace.sizes[event] if event >= 0 else -trace.sizes[~event]
        most = max(most, live)
    return most


class Batches:
    """Traces of one model at any batch size, from as few real traces as possible.

    Where the traces of two neighbouring batches are the same events, every size is taken to be affine in the batch, and
    others follow without running the model again. That is a guess, because some sizes stop growing (chunks) and some
    operators change with the size, so what `largest` finds is traced for real. ``trace_at``: traces a batch size.
    """

    def __init__(self, trace_at: Callable[[int], Trace]) -> None:
        self.trace_at = trace_at
        self._real: dict[int, Trace] = {}
        self._base = 2

    def real(self, batch_size: int) -> Trace:
        """The trace of ``batch_size`` sequences."""
        if batch_size not in self._real:
            self._real[batch_size] = self.trace_at(batch_size)
        return self._real[batch_size]

    def at(self, batch_size: int) -> Trace:
        """The trace of ``batch_size`` sequences, as two neighbouring ones let expect it."""
        below, above = self.real(self._base), self.real(self._base + 1)
        if batch_size in self._real or batch_size == 1 or below.events != above.events:
            return self.real(batch_size)
        sizes = tuple(
            max(0, one + (other - one) * (batch_size - self._base))
            for one, other in zip(below.sizes, above.sizes, strict=True)
        )
        return replace(below, sizes=sizes, work=())

    def largest(self, is_ok: Callable[[int, Trace], bool], at_most: int = 1 << 16) -> int:
        """The largest batch of ``at_most`` sequences that ``is_ok`` with its trace; 0 where one sequence is too many.

        Where ``is_ok`` is False, it is taken to be False of larger ones.
        """
        if not is_ok(1, self.real(1)):
            return 0
        low, high = 1, at_most + 1  # known to be right, known or taken to be wrong
        while high - low > 1:
            guess = self._guess(is_ok, low, high)
            if not is_ok(guess, self.real(guess)):
                high = guess
            elif guess + 1 < high and is_ok(guess + 1, self.real(guess + 1)):
                low = guess + 1
            else:
                return guess
            self._base = max(2, guess)
        return low

    def _guess(self, is_ok: Callable[[int, Trace], bool], low: int, high: int) -> int:
        """Strictly between the two, by expected traces."""
        start, step = low, 1
        while low + step < high and is_ok(low + step, self.at(low + step)):
            low, step = low + step, step * 2
        high = min(high, low + step)
        while high - low > 1:
            middle = (low + high) // 2
            low, high = (middle, high) if is_ok(middle, self.at(middle)) else (low, middle)
        return max(low, start + 1)
