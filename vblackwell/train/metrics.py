"""One line a step in metrics.jsonl, and the same numbers for TensorBoard: flushed, not fsynced, for they describe the
run and do not carry it. A resumed run cuts the file back to its checkpoint, so a step never appears twice.
"""

import json
import math
import os
import shutil
import socket
import time
from collections import defaultdict
from collections.abc import Callable, Iterator
from contextlib import ExitStack, closing, contextmanager
from dataclasses import asdict, dataclass
from pathlib import Path
from typing import Any

from vblackwell.errors import CorruptData, DiskError
from vblackwell.folders.commit import write_whole
from vblackwell.units import format_bytes

METRICS_NAME = "metrics.jsonl"
TENSORBOARD = "tensorboard"


@dataclass(frozen=True)
class StepRecord:
    """What one optimizer step, counted from 1, did: the mean loss over its tokens and the norm before clipping, each
    None if it was not finite; the most bytes that each level held after a forward and at the end, by the level's label;
    bytes moved by 'source>destination'; seconds in which the computation waited for bytes. Rates are of the step
    without validation and checkpoints. ``seconds`` and ``skipped`` (no weight was changed) are not written.
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
        rounded = {"tokens_per_second": round(self.tokens_per_second, 1), "stall_seconds": round(self.stall_seconds, 6)}
        left_out = {"seconds", "skipped"} | ({"val_loss"} if self.val_loss is None else set())
        return {name: value for name, value in (asdict(self) | rounded).items() if name not in left_out}


def finite_or_none(value: float | None) -> float | None:
    """``value``, or None where JSON could not hold it."""
    return value if value is not None and math.isfinite(value) else None


def level_labels(stats: dict[str, Any]) -> list[str]:
    """A unique name for each level of `VGPUStack.get_stats`: its device, numbered where two levels share one."""
    devices = [level["device"] for level in stats["levels"]]
    return [name if devices.count(name) == 1 else f"{name}#{index}" for index, name in enumerate(devices)]


def link_bytes(stats: dict[str, Any], before: dict[str, Any]) -> dict[str, int]:
    """Bytes moved after ``before`` by 'source>destination'."""
    moved: dict[str, int] = defaultdict(int)
    for sign, found in ((1, stats), (-1, before)):
        for link in found["links"]:
            moved[f"{link['source']}>{link['destination']}"] += sign * link["bytes"]
    return dict(moved)


class MetricsLog:
    """Appends to ``folder``/metrics.jsonl, cut off after ``keep_steps``, and if wanted to events in its tensorboard/
    (not by torch's ``SummaryWriter``, whose thread meets a full disk later, and prints a traceback of it). Raises
    CorruptData: metrics.jsonl of an earlier attempt is not what a run writes; DiskError: the disk refused.
    """

    def __init__(self, folder: Path, keep_steps: int, tensorboard: bool) -> None:
        path = folder / METRICS_NAME
        cut_after(path, keep_steps)
        with ExitStack() as opened:
            self._lines = opened.enter_context(closing(_Appended(path)))
            self._events = None
            if tensorboard:
                with _writing(folder / TENSORBOARD):
                    (folder / TENSORBOARD).mkdir(exist_ok=True)
                name = f"events.out.tfevents.{time.time():.6f}.{socket.gethostname()}.{os.getpid()}"
                file = opened.enter_context(closing(_Appended(folder / TENSORBOARD / name)))
                self._events = _events(file, keep_steps + 1)
            self.close = opened.pop_all().close  # idempotent

    def write(self, record: StepRecord) -> None:
        """Add a step. Raises DiskError: the line may be there in part."""
        self._lines.write((json.dumps(record.to_json(), allow_nan=False) + "\n").encode())
        if self._events is not None:
            self._events(record)


class _Appended:
    """A file that is written to without a buffer, so that a refusal is met where it belongs."""

    def __init__(self, path: Path) -> None:
        self._path = path
        with _writing(path):
            self._raw = path.open("ab", buffering=0)
        self.close = self._raw.close

    def write(self, data: bytes) -> None:
        with _writing(self._path):
            write_whole(self._raw, memoryview(data))


def _events(file: _Appended, first_step: int) -> Callable[[StepRecord], None]:
    """What writes all numbers of a step to ``file`` as one TensorBoard event; they end what other files of its folder
    show of ``first_step`` and later.
    """
    from tensorboard.compat.proto.event_pb2 import Event, SessionLog  # pyright: ignore[reportAttributeAccessIssue]
    from tensorboard.compat.proto.summary_pb2 import Summary  # pyright: ignore[reportAttributeAccessIssue]
    from tensorboard.summary.writer.record_writer import RecordWriter

    records = RecordWriter(file)

    def add(**fields: Any) -> None:
        records.write(Event(wall_time=time.time(), **fields).SerializeToString())

    def write(record: StepRecord) -> None:
        named = ("loss", "val_loss", "lr", "grad_norm", "tokens_per_second", "stall_seconds")
        values = {name: getattr(record, name) for name in named}
        for kind, numbers in (("level_bytes", record.level_bytes), ("link_bytes", record.link_bytes)):
            values |= {f"{kind}/{label}": value for label, value in numbers.items()}
        shown = [Summary.Value(tag=tag, simple_value=value) for tag, value in values.items() if value is not None]
        add(step=record.step, summary=Summary(value=shown))

    add(file_version="brain.Event:2")
    add(step=first_step, session_log=SessionLog(status=SessionLog.START))
    return write


@contextmanager
def _writing(path: Path) -> Iterator[None]:
    """The system's refusal to write to ``path`` as an error for the user."""
    try:
        yield
    except OSError as error:
        folder = path if path.is_dir() else path.parent
        free = format_bytes(shutil.disk_usage(folder).free)
        said = f"writing {path} failed: {error.strerror or error}; {free} are free on its disk: make room"
        raise DiskError(said) from error


def read_metrics(path: Path) -> list[dict[str, Any]]:
    """The complete lines of a metrics file, without one that was cut by a crash. Raises CorruptData, with the line."""
    remedy = "move the file away: a resumed run begins a new one"
    try:
        complete, _, _ = path.read_bytes().rpartition(b"\n")
    except FileNotFoundError:
        return []
    except OSError as error:
        raise CorruptData(f"{path} cannot be read: {error.strerror}; {remedy}") from error
    found = []
    for number, line in enumerate(complete.splitlines(), 1):
        try:
            values = json.loads(line.decode("utf-8"))
        except (ValueError, RecursionError):
            values = None
        if not isinstance(values, dict) or type(values.get("step")) is not int:
            raise CorruptData(f"{path}: line {number} is not that of a step; {remedy}")
        found.append(values)
    return found


def cut_after(path: Path, last_step: int) -> None:
    """Keep the lines up to ``last_step``, atomically."""
    if not path.exists():
        return
    kept = [line for line in read_metrics(path) if line["step"] <= last_step]
    fresh = path.with_suffix(".tmp")
    with _writing(path):
        fresh.write_text("".join(json.dumps(line) + "\n" for line in kept), encoding="utf-8")
        os.replace(fresh, path)
