"""Memory of training by a model's name or shape, before anything is run, and the levels of a stack that hold it."""

from __future__ import annotations

import math
from collections.abc import Sequence
from dataclasses import dataclass
from typing import Any

from vblackwell.errors import ConfigurationError, InsufficientMemory
from vblackwell.nn.decoder.config import DecoderConfig
from vblackwell.planner.memory_estimate import (
    MemoryEstimate,
    Run,
    allocatable_bytes,
    estimate_trace,
)
from vblackwell.planner.model_spec import check_batch, find_model, of_decoder
from vblackwell.units import MiB, format_bytes

ABOVE = 1.02  # of what lies below level 0: places are multiples of pages
THUMB_FIRST, THUMB_NEXT = 1.5, 4


@dataclass(frozen=True)
class ModelConfig:
    """A decoder and its batch, as `VGPUResourceEstimator` takes them.

    Args:
        vocab_size, hidden_size, num_layers, num_heads: the decoder's shape.
        seq_length, batch_size: tokens in a sequence, sequences in a forward.
        intermediate_size: of the feed-forward; None: 8/3 of ``hidden_size``, rounded up to 64, as Llama's.

    Raises:
        ConfigurationError: a size below 1, or a batch beyond any GPU.
    """

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
                raise ConfigurationError(
                    f"{name} is {getattr(self, name)}: give a number between 1 and {(1 << 31) - 1}"
                )
        check_batch(self.batch_size, self.seq_length)

    def decoder(self) -> DecoderConfig:
        """The shape alone."""
        wide = self.intermediate_size or -(-self.hidden_size * 8 // 3 // 64) * 64
        return DecoderConfig(
            vocab_size=self.vocab_size,
            hidden_size=self.hidden_size,
            intermediate_size=wide,
            num_layers=self.num_layers,
            num_heads=self.num_heads,
            max_position=self.seq_length,
        )


class VGPUResourceEstimator:
    """Memory of training, by name or shape.

    Args:
        gpu_capability: CUDA compute capability of the card that is meant.
    """

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
        """The largest batch that fits ``gpu_memory_mb`` MiB with P99's margin; 0 where none does. ``config.batch_size``
        is ignored.
        """
        if gpu_memory_mb <= 0:
            raise ConfigurationError(f"gpu_memory_mb is {gpu_memory_mb}: give the card's memory in MiB")
        return self._run(config, optimizer, precision).largest_batch(int(gpu_memory_mb * MiB))

    def generate_vgpu_config(
        self,
        estimate: MemoryEstimate,
        gpus: Sequence[float],
        target_hit_rate: float = 0.9,
        host_memory_mb: float | None = None,
    ) -> StackConfig:
        """The dict that `VGPUStack` takes, for the states of ``estimate`` on GPUs of so many MiB; it has a
        ``rule_of_thumb``.

        Arguments and errors as `stack_config`.
        """
        return stack_config(estimate, gpus, target_hit_rate, host_memory_mb)

    def _run(self, config: ModelConfig, optimizer: str, precision: str) -> Run:
        spec = of_decoder("decoder", config.decoder())
        return Run(spec, config.seq_length, optimizer, precision, capability=self.capability)


def quick_estimate(name: str, batch_size: int = 8, seq_length: int = 1024, optimizer: str = "adamw") -> MemoryEstimate:
    """Peak bytes of training a known model in fp32 with that batch.

    Raises:
        ConfigurationError: the name is not known; the message has the nearest one.
    """
    check_batch(batch_size, seq_length)
    run = Run(find_model(name, {}, seq_length), seq_length, optimizer)
    return estimate_trace(run.trace(batch_size), run.capability)


# -- levels ------------------------------------------------------------------------------------------------------------


@dataclass(frozen=True)
class _Sizes:
    device: str
    num_bytes: int

    def as_dict(self) -> dict[str, Any]:
        return {"capacity_mb": self.num_bytes / MiB, "device": self.device}


class StackConfig(dict[str, Any]):
    """The dict that `VGPUStack` takes, ``{'levels': [...]}``, with why.

    Attributes:
        hit_rate: share of the accesses to weights that level 0 serves, if they go forth and back and the farthest next
            use makes room (``policy='next_use'``): the share of the weights that it holds.
        rule_of_thumb: the same kind of dict by the rule that level 0 should hold 1.5 times a batch's parameters and
            each next level 4 times the one above.
        lines: for people.
    """

    hit_rate: float
    rule_of_thumb: dict[str, Any]
    lines: tuple[str, ...]


def stack_config(
    estimate: MemoryEstimate, gpus: Sequence[float], target_hit_rate: float = 0.9, host_memory_mb: float | None = None
) -> StackConfig:
    """Levels for the weights, gradients and optimizer states of ``estimate``.

    Level 0 is the first GPU without the CUDA context, P99's margin and the step's activations, logits and workspace:
    enough for all states if they fit there, else what holds ``target_hit_rate`` of the weights. Then come the other
    GPUs, RAM, and a disk for the rest.

    Args:
        gpus: MiB of each GPU.
        target_hit_rate: above 0, at most 1.
        host_memory_mb: MiB of RAM; None: as much as is needed.

    Raises:
        ConfigurationError: no GPU, a size or a rate out of range.
        InsufficientMemory: the step alone is more than the first GPU.
    """
    _check(gpus, target_hit_rate, host_memory_mb)
    step = estimate.activations + estimate.logits_and_loss + estimate.workspace
    free = allocatable_bytes(int(gpus[0] * MiB), estimate.context) - step
    if free < MiB:
        raise InsufficientMemory(
            f"a GPU of {gpus[0]:g} MiB has no room for a level next to the CUDA context, "
            f"{format_bytes(estimate.context)}, and the step's "
            f"activations, logits and workspace, {format_bytes(step)}: give a smaller batch",
            needed_bytes=estimate.context + step + MiB,
            available_bytes=int(gpus[0] * MiB),
        )
    weights, state = max(1, estimate.weights), estimate.state_bytes
    wanted = state if state <= free else math.ceil(weights * target_hit_rate)
    first = min(free, max(wanted, MiB))
    levels = [_Sizes("cuda:0", first)]
    left = state - first
    for number, size in enumerate(gpus[1:], start=1):
        other = max(0, allocatable_bytes(int(size * MiB), estimate.context))
        if left > 0 and other:
            levels.append(_Sizes(f"cuda:{number}", other))
            left -= other
    if left > 0:
        below = math.ceil(left * ABOVE)
        host = below if host_memory_mb is None else min(below, int(host_memory_mb * MiB))
        levels.append(_Sizes("cpu", max(host, MiB)))
        if below > host:
            levels.append(_Sizes("ssd", max(below - host, MiB)))
    made = StackConfig(levels=[level.as_dict() for level in levels])
    made.hit_rate = min(1.0, first / weights)
    made.rule_of_thumb = _by_thumb(weights)
    made.lines = tuple(_lines(estimate, made, levels, target_hit_rate, free))
    return made


def _check(gpus: Sequence[float], target_hit_rate: float, host_memory_mb: float | None) -> None:
    if not gpus:
        raise ConfigurationError("gpus is empty: give the memory of each GPU in MiB, e.g. [8 * 1024]")
    for size in (*gpus, *([] if host_memory_mb is None else [host_memory_mb])):
        if not (math.isfinite(size) and size > 0):
            raise ConfigurationError(f"{size} MiB of memory: give a number above 0")
    if not 0 < target_hit_rate <= 1:
        raise ConfigurationError(f"target_hit_rate is {target_hit_rate}: give a share above 0 and of at most 1")


def _by_thumb(weights: int) -> dict[str, Any]:
    sizes = [THUMB_FIRST * weights * THUMB_NEXT**level for level in range(3)]
    return {
        "levels": [
            _Sizes(device, int(size)).as_dict() for device, size in zip(("cuda:0", "cpu", "ssd"), sizes, strict=True)
        ]
    }


def _lines(
    estimate: MemoryEstimate, made: StackConfig, levels: Sequence[_Sizes], target: float, free: int
) -> list[str]:
    found = [f"{level.device}: {format_bytes(level.num_bytes)}" for level in levels]
    found.append(f"level 0 holds {made.hit_rate:.0%} of the weights, and serves so many of the accesses to them")
    if made.hit_rate < target:
        more = math.ceil(estimate.weights * target) - free
        found.append(f"{target:.0%} would need {format_bytes(more)} more of the first GPU")
    thumb = ", ".join(
        f"{each['device']} {format_bytes(int(each['capacity_mb'] * MiB))}" for each in made.rule_of_thumb["levels"]
    )
    found.append(f"by the rule of thumb (1.5 times the weights, then 4 times the level above): {thumb}")
    return found
