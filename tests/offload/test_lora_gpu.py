"""Adapters over an FP4 base, and writing, with a GPU as level 0: what the CPU makes of the same folder."""

from __future__ import annotations

import pytest
import torch
import transformers
from transformers import AutoModelForCausalLM

from tests.offload.test_lora import trained
from vblackwell.infer.adapters import save_adapter
from vblackwell.infer.batch import columns
from vblackwell.infer.causal_lm import load_causal_lm, save_causal_lm
from vblackwell.infer.room import room_for
from vblackwell.infer.sampling import Sampling
from vblackwell.infer.streamed import open_streamed
from vblackwell.memory.stack import VGPUStack
from vblackwell.nn.lora_config import Lora
from vblackwell.nn.stored_fp4 import StoredFP4Linear
from vblackwell.offload.optimizer import VGPUAdamW

pytestmark = [
    pytest.mark.gpu,
    pytest.mark.filterwarnings(
        "ignore:.(is_gradient_checkpointing|gradient_checkpointing_enable). is deprecated:FutureWarning"
    ),
]
SIZES = {
    "vocab_size": 512,
    "hidden_size": 256,
    "intermediate_size": 512,
    "num_hidden_layers": 6,
    "num_attention_heads": 4,
}
IDS = torch.arange(128).view(4, 32)


@pytest.fixture
def folder(tmp_path):
    torch.manual_seed(0)
    config = transformers.LlamaConfig(**SIZES, initializer_range=0.1)
    AutoModelForCausalLM.from_config(config, dtype=torch.bfloat16).save_pretrained(tmp_path / "base")
    return tmp_path / "base"


def stack_on(device: str) -> VGPUStack:
    levels = [{"device": device, "capacity_mb": 256 if device != "arena" else 4}, {"device": "cpu", "capacity_mb": 256}]
    return VGPUStack({"levels": levels})


@pytest.mark.parametrize("recompute", [False, True])
def test_training_over_fp4_is_that_of_the_cpu(recompute, folder, tmp_path):
    losses = {}
    for device in ("arena", "cuda:0"):
        stack = stack_on(device)
        dtype = None if device == "arena" else torch.bfloat16
        model = load_causal_lm(
            folder, stack, lora=Lora(8, alpha=32), fp4="nvfp4", placement="streamed", compute_dtype=dtype
        )
        packed = [module for module in model.modules() if isinstance(module, StoredFP4Linear)]
        assert len(packed) == 42 and all(module.layout.endswith("-tiled") == (device != "arena") for module in packed)
        if recompute:
            model.gradient_checkpointing_enable(gradient_checkpointing_kwargs={"use_reentrant": False})
        optimizer, ids = VGPUAdamW(trained(model), lr=5e-3, update_in_backward=True), IDS.to(stack.level0_device)
        found = losses.setdefault(device, [])
        for _ in range(20):
            loss = model(input_ids=ids, labels=ids, use_cache=False).loss
            loss.backward()
            optimizer.step()
            optimizer.zero_grad()
            found.append(loss.detach().item())
    # bf16 against fp32: 8 bits of mantissa through six layers; the first loss sees no update, the last one twenty.
    assert losses["cuda:0"][0] == pytest.approx(losses["arena"][0], rel=0.01)
    assert losses["cuda:0"][-1] < 0.5 * losses["cuda:0"][0]
    save_adapter(model, tmp_path / "adapter")
    merged = AutoModelForCausalLM.from_pretrained(save_causal_lm(model, tmp_path / "merged")).cuda()
    with torch.no_grad():
        loss = float(merged(input_ids=IDS.cuda(), labels=IDS.cuda()).loss)
    assert loss < losses["cuda:0"][-1] * 1.05 + 0.05


@pytest.mark.parametrize("fp4", [None, "nvfp4"])
def test_logits_of_a_streamed_model(fp4, folder):
    """In bf16 on the GPU and on the CPU: 8 bits of mantissa, sums in other orders."""
    logits = []
    for device in ("arena", "cuda:0"):
        stack = stack_on(device)
        model = open_streamed(folder, stack, rows=4, tokens=32, fp4=fp4)
        with torch.no_grad():
            logits.append(model(input_ids=IDS.to(stack.level0_device), use_cache=False).logits.float().cpu())
    assert (logits[0] - logits[1]).norm() < 0.05 * logits[0].norm()


@pytest.mark.parametrize("fp4", [None, "nvfp4"])
def test_the_text_is_the_same_however_little_fits(fp4, folder):
    """Weights, keys and values pass through 512 MiB and little more, of which the workspace takes 512 MiB; or all of them stay."""
    texts, moved = [], []
    for extra in (512, 4.5 if fp4 is None else 2.1):
        levels = [{"device": "cuda:0", "capacity_mb": 512 + extra}, {"device": "cpu", "capacity_mb": 256}]
        stack = VGPUStack({"levels": levels})
        model = open_streamed(folder, stack, fp4=fp4)
        with room_for(model, 4, 48) as (cache, _):
            texts.append(list(columns(model, IDS[:, :16].tolist(), 32, Sampling(temperature=0), 0, 5, cache)))
        links = stack.get_stats()["links"]
        moved.append(sum(link["bytes"] for link in links if link["destination"] == "cuda:0"))
    assert texts[0] == texts[1] and len(texts[0]) == 32
    assert moved[1] > 5 * moved[0]
