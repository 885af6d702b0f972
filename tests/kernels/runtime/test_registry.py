"""kernels/runtime/registry.py: an op called directly gives what the dispatcher gives, and is left to the dispatcher
where something has to see it.
"""

import traceback

import pytest
import torch
from torch import Tensor
from torch._subclasses.fake_tensor import FakeTensor, FakeTensorMode
from torch.fx.experimental.proxy_tensor import make_fx
from torch.overrides import TorchFunctionMode
from torch.utils._python_dispatch import TorchDispatchMode

from vblackwell.kernels.runtime.registry import register_op

calls: list[str] = []  # what the implementation was called from: 'direct' or 'op'


@register_op(lambda x, *_: torch.empty_like(x), autocast="keep", direct=True)
def _scaled_gradient(x: Tensor, scale: Tensor, power: float) -> Tensor:
    return x * scale**power


def _save(ctx, inputs, output) -> None:
    x, scale, ctx.power = inputs
    ctx.save_for_backward(scale)


def _backward(ctx, dy):
    (scale,) = ctx.saved_tensors
    dscale = dy.sum() if ctx.needs_input_grad[1] else None
    return _scaled_gradient(dy, scale, ctx.power), dscale, None


@register_op(lambda x, *_: torch.empty_like(x), save=_save, backward=_backward, autocast="cast", direct=True)
def _scaled(x: Tensor, scale: Tensor, power: float) -> Tensor:
    """``x`` times ``scale`` to the power."""
    dispatched = any(frame.filename.endswith("custom_ops.py") for frame in traceback.extract_stack())
    calls.append("op" if dispatched else "direct")
    return x * scale**power


@register_op(lambda x: torch.empty_like(x), direct=True)
def _placed(x: Tensor) -> Tensor:
    """``x`` times what lies where tensors are made that name no device."""
    return x * torch.ones(x.shape[-1])


OP = torch.ops.vblackwell.scaled


@register_op(lambda x, *_: torch.empty_like(x), direct=True)
def _added(x: Tensor, numbers: list[int], wanted: list[bool]) -> Tensor:
    return x + sum(number for number, each in zip(numbers, wanted, strict=True) if each)


def given(**how) -> tuple[Tensor, Tensor, float]:
    generator = torch.Generator().manual_seed(3)
    return torch.randn(4, 6, generator=generator).requires_grad_(**how), torch.tensor(1.7), 2.5


@pytest.fixture(autouse=True)
def none_called():
    calls.clear()


@pytest.mark.parametrize("autocast", [False, True])
@pytest.mark.parametrize("grad", [False, True])
def test_bits_and_gradients_are_those_of_the_op(grad, autocast):
    found = []
    for function in (_scaled, OP):
        x, scale, power = given(requires_grad=grad)
        scale.requires_grad_(grad)
        with torch.autocast("cpu", torch.bfloat16, enabled=autocast):
            y = function(x, scale, power)
            if grad:
                y.square().sum().backward()
        found.append((y.detach(), x.grad, scale.grad))
    assert calls == ["direct", "op"]
    assert found[0][0].dtype == (torch.bfloat16 if autocast else torch.float32)
    for mine, theirs in zip(*found, strict=True):
        assert (mine is None and theirs is None) or (mine.dtype == theirs.dtype and torch.equal(mine, theirs))


def test_an_output_may_be_changed_in_place():
    x, *rest = given(requires_grad=True)
    _scaled(x, *rest).mul_(2).sum().backward()
    assert torch.equal(x.grad, torch.full_like(x, 2) * rest[0] ** rest[1])


def test_arguments_by_name():
    x, scale, power = given()
    assert torch.equal(_scaled(x, power=power, scale=scale), OP(x, scale, power))
    assert _scaled.__doc__ == "``x`` times ``scale`` to the power."
    with pytest.raises(TypeError, match="power"):
        _scaled(x, scale)


def test_lists_of_numbers():
    x, lists = given()[0].detach(), ([3, 4, 5], [True, False, True])
    assert torch.equal(_added(x, *lists), x + 8)
    with Seen() as seen:
        assert torch.equal(_added(x, *lists), x + 8)
    assert torch.ops.vblackwell.added.default in seen.functions


def test_what_has_no_second_derivative_says_so():
    x, *rest = given(requires_grad=True)
    (dx,) = torch.autograd.grad(_scaled(x, *rest).square().sum(), x, create_graph=True)
    with pytest.raises(RuntimeError, match="autograd formula"):
        dx.sum().backward()


def test_hooks_of_saved_tensors_see_what_is_saved():
    x, scale, power = given(requires_grad=True)
    packed = []
    with torch.autograd.graph.saved_tensors_hooks(lambda each: packed.append(each) or each, lambda each: each):
        _scaled(x, scale, power)
    assert calls == ["direct"] and any(each is scale for each in packed)


class Seen(TorchDispatchMode):
    def __init__(self) -> None:
        super().__init__()
        self.functions = []

    def __torch_dispatch__(self, func, types, args=(), kwargs=None):
        self.functions.append(func)
        return func(*args, **(kwargs or {}))


