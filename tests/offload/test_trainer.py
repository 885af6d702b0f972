"""`transformers.Trainer` over an offloaded model:
losses, norms, weights and files are those of a plain model, bit for bit.
"""

from __future__ import annotations

import pytest
import torch
import transformers
from safetensors.torch import load_file
from transformers import AutoModelForCausalLM

from tests.offload.test_round_trip_models import CONFIGS, same_bits
from vblackwell.errors import Unsupported
from vblackwell.offload.api import enable_vgpu_stack_optimization, offload_of
from vblackwell.offload.engine import Offload
from vblackwell.offload.optimizer import VGPUAdamW

# The newest transformers alone have another name for it.
pytestmark = pytest.mark.filterwarnings("ignore:.*gradient_checkpointing.* is deprecated:FutureWarning")
OPTIONS = {
    "max_steps": 4, "per_device_train_batch_size": 2, "gradient_accumulation_steps": 2, "max_grad_norm": 0.5,
    "learning_rate": 1e-2, "weight_decay": 0.1, "warmup_steps": 1, "lr_scheduler_type": "cosine", "logging_steps": 1,
    "save_steps": 2, "eval_strategy": "steps", "eval_steps": 2, "use_cpu": True, "dataloader_pin_memory": False,
    "disable_tqdm": True, "report_to": "none",
}  # fmt: skip
PLAIN = (torch.optim.AdamW, {"lr": OPTIONS["learning_rate"], "fused": True})
OURS = (VGPUAdamW, {"lr": OPTIONS["learning_rate"]})


@pytest.fixture
def trainer(tmp_path, make_stack):
    """``trainer(kind, out, optimizer)``: over a new small model, which is offloaded unless the optimizer is torch's."""

    def make(kind: str, out: str, optimizer=OURS, **options) -> transformers.Trainer:
        torch.manual_seed(0)
        model = AutoModelForCausalLM.from_config(CONFIGS[kind]())
        if optimizer is not PLAIN:
            weight_bytes = sum(4 * param.numel() for param in model.parameters())
            enable_vgpu_stack_optimization(model, make_stack(int(0.6 * weight_bytes)))
            assert isinstance(offload_of(model), Offload)
        rows = torch.randint(3, 96, (18, 12), generator=torch.Generator().manual_seed(1))
        data = [{"input_ids": row, "labels": row} for row in rows]
        arguments = transformers.TrainingArguments(str(tmp_path / out), **OPTIONS | options)
        return transformers.Trainer(
            model, arguments, train_dataset=data[2:], eval_dataset=data[:2], optimizer_cls_and_kwargs=optimizer
        )

    return make


def history(trainer: transformers.Trainer) -> list[dict[str, float]]:
    """What was logged, without what depends on the clock."""
    timed = ("runtime", "per_second")
    return [
        {key: value for key, value in entry.items() if not key.endswith(timed)} for entry in trainer.state.log_history
    ]


def weights(model) -> dict[str, torch.Tensor]:
    return {name: value.clone() for name, value in model.state_dict().items()}


def same(found: dict[str, torch.Tensor], wanted: dict[str, torch.Tensor]) -> bool:
    return found.keys() == wanted.keys() and all(same_bits(found[name], wanted[name]) for name in wanted)


@pytest.mark.parametrize(
    ("kind", "options"),
    [
        ("llama", {}),
        pytest.param(
            "llama",
            {"gradient_checkpointing": True, "gradient_checkpointing_kwargs": {"use_reentrant": True}},
            marks=pytest.mark.slow,
        ),
        pytest.param(
            "gpt2",
            {"gradient_checkpointing": True, "gradient_checkpointing_kwargs": {"use_reentrant": False}},
            marks=pytest.mark.slow,
        ),
    ],
)
def test_training_is_that_of_a_plain_trainer_and_goes_on_from_its_checkpoints(kind, options, trainer, tmp_path):
    plain, ours = trainer(kind, "plain", PLAIN, **options), trainer(kind, "ours", **options)
    for each in (plain, ours):
        torch.manual_seed(3)  # dropout and the order of the data draw from the generator
        each.train()
    assert any(entry.get("grad_norm", 0) > OPTIONS["max_grad_norm"] for entry in history(ours)), "some step is clipped"
    assert history(ours) == history(plain)
    assert same(weights(ours.model), weights(plain.model))

    for step in (2, 4):
        places = [tmp_path / side / f"checkpoint-{step}" for side in ("ours", "plain")]
        assert same(*(load_file(place / "model.safetensors") for place in places))
        found, wanted = (torch.load(place / "optimizer.pt") for place in places)
        assert found["param_groups"] == wanted["param_groups"] and found["state"].keys() == wanted["state"].keys()
        assert all(same(found["state"][index], wanted["state"][index]) for index in wanted["state"])
    opened = AutoModelForCausalLM.from_pretrained(tmp_path / "ours" / "checkpoint-4")
    assert same(weights(opened), weights(plain.model))

    if kind == "gpt2":  # whose dropout draws from the generator that a checkpoint restores
        for optimizer, begun in ((OURS, "plain"), (PLAIN, "ours")):
            again = trainer(kind, "again", optimizer, **options)
            torch.manual_seed(3)
            again.train(resume_from_checkpoint=str(tmp_path / begun / "checkpoint-2"))
            assert history(again)[-4:-1] == history(plain)[-4:-1]
            assert same(weights(again.model), weights(plain.model))


def test_clipping_by_the_optimizer_after_the_backward(trainer):
    """The Trainer then only measures, which rolls back no update: the factor was not in doubt before the step."""
    plain = trainer("llama", "plain", PLAIN)
    ahead = (VGPUAdamW, OURS[1] | {"max_grad_norm": 0.5, "update_in_backward": True, "accumulation_steps": 2})
    ours = trainer("llama", "ours", ahead, max_grad_norm=0.0)
    for each in (plain, ours):
        each.train()
    # The optimizer adds the norms with decayed parameters first, the Trainer in the model's order: a few dozen squares
    # in fp32, 1e-6 of the factor, and AdamW's quotient of moments is free of factors.
    for name, value in weights(ours.model).items():
        torch.testing.assert_close(value, weights(plain.model)[name], rtol=1e-5, atol=1e-6)
    norms = [[entry["grad_norm"] for entry in history(each) if "grad_norm" in entry] for each in (ours, plain)]
    torch.testing.assert_close(*map(torch.tensor, norms), rtol=1e-5, atol=0)


def test_an_optimizer_of_torch_is_refused(trainer):
    with pytest.raises(Unsupported, match="use VGPUAdamW"):
        trainer("llama", "ours", (torch.optim.AdamW, PLAIN[1])).train()
