"""``vb estimate`` without flags of a run: the machine that is meant, and the table of what it trains, adapts and runs:
one model in every way, or the largest ones."""

import json
import shlex
import shutil
import sys
import textwrap
from collections.abc import Mapping, Sequence
from dataclasses import asdict

import torch

from vblackwell.errors import ConfigurationError, as_typed
from vblackwell.folders.compressed_tensors import PackedLinears
from vblackwell.machine.facts import memory_facts
from vblackwell.machine.gpus import context_bytes, find_gpu, known_as
from vblackwell.machine.limits import (
    ARENA_SHARE,
    HOST_SHARE,
    LATER_BYTES,
    default_disk_path,
    free_disk_bytes,
    stated_beside,
)
from vblackwell.machine.rates import DISK_BYTES_PER_SECOND, assumed_rates, kept_rates, rates_of
from vblackwell.planner import what_fits
from vblackwell.planner.estimate.command import some_bytes
from vblackwell.planner.estimate.result import STREAMED_ERROR
from vblackwell.planner.forecast import Machine
from vblackwell.planner.known_models import KNOWN_MODELS
from vblackwell.planner.placement import FAST, Bounds, Lacking
from vblackwell.planner.what_fits import Fields
from vblackwell.trace.causal_lm import check_fields
from vblackwell.units import GiB, MiB, columns, format_bytes, parse_bytes


def what_fits_command(gpu: str | None, host_memory: str | None, disk_memory: str | None, as_json: bool) -> int:
    """Print the largest models for a machine (what is None: this one's); 0. Progress goes to standard error. Raises
    ConfigurationError: an unknown card, or a GPU here whose speed is not known.
    """
    name, place, assumed = place_of(gpu, host_memory, disk_memory)
    answers = what_fits.WhatFits(say=lambda text: print(f"trying to {text}", file=sys.stderr, flush=True))
    found = [fit for task in what_fits.TASKS for fit in answers.largest(task, place)]
    if as_json:
        values = {"machine": name, "bounds": asdict(place.bounds), "rates": place.rates.source}
        values |= {"fits": [asdict(fit) for fit in found], "assumptions": [*assumed, *assumptions(place)]}
        print(json.dumps(values, indent=2))
    else:
        _show([*lines(name, place, found), *(f"  assumes {text}" for text in assumed)])
    return 0


def ways_command(
    model: str, fields: Fields, gpu: str | None, host_memory: str | None, disk_memory: str | None, as_json: bool
) -> int:
    """Print how a machine trains, adapts and runs ``model``, whose config.json has these ``fields``; 0. Raises as
    `what_fits_command`, and ConfigurationError where the fields are no causal model's."""
    name, place, assumed = place_of(gpu, host_memory, disk_memory)
    check_fields(dict(fields), model, (("vocab_size",),))
    answers = what_fits.WhatFits({model: fields})
    found = answers.ways(model, place)
    if as_json:
        values: dict[str, object] = {"model": model, "parameters": answers.parameters(model), "machine": name}
        values |= {
            "precision": "bf16" if place.has_gpu else "fp32",  # of training
            "bounds": asdict(place.bounds),
            "rates": place.rates.source,
            "assumptions": [*assumed, *assumptions(place, found)[:2]],
        }
        ways = {way: asdict(fit) for way, fit in found.items()}  # of what is lacking: how much of what
        packing = answers.packing(model)
        if packing is not None:
            values |= {"packed": {"format": packing.form.name, "bytes": answers.packed_bytes(model)}}
        fits = {way: fit for way, fit in found.items() if isinstance(fit, what_fits.Fit)}
        commands = {way: _command(fit, model, place, packing) for way, fit in fits.items()}
        print(json.dumps(values | {"ways": ways, "best": best_of(found), "commands": commands}, indent=2))
    else:
        shown = way_lines(model, answers, name, place, found)
        _show([*shown, *(f"  assumes {text}" for text in assumed)])
    return 0


def _show(lines: Sequence[str]) -> None:
    """Print them, on a terminal broken between words; a command stays whole, to be copied."""
    width = shutil.get_terminal_size().columns if sys.stdout.isatty() else sys.maxsize
    # Paths and flags are copied too.
    wrapper = textwrap.TextWrapper(width, subsequent_indent=" " * 8, break_long_words=False, break_on_hyphens=False)
    for line in lines:
        whole = len(line) <= width or " vb " in line
        print(*([line] if whole else wrapper.wrap(line)), sep="\n")


