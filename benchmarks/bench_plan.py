"""The planner against a brute force: what it chose, measured beside some thirty other placements of the same run under the same cap.

    python benchmarks/bench_plan.py                        # on a GPU: 0.44B decoder, 16k tokens a step, cap 4 GiB, at most 140 s
    python benchmarks/bench_plan.py --device cpu --shape tiny --seq 32 --cap 1MiB --placements 8     # the plumbing, with an arena

Every placement trains the same decoder from the same bytes: bf16 compute weights (fp32 without a GPU), AdamW, no clipping, updates without
a way back. They are drawn with a fixed seed from all that are predicted to fit, the plan's own among them, and from these with half the
weights on level 0; each runs a few steps unmeasured and a few measured, the median counts. The plan's goes first and last, and its
better half is not taken: both are in its median. One stack serves all, so that host memory is registered once. A run that is stopped
(SIGTERM) still prints the table of what it has.
"""

from __future__ import annotations

import argparse
import gc
import os
import random
import signal
import statistics
import sys
import time
from contextlib import suppress
from dataclasses import dataclass, replace
from pathlib import Path
from typing import Any

sys.path.insert(0, str(Path(__file__).resolve().parents[1]))
sys.path.insert(0, str(Path(__file__).resolve().parent))
if "PYTORCH_ALLOC_CONF" not in os.environ:
    os.environ["PYTORCH_ALLOC_CONF"] = "expandable_segments:True"  # as vb train does, before the first allocation

import torch
from offload_case import Shape
from offload_loop import Clock, Feed

from vblackwell import VGPUAdamW, create_vgpu_stack, enable_vgpu_stack_optimization, offload_of
from vblackwell.estimator import Run
from vblackwell.hardware import memory_facts
from vblackwell.nn.decoder import Decoder
from vblackwell.nn.decoder_config import DecoderConfig
from vblackwell.plan.placement import Bounds, Choice, Lacking, Plan, Prediction, Space
from vblackwell.plan.rates import Rates
from vblackwell.subject import of_decoder
from vblackwell.train.forecast import Forecast, Machine, plan_of
from vblackwell.train.rates import as_rates, cpu_rates, gpu_rates
from vblackwell.units import GiB, format_bytes, parse_bytes

SHAPES = {
    "tiny": Shape(64, 160, 6, 4, 512),
    "267M": Shape(1024, 2752, 16, 16),
    "0.44B": Shape(1536, 4096, 12, 12),
    "0.7B": Shape(2048, 5632, 11, 16),
}
WARM, MEASURED = 3, 4
FLOOR, AIM = 0.08, 0.03
UPDATES: tuple[str | float, ...] = ("level0", 0.1, 0.2, 0.3, 0.4, 0.5, "home")


@dataclass
class Row:
    """One placement: predicted and measured. ``error``: why it was not."""

    choice: Choice
    prediction: Prediction
    step_seconds: float | None = None
    reserved: int | None = None
    error: str = ""
    is_plan: bool = False


def parse(argv: list[str] | None = None) -> argparse.Namespace:
    parser = argparse.ArgumentParser(description=(__doc__ or "").splitlines()[0])
    parser.add_argument("--device", default="cuda")
    parser.add_argument("--shape", choices=tuple(SHAPES), default="0.44B")
    parser.add_argument("--seq", type=int, default=2048)
    parser.add_argument("--sequences", type=int, default=8, help="in a step")
    parser.add_argument("--cap", default="4GiB", help="of the GPU's allocator; without a GPU of the arena")
    parser.add_argument("--placements", type=int, default=30)
    parser.add_argument("--seed", type=int, default=0)
    parser.add_argument("--limit", type=float, default=140.0, help="seconds after which no further placement begins")
    return parser.parse_args(argv)


