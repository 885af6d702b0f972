"""What goes wrong in the middle leaves no trace:
failed loads, interrupted forwards, late workers, reads that look like writes.
"""

from __future__ import annotations

import copy
import signal
import threading
from collections.abc import Callable, Iterator
from concurrent.futures import Future
from contextlib import suppress
from types import SimpleNamespace
from typing import Any

import pytest
import torch
from torch import nn

from tests.offload.conftest import MakeStack
from tests.offload.models import CASES, build, equal
from vblackwell.errors import ConfigurationError, DiskError, InsufficientMemory, StaleTensor, Unsupported
from vblackwell.memory.cache.stack import VGPUStack
from vblackwell.memory.transfer import DoneTransfer, FutureTransfer
from vblackwell.offload import sliced
from vblackwell.offload.api import enable_vgpu_stack_optimization, offload_of, release
from vblackwell.offload.engine import Offload
from vblackwell.offload.movement.state import GradientBuffer, set_worker_delay
from vblackwell.offload.optimizer import VGPUAdamW, clip_grad_norm_
from vblackwell.offload.parameters import UsedParameters
from vblackwell.offload.state import export_state
from vblackwell.offload.storage.initialize import ModelSource

MLP = CASES[0]
LEVEL0 = 128 << 10


def engine_of(model: nn.Module) -> Offload:
    engine = offload_of(model)
    assert isinstance(engine, Offload)
    return engine


def step(model: nn.Module, optimizer: torch.optim.Optimizer, seed: int) -> float:
    loss = MLP.loss(model, seed)
    loss.backward()
    optimizer.step()
    optimizer.zero_grad()
    return loss.item()


@pytest.fixture
def late_worker() -> Iterator[None]:
    """Every task of the worker starts late, so whatever does not wait for it overtakes it."""
    pause = threading.Event()
    set_worker_delay(lambda: (pause.wait(0.02), None)[1])
    yield
    set_worker_delay(None)


def test_reading_into_an_average_writes_nothing(make_stack: MakeStack):
    wide, model = build(MLP), build(MLP)
    enable_vgpu_stack_optimization(model, make_stack(LEVEL0), compute_dtype=torch.bfloat16)
    average = torch.zeros(7, 48)
    loss = model(torch.randn(2, 48).bfloat16()).float().sum()
    with torch.no_grad():
        average.lerp_(model.head.weight.float(), 0.1)
        average.add_(model.head.weight)
    loss.backward()  # nothing was changed, so nothing is stale
    masters = {name: state["weight"] for name, state in export_state(model)}
    assert all(torch.equal(masters[name], param) for name, param in wide.named_parameters())


class WritesItself(nn.Module):
    """Changes parameters inside its own forward, where they are plain."""

    def __init__(self) -> None:
        super().__init__()
        self.embedding = nn.Embedding(32, 48, max_norm=1.0)
        self.layers = nn.ModuleList(nn.Linear(48, 48) for _ in range(3))
        self.gain = nn.Parameter(torch.full((48,), 5.0))

    def forward(self, tokens: torch.Tensor) -> torch.Tensor:
        with torch.no_grad():
            self.gain.clamp_(-1.0, 1.0)
        x = self.embedding(tokens) * self.gain
        for layer in self.layers:
            x = torch.tanh(layer(x))
        return x.square().mean()


def test_what_a_forward_writes_reaches_the_storage(make_stack: MakeStack):
    torch.manual_seed(0)
    plain = WritesItself()
    model = copy.deepcopy(plain)
    enable_vgpu_stack_optimization(model, make_stack(32 << 10))
    ours, theirs = VGPUAdamW(model.parameters()), torch.optim.AdamW(plain.parameters(), fused=True)
    tokens = torch.arange(16)
    for _ in range(3):
        for module, optimizer in ((model, ours), (plain, theirs)):
            module(tokens).backward()
            optimizer.step()
            optimizer.zero_grad()
    assert equal(model, plain)


class WritesData(nn.Module):
    """Changes parameters through ``data``, which autograd does not count, before and after it reads them."""

    def __init__(self, write: Callable[[torch.Tensor], object]) -> None:
        super().__init__()
        self.layers = nn.ModuleList(nn.Linear(48, 48) for _ in range(3))
        self.gain = nn.Parameter(torch.full((48,), 5.0))
        self.write = write

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        self.write(self.gain)
        for layer in self.layers:
            x = torch.tanh(layer(x)) * self.gain
        self.write(self.gain)
        return x.square().mean()


