"""What sees the operators of a forward: transforms of torch.func, torch.compile, and checkpointing with a policy."""

from __future__ import annotations

import copy
from collections.abc import Callable
from functools import partial
from typing import Any

import pytest
import torch
from torch import nn
from torch.func import functional_call, functionalize, grad, hessian, jacfwd, jacrev, jvp, vjp, vmap
from torch.utils.checkpoint import CheckpointPolicy, checkpoint, create_selective_checkpoint_contexts

from tests.offload.conftest import MakeStack
from vblackwell.errors import StaleTensor, Unsupported
from vblackwell.offload.api import enable_vgpu_stack_optimization
from vblackwell.offload.optimizer import VGPUAdamW

WIDTH = 16
# By torch's own forward-mode formulas, in whichever test uses them first.
pytestmark = pytest.mark.filterwarnings("ignore:.torch.jit.script. is deprecated")


class Net(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.layers = nn.ModuleList(nn.Linear(WIDTH, WIDTH) for _ in range(6))

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        for layer in self.layers:
            x = torch.tanh(layer(x))
        return x


def both(make_stack: MakeStack) -> tuple[nn.Module, nn.Module]:
    torch.manual_seed(0)
    plain = Net()
    return plain, enable_vgpu_stack_optimization(copy.deepcopy(plain), make_stack(4 << 10), placement="streamed")


@pytest.mark.parametrize(
    "use",
    [
        lambda model, x: grad(lambda x: model(x).square().sum())(x),
        lambda model, x: jvp(model, (x,), (x + 1,)),
        lambda model, x: vjp(model, x)[1](x)[0],
        lambda model, x: jacrev(model)(x[0]),
        lambda model, x: hessian(lambda x: model(x).sum())(x[0]),
        lambda model, x: vmap(model)(x),
        lambda model, x: vmap(grad(lambda x: model(x).sum()))(x),
        lambda model, x: torch.autograd.functional.jacobian(lambda x: model(x).sum(0), x),
    ],
    ids=["grad", "jvp", "vjp", "jacrev", "hessian", "vmap", "vmap-grad", "jacobian"],
)
def test_a_function_of_the_inputs_is_transformed(use: Callable[[nn.Module, torch.Tensor], Any], make_stack: MakeStack):
    plain, model = both(make_stack)
    x = torch.randn(3, WIDTH)
    found, wanted = use(model, x), use(plain, x)
    assert all(torch.equal(a, b) for a, b in zip(found, wanted, strict=True))
    model(x).sum().backward()  # and nothing is left over


@pytest.mark.parametrize("batched", [False, True])
def test_a_function_of_offloaded_parameters_is_refused(batched: bool, make_stack: MakeStack):
    _, model = both(make_stack)
    transformed = grad(lambda params, x: functional_call(model, params, (x,)).sum())
    if batched:
        transformed = vmap(transformed, in_dims=(None, 0))
    with pytest.raises(Unsupported, match=r"torch\.func.*release\(model\)"):
        transformed(dict(model.named_parameters()), torch.ones(3, WIDTH))


class Normed(nn.Module):
    """Autograd saves the weights of its norms themselves, not views of them."""

    def __init__(self) -> None:
        super().__init__()
        self.layers = nn.ModuleList(nn.Sequential(nn.Linear(WIDTH, WIDTH), nn.LayerNorm(WIDTH)) for _ in range(6))
        for layer in self.layers:
            nn.init.normal_(layer[1].weight)
        self.scale = nn.Parameter(torch.randn(WIDTH))

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        for layer in self.layers:
            x = torch.tanh(layer(x))
        return x * self.scale * self.layers[0][0].weight.sum(0)  # of a module whose forward does not run now


@pytest.mark.parametrize("transform", [grad, jacrev, jacfwd, hessian, lambda f: vmap(grad(f))])
def test_a_weight_that_is_saved_itself_is_there_in_the_backward_of_a_transform(
    transform: Callable[[Any], Any], make_stack: MakeStack
):
    torch.manual_seed(0)
    plain = Normed()
    model = enable_vgpu_stack_optimization(copy.deepcopy(plain), make_stack(24 << 10), placement="streamed")
    x = torch.randn(3, WIDTH)
    found, wanted = (transform(lambda x, of=of: of(x).square().sum())(x) for of in (model, plain))
    assert torch.equal(found, wanted)
    assert type(model.layers[0][1]._parameters["weight"]) is type(model.scale)
    for module in (model, plain):  # gradients of parameters pass through what the transform computed
        grad(lambda x, of=module: of(x).square().sum())(x).sum().backward()
    found, wanted = ([p.grad.norm() for p in each.parameters() if p.grad is not None] for each in (model, plain))
    assert len(found) == len(wanted) > 0 and all(torch.equal(a, b) for a, b in zip(found, wanted, strict=True))


@pytest.mark.parametrize(
    "use",
    [
        lambda f, w: grad(f)(w),
        lambda f, w: grad(f)({"w": w}),
        lambda f, w: vjp(f, w),
        lambda f, w: jacrev(f)(w),
        lambda f, w: jacfwd(f)(w),
        lambda f, w: hessian(f)(w),
        lambda f, w: vmap(f)(w),
        lambda f, w: vmap(grad(f))(w),
        lambda f, w: functionalize(f)(w),
    ],
    ids=["grad", "grad-dict", "vjp", "jacrev", "jacfwd", "hessian", "vmap", "vmap-grad", "functionalize"],
)
def test_a_function_of_an_offloaded_parameter_itself_is_refused(
    use: Callable[[Any, torch.Tensor], Any], make_stack: MakeStack
):
    _, model = both(make_stack)
    square = lambda w: (w["w"] if isinstance(w, dict) else w).square().sum()  # noqa: E731
    weight = model.get_parameter("layers.3.weight")
    with pytest.raises(Unsupported, match=r"torch\.func.*'layers\.3\.weight' itself.*release\(model\)"):
        use(square, weight)
    plain = weight.detach().clone()
    assert torch.equal(torch.as_tensor(grad(square)(plain)), 2 * plain)  # all other tensors are transformed


def test_a_forward_derivative_by_an_offloaded_parameter_itself_is_computed(make_stack: MakeStack):
    plain, model = both(make_stack)
    tangent = torch.ones(WIDTH, WIDTH)
    found, wanted = (jvp(torch.square, (each.get_parameter("layers.3.weight"),), (tangent,)) for each in (model, plain))
    assert all(torch.equal(a, b) for a, b in zip(found, wanted, strict=True))


def policy(context: object, operator: object, *args: object, **kwargs: object) -> CheckpointPolicy:
    products = (torch.ops.aten.mm.default, torch.ops.aten.addmm.default)
    return CheckpointPolicy.MUST_SAVE if operator in products else CheckpointPolicy.PREFER_RECOMPUTE


@pytest.mark.parametrize(("options", "update_in_backward"), [({}, False), ({}, True), ({"activations": "host"}, False)])
def test_selective_checkpointing(options: dict[str, Any], update_in_backward: bool, make_stack: MakeStack):
    contexts = partial(create_selective_checkpoint_contexts, policy)

    class Block(nn.Module):
        def __init__(self) -> None:
            super().__init__()
            self.up, self.down = nn.Linear(WIDTH, 2 * WIDTH), nn.Linear(2 * WIDTH, WIDTH)

        def forward(self, x: torch.Tensor) -> torch.Tensor:
            return x + self.down(torch.relu(self.up(x)))

    class Selective(nn.Module):
        def __init__(self) -> None:
            super().__init__()
            self.layers = nn.ModuleList(Block() for _ in range(5))

        def forward(self, x: torch.Tensor) -> torch.Tensor:
            for layer in self.layers:
                x = checkpoint(layer, x, use_reentrant=False, context_fn=contexts)
            return x.square().mean()

    torch.manual_seed(0)
    plain = Selective()
    model = copy.deepcopy(plain)
    enable_vgpu_stack_optimization(model, make_stack(16 << 10), placement="streamed", **options)
    ours = VGPUAdamW(model.parameters(), update_in_backward=update_in_backward)
    theirs = torch.optim.AdamW(plain.parameters(), fused=True)
    x = torch.randn(4, WIDTH)
    for _ in range(3):
        for module, optimizer in ((model, ours), (plain, theirs)):
            module(x).backward()
            optimizer.step()
            optimizer.zero_grad()
    assert all(torch.equal(a, b) for a, b in zip(model.parameters(), plain.parameters(), strict=True))


class Tensors(list[torch.Tensor]):
    pass


class Pair(tuple[torch.Tensor, ...]):
    pass


class Named(dict[str, torch.Tensor]):
    pass


@pytest.mark.parametrize("kind", [Tensors, Pair])
def test_parameters_are_found_in_children_of_lists_and_tuples(kind: type, make_stack: MakeStack):
    plain, model = both(make_stack)
    weights, expected = kind([model.layers[0].weight]), kind([plain.layers[0].weight])
    assert torch.equal(torch.cat(weights), torch.cat(expected))
    with torch.no_grad():
        for held in (weights, expected):
            torch._foreach_mul_(held, 2.0)
    assert torch.equal(model.layers[0].weight, plain.layers[0].weight)
    with pytest.raises(StaleTensor, match="no_grad"):
        torch._foreach_mul_(kind([model.layers[0].weight.detach()]), 2.0)


def of_a_library(held: Any) -> Any:
    """As libraries declare theirs: what it gets are tensors, whatever holds them."""
    tensors = tuple(held.values())
    if torch.overrides.has_torch_function(tensors):
        return torch.overrides.handle_torch_function(of_a_library, tensors, held)
    return Tensors([held["weight"].view(-1)])


def test_what_a_call_gives_in_a_child_of_a_list_is_read_only(make_stack: MakeStack):
    plain, model = both(make_stack)
    found = of_a_library(Named(weight=model.layers[0].weight))
    assert type(found) is Tensors and torch.equal(found[0], plain.layers[0].weight.view(-1))
    with pytest.raises(StaleTensor, match="no_grad"):
        found[0].mul_(2)


def compiled_forms(model: nn.Module) -> dict[str, Callable[[torch.Tensor], torch.Tensor]]:
    def inside(x: torch.Tensor) -> torch.Tensor:
        return model(2 * x)

    return {form: torch.compile(each, backend="eager") for form, each in (("module", model), ("function", inside))}


@pytest.mark.each_value
@pytest.mark.parametrize("training", [True, False])
@pytest.mark.parametrize("form", ["module", "function", "method", "layer"])
def test_a_streamed_model_under_torch_compile_is_refused_in_one_line(
    form: str, training: bool, make_stack: MakeStack, capfd: pytest.CaptureFixture[str]
):
    plain, model = both(make_stack)
    for each in (plain, model):
        each.train(training)
    x = torch.randn(3, WIDTH)
    compiled = model.layers[3] if form == "layer" else model
    if form in ("method", "layer"):
        compiled.compile(backend="eager")
        run = model
    else:
        run = compiled_forms(model)[form]
    with torch.set_grad_enabled(training), pytest.raises(Unsupported, match="leave it out .*placement='resident'") as e:
        run(x)
    assert "\n" not in str(e.value)
    assert capfd.readouterr() == ("", "")  # no page of dynamo's
    compiled._compiled_call_impl = None
    wanted = plain(x)
    assert torch.equal(model(x), wanted)  # and the model is as it was
    wanted.sum().backward()
    model(x).sum().backward()
    found = [param.grad.cpu() for param in model.parameters()]
    assert all(torch.equal(a, b.grad) for a, b in zip(found, plain.parameters(), strict=True))


@pytest.mark.parametrize("form", ["module", "method", "layer"])
def test_a_compiled_model_is_not_streamed_and_stays_as_it_is(form: str, make_stack: MakeStack):
    torch.manual_seed(0)
    model, stack, x = Net(), make_stack(4 << 10), torch.randn(3, WIDTH)
    wanted = model(x)
    run = model
    if form == "module":
        run = torch.compile(model, backend="eager")
    else:
        (model if form == "method" else model.layers[3]).compile(backend="eager")
    where = {"module": "OptimizedModule", "method": "Net", "layer": "layers.3"}[form]
    with pytest.raises(Unsupported, match=f"^{where} is compiled: .*leave it out"):
        enable_vgpu_stack_optimization(run, stack, placement="streamed")
    assert torch.equal(run(x), wanted) and all(level.used_bytes == 0 for level in stack.levels)


@pytest.mark.parametrize("order", ["compiled-first", "enabled-first"])
def test_a_compiled_model_that_is_resident_trains_to_the_same_bits(order: str, make_stack: MakeStack):
    torch.manual_seed(0)
    plain, stack, x = Net(), make_stack(1 << 20), torch.randn(3, WIDTH)
    model = copy.deepcopy(plain)
    if order == "compiled-first":
        model.compile(backend="eager")
    enable_vgpu_stack_optimization(model, stack, placement="resident")
    if order == "enabled-first":
        model.compile(backend="eager")
    optimizers = [VGPUAdamW(model.parameters(), lr=1e-2), torch.optim.AdamW(plain.parameters(), lr=1e-2, fused=True)]
    for _ in range(3):
        losses = [each(x).square().sum() for each in (model, plain)]
        assert torch.equal(*losses)
        for loss, optimizer in zip(losses, optimizers, strict=True):
            loss.backward()
            optimizer.step()
            optimizer.zero_grad()
    for each in (model, plain):
        each.eval()
    with torch.no_grad():
        assert torch.equal(model(x), plain(x))


def test_each_compiled_part_of_each_streamed_model_is_refused(make_stack: MakeStack, capfd: pytest.CaptureFixture[str]):
    """Also a part that is called alone, and more often than dynamo traces a function anew."""
    x = torch.randn(3, WIDTH)
    for index in range(5):
        model = enable_vgpu_stack_optimization(Normed(), make_stack(24 << 10), placement="streamed")
        wanted = model(x)
        for part in (model, model.layers[index], model.layers[index][0]):
            with pytest.raises(Unsupported, match="leave it out"):
                torch.compile(part, backend="eager")(x)
        assert torch.equal(model(x), wanted)
    assert capfd.readouterr() == ("", "")
