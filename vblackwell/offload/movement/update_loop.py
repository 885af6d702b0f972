"""AdamW with a bf16 compute weight and a whole fp32 master on the CPU: many threads, each chunk by chunk in its own
cache.

A chunk takes three or four torch calls. From Python each of them takes the interpreter's lock back in turn with the
thread that launches the model's kernels, 0.2 ms a time on a busy machine, so TorchScript runs the loop over chunks with
the lock released. (It is deprecated: where it is gone, the same function runs as Python, slower, with the same bits.)
torch's own threads would meet after every call, and wait there for whichever of them shares its core with a busy thread
of the model; here every thread has its own chunks, and takes the next when it is done (docs/journal/offload.md).
"""

from __future__ import annotations

import os
import threading
import warnings
from collections import deque
from collections.abc import Callable
from concurrent.futures import Future, ThreadPoolExecutor, wait
from functools import cache
from typing import Any, List  # noqa: UP035 (TorchScript)

import torch

# Elements. A multiple of 16, or torch's vectorised AdamW rounds differently; what one operation wrote is in cache for
# the next: 1.4 MiB.
CHUNK = 1 << 16
# A thread takes so many elements at once that taking, which needs the interpreter's lock, does not show; and each gets
# about so many turns, so that one whose core was wanted elsewhere does less.
MIN_PART, TURNS = 1 << 20, 2
OTHER_THREADS = 3  # that are busy while updates run: two that launch the model's kernels, one that hands out updates


# TorchScript reads the annotations below, so this is written in what it understands. The lists of one come from
# outside: of a list that is made in here it would not see that AdamW writes to what is in it, and drop the call as
# dead.
def _loop(
    masters: List[torch.Tensor],  # noqa: UP006
    master_bits: List[torch.Tensor],  # noqa: UP006
    weight_bits: List[torch.Tensor],  # noqa: UP006
    gradients: List[torch.Tensor],  # noqa: UP006
    exp_avgs: List[torch.Tensor],  # noqa: UP006
    exp_avg_sqs: List[torch.Tensor],  # noqa: UP006
    factors: List[torch.Tensor],  # noqa: UP006
    steps: List[torch.Tensor],  # noqa: UP006
    numbers: List[List[float]],  # noqa: UP006
    half: torch.Tensor,
    wide: torch.Tensor,
    bits: torch.Tensor,
    high_bits: torch.Tensor,
    master: List[torch.Tensor],  # noqa: UP006
    gradient: List[torch.Tensor],  # noqa: UP006
    exp_avg: List[torch.Tensor],  # noqa: UP006
    exp_avg_sq: List[torch.Tensor],  # noqa: UP006
    step: List[torch.Tensor],  # noqa: UP006
) -> None:
    none: List[torch.Tensor] = []  # noqa: UP006
    for index in range(len(masters)):
        total, most = masters[index].numel(), wide.numel()
        scaled = factors[index].numel() > 0
        lr, beta1, beta2, weight_decay, eps = numbers[index]
        step[0] = steps[index]
        for start in range(0, total, most):
            count = min(most, total - start)
            master[0] = masters[index].narrow(0, start, count)
            gradient[0] = wide.narrow(0, 0, count)
            gradient[0].copy_(gradients[index].narrow(0, start, count))
            if scaled:
                gradient[0].mul_(factors[index])
            exp_avg[0] = exp_avgs[index].narrow(0, start, count)
            exp_avg_sq[0] = exp_avg_sqs[index].narrow(0, start, count)
            torch._fused_adamw_(  # pyright: ignore[reportPrivateImportUsage]
                master, gradient, exp_avg, exp_avg_sq, none, step,
                lr=lr, beta1=beta1, beta2=beta2, weight_decay=weight_decay, eps=eps, amsgrad=False, maximize=False,
            )  # fmt: skip
            # The gradient has been read: its memory takes the sum. A tensor and not a number is added, because
            # TorchScript's sum with a number is made in new memory, page fault by page fault, and then copied.
            torch.add(master_bits[index].narrow(0, start, count), half, out=bits.narrow(0, 0, count))
            weight_bits[index].narrow(0, start, count).copy_(high_bits.narrow(0, 0, count))
            wrong = master[0].isnan()
            if bool(
                wrong.any()
            ):  # a full low half has wrapped to a zero; a payload in the low half alone gives an infinity
                weight_bits[index].narrow(0, start, count).masked_fill_(wrong, 0x7FC0)


