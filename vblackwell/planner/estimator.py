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
    ) -> dict[str, list[dict[str, Any]]]:
        """The dict that `VGPUStack` takes, for the weights, gradients and optimizer states of ``estimate``.

        Level 0 is the first GPU without the CUDA context, P99's margin and the step's activations, logits and workspace:
        enough for all states if they fit there, else what holds ``target_hit_rate`` of the weights. Then come the other
        GPUs, RAM, and a disk for the rest.

        Args:
            gpus: MiB of each GPU.
            target_hit_rate: above 0, at most 1: share of the accesses to weights that level 0 serves, if they go forth
                and back and the farthest next use is evicted (``policy='next_use'``).
            host_memory_mb: MiB of RAM; None: as much as is needed.

        Raises:
            ConfigurationError: no GPU, a size or a rate out of range.
            InsufficientMemory: the step alone is more than the first GPU.
        """
        if not gpus:
            raise ConfigurationError("gpus is empty: give the memory of each GPU in MiB, e.g. [8 * 1024]")
        for size in (*gpus, *([] if host_memory_mb is None else [host_memory_mb])):
            if not (math.isfinite(size) and size > 0):
                raise ConfigurationError(f"{size} MiB of memory: give a number above 0")
        if not 0 < target_hit_rate <= 1:
            raise ConfigurationError(f"target_hit_rate is {target_hit_rate}: give a share above 0 and of at most 1")
        step = estimate.activations + estimate.logits_and_loss + estimate.workspace
        first_gpu, *others = (allocatable_bytes(int(size * MiB), estimate.context) for size in gpus)
        free = first_gpu - step
        if free < MiB:
            raise InsufficientMemory(
                f"a GPU of {gpus[0]:g} MiB has no room for a level next to the CUDA context, "
                f"{format_bytes(estimate.context)}, and the step's activations, logits and workspace, "
                f"{format_bytes(step)}: give a smaller batch",
                needed_bytes=estimate.context + step + MiB,
                available_bytes=int(gpus[0] * MiB),
            )
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
            levels.append(("cpu", max(host, MiB)))
            if below > host:
                levels.append(("ssd", max(below - host, MiB)))
        return {"levels": [{"capacity_mb": size / MiB, "device": device} for device, size in levels]}

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
