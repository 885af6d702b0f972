"""Mixtures of experts: those that get no token have no gradient,
and their group's others do not wait on level 0 for it.
"""

from __future__ import annotations

import copy

import pytest
import torch
from torch import nn

from tests.offload.conftest import MakeStack
from vblackwell.offload.api import enable_vgpu_stack_optimization
from vblackwell.offload.optimizer import VGPUAdamW

EXPERTS, USED, WIDTH = 8, 3, 32


class Block(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.gate = nn.Linear(WIDTH, EXPERTS)
        self.experts = nn.ModuleList(nn.Linear(WIDTH, WIDTH) for _ in range(EXPERTS))

    def forward(self, x: torch.Tensor, shift: int) -> torch.Tensor:
        weight, chosen = self.gate(x).softmax(-1).max(-1)
        out = torch.zeros_like(x)
        for number in range(USED):
            mine = chosen % USED == number
            out[mine] = self.experts[(number + shift) % EXPERTS](x[mine]) * weight[mine, None]
        return x + out


class Mixture(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.layers = nn.ModuleList(Block() for _ in range(5))

    def forward(self, x: torch.Tensor, shift: int) -> torch.Tensor:
        for layer in self.layers:
            x = layer(x, shift)
        return x.square().mean()


@pytest.mark.parametrize("options", [{}, {"update_in_backward": True, "accumulation_steps": 2, "max_grad_norm": 0.05}])
def test_experts_without_tokens_take_no_level_0(options: dict[str, object], make_stack: MakeStack):
    torch.manual_seed(0)
    plain = Mixture()
    block_bytes = sum(param.nbytes for param in plain.layers[0].parameters())
    model = copy.deepcopy(plain)
    enable_vgpu_stack_optimization(model, make_stack(int(2.5 * block_bytes)), placement="streamed")
    ours, theirs = VGPUAdamW(model.parameters(), **options), torch.optim.AdamW(plain.parameters(), fused=True)
    batches = torch.randn(6, 16, WIDTH)
    for step, x in enumerate(batches):
        for module, optimizer in ((model, ours), (plain, theirs)):
            module(x, step % 3).backward()
            if step % 2:
                if module is plain and options:
                    torch.nn.utils.clip_grad_norm_(plain.parameters(), 0.05)
                optimizer.step()
                optimizer.zero_grad()
    assert all(torch.equal(a, b) for a, b in zip(model.parameters(), plain.parameters(), strict=True))