@cache
def compiled_loop() -> Callable[..., Any]:
    """The loop as TorchScript, or as it is, with a warning, where there is none."""
    return compiled(_loop, "update")


def compiled(loop: Callable[..., Any], what: str) -> Callable[..., Any]:
    """``loop`` as TorchScript, or as it is, with a warning, where there is none."""
    try:
        with warnings.catch_warnings():
            warnings.simplefilter("ignore", DeprecationWarning)  # known: see above
            warnings.simplefilter("ignore", FutureWarning)
            return torch.jit.script(loop)
    except Exception as error:  # whatever a later torch has against it: the function itself does the same
        said = " ".join(str(error).split())[:200]
        warnings.warn(
            f"this torch does not compile the CPU's {what} ({type(error).__name__}: {said}): its threads will wait for "
            "each other",
            RuntimeWarning,
            stacklevel=3,
        )
        return loop


_one_at_a_time = threading.Lock()


def _compute_alone() -> None:
    """Let this thread run torch's operations without torch's other threads, and unseen by a profiler."""
    with _one_at_a_time:  # two together would take each other's 1 for the number of the process, and leave it at that
        count = torch.get_num_threads()  # asked first: a thread's first question sets the number to that of the process
        torch.set_num_threads(1)
        # That was also the number for threads to come, which another thread can put right without touching this one's.
        other = threading.Thread(target=torch.set_num_threads, args=(count,))
        other.start()
        other.join()
    # It would note every operation on every chunk, which takes as long as the operation, and stops the other threads
    # meanwhile.
    torch.autograd._enable_record_function(False)  # pyright: ignore[reportPrivateImportUsage]


def num_threads() -> int:
    """How many threads update: torch's number, but leave cores to the threads that are busy at the same time."""
    cores = len(os.sched_getaffinity(0)) if hasattr(os, "sched_getaffinity") else os.cpu_count() or 1
    return max(1, min(torch.get_num_threads(), max(2, cores - OTHER_THREADS)))


def update_threads() -> int:
    """How many threads update in this process: `num_threads` when the first update or question was."""
    return _pool()[1]


@cache
def _pool() -> tuple[ThreadPoolExecutor, int]:
    """The threads of the process, made at the first update, and their number."""
    count = num_threads()
    return ThreadPoolExecutor(count, "vblackwell-update", initializer=_compute_alone), count


if hasattr(os, "register_at_fork"):  # a child has the pool's tasks and none of its threads: it would wait for ever
    os.register_at_fork(after_in_child=_pool.cache_clear)


class Scratch(threading.local):
    """What a thread works in. Made once: memory that is new at every step costs a page fault every 4 KiB."""

    def __init__(self) -> None:
        self.wide = torch.empty(CHUNK)
        self.bits = self.wide.view(torch.int32)
        self.high_bits = self.wide.view(torch.int16)[1::2]  # the upper halves, on a little-endian machine
        self.half = torch.tensor(0x8000, dtype=torch.int32)
        self.boxes: list[list[torch.Tensor]] = [[self.wide] for _ in range(5)]


# A stretch of one parameter: tensors that are cut alike (master, its bits, the weight's bits, gradient, exp_avg,
# exp_avg_sq); factor, step, numbers.
Stretch = tuple[list[torch.Tensor], torch.Tensor, torch.Tensor, list[float]]


@torch.no_grad()
def _update(stretches: list[Stretch], own: Scratch) -> None:
    tensors, factors, steps, numbers = map(list, zip(*stretches, strict=True))
    columns = map(list, zip(*tensors, strict=True))
    compiled_loop()(*columns, factors, steps, numbers, own.half, own.wide, own.bits, own.high_bits, *own.boxes)


