"""``--profile``: a trace of a few steps that Perfetto and chrome://tracing open, with streams named by what most of
their time goes into and threads by the number that the system gave them, as long as they live.
"""

import json
import tempfile
import threading
from collections import defaultdict
from collections.abc import Callable, Iterable, Iterator, Mapping
from contextlib import AbstractContextManager, contextmanager
from pathlib import Path
from typing import Any

import torch
from torch._C._profiler import _ExperimentalConfig  # torch offers this setting nowhere else

SKIPPED_STEPS = 2  # the first steps record the access order and allocate
TRACED_STEPS = 3


@contextmanager
def tracing(
    path: Path, device: torch.device, say: Callable[[str], None]
) -> Iterator[Callable[[], AbstractContextManager[Any]]]:
    """Inside, the yielded function gives a context for each step. After the skipped ones, one in which the profiler
    warms up and the traced ones, the trace is at ``path``.
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
            trace = json.loads(raw.read_bytes())
        threads = {thread.native_id: thread.name for thread in threading.enumerate() if thread.native_id is not None}
        name_lanes(trace, threads)
        path.write_text(json.dumps(trace))
        written = True
        say(f"trace of {TRACED_STEPS} steps: {path}")

    with torch.profiler.profile(
        activities=activities,
        schedule=torch.profiler.schedule(wait=SKIPPED_STEPS, warmup=1, active=TRACED_STEPS, repeat=1),
        on_trace_ready=write,
        acc_events=True,  # there is one cycle; without this torch warns that others would be lost
        experimental_config=_ExperimentalConfig(profile_all_threads=True),
    ) as profiler:

        @contextmanager
        def step() -> Iterator[None]:
            yield
            profiler.step()

        yield step
    if not written:
        needed = SKIPPED_STEPS + 1 + TRACED_STEPS
        say(f"--profile: the run was shorter than the {needed} steps that a trace needs; none was written")


AUTOGRAD = "pt_autograd"  # how torch calls the threads of its backward; the lane's next name, the program's, hides it
Lane = tuple[Any, Any]  # a trace's pid and tid; for a GPU: device and stream
COPY_ROLES = {"HtoD": "host to GPU", "DtoH": "GPU to host", "DtoD": "copies on the GPU", "PtoP": "GPU to GPU"}
ORDER = "kernels", "host to GPU", "GPU to host", "updates", "GPU to GPU", "copies on the GPU"


def stream_roles(events: Iterable[Mapping[str, Any]]) -> dict[Lane, str]:
    """What most of the time of each GPU stream of a trace goes into: copies of a direction, updates, or kernels."""
    uses: dict[Lane, dict[str, float]] = defaultdict(lambda: defaultdict(float))  # microseconds
    for event in events:
        name = str(event.get("name", ""))
        if event.get("cat") in ("kernel", "gpu_memcpy"):
            role = "updates" if "adam" in name.lower() else "kernels"
            role = next((role for direction, role in COPY_ROLES.items() if direction in name), role)
            uses[event["pid"], event["tid"]][role] += float(event.get("dur", 0))
    return {lane: max(use, key=lambda role: use[role]) for lane, use in uses.items()}


def name_lanes(trace: dict[str, Any], threads: Mapping[int, str]) -> None:
    """Put names and an order for streams and ``threads`` into a trace in Chrome's format."""
    events: list[dict[str, Any]] = trace["traceEvents"]
    names = {lane: (f"{role} (stream {lane[1]})", ORDER.index(role)) for lane, role in stream_roles(events).items()}
    backward = {e["tid"] for e in events if e.get("name") == "thread_name" and AUTOGRAD in e["args"]["name"]}
    threads = {**dict.fromkeys(backward, "backward"), **threads}
    for event in events:
        lane, thread = (event.get("pid"), event.get("tid")), threads.get(event.get("tid", -1))
        if event.get("ph") == "X" and lane not in names and thread is not None:
            names[lane] = f"{thread} (thread {lane[1]})", int(thread != "MainThread")
    told = "thread_name", "thread_sort_index"
    kept = [e for e in events if e.get("name") not in told or (e.get("pid"), e.get("tid")) not in names]
    for (pid, tid), (name, order) in names.items():
        for kind, args in zip(told, ({"name": name}, {"sort_index": order}), strict=True):
            kept.append({"ph": "M", "name": kind, "pid": pid, "tid": tid, "ts": 0, "args": args})
    trace["traceEvents"] = kept
