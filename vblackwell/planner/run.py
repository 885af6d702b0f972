"""A model and how it is trained: what it builds, traces, and the largest batch that fits."""

from __future__ import annotations

import warnings
from dataclasses import dataclass
from typing import Any

import torch
from torch import nn

from vblackwell.errors import ConfigurationError, nearest
from vblackwell.machine.gpus import NUM_SMS
from vblackwell.nn.decoder.decoder import Decoder
from vblackwell.planner.memory_estimate import (
    Batches,
    fits,
    optimizer_named,
)
from vblackwell.planner.model_spec import ModelSpec
from vblackwell.trace.causal_lm import language_batch, plain_batches
from vblackwell.trace.trace import Trace, trace_training

PRECISIONS = ("fp32", "bf16", "autocast")


@dataclass(frozen=True)
class Run:
    """A model and how it is trained.

    Args:
        optimizer: of `vblackwell.planner.memory_estimate.OPTIMIZERS`. precision: of `PRECISIONS`.
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

    def prepared(self, model: nn.Module) -> nn.Module:
        """``model`` with its checkpointing switched on, if that is asked for."""
        if self.checkpointing:
            if isinstance(model, Decoder):
                model.gradient_checkpointing = True
            elif hasattr(model, "gradient_checkpointing_enable"):
                _checkpoint(model)
            else:
                raise ConfigurationError(
                    f"{self.spec.name} has no switch for gradient checkpointing: leave the flag out"
                )
        if self.precision == "autocast" and isinstance(model, Decoder):
            raise ConfigurationError(
                "presets compute in bf16 from bf16 weights with fp32 masters, not under autocast: use --precision bf16"
            )
        return model

    def trace(self, batch_size: int) -> Trace:
        """What two steps with that batch allocate."""
        autocast = torch.bfloat16 if self.precision == "autocast" else None
        batch = language_batch(self.spec.vocab_size, batch_size, self.seq_length)
        model = self.model()
        with plain_batches():
            return trace_training(
                model,
                batch,
                self.spec.loss,
                optimizer_named(self.optimizer),
                autocast=autocast,
                capability=self.capability,
                num_sms=self.num_sms,
            )

    def largest_batch(self, gpu_bytes: int) -> int:
        """The largest batch whose replay fits a GPU of that size with P99's margin; 0 where one sequence does not."""
        return Batches(self.trace).largest(lambda size, trace: self.fits(trace, gpu_bytes))

    def fits(self, trace: Trace, gpu_bytes: int) -> bool:
        """Whether the replay of ``trace`` fits a GPU of that size with P99's margin."""
        return fits(trace, gpu_bytes, self.capability, self.expandable)


def _checkpoint(model: Any) -> None:
    with warnings.catch_warnings():
        warnings.simplefilter("ignore")  # renamed in newer versions of transformers
        model.gradient_checkpointing_enable(gradient_checkpointing_kwargs={"use_reentrant": False})
