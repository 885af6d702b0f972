"""Offloaded training is the same training: every loss and every final parameter `torch.equal` to plain PyTorch's.

The reference is `torch.optim.AdamW(fused=True)` with `torch.nn.utils.clip_grad_norm_` on a plain module, fp32 on the
CPU.
"""

from __future__ import annotations

import functools
import itertools
from typing import Any

import pytest
import torch
from torch import nn

from tests.offload.conftest import MakeStack
from tests.offload.models import CASES, Case, build
from vblackwell.offload.api import bytes_when_resident, enable_vgpu_stack_optimization, offload_of, release
from vblackwell.offload.engine import Offload
from vblackwell.offload.layout.groups import find_groups
from vblackwell.offload.optimizer import VGPUAdamW

# The first pass records the order of the groups, the second is the first that follows it, and an update may lag after
# its step: from the third step on all are alike.
STEPS, ACCUMULATION = 4, 2
# Among the norms of each model some are above and some below: both branches of clipping are taken.
MAX_NORM = {"mlp": 1.55, "decoder": 1.275, "gpt2": 1.5, "t5": 1.8, "vit": 2.25}


def parameter_groups(model: nn.Module) -> list[dict[str, Any]]:
    """Two groups, as people make them: matrices decay, the rest does not and learns at another rate."""
    params = list(model.parameters())
    return [
        {"params": [param for param in params if param.ndim >= 2], "weight_decay": 0.1, "lr": 3e-3},
        {"params": [param for param in params if param.ndim < 2], "weight_decay": 0.0, "lr": 1e-3},
    ]


@functools.cache
def trained_plain(case: Case, use_checkpoint: bool) -> tuple[list[float], dict[str, torch.Tensor]]:
    """Losses of the plain model and its final parameters; the same for every way to offload it."""
    model = build(case, use_checkpoint)
    optimizer = torch.optim.AdamW(parameter_groups(model), betas=(0.9, 0.95), fused=True)
    losses, norms, max_norm = [], [], MAX_NORM[case.name]
    torch.manual_seed(1)
    for step in range(STEPS):
        for micro in range(ACCUMULATION):
            loss = case.loss(model, 100 * step + micro) / ACCUMULATION
            loss.backward()
            losses.append(loss.item())
        norms.append(torch.nn.utils.clip_grad_norm_(list(dict.fromkeys(_in_order(optimizer))), max_norm).item())
        optimizer.step()
        optimizer.zero_grad()
    assert min(norms) < max_norm < max(norms)
    return losses, {name: param.detach().clone() for name, param in model.named_parameters()}


def _in_order(optimizer: torch.optim.Optimizer) -> list[torch.Tensor]:
    return [param for group in optimizer.param_groups for param in group["params"]]


def train_offloaded(case: Case, model: nn.Module, update_in_backward: bool) -> list[float]:
    optimizer = VGPUAdamW(
        parameter_groups(model),
        betas=(0.9, 0.95),
        max_grad_norm=MAX_NORM[case.name],
        update_in_backward=update_in_backward,
        accumulation_steps=ACCUMULATION,
    )
    losses = []
    torch.manual_seed(1)
    for step in range(STEPS):
        for micro in range(ACCUMULATION):
            loss = case.loss(model, 100 * step + micro) / ACCUMULATION
            loss.backward()
            losses.append(loss.item())
        optimizer.step()
        optimizer.zero_grad()
    return losses


def tight_level0(model: nn.Module) -> int:
    """Level-0 bytes for the largest group, its gradient, and one more group: about the floor."""
    groups, _ = find_groups(model)
    return 3 * max(group.num_bytes for group in groups) + (16 << 10)


# Of each model one way to train it, which are each pair of when and where it is updated; its others are slow.
QUICK = {
    "mlp": (False, False, "device"),
    "decoder": (True, True, "host"),
    "gpt2": (False, True, "device"),
    "t5": (True, False, "host"),
    "vit": (False, True, "host"),
}
WAYS = list(itertools.product([False, True], [False, True], ["host", "device"]))


@pytest.mark.each_value
@pytest.mark.parametrize(
    ("case", "use_checkpoint", "update_in_backward", "update"),
    [
        pytest.param(
            case,
            *way,
            marks=() if way == QUICK[case.name] else pytest.mark.slow,
            id=f"{case.name}-{'recomputed' if way[0] else 'saved'}-{'in-backward' if way[1] else 'at-step'}-{way[2]}",
        )
        for case in CASES
        for way in WAYS
    ],
)
def test_equal_to_plain(
    case: Case, use_checkpoint: bool, update_in_backward: bool, update: str, make_stack: MakeStack
) -> None:
    expected, final = trained_plain(case, use_checkpoint)
    model = build(case, use_checkpoint)
    initial = {name: param.detach().clone() for name, param in model.named_parameters()}

    level0 = tight_level0(model)
    assert level0 < bytes_when_resident(model, None) / 3, "the model would not have to stream"
    stack = make_stack(level0)
    enable_vgpu_stack_optimization(model, stack, update=update)
    engine = offload_of(model)
    assert isinstance(engine, Offload)
    losses = train_offloaded(case, model, update_in_backward)
    stats = stack.get_stats()
    release(model)

    assert losses == expected
    found = dict(model.named_parameters())
    assert found.keys() == final.keys() and not [name for name in final if not torch.equal(found[name], final[name])]
    unchanged = [name for name, param in model.named_parameters() if torch.equal(param, initial[name])]
    assert not unchanged
    # It was offloaded: level 0 stayed under its cap, and every group went up at least once a micro-batch.
    assert stats["levels"][0]["peak_bytes"] <= level0
    up = sum(link["bytes"] for link in stats["links"] if link["destination"] == stats["levels"][0]["device"])
    assert up >= STEPS * ACCUMULATION * sum(group.num_bytes for group in engine.groups) * 0.5
