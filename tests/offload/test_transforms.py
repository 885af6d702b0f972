"""What sees the operators of a forward: transforms of torch.func, and checkpointing with a policy."""

from __future__ import annotations

import copy
from collections.abc import Callable
from functools import partial
from typing import Any

import pytest
import torch
from torch import nn
from torch.func import functional_call, grad, hessian, jacrev, jvp, vjp, vmap
from torch.utils.checkpoint import CheckpointPolicy, checkpoint, create_selective_checkpoint_contexts

from tests.offload.conftest import MakeStack
from vblackwell.errors import Unsupported
from vblackwell.offload.enable import enable_vgpu_stack_optimization
from vblackwell.offload.optimizer import VGPUAdamW

WIDTH = 16


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


@pytest.mark.filterwarnings(
    "ignore:.torch.jit.script. is deprecated"
)  # by torch's own forward-mode formulas, when first used
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
    model(x).sum().backward()  # and nothing is left behind


@pytest.mark.parametrize("batched", [False, True])
def test_a_function_of_offloaded_parameters_is_refused(batched: bool, make_stack: MakeStack):
    _, model = both(make_stack)
    transformed = grad(lambda params, x: functional_call(model, params, (x,)).sum())
    if batched:
        transformed = vmap(transformed, in_dims=(None, 0))
    with pytest.raises(Unsupported, match=r"torch\.func.*release\(model\)"):
        transformed(dict(model.named_parameters()), torch.ones(3, WIDTH))


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
