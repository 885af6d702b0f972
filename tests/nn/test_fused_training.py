"""What `vb train` makes of a folder of transformers: fused operators, and a loss without the logits of a whole batch."""

from __future__ import annotations

import copy
from typing import Any

import pytest
import torch
from torch.utils._python_dispatch import TorchDispatchMode

from tests.nn.test_causal_lm import build
from tests.planner.test_forecast import H200
from vblackwell.kernels.pointwise import cross_entropy
from vblackwell.nn.convert.causal_lm import has_fused_loss, is_accelerated
from vblackwell.nn.convert.training import fuse, training_loss
from vblackwell.planner.estimator import Run
from vblackwell.planner.forecast import Forecast, Machine
from vblackwell.planner.model_spec import Subject
from vblackwell.planner.placement import Bounds
from vblackwell.train.auto import _copier, _loss
from vblackwell.units import GiB

TOKENS, VOCABULARY = 48, 97


class Largest(TorchDispatchMode):
    """The most elements that any operator gave at once."""

    elements = 0

    def __torch_dispatch__(self, func, types, args=(), kwargs=None):
        out = func(*args, **(kwargs or {}))
        for each in out if isinstance(out, (tuple, list)) else [out]:
            if isinstance(each, torch.Tensor):
                self.elements = max(self.elements, each.numel())
        return out


def step(model) -> tuple[torch.Tensor, list[torch.Tensor | None], int]:
    """Loss and gradients of one batch whose rows hold two documents each, and the largest tensor on the way."""
    ids = torch.randint(VOCABULARY, (2, TOKENS // 2), generator=torch.Generator().manual_seed(1))
    targets = ids.roll(-1, 1)
    targets[:, -1] = -100
    targets[0, :7] = -100
    model.zero_grad()
    with Largest() as largest:
        loss = training_loss(model)(ids, targets)
        loss.backward()
    return loss.detach(), [param.grad for param in model.parameters()], largest.elements


@pytest.mark.parametrize("name", ["Qwen2", "GPT2", "Mixtral", "Gemma2"])
def test_the_loss_is_the_same_and_its_logits_are_never_whole(name, monkeypatch):
    monkeypatch.setattr(cross_entropy, "CHUNK_BYTES", 16 * VOCABULARY * 4)
    monkeypatch.setattr(cross_entropy, "CHUNK_MULTIPLE", 16)
    model: Any = build(name).train()
    model.config.output_router_logits = False
    plain = copy.deepcopy(model)
    report = fuse(model)
    assert has_fused_loss(model) == (name != "Gemma2")  # its logits are capped on their way to the loss
    assert report is not None and ("a scale or a cap" in str(report)) == (name == "Gemma2")
    (loss, grads, most), (expected, right, most_plain) = step(model), step(plain)
    # fp32 sums in another order: a mean of 39 terms, gradients of as many.
    torch.testing.assert_close(loss, expected, rtol=1e-6, atol=0)
    for grad, other in zip(grads, right, strict=True):
        assert grad is not None and other is not None and (grad - other).norm() <= 1e-5 * other.norm() + 1e-9
    assert most_plain >= TOKENS * VOCABULARY
    if name == "Qwen2":  # nothing else of it has as many elements a token as there are words
        assert most < TOKENS * VOCABULARY


def test_routers_count_in_training_alone():
    model: Any = build("Mixtral")
    assert model.config.output_router_logits
    plain = copy.deepcopy(model)
    fuse(model)
    ids = torch.arange(24).reshape(2, 12)
    pure = training_loss(plain.eval())(ids, ids)  # by the logits: cross entropy and nothing else
    torch.testing.assert_close(training_loss(model.eval())(ids, ids), pure, rtol=1e-6, atol=0)
    assert training_loss(model.train())(ids, ids) > pure + 1e-3


def test_a_plan_is_made_for_the_model_that_runs():
    """Its copies are plain, so it has to fuse them again: without, it would count logits that never are."""
    model = build("Qwen2").to("meta")
    run = Run(Subject("model", _copier(model), VOCABULARY, _loss), 32, precision="bf16", capability=(9, 0))
    machine = Machine(Bounds(8 * GiB, 64 * GiB), H200)
    plain, fused = (Forecast(run, machine, fused=fused) for fused in (False, True))
    assert not is_accelerated(plain.model(False, False)) and has_fused_loss(fused.model(False, False))
    assert has_fused_loss(fused.model(False, True))  # FP4 first, then fused
    assert fused.trace(False, False, 2).work != plain.trace(False, False, 2).work
