"""A frozen model that is all on level 0 runs without hooks, with the same bits, until others need its bytes."""

from __future__ import annotations

import threading

import pytest
import torch
from torch import nn
from torch.utils.hooks import RemovableHandle

from tests.offload.conftest import MakeStack
from vblackwell.offload.api import enable_vgpu_stack_optimization, offload_of, release
from vblackwell.offload.engine import Offload


class Scaled(nn.Linear):
    """A linear layer and a norm, of whose weight autograd saves the parameter itself."""

    def __init__(self) -> None:
        super().__init__(16, 16)
        self.norm = nn.Parameter(torch.randn(16))

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        return nn.functional.rms_norm(super().forward(x), (16,), self.norm)


class Net(nn.Module):
    """Sites at the root's children (``first``, ``head``) and below (``body.layers``)."""

    def __init__(self, seed: int) -> None:
        super().__init__()
        torch.manual_seed(seed)
        self.first = nn.Linear(16, 16)
        self.body = nn.Module()
        self.body.layers = nn.ModuleList(Scaled() for _ in range(4))
        self.head = nn.Linear(16, 16)

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        x = self.first(x)
        for layer in self.body.layers:  # type: ignore[union-attr]
            x = torch.tanh(layer(x))
        return self.head(x)


X = torch.linspace(-1, 1, 32).view(2, 16)
BYTES = sum(param.nbytes for param in Net(0).parameters())
HELD = 2 * 1536 + 4 * 2048  # of its six groups, as level 0 counts them: each parameter in multiples of 512


def streamed(stack, seed: int, name: str = "net") -> tuple[Net, Offload]:
    model = Net(seed).requires_grad_(False)
    enable_vgpu_stack_optimization(model, stack, name, placement="streamed")
    engine = offload_of(model)
    assert isinstance(engine, Offload)
    engine.bound.want()
    return model, engine


def hooks_of(module: nn.Module) -> int:
    return len(module._forward_pre_hooks) + len(module._forward_hooks)


@torch.no_grad()
def test_a_model_that_has_arrived_is_plain_below_its_children(make_stack: MakeStack):
    model, engine = streamed(make_stack(1 << 20), 1)
    expected, inner = Net(1)(X), model.body.layers
    assert all(hooks_of(layer) == 2 for layer in inner) and not engine.bound
    assert torch.equal(model(X), expected) and not engine.bound  # it came while it ran
    assert torch.equal(model(X), expected) and engine.bound
    assert not any(map(hooks_of, inner)) and all(type(param) is nn.Parameter for param in model.parameters())
    assert torch.equal(model(X), expected)
    assert torch.equal(inner[0](X), Net(1).body.layers[0](X))  # called alone
    assert engine.bound.release() and not engine.bound
    assert all(hooks_of(layer) == 2 for layer in inner) and all(type(p) is not nn.Parameter for p in model.parameters())
    assert torch.equal(model(X), expected) and engine.bound


@torch.no_grad()
def test_another_model_takes_the_bytes_of_one_that_is_bound(make_stack: MakeStack):
    stack = make_stack(int(1.5 * HELD))
    (one, first), (two, second) = streamed(stack, 1, "one"), streamed(stack, 2, "two")
    for _ in range(3):
        for model, engine, seed in ((one, first, 1), (two, second, 2)):
            assert torch.equal(model(X), Net(seed)(X)) and torch.equal(model(X), Net(seed)(X))
            assert engine.bound
        assert not first.bound
        assert stack.levels[0].used_bytes <= stack.levels[0].capacity_bytes


@torch.no_grad()
def test_the_longest_unused_model_gives_way_and_a_pinned_one_never(make_stack: MakeStack):
    stack = make_stack(int(2.2 * HELD))
    made = [streamed(stack, seed, f"net-{seed}") for seed in range(3)]
    for model, _ in made[:2]:
        model(X), model(X)
    made[2][0](X)
    assert not made[0][1].bound and made[1][1].bound
    made[1][1].budget.pinned = True
    made[0][0](X)
    assert made[1][1].bound and made[2][1].weights.loaded_bytes < BYTES


@torch.no_grad()
def test_a_model_of_which_a_child_alone_is_called_is_not_the_longest_unused(make_stack: MakeStack):
    stack = make_stack(int(2.2 * HELD))
    made = [streamed(stack, seed, f"net-{seed}") for seed in range(3)]
    for model, _ in made[:2]:
        model(X), model(X)
    made[0][0].head(X)
    made[2][0](X)
    assert made[0][1].bound and not made[1][1].bound


