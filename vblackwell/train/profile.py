"""``--profile``: a trace of a few steps that Perfetto and chrome://tracing open.

It shows every GPU stream, named by what it does (compute, host to GPU, GPU to host, updates), and the operators of
every thread, the background ones too: torch records the calling thread alone unless told otherwise. What is neither an
operator nor a CUDA call, such as a thread's `preadv`, shows where the code puts `torch.profiler.record_function` around
it.

torch writes "stream 7" and "thread 4711 (python3)". Which is which can be read off what ran there: a stream whose time
goes into copies is named by their direction, the one with most kernel time computes, one that mostly runs AdamW
updates. Threads are known by the number that the system gave them, as long as they live. Names go into the trace as its
own metadata.
"""

from __future__ import annotations

import gzip
import json
import tempfile
import threading
from collections.abc import Callable, Iterable, Iterator, Mapping
from contextlib import AbstractContextManager, contextmanager
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

import torch
from torch._C._profiler import _ExperimentalConfig  # torch offers this setting nowhere else

SKIPPED_STEPS = 2  # the first steps record the access order and allocate
TRACED_STEPS = 3


@contextmanager
def tracing(
    path: Path,
    device: torch.device,
    say: Callable[[str], None],
    *,
    skipped_steps: int = SKIPPED_STEPS,
    traced_steps: int = TRACED_STEPS,
) -> Iterator[Callable[[], AbstractContextManager[Any]]]:
    """Inside, the yielded function gives a context for each step; after the traced ones the trace is at ``path``.

    Args:
        path: ends in ``.json`` or ``.json.gz``.
        skipped_steps: before the one in which the profiler warms up, which is not traced either.
    """
    activities = [torch.profiler.ProfilerActivity.CPU]
    if device.type == "cuda":
        activities.append(torch.profiler.ProfilerActivity.CUDA)
    written = False

    def write(profiler: torch.profiler.profile) -> None:
        nonlocal written
        with tempfile.TemporaryDirectory(dir=path.parent) as folder:
            raw = Path(folder, "raw.json")
            profiler.export_chrome_trace(str(raw))
            trace = read_trace(raw)
        name_lanes(trace, live_threads())
        write_trace(trace, path)
        written = True
        say(f"trace of {traced_steps} steps: {path}")

    schedule = torch.profiler.schedule(wait=skipped_steps, warmup=1, active=traced_steps, repeat=1)
    everything = _ExperimentalConfig(profile_all_threads=True)
    with torch.profiler.profile(
        activities=activities,
        schedule=schedule,
        on_trace_ready=write,
        acc_events=True,  # there is one cycle; without this torch warns that others would be lost
        experimental_config=everything,
    ) as profiler:

        @contextmanager
        def step() -> Iterator[None]:
            yield
            profiler.step()

        yield step
    if not written:
        say(
            f"--profile: the run was shorter than the {skipped_steps + 1 + traced_steps} steps that a trace needs; "
            "none was written"
        )


# -- lanes -------------------------------------------------------------------------------------------------------------

AUTOGRAD = "pt_autograd"  # how torch calls the threads of its backward; the lane's next name, the program's, hides it
GPU_CATEGORIES = ("kernel", "gpu_memcpy", "gpu_memset")
Lane = tuple[Any, Any]  # a trace's pid and tid; for a GPU: device and stream


@dataclass
class StreamUse:
    """What a GPU stream did.

    Attributes:
        kernel_us, update_us: time in kernels, and in those of AdamW. copy_us: time in copies, by direction ('HtoD',
            ...).
    """

    kernel_us: float = 0.0
    update_us: float = 0.0
    copy_us: dict[str, float] = field(default_factory=dict)

    def add(self, event: Mapping[str, Any]) -> None:
        length, name = float(event.get("dur", 0)), str(event.get("name", ""))
        if event["cat"] == "gpu_memcpy":
            direction = direction_of(name)
            self.copy_us[direction] = self.copy_us.get(direction, 0.0) + length
        elif event["cat"] == "kernel":
            self.kernel_us += length
            self.update_us += length if "adam" in name.lower() else 0.0


