"""Whole trainings with optimizer states on a disk: the bits of a run in RAM;
and disks that fill up, fail and forget in the middle.
"""

from __future__ import annotations

import errno
import functools
import itertools
import os
from collections.abc import Callable, Iterable
from typing import Any

import pytest
import torch
from torch import nn

from tests.offload.conftest import ROOMY_BYTES, MakeStack
from tests.offload.models import CASES, build
from tests.offload.storage.format_cases import BF16, Form, Odd, assert_same_states, loss_of
from vblackwell.errors import CorruptData, DiskError, InsufficientMemory, StepAbandoned
from vblackwell.memory.cache.stack import VGPUStack
from vblackwell.memory.disk import DiskLevel
from vblackwell.nn.decoder.config import DecoderConfig
from vblackwell.nn.decoder.decoder import Decoder
from vblackwell.offload.api import enable_vgpu_stack_optimization, offload_of, release
from vblackwell.offload.engine import Offload
from vblackwell.offload.optimizer import VGPUAdamW
from vblackwell.offload.state import ParameterState, export_state, import_state
from vblackwell.offload.storage.storage import Storage

DECODER, GPT2 = CASES[1], CASES[2]
State = dict[str, ParameterState]
LIMIT = 3.5  # of Odd's gradient norms: about half the steps exceed it

# Bytes a parameter of host memory, so that some of the moments, and not all, lie on the disk. Final updates keep no
# gradients there.
EXACT, WIDE, PACKED = Form("fp32", "exact", BF16), Form("fp32", "exact", None), Form("8bit", "exact", BF16)
HOST_BYTES = {EXACT: 11.0, WIDE: 13.0, PACKED: 6.6}
GRADIENT_BYTES = {EXACT: 2.0, WIDE: 4.0, PACKED: 2.0}


def on_disk(stack: VGPUStack) -> int:
    return stack.levels[2].used_bytes


def placed(
    model: nn.Module, form: Form, make_stack: MakeStack, *, disk: bool, final: bool = False, sums: bool = False
) -> tuple[nn.Module, VGPUStack]:
    total = sum(param.numel() for param in model.parameters())
    host = HOST_BYTES[form] - GRADIENT_BYTES[form] * final + sums / 2
    stack = make_stack(2 << 20, int(host * total) if disk else ROOMY_BYTES)
    given = {"placement": "streamed", "update": "device", **form.given}
    return enable_vgpu_stack_optimization(model, stack, **given), stack


def train(
    model: nn.Module, optimizer: VGPUAdamW, steps: range, accumulation: int = 1
) -> list[tuple[float, float | None]]:
    """(loss, norm) of each step."""
    seen = []
    for step in steps:
        total = 0.0
        for micro in range(accumulation):
            loss = loss_of(model, 100 * step + micro) / accumulation
            loss.backward()
            total += loss.item()
        optimizer.step()
        optimizer.zero_grad()
        norm = optimizer.grad_norm
        seen.append((total, None if norm is None else float(norm)))
    return seen


RECIPES: dict[str, dict[str, Any]] = {
    "final": {"update_in_backward": True, "undo": False},
    "undo": {"update_in_backward": True},
    "clipped": {"update_in_backward": True, "max_grad_norm": LIMIT},
    "at the step": {"max_grad_norm": LIMIT},
    "summed": {"update_in_backward": True, "max_grad_norm": 0.72 * LIMIT, "accumulation_steps": 2},
}


@pytest.mark.each_value
@pytest.mark.parametrize(
    ("form", "late"),
    [(EXACT, False), (WIDE, False), (PACKED, False), (EXACT, True)],
    ids=["bf16", "fp32", "8bit", "bf16, late"],
)
@pytest.mark.parametrize("recipe", list(RECIPES))
def test_states_on_a_disk_change_no_bit(form: Form, recipe: str, late: bool, make_stack: MakeStack):
    found = []
    for disk in (True, False):
        model, stack = placed(Odd(), form, make_stack, disk=disk, final=recipe == "final", sums=recipe == "summed")
        engine = offload_of(model)
        assert isinstance(engine, Offload) and engine.level0 is not None
        engine.level0.at_once = not late  # late, as on a GPU: updates are queued when somebody needs them
        optimizer = VGPUAdamW(model.parameters(), lr=3e-3, betas=(0.9, 0.95), **RECIPES[recipe])
        seen = train(model, optimizer, range(3), RECIPES[recipe].get("accumulation_steps", 1))
        found.append((seen, dict(export_state(model, optimizer))))
        rows = engine.summary()["bytes_by_level"]
        moments = [rows[kind] for kind in engine.groups[0].formats.moments]
        assert (sum(row[2] for row in moments) > 0) == disk and sum(row[1] for row in moments) > 0
        if disk:
            read = sum(link["bytes"] for link in stack.get_stats()["links"] if link["source"] == "ssd")
            assert read > 3 * sum(row[2] for row in moments) // 2
        stack.close()
    assert found[0][0] == found[1][0]
    assert_same_states(found[0][1], found[1][1])
    if "max_grad_norm" in RECIPES[recipe]:
        over = [norm is not None and norm > RECIPES[recipe]["max_grad_norm"] for _, norm in found[0][0]]
        assert any(over) and not all(over), "some steps are clipped, and some are not"


