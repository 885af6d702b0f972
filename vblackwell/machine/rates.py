"""How fast a machine is, as the simulation of a step needs it: measured by ``vb doctor``, or by a data sheet, of which
an H200 reaches the shares below (docs/journal/offload.md).
"""

import contextlib
import json
import os
import re
import time
from collections.abc import Iterator
from dataclasses import asdict, dataclass, fields
from pathlib import Path
from typing import Any

from vblackwell.machine.cache import cache_root, write_atomically
from vblackwell.machine.facts import disk_facts
from vblackwell.machine.gpus import KnownGPU, known_as

HALF_SHARE, FP32_SHARE, MEMORY_SHARE = 0.79, 0.75, 0.89  # of products in bf16 and fp32, of copies in memory
# Of these rates, what a model's own products on a GPU reach, and attention's.
PRODUCT_SHARE, ATTENTION_SHARE = 0.82, 0.5
LINK_SHARE, BOTH_SHARE = 0.87, 0.79  # of copies over the link, alone and both ways at once
# In steps, on a desktop: 28 bytes a parameter of the third that copies and the host's other work leave of 60 GB/s.
CPU_ADAMW = 0.7e9
# What the offload runtime does on the host for a group's forward, backward and update, in operators: of nine small
# matrices on a CPU core, the thread's time less that of the resident model, by the difference of 15 and 7 groups.
GROUP_ISSUES = 190.0
MAX_AGE_SECONDS = 24 * 3600  # what a host does for others changes: a share of its work is decided anew each day
DISK_BYTES_PER_SECOND = 1.75e9  # each way, a virtual NVMe disk with O_DIRECT; a desktop's is seldom slower over hours


@dataclass(frozen=True)
class Rates:
    """Operations, bytes and parameters a second; what follows ``source`` may not have been measured."""

    matmul_half: float  # FLOP/s of large matrix products in bf16 (fp16 where there is none)
    matmul_fp32: float
    memory: float  # bytes/s of the GPU's memory, read and written
    up: float  # bytes/s of the link to the GPU alone,
    down: float  # from it,
    up_both: float  # and of both at once
    down_both: float
    cpu_adamw: float  # parameters/s that the CPU updates while the link is busy
    issue_seconds: float = 7e-6  # what Python and torch take on the host to issue one operator
    source: str = "measured"  # where the numbers are from, for people
    disk_read: float = DISK_BYTES_PER_SECOND  # bytes/s of the disk level's disk
    disk_write: float = DISK_BYTES_PER_SECOND
    # `GROUP_ISSUES`, where the group is updated on level 0, and on the host.
    group_issues: float = GROUP_ISSUES
    home_group_issues: float = GROUP_ISSUES
    # How many times `issue_seconds` one operator takes while the CPU updates, one in an optimizer's loop over its
    # parameters, and reading a number that the GPU has made; 1: not measured.
    busy_issues: float = 1.0
    loop_issues: float = 1.0
    read_issues: float = 1.0
    # Parameters whose gradients the CPU sums in the time of one parameter's AdamW: 1.0 and 2.0 ns on one core.
    adds_per_update: float = 2.0
    # Of the rates of large products, what a model's own reach, and attention in bf16 and in fp32.
    product_share: float = PRODUCT_SHARE
    attention_half_share: float = ATTENTION_SHARE
    attention_fp32_share: float = ATTENTION_SHARE

    def streaming_issues(self, num_groups: int, on_host: float) -> float:
        """The host's time for ``num_groups`` in operators, of which the share ``on_host`` is updated there."""
        return num_groups * (on_host * self.home_group_issues + (1 - on_host) * self.group_issues)

    @classmethod
    def from_dict(cls, values: dict[str, Any]) -> "Rates":
        """What ``asdict`` gave; ValueError where a rate without a default is missing, or one is no number above 0."""
        given = {each.name: values.get(each.name, each.default) for each in fields(cls)}
        for name, value in given.items():
            if name != "source" and (isinstance(value, bool) or not isinstance(value, (int, float)) or not value > 0):
                raise ValueError(f"the rate {name} is {value!r}: measure again with vb doctor")
        return cls(**given)