@pytest.mark.parametrize(
    "write",
    [
        lambda gain: gain.data.clamp_(-0.5, 0.5),
        lambda gain: gain.data[3:].mul_(0.5),
        lambda gain: gain.data.view(6, 8)[1].fill_(0.25),
    ],
)
@pytest.mark.parametrize("inference", [False, True])
def test_what_a_forward_writes_through_data_reaches_the_storage(
    write: Callable[[torch.Tensor], object], inference: bool, make_stack: MakeStack
):
    torch.manual_seed(0)
    plain = WritesData(write)
    model = copy.deepcopy(plain)
    enable_vgpu_stack_optimization(model, make_stack(32 << 10))
    ours, theirs = VGPUAdamW(model.parameters()), torch.optim.AdamW(plain.parameters(), fused=True)
    x = torch.randn(4, 48)
    for _ in range(3):
        for module, optimizer in ((model, ours), (plain, theirs)):
            with torch.inference_mode(inference):
                module(x)
            module(x).backward()
            optimizer.step()
            optimizer.zero_grad()
    assert equal(model, plain)


def test_replacing_data_inside_a_forward_is_refused(make_stack: MakeStack):
    def replace(gain: torch.Tensor) -> None:
        gain.data = gain.data.clamp(-0.5, 0.5)

    model = WritesData(replace)
    enable_vgpu_stack_optimization(model, make_stack(32 << 10))
    with pytest.raises(Unsupported, match="'gain'.*copy into it"):
        model(torch.randn(4, 48))


def test_a_copy_made_inside_a_forward_is_plain(make_stack: MakeStack):
    copies: list[nn.Parameter] = []
    model = WritesData(lambda gain: copies.append(copy.deepcopy(gain)))
    enable_vgpu_stack_optimization(model, make_stack(32 << 10))
    model(torch.randn(4, 48))
    assert type(copies[0]) is nn.Parameter and torch.equal(copies[0], model.gain)


def test_a_late_worker_is_not_overtaken(late_worker: None, make_stack: MakeStack):
    plain, model = build(MLP), build(MLP)
    enable_vgpu_stack_optimization(model, make_stack(1 << 20), placement="streamed")  # all groups stay loaded
    ours, theirs = VGPUAdamW(model.parameters()), torch.optim.AdamW(plain.parameters(), fused=True)
    for module, optimizer in ((model, ours), (plain, theirs)):
        clip = clip_grad_norm_ if module is model else torch.nn.utils.clip_grad_norm_
        MLP.loss(module, 0).backward()
        clip(module.parameters(), 1e-3)
        optimizer.zero_grad()  # clipped, then given up
        first, second = MLP.loss(module, 1), MLP.loss(module, 2)
        first.backward()
        MLP.loss(module, 3).backward()
        optimizer.zero_grad()  # summed, then given up
        second.backward()
        optimizer.step()
    assert equal(model, plain)


@pytest.mark.parametrize("narrow", [torch.bfloat16, torch.float16])
def test_clipping_and_zeroing_narrow_gradients(narrow: torch.dtype, make_stack: MakeStack):
    model = build(MLP)
    enable_vgpu_stack_optimization(model, make_stack(LEVEL0), compute_dtype=narrow)
    optimizer = VGPUAdamW(model.parameters(), max_grad_norm=float("inf"))
    x = torch.randn(4, 48).to(narrow)
    model(x).float().square().sum().backward()
    norm = clip_grad_norm_(model, 0.25)
    assert norm > 0.25
    optimizer.step()
    assert optimizer.grad_norm == pytest.approx(0.25, rel=1e-4)  # fp32 products of 1e4 elements
    optimizer.zero_grad(set_to_none=False)
    optimizer.step()
    assert optimizer.grad_norm == 0.0


def test_a_failed_load_is_an_error_each_time_and_never_numbers(make_stack: MakeStack, monkeypatch: pytest.MonkeyPatch):
    plain, model = build(MLP), build(MLP)
    stack = make_stack(LEVEL0)
    enable_vgpu_stack_optimization(model, stack)
    read, failures = VGPUStack.read, iter([True, True])

    class Failing(DoneTransfer):
        def wait(self) -> None:
            raise OSError("the disk said no")

        def wait_on(self, stream: object) -> None:
            self.wait()

    def fail(self: VGPUStack, reservation: object, out: torch.Tensor) -> object:
        return Failing() if next(failures, False) else read(self, reservation, out)  # type: ignore[arg-type]

    monkeypatch.setattr(VGPUStack, "read", fail)
    for _ in range(2):
        with pytest.raises(OSError, match="the disk said no"):
            MLP.loss(model, 0)
    assert MLP.loss(model, 0).item() == MLP.loss(plain, 0).item()
    optimizer, reference = VGPUAdamW(model.parameters()), torch.optim.AdamW(plain.parameters(), fused=True)
    assert step(model, optimizer, 1) == step(plain, reference, 1)
    assert equal(model, plain)


