"""Models of transformers: folder -> stack -> a step -> folder,
bit for bit what transformers and torch's AdamW make of them.
"""

from __future__ import annotations

import shutil
from pathlib import Path

import pytest
import torch
import transformers
from transformers import AutoModelForCausalLM

from vblackwell.generate.causal_lm import load_causal_lm, save_causal_lm
from vblackwell.offload.api import offload_of
from vblackwell.offload.engine import Offload
from vblackwell.offload.optimizer import VGPUAdamW

SHAPE = {
    "vocab_size": 96, "hidden_size": 32, "intermediate_size": 48, "num_hidden_layers": 4, "num_attention_heads": 4,
    "num_key_value_heads": 2, "max_position_embeddings": 64, "bos_token_id": 1, "eos_token_id": 2, "pad_token_id": 0,
}  # fmt: skip
ENDS = {"vocab_size": 96, "bos_token_id": 1, "eos_token_id": 2, "pad_token_id": 0}
CONFIGS = {
    "llama": lambda **more: transformers.LlamaConfig(**SHAPE | more),
    "qwen2": lambda **more: transformers.Qwen2Config(**SHAPE | more, tie_word_embeddings=True),
    "qwen3": lambda **more: transformers.Qwen3Config(**SHAPE | more, head_dim=8),
    "mistral": lambda **more: transformers.MistralConfig(**SHAPE | more, sliding_window=8),
    "mixtral": lambda **more: transformers.MixtralConfig(**SHAPE | more, num_local_experts=4),
    "gpt2": lambda **more: transformers.GPT2Config(
        **ENDS | {"num_hidden_layers": 4} | more, n_embd=32, n_head=4, n_positions=64
    ),
    "gemma": lambda **more: transformers.GemmaConfig(**SHAPE | more, head_dim=8),
    "phi": lambda **more: transformers.PhiConfig(**SHAPE | more),
    "opt": lambda **more: transformers.OPTConfig(
        **ENDS | {"num_hidden_layers": 4} | more,
        hidden_size=32,
        ffn_dim=48,
        num_attention_heads=4,
        max_position_embeddings=64,
        word_embed_proj_dim=32,
    ),
}
RATES = {"lr": 1e-2, "weight_decay": 0.1}


def tokens() -> torch.Tensor:
    return torch.randint(3, 96, (2, 12), generator=torch.Generator().manual_seed(1))


def step(model, optimizer) -> torch.Tensor:
    """One training step; the logits before it. Dropout draws from torch's generator, which is set."""
    torch.manual_seed(2)
    output = model(input_ids=tokens(), labels=tokens(), use_cache=False)
    output.loss.backward()
    optimizer.step()
    optimizer.zero_grad()
    return output.logits.detach().clone()


def same_bits(one: torch.Tensor, other: torch.Tensor) -> bool:
    return one.dtype == other.dtype and torch.equal(
        one.contiguous().view(torch.int32), other.contiguous().view(torch.int32)
    )


WRITTEN: dict[tuple[object, ...], Path] = {}  # folders that no test changes


@pytest.fixture
def written(tmp_path, tmp_path_factory):
    """``written(kind, dtype, **more)``: a folder that transformers wrote of a small random model, in several shards."""

    def write(kind: str, dtype: torch.dtype = torch.float32, **more: int) -> Path:
        key = (kind, dtype, *sorted(more.items()))
        torch.manual_seed(0)
        if key not in WRITTEN:
            model = AutoModelForCausalLM.from_config(CONFIGS[kind](**more)).to(dtype)
            folder = tmp_path_factory.mktemp(kind)
            model.save_pretrained(folder, max_shard_size="40KB")
            WRITTEN[key] = folder
        return Path(shutil.copytree(WRITTEN[key], tmp_path / kind))

    return write


LIKE_LLAMA = {"qwen3", "mistral"}  # but for a norm of heads and a window, of which the stack knows nothing


@pytest.mark.parametrize(
    "kind", [pytest.param(kind, marks=[pytest.mark.slow] * (kind in LIKE_LLAMA)) for kind in CONFIGS]
)
def test_a_step_and_back(kind, written, make_stack, tmp_path):
    folder = written(kind)
    plain = AutoModelForCausalLM.from_pretrained(folder).train()
    expected = step(plain, torch.optim.AdamW(plain.parameters(), fused=True, **RATES))

    weight_bytes = sum(4 * param.numel() for param in plain.parameters())
    stack = make_stack(int(0.6 * weight_bytes))  # the weights alone are more than level 0 may hold
    model = load_causal_lm(folder, stack, placement="streamed")
    assert isinstance(offload_of(model), Offload)
    logits = step(model, VGPUAdamW(model.parameters(), **RATES))
    assert same_bits(logits, expected)

    save_causal_lm(model, tmp_path / "out")
    opened, report = AutoModelForCausalLM.from_pretrained(tmp_path / "out", output_loading_info=True)
    assert not any(report[key] for key in ("missing_keys", "unexpected_keys", "mismatched_keys"))
    assert opened.config.to_dict().keys() == plain.config.to_dict().keys()
    found, wanted = dict(opened.named_parameters()), dict(plain.named_parameters())
    assert found.keys() == wanted.keys()
    assert [name for name in wanted if not same_bits(found[name], wanted[name])] == []
    with torch.no_grad():
        assert same_bits(opened.eval()(tokens()).logits, plain.eval()(tokens()).logits)
