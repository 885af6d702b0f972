"""What fewer bits cost in validation loss: a preset trained on the default corpus, then its linears at other precisions.

``python benchmarks/bench_precision.py`` trains `tiny` for 300 steps on a CPU; on a GPU
``--device cuda --preset small --steps 1500 --batch-size 32 --seq-length 512``. Two runs from one seed over the same batches, bf16
weights with fp32 masters: plain, and with ``enable_vb_optimization(mode='training')`` up to ``--compare-steps``; then the plain run goes
on to ``--steps``. Its linears (head and embedding kept) are packed as coarse + fine, coarse alone, int8 by rows, and the held-out loss is
taken again, weights as they are packed, everything else rounded to bf16 once, products in fp32: the difference is the formats' alone.
Last, each linear gets a precision of its own, at most ``--max-bits`` a weight on average, by sensitivities measured on training windows;
with ``--fastest`` also the one by which a token's products take the least time.
``--save FILE`` keeps the trained weights, ``--load FILE`` begins from them. ``--limit SECONDS`` lowers the steps to what trains in that
time, by the speed of a few dozen that are thrown away. Lines are printed as they come; exit code 1 where a floor is missed.
"""

from __future__ import annotations

import argparse
import copy
import functools
import itertools
import math
import platform
import statistics
import sys
import time
from collections.abc import Iterator
from pathlib import Path

sys.path.insert(0, str(Path(__file__).resolve().parents[1]))

import torch
from torch import Tensor, nn

from benchmarks.lib.managed_model import managed
from vblackwell.data.corpus import prepare_data
from vblackwell.data.dataset import BatchStream, Corpus, PackedDataset, evaluation_batches
from vblackwell.nn.convert.assignment import BITS, assign_precision, weights_in
from vblackwell.nn.convert.linears import select_linears
from vblackwell.nn.convert.optimize import enable_vb_optimization
from vblackwell.nn.decoder.decoder import Decoder
from vblackwell.nn.decoder.presets import find_preset
from vblackwell.nn.linear.packed_weight import pack
from vblackwell.nn.linear.times import LinearTimes
from vblackwell.numerics.sqnr import decibels, noise_and_signal
from vblackwell.offload.api import release
from vblackwell.train.schedule import Schedule, default_warmup_steps
from vblackwell.train.sources import RECIPES

FLOORS = {"two-part": 0.0005, "nvfp4": 0.01, "int8": math.inf}  # relative rise of the validation loss
NAMES = {"two-part": "coarse + fine", "nvfp4": "coarse only", "int8": "int8 by rows"}
TRAINING_FLOOR = 0.005
ASSIGNED_FLOOR = 0.004
COMPUTE = {"cpu": "float32", "cuda": "bfloat16"}  # bf16 products take a CPU without instructions for them seconds
WINDOW = 50  # steps that a training loss is averaged over


def steps_of(model: nn.Module, corpus: Corpus, args: argparse.Namespace) -> Iterator[Tensor]:
    """Trains one step at a time; yields the loss of each, which nobody waits for. The model is in fp32 again when it ends or is closed."""
    recipe = RECIPES[args.preset]
    schedule = Schedule(
        args.learning_rate or recipe["learning_rate"], 1e-4, default_warmup_steps(args.steps), args.steps
    )
    model, optimizer, stack = managed(model, args.device, schedule.peak, getattr(torch, COMPUTE[args.device]))
    stream = BatchStream(PackedDataset(corpus, args.seq_length, "train", args.seed), args.batch_size)
    try:
        for step in range(args.steps):
            for group in optimizer.param_groups:
                group["lr"] = schedule.learning_rate(step)
            inputs, targets = (tensor.to(args.device) for tensor in stream.next())
            loss = model(inputs, targets)
            loss.backward()
            optimizer.step()
            optimizer.zero_grad()
            yield loss.detach()
    finally:
        release(model, args.device)
        stack.close()


