"""One case for real, in a separate process: what torch counts, what the driver counts, and the real boundary.

The loop is the one that a trace runs: batch, forward and loss, backward, step, gradients set to None; two steps.
"""

from __future__ import annotations

import gc
import os
import statistics
import time
from collections.abc import Callable
from typing import Any

import torch

from benchmarks.lib.estimate.cases import Case
from benchmarks.lib.estimate.models import Built, build, materialise
from benchmarks.lib.offload.loop import Clock
from vblackwell.offload.measure import issue_seconds
from vblackwell.planner.memory_estimate import OPTIMIZERS
from vblackwell.units import GiB, MiB

TIMED_STEPS, WARM_STEPS = 7, 3
BOUNDARY_SHARE = 0.004  # to which the real boundary is searched, of what is reserved without a cap
BOUNDARY_SECONDS = 25.0  # of the whole search; then what is known of it has to do


def _use_segments(case: Case) -> None:
    """As the case says, whatever the environment does."""
    setting = f"expandable_segments:{case.expandable}"
    os.environ["PYTORCH_ALLOC_CONF"] = setting
    os.environ.pop("PYTORCH_CUDA_ALLOC_CONF", None)
    torch.cuda.memory._set_allocator_settings(setting)


def process_bytes() -> int | None:
    """GPU memory of this process as the driver counts it; None where it does not say."""
    try:
        import pynvml

        pynvml.nvmlInit()
        for index in range(pynvml.nvmlDeviceGetCount()):  # NVML knows no CUDA_VISIBLE_DEVICES
            for each in pynvml.nvmlDeviceGetComputeRunningProcesses(pynvml.nvmlDeviceGetHandleByIndex(index)):
                if each.pid == os.getpid() and each.usedGpuMemory:
                    return int(each.usedGpuMemory)
    except Exception:  # no such package, driver or permission: then nobody says
        return None
    return None


class Training:
    """A case that trains on ``device``, through torch alone or through a stack."""

    def __init__(self, case: Case, device: str) -> None:
        self.case, self.device = case, device
        built: Built = build(case)
        self.make, self.loss = built.batch(device), built.loss
        if case.stack:
            self._through_stack(case, built.model)
        else:
            self.model = materialise(built.model, device)
            self.optimizer: Any = OPTIMIZERS[case.optimizer](self.model.parameters())
            self.finish = lambda: None

    def _through_stack(self, case: Case, model: torch.nn.Module) -> None:
        from vblackwell import VGPUAdamW, create_vgpu_stack, enable_vgpu_stack_optimization, offload_of

        model = materialise(model.float(), "cpu")
        host = 16 * sum(p.numel() for p in model.parameters()) + 2 * GiB
        stack = create_vgpu_stack(case.level0_bytes, host, 0, device=self.device, cap_process=False)
        enable_vgpu_stack_optimization(
            model,
            stack,
            placement="streamed",
            compute_dtype=torch.bfloat16,
            update="device",
            activations="level0",
            accelerate=False,
        )
        self.model, self.optimizer = model, VGPUAdamW(model.parameters(), update_in_backward=True, undo=False)
        engine = offload_of(model)
        assert engine is not None, "the model was just put into a stack"
        self.finish = engine.finish

    def step(self) -> None:
        batch = self.make()
        kind = torch.device(self.device).type
        with torch.autocast(kind, torch.bfloat16, enabled=self.case.precision == "autocast"):
            loss = self.loss(self.model, batch)
        loss.backward()
        del loss
        self.optimizer.step()
        self.optimizer.zero_grad(set_to_none=True)

    def two_steps(self) -> None:
        self.step()
        self.step()
        self.finish()
        if self.device != "cpu":
            torch.cuda.synchronize()


