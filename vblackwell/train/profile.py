"""``--profile``: a trace of a few steps that Perfetto and chrome://tracing open.

It shows every GPU stream, named by what it does (compute, host to GPU, GPU to host, updates), and the operators of every thread, the
background ones too: torch records the calling thread alone unless told otherwise. What is neither an operator nor a CUDA call, such
as a thread's `preadv`, shows where the code puts `torch.profiler.record_function` around it.
"""

from __future__ import annotations

import tempfile
from collections.abc import Callable, Iterator
from contextlib import AbstractContextManager, contextmanager
from pathlib import Path
from typing import Any

import torch
from torch._C._profiler import _ExperimentalConfig  # torch offers this setting nowhere else

from vblackwell.train.profile_lanes import live_threads, name_lanes, read_trace, write_trace

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
