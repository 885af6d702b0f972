"""The largest model that trains on a machine: how many blocks fit by the engine's own layout, and how they get their first weights.

The blocks are of one fixed shape, Llama 70B's unless another is named; their number is what is looked for. For each number the engine
places a model without bytes on levels without bytes (`vblackwell.offload.layout.placement.bytes_by_level`), as it would place the real one:
weights, remainders, moments, staging for what is on the disk, gradients that wait, the ring, loaded weights. What it cannot know is
estimated here: the blocks' inputs in host memory, and on the GPU what one block computes with.

The first blocks live on level 0 with their states, as many as its capacity leaves room for; the others in RAM, then on the disk.

Weights: one block of normal numbers, as long as a prime below 2^20 so that no two rows of a matrix are alike, repeated in every
tensor from a place of the tensor's own. Tens of billions of numbers are there at the speed of memory. Norms are 1.
"""

from __future__ import annotations

import time
import zlib
from argparse import Namespace
from collections.abc import Callable, Mapping
from dataclasses import dataclass, replace
from typing import Any

import torch

from benchmarks.lib.offload.case import SHAPES, Case, Shape, say
from benchmarks.lib.offload.data import next_tokens
from benchmarks.lib.offload.systems import System, adamw_settings, our_stack, ours
from vblackwell.errors import InsufficientMemory
from vblackwell.machine.facts import disk_facts, list_gpus, memory_facts
from vblackwell.machine.limits import default_disk_path
from vblackwell.nn.decoder.config import DecoderConfig
from vblackwell.nn.decoder.decoder import Decoder
from vblackwell.offload.layout.formats import Formats
from vblackwell.offload.layout.groups import find_groups
from vblackwell.offload.layout.placement import (
    CUDA_GROUPS,
    MAX_RESIDENT,
    RING_SHARE,
    StreamingOptions,
    bytes_by_level,
    ring_bytes,
)
from vblackwell.units import GiB, format_bytes

STATES = {"exact": "fp32", "8bit": "8bit"}
SLACK = 64  # a level keeps one part in so many free: slabs are cut in pieces, a disk has its own books
GRADIENT_BUFFERS = 5  # one fills, three leave, one is updated
LENT_GROUPS = 3  # weights that an update holds are outside the budget of loaded ones
LEVEL0_SHARE = 0.95  # of a GPU's memory
DISK_SHARE = 0.9  # of the free space
CONTEXT_BYTES = 6 * GiB  # CUDA's context, cuBLAS' workspaces, what torch's allocator cannot use
BLOCK = 1_048_573  # the largest prime below 2^20
PROGRESS_SECONDS = 5.0


@dataclass(frozen=True)
class Machine:
    """What there is, bytes: of level 0 (a GPU if ``cuda``), of RAM for the level below it, of the disk."""

    level0_bytes: int
    host_bytes: int
    disk_bytes: int
    cuda: bool


@dataclass(frozen=True)
class Plan:
    """A model that fits.

    Attributes:
        layers, parameters: of the model.
        resident_bytes: what level 0 may keep of whole groups. activation_bytes: what RAM keeps free of ranges.
        table: bytes by kind, a number for each level.
    """

    layers: int
    parameters: int
    resident_bytes: int
    activation_bytes: int
    table: dict[str, list[int]]

    def lines(self, level_names: list[str]) -> list[str]:
        """For people: where every byte will be."""
        shown = [f"{self.layers} blocks, {in_gb(self.parameters)} G parameters"]
        for level, name in enumerate(level_names):
            kinds = {kind: row[level] for kind, row in self.table.items() if row[level]}
            shown.append(f"{name}: {in_gb(sum(kinds.values()))} GB ({parts_of(kinds)})")
        return shown


def in_gb(value: float) -> str:
    """Billions, to four figures."""
    return f"{value / 1e9:.4g}"


def parts_of(kinds: Mapping[str, int]) -> str:
    return ", ".join(f"{kind} {in_gb(value)}" for kind, value in kinds.items() if value)


def make_decoder(shape: Shape, seq: int) -> Decoder:
    """The model on the meta device, in bf16: its truth is kept as bf16 and remainder, so nothing is lost."""
    config = DecoderConfig(
        shape.vocab_size,
        shape.hidden_size,
        shape.intermediate_size,
        shape.num_layers,
        shape.num_heads,
        shape.num_kv_heads,
        max_position=max(seq, 2048),
    )
    return Decoder(config, device="meta", dtype=torch.bfloat16)