class SeenFunctions(TorchFunctionMode):
    def __init__(self) -> None:
        super().__init__()
        self.functions = []

    def __torch_function__(self, func, types, args=(), kwargs=None):
        self.functions.append(func)
        return func(*args, **(kwargs or {}))


class Marked(Tensor):
    """A subclass with torch's rules for subclasses."""


class Parameter(torch.nn.Parameter):
    """A class that changes no rule."""


@pytest.mark.parametrize("mode", [Seen, SeenFunctions])
def test_modes_see_the_op(mode):
    with mode() as seen:
        y = _scaled(*given())
    assert any("scaled" in str(func) for func in seen.functions) and calls == ["op"]
    assert torch.equal(y, OP(*given()))


@pytest.mark.parametrize("autocast", [False, True])
def test_a_default_device_is_no_reason_for_the_dispatcher(autocast):
    """Inside an op there is none."""
    x, *rest = given(requires_grad=True)
    with torch.autocast("cpu", torch.bfloat16, enabled=autocast):
        with torch.device("meta"):
            y = _scaled(x, *rest)
            y.sum().backward()
        assert calls == ["direct"]
        expected = OP(x, *rest)
    assert torch.equal(y, expected)
    (dx,) = torch.autograd.grad(expected.sum(), x)
    assert torch.equal(x.grad, dx)
    with torch.device("meta"):
        assert torch.equal(torch.ops.vblackwell.placed(x), x) and torch.equal(_placed(x), x)
        assert torch.ones(1).is_meta, "and afterwards there is one again"


def test_a_mode_above_a_default_device_sees_the_op():
    with torch.device("cpu"), SeenFunctions() as seen:
        _scaled(*given())
    assert any("scaled" in str(func) for func in seen.functions) and calls == ["op"]


def test_the_profiler_sees_the_op():
    with torch.profiler.profile(activities=[torch.profiler.ProfilerActivity.CPU]) as profile:
        _scaled(*given())
    assert "vblackwell::scaled" in {event.name for event in profile.events()}


def test_subclasses_are_the_dispatchers():
    x, *rest = given()
    assert type(_scaled(x.as_subclass(Marked), *rest)) is Marked and calls == ["op"]
    _scaled(Parameter(x.detach()), *rest)
    assert calls == ["op", "direct"]


def test_tensors_without_memory_are_the_dispatchers():
    x, *rest = given(requires_grad=False)
    assert _scaled(x.to("meta"), *rest).is_meta
    with FakeTensorMode() as mode:
        fake, scale = mode.from_tensor(x), mode.from_tensor(rest[0])
        assert isinstance(_scaled(fake, scale, rest[1]), FakeTensor)
    assert isinstance(_scaled(fake, scale, rest[1]), FakeTensor), "outside of its mode"
    assert not calls
    negative = torch.complex(x, x).conj().imag
    assert negative.is_neg() and torch.equal(_scaled(negative, *rest), OP(-x, *rest))
    assert calls[0] == "op"


@pytest.mark.filterwarnings("ignore:There is a performance drop", "ignore:.torch.jit")
def test_traces_and_transforms_have_the_op():
    x, scale, power = given(requires_grad=False)
    for graph in (
        make_fx(lambda x: _scaled(x, scale, power))(x).graph,
        torch.export.export(Scaling(scale), (x,)).graph,
    ):
        assert OP.default in {node.target for node in graph.nodes}
    traced = torch.jit.trace(lambda x: _scaled(x, scale, power), (x,), check_trace=False).graph
    assert "vblackwell::scaled" in {node.kind() for node in traced.nodes()}
    with pytest.raises(RuntimeError, match="setup_context"):  # torch's own word about the op
        torch.func.vjp(lambda x: _scaled(x, scale, power), x)
    assert torch.equal(torch.func.vmap(lambda row: _scaled(row, scale, power))(x), OP(x, scale, power))
    with torch.autograd.forward_ad.dual_level():
        _scaled(torch.autograd.forward_ad.make_dual(x, x), scale, power)
    assert calls and "direct" not in calls


class Scaling(torch.nn.Module):
    def __init__(self, scale: Tensor) -> None:
        super().__init__()
        self.register_buffer("scale", scale)

    def forward(self, x: Tensor) -> Tensor:
        return _scaled(x, self.scale, power=2.5)


@pytest.mark.parametrize("autocast", [False, True])
def test_compiles_as_one_graph_with_the_same_bits(autocast):
    x, *rest = given(requires_grad=True)
    with torch.autocast("cpu", torch.bfloat16, enabled=autocast):
        y = torch.compile(_scaled, fullgraph=True, backend="aot_eager")(x, *rest)
        y.sum().backward()
        compiled = y.detach(), x.grad
        x.grad = None
        y = _scaled(x, *rest)
        y.sum().backward()
    assert torch.equal(compiled[0], y) and torch.equal(compiled[1], x.grad)
    assert calls[-1] == "direct" and "direct" not in calls[:-1]
