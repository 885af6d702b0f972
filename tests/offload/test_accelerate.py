"""A loop on `accelerate.Accelerator` over an offloaded model:
losses, norms, weights and files are those of a plain model, bit for bit.
"""

from __future__ import annotations

import accelerate
import pytest
import torch
from accelerate.state import AcceleratorState, GradientState
from safetensors.torch import load_file
from torch.utils.data import DataLoader
from transformers import AutoModelForCausalLM

from tests.offload.test_round_trip_models import CONFIGS, RATES, same_bits
from vblackwell.offload.api import enable_vgpu_stack_optimization, offload_of
from vblackwell.offload.engine import Offload
from vblackwell.offload.optimizer import VGPUAdamW

STEPS = 6  # micro-batches: three steps of two


@pytest.fixture(autouse=True)
def one_state():
    """accelerate keeps what it was told in the process."""
    yield
    AcceleratorState._reset_state(True)
    GradientState._reset_state()


class Run:
    """One model under accelerate: a loop as its manual has it, with clipping, a schedule and accumulation."""

    def __init__(self, kind: str, make_stack=None, share: float = 0.6, **options) -> None:
        torch.manual_seed(0)
        model = AutoModelForCausalLM.from_config(CONFIGS[kind]()).train()
        if make_stack is None:
            optimizer: torch.optim.Optimizer = torch.optim.AdamW(model.parameters(), fused=True, **RATES)
        else:
            weight_bytes = sum(4 * param.numel() for param in model.parameters())
            enable_vgpu_stack_optimization(model, make_stack(int(share * weight_bytes)))
            assert isinstance(offload_of(model), Offload) == (share < 1)
            optimizer = VGPUAdamW(model.parameters(), **RATES, **options)
        schedule = torch.optim.lr_scheduler.StepLR(optimizer, 1, 0.5)
        rows = torch.randint(3, 96, (2 * STEPS, 12), generator=torch.Generator().manual_seed(1))
        self.accelerator = accelerate.Accelerator(gradient_accumulation_steps=2, cpu=True)
        self.model, self.optimizer, self.loader, self.schedule = self.accelerator.prepare(
            model, optimizer, DataLoader(rows, batch_size=2), schedule
        )

    def train(self, first: int = 0, last: int = STEPS) -> list[float]:
        """Micro-batches ``first`` to ``last``; their losses and the norms of their steps."""
        found = []
        for number, batch in enumerate(self.loader):
            if not first <= number < last:
                continue
            torch.manual_seed(number)  # of dropout
            with self.accelerator.accumulate(self.model):
                loss = self.model(input_ids=batch, labels=batch, use_cache=False).loss
                self.accelerator.backward(loss)
                if self.accelerator.sync_gradients:
                    norm = self.accelerator.clip_grad_norm_(self.model.parameters(), 0.5)
                    found.append(norm.item())
                self.optimizer.step()
                self.schedule.step()
                self.optimizer.zero_grad()
            found.append(loss.item())
        return found

    def weights(self) -> dict[str, torch.Tensor]:
        return {name: value.clone() for name, value in self.accelerator.get_state_dict(self.model).items()}


def same(found: dict[str, torch.Tensor], wanted: dict[str, torch.Tensor]) -> bool:
    return found.keys() == wanted.keys() and all(same_bits(found[name], wanted[name]) for name in wanted)


@pytest.mark.parametrize(
    ("kind", "options"),
    [("llama", {}), ("gpt2", {"update_in_backward": True, "accumulation_steps": 2}), ("gpt2", {"share": 6})],
)
def test_a_loop_is_that_of_a_plain_model(kind, options, make_stack, tmp_path):
    plain, ours = Run(kind), Run(kind, make_stack, **options)
    found, wanted = ours.train(), plain.train()
    assert found == wanted and len(found) == STEPS + STEPS // 2 and max(found[2::3]) > 0.5
    assert same(ours.weights(), plain.weights())
    for run, folder in ((ours, "ours"), (plain, "plain")):
        run.accelerator.save_model(run.model, str(tmp_path / folder))
    assert same(*(load_file(tmp_path / folder / "model.safetensors") for folder in ("ours", "plain")))


def test_a_saved_state_goes_on_with_and_without_a_stack(make_stack, tmp_path):
    kind = "gpt2"  # its head is tied, and comes once in a file
    whole = Run(kind)
    wanted = whole.train()
    begun = Run(kind, make_stack)
    begun.train(last=2)
    begun.accelerator.save_state(str(tmp_path / "state"))
    for stack in (make_stack, None):
        again = Run(kind, stack)
        again.accelerator.load_state(str(tmp_path / "state"))
        assert again.train(first=2) == wanted[3:]
        assert same(again.weights(), whole.weights())