def plan_largest(shape: Shape, machine: Machine, formats: Formats, batch: int, seq: int) -> Plan:
    """The plan with the most blocks that `plan_of` makes.

    Raises:
        InsufficientMemory: not even one block fits.
    """
    best = plan_of(replace(shape, num_layers=1), machine, formats, batch, seq)
    too_many = 2
    while (found := _plan_or_none(shape, too_many, machine, formats, batch, seq)) is not None:
        best, too_many = found, 2 * too_many
    while too_many - best.layers > 1:
        middle = (best.layers + too_many) // 2
        found = _plan_or_none(shape, middle, machine, formats, batch, seq)
        if found is None:
            too_many = middle
        else:
            best = found
    return best


def _plan_or_none(shape: Shape, layers: int, machine: Machine, formats: Formats, batch: int, seq: int) -> Plan | None:
    try:
        return plan_of(replace(shape, num_layers=layers), machine, formats, batch, seq)
    except InsufficientMemory:
        return None


def plan_of(shape: Shape, machine: Machine, formats: Formats, batch: int, seq: int) -> Plan:
    """Where the bytes of this very model would be.

    Raises:
        InsufficientMemory: they have no room.
    """
    model = make_decoder(shape, seq)
    # One more than there are blocks is on its way; buffers are up to an eighth larger than what is in them.
    boundaries = (shape.num_layers + 2) * batch * seq * shape.hidden_size * 2 * 9 // 8
    wishes = StreamingOptions(
        torch.bfloat16,
        update="level0",
        resident_bytes=room_for_residents(model, shape, machine, formats, batch * seq),
        activation_bytes=boundaries + machine.host_bytes // SLACK,
        formats=formats,
    )
    capacities = [machine.level0_bytes, machine.host_bytes]
    if machine.disk_bytes:
        capacities.append(machine.disk_bytes - machine.disk_bytes // SLACK)
    table = bytes_by_level(model, capacities, wishes, "gpu" if machine.cuda else "ram")
    return Plan(shape.num_layers, shape.num_parameters, wishes.resident_bytes, wishes.activation_bytes, table)


def room_for_residents(model: Decoder, shape: Shape, machine: Machine, formats: Formats, tokens: int) -> int:
    """Bytes of level 0 that whole groups may take, beside what streams through it and, on a GPU, what computes."""
    groups, _ = find_groups(model, torch.bfloat16, None, formats)
    largest = max(group.num_bytes for group in groups)
    working = min(ring_bytes(groups, machine.level0_bytes), int(machine.level0_bytes * RING_SHARE))
    working += (CUDA_GROUPS + GRADIENT_BUFFERS + LENT_GROUPS) * largest
    if machine.cuda:
        # Of a block, forward and backward, bf16: gate, up, their product and the gradients of all three, twice over for what a
        # kernel writes anew; the rest is as wide as the residual stream or narrower.
        working += 2 * tokens * (12 * shape.intermediate_size + 24 * shape.hidden_size) + CONTEXT_BYTES
    most = int(machine.level0_bytes * MAX_RESIDENT)
    return max(0, min(most, machine.level0_bytes - working))


def machine_of(args: Namespace) -> Machine:
    """What the flags say, and for what they do not say: 0.95 of the GPU, the free RAM less the reserve, 0.9 of the free disk."""
    cuda, level0 = args.device == "cuda", args.cap
    if level0 is None:
        level0 = int(LEVEL0_SHARE * list_gpus()[0].total_bytes) if cuda else 1 * GiB
    host = args.host_memory if args.host_memory is not None else memory_facts().available_bytes - args.reserve
    disk = args.disk_memory
    if disk is None:
        disk = int(DISK_SHARE * disk_facts(args.disk_path or default_disk_path()).free_bytes)
    return Machine(level0, host, disk, cuda)


def largest_case(args: Namespace, tell: Callable[[str], None]) -> Case:
    """The largest model that fits what the flags of bench_offload.py describe, as a case; its plan is told.

    Raises:
        InsufficientMemory: no model of the shape fits, or not the one of ``args.layers``.
    """
    machine = machine_of(args)
    formats = Formats(STATES[args.largest], args.masters)
    sizes = (machine.level0_bytes, machine.host_bytes, machine.disk_bytes)
    tell("level 0 {}, RAM {}, disk {}".format(*(format_bytes(each) for each in sizes)))
    shape = SHAPES[args.shape]
    if args.layers is None:
        plan = plan_largest(shape, machine, formats, args.batch, args.seq)
    else:
        plan = plan_of(replace(shape, num_layers=args.layers), machine, formats, args.batch, args.seq)
    for line in plan.lines(["level 0", "RAM", "disk"]):
        tell(f"plan: {line}")
    return Case(
        system="largest",
        shape=args.shape,
        seq=args.seq,
        batch=args.batch,
        warmup=args.warmup,
        steps=args.steps,
        learning_rate=args.learning_rate,
        seed=args.seed,
        device=args.device,
        cap_bytes=machine.level0_bytes,
        host_bytes=machine.host_bytes,
        disk_bytes=machine.disk_bytes,
        disk_path=args.disk_path,
        deterministic=args.deterministic,
        recipe=replace(args.recipe, resident_bytes=str(plan.resident_bytes)),
        trace=str(args.trace / "largest.json.gz") if args.trace else None,
        layers=plan.layers,
        states=formats.states,
        masters=formats.masters,
        activation_bytes=plan.activation_bytes,
    )


# -- weights ---------------------------------------------------------------------------------------------------------------


class Repeated:
    """``initialize=`` of tens of billions of parameters (module's text).

    Args:
        num_parameters: of the model, for the progress. tell: hears it.
    """

    def __init__(self, num_layers: int, seed: int, num_parameters: int, tell: Callable[[str], None]) -> None:
        self._block = torch.randn(BLOCK, generator=torch.Generator().manual_seed(seed)) * 0.02
        self._into_residual = self._block / (2 * num_layers) ** 0.5
        self._total, self._tell = num_parameters, tell
        self._began = self._told = time.perf_counter()
        self._done = 0

    def __call__(self, name: str, tensor: torch.Tensor) -> None:
        if tensor.dim() == 1:
            tensor.fill_(1.0)
        else:
            block = self._into_residual if name.endswith(("o_proj.weight", "down_proj.weight")) else self._block
            repeat_into(tensor.view(-1), block, zlib.crc32(name.encode()) % BLOCK)
        self._done += tensor.numel()
        now = time.perf_counter()
        if now - self._told > PROGRESS_SECONDS or self._done == self._total:
            self._told = now
            self._tell(f"weights: {in_gb(self._done)} of {in_gb(self._total)} G in {now - self._began:.1f} s")


def repeat_into(flat: torch.Tensor, block: torch.Tensor, start: int) -> None:
    """Fill ``flat`` (n,) with ``block`` (k,) from its element ``start`` on, again and again, by all of torch's threads."""
    size = len(block)
    head, rest = flat[: size - start], flat[size - start :]
    whole = len(rest) // size
    head.copy_(block[start : start + len(head)])
    rest[: whole * size].view(whole, size).copy_(block.expand(whole, -1))
    rest[whole * size :].copy_(block[: len(rest) % size])


# -- the system ------------------------------------------------------------------------------------------------------------


def build_largest(case: Case, device: torch.device) -> System:
    """The model of the case, which was planned before, filled where it lives."""
    from vblackwell import VGPUAdamW, enable_vgpu_stack_optimization, offload_of

    began = time.perf_counter()

    def tell(text: str) -> None:
        say("phase", text=f"[{time.perf_counter() - began:.1f} s] {text}")

    shape = case.decoder
    stack = our_stack(case, device, streamed=True)
    model = make_decoder(shape, case.seq)
    model.gradient_checkpointing = True
    if case.recipe.loss_chunk_tokens is not None:
        model.loss_chunk_tokens = case.recipe.loss_chunk_tokens
    tell(f"{in_gb(shape.num_parameters)} G parameters on the meta device; mapping host memory")
    enable_vgpu_stack_optimization(
        model,
        stack,
        placement="streamed",
        compute_dtype=torch.bfloat16,
        update="level0",
        activations="host",
        resident_bytes=case.recipe.resident_bytes or 0,
        activation_bytes=case.activation_bytes,
        states=case.states,
        masters=case.masters,
        initialize=Repeated(shape.num_layers, case.seed, shape.num_parameters, tell),
    )
    tell("weights are in their ranges; making optimizer states")
    settings: dict[str, Any] = {**adamw_settings(case), "update_in_backward": True, "undo": False}
    optimizer = VGPUAdamW(model.parameters(), **settings)
    engine = offload_of(model)
    assert engine is not None
    size = f"{shape.num_layers} blocks, {in_gb(shape.num_parameters)} G parameters"
    notes = [f"{size}, states {case.states}, masters {case.masters}"]
    kinds = engine.summary()["bytes_by_level"]
    for number, level in enumerate(stack.levels):
        parts = parts_of({kind: row[number] for kind, row in kinds.items()})
        notes.append(
            f"{level.name}: {in_gb(level.used_bytes)} of {in_gb(level.capacity_bytes)} GB used: {parts or 'no home'}"
        )
        tell(notes[-1])
    return replace(ours(model, optimizer, lambda ids_BS: model(ids_BS, next_tokens(ids_BS)), stack), notes=notes)