def test_a_write_that_the_storage_refuses_leaves_the_group_free(make_stack: MakeStack, monkeypatch: pytest.MonkeyPatch):
    model, stack = build(MLP), make_stack(LEVEL0)
    enable_vgpu_stack_optimization(model, stack, placement="streamed", update="host")
    optimizer, engine = VGPUAdamW(model.parameters()), engine_of(model)
    before = model.head.weight.detach().clone()

    def refuse(*_: object) -> None:
        raise DiskError("the disk is full")

    with monkeypatch.context() as patch, torch.no_grad(), pytest.raises(DiskError, match="is full"):
        patch.setattr(stack, "write", refuse)
        model.head.weight.mul_(2)
    assert not any(map(engine.weights.is_pinned, engine.groups))
    assert torch.equal(model.head.weight.detach(), before)
    step(model, optimizer, 0)
    release(model)
    assert offload_of(model) is None and not any(level.used_bytes for level in stack.levels)


def test_an_interrupted_forward_is_given_up(make_stack: MakeStack):
    plain, model = build(MLP), build(MLP)
    enable_vgpu_stack_optimization(model, make_stack(LEVEL0))
    optimizer, reference = VGPUAdamW(model.parameters()), torch.optim.AdamW(plain.parameters(), fused=True)

    def interrupt(*_: object) -> None:
        raise KeyboardInterrupt

    handle = model.layers[2][1].register_forward_hook(interrupt)
    with pytest.raises(KeyboardInterrupt):
        MLP.loss(model, 0)
    handle.remove()
    for seed in (1, 2):
        assert step(model, optimizer, seed) == step(plain, reference, seed)
    assert equal(model, plain)
    assert not any(engine_of(model).weights.is_pinned(group) for group in engine_of(model).groups)


def test_a_model_can_be_released_after_an_interrupted_forward(make_stack: MakeStack):
    plain, model = build(MLP), build(MLP)
    stack = make_stack(LEVEL0)
    enable_vgpu_stack_optimization(model, stack)
    optimizer, reference = VGPUAdamW(model.parameters()), torch.optim.AdamW(plain.parameters(), fused=True)
    assert step(model, optimizer, 0) == step(plain, reference, 0)

    def interrupt(*_: object) -> None:
        raise KeyboardInterrupt

    handle = model.layers[2][1].register_forward_hook(interrupt)
    with pytest.raises(KeyboardInterrupt):
        MLP.loss(model, 1)
    handle.remove()
    release(model)
    assert offload_of(model) is None and type(model.head.weight) is nn.Parameter
    assert not any(level.used_bytes for level in stack.levels)
    for seed in (1, 2):
        assert step(model, optimizer, seed) == step(plain, reference, seed)
    assert equal(model, plain)


def test_release_while_another_thread_is_in_a_forward_is_refused(make_stack: MakeStack):
    plain, model = build(MLP), build(MLP)
    enable_vgpu_stack_optimization(model, make_stack(LEVEL0))
    inside, go_on, losses = threading.Event(), threading.Event(), list[float]()

    def pause(*_: object) -> None:
        inside.set()
        go_on.wait(240)

    handle = model.layers[2][1].register_forward_hook(pause)
    thread = threading.Thread(target=lambda: losses.append(MLP.loss(model, 1).item()))
    thread.start()
    assert inside.wait(240)
    try:
        with pytest.raises(ConfigurationError, match=r"layers\.2.*another thread"):
            release(model)
    finally:
        go_on.set()
        thread.join()
    handle.remove()
    assert losses == [MLP.loss(plain, 1).item()]
    release(model)
    assert equal(model, plain)


