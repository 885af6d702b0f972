"""The host's time beside other work: operators that are issued while the CPU updates, and those of an optimizer's loop.

While AdamW at home keeps nearly every core busy, the threads that launch the model's kernels share cores, caches and memory with it, and
each operator takes longer. An optimizer that goes through its parameters one by one issues operators without autograd and modules around
them, which take less than a model's.
"""

from __future__ import annotations

import threading
from collections.abc import Callable
from contextlib import contextmanager
from typing import Any

import torch

from vblackwell.offload.layout.update_rates import HomeUpdate

LOOP_PARAMETERS, LOOP_WIDTH = 64, 64


@contextmanager
def updating(update: HomeUpdate) -> Any:
    """``update``, AdamW at home, runs with the runtime's own threads, again and again, until the block ends.

    Raises:
        RuntimeError: an update failed, and what was measured was not beside one.
    """
    enough, first = threading.Event(), threading.Event()
    errors: list[BaseException] = []

    def run() -> None:
        try:
            while not enough.is_set():
                update()
                first.set()
        except BaseException as error:
            errors.append(error)
            first.set()

    thread = threading.Thread(target=run, name="updates-beside", daemon=True)
    thread.start()
    first.wait()  # the first makes threads, and touches the memory
    try:
        yield
    finally:
        enough.set()
        thread.join()
        if errors:
            raise RuntimeError("an update beside the measurement failed") from errors[0]


def looping_optimizer(device: torch.device) -> Callable[[], Any]:
    """A step of torch's AdamW that goes through `LOOP_PARAMETERS` small parameters one by one."""
    params = [torch.nn.Parameter(torch.zeros(LOOP_WIDTH, LOOP_WIDTH, device=device)) for _ in range(LOOP_PARAMETERS)]
    for param in params:
        param.grad = torch.zeros_like(param)
    return torch.optim.AdamW(params, foreach=False).step
