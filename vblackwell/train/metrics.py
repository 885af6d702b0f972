"""One line a step in metrics.jsonl, and the same numbers for TensorBoard.

Lines are appended and flushed, not fsynced: they describe the run, they do not carry it. A resumed run first cuts
the file back to its checkpoint, so a step never appears twice.
"""

from __future__ import annotations

import json
import math
import os
from dataclasses import dataclass
from pathlib import Path
from typing import Any

METRICS_NAME = "metrics.jsonl"


@dataclass(frozen=True)
class StepRecord:
    """What one optimizer step did.

    Attributes:
        step: counted from 1.
        loss: mean over the step's tokens; None if it was not finite.
        lr: learning rate of the step.
        grad_norm: before clipping; None if it was not finite or not measured.
        tokens_per_second: of this step, validation and checkpoints left out.
        level_bytes: the most that each level held after a forward and at the end of the step, by the level's label.
        link_bytes: bytes that this step moved, by 'source>destination'.
        stall_seconds: time in this step in which the computation waited for bytes.
        val_loss: validation loss after this step, where it was measured.
        seconds: length of the step; for progress, not written.
        skipped: the step changed nothing because something was not finite; for progress, not written.
    """

    step: int
    loss: float | None
    lr: float
    grad_norm: float | None
    tokens_per_second: float
    level_bytes: dict[str, int]
    link_bytes: dict[str, int]
    stall_seconds: float
    val_loss: float | None = None
    seconds: float = 0.0
    skipped: bool = False

    def to_json(self) -> dict[str, Any]:
        """The keys that metrics.jsonl promises."""
        line: dict[str, Any] = {
            "step": self.step,
            "loss": self.loss,
            "lr": self.lr,
            "grad_norm": self.grad_norm,
            "tokens_per_second": round(self.tokens_per_second, 1),
            "level_bytes": self.level_bytes,
            "link_bytes": self.link_bytes,
            "stall_seconds": round(self.stall_seconds, 6),
        }
        if self.val_loss is not None:
            line["val_loss"] = self.val_loss
        return line


def finite_or_none(value: float | None) -> float | None:
    """``value``, or None where JSON could not hold it."""
    return value if value is not None and math.isfinite(value) else None


class MetricsLog:
    """Appends to ``folder``/metrics.jsonl and, if wanted, to TensorBoard events in ``folder``/tensorboard.

    Args:
        keep_steps: what an earlier attempt wrote beyond this step is cut off.
    """

    def __init__(self, folder: Path, keep_steps: int, tensorboard: bool) -> None:
        path = folder / METRICS_NAME
        cut_after(path, keep_steps)
        self._file = path.open("a", encoding="utf-8")
        self._writer: Any = None
        if tensorboard:
            from torch.utils.tensorboard import SummaryWriter

            self._writer = SummaryWriter(str(folder / "tensorboard"), purge_step=keep_steps + 1)

    def write(self, record: StepRecord) -> None:
        self._file.write(json.dumps(record.to_json(), allow_nan=False) + "\n")
        self._file.flush()
        if self._writer is not None:
            for name in ("loss", "val_loss", "lr", "grad_norm", "tokens_per_second", "stall_seconds"):
                value = getattr(record, name)
                if value is not None:
                    self._writer.add_scalar(name, value, record.step)
            for kind, numbers in (("level_bytes", record.level_bytes), ("link_bytes", record.link_bytes)):
                for label, value in numbers.items():
                    self._writer.add_scalar(f"{kind}/{label}", value, record.step)

    def close(self) -> None:
        self._file.close()
        if self._writer is not None:
            self._writer.close()


def read_metrics(path: Path) -> list[dict[str, Any]]:
    """The complete lines of a metrics file; a line that was cut by a crash is left out."""
    if not path.exists():
        return []
    complete, _, _ = path.read_text(encoding="utf-8").rpartition("\n")
    return [json.loads(line) for line in complete.splitlines()]


def cut_after(path: Path, last_step: int) -> None:
    """Keep the lines up to ``last_step``, atomically."""
    if not path.exists():
        return
    kept = [line for line in read_metrics(path) if line["step"] <= last_step]
    fresh = path.with_suffix(".tmp")
    fresh.write_text("".join(json.dumps(line) + "\n" for line in kept), encoding="utf-8")
    os.replace(fresh, path)
