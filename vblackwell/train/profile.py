"""``--profile``: a trace of a few steps that Perfetto and chrome://tracing open."""

from __future__ import annotations

from collections.abc import Callable, Iterator
from contextlib import AbstractContextManager, contextmanager
from pathlib import Path
from typing import Any

import torch

SKIPPED_STEPS = 2  # the first steps record the access order and allocate
TRACED_STEPS = 3


@contextmanager
def tracing(
    path: Path, device: torch.device, say: Callable[[str], None]
) -> Iterator[Callable[[], AbstractContextManager[Any]]]:
    """Inside, the yielded function gives a context for each step; after the traced ones the trace is at ``path``."""
    activities = [torch.profiler.ProfilerActivity.CPU]
    if device.type == "cuda":
        activities.append(torch.profiler.ProfilerActivity.CUDA)
    written = False

    def write(profiler: torch.profiler.profile) -> None:
        nonlocal written
        profiler.export_chrome_trace(str(path))
        written = True
        say(f"trace of {TRACED_STEPS} steps: {path}")

    schedule = torch.profiler.schedule(wait=SKIPPED_STEPS, warmup=1, active=TRACED_STEPS, repeat=1)
    with torch.profiler.profile(activities=activities, schedule=schedule, on_trace_ready=write) as profiler:

        @contextmanager
        def step() -> Iterator[None]:
            yield
            profiler.step()

        yield step
    if not written:
        say(
            f"--profile: the run was shorter than the {SKIPPED_STEPS + 1 + TRACED_STEPS} steps that a trace needs; "
            "none was written"
        )