def test_a_state_dict_that_raises_leaves_no_stale_read(make_stack: MakeStack, monkeypatch: pytest.MonkeyPatch):
    plain, model = build(CASES[2]).eval(), build(CASES[2]).eval()  # GPT-2, whose head is tied
    enable_vgpu_stack_optimization(model, make_stack(LEVEL0))
    optimizer, reference = VGPUAdamW(model.parameters()), torch.optim.AdamW(plain.parameters(), fused=True)

    def fail(*_: object) -> None:
        raise OSError("the disk is full")

    for module in (model.lm_head, model.transformer.h[1].mlp):
        handle = module._register_state_dict_hook(fail)
        for each in (model, plain):
            each(input_ids=torch.arange(9)[None]).logits.square().mean().backward()
        with pytest.raises(OSError, match="full"):
            model.state_dict()
        handle.remove()
        for each in (optimizer, reference):
            each.step()
            each.zero_grad()
        for ours, theirs in zip(model.parameters(), plain.parameters(), strict=True):
            read = ours.detach()
            assert torch.equal(read, theirs)
            with pytest.raises(StaleTensor):  # a view of level 0, not a copy that would take the write
                read.zero_()
        found, wanted = model.state_dict(), plain.state_dict()
        assert all(torch.equal(found[name], wanted[name]) for name in wanted)
        assert found["lm_head.weight"].data_ptr() == found["transformer.wte.weight"].data_ptr()


def test_another_thread_may_prefetch_while_the_model_trains(make_stack: MakeStack):
    plain, model = build(MLP), build(MLP)
    stack = make_stack(LEVEL0)
    enable_vgpu_stack_optimization(model, stack)
    optimizer, reference = VGPUAdamW(model.parameters()), torch.optim.AdamW(plain.parameters(), fused=True)
    over, raised = threading.Event(), list[BaseException]()

    def prefetch() -> None:
        try:
            while not over.is_set():
                for layer in model.layers:
                    stack.prefetch([layer[0].weight, "model/head"])
        except BaseException as error:
            raised.append(error)

    thread = threading.Thread(target=prefetch)
    thread.start()
    try:
        losses = [step(model, optimizer, seed) for seed in range(5)]
    finally:
        over.set()
        thread.join()
    assert not raised
    assert losses == [step(plain, reference, seed) for seed in range(5)] and equal(model, plain)


def test_what_another_thread_prefetched_is_loaded_at_the_next_use(make_stack: MakeStack):
    model = build(MLP)
    stack = make_stack(LEVEL0)
    enable_vgpu_stack_optimization(model, stack, placement="streamed")
    thread = threading.Thread(target=lambda: stack.prefetch(["model/head"]))
    thread.start()
    thread.join()
    weights = engine_of(model).weights
    head = next(group for group in engine_of(model).groups if group.name == "head")
    assert not weights.is_loaded(head) and list(weights.asked) == [head]
    assert model.layers[0][0].bias[0].item() is not None
    assert weights.is_loaded(head) and not weights.asked


def test_a_failed_backward_leaves_no_half_gradient(make_stack: MakeStack):
    plain, model = build(MLP), build(MLP)
    enable_vgpu_stack_optimization(model, make_stack(LEVEL0))
    optimizer, reference = VGPUAdamW(model.parameters()), torch.optim.AdamW(plain.parameters(), fused=True)

    def fail(_: torch.Tensor) -> None:
        raise ValueError("in the middle")

    handle = model.layers[1][0].weight.register_hook(fail)  # between the bias and the weight of one group
    with pytest.raises(ValueError, match="in the middle"):
        MLP.loss(model, 0).backward()
    handle.remove()
    model.zero_grad()
    assert step(model, optimizer, 1) == step(plain, reference, 1)
    assert equal(model, plain)


def test_a_refused_accumulation_keeps_nothing_of_level_0(make_stack: MakeStack):
    model = build(MLP)
    narrow = sum(param.numel() for param in model.parameters())
    stack = make_stack(
        LEVEL0, host_bytes=int(9.5 * narrow), disk_bytes=64 << 10
    )  # weights, gradients, masters, and no more
    enable_vgpu_stack_optimization(model, stack, compute_dtype=torch.bfloat16)
    x = torch.randn(4, 48).bfloat16()
    model(x).float().sum().backward()
    engine = engine_of(model)
    for _ in range(3):
        with pytest.raises(InsufficientMemory, match="raise host_memory"):
            model(x).float().sum().backward()
        model.zero_grad()
        engine.finish()
        engine.weights.drop_all()
        assert stack.levels[0].used_bytes == 0
        model(x).float().sum().backward()


