"""What a run must remember beside its weights to go on with the same bits: random generators, data position, counters."""

from __future__ import annotations

import base64
import random
from dataclasses import dataclass, field
from typing import Any

import torch

from vblackwell.errors import CorruptData


@dataclass
class TrainerState:
    """Where a run stands between two optimizer steps.

    Attributes:
        step: finished steps.
        data_position: windows consumed, as `BatchStream` counts them.
        skipped_in_a_row: steps, up to the last one, that were not finite.
        skipped: steps in all that changed no weight.
        scaler: the loss scaler's state; None where there is none.
        rng: generators, as `capture_rng` returns them.
        micro_batch: sequences in a forward, less than the settings' where memory did not suffice; None: as the settings say.
        unrecorded: the last step's record, where its line is not yet in metrics.jsonl as it should be; else None.
    """

    step: int = 0
    data_position: int = 0
    skipped_in_a_row: int = 0
    scaler: dict[str, Any] | None = None
    rng: dict[str, Any] = field(default_factory=dict)
    micro_batch: int | None = None
    skipped: int = 0
    unrecorded: dict[str, Any] | None = None

    @classmethod
    def from_json(cls, found: dict[str, Any]) -> TrainerState:
        """The reverse of `dataclasses.asdict`.

        Raises:
            CorruptData: a key is missing.
        """
        try:
            older: dict[str, Any] = {
                "micro_batch": None,
                "skipped": 0,
                "unrecorded": None,
            }  # checkpoints do not have these
            given = older | found
            return cls(**{name: given[name] for name in cls.__dataclass_fields__})
        except KeyError as error:
            raise CorruptData(f"trainer.json has no {error.args[0]!r}: it was written by another version") from None


def capture_rng(device: torch.device) -> dict[str, Any]:
    """The generators that a forward may draw from, as JSON values."""
    version, numbers, gauss = random.getstate()
    captured: dict[str, Any] = {"python": [version, list(numbers), gauss], "torch": _encode(torch.get_rng_state())}
    if device.type == "cuda":
        captured["cuda"] = _encode(torch.cuda.get_rng_state(device))
    return captured


def restore_rng(captured: dict[str, Any], device: torch.device) -> None:
    """Put generators back. A state of a GPU is left out on a machine without one: its numbers cannot be continued there."""
    version, numbers, gauss = captured["python"]
    random.setstate((version, tuple(numbers), gauss))
    torch.set_rng_state(_decode(captured["torch"]))
    if device.type == "cuda" and "cuda" in captured:
        torch.cuda.set_rng_state(_decode(captured["cuda"]), device)


def _encode(state: torch.Tensor) -> str:
    return base64.b64encode(state.numpy().tobytes()).decode("ascii")


def _decode(text: str) -> torch.Tensor:
    return torch.frombuffer(bytearray(base64.b64decode(text)), dtype=torch.uint8)
