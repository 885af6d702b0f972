"""The worker's tasks in any order that their groups allow: the same bits.

Whatever two groups share in secret (staging memory, a sum's host memory, records) would show here. Losses and weights
are compared, fp32 with plain PyTorch, bf16 with a run whose tasks keep the order in which they came.
"""

from __future__ import annotations

import random
import time
from collections.abc import Callable, Iterator
from concurrent.futures import ThreadPoolExecutor

import pytest
import torch
from torch import nn

from tests.delay import set_transfer_delay
from tests.offload.conftest import MakeStack
from tests.offload.models import CASES, build
from vblackwell.offload.api import enable_vgpu_stack_optimization, offload_of, release
from vblackwell.offload.movement import state as module
from vblackwell.offload.movement.state import Worker, set_worker_delay
from vblackwell.offload.movement.weights import WeightStreamer
from vblackwell.offload.optimizer import VGPUAdamW
from vblackwell.offload.step import StepControl

MLP = CASES[0]
STEPS = 4
Choose = Callable[[Worker], "module.Task"]


def allowed(worker: Worker) -> list[module.Task]:
    """The tasks that may come next: each the first of its group, none past one without a group."""
    found: dict[int | None, module.Task] = {}
    for task in worker._waiting:
        if task.group is None:
            return list(found.values()) or [task]
        found.setdefault(task.group, task)
    return list(found.values())


@pytest.fixture
def choose(monkeypatch: pytest.MonkeyPatch) -> Iterator[Callable[[int], None]]:
    """``choose(seed)``: tasks at random from now on, and pauses in the worker and in copies; 0: the oldest first."""
    import threading

    pause = threading.Event()
    passed: list[int] = []

    def begin(seed: int) -> None:
        chance, late = random.Random(seed), random.Random(seed)

        def pick(worker: Worker) -> module.Task:
            found = chance.choice(allowed(worker))
            passed.append(worker._waiting.index(found))
            return found

        def delay(*_: str) -> None:
            if late.random() < 0.5:  # often and long enough that tasks queue up
                pause.wait(late.random() * 4e-3)

        monkeypatch.setattr(Worker, "_choose", pick if seed else lambda worker: worker._waiting[0])
        set_transfer_delay(delay if seed else None)
        set_worker_delay(delay if seed else None)

    yield begin
    set_transfer_delay(None)
    set_worker_delay(None)
    assert max(passed) > 0, "no task passed another"


def norms(step: int, accumulation: int) -> float:
    """The limit of each step: some clip, others do not."""
    return [0.05, 1e3, 1e3][(step + accumulation) % 3]


def train(
    model: nn.Module, optimizer: torch.optim.Optimizer, accumulation: int
) -> tuple[list[float], list[torch.Tensor]]:
    """Losses, and the weights as they are in the end."""
    losses = []
    for step in range(STEPS):
        limit = norms(step, accumulation)
        if isinstance(optimizer, VGPUAdamW):
            optimizer.max_grad_norm = limit
        for micro in range(accumulation):
            loss = MLP.loss(model, 10 * step + micro)
            loss.backward()
            losses.append(loss.item())
        if not isinstance(optimizer, VGPUAdamW):
            torch.nn.utils.clip_grad_norm_(model.parameters(), limit)
        optimizer.step()
        if step % 3 == 1:
            optimizer.zero_grad(set_to_none=False)
        optimizer.zero_grad()
        if step % 3 == 2:  # a step that never comes
            MLP.loss(model, 500 + step).backward()
            optimizer.zero_grad()
    if isinstance(optimizer, VGPUAdamW):
        release(model)
    return losses, [param.detach().clone() for param in model.parameters()]


@pytest.mark.each_value
@pytest.mark.parametrize(
    ("accumulation", "in_backward", "place"), [(1, True, "host"), (1, True, 0.5), (2, True, 0.5), (2, False, "host")]
)
def test_any_order_gives_the_bits_of_pytorch(
    accumulation: int, in_backward: bool, place: str | float, choose: Callable[[int], None], make_stack: MakeStack
):
    plain = build(MLP)
    expected = train(plain, torch.optim.AdamW(plain.parameters(), fused=True), accumulation)
    for seed, host_bytes in (
        (1, 500 << 10),
        (2, 4 << 20),
    ):  # states and sums are staged from a disk, or updates start early
        choose(seed)
        model = build(MLP)
        enable_vgpu_stack_optimization(model, make_stack(128 << 10, host_bytes), update=place)
        engine = offload_of(model)
        engine.step_control.follow_clipping = False  # start steps early that then clip
        optimizer = VGPUAdamW(
            model.parameters(), max_grad_norm=1.0, update_in_backward=in_backward, accumulation_steps=accumulation
        )
        losses, weights = train(model, optimizer, accumulation)
        assert losses == expected[0], seed
        assert all(torch.equal(a, b) for a, b in zip(weights, expected[1], strict=True)), seed
    assert (engine.step_control.shadow_bytes > 0) == in_backward