class Bench:
    """The machine, the model's bytes, and one stack."""

    def __init__(self, options: argparse.Namespace) -> None:
        self.options, self.began = options, time.perf_counter()
        self.device = torch.device("cuda", 0) if options.device == "cuda" else torch.device("cpu")
        self.cuda = self.device.type == "cuda"
        shape = SHAPES[options.shape]
        self.config = DecoderConfig(
            shape.vocab_size, shape.hidden_size, shape.intermediate_size, shape.num_layers, shape.num_heads, max_position=options.seq
        )  # fmt: skip
        self.dtype = torch.bfloat16 if self.cuda else None
        cap = parse_bytes(options.cap)
        self.rates: Rates = as_rates(gpu_rates(self.device)) if self.cuda else cpu_rates()
        if self.cuda:
            torch.cuda.empty_cache()
            total = torch.cuda.get_device_properties(self.device).total_memory
            torch.cuda.set_per_process_memory_fraction(min(1.0, cap / total), self.device)
        host = min(int(0.5 * memory_facts().available_bytes), 32 * GiB)
        self.machine = Machine(Bounds(cap, host), self.rates, self.cuda, undo=False, may_clip=False)
        self.stack = create_vgpu_stack(cap, host, 0, device=self.device)
        generator = torch.Generator().manual_seed(options.seed)
        self.noise = torch.empty(shape.vocab_size * shape.hidden_size).normal_(0, 0.02, generator=generator)
        tokens = torch.randint(0, shape.vocab_size, (1, options.sequences, options.seq), generator=generator)
        self.tokens = tokens.expand(WARM + MEASURED, -1, -1).contiguous()

    def run(self) -> Run:
        capability = torch.cuda.get_device_capability(self.device) if self.cuda else (8, 0)
        precision = "bf16" if self.cuda else "fp32"
        return Run(of_decoder("decoder", self.config), self.options.seq, precision=precision, capability=capability)

    def space(self) -> Space:
        count = self.options.sequences
        batches = ((count, 1), (count // 2, 2)) if count % 2 == 0 else ((count, 1),)
        checkpointing, activations = ((False, True), ("level0", "host")) if self.cuda else ((False,), ("level0",))
        return Space(batches, checkpointing, updates=UPDATES, activations=activations)

    def left(self) -> float:
        return self.options.limit - (time.perf_counter() - self.began)

    def measure(self, choice: Choice) -> tuple[float, int]:
        """Median seconds of a step, and bytes reserved at the peak (0 without a GPU: an arena counts from its start, not from here)."""
        level = self.stack.levels[0]
        level.capacity_bytes = (
            choice.level0_bytes // level.alignment * level.alignment
        )  # nothing is on it between two placements
        model: Any = Decoder(self.config, device="meta", dtype=torch.float32)
        model.gradient_checkpointing = choice.checkpointing
        placing: dict[str, Any] = {"placement": choice.placement}
        if choice.placement == "streamed":
            placing |= {
                "update": choice.update, "activations": choice.activations, "weight_bytes": choice.weight_bytes,
                "resident_bytes": choice.resident_bytes,
            }  # fmt: skip
        if self.cuda:
            torch.cuda.empty_cache()
            torch.cuda.reset_peak_memory_stats(self.device)
        enable_vgpu_stack_optimization(model, self.stack, compute_dtype=self.dtype, initialize=self._fill, **placing)
        engine = offload_of(model)
        assert engine is not None, "the model was just put into a stack"
        try:
            seconds = self._train(model, choice)
            engine.finish()
            return seconds, torch.cuda.max_memory_reserved(self.device) if self.cuda else 0
        finally:
            with suppress(Exception):  # of a step that was cut off; what went wrong is on its way already
                engine.finish()
            engine.close()  # or the stack refuses every placement that follows
            del model, engine
            gc.collect()

    def _fill(self, name: str, tensor: torch.Tensor) -> None:
        if tensor.dim() < 2:
            tensor.fill_(1.0)
        else:
            tensor.copy_(self.noise[: tensor.numel()].view(tensor.shape))

    def _train(self, model: Any, choice: Choice) -> float:
        count = choice.accumulation_steps
        optimizer = VGPUAdamW(
            model.parameters(), lr=1e-4, update_in_backward=True, undo=False, accumulation_steps=count
        )
        clock, model = Clock(self.device), model.train()
        clock.mark()
        for ids_BS in Feed(self.tokens, self.device):
            for part_BS in ids_BS.chunk(count):
                (model(part_BS, part_BS) / count).backward()
            optimizer.step()
            optimizer.zero_grad()
            clock.mark()
        engine = offload_of(model)
        assert engine is not None, "it is still in the stack"
        engine.finish()
        if self.cuda:
            torch.cuda.synchronize(self.device)
        return statistics.median(clock.intervals()[WARM:])


def placements(bench: Bench, forecast: Forecast, plan: Plan) -> list[Row]:
    """The plan's, and others that are predicted to fit, drawn at random; all with half of their weights too."""
    fitting: list[tuple[Choice, Prediction]] = []
    for choice in bench.space().choices():
        found = forecast.predict(choice)
        if isinstance(found, Lacking):
            continue
        fitting.append(found)
        if found[0].placement == "streamed":
            fitting += _with_half(found[0], forecast)
    fitting = [each for each in fitting if each[0] != plan.choice]
    random.Random(bench.options.seed).shuffle(fitting)
    rows = [Row(*each) for each in fitting[: bench.options.placements - 1]]
    return [Row(plan.choice, plan.prediction, is_plan=True), *rows, Row(plan.choice, plan.prediction, is_plan=True)]


def _with_half(choice: Choice, forecast: Forecast) -> list[tuple[Choice, Prediction]]:
    halved = replace(choice, weight_bytes=choice.weight_bytes // 2)
    found = forecast.predict(halved)
    return [] if isinstance(found, Lacking) else [found]


class Stopped(BaseException):
    """Somebody ended the run: what there is will be told."""


def _stop(number: int, frame: Any) -> None:
    signal.signal(signal.SIGTERM, signal.SIG_IGN)  # `timeout` sends it twice, and the table is still to come
    raise Stopped


def measure_all(bench: Bench, rows: list[Row]) -> None:
    """Fill ``rows`` in; the last, the plan's again, is always measured."""
    try:
        bench.measure(rows[0].choice)  # compiles kernels
    except Exception as error:  # the row says so when its turn comes
        print(f"warming up: {type(error).__name__}: {error}", flush=True)
    slowest = 0.0
    for number, row in enumerate(rows):
        is_last = number == len(rows) - 1
        if not is_last and bench.left() < 2 * slowest:
            row.error = "no time left"
            continue
        began = time.perf_counter()
        try:
            row.step_seconds, row.reserved = bench.measure(row.choice)
        except Exception as error:  # a placement that fails is a row
            row.error = f"{type(error).__name__}: {' '.join(str(error).split())[:160]}"
        slowest = max(slowest, time.perf_counter() - began)
        said = "" if row.step_seconds is None else f"{row.step_seconds:.4f} s"
        print(f"{number:3} {time.perf_counter() - began:5.1f} s  {said} {row.choice} {row.error}", flush=True)


def report(bench: Bench, rows: list[Row]) -> list[str]:
    """The table, fastest first, and the verdict."""
    lines = [f"{'':2}{'measured':>10}{'predicted':>11}{'off':>7}{'reserved':>10}{'P99':>10}  placement"]
    measured = [row for row in rows if row.step_seconds is not None]
    for row in sorted(measured, key=lambda each: each.step_seconds or 0.0):
        assert row.step_seconds is not None and row.reserved is not None
        off, over = row.prediction.step_seconds / row.step_seconds - 1, row.reserved > row.prediction.gpu_p99
        lines.append(
            f"{'*' if row.is_plan else '':2}{row.step_seconds:>9.4f}s{row.prediction.step_seconds:>10.4f}s{off:>+7.1%}"
            f"{row.reserved / GiB:>9.3f}G{row.prediction.gpu_p99 / GiB:>9.3f}G{' !' if over else '  '}{row.choice}"
            + (f", {format_bytes(row.choice.weight_bytes)} of weights" if row.choice.weight_bytes else "")
        )
    lines += [f"  failed: {row.choice}: {row.error}" for row in rows if row.error]
    own = [row.step_seconds for row in measured if row.is_plan and row.step_seconds]
    others = [row.step_seconds for row in measured if not row.is_plan and row.step_seconds]
    if not own or not others:
        return [*lines, "nothing to compare"]
    chosen, best = statistics.median(own), min(others + [statistics.median(own)])
    errors = sorted(abs(row.prediction.step_seconds / (row.step_seconds or 1.0) - 1) for row in measured)
    lines.append(
        f"predicted step time off by {statistics.median(errors):.1%} in the median, {errors[int(0.9 * (len(errors) - 1))]:.1%} at P90, of "
        f"{len(measured)}; more reserved than P99: {sum((row.reserved or 0) > row.prediction.gpu_p99 for row in measured)}"
    )
    verdict = (
        "aim met" if chosen <= best * (1 + AIM) else "floor met" if chosen <= best * (1 + FLOOR) else "FLOOR MISSED"
    )
    lines.append(
        f"the plan (*): {chosen:.4f} s a step, the best of {len(others) + 1} placements {best:.4f} s: {chosen / best - 1:+.1%} "
        f"(floor {FLOOR:.0%}, aim {AIM:.0%}): {verdict}"
    )
    return lines


def main(argv: list[str] | None = None) -> int:
    bench = Bench(parse(argv))
    forecast = Forecast(bench.run(), bench.machine)
    plan = plan_of(forecast.run, bench.space(), bench.machine, forecast)
    print("\n".join(plan.lines()), flush=True)
    rows = placements(bench, forecast, plan)
    print(
        f"planned in {time.perf_counter() - bench.began:.1f} s, rates included; {len(rows) - 1} placements", flush=True
    )
    signal.signal(signal.SIGTERM, _stop)
    try:
        measure_all(bench, rows)
    except (Stopped, KeyboardInterrupt):
        print("stopped: what follows is what there is", flush=True)
    signal.signal(signal.SIGTERM, signal.SIG_IGN)
    where = torch.cuda.get_device_name(bench.device) if bench.cuda else "CPU"
    words = (
        f"{bench.options.shape}, {bench.options.sequences} x {bench.options.seq} tokens a step, cap {bench.options.cap}"
    )
    print(f"\n{where}, torch {torch.__version__}, {words}, {time.perf_counter() - bench.began:.0f} s")
    print("\n".join(report(bench, rows)), flush=True)
    bench.stack.close()
    return 0


if __name__ == "__main__":
    sys.exit(main())
