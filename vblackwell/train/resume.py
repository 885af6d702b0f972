"""What a resumed run may change: where bytes live and what is reported, never what is computed.

Loss curves with an unnoticed kink are worse than a refusal. Only the end of the run may move, and that is said.
"""

from __future__ import annotations

from pathlib import Path
from typing import Any

from vblackwell.errors import ConfigurationError
from vblackwell.train.config import TrainConfig, flag_of
from vblackwell.train.schedule import default_warmup_steps

FIXED = (
    "preset", "architecture", "model", "data", "packing", "tokenizer", "vocab_size", "batch_size", "accumulation_steps", "seq_length",
    "learning_rate", "min_learning_rate_ratio", "warmup_steps", "weight_decay", "beta1", "beta2", "epsilon", "max_grad_norm",
    "seed", "mixed_precision", "precision", "use_fp4", "fp4_layers", "keep", "assignment", "lora", "optimizer_states", "masters",
)  # fmt: skip


def refuse_changes(config: TrainConfig, stored: dict[str, Any], remedy: str = "drop the flag") -> None:
    """Compare a resumed run's settings with those it was started with.

    Args:
        remedy: what to do about a difference, besides starting a new run.

    Raises:
        ConfigurationError: something that decides the numbers differs.
    """
    for name in FIXED:
        now, then = getattr(config, name), stored.get(name)
        if name in stored and now != then:
            raise ConfigurationError(
                f"{flag_of(name)} is {now!r}, the run was started with {then!r}: a resumed run computes as it began; "
                f"{remedy}, or start a new run with another --out"
            )


def refuse_other_run(config: TrainConfig, checkpoint: Path, written: dict[str, Any]) -> None:
    """Compare a run's decided settings with those that its checkpoint was written under, which are hashed.

    ``settings.json`` may have been removed, or be of a version that kept no hash of it.

    Raises:
        ConfigurationError: something that decides the numbers differs.
    """
    ends = (config.max_steps, written["max_steps"])
    defaults = [default_warmup_steps(steps) for steps in ends if steps is not None]
    if [
        config.warmup_steps,
        written["warmup_steps"],
    ] == defaults:  # the end of the run may move, and the default with it
        written = written | {"warmup_steps": config.warmup_steps}
    remedy = f"give the values of 'config' in {checkpoint / 'trainer.json'} as flags, and remove settings.json if it is there"
    refuse_changes(config, written, remedy)