@torch.no_grad()
def test_a_pinned_model_stays_while_another_is_placed(make_stack: MakeStack):
    stack = make_stack(1 << 20)
    (one, first), (two, second) = streamed(stack, 1, "one"), streamed(stack, 2, "two")
    one(X), one(X), two(X), two(X)
    first.budget.pinned = True
    streamed(stack, 3, "three")
    assert first.bound and not second.bound and second.weights.loaded_bytes == 0


def test_what_a_forward_uses_does_not_leave(make_stack: MakeStack):
    model, engine = streamed(make_stack(1 << 20), 1)
    with torch.no_grad():
        model(X), model(X)
    inside, go_on, got = threading.Event(), threading.Event(), list[torch.Tensor]()
    model.body.layers[2].register_forward_pre_hook(lambda *_: (inside.set(), go_on.wait(10))[:0] or None)

    def run() -> None:
        with torch.no_grad():
            got.append(model(X))

    thread = threading.Thread(target=run)
    thread.start()
    assert inside.wait(10)
    assert not engine.bound.release() and not engine.bound.drop_one() and not engine.bound.drop_all()
    go_on.set()
    thread.join()
    assert torch.equal(got[0], Net(1)(X))
    assert engine.bound.drop_all() and engine.weights.loaded_bytes == 0 and engine.stack.levels[0].used_bytes == 0


@torch.no_grad()
@pytest.mark.parametrize("error", [ValueError, KeyboardInterrupt])
def test_a_forward_that_raised_is_not_inside(make_stack: MakeStack, error: type[BaseException]):
    model, engine = streamed(make_stack(1 << 20), 1)
    model(X), model(X)

    def fail(*_: object) -> None:
        raise error

    handle = model.body.layers[1].register_forward_pre_hook(fail)
    with pytest.raises(error):
        model(X)
    handle.remove()
    assert engine.bound.drop_all()
    assert torch.equal(model(X), Net(1)(X))


@torch.no_grad()
@pytest.mark.parametrize("where", ["pinning", "removing hooks"])
def test_an_interrupt_while_binding_leaves_nothing_bound(
    make_stack: MakeStack, monkeypatch: pytest.MonkeyPatch, where: str
):
    model, engine = streamed(make_stack(1 << 20), 1)
    model(X)
    assert engine.weights.have_arrived()
    left, (owner, name) = [2], (engine.used, "_pin") if where == "pinning" else (RemovableHandle, "remove")
    made = getattr(owner, name)

    def interrupted(*args: object) -> object:
        left[0] -= 1
        if left[0] == -1:
            raise KeyboardInterrupt
        return made(*args)

    with monkeypatch.context() as patch, pytest.raises(KeyboardInterrupt):
        patch.setattr(owner, name, interrupted)
        model(X)
    assert not engine.bound and not any(map(engine.weights.is_pinned, engine.groups))
    assert all(hooks_of(layer) == 2 for layer in model.body.layers)
    assert all(type(param) is not nn.Parameter for param in model.parameters())
    assert torch.equal(model(X), Net(1)(X)) and engine.bound
    assert engine.bound.drop_all() and engine.weights.loaded_bytes == 0


def expected_gradient() -> torch.Tensor | None:
    x = X.clone().requires_grad_()
    Net(1)(x).sum().backward()
    return x.grad


def test_a_backward_reads_the_weights_of_a_model_that_was_bound_and_dropped(make_stack: MakeStack):
    model, engine = streamed(make_stack(1 << 20), 1)
    with torch.no_grad():
        model(X), model(X)
    x = X.clone().requires_grad_()
    out = model(x).sum()
    assert not engine.bound
    assert engine.bound.drop_all()
    out.backward()
    assert torch.equal(x.grad, expected_gradient())
    with torch.no_grad():
        assert torch.equal(model(X), Net(1)(X)) and torch.equal(model(X), Net(1)(X)) and engine.bound