@pytest.mark.parametrize("kept", [False, True])
def test_host_memory_that_the_worker_is_about_to_give_back_is_waited_for(
    kept: bool, late_worker: None, make_stack: MakeStack, monkeypatch: pytest.MonkeyPatch
):
    """Sums under way on a GPU: their copies are over, their memory is not free yet, and there is no other. ``kept``: it
    is what announced sums have from the beginning, so that what is left need not be in one piece.
    """

    class OnGpu:
        device = SimpleNamespace(type="cuda")

        def __init__(self, bytes_there: torch.Tensor) -> None:
            self.bytes_there = bytes_there

    model = build(MLP)
    stack = make_stack(4 << 20, host_bytes=1 << 20, disk_bytes=4 << 20)
    enable_vgpu_stack_optimization(model, stack, placement="streamed")
    MLP.loss(model, 0).backward()
    engine = engine_of(model)
    engine.worker.drain()
    write, group, storage = VGPUStack.write, engine.groups[0], engine.storage
    before = storage.range(group, "gradient").view()
    assert before is not None
    first = before.clone()
    monkeypatch.setattr(
        VGPUStack, "write", lambda self, target, source: write(self, target, getattr(source, "bytes_there", source))
    )
    storage.reserve([], incoming_bytes=kept * group.num_bytes)
    room = storage.take_host("incoming", group.num_bytes)
    with pytest.raises(InsufficientMemory):
        while True:
            storage.take_host("everything else", 4096)
    if not kept:
        storage.give(room)  # room for one
    for _ in range(3):
        reservation = storage.take("leaving", group.num_bytes, 0)
        view = reservation.view()
        assert view is not None
        view.copy_(first)
        slots = dict.fromkeys(group.slots)
        leaving = GradientBuffer(group, reservation, OnGpu(view), len(group.slots), slots)  # type: ignore[arg-type]
        engine.gradients._send_to_sum(leaving, ())
    engine.worker.drain()
    for slot in group.slots:  # twice, three times, and four times a number, in the order of the sum
        once = slot.flat(first)
        assert torch.equal(slot.flat(before), ((once + once) + once) + once)


def test_gradients_from_before_are_refused(make_stack: MakeStack):
    model = build(MLP)
    MLP.loss(model, 0).backward()
    with pytest.raises(ConfigurationError, match="zero_grad"):
        enable_vgpu_stack_optimization(model, make_stack(LEVEL0))
    model.zero_grad()
    enable_vgpu_stack_optimization(model, make_stack(LEVEL0))


def test_a_second_model_finds_the_room_that_the_first_only_keeps(make_stack: MakeStack):
    stack = make_stack(96 << 10)
    first, second = build(MLP), build(MLP)
    enable_vgpu_stack_optimization(first, stack, "first")
    MLP.loss(first, 0)
    enable_vgpu_stack_optimization(second, stack, "second")
    assert MLP.loss(first, 1).item() == MLP.loss(second, 1).item()


def test_what_a_closed_level_dropped_stops_nobody_who_gives_everything_back(make_stack: MakeStack):
    model, stack = build(MLP), make_stack(96 << 10)
    enable_vgpu_stack_optimization(model, stack)
    dropped: Future[None] = Future()
    assert dropped.cancel()
    engine = offload_of(model)
    assert engine is not None
    engine.storage.in_flight.add(FutureTransfer([dropped]))
    release(model)
    assert not engine.storage.in_flight and not any(level["used_bytes"] for level in stack.get_stats()["levels"])


def test_an_update_that_fails_at_the_end_keeps_no_byte(make_stack: MakeStack, monkeypatch: pytest.MonkeyPatch):
    model, stack = build(MLP), make_stack(LEVEL0)
    enable_vgpu_stack_optimization(model, stack, placement="streamed", update="device")
    optimizer, engine = VGPUAdamW(model.parameters()), engine_of(model)
    step(model, optimizer, 0)
    monkeypatch.setattr(engine.level0._lane, "drain", breaking)
    with pytest.raises(Broken):
        engine.close()
    assert not any(level.used_bytes for level in stack.levels) and not stack.prefetchers


class Broken(Exception):
    pass


def breaking(*args: object, **options: object) -> None:
    raise Broken


def failing_after(calls: int, real: Callable[..., object]) -> Callable[..., object]:
    """``real``, which raises from a call on."""
    left = iter(range(calls))

    def call(*args: object, **options: object) -> object:
        if next(left, None) is None:
            raise Broken
        return real(*args, **options)

    return call


