"""``vb estimate`` without a model: the machine that is meant, and the table of what it trains, adapts and runs."""

import json
import sys
from collections.abc import Sequence
from dataclasses import asdict

import torch

from vblackwell.errors import ConfigurationError
from vblackwell.machine.facts import memory_facts
from vblackwell.machine.gpus import context_bytes, find_gpu, known_as
from vblackwell.machine.limits import ARENA_SHARE, HOST_SHARE, LATER_BYTES, default_disk_path, free_disk_bytes
from vblackwell.machine.rates import assumed_rates, kept_rates, rates_of
from vblackwell.offload.measure import cpu_rates
from vblackwell.planner import what_fits
from vblackwell.planner.estimate.command import some_bytes
from vblackwell.planner.estimate.result import STREAMED_ERROR
from vblackwell.planner.forecast import Machine
from vblackwell.planner.placement import Bounds
from vblackwell.units import columns, format_bytes, parse_bytes


def what_fits_command(gpu: str | None, host_memory: str | None, disk_memory: str | None, as_json: bool) -> int:
    """Print the largest models for a machine (what is None: this one's); 0. Progress goes to standard error. Raises
    ConfigurationError: an unknown card, or a GPU here whose speed is not known.
    """
    name, place = place_of(gpu, host_memory, disk_memory)
    answers = what_fits.WhatFits(say=lambda text: print(f"trying to {text}", file=sys.stderr, flush=True))
    found = [fit for task in what_fits.TASKS for fit in answers.largest(task, place)]
    if as_json:
        values = {"machine": name, "bounds": asdict(place.bounds), "rates": place.rates.source}
        values |= {"fits": [asdict(fit) for fit in found], "assumptions": assumptions(place)}
        print(json.dumps(values, indent=2))
    else:
        print("\n".join(lines(name, place, found)))
    return 0


def place_of(gpu: str | None, host_memory: str | None, disk_memory: str | None) -> tuple[str, Machine]:
    """The machine in words, and what a run may take of it: of its RAM the share that ``--vgpu-auto`` takes."""
    ram = memory_facts().available_bytes if host_memory is None else some_bytes(host_memory, "--ram")
    host = int(ram * HOST_SHARE)
    disk = free_disk_bytes(default_disk_path()) if disk_memory is None else parse_bytes(disk_memory, "--disk")
    if gpu is not None:
        card = find_gpu(gpu)
        bounds = Bounds(card.total_bytes - context_bytes(card.capability), host, disk)
        return card.name, Machine(bounds, rates_of(card), capability=card.capability)
    if not torch.cuda.is_available():
        bounds = Bounds(int(ram * ARENA_SHARE), host, disk)
        return "this machine, without a GPU", Machine(bounds, cpu_rates(), has_gpu=False)
    name = torch.cuda.get_device_name(0)
    rates, known = kept_rates(name), known_as(name)
    if rates is None and known is not None:
        rates = assumed_rates(known)
    if rates is None:
        raise ConfigurationError(f"the speed of {name} is not known yet: run vb doctor first")
    bounds = Bounds(torch.cuda.mem_get_info(0)[0] - LATER_BYTES, host, disk)
    return name, Machine(bounds, rates, capability=torch.cuda.get_device_capability(0))


def lines(name: str, place: Machine, found: Sequence[what_fits.Fit]) -> list[str]:
    bounds = place.bounds
    table = columns([what_fits.HEADS, *map(what_fits.row_of, found)], right=range(2, 7))
    left_out = [task for task in what_fits.TASKS if not any(fit.task == task for fit in found)]
    return [
        f"{name}: {format_bytes(bounds.gpu)} of level 0, {format_bytes(bounds.host)} of RAM, "
        f"{format_bytes(bounds.disk)} of disk for a run",
        "",
        *(f"  {line}" for line in table),
        *(f"  no known model for: {task}" for task in left_out),
        "",
        *(f"  assumes {text}" for text in assumptions(place)),
    ]


def assumptions(place: Machine) -> list[str]:
    """What the table rests on."""
    least = ", ".join(f"{task} {speed:g}" for task, speed in what_fits.MIN_SPEED.items())
    return [
        f"training: {what_fits.SEQUENCES} sequences of {what_fits.SEQ_LENGTH} tokens a step, bf16 with fp32 masters, "
        f"checkpointing; running: one text of at most {what_fits.POSITIONS} tokens",
        f"speeds by {place.rates.source}: {STREAMED_ERROR}",
        f"models by name of vb estimate, of those that reach these tokens/s: {least}",
        f"{HOST_SHARE:.0%} of the RAM is for the run; in the second row of a task the largest that stays on the GPU",
    ]
