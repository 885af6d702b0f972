"""How fast a machine is, as the simulation of a step needs it: measured by ``vb doctor``, or taken from a GPU's data sheet.

What data sheets say is reached in part: of an H200's, a matrix product of 8192 cubed in bf16 reaches 0.79, one in fp32 0.75, a copy in
its memory 0.89, and copies over its link 0.87 of 63 GB/s alone and 0.79 both ways at once (docs/journal/offload.md).
"""

from __future__ import annotations

from dataclasses import MISSING, asdict, dataclass, fields
from typing import Any

from vblackwell.machine.gpus import KnownGPU

HALF_SHARE, FP32_SHARE, MEMORY_SHARE = 0.79, 0.75, 0.89
LINK_SHARE, BOTH_SHARE = 0.87, 0.79
# Beside copies, on a desktop's memory of two channels: 28 bytes a parameter of some 60 GB/s, shared. A server's is twice that.
CPU_ADAMW = 1.0e9
# Gradients added up while one parameter is updated: of 2.0 ns for AdamW and 1.0 for a sum on one core, 1.07 and 0.55 on two.
ADDS_PER_UPDATE = 2.0
ISSUE_SECONDS = 7e-6  # of Python and torch for an operator
# What the offload runtime does on the host for a layer group's forward, backward and update, in operators: of small groups of nine matrices
# on a CPU core, the thread's own time beside that of the same model where it lives, by the difference of 15 and 7 groups.
GROUP_ISSUES = 190.0
DISK_BYTES_PER_SECOND = 1.75e9  # each way, a virtual NVMe disk with O_DIRECT; a desktop's is seldom slower over hours


@dataclass(frozen=True)
class Rates:
    """Operations, bytes and parameters a second.

    Attributes:
        matmul_half, matmul_fp32: FLOP/s of large matrix products in bf16 (fp16 where there is none) and in fp32.
        memory: bytes/s of the GPU's memory, read and written. up, down: of the link to and from it, alone; up_both, down_both: at once.
        cpu_adamw: parameters/s that the CPU updates while the link is busy.
        issue_seconds: what the host takes to issue one operator.
        group_issues, home_group_issues: what it does for a layer group that streams, forward, backward and update, in operators; where the
            group is updated on level 0, and at home.
        busy_issues: how many times `issue_seconds` one operator takes while the CPU updates; 1 where that was not measured.
        loop_issues: how many times it one takes in an optimizer's loop over its parameters; 1 where that was not measured.
        read_issues: how many times it the host takes to read a number that the GPU has made; 1 where that was not measured.
        adds_per_update: parameters whose gradients of two micro-batches the CPU adds up while it would update one.
        disk_read, disk_write: bytes/s of the disk level's disk.
        source: where the numbers are from, for people.
    """

    matmul_half: float
    matmul_fp32: float
    memory: float
    up: float
    down: float
    up_both: float
    down_both: float
    cpu_adamw: float
    issue_seconds: float = ISSUE_SECONDS
    source: str = "measured"
    disk_read: float = DISK_BYTES_PER_SECOND
    disk_write: float = DISK_BYTES_PER_SECOND
    group_issues: float = GROUP_ISSUES
    home_group_issues: float = GROUP_ISSUES
    busy_issues: float = 1.0
    loop_issues: float = 1.0
    read_issues: float = 1.0
    adds_per_update: float = ADDS_PER_UPDATE

    def as_dict(self) -> dict[str, Any]:
        """The fields by name."""
        return asdict(self)

    def streaming_issues(self, num_groups: int, at_home: float) -> float:
        """The host's time for ``num_groups`` in operators, of which the share ``at_home`` is updated there."""
        return num_groups * (at_home * self.home_group_issues + (1 - at_home) * self.group_issues)

    @classmethod
    def from_dict(cls, values: dict[str, Any]) -> Rates:
        """What `as_dict` gave.

        Raises:
            ValueError: a rate without a default is missing, or one is not a number above 0.
        """
        names = [each.name for each in fields(cls) if each.default is MISSING or each.name in values]
        for name in names:
            value = values.get(name)
            if name != "source" and (isinstance(value, bool) or not isinstance(value, (int, float)) or not value > 0):
                raise ValueError(f"the rate {name} is {value!r}: measure again with vb doctor")
        return cls(**{name: values[name] for name in names if name in values})


def assumed_rates(gpu: KnownGPU) -> Rates:
    """What a card's data sheet lets expect, with the shares that an H200 reaches of its own."""
    link = gpu.link_bytes
    return Rates(
        matmul_half=HALF_SHARE * gpu.half_flops,
        matmul_fp32=FP32_SHARE * gpu.fp32_flops,
        memory=MEMORY_SHARE * gpu.memory_bytes_per_second,
        up=LINK_SHARE * link,
        down=LINK_SHARE * link,
        up_both=BOTH_SHARE * link,
        down_both=BOTH_SHARE * link,
        cpu_adamw=CPU_ADAMW,
        source=f"data sheet of {gpu.name}",
    )