@pytest.mark.parametrize(("where", "sum_already"), [("write", False), ("submit", False), ("submit", True)])
def test_a_gradient_that_cannot_leave_keeps_nothing(
    make_stack: MakeStack, monkeypatch: pytest.MonkeyPatch, where: str, sum_already: bool
):
    model, stack = build(MLP), make_stack(LEVEL0)
    enable_vgpu_stack_optimization(model, stack, compute_dtype=torch.bfloat16, placement="streamed")
    engine = engine_of(model)
    VGPUAdamW(model.parameters())
    x = torch.randn(4, 48).bfloat16()
    for _ in range(2):
        model(x).float().sum().backward()
    engine.finish()
    engine.weights.drop_all()
    before = [level.used_bytes for level in stack.levels]
    if not sum_already:
        model.zero_grad()
        engine.finish()
    loss = model(x).float().sum()
    with monkeypatch.context() as patch:
        patch.setattr(*{"write": (stack, "write"), "submit": (engine.worker, "submit")}[where], breaking)
        with pytest.raises(Broken):
            loss.backward()
    engine.finish()
    engine.weights.drop_all()
    assert [level.used_bytes for level in stack.levels] == before
    model.zero_grad()
    model(x).float().sum().backward()


@pytest.mark.parametrize("where", ["write", "submit"])
def test_a_gradient_that_a_gpu_cannot_send_to_its_sum_keeps_no_host_memory(
    make_stack: MakeStack, monkeypatch: pytest.MonkeyPatch, where: str
):
    model, stack = build(MLP), make_stack(LEVEL0)
    enable_vgpu_stack_optimization(model, stack, compute_dtype=torch.bfloat16, placement="streamed")
    engine, group = engine_of(model), engine_of(model).groups[0]
    reservation = engine.storage.take("leaving", group.num_bytes, 0)
    on_gpu = SimpleNamespace(device=torch.device("cuda", 0))
    slots = dict.fromkeys(group.slots)
    leaving = GradientBuffer(group, reservation, on_gpu, len(group.slots), slots)  # type: ignore[arg-type]
    before = stack.levels[1].used_bytes
    monkeypatch.setattr(stack, "write", lambda target, source: DoneTransfer())
    monkeypatch.setattr(*{"write": (stack, "write"), "submit": (engine.worker, "submit")}[where], breaking)
    with pytest.raises(Broken):
        engine.gradients._send_to_sum(leaving, ())
    assert stack.levels[1].used_bytes == before


def test_weights_that_cannot_be_loaded_keep_nothing_of_level_0(make_stack: MakeStack, monkeypatch: pytest.MonkeyPatch):
    model, stack = build(MLP), make_stack(LEVEL0)
    enable_vgpu_stack_optimization(model, stack, placement="streamed")
    with monkeypatch.context() as patch:
        patch.setattr(stack, "read", breaking)
        with pytest.raises(Broken):
            MLP.loss(model, 0)
    engine_of(model).weights.drop_all()
    assert stack.levels[0].used_bytes == 0
    MLP.loss(model, 0).backward()


@pytest.mark.parametrize("loads", [0, 1])
def test_slices_that_cannot_be_loaded_keep_nothing_of_level_0(
    make_stack: MakeStack, monkeypatch: pytest.MonkeyPatch, loads: int
):
    model, stack = nn.Sequential(nn.Embedding(4096, 16)), make_stack(64 << 10)
    enable_vgpu_stack_optimization(model, stack, placement="streamed")
    assert engine_of(model).summary()["sliced"]
    with monkeypatch.context() as patch:
        patch.setattr(sliced, "start_copy", failing_after(loads, sliced.start_copy))
        with pytest.raises(Broken):
            model(torch.arange(4096))
    assert stack.levels[0].used_bytes == 0
    model(torch.arange(4096)).sum().backward()


