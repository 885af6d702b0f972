"""A step is made to every group or to none, whoever comes in between, and whatever torch's defaults are meanwhile."""

from __future__ import annotations

import signal
import threading
from collections.abc import Callable, Iterator
from typing import Any

import pytest
import torch

from tests.offload.conftest import MakeStack
from tests.offload.models import CASES, build, equal
from vblackwell.errors import StaleTensor, Unsupported
from vblackwell.offload.api import enable_vgpu_stack_optimization, offload_of, release
from vblackwell.offload.movement.device_updates import DeviceUpdates
from vblackwell.offload.movement.host_updates import HostUpdates
from vblackwell.offload.optimizer import VGPUAdamW

MLP = CASES[0]
LEVEL0 = {"host": 128 << 10, "device": 512 << 10}
PLACES = {"host": HostUpdates, "device": DeviceUpdates}


def streamed(make_stack: MakeStack, update: str, **how: Any) -> tuple[torch.nn.Module, VGPUAdamW]:
    model = build(MLP)
    enable_vgpu_stack_optimization(model, make_stack(LEVEL0[update]), update=update)
    return model, VGPUAdamW(model.parameters(), **how)


def steps(optimizer: VGPUAdamW) -> set[int]:
    return {int(state["step"]) for state in optimizer.state_dict()["state"].values()}


@pytest.fixture
def after_two(monkeypatch: pytest.MonkeyPatch) -> Callable[[str, str, Callable[[], None]], None]:
    """Lets something happen when a step has come to two groups of them."""

    def prepare(update: str, name: str, happen: Callable[[], None]) -> None:
        plain, count = getattr(PLACES[update], name), 0

        def call(*args: Any) -> None:
            nonlocal count
            plain(*args)
            count += 1
            if count == 2:
                happen()

        monkeypatch.setattr(PLACES[update], name, call)

    return prepare


@pytest.mark.parametrize("early", [False, True])
def test_a_group_in_use_holds_the_whole_step_up(early: bool, make_stack: MakeStack):
    model, optimizer = streamed(make_stack, "host", update_in_backward=early)
    MLP.loss(model, 0).backward()
    inside, leave = threading.Event(), threading.Event()

    def wait(*_: Any) -> None:
        inside.set()
        leave.wait(20)

    handle = model.layers[2][1].register_forward_hook(wait)

    def forward() -> None:
        with torch.no_grad():
            MLP.loss(model, 9)

    thread = threading.Thread(target=forward)
    thread.start()
    assert inside.wait(20)
    with pytest.raises(StaleTensor, match="while its forward runs"):
        optimizer.step()
    leave.set()
    thread.join()
    handle.remove()
    assert equal(model, build(MLP))
    optimizer.step()
    plain = build(MLP)
    theirs = torch.optim.AdamW(plain.parameters(), lr=optimizer.defaults["lr"], fused=True)
    MLP.loss(plain, 0).backward()
    theirs.step()
    assert equal(model, plain) and steps(optimizer) == {1}


@pytest.mark.parametrize(("update", "early"), [("host", False), ("host", True), ("device", False), ("device", True)])
def test_an_interrupt_between_two_groups_waits_for_all(update: str, early: bool, make_stack: MakeStack, after_two):
    model, optimizer = streamed(make_stack, update, update_in_backward=early)
    MLP.loss(model, 0).backward()
    after_two(update, "commit" if early else "update", lambda: signal.raise_signal(signal.SIGINT))
    with pytest.raises(KeyboardInterrupt):
        optimizer.step()
    assert steps(optimizer) == {1}


def test_a_step_that_fails_half_way_is_not_gone_on_from(make_stack: MakeStack, after_two):
    model, optimizer = streamed(make_stack, "host")
    MLP.loss(model, 0).backward()

    def fail() -> None:
        raise RuntimeError("a group that cannot be queued")

    after_two("host", "update", fail)
    with pytest.raises(RuntimeError, match="cannot be queued"):
        optimizer.step()
    with pytest.raises(StaleTensor, match="a step behind others"):
        optimizer.step()


@pytest.fixture
def defaults() -> Iterator[Callable[[torch.dtype, str | None], None]]:
    """Sets torch's defaults until the test ends, or is told others."""

    def choose(dtype: torch.dtype, device: str | None) -> None:
        torch.set_default_dtype(dtype)
        torch.set_default_device(device)

    yield choose
    choose(torch.float32, None)


@pytest.mark.parametrize(
    ("update", "states"), [("host", "fp32"), pytest.param("device", "fp32", marks=pytest.mark.slow), ("device", "8bit")]
)
def test_steps_and_states_under_other_defaults(update: str, states: str, make_stack: MakeStack, defaults):
    """A scaled loss, clipping, states out and in again, while torch makes something else than fp32 on the CPU."""

    def trained(dtype: torch.dtype, device: str | None) -> tuple[dict[str, torch.Tensor], float]:
        model = build(MLP)
        stack = make_stack(LEVEL0[update])
        enable_vgpu_stack_optimization(model, stack, update=update, states=states, placement="streamed")
        optimizer = VGPUAdamW(model.parameters(), loss_scale=1024.0)
        for step in range(3):
            optimizer.max_grad_norm = 0.05 if step == 1 else None
            (MLP.loss(model, step) * optimizer.loss_scale).backward()
            defaults(dtype, device)
            optimizer.step()
            optimizer.zero_grad()
            if step == 1 and device is None:  # else torch itself makes the states' copies there
                optimizer.load_state_dict(optimizer.state_dict())
            defaults(torch.float32, None)
        norm = optimizer.grad_norm
        release(model)
        stack.close()
        assert norm is not None
        return model.state_dict(), norm

    expected, norm = trained(torch.float32, None)
    for dtype, device in ((torch.float64, None), (torch.bfloat16, None), (torch.float32, "meta")):
        found, other = trained(dtype, device)
        assert other == norm
        assert all(torch.equal(found[name], expected[name]) for name in expected), (dtype, device)


def test_a_refused_parameter_group_is_not_kept(make_stack: MakeStack):
    model = build(MLP)
    for param in model.head.parameters():
        param.requires_grad_(False)
    enable_vgpu_stack_optimization(
        model, make_stack(LEVEL0["host"]), update="host", compute_dtype=torch.bfloat16, placement="streamed"
    )
    optimizer = VGPUAdamW([param for param in model.parameters() if param.requires_grad])
    thawed = [param.requires_grad_(True) for param in model.head.parameters()]
    with pytest.raises(Unsupported, match="no fp32 master"):
        optimizer.add_param_group({"params": thawed})
    assert len(optimizer.param_groups) == 1 and offload_of(model).worker.broken is False
    for step in range(2):
        with torch.autocast("cpu", dtype=torch.bfloat16):
            loss = MLP.loss(model, step)
        loss.backward()
        optimizer.step()
        optimizer.zero_grad()
