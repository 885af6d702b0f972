"""The planner against a brute force: what it chose, compared with some thirty other placements under the same cap.

    python benchmarks/bench_plan.py        # on a GPU: 1.56B decoder, 16k tokens a step, cap 8 GiB, at most 180 s
    python benchmarks/bench_plan.py --device cpu --shape tiny --seq 32 --cap 1MiB --placements 8     # with an arena

Every placement trains the same decoder from the same bytes: bf16 compute weights (fp32 without a GPU), AdamW, no
clipping, updates without a rollback. They are drawn with a seed from all that are predicted to fit (lib/plan.py); each
runs two steps unmeasured and a few measured, the median counts, and one that is far slower runs fewer. At the end the
plan's and the fastest others run again in turns, and these runs alone are compared: a lucky one does not keep its luck.
One stack serves all, so that host memory is registered once.

The shape is wide and has few layers, so that its time is the GPU's and the link's. A placement is left out, and the
table says so, where arithmetic (the GPU's operators alone, or the CPU's updates alone) shows it to be slower than what
was measured, where others with the same micro-batches all were, or where it is predicted to take twice as long as the
plan. A run that is stopped (SIGTERM) still prints the table of what it has. On a GPU every placement is a row of
`benchmarks/results/plan.csv`.
"""

from __future__ import annotations

import argparse
import gc
import math
import os
import sys
import time
from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager, suppress
from dataclasses import asdict, replace
from pathlib import Path
from typing import Any

sys.path.insert(0, str(Path(__file__).resolve().parents[1]))

import torch

from benchmarks.lib.child_process import Stopped, until_stopped
from benchmarks.lib.offload.case import Shape
from benchmarks.lib.offload.loop import Clock, Feed
from benchmarks.lib.plan import NEVER, Measured, Row, draw, min_seconds, report, space_of, why_left_out
from benchmarks.lib.results import RESULTS, append_csv, machine
from vblackwell import VGPUAdamW, create_vgpu_stack, enable_vgpu_stack_optimization, offload_of
from vblackwell.machine.device import cap_process, use_expandable_segments
from vblackwell.machine.facts import memory_facts
from vblackwell.machine.rates import Rates
from vblackwell.nn.decoder.decoder import Decoder
from vblackwell.offload.measure import as_rates, cpu_rates, gpu_rates
from vblackwell.planner.forecast import Forecast, Machine
from vblackwell.planner.memory_estimate import Run
from vblackwell.planner.model_spec import of_decoder
from vblackwell.planner.placement import Bounds, Choice, Space
from vblackwell.units import GiB, parse_bytes

SHAPES = {
    "tiny": Shape(64, 160, 6, 4, 512),
    "0.44B": Shape(1536, 4096, 12, 12),
    "1.56B": Shape(3072, 8192, 12, 24),
}
WARM, MEASURED, FINAL = 2, 4, 6  # steps that do not count, those that do, and those of the last rounds
MIN_STEPS = 2  # of a placement that is slower than SLOWER times the best
SLOWER = 1.3
ROUNDS, FINALISTS = 2, 2  # at the end: of the plan's and the fastest others
MAX_HOST = 48 * GiB


def parse(argv: list[str] | None = None) -> argparse.Namespace:
    parser = argparse.ArgumentParser(description=(__doc__ or "").splitlines()[0])
    add = parser.add_argument
    add("--device", default="cuda")
    add("--shape", choices=tuple(SHAPES), default="1.56B")
    add("--seq", type=int, default=2048)
    add("--sequences", type=int, default=8, help="in a step")
    add("--cap", default="8GiB", help="of the GPU's allocator; without a GPU of the arena")
    add("--placements", type=int, default=30)
    add("--seed", type=int, default=0)
    add("--limit", type=float, default=180.0, help="seconds for all but the report")
    return parser.parse_args(argv)


