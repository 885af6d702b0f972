"""What autograd keeps of an offloaded model's activations:
as plain PyTorch keeps them, with their versions and without cycles.
"""

from __future__ import annotations

import copy

import pytest
import torch
from torch import nn
from torch.multiprocessing.reductions import StorageWeakRef

from tests.offload.conftest import MakeStack
from vblackwell.offload.api import enable_vgpu_stack_optimization, offload_of


class Block(nn.Module):
    """A layer group whose activation saves its own output."""

    def __init__(self) -> None:
        super().__init__()
        self.linear = nn.Linear(16, 16)

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        return (self.linear(x) / 16).exp()


class Exponentials(nn.Module):
    """``fail``: after the last block; ``write``: into an output that backward needs."""

    def __init__(self) -> None:
        super().__init__()
        self.layers = nn.ModuleList(Block() for _ in range(3))
        self.fail = self.write = False
        self.outputs: list[StorageWeakRef] = []

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        for layer in self.layers:
            x = layer(x)
            self.outputs.append(StorageWeakRef(x.untyped_storage()))
        if self.fail:
            raise torch.OutOfMemoryError("CUDA out of memory")
        return x.add_(1) if self.write else x + 1


@pytest.fixture
def model(make_stack: MakeStack) -> Exponentials:
    plain = Exponentials()
    model = enable_vgpu_stack_optimization(plain, make_stack(4 << 10), placement="streamed")
    assert isinstance(model, Exponentials)
    return model


def test_a_forward_that_fails_leaves_no_activation(model: Exponentials):
    """What it leaves a retry with a smaller batch would find taken."""
    model.fail = True
    for _ in range(2):
        with pytest.raises(torch.OutOfMemoryError):
            model(torch.ones(4, 16))
    # Without gc.collect(): nothing waits for Python's collector, and cycles through C++ it would not see.
    assert len(model.outputs) == 6 and all(each.expired() for each in model.outputs)
    model.fail = False
    model(torch.ones(4, 16)).sum().backward()
    engine = offload_of(model)
    assert engine is not None
    engine.finish()
    assert all(each.expired() for each in model.outputs)


def test_a_write_into_what_backward_needs_is_refused(model: Exponentials):
    model.write = True
    plain = copy.deepcopy(model)
    for each in (plain, model):
        with pytest.raises(RuntimeError, match="modified by an inplace operation.*version 1; expected version 0"):
            each(torch.ones(4, 16)).sum().backward()
