"""What training with weights in two parts adds to a step, and where: the host's time, kernels, and those that round.

Few tokens are the host's time: what a step takes is then how long Python needs to queue it, and every launch counts. So besides the
medians of both models' steps, taken in turns, one step of each is taken apart: until everything is queued, what the GPU was busy for, in
how many launches, and how much of that rounds weights. Means are of rounds that hold one look at the drift of every weight, as a tenth of
all steps do.
"""

from __future__ import annotations

import copy
import statistics
import time
from collections.abc import Callable

import torch
from torch import Tensor, nn

from benchmarks.lib.managed_model import managed
from vblackwell.nn.convert.optimize import enable_vb_optimization
from vblackwell.nn.decoder.decoder import Decoder
from vblackwell.nn.decoder.presets import find_preset
from vblackwell.nn.linear.two_part import DRIFT_EVERY

Row = tuple[str, str, str, bool]


def overhead_rows(append: Callable[[Row], None], preset: str, batches: list[int], length: int, rounds: int) -> None:
    """Median step of both models, resident, bf16 weights with fp32 masters; steps taken in turns."""
    shape = find_preset(preset).decoder_config(4096, length)
    models: dict[str, nn.Module] = {"plain": Decoder(shape, seed=0, device="cpu")}
    models["two-part"] = enable_vb_optimization(copy.deepcopy(models["plain"]), mode="training")
    runs = {name: managed(model, "cuda", 1e-4) for name, model in models.items()}

    def step(name: str, tokens: Tensor) -> tuple[float, float]:
        """Seconds until the step was queued, and until it was done."""
        model, optimizer, _ = runs[name]
        torch.cuda.synchronize()
        began = time.perf_counter()
        model(tokens[:, :-1], tokens[:, 1:]).backward()
        optimizer.step()
        optimizer.zero_grad()
        queued = time.perf_counter() - began
        torch.cuda.synchronize()
        return queued, time.perf_counter() - began

    for batch in batches:
        tokens = torch.randint(0, 4096, (batch, length + 1), device="cuda")
        taken: dict[str, list[tuple[float, float]]] = {name: [] for name in models}
        for number in range(rounds + 3):
            for name in runs if number % 2 else reversed(runs):  # neither is always the one that comes second
                pair = step(name, tokens)
                if number >= 3:
                    taken[name].append(pair)
        (queued, plain), (ours_queued, ours) = (
            (statistics.median(pair[0] for pair in taken[name]), statistics.median(pair[1] for pair in taken[name]))
            for name in ("plain", "two-part")
        )
        text = f"{100 * (ours / plain - 1):+.2f} % ({1000 * ours:.1f} ms beside {1000 * plain:.1f})"
        append((f"a step of {preset}, {batch * length} tokens", text, "+5 %", ours <= 1.05 * plain))
        means = [statistics.fmean(pair[1] for pair in taken[name][-DRIFT_EVERY:]) for name in ("plain", "two-part")]
        print(
            f"  queued after {1000 * ours_queued:.1f} ms beside {1000 * queued:.1f}; mean of the last {DRIFT_EVERY} steps "
            f"{1000 * means[1]:.1f} beside {1000 * means[0]:.1f} ({100 * (means[1] / means[0] - 1):+.2f} %)"
        )
    for name in runs:
        print(f"  {name}: {gpu_time(lambda name=name: step(name, tokens))}", flush=True)


def gpu_time(step: Callable[[], object]) -> str:
    """What the GPU did in ``step``, by the profiler, in words."""
    with torch.profiler.profile(activities=[torch.profiler.ProfilerActivity.CUDA]) as profile:
        step()
    kernels = [event for event in profile.events() if event.device_type == torch.autograd.DeviceType.CUDA]
    rounding = [event for event in kernels if "two_part_round" in event.name]
    busy, rounds = (sum(event.time_range.elapsed_us() for event in each) / 1000 for each in (kernels, rounding))
    return (
        f"the GPU is busy for {busy:.1f} ms in {len(kernels)} kernels and copies at the last size; "
        f"{rounds:.2f} ms of it in {len(rounding)} that round weights"
    )
