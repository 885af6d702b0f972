"""AdamW with a bf16 compute weight and a whole fp32 master on the CPU, chunk by chunk in cache, outside the interpreter's lock.

A chunk takes four torch calls. From Python each of them takes the lock back in turn with the thread that launches the model's kernels, 0.2
ms a time on a busy machine, so chunks would have to be too large for any cache (docs/log-offload.md). TorchScript runs the whole loop with
the lock released. It is deprecated: where it is gone, the same function runs as Python, slower, with the same bits.
"""

from __future__ import annotations

import warnings
from collections.abc import Callable
from functools import cache
from typing import Any, List  # noqa: UP035 (TorchScript)

import torch

# Elements. A multiple of 16, or torch's vectorised AdamW rounds differently; what one operation wrote is in cache for the next.
CHUNK = 1 << 19


Pieces = list[list[torch.Tensor]]  # a list of one for each chunk: what torch's AdamW takes


# TorchScript reads the annotations below, so this is written in what it understands. The lists come from outside: of a list that is made in
# here it would not see that AdamW writes to what is in it, and drop the call as dead.
def _loop(
    masters: List[List[torch.Tensor]],  # noqa: UP006
    master_bits: List[List[torch.Tensor]],  # noqa: UP006
    weights: List[List[torch.Tensor]],  # noqa: UP006
    gradients: List[List[torch.Tensor]],  # noqa: UP006
    is_wide: bool,
    exp_avgs: List[List[torch.Tensor]],  # noqa: UP006
    exp_avg_sqs: List[List[torch.Tensor]],  # noqa: UP006
    steps: List[torch.Tensor],  # noqa: UP006
    factor: torch.Tensor,
    half: torch.Tensor,
    wides: List[List[torch.Tensor]],  # noqa: UP006
    high_halves: List[List[torch.Tensor]],  # noqa: UP006
    low_halves: List[List[torch.Tensor]],  # noqa: UP006
    bits: List[List[torch.Tensor]],  # noqa: UP006
    high_bits: List[List[torch.Tensor]],  # noqa: UP006
    lr: float,
    beta1: float,
    beta2: float,
    weight_decay: float,
    eps: float,
) -> None:
    none: List[torch.Tensor] = []  # noqa: UP006
    scaled = factor.numel() > 0
    last = len(masters) - 1
    for index in range(last + 1):
        room = 1 if index == last else 0  # the working memory is cut for whole chunks and for the last
        if is_wide:
            wides[room][0].copy_(gradients[index][0])
        else:
            if scaled:
                low_halves[room][0].zero_()  # the chunk before has left its product there
            high_halves[room][0].copy_(gradients[index][0])
        if scaled:
            wides[room][0].mul_(factor)
        torch._fused_adamw_(  # pyright: ignore[reportPrivateImportUsage]
            masters[index], wides[room], exp_avgs[index], exp_avg_sqs[index], none, steps,
            lr=lr, beta1=beta1, beta2=beta2, weight_decay=weight_decay, eps=eps, amsgrad=False, maximize=False,
        )  # fmt: skip
        torch.add(master_bits[index][0], half, out=bits[room][0])
        weights[index][0].copy_(high_bits[room][0])


@cache
def compiled_loop() -> Callable[..., Any]:
    """The loop as TorchScript, or as it is where there is none."""
    with warnings.catch_warnings():
        warnings.simplefilter("ignore", DeprecationWarning)  # known: see above
        warnings.simplefilter("ignore", FutureWarning)
        try:
            return torch.jit.script(_loop)
        except Exception:  # whatever a later torch has against it: the function itself does the same
            return _loop


class MasterLoop:
    """Updates parameters with whole masters; keeps the memory that it works in. One thread at a time."""

    def __init__(self) -> None:
        # Made at the first use, and once: memory that is new at every step costs a page fault every 4 KiB.
        self._wide = torch.empty(0)
        self._bits = torch.empty(0, dtype=torch.int32)
        # A tensor: TorchScript's sum with a number is made in new memory, page fault by page fault, and copied to `out`.
        self._half = torch.tensor(0x8000, dtype=torch.int32)

    @torch.no_grad()
    def update(
        self, master: torch.Tensor, weight: torch.Tensor, gradient: torch.Tensor, exp_avg: torch.Tensor,
        exp_avg_sq: torch.Tensor, step: torch.Tensor, factor: torch.Tensor | None, *, lr: float, beta1: float, beta2: float,
        eps: float, weight_decay: float,
    ) -> None:  # fmt: skip
        """One AdamW step in place on ``master``, ``exp_avg`` and ``exp_avg_sq``; ``weight`` becomes the master, rounded with ties away.

        A bf16 is the high half of its fp32, so widening and rounding are strided copies of 16-bit halves: torch's own conversion from bf16
        runs on one thread.

        Args:
            master, exp_avg, exp_avg_sq: (n,) fp32, on the CPU as everything here.
            weight: (n,) bf16; ``gradient`` may be the same memory.
            gradient: (n,) bf16 or fp32.
            step: fp32 scalar, counted up.
            factor: fp32 scalar that gradients are multiplied by; None for 1.
        """
        if not self._wide.numel():
            self._wide, self._bits = torch.empty(CHUNK), torch.empty(CHUNK, dtype=torch.int32)
        is_wide = gradient.dtype == torch.float32
        halves, bit_halves = self._wide.view(torch.int16), self._bits.view(torch.int16)
        if not is_wide:
            halves[0::2].zero_()
        counts = (min(CHUNK, master.numel()), master.numel() - (master.numel() - 1) // CHUNK * CHUNK)
        compiled_loop()(
            _pieces(master), _pieces(master.view(torch.int32)), _pieces(weight.view(torch.int16)),
            _pieces(gradient if is_wide else gradient.view(torch.int16)), is_wide, _pieces(exp_avg), _pieces(exp_avg_sq), [step],
            torch.empty(0) if factor is None else factor, self._half, [[self._wide[:count]] for count in counts],
            [[halves[1 : 2 * count : 2]] for count in counts], [[halves[0 : 2 * count : 2]] for count in counts],
            [[self._bits[:count]] for count in counts], [[bit_halves[1 : 2 * count : 2]] for count in counts],
            lr, beta1, beta2, weight_decay, eps,
        )  # fmt: skip


def _pieces(tensor: torch.Tensor) -> Pieces:
    return [[piece] for piece in tensor.split(CHUNK)]
