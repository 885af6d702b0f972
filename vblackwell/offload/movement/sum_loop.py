"""Sums of gradients on the CPU: fp32 ranges to which narrower ones are added, by the threads that update (`update_loop`).

torch adds a bf16 tensor to an fp32 one by making all of it fp32 first, in new memory: 8 bytes a parameter more to write and read, and a
page fault every 4 KiB, which took more of the CPU than AdamW of the same parameters (docs/log-estimate.md). Here that copy is of a
chunk, in memory that stays in a thread's cache. A sum that is only begun takes its first summand in the same pass. The bits are torch's:
each narrower element is widened, which is exact, and added once.
"""

from __future__ import annotations

from collections.abc import Callable
from functools import cache
from typing import Any, List  # noqa: UP035 (TorchScript)

import torch

from vblackwell.offload.movement.update_loop import Scratch, Stretch, compiled, run_parts


def _loop(
    sums: List[torch.Tensor],  # noqa: UP006
    firsts: List[torch.Tensor],  # noqa: UP006
    addends: List[torch.Tensor],  # noqa: UP006
    wide: torch.Tensor,
) -> None:
    for index in range(len(sums)):
        total, most = sums[index].numel(), wide.numel()
        begins, adds = firsts[index].numel() > 0, addends[index].numel() > 0
        for start in range(0, total, most):
            count = min(most, total - start)
            target = sums[index].narrow(0, start, count)
            if begins:
                target.copy_(firsts[index].narrow(0, start, count))
            if adds:
                addend = addends[index].narrow(0, start, count)
                if addend.element_size() < target.element_size():
                    own = wide.narrow(0, 0, count)
                    own.copy_(addend)
                    target.add_(own)
                else:
                    target.add_(addend)


@cache
def compiled_sums() -> Callable[..., Any]:
    """The loop as TorchScript, or as it is, with a warning, where there is none."""
    return compiled(_loop, "sums of gradients")


class SumLoop:
    """Adds gradients up. For one thread, in which `run` returns when all is done."""

    def __init__(self) -> None:
        self._added: list[Stretch] = []
        self._scratch = Scratch()
        self._none = torch.empty(0)

    def add(self, total: torch.Tensor, first: torch.Tensor | None, addend: torch.Tensor | None) -> None:
        """``total`` becomes ``first`` plus ``addend``; without ``first`` it is added to, without ``addend`` it is a copy.

        Args:
            total: (n,) on the CPU, fp32 where the others are narrower. first, addend: (n,).
        """
        tensors = [total, *(self._none if each is None else each for each in (first, addend))]
        self._added.append((tensors, self._none, self._none, []))

    def run(self) -> None:
        """Do what was added.

        Raises:
            BaseException: as `run_parts`.
        """
        try:
            compiled_sums()  # once, before threads ask for it together
            with torch.profiler.record_function("sum at home"):  # its threads are not in the trace
                run_parts(self._added, self._sum)
        finally:
            self._added.clear()

    @torch.no_grad()
    def _sum(self, part: list[Stretch]) -> None:
        compiled_sums()(*map(list, zip(*(tensors for tensors, *_ in part), strict=True)), self._scratch.wide)