class Bench:
    """The machine, the model's bytes, and one stack."""

    def __init__(self, options: argparse.Namespace) -> None:
        self.options, self.began = options, time.perf_counter()
        self.device = torch.device("cuda", 0) if options.device == "cuda" else torch.device("cpu")
        self.cuda = self.device.type == "cuda"
        shape = SHAPES[options.shape]
        self.config = shape.decoder_config(options.seq)
        self.dtype = torch.bfloat16 if self.cuda else None
        cap = parse_bytes(options.cap)
        if self.cuda:
            use_expandable_segments()
        self.rates: Rates = as_rates(gpu_rates(self.device)) if self.cuda else cpu_rates()
        if self.cuda:
            torch.cuda.empty_cache()
            cap_process(self.device, cap)
        host = min(int(0.5 * memory_facts().available_bytes), MAX_HOST)
        self.machine = Machine(Bounds(cap, host), self.rates, self.cuda, may_clip=False)
        self.stack = create_vgpu_stack(cap, host, 0, device=self.device)
        generator = torch.Generator().manual_seed(options.seed)
        self.noise = torch.empty(shape.vocab_size * shape.hidden_size).normal_(0, 0.02, generator=generator)
        tokens = torch.randint(0, shape.vocab_size, (1, options.sequences, options.seq), generator=generator)
        self.tokens = tokens.expand(WARM + FINAL, -1, -1).contiguous()

    def run(self) -> Run:
        capability = torch.cuda.get_device_capability(self.device) if self.cuda else (8, 0)
        precision = "bf16" if self.cuda else "fp32"
        return Run(of_decoder("decoder", self.config), self.options.seq, precision=precision, capability=capability)

    def space(self) -> Space:
        return space_of(self.options.sequences, self.cuda)

    def left(self) -> float:
        return self.options.limit - (time.perf_counter() - self.began)

    def measure(self, choice: Choice, best: float = math.inf, steps: int = MEASURED) -> Measured:
        """What came of ``steps`` steps of ``choice``; of fewer where it is far slower than ``best`` seconds a step."""
        began = time.perf_counter()
        with self.placed(choice) as model:
            set_up = time.perf_counter() - began
            seconds = self._train(model, choice, best, steps)
            # 0 without a GPU: an arena counts from its start, not from here.
            reserved = torch.cuda.max_memory_reserved(self.device) if self.cuda else 0
            return Measured(seconds, reserved, set_up)

    @contextmanager
    def placed(self, choice: Choice) -> Iterator[Any]:
        """A fresh model in the stack, as ``choice`` says."""
        level = self.stack.levels[0]
        # Nothing is on it between two placements.
        level.capacity_bytes = choice.level0_bytes // level.alignment * level.alignment
        # In the type that kernels read: its truth is that and a remainder of nothing, which is filled in a third of the
        # time.
        model: Any = Decoder(self.config, device="meta", dtype=self.dtype or torch.float32)
        model.gradient_checkpointing = choice.checkpointing
        placing: dict[str, Any] = {"placement": choice.placement}
        if choice.placement == "streamed":
            placing |= {
                "update": choice.update,
                "activations": choice.activations,
                "weight_bytes": choice.weight_bytes,
                "resident_bytes": choice.resident_bytes,
            }
        # What the last placement's model and engine hold of each other goes now: they were still in use where that
        # ended.
        gc.collect()
        if self.cuda:
            torch.cuda.synchronize(self.device)
            torch.cuda.empty_cache()
            torch.cuda.reset_peak_memory_stats(self.device)
        enable_vgpu_stack_optimization(model, self.stack, compute_dtype=self.dtype, initialize=self._fill, **placing)
        engine = offload_of(model)
        assert engine is not None, "the model was just put into a stack"
        may_close = True
        try:
            yield model.train()
            engine.finish()
        except (Stopped, KeyboardInterrupt):
            may_close = False  # it is somewhere in a step, and no placement follows
            raise
        except BaseException:
            with suppress(Exception):  # of a step that was cut off; what went wrong is on its way already
                engine.finish()
            raise
        finally:
            if may_close:
                engine.close()  # or the stack refuses every placement that follows
        del model, engine
        gc.collect()

    def _fill(self, name: str, tensor: torch.Tensor) -> None:
        if tensor.dim() < 2:
            tensor.fill_(1.0)
        else:
            tensor.copy_(self.noise[: tensor.numel()].view(tensor.shape))

    def _train(self, model: Any, choice: Choice, best: float, steps: int) -> list[float]:
        """Seconds of each measured step."""
        step, clock = self.step_of(model, choice), Clock(self.device)
        clock.mark()
        for number, ids_BS in enumerate(Feed(self.tokens[: WARM + steps], self.device)):
            step(ids_BS)
            clock.mark()
            # The step before the last has ended, or soon will, so that asking does not empty the queues.
            if number + 1 - WARM >= MIN_STEPS and clock.interval(number - 1) > SLOWER * best:
                break
        offload_of(model).finish()  # pyright: ignore[reportOptionalMemberAccess]
        if self.cuda:
            torch.cuda.synchronize(self.device)
        return clock.intervals()[WARM:]

    def step_of(self, model: Any, choice: Choice) -> Callable[[torch.Tensor], None]:
        """One step of ``model`` on tokens (B, S)."""
        count = choice.accumulation_steps
        optimizer = VGPUAdamW(model.parameters(), lr=1e-4, update_in_backward=True, accumulation_steps=count)

        def step(ids_BS: torch.Tensor) -> None:
            for part_BS in ids_BS.chunk(count):
                (model(part_BS, part_BS) / count).backward()
            optimizer.step()
            optimizer.zero_grad()

        return step


