"""A streamed model, and a plain one that has what it is to have, bit by bit, in any format of compute weights.

The plain model has fp32 truths in `torch.optim.AdamW(fused=True)`, from which compute weights are rounded, and
gradients that add up in fp32.
"""

from __future__ import annotations

import copy
from collections.abc import Iterable

import torch
from torch import nn

from vblackwell.memory.cache.stack import VGPUStack
from vblackwell.offload.api import enable_vgpu_stack_optimization, offload_of
from vblackwell.offload.optimizer import VGPUAdamW
from vblackwell.offload.state import export_state
from vblackwell.offload.storage.masters import round_from_fp32

WIDTH, LAYERS = 64, 5
FAST_BYTES = 128 << 10


class Layers(nn.Module):
    """Groups of one size."""

    def __init__(self) -> None:
        super().__init__()
        torch.manual_seed(0)
        self.layers = nn.ModuleList(nn.Linear(WIDTH, WIDTH) for _ in range(LAYERS))
        self.unused: int | None = None  # a layer whose bias takes no part

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        for index, layer in enumerate(self.layers):
            bias = None if index == self.unused else layer.bias
            x = x + torch.tanh(nn.functional.linear(x, layer.weight, bias))
        return x


def loss_of(model: nn.Module, seed: int) -> torch.Tensor:
    x = torch.randn(8, WIDTH, generator=torch.Generator().manual_seed(seed))
    return model(x.to(next(model.parameters()).dtype)).float().square().mean()


class Plain:
    """A model that nothing moves, and its fp32 truths in torch's optimizer."""

    def __init__(self, model: nn.Module, dtype: torch.dtype, **options: object) -> None:
        self.truths = [nn.Parameter(param.detach().clone()) for param in model.parameters()]
        self.model = copy.deepcopy(model).to(dtype)
        self.optimizer = torch.optim.AdamW(self.truths, fused=True, **options)
        self.max_norm: float | None = None
        self.norm: float | None = None
        self._round()

    def _round(self) -> None:
        with torch.no_grad():
            for param, truth in zip(self.model.parameters(), self.truths, strict=True):
                round_from_fp32(truth.detach(), param.data)

    def backward(self, seed: int, scale: float = 1.0) -> float:
        loss = loss_of(self.model, seed)
        (loss * scale).backward()
        for param, truth in zip(self.model.parameters(), self.truths, strict=True):
            if param.grad is not None:
                fresh, param.grad = param.grad.float(), None
                truth.grad = fresh if truth.grad is None else truth.grad + fresh
        return loss.item()

    def step(self) -> None:
        if self.max_norm is not None:
            self.norm = nn.utils.clip_grad_norm_(self.truths, self.max_norm).item()
        self.optimizer.step()
        self._round()


class Twins:
    """One model, streamed and plain, which do the same."""

    def __init__(self, stack: VGPUStack, update: str | float, dtype: torch.dtype, **options: object) -> None:
        model = Layers()
        shared = {key: options[key] for key in options.keys() & {"lr", "weight_decay"}}
        self.plain, self.stack = Plain(model, dtype, **shared), stack
        self.model = enable_vgpu_stack_optimization(
            model, stack, placement="streamed", compute_dtype=dtype, update=update
        )
        self.ours = VGPUAdamW(model.parameters(), update_in_backward=True, **options)
        self.engine = offload_of(model)
        self.closed = False

    @property
    def behind(self) -> int:
        return sum(state.behind is not None for state in self.engine.states.values())

    def backward(self, seed: int, scale: float = 1.0) -> None:
        loss = loss_of(self.model, seed)
        (loss * scale).backward()
        assert loss.item() == self.plain.backward(seed, scale), seed

    def step(self, *, behind: bool = True, zero: bool = True) -> None:
        """``behind``: all groups have looked ahead, and their states lack this step; else no group's do."""
        early = [state.early for state in self.engine.states.values()]
        assert not behind or all(each is not None and each.ahead is not None for each in early)
        self.ours.step()
        self.plain.step()
        assert self.ours.max_grad_norm is None or self.ours.grad_norm == self.plain.norm
        assert self.behind == (len(self.engine.groups) if behind else 0)
        if zero:
            self.zero_grad()

    def zero_grad(self, *, set_to_none: bool = True) -> None:
        for optimizer in (self.ours, self.plain.optimizer):
            optimizer.zero_grad(set_to_none)

    def step_late(self) -> None:
        """A step that rolls back whatever has looked ahead: the groups are updated at it, and lack nothing."""
        self.step(behind=False)

    def step_any(self, *, zero: bool = True) -> None:
        """A step to which groups came in different ways."""
        self.ours.step()
        self.plain.step()
        if zero:
            self.zero_grad()

    def steps_any(self, seeds: Iterable[int]) -> None:
        for seed in seeds:
            self.backward(seed)
            self.step_any()

    def steps(self, seeds: Iterable[int]) -> None:
        for seed in seeds:
            self.backward(seed)
            self.step()

    def limit(self, norm: float) -> None:
        self.ours.max_grad_norm = self.plain.max_norm = norm

    def assert_states(self) -> None:
        """Truths, moments and counts, of every parameter."""
        for (name, ours), truth in zip(export_state(self.model, self.ours), self.plain.truths, strict=True):
            theirs = {"weight": truth.detach(), **self.plain.optimizer.state[truth]}
            assert ours.keys() == theirs.keys(), name
            for key, value in theirs.items():
                assert torch.equal(ours[key], value), (name, key)
        assert self.behind == 0

    def assert_weights(self) -> None:
        for ours, theirs in zip(self.model.parameters(), self.plain.model.parameters(), strict=True):
            assert ours.dtype == theirs.dtype and torch.equal(ours, theirs)