@pytest.mark.parametrize("case", [DECODER, pytest.param(GPT2, marks=pytest.mark.slow)], ids=["decoder", "gpt2"])
def test_checkpointed_layers_and_activations_in_ram(case, make_stack: MakeStack):
    """The recipe of the largest models: final updates after the backward, checkpoints,
    RAM that is full but for the activations.
    """
    found = []
    for disk in (True, False):
        model = build(case, use_checkpoint=True)
        total = sum(param.numel() for param in model.parameters())
        stack = make_stack(1 << 20, (11 * total + (1 << 18)) if disk else ROOMY_BYTES)
        enable_vgpu_stack_optimization(
            model,
            stack,
            placement="streamed",
            update="device",
            compute_dtype=BF16,
            activations="host",
            activation_bytes=1 << 18 if disk else 0,
        )
        optimizer = VGPUAdamW(model.parameters(), lr=1e-2, update_in_backward=True, undo=False)
        losses = []
        for step in range(4):
            torch.manual_seed(step)
            loss = case.loss(model, step)
            loss.backward()
            optimizer.step()
            optimizer.zero_grad()
            losses.append(loss.item())
        assert (on_disk(stack) > 0) == disk
        found.append((losses, dict(export_state(model, optimizer))))
    assert found[0][0] == found[1][0]
    assert_same_states(found[0][1], found[1][1])


def test_undone_and_skipped_steps(make_stack: MakeStack):
    """Updates that ran before a step which never came, and a step whose gradients are not finite:
    as if they had not been.
    """
    found = []
    for disk in (True, False):
        model, stack = placed(Odd(), EXACT, make_stack, disk=disk)
        optimizer = VGPUAdamW(model.parameters(), lr=3e-3, update_in_backward=True, max_grad_norm=LIMIT)
        train(model, optimizer, range(2))
        before = dict(export_state(model, optimizer))
        loss_of(model, 50).backward()
        optimizer.zero_grad()  # given up
        assert_same_states(dict(export_state(model, optimizer)), before)
        (loss_of(model, 51) * float("inf")).backward()
        optimizer.step()
        optimizer.zero_grad()
        assert optimizer.skipped
        assert_same_states(dict(export_state(model, optimizer)), before)
        seen = train(model, optimizer, range(2, 4))
        found.append((seen, dict(export_state(model, optimizer))))
        assert (on_disk(stack) > 0) == disk
    assert found[0][0] == found[1][0]
    assert_same_states(found[0][1], found[1][1])


def test_released_with_its_states(make_stack: MakeStack):
    """What was on the disk goes on in plain memory, under the same optimizer."""
    found = []
    for disk in (True, False):
        model, stack = placed(Odd(), WIDE, make_stack, disk=disk)
        optimizer = VGPUAdamW(model.parameters(), lr=3e-3)
        train(model, optimizer, range(3))
        release(model)
        assert on_disk(stack) == 0
        train(model, optimizer, range(3, 5))
        found.append([param.detach().clone() for param in model.parameters()])
    assert all(torch.equal(a, b) for a, b in zip(*found, strict=True))


# -- disks that break --------------------------------------------------------------------------------------------------


