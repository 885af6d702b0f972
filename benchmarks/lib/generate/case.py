"""What bench_generate.py asks of a process, and what the process answers."""

from __future__ import annotations

import json
from dataclasses import asdict, dataclass, field

from benchmarks.lib.offload.case import SHAPES, Shape

SYSTEMS = ("folder", "streamed", "streamed-fp4", "accelerate", "resident", "resident-fp4")
INDEX = "model.safetensors.index.json"  # of a folder; written last
CAPPED = ("streamed", "streamed-fp4", "accelerate")


@dataclass(frozen=True)
class Case:
    """One system's work.

    Attributes:
        system: one of `SYSTEMS`; 'folder' writes the folder and measures the machine.
        folder: with the weights.
        shape: of `SHAPES`.
        batches: rows of the texts; prompt, new: their tokens.
        through_new: tokens of the text for which nothing but three layers fits level 0; 0: it is not written.
        cap_bytes: of the GPU, enforced; host_bytes: of our second level.
        device, dtype, seed.
    """

    system: str
    folder: str
    shape: str
    batches: tuple[int, ...]
    prompt: int
    new: int
    through_new: int
    cap_bytes: int
    host_bytes: int
    device: str
    dtype: str
    seed: int

    @property
    def sizes(self) -> Shape:
        return SHAPES[self.shape]

    def to_json(self) -> str:
        return json.dumps(asdict(self))

    @classmethod
    def from_json(cls, text: str) -> Case:
        values = json.loads(text)
        return cls(**values | {"batches": tuple(values["batches"])})


@dataclass
class Point:
    """One text.

    Attributes:
        rows, new: of the text. through: weights had room for three layers alone.
        first_cold, first_seconds: from the request to the first token on the host: of the process's first request of
            this size, and of the next one.
        step_seconds: median time from token to token; rate: tokens a second by it, all rows. drained_rate: by first and
            last token.
        must_bytes: what does not stay on the GPU and is needed for a token; moved_bytes: what crossed the link for one.
        read_bytes: what the GPU reads for a token: weights, keys and values.
        peak_reserved: torch's, of the GPU.
        tokens: the first of each row.
    """

    system: str
    rows: int
    new: int = 0
    through: bool = False
    status: str = "ok"
    first_cold: float | None = None
    first_seconds: float | None = None
    step_seconds: float | None = None
    rate: float | None = None
    drained_rate: float | None = None
    must_bytes: float | None = None
    moved_bytes: float | None = None
    read_bytes: float | None = None
    peak_reserved: int | None = None
    tokens: list[int] = field(default_factory=list)
    note: str = ""


@dataclass
class Loading:
    """How a system opened the folder.

    Attributes:
        seconds: until the model could be called.
        file_bytes: of the weights. own_bytes: highest growth of the process's own (anonymous) memory meanwhile;
            machine_bytes: of what the machine used, page cache not counted.
    """

    system: str
    seconds: float
    file_bytes: int
    own_bytes: int
    machine_bytes: int