@torch.no_grad()
def validation_loss(model: nn.Module, dataset: PackedDataset, sequences: int, device: str) -> float:
    total, count = 0.0, 0
    for inputs, targets in evaluation_batches(dataset, 8, max(1, sequences // 8)):
        total += float(model(inputs.to(device), targets.to(device)).double()) * len(inputs)
        count += len(inputs)
    return total / count


def compare_training(
    corpus: Corpus, dataset: PackedDataset, args: argparse.Namespace
) -> tuple[Decoder, list[str], bool]:
    """The plain run's model after all its steps; what was found, and whether the floor is met."""
    models = {name: new_model(corpus, args) for name in runs_of(args)}
    most, lines, met = min(args.compare_steps, args.steps), [], True
    if most:
        enable_vb_optimization(models["two-part"], mode="training")
    losses: dict[str, list[float]] = {}
    runs = {name: steps_of(model, corpus, args) for name, model in models.items()}
    for name, run in runs.items():
        began = time.perf_counter()
        losses[name] = [float(loss) for loss in list(itertools.islice(run, most))]
        say(f"{name}: {most} steps in {time.perf_counter() - began:.1f} s")
    if most:
        train = {name: statistics.fmean(values[-WINDOW:]) for name, values in losses.items()}
        held_out = {
            name: validation_loss(model, dataset, args.sequences, args.device) for name, model in models.items()
        }
        for what, by_name in (
            ("training loss, mean of the last 50", train),
            ("validation loss, as they compute", held_out),
        ):
            change = by_name["two-part"] / by_name["plain"] - 1
            if what.startswith("training"):
                met = abs(change) <= TRAINING_FLOOR
            lines.append(
                f"{what}, {most} steps: plain {by_name['plain']:.4f}, two-part {by_name['two-part']:.4f} ({100 * change:+.3f} %)"
            )
            say(lines[-1])
        runs.pop("two-part").close()
        del models["two-part"]
    for step, loss in enumerate(runs["plain"], most + 1):
        if step % 250 == 0:
            say(f"plain step {step}: {float(loss):.4f}")
    return models["plain"], lines, met


def steps_within(corpus: Corpus, args: argparse.Namespace) -> int:
    """The steps asked for, or fewer that train in ``args.limit`` seconds; both runs are tried with some that do not count."""
    seconds = {}
    for name in runs_of(args):
        model = new_model(corpus, args)
        if name == "two-part":
            enable_vb_optimization(model, mode="training")
        run = steps_of(model, corpus, args)
        for _ in itertools.islice(run, 10):  # kernels are compiled
            pass
        synchronize(args.device)
        began = time.perf_counter()
        for _ in itertools.islice(run, 20):
            pass
        synchronize(args.device)
        seconds[name] = (time.perf_counter() - began) / 20
        run.close()
    compared = min(args.compare_steps, args.steps)
    room = args.limit - compared * seconds.get("two-part", 0.0)
    steps = max(compared, min(args.steps, int(room / seconds["plain"])))
    say(", ".join(f"{name} {1000 * took:.1f} ms a step" for name, took in seconds.items()) + f": {steps} steps")
    return steps


def synchronize(device: str) -> None:
    if device == "cuda":
        torch.cuda.synchronize()


BEGAN = time.perf_counter()


def say(text: str) -> None:
    print(f"[{time.perf_counter() - BEGAN:6.1f} s] {text}", flush=True)


def new_model(corpus: Corpus, args: argparse.Namespace) -> Decoder:
    return copy.deepcopy(drawn(args.preset, corpus.vocab_size, args.seq_length, args.seed)).to(args.device)


@functools.cache
def drawn(preset: str, vocab_size: int, length: int, seed: int) -> Decoder:
    """The model that all runs begin with, on the CPU, which takes seconds for a large one."""
    return Decoder(find_preset(preset).decoder_config(vocab_size, length), seed=seed, device="cpu")


def runs_of(args: argparse.Namespace) -> tuple[str, ...]:
    return ("plain", "two-part") if min(args.compare_steps, args.steps) else ("plain",)


@torch.no_grad()
def packed_rows(model: Decoder, dataset: PackedDataset, args: argparse.Namespace) -> tuple[list[str], bool]:
    """The losses at each precision."""
    for parameter in model.parameters():
        parameter.copy_(parameter.bfloat16())
    linears = select_linears(model)
    originals: dict[str, Tensor] = {name: linear.weight.detach().clone() for name, linear in linears.items()}
    before = validation_loss(model, dataset, args.sequences, args.device)
    lines = [f"{'bf16':<14} {before:>8.4f} {'':>10} {'':>10} {16:>6.2f}"]
    say(lines[-1])
    all_met = True
    for precision, floor in FLOORS.items():
        noise = signal = 0.0
        held = weights = 0
        for name, linear in linears.items():
            packed = pack(originals[name], precision, name)
            linear.weight.copy_(packed.dequantize())
            more = noise_and_signal(originals[name], linear.weight)
            noise, signal = noise + more[0], signal + more[1]
            held, weights = held + packed.nbytes, weights + linear.weight.numel()
        loss = validation_loss(model, dataset, args.sequences, args.device)
        rise = loss / before - 1
        met = rise <= floor
        all_met &= met
        verdict = "" if floor == math.inf else f"  [+{100 * floor:g} %: {'met' if met else 'MISSED'}]"
        lines.append(
            f"{NAMES[precision]:<14} {loss:>8.4f} {100 * rise:>+9.3f}% {decibels(noise, signal):>7.2f} dB "
            f"{8 * held / weights:>6.2f}{verdict}"
        )
        say(lines[-1])
    for name, linear in linears.items():
        linear.weight.copy_(originals[name])
    return lines, all_met


@torch.no_grad()
def assigned_rows(
    model: Decoder, corpus: Corpus, dataset: PackedDataset, args: argparse.Namespace
) -> tuple[list[str], bool]:
    """Precision per layer at ``--max-bits``, by sensitivities on windows that were trained on; the loss is of held-out ones."""
    training = PackedDataset(corpus, args.seq_length, "train", args.seed)
    drawn = [training.batch(range(start, start + 4)) for start in range(0, args.calibration, 4)]
    batches = [(inputs.to(args.device), targets.to(args.device)) for inputs, targets in drawn]
    began = time.perf_counter()
    found = assign_precision(model, batches, max_bits=args.max_bits)
    took = time.perf_counter() - began
    before = validation_loss(model, dataset, args.sequences, args.device)
    with weights_in(dict(select_linears(model)), found.precisions):
        loss = validation_loss(model, dataset, args.sequences, args.device)
    rise, counts = loss / before - 1, ", ".join(f"{len(found.names(precision))} {precision}" for precision in BITS)
    met = rise <= ASSIGNED_FLOOR and found.bits <= 5.2
    if args.assignment:
        found.save(args.assignment)
    return [
        f"{'per layer':<14} {loss:>8.4f} {100 * rise:>+9.3f}% {'':>10} {found.bits:>6.2f}"
        f"  [+{100 * ASSIGNED_FLOOR:g} % at 5.2 bits: {'met' if met else 'MISSED'}]",
        f"  {counts}; chosen in {took:.1f} s from {args.calibration} windows, whose own loss rises by "
        f"{100 * (found.measured['loss_after'] / found.measured['loss'] - 1):+.3f} %",
    ], met


@torch.no_grad()
def fastest_rows(
    model: Decoder, corpus: Corpus, dataset: PackedDataset, args: argparse.Namespace
) -> tuple[list[str], bool]:
    """Precision per layer for the least time of one token's products, within the budget; beside one precision for all."""
    training = PackedDataset(corpus, args.seq_length, "train", args.seed)
    inputs, targets = training.batch(range(min(8, args.calibration)))
    cost = LinearTimes(args.device, args.rows, getattr(torch, COMPUTE[args.device]))
    found = assign_precision(model, [(inputs.to(args.device), targets.to(args.device))], ASSIGNED_FLOOR, cost_of=cost)
    before = validation_loss(model, dataset, args.sequences, args.device)
    with weights_in(dict(select_linears(model)), found.precisions):
        loss = validation_loss(model, dataset, args.sequences, args.device)
    shapes, rise = found.shapes.values(), loss / before - 1
    took = sum(cost(precision, found.shapes[name]) for name, precision in found.precisions.items())
    beside = ", ".join(f"{name} {1e6 * sum(cost(name, shape) for shape in shapes):.1f}" for name in BITS)
    counts = ", ".join(f"{len(found.names(precision))} {precision}" for precision in BITS)
    return [
        f"{'least time':<14} {loss:>8.4f} {100 * rise:>+9.3f}% {'':>10} {found.bits:>6.2f}  {1e6 * took:.1f} us for {args.rows} rows "
        f"through all linears; all {beside}",
        f"  {counts}; by shape, us: "
        + "; ".join(
            f"{n}x{k} " + ", ".join(f"{name} {1e6 * cost(name, (n, k)):.2f}" for name in BITS)
            for n, k in sorted(set(shapes))
        ),
    ], rise <= ASSIGNED_FLOOR


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--preset", default="tiny")
    parser.add_argument("--device", default="cpu", choices=("cpu", "cuda"))
    parser.add_argument("--steps", type=int, default=300)
    parser.add_argument("--compare-steps", type=int, default=500, help="steps of the two-part run; 0 for none")
    parser.add_argument("--batch-size", type=int, default=8)
    parser.add_argument("--seq-length", type=int, default=128)
    parser.add_argument("--learning-rate", type=float, default=None, help="default: the preset's recipe")
    parser.add_argument("--sequences", type=int, default=256, help="held-out windows of a validation loss")
    parser.add_argument("--seed", type=int, default=0)
    parser.add_argument("--limit", type=float, default=None, help="seconds of training, for fewer steps if need be")
    parser.add_argument(
        "--calibration", type=int, default=16, help="training windows that sensitivities are measured on"
    )
    parser.add_argument("--max-bits", type=float, default=5.2)
    parser.add_argument("--fastest", action="store_true", help="also choose for the least time, within +0.4 %%")
    parser.add_argument("--rows", type=int, default=1, help="of a product that --fastest times")
    parser.add_argument("--assignment", type=Path, default=None, help="file for the precision per layer")
    parser.add_argument("--save", type=Path, default=None)
    parser.add_argument("--load", type=Path, default=None)
    args = parser.parse_args()
    machine = torch.cuda.get_device_name() if args.device == "cuda" else platform.machine()
    corpus = prepare_data(None)
    dataset = PackedDataset(corpus, args.seq_length, "validation", args.seed)
    say("the corpus is there")
    if args.load:
        model, lines, met = new_model(corpus, args), [], True
        model.load_state_dict(torch.load(args.load, weights_only=True))
    else:
        if args.limit is not None:
            args.steps = steps_within(corpus, args)
        model, lines, met = compare_training(corpus, dataset, args)
    if args.save:
        torch.save(model.state_dict(), args.save)
    rows, rows_met = packed_rows(model, dataset, args)
    print(
        f"\n{args.preset}, {args.steps} steps of {args.batch_size * args.seq_length} tokens, torch {torch.__version__}, {machine}"
    )
    print("\n".join(lines + [f"training floor {100 * TRAINING_FLOOR:g} %: {'met' if met else 'MISSED'}"] * bool(lines)))
    print(f"{'linears as':<14} {'val loss':>8} {'change':>10} {'SQNR':>10} {'bits':>6}")
    print("\n".join(rows), flush=True)
    rows, assigned_met = assigned_rows(model, corpus, dataset, args)
    print("\n".join(rows), flush=True)
    if args.fastest:
        rows, fast_met = fastest_rows(model, corpus, dataset, args)
        print("\n".join(rows))
        assigned_met &= fast_met
    raise SystemExit(not (met and rows_met and assigned_met))


if __name__ == "__main__":
    main()
