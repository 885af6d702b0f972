"""What bench_lora.py asks of a process, and what the process answers."""

from __future__ import annotations

import json
from dataclasses import asdict, dataclass, field

from benchmarks.lib.offload.case import SHAPES, Shape

SYSTEMS = ("ours", "bitsandbytes")


@dataclass(frozen=True)
class Case:
    """One system's run.

    Attributes:
        folder: of the base. shape: of `SHAPES`. rank, alpha: of the adapters, around all linears but the head.
        batch, seq: a step's rows and their tokens. steps: of AdamW at ``learning_rate``, reached after ``rise_steps``.
        cap_bytes: of the GPU, enforced. host_bytes: of our second level.
        placement: of ours.
        limit_seconds: for opening and training; steps that do not fit are left out.
    """

    system: str
    folder: str
    shape: str
    rank: int
    alpha: float
    batch: int
    seq: int
    steps: int
    learning_rate: float
    rise_steps: int
    cap_bytes: int
    host_bytes: int
    placement: str
    device: str
    dtype: str
    seed: int
    limit_seconds: float = 3600.0

    @property
    def sizes(self) -> Shape:
        return SHAPES[self.shape]

    def rate_at(self, step: int) -> float:
        return self.learning_rate * min(1.0, (step + 1) / self.rise_steps)

    def to_json(self) -> str:
        return json.dumps(asdict(self))

    @classmethod
    def from_json(cls, text: str) -> Case:
        return cls(**json.loads(text))


@dataclass
class Result:
    """What was measured.

    Attributes:
        tokens_per_second: by the median step after the first five.
        peak_reserved, peak_allocated: torch's, from the first step on, bytes.
        opened_seconds: until the first step began. trained: parameters of the adapters.
    """

    system: str
    status: str = "ok"
    tokens_per_second: float | None = None
    peak_reserved: int | None = None
    peak_allocated: int | None = None
    opened_seconds: float | None = None
    trained: int = 0
    placement: str = ""
    step_seconds: list[float] = field(default_factory=list)
    losses: list[float] = field(default_factory=list)