@pytest.mark.parametrize("part", ["register_forward_hook", "hide", "take_over"])
def test_a_model_that_cannot_enter_is_what_it_was(make_stack: MakeStack, monkeypatch: pytest.MonkeyPatch, part: str):
    model, stack = build(MLP), make_stack(LEVEL0)
    params = {name: (param, param.detach().clone()) for name, param in model.named_parameters()}
    owner = {"register_forward_hook": nn.Module, "hide": UsedParameters, "take_over": ModelSource}[part]
    with monkeypatch.context() as patch:
        patch.setattr(owner, part, failing_after(0 if part == "take_over" else 1, getattr(owner, part)))
        with pytest.raises(Broken):
            enable_vgpu_stack_optimization(model, stack, placement="streamed", activations="host")
    assert offload_of(model) is None and not stack.prefetchers
    assert all(level.used_bytes == 0 for level in stack.levels)
    for name, param in model.named_parameters():
        assert param is params[name][0] and type(param) is nn.Parameter and torch.equal(param, params[name][1])
    assert not any(module._forward_pre_hooks or module._forward_hooks for module in model.modules())
    enable_vgpu_stack_optimization(model, stack, placement="streamed", activations="host")
    MLP.loss(model, 0).backward()


def interrupted_after(calls: int, real: Callable[..., object]) -> Callable[..., object]:
    """``real``, after which the user presses Ctrl-C when it has done a call more than ``calls``."""
    left = iter(range(calls + 1))

    def call(*args: object, **options: object) -> object:
        found, more = real(*args, **options), next(left, None)
        if more == calls:
            signal.raise_signal(signal.SIGINT)
        return found

    return call


@pytest.mark.parametrize("calls", [0, 1])
@pytest.mark.parametrize("what", ["a load", "a gradient", "an addition", "a slice's load", "a slice's gradient"])
def test_ctrl_c_right_after_something_was_begun_keeps_nothing_and_overwrites_nothing(
    make_stack: MakeStack, monkeypatch: pytest.MonkeyPatch, what: str, calls: int
):
    """The copy, or the worker's task, is under way: what it uses must not be anybody else's yet."""
    sliced_leaf = what.startswith("a slice")
    plain = nn.Sequential(nn.Embedding(4096, 16)) if sliced_leaf else build(MLP)
    model, stack = copy.deepcopy(plain), make_stack(64 << 10 if sliced_leaf else LEVEL0)
    enable_vgpu_stack_optimization(model, stack, placement="streamed")
    engine = engine_of(model)

    def loss_of(module: nn.Module) -> torch.Tensor:
        return module(torch.arange(4096)).square().sum() if sliced_leaf else MLP.loss(module, 0)

    if what == "an addition":
        loss_of(model).backward()
    loss = None if what.endswith("load") else loss_of(model)
    place: tuple[Any, str] = {
        "a load": (stack, "read"),
        "a gradient": (stack, "write"),
        "a slice's load": (sliced, "start_copy"),
    }.get(what, (engine.worker, "submit"))
    with monkeypatch.context() as patch, pytest.raises(KeyboardInterrupt):
        patch.setattr(*place, interrupted_after(calls, getattr(*place)))
        (loss_of(model) if loss is None else loss).backward()
    engine.finish()
    engine.weights.drop_all()
    assert stack.levels[0].used_bytes == 0
    model.zero_grad()
    for module in (plain, model):
        loss_of(module).backward()
    grads = [[param.grad.cpu() for param in module.parameters()] for module in (plain, model)]
    assert all(torch.equal(ours, theirs) for ours, theirs in zip(*grads, strict=True))


@pytest.mark.parametrize("which", ["_land", "_add"])
@pytest.mark.parametrize("update_in_backward", [False, True])
def test_a_gradient_that_failed_to_arrive_is_not_stepped_with(
    which: str, update_in_backward: bool, make_stack: MakeStack, monkeypatch: pytest.MonkeyPatch
):
    """A caller that catches the failure and goes on: refused until gradients are given up, and right from then on."""
    plain = build(MLP)
    model = enable_vgpu_stack_optimization(copy.deepcopy(plain), make_stack(128 << 10), placement="streamed")
    options: dict[str, Any] = {"update_in_backward": update_in_backward, "accumulation_steps": 2}
    ours, theirs = VGPUAdamW(model.parameters(), **options), torch.optim.AdamW(plain.parameters(), fused=True)
    engine = offload_of(model)
    assert isinstance(engine, Offload)
    original = getattr(engine.gradients, which)
    failing = [True]

    def fail_once(*args: Any, **kwargs: Any) -> Any:
        if failing.pop() if failing else False:
            raise OSError("the disk said no")
        return original(*args, **kwargs)

    monkeypatch.setattr(engine.gradients, which, fail_once)
    with pytest.raises(OSError, match="said no"):
        for seed in range(2):
            MLP.loss(model, seed).backward()
        engine.finish()
    for _ in range(2):
        with pytest.raises((StaleTensor, OSError), match="incomplete.*zero_grad|said no"):
            ours.step()
    while True:  # each failure is raised once, where it is seen first
        try:
            ours.zero_grad()
            break
        except OSError:
            continue
    for seed in range(2, 4):
        MLP.loss(model, seed).backward()
        MLP.loss(plain, seed).backward()
    ours.step()
    theirs.step()
    ours.zero_grad()
    assert all(torch.equal(a, b) for a, b in zip(model.parameters(), plain.parameters(), strict=True))