def measure_all(bench: Bench, rows: list[Row], least: Callable[[Choice], float] = lambda choice: 0.0) -> None:
    """Fill ``rows`` in. ``least``: seconds a step that a choice takes at least."""
    warm_up(bench, rows)
    slowest, best, trust = 0.0, math.inf, 1.0
    for number, row in enumerate(rows):
        row.error = why_left_out(row, rows, trust * least(row.choice), best)
        if not row.error and bench.left() < slowest + last_rounds_seconds(rows):
            row.error = "no time left"
        if row.error:
            continue
        began = time.perf_counter()
        try:
            found = bench.measure(row.choice, best)
            row.step_seconds, row.reserved, row.setup_seconds = found.step_seconds, found.reserved, found.setup_seconds
            best = min(best, found.step_seconds)
            trust = min(trust, found.step_seconds / max(least(row.choice), NEVER))  # it was faster than arithmetic says
        except Exception as error:  # a placement that fails is a row
            row.error = f"{type(error).__name__}: {' '.join(str(error).split())[:160]}"
        took = time.perf_counter() - began
        slowest = max(slowest, took)
        said = (
            "" if row.step_seconds is None else f"{row.step_seconds:.4f} s, predicted {row.prediction.step_seconds:.4f}"
        )
        print(f"{number:3} {took:5.1f} s  {said} {row.choice} {row.error}", flush=True)
    measure_again(bench, rows)


def warm_up(bench: Bench, rows: list[Row]) -> None:
    """One placement of each number of micro-batches: compiles kernels for its shapes, and takes the host memory that
    others need.
    """
    wanted = [row for row in rows if not why_left_out(row, rows, 0.0, math.inf)]
    for row in {
        row.choice.accumulation_steps: row for row in sorted(wanted, key=lambda row: row.prediction.host)
    }.values():
        began = time.perf_counter()
        try:
            bench.measure(row.choice, steps=1)
        except Exception as error:  # the row says so when its turn comes
            print(f"warming up: {type(error).__name__}: {error}", flush=True)
        print(f"warm-up {time.perf_counter() - began:.1f} s  {row.choice}", flush=True)


def finalists(rows: Sequence[Row]) -> list[Row]:
    """The plan's row and the fastest others; nothing where there is none of either."""
    measured = [row for row in rows if row.step_seconds is not None]
    others = sorted((row for row in measured if not row.is_plan), key=lambda row: row.step_seconds or 0.0)
    plan = [row for row in measured if row.is_plan]
    return [*plan, *others[:FINALISTS]] if plan and others else []


def last_rounds_seconds(rows: Sequence[Row]) -> float:
    """What `measure_again` will take, by what was measured so far."""
    found = finalists(rows)
    if not found:
        return 0.0
    each = max(row.setup_seconds + (WARM + FINAL + 1) * (row.step_seconds or 0.0) for row in found)
    return ROUNDS * (1 + FINALISTS) * each


def measure_again(bench: Bench, rows: list[Row]) -> None:
    """The plan's and the fastest others in turns, there and back, so that all are measured as often and under the same
    conditions.
    """
    found = finalists(rows)
    if not found:
        return
    for number in range(ROUNDS):
        for row in found[:: -1 if number % 2 else 1]:
            took = bench.measure(row.choice, steps=FINAL)
            row.again += took.seconds
            print(f"again     {took.step_seconds:.4f} s {row.choice}", flush=True)


def main(argv: list[str] | None = None) -> int:
    bench = Bench(parse(argv))
    forecast = Forecast(bench.run(), bench.machine)
    plan = forecast.plan(replace(bench.space(), updates=("auto",)))
    print("\n".join(plan.lines()), flush=True)
    rows = draw(bench.space(), forecast, plan, bench.options.placements, bench.options.seed)
    print(f"rates: {asdict(bench.rates)}")
    print(f"planned in {time.perf_counter() - bench.began:.1f} s, rates included; {len(rows)} placements", flush=True)
    stopped = True
    gc.collect()
    gc.freeze()  # a million objects of traces and libraries, which no trainer has
    with until_stopped():
        measure_all(bench, rows, lambda choice: min_seconds(forecast, choice))
        stopped = False
    where = torch.cuda.get_device_name(bench.device) if bench.cuda else "CPU"
    asked = bench.options
    words = f"{asked.shape}, {asked.sequences} x {asked.seq} tokens a step, cap {asked.cap}"
    print(f"\n{where}, torch {torch.__version__}, {words}, {time.perf_counter() - bench.began:.0f} s")
    print("\n".join(report(rows)), flush=True)
    if bench.cuda:
        append_csv(RESULTS / "plan.csv", [{**machine(), **row.record()} for row in rows])
    if stopped:
        os._exit(0)  # threads of a step that was cut off may wait for each other
    bench.stack.close()
    return 0


if __name__ == "__main__":
    sys.exit(main())