COPY_ROLES = {"HtoD": "host to GPU", "DtoH": "GPU to host", "DtoD": "copies on the GPU", "PtoP": "GPU to GPU"}
ORDER = (
    "compute",
    "host to GPU",
    "GPU to host",
    "updates",
    "kernels",
    "GPU to GPU",
    "copies on the GPU",
    "copies",
    "idle",
)


def direction_of(name: str) -> str:
    """'HtoD' of "Memcpy HtoD (Pinned -> Device)"."""
    return next((direction for direction in COPY_ROLES if direction in name), "other")


def stream_roles(events: Iterable[Mapping[str, Any]]) -> dict[Lane, str]:
    """What each GPU stream of a trace is for, one of ``ORDER``."""
    uses: dict[Lane, StreamUse] = {}
    for event in events:
        if event.get("cat") in GPU_CATEGORIES:
            uses.setdefault((event["pid"], event["tid"]), StreamUse()).add(event)
    computing = {
        max((lane for lane in uses if lane[0] == device), key=lambda lane: uses[lane].kernel_us)
        for device in {lane[0] for lane in uses}
    }
    return {lane: _role(use, lane in computing) for lane, use in uses.items()}


def _role(use: StreamUse, computing: bool) -> str:
    copying = sum(use.copy_us.values())
    if computing and use.kernel_us:
        return "compute"
    if copying > use.kernel_us:
        return COPY_ROLES.get(max(use.copy_us, key=lambda direction: use.copy_us[direction]), "copies")
    if use.update_us > use.kernel_us / 2:
        return "updates"
    return "kernels" if use.kernel_us else "idle"


def live_threads() -> dict[int, str]:
    """Names of this process's Python threads by the system's number."""
    return {thread.native_id: thread.name for thread in threading.enumerate() if thread.native_id is not None}


def name_lanes(trace: dict[str, Any], threads: Mapping[int, str]) -> None:
    """Put names and an order for streams and ``threads`` into a trace in Chrome's format."""
    events: list[dict[str, Any]] = trace["traceEvents"]
    names: dict[Lane, tuple[str, int]] = {}
    for lane, role in stream_roles(events).items():
        names[lane] = (f"{role} (stream {lane[1]})", ORDER.index(role))
    backward = {e["tid"] for e in events if e.get("name") == "thread_name" and AUTOGRAD in e["args"]["name"]}
    threads = {**{tid: "backward" for tid in backward}, **threads}
    for event in events:
        lane, thread = (event.get("pid"), event.get("tid")), threads.get(event.get("tid", -1))
        if event.get("ph") == "X" and lane not in names and thread is not None:
            names[lane] = (f"{thread} (thread {lane[1]})", 0 if thread == "MainThread" else 1)
    told = ("thread_name", "thread_sort_index")
    kept = [
        e
        for e in events
        if not (e.get("ph") == "M" and e.get("name") in told and (e.get("pid"), e.get("tid")) in names)
    ]
    for (pid, tid), (name, order) in names.items():
        kept.append({"ph": "M", "name": told[0], "pid": pid, "tid": tid, "ts": 0, "args": {"name": name}})
        kept.append({"ph": "M", "name": told[1], "pid": pid, "tid": tid, "ts": 0, "args": {"sort_index": order}})
    trace["traceEvents"] = kept


def read_trace(path: Path) -> dict[str, Any]:
    """A trace from a ``.json`` or ``.json.gz`` file."""
    data = path.read_bytes()
    return json.loads(gzip.decompress(data) if path.suffix == ".gz" else data)


def write_trace(trace: dict[str, Any], path: Path) -> None:
    """The trace to a ``.json`` or ``.json.gz`` file; Perfetto opens both."""
    data = json.dumps(trace).encode()
    path.write_bytes(gzip.compress(data, 5) if path.suffix == ".gz" else data)