def test_a_model_of_which_an_update_failed_is_not_trained_or_saved(
    make_stack: MakeStack, monkeypatch: pytest.MonkeyPatch
):
    model = enable_vgpu_stack_optimization(build(MLP), make_stack(128 << 10), placement="streamed")
    optimizer = VGPUAdamW(model.parameters())
    engine = offload_of(model)
    assert isinstance(engine, Offload)
    MLP.loss(model, 0).backward()

    def fail(*args: Any) -> None:
        raise OSError("the disk said no")

    monkeypatch.setattr(engine.host_updates, "apply", fail)
    with pytest.raises(OSError, match="said no"):
        optimizer.step()
        engine.finish()
    monkeypatch.undo()
    for use in (optimizer.step, model.state_dict, optimizer.state_dict):
        for _ in range(8):  # other groups' updates failed, too, and are raised once each
            with pytest.raises((StaleTensor, OSError)) as error:
                use()
            if error.type is StaleTensor:
                break
        assert error.match("some of its groups are a step behind others: go on from a checkpoint")


def fail() -> None:
    raise OSError("the disk said no")


def test_an_early_update_is_undone_although_another_failure_came_first(make_stack: MakeStack):
    """The failure is raised instead of the rollback, which the next call must make up for."""
    plain, model = build(MLP), build(MLP)
    enable_vgpu_stack_optimization(model, make_stack(LEVEL0), placement="streamed", update="host")
    engine = engine_of(model)
    ours = VGPUAdamW(model.parameters(), update_in_backward=True)
    theirs = torch.optim.AdamW(plain.parameters(), fused=True)
    MLP.loss(model, 0).backward()
    engine.worker.submit(fail).exception()
    with pytest.raises(OSError, match="said no"):
        ours.zero_grad()
    ours.zero_grad()
    assert equal(model, plain)
    assert step(model, ours, 1) == step(plain, theirs, 1)
    assert equal(model, plain)


def test_an_early_update_that_cannot_begin_keeps_no_shadows(make_stack: MakeStack):
    model, stack = build(MLP), make_stack(LEVEL0)
    enable_vgpu_stack_optimization(model, stack, placement="streamed", update="host")
    engine = engine_of(model)
    VGPUAdamW(model.parameters(), update_in_backward=True)
    engine.step_control._make_room()  # which takes its bytes once
    group, before = engine.groups[0], stack.levels[1].used_bytes
    failed = engine.worker.submit(fail, group=group.index)
    failed.exception()
    engine.states[group].update_end = failed
    with pytest.raises(OSError, match="said no"):
        engine.step_control._start_early(group, None)
    assert stack.levels[1].used_bytes == before


def test_a_committed_update_that_fails_leaves_what_the_group_was(make_stack: MakeStack):
    """Its step came while it waited for the worker: no half-written shadow is read, and no further step is made."""
    model = enable_vgpu_stack_optimization(build(MLP), make_stack(LEVEL0), placement="streamed", update="host")
    optimizer = VGPUAdamW(model.parameters(), update_in_backward=True)
    engine, go = engine_of(model), threading.Event()
    before = {name: held["weight"] for name, held in export_state(model)}
    apply = engine.host_updates.apply

    def fail(update: Any) -> None:
        go.wait(60)
        apply(update)
        for each in update.shadows.values():
            each.bytes.fill_(0xFF)
        raise OSError("the disk said no")

    engine.host_updates.apply = fail
    MLP.loss(model, 0).backward()
    optimizer.step()
    go.set()
    with pytest.raises(OSError, match="said no"):
        engine.finish()
    for use in (optimizer.step, model.state_dict):
        with pytest.raises(StaleTensor, match="a step behind others"):
            for _ in range(20):
                with suppress(OSError):
                    use()
    for slot in engine.slots():
        assert torch.equal(slot.view(engine.storage.open(slot.group, "weight")), before[slot.name]), slot.name
