"""A run, its trace, and from that: peak bytes by category, whether they fit, the largest batch, a stack's levels."""

import functools
import math
from collections.abc import Callable, Iterable, Iterator, Sequence
from contextlib import ExitStack, contextmanager
from dataclasses import asdict, dataclass, replace
from typing import Any

import torch
from torch import nn

from vblackwell.errors import ConfigurationError, InsufficientMemory, check_known
from vblackwell.machine.gpus import NUM_SMS, context_bytes
from vblackwell.nn.convert.training import fuse, recomputing
from vblackwell.nn.decoder.config import DecoderConfig
from vblackwell.nn.decoder.decoder import Decoder
from vblackwell.planner.model_spec import ModelSpec, check_batch, find_model, of_decoder
from vblackwell.trace.allocator import replay
from vblackwell.trace.causal_lm import language_batch, language_loss
from vblackwell.trace.trace import CATEGORIES, Trace, trace_training
from vblackwell.units import MiB, format_bytes

# For what is not modelled, as kernels' own workspaces and other orders of frees (docs/journal/estimate.md).
P99_PERCENT, P99_BYTES = 3, 64 * MiB
PRECISIONS = ("fp32", "bf16", "fp16", "autocast")
NOT_STATE = ("activations", "logits_and_loss", "workspace")
OPTIMIZERS: dict[str, Callable[[Iterable[nn.Parameter]], torch.optim.Optimizer]] = {
    "adamw": torch.optim.AdamW,
    "adamw-fused": functools.partial(torch.optim.AdamW, fused=True),
    "adamw-for-loop": functools.partial(torch.optim.AdamW, foreach=False),
    "sgd": torch.optim.SGD,
    "sgd-momentum": functools.partial(torch.optim.SGD, momentum=0.9),
    "adafactor": torch.optim.Adafactor,
}


@dataclass(frozen=True)
class Run:
    """A model and how it is trained: ``optimizer`` of `OPTIMIZERS`, ``precision`` of `PRECISIONS`, on which GPU, and
    whether on fused operators (`fuse`)."""

    spec: ModelSpec
    seq_length: int
    optimizer: str = "adamw"
    precision: str = "fp32"
    checkpointing: bool = False
    capability: tuple[int, int] = (8, 0)
    expandable: bool = False
    num_sms: int = NUM_SMS
    fuses: bool = False

    def __post_init__(self) -> None:
        check_known("precision", self.precision, PRECISIONS)
        check_known("optimizer", self.optimizer, OPTIMIZERS)

    @property
    def dtype(self) -> torch.dtype:
        """Of the weights."""
        return {"bf16": torch.bfloat16, "fp16": torch.float16}.get(self.precision, torch.float32)

    @functools.cached_property
    def model(self) -> nn.Module:
        """The module on meta, built once for this run and all that are `like` it; nobody may change it: a trace puts it
        onto fused operators and lets it recompute its layers for as long as it lasts."""
        return self.build()

    def build(self) -> nn.Module:
        """A module on meta of the caller's own."""
        model = self.spec.build(self.dtype)
        with self.prepared(model, only_tried=True):
            return model

    def like(self, **changes: Any) -> "Run":
        """This run with other settings, on the same module where its weights are of the same type."""
        other = replace(self, **changes)
        if other.dtype == self.dtype and other.spec is self.spec:
            vars(other)["model"] = self.model
        return other

    @functools.cached_property
    def fused(self) -> "Run":
        """As a stack runs it: a causal model that transformers has by its configuration, on fused operators; anything
        else as it is."""
        return self if self.fuses or self.spec.loss is not language_loss else self.like(fuses=True)

    @contextmanager
    def prepared(self, model: nn.Module, only_tried: bool = False) -> Iterator[None]:
        """``model`` as this run has it, for a while; ``only_tried``: whether it may be, without fused operators. Raises
        ConfigurationError for a preset under autocast, Unsupported where it offers no checkpointing."""
        if self.precision == "autocast" and isinstance(model, Decoder):
            raise ConfigurationError("presets compute in bf16 from bf16 weights, not under autocast: --precision bf16")
        with ExitStack() as undo:
            if self.fuses and not only_tried and (fused := fuse(model)) is not None:
                undo.callback(fused.undo)
            if self.checkpointing:
                undo.enter_context(recomputing(model))
            yield

    @functools.cached_property
    def step(self) -> Callable[[int], Trace]:
        """What two steps with a batch of that size allocate, traced once for each size."""
        return functools.cache(self.trace)

    def trace(self, batch_size: int, model: nn.Module | None = None, optimizes: bool = True, steps: int = 2) -> Trace:
        """What ``steps`` steps with that batch allocate; ``model``: a converted copy of the run's."""
        model, batch = model or self.model, language_batch(self.spec.vocab_size, batch_size, self.seq_length)
        what = (model, batch, self.spec.loss, OPTIMIZERS[self.optimizer] if optimizes else None)
        autocast = torch.bfloat16 if self.precision == "autocast" else None
        gpu: dict[str, Any] = {"capability": self.capability, "num_sms": self.num_sms}
        with self.prepared(model):
            return trace_training(*what, autocast=autocast, steps=steps, **gpu)

    def largest_batch(self, gpu_bytes: int) -> int:
        """The largest batch that `fits` a GPU of that size; 0 where one sequence does not."""
        return Batches(self.step).largest(lambda size, trace: fits(trace, gpu_bytes, self.capability, self.expandable))


