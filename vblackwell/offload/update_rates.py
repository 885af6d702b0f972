"""Which share of AdamW the CPU should do beside a GPU: from rates that are measured here, once a process.

A parameter that is updated on level 0 costs the link `STATE_BYTES` up; one that is updated at home costs the CPU its AdamW. Some bytes
of every parameter go up in any case for forward and backward, ``pass_bytes``: twice its weight, less what stays loaded from one
to the other. All is done together when

    (pass_bytes + (1 - share) * STATE_BYTES) / link = share / cpu

with ``link`` in bytes/s while copies go both ways, of which a step uses `LINK_USE` at best, and ``cpu`` in parameters/s beside them. It
cannot begin before the first gradient is there, and must be done before the forward comes by: `OVERLAP` of a step is its. A share that is
too large costs more than one that is too small. Tokens do not enter: where compute takes longer than both, any share does.
"""

from __future__ import annotations

import functools
import time

import torch

from vblackwell.offload.update_loop import MasterLoop
from vblackwell.units import MiB

STATE_BYTES, PASS_BYTES = 10, 4  # split bf16 masters, every weight loaded twice
LINK_USE, OVERLAP = 0.8, 0.95
# An update whose memory is shared with copies both ways: 1.9 of 2.65 G parameters/s on the reference machine (docs/log-offload.md).
BESIDE_COPIES = 0.7
LEAST_SHARE = 0.02  # less is not worth a thread
CPU_ELEMENTS = 16 << 20  # 256 MiB of states: more than most caches
LINK_BYTES, COPIES = 64 * MiB, 4


def balanced_share(device: torch.device, pass_bytes: float = PASS_BYTES) -> float:
    """The share of a model's parameters that is best updated at home, for level 0 on ``device``, a GPU: 0 to 0.5. Measures once, 0.3 s."""
    link, cpu = _rates(device)
    return share_for(link, cpu, pass_bytes)


@functools.cache
def _rates(device: torch.device) -> tuple[float, float]:
    return duplex_rate(device), BESIDE_COPIES * cpu_rate()


def share_for(link: float, cpu: float, pass_bytes: float = PASS_BYTES) -> float:
    """The share for a ``link`` in bytes/s each way and a ``cpu`` in parameters/s (see the module's text)."""
    link *= LINK_USE
    share = OVERLAP * (pass_bytes + STATE_BYTES) / link / (STATE_BYTES / link + 1 / cpu)
    return 0.0 if share < LEAST_SHARE else min(round(share, 2), 0.5)


def cpu_rate() -> float:
    """Parameters a second that AdamW at home updates, with nothing beside it."""
    master, exp_avg, exp_avg_sq = (torch.zeros(CPU_ELEMENTS) for _ in range(3))
    weight = torch.zeros(CPU_ELEMENTS, dtype=torch.bfloat16)
    loop, step, times = MasterLoop(), torch.zeros(()), []
    for _ in range(4):
        began = time.perf_counter()
        step += 1
        loop.add(
            master,
            weight,
            weight,
            exp_avg,
            exp_avg_sq,
            step,
            None,
            lr=0.0,
            beta1=0.9,
            beta2=0.9,
            eps=1e-8,
            weight_decay=0.0,
        )
        loop.run()
        times.append(time.perf_counter() - began)
    return CPU_ELEMENTS / min(times[1:])  # the first makes threads, and scratch


def duplex_rate(device: torch.device) -> float:
    """Bytes a second that a GPU's link carries up while as many go down."""
    streams = [torch.cuda.Stream(device) for _ in range(2)]
    there = [torch.empty(LINK_BYTES, dtype=torch.uint8, device=device) for _ in streams]
    here = [torch.empty(LINK_BYTES, dtype=torch.uint8, pin_memory=True) for _ in streams]
    torch.cuda.synchronize(device)
    times = []
    for _ in range(2):
        began = time.perf_counter()
        for _ in range(COPIES):
            for stream, target, source in zip(streams, (there[0], here[1]), (here[0], there[1]), strict=True):
                with torch.cuda.stream(stream):
                    target.copy_(source, non_blocking=True)
        torch.cuda.synchronize(device)
        times.append(time.perf_counter() - began)
    return COPIES * LINK_BYTES / min(times)