@pytest.mark.parametrize("accumulation", [1, 2])
def test_any_order_gives_one_result_in_bf16(accumulation: int, choose: Callable[[int], None], make_stack: MakeStack):
    """Masters, sums of gradients in a separate range, and without undo gradients that land where weights were."""
    found = []
    for seed in (0, 1, 2):
        choose(seed)
        model = build(MLP)
        enable_vgpu_stack_optimization(
            model, make_stack(64 << 10, host_bytes=700 << 10), update="host", compute_dtype=torch.bfloat16
        )
        optimizer = VGPUAdamW(
            model.parameters(), update_in_backward=True, undo=accumulation > 1, accumulation_steps=accumulation
        )
        losses = []
        for step in range(STEPS):
            for micro in range(accumulation):
                x = torch.randn(16, 48, generator=torch.Generator().manual_seed(10 * step + micro))
                loss = model(x.bfloat16()).float().square().mean()
                loss.backward()
                losses.append(loss.item())
            optimizer.step()
            optimizer.zero_grad()
        release(model)
        found.append((losses, [param.detach().clone() for param in model.parameters()]))
    assert not any(torch.equal(a, b) for a, b in zip(found[0][1], build(MLP).parameters(), strict=True)), (
        "it was trained"
    )
    for losses, weights in found[1:]:
        assert losses == found[0][0]
        assert all(torch.equal(a, b) for a, b in zip(weights, found[0][1], strict=True))


# -- threads that run models on one stack ------------------------------------------------------------------------------


class Layers(nn.Module):
    def __init__(self, seed: int) -> None:
        super().__init__()
        torch.manual_seed(seed)
        self.layers = nn.ModuleList(nn.Linear(32, 32) for _ in range(6))

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        for layer in self.layers:
            x = torch.tanh(layer(x))
        return x


def losses_of(model: nn.Module, optimizer: torch.optim.Optimizer, seed: int) -> list[float]:
    found = []
    for step in range(6):
        x = torch.randn(4, 32, generator=torch.Generator().manual_seed(100 * seed + step))
        loss = model(x).square().mean()
        loss.backward()
        optimizer.step()
        optimizer.zero_grad()
        found.append(loss.item())
    return found


@pytest.fixture
def late_weights(monkeypatch: pytest.MonkeyPatch) -> None:
    """Threads meet in the middle of whatever changes what is loaded."""
    draw = random.Random(0)

    def late(change: Callable[..., object]) -> Callable[..., object]:
        def run(*args: object, **given: object) -> object:
            time.sleep(draw.random() * 4e-4)
            found = change(*args, **given)
            time.sleep(draw.random() * 4e-4)
            return found

        return run

    for name in ("drop", "_fits", "load", "_forget", "pin", "arrive", "invalidate"):
        monkeypatch.setattr(WeightStreamer, name, late(getattr(WeightStreamer, name)))
    for name in ("acquire", "unpack"):
        monkeypatch.setattr(StepControl, name, late(getattr(StepControl, name)))


@pytest.mark.parametrize("update_in_backward", [pytest.param(False, marks=pytest.mark.slow), True])
def test_threads_train_models_that_take_room_from_each_other(
    update_in_backward: bool, make_stack: MakeStack, late_weights: None
):
    wanted = []
    for seed in range(3):
        plain = Layers(seed)
        wanted.append(losses_of(plain, torch.optim.AdamW(plain.parameters(), fused=True), seed))
    stack = make_stack(30 << 10)  # of 25 KiB a model
    models = [
        enable_vgpu_stack_optimization(Layers(seed), stack, f"model {seed}", placement="streamed") for seed in range(3)
    ]
    optimizers = [VGPUAdamW(model.parameters(), update_in_backward=update_in_backward) for model in models]
    with ThreadPoolExecutor(3) as pool:
        assert list(pool.map(losses_of, models, optimizers, range(3))) == wanted
    assert stack.levels[0].peak_bytes <= stack.levels[0].capacity_bytes
    for model in models:
        release(model)
    assert stack.levels[0].used_bytes == 0


@pytest.mark.parametrize("activations", ["level0", "host"])
def test_threads_run_the_forwards_of_one_model(activations: str, make_stack: MakeStack, late_weights: None):
    plain = Layers(0)
    inputs = [torch.full((4, 32), float(number)) for number in range(4)]
    wanted = [plain(x) for x in inputs] * 3
    model = enable_vgpu_stack_optimization(
        Layers(0), make_stack(24 << 10), placement="streamed", activations=activations
    )
    with ThreadPoolExecutor(3) as pool:
        assert all(torch.equal(a, b) for a, b in zip(pool.map(model, inputs * 3), wanted, strict=True))