@dataclass(frozen=True)
class MemoryEstimate:
    """Peak bytes of one training step on a GPU; the categories, fragmentation and context add up to ``peak_p50``.

    Attributes:
        parameters: elements of the model's weights.
        weights, gradients, optimizer, activations, logits_and_loss, workspace: bytes alive when most are allocated.
        fragmentation: reserved at its peak beyond those. context: CUDA context and kernels, outside the allocator.
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
        return asdict(self)


def allocatable_bytes(gpu_bytes: int, context: int) -> int:
    """Bytes that the allocator may reserve on a GPU of ``gpu_bytes`` so that a run still fits at P99."""
    return max(0, (gpu_bytes - context - P99_BYTES) * 100 // (100 + P99_PERCENT))


def fits(trace: Trace, gpu_bytes: int, capability: tuple[int, int], expandable: bool = False) -> bool:
    """Whether a replay succeeds on a GPU of ``gpu_bytes`` with P99's margin, given back free segments."""
    return replay(trace, allocatable_bytes(gpu_bytes, context_bytes(capability)), expandable).fits


def estimate_trace(trace: Trace, capability: tuple[int, int] = (8, 0), expandable: bool = False) -> MemoryEstimate:
    """The peaks of ``trace`` on a GPU without a limit."""
    found = replay(trace, None, expandable)
    split: dict[str, int] = dict.fromkeys(CATEGORIES, 0)
    for event in trace.events[: found.peak_event + 1]:
        index = max(event, ~event)
        split[trace.categories[index]] += trace.sizes[index] if event >= 0 else -trace.sizes[index]
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


def part_of(trace: Trace, categories: Sequence[str], outside: str | None = None) -> Trace:
    """``trace`` with nothing but storages of ``categories``; what phase ``outside`` allocates left out."""
    others = {index for index, of in enumerate(trace.categories) if of not in categories}
    return trace.without(others | (trace.born_in(outside) if outside else set()))


def peak_of(trace: Trace, categories: Sequence[str], outside: str | None = None) -> int:
    """Most bytes of `part_of` at one time, before the allocator's rounding."""
    return part_of(trace, categories, outside).peak(trace.sizes)


class Batches:
    """Traces of one model at any batch size, from few real ones (``trace_at``): where two neighbouring batches have the
    same events, sizes are taken to be affine in the batch; as not all are, what `largest` finds is traced for real."""

    def __init__(self, trace_at: Callable[[int], Trace]) -> None:
        self.real = functools.cache(trace_at)
        self._base = 2

    def at(self, batch_size: int) -> Trace:
        """The trace of ``batch_size`` sequences, as two neighbouring ones let expect it."""
        below, above = self.real(self._base), self.real(self._base + 1)
        if batch_size == 1 or below.events != above.events:
            return self.real(batch_size)
        steps = batch_size - self._base
        sizes = (max(0, one + (other - one) * steps) for one, other in zip(below.sizes, above.sizes, strict=True))
        return replace(below, sizes=tuple(sizes), work=())

    def largest(self, is_ok: Callable[[int, Trace], bool], at_most: int = 1 << 16) -> int:
        """The largest batch of ``at_most`` that ``is_ok``, as smaller ones are taken to be; 0: none."""
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
        start, step = low, 1
        while low + step < high and is_ok(low + step, self.at(low + step)):
            low, step = low + step, step * 2
        high = min(high, low + step)
        while high - low > 1:
            middle = (low + high) // 2
            low, high = (middle, high) if is_ok(middle, self.at(middle)) else (low, middle)
        return max(low, start + 1)


ABOVE = 1.02  # of what lies below level 0: places are multiples of pages


