"""What a resumed run may change: where bytes live and what is reported, never what is computed.

Loss curves with an unnoticed kink are worse than a refusal. Only the end of the run may move, and that is said.
"""

from __future__ import annotations

from typing import Any

from vblackwell.errors import ConfigurationError
from vblackwell.train.config import TrainConfig, flag_of

FIXED = (
    "preset", "architecture", "model", "data", "packing", "tokenizer", "vocab_size", "batch_size", "accumulation_steps", "seq_length",
    "learning_rate", "min_learning_rate_ratio", "warmup_steps", "weight_decay", "beta1", "beta2", "epsilon", "max_grad_norm",
    "seed", "mixed_precision", "precision", "use_fp4", "fp4_layers", "keep", "assignment", "lora", "optimizer_states", "masters",
)  # fmt: skip


def refuse_changes(config: TrainConfig, stored: dict[str, Any]) -> None:
    """Compare a resumed run's settings with those it was started with.

    Raises:
        ConfigurationError: something that decides the numbers differs.
    """
    for name in FIXED:
        now, then = getattr(config, name), stored.get(name)
        if name in stored and now != then:
            raise ConfigurationError(
                f"{flag_of(name)} is {now!r}, the run was started with {then!r}: a resumed run computes as it began; "
                "drop the flag, or "
                "start a new run with another --out"
            )