def best_of(found: Mapping[str, what_fits.Fit | Lacking]) -> list[str]:
    """The fastest way that fits to run, to train adapters, and to train all weights."""
    best: dict[str, what_fits.Fit] = {}
    for way, fit in found.items():
        task = "train" if way == "plain" else way.partition("-")[0]
        if not isinstance(fit, Lacking) and (task not in best or fit.tokens_per_second > best[task].tokens_per_second):
            best[task] = fit
    return [fit.task for fit in best.values()]


def way_lines(
    model: str, answers: what_fits.WhatFits, name: str, place: Machine, found: Mapping[str, what_fits.Fit | Lacking]
) -> list[str]:
    """One screen: a row a way, and what to type for those that fit."""
    best, packing = best_of(found), answers.packing(model)
    words, packed = {way: what_fits.words_of(way, place) for way in found}, ""
    if packing is not None:
        held = f"{len(packing.fine)} linears in {packing.form.name}"
        words, packed = what_fits.PACKED_WAYS, f" packed to {format_bytes(answers.packed_bytes(model))} ({held})"
    rows: list[tuple[str, ...]] = [("", "", "tokens/s", _memory(place), "RAM", "disk", "tokens", "")]
    for way, fit in found.items():
        mark, said = "*" if way in best else "", words[way]
        if isinstance(fit, Lacking):
            lacks = f"lacks {format_bytes(fit.num_bytes)} of {fit.what}" if fit.num_bytes else as_typed(str(fit))
            rows.append((mark, said, "-", "-", "-", "-", "-", lacks))
            continue
        sizes = [format_bytes(size) if size else "-" for size in (fit.gpu, fit.host, fit.disk)]
        rows.append((mark, said, what_fits.speed_of(fit), *sizes, f"{fit.at_once:,}", fit.how))
    fitting = [fit for fit in found.values() if isinstance(fit, what_fits.Fit)]
    typed = columns([(words[fit.task], _command(fit, model, place, packing)) for fit in fitting])
    detail = "--batch-size or --precision" if packing is None else f"--lora {what_fits.RANK}"
    where = bounds_in_words(place)
    return [
        f"{model}, {answers.parameters(model):,} parameters{packed}, on {name}: {where}",
        "",
        *(f"  {line}" for line in columns(rows, right=range(2, 7))),
        "",
        f"  * the fastest that fits: to run, to train adapters{'' if packing else ', to train all weights'}"
        if best
        else f"  nothing fits: give more --ram or --disk{', or a larger card' if place.has_gpu else ''}",
        *(["", "  what to type:", *(f"    {line}" for line in typed)] if fitting else []),
        "",
        f"  tokens: of the longest text, or of one forward; of one run in detail: add {detail}",
        *(f"  assumes {text}" for text in assumptions(place, found)[:2]),
    ]


def _command(fit: what_fits.Fit, model: str, place: Machine, packing: PackedLinears | None = None) -> str:
    """What runs the model, packed in its folder or not, so; FOLDER: where its weights are."""
    if fit.task == "plain":
        return "torch.optim.AdamW(model.parameters())"
    task, _, kind = fit.task.partition("-")
    words = ["--model", "FOLDER" if model in KNOWN_MODELS or model.endswith(".json") else shlex.quote(model)]
    if task == "adapters":
        words += ["--lora", str(what_fits.RANK)]
    if task in ("run", "adapters") and not kind and packing is None:
        words += ["--use-fp4"]
    if fit.batch is None:
        words += [] if fit.resident else ["--fast-memory", f"{fit.gpu // MiB}MiB"]
        words += ["--disk-memory", f"{-(-fit.disk // GiB)}GiB"] if fit.disk else []
        return " ".join(["vb generate", *words, "--prompt ..."])
    length, sequences, forwards = fit.batch
    words += ["--placement", kind] if task == "train" else []
    words += ["--precision", "bf16" if place.has_gpu else "fp32", "--gradient-checkpointing"]
    words += [f"--seq-length {length} --batch-size {sequences}"]
    words += [f"--accumulation-steps {forwards}"] if forwards > 1 else []
    return " ".join(["vb train", *words, "--vgpu-auto"])