@pytest.mark.parametrize("how", ["grandchild", "function"])
def test_a_backward_through_a_use_that_is_not_counted_is_refused(make_stack: MakeStack, how: str):
    """Without a hook autograd saves the parameter itself, whose bytes left: an error, and no NaN."""
    model, engine = streamed(make_stack(1 << 20), 1)
    with torch.no_grad():
        model(X), model(X)
    layer, x = model.body.layers[0], X.clone().requires_grad_()
    out = layer(x) if how == "grandchild" else nn.functional.rms_norm(x, (16,), layer.norm)
    assert engine.bound.drop_all()
    with pytest.raises(RuntimeError, match="modified by an inplace operation"):
        out.sum().backward()


def test_a_backward_goes_on_after_a_model_was_bound_and_dropped_meanwhile(make_stack: MakeStack):
    model, engine = streamed(make_stack(1 << 20), 1)
    x = X.clone().requires_grad_()
    out = model(x).sum()
    with torch.no_grad():
        assert torch.equal(model(X), Net(1)(X)) and engine.bound
    assert engine.bound.drop_all()
    out.backward()
    assert torch.equal(x.grad, expected_gradient())


def test_a_transform_reads_the_weights_of_a_model_that_was_bound_and_dropped(make_stack: MakeStack):
    model, engine = streamed(make_stack(1 << 20), 1)
    with torch.no_grad():
        model(X), model(X)
        out, pull = torch.func.vjp(model, X)
    assert engine.bound.drop_all()
    assert torch.equal(pull(torch.ones_like(out))[0], expected_gradient())


def test_a_backward_reads_the_weights_that_another_thread_held(make_stack: MakeStack):
    """The forward that computes gradients begins while one without is inside a bound model."""
    model, engine = streamed(make_stack(1 << 20), 1)
    with torch.no_grad():
        model(X), model(X)
    main, inside, go_on, got = threading.current_thread(), threading.Event(), threading.Event(), list[torch.Tensor]()

    def stop(*_: object) -> None:
        if threading.current_thread() is not main:
            inside.set()
            assert go_on.wait(10)

    model.body.layers[1].register_forward_pre_hook(stop)

    def run() -> None:
        with torch.no_grad():
            got.append(model(X))

    thread = threading.Thread(target=run)
    thread.start()
    assert inside.wait(10) and engine.bound
    x = X.clone().requires_grad_()
    out = model(x).sum()
    go_on.set()
    thread.join()
    assert torch.equal(got[0], Net(1)(X))
    assert engine.bound.drop_all()
    out.backward()
    assert torch.equal(x.grad, expected_gradient())
    with torch.no_grad():
        assert torch.equal(model(X), Net(1)(X)) and torch.equal(model(X), Net(1)(X)) and engine.bound


def test_a_child_that_computes_gradients_in_a_forward_without(make_stack: MakeStack):
    model = nn.Sequential(Net(1), nn.Linear(16, 16)).requires_grad_(False)
    enable_vgpu_stack_optimization(model, make_stack(1 << 20), "net", placement="streamed")
    engine = offload_of(model)
    assert isinstance(engine, Offload)
    engine.bound.want()
    x, kept = X.clone().requires_grad_(), list[torch.Tensor]()

    def refine(module: nn.Module, args: object, out: torch.Tensor) -> None:
        with torch.enable_grad():
            kept.append(model[0](x).sum())

    with torch.no_grad():
        model(X), model(X)
        assert engine.bound
        model[1].register_forward_hook(refine)
        model(X)
    assert engine.bound.drop_all()
    kept[0].backward()
    assert torch.equal(x.grad, expected_gradient())


@torch.no_grad()
def test_what_is_written_to_a_bound_parameter_is_kept(make_stack: MakeStack):
    model, engine = streamed(make_stack(1 << 20), 1)
    model(X), model(X)
    model.load_state_dict(Net(3).state_dict())
    assert torch.equal(model(X), Net(3)(X))
    assert engine.bound.drop_all()
    assert torch.equal(model(X), Net(3)(X))


@torch.no_grad()
def test_a_bound_model_is_saved_copied_and_released(make_stack: MakeStack):
    stack = make_stack(1 << 20)
    model, _ = streamed(stack, 1)
    model(X), model(X)
    assert all(torch.equal(value, Net(1).state_dict()[name]) for name, value in model.state_dict().items())
    release(model)
    assert not any(hooks_of(module) for module in model.modules())
    assert torch.equal(model(X), Net(1)(X))
    assert [level["used_bytes"] for level in stack.get_stats()["levels"]] == [0, 0, 0]