class MasterLoop:
    """Updates parameters with whole masters. For one thread, in which `run` returns when all is done."""

    def __init__(self) -> None:
        self._added: list[Stretch] = []
        self._scratch = Scratch()

    def add(
        self, master: torch.Tensor, weight: torch.Tensor, gradient: torch.Tensor, exp_avg: torch.Tensor,
        exp_avg_sq: torch.Tensor, step: torch.Tensor, factor: torch.Tensor | None, *, lr: float, beta1: float,
        beta2: float, eps: float, weight_decay: float,
    ) -> None:  # fmt: skip
        """One AdamW step in place on ``master``, ``exp_avg`` and ``exp_avg_sq``; ``weight`` becomes the master, rounded
        with ties away.

        A bf16 is the high half of its fp32, so rounding is a sum of integers and a strided copy of the 16-bit halves. A
        NaN stays one.

        Args:
            master, exp_avg, exp_avg_sq: (n,) fp32, on the CPU as everything here.
            weight: (n,) bf16; ``gradient`` may be the same memory.
            gradient: (n,) bf16 or fp32.
            step: fp32 scalar, counted up.
            factor: fp32 scalar that gradients are multiplied by; None for 1.
        """
        tensors = [master, master.view(torch.int32), weight.view(torch.int16), gradient, exp_avg, exp_avg_sq]
        none = torch.empty(0)
        self._added.append((tensors, none if factor is None else factor, step, [lr, beta1, beta2, weight_decay, eps]))

    def run(self) -> None:
        """Do what was added.

        Raises:
            BaseException: what an operation raised, or an interrupt, when no thread is at work any more; some
                parameters are then updated and others not.
        """
        try:
            compiled_loop()  # once, before threads ask for it together
            run_parts(self._added, lambda part: _update(part, self._scratch))
        finally:
            self._added.clear()


def run_parts(stretches: list[Stretch], work: Callable[[list[Stretch]], None]) -> None:
    """Do ``work`` on all of ``stretches``, in parts, by the threads of the process; each takes the next when it is
    done.

    Raises:
        BaseException: what ``work`` raised, or an interrupt, when no thread is at work any more; some parts are then
            done and others not.
    """
    total = sum(tensors[0].numel() for tensors, *_ in stretches)
    if total == 0:
        return
    pool, count = _pool()
    parts = deque(_share_out(stretches, max(MIN_PART, -(-total // (TURNS * count)))))

    def take_all() -> None:
        while True:
            try:
                part = parts.popleft()
            except IndexError:
                return
            work(part)

    tasks: list[Future[None]] = []
    try:
        for _ in range(min(count, len(parts))):
            tasks.append(pool.submit(take_all))
        errors = [error for task in tasks if (error := task.exception()) is not None]
        if errors:
            raise errors[0]
    finally:
        parts.clear()
        wait(tasks)


def _share_out(stretches: list[Stretch], wanted: int) -> list[list[Stretch]]:
    """``stretches`` in parts of about ``wanted`` elements, cut only where a whole chunk ends."""
    parts: list[list[Stretch]] = [[]]
    room = wanted
    for tensors, factor, step, numbers in stretches:
        total, start = len(tensors[0]), 0
        while start < total:
            stop = min(start + -(-room // CHUNK) * CHUNK, total)
            cut = tensors if stop - start == total else [tensor[start:stop] for tensor in tensors]
            parts[-1].append((cut, factor, step, numbers))
            room -= stop - start
            start = stop
            if room <= 0:
                parts.append([])
                room = wanted
    return [part for part in parts if part]


def _sum_loop(
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
    return compiled(_sum_loop, "sums of gradients")


class SumLoop:
    """Adds gradients up. For one thread, in which `run` returns when all is done."""

    def __init__(self) -> None:
        self._added: list[Stretch] = []
        self._scratch = Scratch()
        self._none = torch.empty(0)

    def add(self, total: torch.Tensor, first: torch.Tensor | None, addend: torch.Tensor | None) -> None:
        """``total`` becomes ``first`` plus ``addend``; without ``first`` it is added to, without ``addend`` it is a
        copy.

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
            with torch.profiler.record_function("sum on the host"):  # its threads are not in the trace
                run_parts(self._added, self._sum)
        finally:
            self._added.clear()

    @torch.no_grad()
    def _sum(self, part: list[Stretch]) -> None:
        compiled_sums()(*map(list, zip(*(tensors for tensors, *_ in part), strict=True)), self._scratch.wide)