def assumed_rates(gpu: KnownGPU) -> Rates:
    """What a card's data sheet lets expect."""
    alone, both = LINK_SHARE * gpu.link_bytes, BOTH_SHARE * gpu.link_bytes
    computing = (HALF_SHARE * gpu.half_flops, FP32_SHARE * gpu.fp32_flops, MEMORY_SHARE * gpu.memory_bytes_per_second)
    return Rates(*computing, alone, alone, both, both, CPU_ADAMW, source=f"data sheet of {gpu.name}")


def keep_rates(gpu_name: str, rates: Rates) -> None:
    """Remember ``rates`` of the GPU that the driver calls ``gpu_name``. A cache that cannot be written is no error."""
    values = {"gpu": gpu_name} | asdict(rates)
    write_atomically(_folder() / f"{_slug(gpu_name)}.json", json.dumps(values, indent=2).encode())


def rates_of(card: KnownGPU) -> Rates:
    """Measured on this machine, if it has such a card and ``vb doctor`` has run; else by its data sheet."""
    return next((rates for name, rates in _all_kept() if known_as(name) == card), None) or assumed_rates(card)


def kept_rates(gpu_name: str) -> Rates | None:
    """What `keep_rates` remembers of the GPU that the driver calls so; None if it was never measured here."""
    return next((rates for name, rates in _all_kept() if name == gpu_name), None)


def keep_disk(path: str, gbps: dict[str, Any]) -> None:
    """Remember the rates of the disk at ``path`` in GB/s, ``{'read', 'write'}``, unless it was refused."""
    if "refused" not in gbps:
        write_atomically(_disk_file(path), json.dumps(gbps, indent=2).encode())


def kept_disk(path: str) -> tuple[float, float] | None:
    """What `keep_disk` remembers of the disk at ``path``, bytes/s read and written; None if it was never measured."""
    with contextlib.suppress(OSError, ValueError, TypeError, KeyError):
        values = json.loads(_disk_file(path).read_text(encoding="utf-8"))
        return float(values["read"]) * 1e9, float(values["write"]) * 1e9
    return None


def keep_together(gpu_name: str, threads: int, link: float, cpu: float) -> None:
    """Remember a GPU's link both ways, bytes/s each way, and AdamW on ``threads`` beside such copies, parameters/s."""
    write_atomically(_together_file(gpu_name, threads), json.dumps({"both_ways": link, "cpu": cpu}).encode())


def kept_together(gpu_name: str, threads: int) -> tuple[float, float] | None:
    """What `keep_together` remembers; None if that is more than `MAX_AGE_SECONDS` old, or nothing."""
    with contextlib.suppress(OSError, ValueError, TypeError, KeyError):
        path = _together_file(gpu_name, threads)
        values = json.loads(path.read_text(encoding="utf-8"))
        link, cpu = float(values["both_ways"]), float(values["cpu"])
        if link > 0 and cpu > 0 and 0 <= time.time() - path.stat().st_mtime < MAX_AGE_SECONDS:
            return link, cpu
    return None


def _together_file(gpu_name: str, threads: int) -> Path:
    return _folder() / f"together-{_slug(gpu_name)}-{threads}.json"


def _disk_file(path: str) -> Path:
    mount = Path(path).resolve()
    while not os.path.ismount(mount):
        mount = mount.parent
    return _folder() / f"disk{_slug(f'-{mount}-{disk_facts(path).file_system}-{os.stat(mount).st_dev}')}.json"


def _slug(text: str) -> str:
    return re.sub("[^a-z0-9]+", "-", text.lower())


def _folder() -> Path:
    return cache_root() / "rates"


def _all_kept() -> Iterator[tuple[str, Rates]]:
    for path in sorted(_folder().glob("*.json")):
        with contextlib.suppress(OSError, ValueError, TypeError, KeyError, AttributeError):
            values = json.loads(path.read_text(encoding="utf-8"))
            yield str(values["gpu"]), Rates.from_dict(values)
