"""Adapters over an FP4 base, and writing, with a GPU as level 0: what the CPU makes of the same folder."""

from __future__ import annotations

import pytest
import torch
import transformers
from transformers import AutoModelForCausalLM

from tests.offload.test_lora import trained
from vblackwell.generate import streamed_step
from vblackwell.generate.adapters import save_adapter
from vblackwell.generate.causal_lm import load_causal_lm, save_causal_lm
from vblackwell.generate.generate import columns
from vblackwell.generate.load import open_streamed
from vblackwell.generate.sampling import Sampling
from vblackwell.generate.steps import level0_for
from vblackwell.generate.streamed_step import reasons_against
from vblackwell.kernels.fp4 import w4a8
from vblackwell.memory.cache.stack import VGPUStack
from vblackwell.nn.convert.lora import Lora
from vblackwell.nn.linear.stored_fp4 import StoredFP4Linear
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


@pytest.mark.parametrize(("recompute", "fp8"), [(False, False), (True, False), (True, True)])
def test_training_over_fp4_is_that_of_the_cpu(recompute, fp8, folder, tmp_path):
    if fp8 and torch.cuda.get_device_capability() < w4a8.FP8_CAPABILITY:
        pytest.skip("no FP8 tensor cores")
    losses, rows = {}, IDS.repeat(8 if fp8 else 1, 1)  # of 1,024 tokens, or 128
    assert (rows.numel() >= w4a8.MIN_ROWS) == fp8
    for device in ("arena", "cuda:0"):
        stack = stack_on(device)
        dtype = None if device == "arena" else torch.bfloat16
        how = {"fp4": "mxfp4" if fp8 else "nvfp4", "w4a8": fp8, "placement": "streamed", "compute_dtype": dtype}
        model = load_causal_lm(folder, stack, lora=Lora(8, alpha=32), **how)
        packed = [module for module in model.modules() if isinstance(module, StoredFP4Linear)]
        tiled = fp8 or device != "arena"
        assert len(packed) == 42 and all(module.layout.endswith("-tiled") == tiled for module in packed)
        if recompute:
            model.gradient_checkpointing_enable(gradient_checkpointing_kwargs={"use_reentrant": False})
        optimizer, ids = VGPUAdamW(trained(model), lr=5e-3, update_in_backward=True), rows.to(stack.level0_device)
        found = losses.setdefault(device, [])
        for _ in range(20):
            loss = model(input_ids=ids, labels=ids, use_cache=False).loss
            loss.backward()
            optimizer.step()
            optimizer.zero_grad()
            found.append(loss.detach().item())
    # bf16 against fp32: 8 bits of mantissa through six layers; the first loss sees no update, the last one twenty. With
    # FP8 both round inputs, which bf16 has moved by less than a step of E4M3.
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
def test_the_text_is_the_same_however_little_fits(fp4, folder, monkeypatch):
    """Next to the workspace's 512 MiB fit all; keys and values, and three layers; three layers alone.

    Steps over the stack's bytes launch the same kernels wherever those come from, and so do calls of the model: each
    writes the same text in any room. They are not compared with one another bit by bit: a step's attention and norms
    add up in other orders than the model's.
    """
    # MiB of 8.0 of weights in bf16, 2.6 in nvfp4, and 1.1 of keys and values; the largest group has 1.25 and 0.35.
    all_stays, weights_pass, both_pass = (512, 6.5, 4.5) if fp4 is None else (512, 2.9, 2.1)
    prompts, texts, moved, logits_BSV = IDS[:, :16], {}, {}, None

    def write(model, kind, extra, stack):
        before = carried(stack)
        with level0_for(model, 4, 48) as (cache, _):
            taken = not reasons_against(model, cache)
            written = list(columns(model, prompts.tolist(), 32, Sampling(temperature=0), 0, 5, cache))
        assert len(written) == 32
        texts[kind, extra], moved[kind, extra] = torch.tensor(written).T, carried(stack) - before
        return taken

    for extra in (all_stays, weights_pass, both_pass):
        levels = [{"device": "cuda:0", "capacity_mb": 512 + extra}, {"device": "cpu", "capacity_mb": 256}]
        stack = VGPUStack({"levels": levels})
        model = open_streamed(folder, stack, fp4=fp4)
        if extra != both_pass:
            assert write(model, "steps", extra, stack)
        with monkeypatch.context() as patched:
            patched.setattr(streamed_step, "streamed_step", lambda *args: None)
            assert write(model, "calls", extra, stack) == (extra != both_pass)
        if extra == all_stays:
            ids = torch.cat((prompts, texts["steps", extra]), 1).cuda()
            with torch.no_grad():
                logits_BSV = model(input_ids=ids, use_cache=False).logits[:, prompts.shape[1] - 1 : -1].float().cpu()
    assert torch.equal(texts["steps", all_stays], texts["steps", weights_pass])
    assert torch.equal(texts["calls", all_stays], texts["calls", weights_pass])
    assert torch.equal(texts["calls", all_stays], texts["calls", both_pass])
    for kind, extra in (("steps", weights_pass), ("calls", weights_pass), ("calls", both_pass)):
        assert moved[kind, extra] > 5 * moved["steps", all_stays]  # which loads once, at its prompt
    # A step's token is the model's up to what rounding may turn round: logits are off by less than 2^-4.3 of their
    # spread (as in test_steps.py), the highest of 512 by four and a half times that, and so may the chosen one
    # be. Most are short by three.
    assert logits_BSV is not None
    chosen_BS = logits_BSV.gather(-1, texts["steps", all_stays][..., None])[..., 0]
    short_BS = (logits_BSV.amax(-1) - chosen_BS) / logits_BSV.std(-1)
    assert float(short_BS.max()) < 2 * 4.5 * 2**-4.3
    assert float(short_BS.median()) == 0


def carried(stack) -> int:
    """Bytes that have come to level 0."""
    return sum(link["bytes"] for link in stack.get_stats()["links"] if link["destination"] == stack.levels[0].name)