def place_of(gpu: str | None, host_memory: str | None, disk_memory: str | None) -> tuple[str, Machine, list[str]]:
    """The machine in words, what a run may take of it (of its RAM the share that ``--vgpu-auto`` takes), and what that
    assumes. What is not given is this machine's, or `stated_beside` a card."""
    card = None if gpu is None else find_gpu(gpu)
    ram = None if host_memory is None else some_bytes(host_memory, "--ram")
    disk = None if disk_memory is None else parse_bytes(disk_memory, "--disk")
    assumed = list[str]()
    if (stated := stated_beside(card)) is not None:
        usual_ram, usual_disk = stated
        if ram is None:
            assumed += [f"{format_bytes(usual_ram)} of RAM next to a card that this machine lacks: --ram changes it"]
        if disk is None:
            speed = f"{DISK_BYTES_PER_SECOND / 1e9:g} GB/s each way"
            assumed += [f"{usual_disk / 1e9:g} GB of an NVMe disk, {speed}, next to that card: --disk changes it"]
        ram, disk = usual_ram if ram is None else ram, usual_disk if disk is None else disk
    ram = memory_facts().available_bytes if ram is None else ram
    disk = free_disk_bytes(default_disk_path()) if disk is None else disk
    host = int(ram * HOST_SHARE)
    if card is not None:
        bounds = Bounds(card.total_bytes - context_bytes(card.capability), host, disk)
        return card.name, Machine(bounds, rates_of(card), capability=card.capability), assumed
    if not torch.cuda.is_available():
        from vblackwell.offload.measure import cpu_rates  # with all of the runtime, which a named card does without

        bounds = Bounds(int(ram * ARENA_SHARE), host, disk)
        return "this machine, without a GPU", Machine(bounds, cpu_rates(), has_gpu=False), assumed
    name = torch.cuda.get_device_name(0)
    rates, known = kept_rates(name), known_as(name)
    if rates is None and known is not None:
        rates = assumed_rates(known)
    if rates is None:
        raise ConfigurationError(f"the speed of {name} is not known yet: run vb doctor first")
    bounds = Bounds(torch.cuda.mem_get_info(0)[0] - LATER_BYTES, host, disk)
    return name, Machine(bounds, rates, capability=torch.cuda.get_device_capability(0)), assumed


def _memory(place: Machine) -> str:
    """Of the fastest level, above a column."""
    return "GPU" if place.has_gpu else "fast"


def bounds_in_words(place: Machine) -> str:
    """What a run may take."""
    gpu, host, disk = map(format_bytes, (place.bounds.gpu, place.bounds.host, place.bounds.disk))
    fast = "GPU memory" if place.has_gpu else "fast memory (RAM that stands for a GPU)"
    return f"{gpu} of {fast}, {host} of RAM, {disk} of disk for a run"


def lines(name: str, place: Machine, found: Sequence[what_fits.Fit]) -> list[str]:
    heads = [_memory(place) if head == "GPU" else head for head in what_fits.HEADS]
    table = columns([heads, *map(what_fits.row_of, found)], right=range(2, 7))
    left_out = [task for task in what_fits.TASKS if not any(fit.task == task for fit in found)]
    return [
        f"{name}: {bounds_in_words(place)}",
        "",
        *(f"  {line}" for line in table),
        *(f"  no known model for: {task}" for task in left_out),
        "",
        *(f"  assumes {text}" for text in assumptions(place)),
    ]


def assumptions(place: Machine, found: Mapping[str, what_fits.Fit | Lacking] | None = None) -> list[str]:
    """What the table rests on; ``found``: of one model, which may know fewer positions than a sequence has."""
    fits = [fit for fit in (found or {}).values() if isinstance(fit, what_fits.Fit)]
    batches = [fit.batch for fit in fits if fit.batch]
    text = min([what_fits.POSITIONS, *(fit.at_once for fit in fits if fit.task.startswith("run"))])
    length = batches[0][0] if batches else what_fits.SEQ_LENGTH
    least = ", ".join(f"{task} {speed:g}" for task, speed in what_fits.MIN_SPEED.items())
    return [
        f"training: {what_fits.SEQUENCES} sequences of {length} tokens a step, "
        f"{'bf16 with fp32 masters' if place.has_gpu else 'fp32'}, "
        f"checkpointing; running: one text of at most {text} tokens",
        f"speeds by {place.rates.source}: {STREAMED_ERROR}",
        f"models by name of vb estimate, of those that reach these tokens/s: {least}",
        f"{HOST_SHARE:.0%} of the RAM is for the run; in the second row of a task the largest that stays in "
        f"{FAST[place.has_gpu]}",
    ]