@dataclass(frozen=True)
class ModelConfig:
    """A decoder and its batch. ``intermediate_size``: of the feed-forward; None: 8/3 of ``hidden_size``, rounded up to
    64, as Llama's. Raises ConfigurationError for a size below 1, or a batch beyond any GPU."""

    vocab_size: int = 50257
    hidden_size: int = 768
    num_layers: int = 12
    num_heads: int = 12
    seq_length: int = 1024
    batch_size: int = 8
    intermediate_size: int | None = None

    def __post_init__(self) -> None:
        for name in ("vocab_size", "hidden_size", "num_layers", "num_heads"):
            if not 1 <= getattr(self, name) < 1 << 31:
                raise ConfigurationError(f"{name} is {getattr(self, name)}: give a number of 1 to {(1 << 31) - 1}")
        check_batch(self.batch_size, self.seq_length)

    def decoder(self) -> DecoderConfig:
        width = self.intermediate_size or -(-self.hidden_size * 8 // 3 // 64) * 64
        sizes = self.vocab_size, self.hidden_size, width, self.num_layers, self.num_heads
        return DecoderConfig(*sizes, max_position=self.seq_length)


class VGPUResourceEstimator:
    """Memory of training decoders by shape, on a card of CUDA compute capability ``gpu_capability``."""

    def __init__(self, gpu_capability: tuple[int, int] = (8, 0)) -> None:
        self.capability = gpu_capability

    def estimate_transformer(
        self, config: ModelConfig, optimizer: str = "adamw", precision: str = "fp32"
    ) -> MemoryEstimate:
        """Peak bytes of training our decoder of that shape with that batch."""
        return estimate_trace(self._run(config, optimizer, precision).trace(config.batch_size), self.capability)

    def recommend_batch_size(
        self, config: ModelConfig, gpu_memory_mb: float, optimizer: str = "adamw", precision: str = "fp32"
    ) -> int:
        """The largest batch that fits ``gpu_memory_mb`` MiB with P99's margin, 0 for none; its own is ignored."""
        if gpu_memory_mb <= 0:
            raise ConfigurationError(f"gpu_memory_mb is {gpu_memory_mb}: give the card's memory in MiB")
        return self._run(config, optimizer, precision).largest_batch(int(gpu_memory_mb * MiB))

    def generate_vgpu_config(
        self,
        estimate: MemoryEstimate,
        gpus: Sequence[float],
        target_hit_rate: float = 0.9,
        host_memory_mb: float | None = None,
    ) -> dict[str, list[dict[str, Any]]]:
        """The dict that `VGPUStack` takes, for the weights, gradients and optimizer states of ``estimate``.

        Level 0 is the first GPU without the CUDA context, P99's margin, activations, logits and workspace: enough for
        all states or ``target_hit_rate`` of the weights. Then come the other GPUs, RAM, and a disk for the rest.

        Args:
            gpus: MiB of each GPU. host_memory_mb: MiB of RAM; None: as much as is needed.
            target_hit_rate: above 0, at most 1: share of the accesses to weights that level 0 serves, if they go forth
                and back and the farthest next use is evicted (``policy='next_use'``).

        Raises ConfigurationError for a size or a rate out of range; InsufficientMemory where the step alone is more
        than the first GPU.
        """
        if not gpus:
            raise ConfigurationError("gpus is empty: give the memory of each GPU in MiB, e.g. [8 * 1024]")
        for size in (*gpus, 1.0 if host_memory_mb is None else host_memory_mb):
            if not (math.isfinite(size) and size > 0):
                raise ConfigurationError(f"{size} MiB of memory: give a number above 0")
        if not 0 < target_hit_rate <= 1:
            raise ConfigurationError(f"target_hit_rate is {target_hit_rate}: give a share above 0 and of at most 1")
        step = estimate.activations + estimate.logits_and_loss + estimate.workspace
        first_gpu, *others = (allocatable_bytes(int(size * MiB), estimate.context) for size in gpus)
        free = first_gpu - step
        if free < MiB:
            needed, context = estimate.context + step + MiB, format_bytes(estimate.context)
            taken = (
                f"the CUDA context, {context}, and the step's activations, logits and workspace, {format_bytes(step)}"
            )
            wrong = f"a GPU of {gpus[0]:g} MiB has no room for a level next to {taken}: give a smaller batch"
            raise InsufficientMemory(wrong, needed_bytes=needed, available_bytes=int(gpus[0] * MiB))
        state = estimate.state_bytes
        wanted = state if state <= free else math.ceil(max(1, estimate.weights) * target_hit_rate)
        levels = [("cuda:0", min(free, max(wanted, MiB)))]
        left = state - levels[0][1]
        for number, size in enumerate(others, start=1):
            if left > 0 and size:
                levels.append((f"cuda:{number}", size))
                left -= size
        if left > 0:
            below = math.ceil(left * ABOVE)
            host = below if host_memory_mb is None else min(below, int(host_memory_mb * MiB))
            levels += [("cpu", max(host, MiB))] + ([("ssd", max(below - host, MiB))] if below > host else [])
        return {"levels": [{"capacity_mb": size / MiB, "device": device} for device, size in levels]}

    def _run(self, config: ModelConfig, optimizer: str, precision: str) -> Run:
        spec = of_decoder("decoder", config.decoder())
        return Run(spec, config.seq_length, optimizer, precision, capability=self.capability)


def quick_estimate(name: str, batch_size: int = 8, seq_length: int = 1024, optimizer: str = "adamw") -> MemoryEstimate:
    """Peak bytes of training a known model in fp32; ConfigurationError, with the nearest name, for another."""
    check_batch(batch_size, seq_length)
    run = Run(find_model(name, {}, seq_length), seq_length, optimizer)
    return estimate_trace(run.trace(batch_size), run.capability)