class Breaking:
    """A disk of which the ``after``-th call of ``name`` and all later ones fail with ``number``; None:
    they come back with other bits.
    """

    def __init__(self, name: str, after: int, number: int | None) -> None:
        self._name, self._number = name, number
        self._count = itertools.count(1)
        self._after = after
        self.failed = 0

    def _is_broken(self, name: str) -> bool:
        if name != self._name or next(self._count) < self._after:
            return False
        self.failed += 1
        return True

    def _fail(self) -> None:
        assert self._number is not None
        raise OSError(self._number, os.strerror(self._number))

    def preadv(self, fd: int, buffers: list[memoryview], offset: int) -> int:
        broken = self._is_broken("preadv")
        if broken and self._number is not None:
            self._fail()
        count = os.preadv(fd, buffers, offset)
        if broken:
            buffers[0][17] ^= 1
        return count

    def pwritev(self, fd: int, buffers: list[memoryview], offset: int) -> int:
        if self._is_broken("pwritev"):
            if self._number is None:
                return os.pwritev(fd, buffers, offset)
            half = [buffer[: len(buffer) // 2 // 4096 * 4096] for buffer in buffers]
            if half[0]:
                os.pwritev(fd, half, offset)  # the worst: a part of it is there
            self._fail()
        return os.pwritev(fd, buffers, offset)

    def posix_fallocate(self, fd: int, offset: int, length: int) -> None:
        if self._is_broken("posix_fallocate"):
            self._fail()
        os.posix_fallocate(fd, offset, length)


def break_disk(stack: VGPUStack, name: str, after: int, number: int | None) -> Breaking:
    level = stack.levels[2]
    assert isinstance(level, DiskLevel)
    level._file.calls = broken = Breaking(name, after, number)
    return broken


FAULTS: dict[str, tuple[str, int | None, type[Exception], str]] = {
    "write error": ("pwritev", errno.EIO, DiskError, "writing .* bytes at offset"),
    "disk full": ("pwritev", errno.ENOSPC, DiskError, "writing .* bytes at offset .*No space left"),
    "read error": ("preadv", errno.EIO, DiskError, "reading .* bytes at offset"),
    "flipped bit": ("preadv", None, CorruptData, "came back changed"),
}
BEFORE, STEPS = 2, 4  # until the checkpoint: moments that are not zero, and an order that was learnt; and in all


@functools.cache
def run_in_ram(recipe: str) -> tuple[list[Any], State]:
    """All steps without a disk, which no fault of one changes."""
    stacks: list[VGPUStack] = []

    def make_stack(fast_bytes: int, host_bytes: int) -> VGPUStack:
        levels = [{"capacity_mb": size / (1 << 20), "device": "cpu"} for size in (fast_bytes, host_bytes)]
        stacks.append(VGPUStack({"levels": levels}))
        return stacks[0]

    model, stack = placed(Odd(), EXACT, make_stack, disk=False)
    optimizer = VGPUAdamW(model.parameters(), lr=3e-3, **RECIPES[recipe])
    seen, states = train(model, optimizer, range(STEPS)), copied(export_state(model, optimizer))
    release(model)
    stack.close()
    return seen, states


def copied(states: Iterable[tuple[str, ParameterState]]) -> State:
    return {name: {part: value.clone() for part, value in state.items()} for name, state in states}


def resumed(states: State, form: Form, recipe: dict[str, Any], make_stack: MakeStack) -> tuple[list[Any], State]:
    """The rest of the run from a checkpoint, on a disk that works."""
    model, _ = placed(Odd(), form, make_stack, disk=True)
    optimizer = VGPUAdamW(model.parameters(), lr=3e-3, **recipe)
    import_state(model, optimizer, states.__getitem__)
    return train(model, optimizer, range(BEFORE, STEPS)), dict(export_state(model, optimizer))


@pytest.mark.each_value
@pytest.mark.parametrize("fault", list(FAULTS))
@pytest.mark.parametrize("recipe", ["final", "undo", "clipped"])
@pytest.mark.parametrize("after", [1, 4])
def test_a_disk_that_breaks_in_a_step(fault: str, recipe: str, after: int, make_stack: MakeStack):
    """A typed error within a step, no state that is partly another;
    the run goes on from its checkpoint as if nothing had been.
    """
    name, number, kind, text = FAULTS[fault]
    given = RECIPES[recipe]
    model, stack = placed(Odd(), EXACT, make_stack, disk=True)
    optimizer = VGPUAdamW(model.parameters(), lr=3e-3, **given)
    train(model, optimizer, range(BEFORE))
    saved = copied(export_state(model, optimizer))
    broken = break_disk(stack, name, after, number)
    with pytest.raises(kind, match=text):
        train(model, optimizer, range(BEFORE, STEPS))
        export_state_whole(model, optimizer)
    assert broken.failed > 0
    if name == "pwritev":  # what was half written is not given out
        for _ in range(2):
            with pytest.raises((DiskError, StepAbandoned)):
                export_state_whole(model, optimizer)
    stack.close()

    expected, final = run_in_ram(recipe)
    losses, states = resumed(saved, EXACT, given, make_stack)
    assert losses == expected[BEFORE:]
    assert_same_states(states, final)


def export_state_whole(model: nn.Module, optimizer: VGPUAdamW) -> State:
    return {name: state for name, state in export_state(model, optimizer)}


@pytest.mark.parametrize(
    "make",
    [lambda total: (int(11 * total), 64 << 20), lambda total: (int(9 * total), 16384)],
    ids=["file system", "level"],
)
def test_no_room_for_states_is_met_before_the_first_step(make: Callable[[int], tuple[int, int]], make_stack: MakeStack):
    """The disk's file system, or the level itself, is full when states are reserved: the model goes on without them."""
    plain, model = Odd(), Odd()
    total = sum(param.numel() for param in model.parameters())
    host, disk = make(total)
    stack = make_stack(2 << 20, host, disk)
    enable_vgpu_stack_optimization(model, stack, placement="streamed", update="device", compute_dtype=BF16)
    before = [level.used_bytes for level in stack.levels[1:]]
    break_disk(stack, "posix_fallocate", 1, errno.ENOSPC)
    for _ in range(2):
        with pytest.raises(InsufficientMemory, match="full|lower levels have"):
            VGPUAdamW(model.parameters())
        assert [level.used_bytes for level in stack.levels[1:]] == before
    exported = {name: state["weight"] for name, state in export_state(model)}
    assert all(torch.equal(exported[name], param) for name, param in plain.named_parameters())
    level = stack.levels[2]
    assert isinstance(level, DiskLevel)
    level._file.calls = os
    if disk > 1 << 20:
        train(model, VGPUAdamW(model.parameters(), lr=3e-3), range(2))
        assert on_disk(stack) > 0


def test_what_passes_through_ram_is_counted_or_refused_with_both_numbers(make_stack: MakeStack):
    """A host level that holds neither the ranges nor what they are worked on in: nothing is taken outside its cap."""
    model, stack = Odd(), make_stack(2 << 20, 256 << 10)
    with pytest.raises(InsufficientMemory, match=r"pass through RAM.*raise host_memory") as refused:
        enable_vgpu_stack_optimization(model, stack, compute_dtype=torch.bfloat16, placement="streamed", update="host")
        VGPUAdamW(model.parameters())
    assert refused.value.needed_bytes > refused.value.available_bytes > 0


def test_weights_leave_the_ram_that_an_update_on_the_host_works_in(
    make_stack: MakeStack, monkeypatch: pytest.MonkeyPatch
):
    """Wherever the end of RAM is among the ranges: gradients spill, too, and no update works outside the cap."""
    stage = Storage._stage

    def counted(storage: Storage, kind: str, num_bytes: int) -> torch.Tensor:
        assert kind in storage._staging, f"{num_bytes} bytes of {kind} would be outside the cap"
        return stage(storage, kind, num_bytes)

    monkeypatch.setattr(Storage, "_stage", counted)
    for host_kib in range(192, 420, 48):
        model = Decoder(DecoderConfig(300, 32, 64, 3, 2, max_position=64), device="cpu")
        stack = make_stack(128 << 10, host_kib << 10)
        enable_vgpu_stack_optimization(model, stack, placement="streamed", update="host")
        optimizer = VGPUAdamW(model.parameters())
        assert on_disk(stack) > 0
        model(torch.arange(24).view(2, 12)).sum().backward()
        optimizer.step()
        release(model)


def test_ranges_that_find_no_stage_are_not_reserved(make_stack: MakeStack, monkeypatch: pytest.MonkeyPatch):
    model, stack = placed(Odd(), EXACT, make_stack, disk=True)
    before, reserve = [level.used_bytes for level in stack.levels], stack.reserve

    def fragmented(name: str, num_bytes: int, level: int) -> Any:
        if name.endswith("/staging/exp_avg"):
            raise InsufficientMemory("not in one piece", needed_bytes=num_bytes, available_bytes=0)
        return reserve(name, num_bytes, level)

    with monkeypatch.context() as patch:
        patch.setattr(stack, "reserve", fragmented)
        with pytest.raises(InsufficientMemory, match="one piece"):
            VGPUAdamW(model.parameters())
    assert [level.used_bytes for level in stack.levels] == before
    train(model, VGPUAdamW(model.parameters(), lr=3e-3), range(1))