def measure(values: dict[str, Any], device: str, timed: bool = False) -> dict[str, Any]:
    """Two steps; with ``timed`` the median of more.

    Returns:
        allocated, reserved (peaks), context (of the process by the driver, less reserved; None where it does not say),
        step_seconds, issue_seconds (what an operator took the host just then: explains a step, predicts none).
    """
    case = Case.from_dict(values)
    if device == "cpu":
        Training(case, device).two_steps()
        return {"allocated": None}
    _use_segments(case)
    torch.cuda.init()
    training = Training(case, device)
    training.two_steps()
    stats, used = torch.cuda.memory_stats(), process_bytes()
    found: dict[str, Any] = {
        "allocated": stats["allocated_bytes.all.peak"],
        "reserved": stats["reserved_bytes.all.peak"],
        "context": None if used is None else used - torch.cuda.memory_reserved(),
    }
    if timed:
        found["step_seconds"] = _time(training)
        found["issue_seconds"] = issue_seconds(torch.device(device))
    return found


def _give_back() -> int:
    """Return what a training that ended has reserved; bytes that something still holds."""
    gc.collect()
    torch._C._cuda_clearCublasWorkspaces()
    held = torch.cuda.memory_allocated()
    torch.cuda.empty_cache()
    return held


def _time(training: Training) -> float:
    for _ in range(WARM_STEPS):
        training.step()
    clock = Clock(torch.device(training.device))
    clock.mark()
    for _ in range(TIMED_STEPS):
        training.step()
        clock.mark()
    training.finish()
    return statistics.median(clock.intervals())


def boundary(values: dict[str, Any], device: str, claim: int, card: int = 0, expected: int = 0) -> dict[str, Any]:
    """The smallest limit on reserved bytes under which the case runs, by bisection in this process.

    Args:
        claim: reserved bytes that are said to be enough: tried as they are. card: likewise, of a whole card less its
            context.
        expected: where the boundary is predicted; both sides of it are tried first, which is most often the whole
            search.

    Returns:
        allocated, reserved (peaks without a limit), claim, claim_runs, card, card_runs, boundary (the least limit that
        ran), fails (the largest that did not), runs (how many trainings it took), left_over (bytes that a training
        kept).
    """
    case = Case.from_dict(values)
    if device == "cpu":
        Training(case, device).two_steps()
        return {"boundary": None}
    began = time.monotonic()
    _use_segments(case)
    torch.cuda.init()
    total = torch.cuda.get_device_properties(0).total_memory
    left_over = count = 0

    def runs(limit: int) -> bool:
        nonlocal left_over, count
        count += 1
        torch.cuda.set_per_process_memory_fraction(min(1.0, limit / total))
        try:
            Training(case, device).two_steps()
            return True
        except torch.OutOfMemoryError:
            return False
        finally:
            left_over = max(left_over, _give_back())

    torch.cuda.reset_peak_memory_stats()
    if not runs(total):
        return {"error": f"does not fit {total} bytes"}
    low, high = torch.cuda.max_memory_allocated() - MiB, torch.cuda.max_memory_reserved()
    found: dict[str, Any] = {"allocated": low + MiB, "reserved": high, "claim": claim, "claim_runs": runs(claim)}
    known = [(claim, found["claim_runs"])]
    if card:
        found |= {"card": card, "card_runs": runs(card)}
        known.append((card, found["card_runs"]))
    step = max(2 * MiB, int(high * BOUNDARY_SHARE))
    until = began + BOUNDARY_SECONDS
    low, high = search(runs, low, high, step, expected, known, lambda: time.monotonic() > until)
    return found | {"boundary": high, "fails": low, "runs": count, "left_over": left_over}


def search(
    runs: Callable[[int], bool],
    low: int,
    high: int,
    step: int,
    expected: int,
    known: list[tuple[int, bool]],
    is_late: Callable[[], bool],
) -> tuple[int, int]:
    """(fails, runs): limits at most ``step`` apart, of which the lower is known to be too small and the upper to be
    enough.

    Args:
        low, high: known so already. known: limits that were tried, and whether they were enough.
        expected: between them, tried first on both sides; elsewhere it is no help. is_late: stop where it is.
    """
    for limit, enough in known:
        if low < limit < high:
            low, high = (low, limit) if enough else (limit, high)
    guesses = [expected + step // 2, expected + step // 2 - step]
    while high - low > step and not is_late():
        guess = guesses.pop(0) if guesses else (low + high) // 2
        if low < guess < high:
            low, high = (low, guess) if runs(guess) else (guess, high)
    return low, high
