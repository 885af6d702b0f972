"""Small models of different make, with a batch and a loss each, and the stacks that they stream through."""

from __future__ import annotations

from collections.abc import Callable
from pathlib import Path
from typing import Any

import torch
from torch import nn
from torch.nn import functional

import vblackwell as vb

FORMATS = ("nvfp4", "mxfp4", "nf4", "int4", "int8")
VOCABULARY = 96

SIZES = {
    "vocab_size": VOCABULARY, "hidden_size": 32, "intermediate_size": 64, "num_hidden_layers": 5,
    "num_attention_heads": 4, "num_key_value_heads": 2, "max_position_embeddings": 64,
    "bos_token_id": 1, "eos_token_id": 2, "use_cache": False,
}  # fmt: skip


def causal_model(kind: str, checkpointing: bool = False, dtype: torch.dtype = torch.float32) -> Any:
    import transformers

    transformers.logging.set_verbosity_error()
    ends = {"bos_token_id": 1, "eos_token_id": 2}
    gpt2 = {"vocab_size": VOCABULARY, "n_embd": 32, "n_layer": 5, "n_head": 4, "n_positions": 64, "use_cache": False}
    configs: dict[str, Callable[[], Any]] = {
        "llama": lambda: transformers.LlamaConfig(**SIZES),
        "qwen2-tied": lambda: transformers.Qwen2Config(**SIZES, tie_word_embeddings=True),
        "mixtral": lambda: transformers.MixtralConfig(**SIZES, num_local_experts=4),
        "gpt2": lambda: transformers.GPT2Config(**gpt2, **ends),  # tied head, dropout
    }
    torch.manual_seed(0)
    model = transformers.AutoModelForCausalLM.from_config(configs[kind](), dtype=dtype)
    if checkpointing:
        model.gradient_checkpointing_enable({"use_reentrant": False})
    return model.train()


def causal_loss(model: Any, seed: int) -> torch.Tensor:
    tokens_BS = torch.randint(3, VOCABULARY, (2, 12), generator=torch.Generator().manual_seed(seed))
    return model(input_ids=tokens_BS, labels=tokens_BS).loss


class Mlp(nn.Module):
    """Blocks that share one learnt scale, and a BatchNorm, whose buffers move."""

    def __init__(self) -> None:
        super().__init__()
        blocks = (nn.Sequential(nn.Linear(48, 96), nn.BatchNorm1d(96), nn.GELU(), nn.Linear(96, 48)) for _ in range(4))
        self.layers = nn.ModuleList(blocks)
        self.scale = nn.Parameter(torch.ones(48))
        self.head = nn.Linear(48, 7)

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        for layer in self.layers:
            x = x + layer(x) * self.scale
        return self.head(x)


def mlp() -> nn.Module:
    torch.manual_seed(0)
    return Mlp()


def mlp_loss(model: nn.Module, seed: int) -> torch.Tensor:
    generator = torch.Generator().manual_seed(seed)
    x, y = torch.randn(16, 48, generator=generator), torch.randint(7, (16,), generator=generator)
    return functional.cross_entropy(model(x), y)


class Wide(nn.Module):
    """An embedding and a head that are larger than level 0, and are computed in slices."""

    def __init__(self, tied: bool) -> None:
        super().__init__()
        self.embedding = nn.Embedding(1000, 32, padding_idx=3)
        self.layers = nn.ModuleList(nn.Linear(32, 32) for _ in range(2))
        self.head = nn.Linear(32, 1000, bias=False)
        if tied:
            self.head.weight = self.embedding.weight

    def forward(self, tokens_BS: torch.Tensor) -> torch.Tensor:
        x_BSD = self.embedding(tokens_BS)
        for layer in self.layers:
            x_BSD = x_BSD + torch.tanh(layer(x_BSD))
        return self.head(x_BSD)


def wide(tied: bool) -> nn.Module:
    torch.manual_seed(0)
    return Wide(tied)


def wide_loss(model: nn.Module, seed: int) -> torch.Tensor:
    tokens_BS = torch.randint(1000, (4, 16), generator=torch.Generator().manual_seed(seed))
    return functional.cross_entropy(model(tokens_BS).float().flatten(0, 1), (7 * tokens_BS.flatten() + 1) % 1000)


class Mixture(nn.Module):
    """Blocks of eight experts, of which each step uses three."""

    def __init__(self) -> None:
        super().__init__()
        self.gates = nn.ModuleList(nn.Linear(32, 8) for _ in range(4))
        self.layers = nn.ModuleList(nn.ModuleList(nn.Linear(32, 32) for _ in range(8)) for _ in range(4))

    def forward(self, x: torch.Tensor, shift: int) -> torch.Tensor:
        for gate, experts in zip(self.gates, self.layers, strict=True):
            weight, chosen = gate(x).softmax(-1).max(-1)
            out = torch.zeros_like(x)
            for number in range(3):
                mine = chosen % 3 == number
                out[mine] = experts[(number + shift) % 8](x[mine]) * weight[mine, None]
            x = x + out
        return x


def mixture() -> nn.Module:
    torch.manual_seed(0)
    return Mixture()


def mixture_loss(model: nn.Module, seed: int) -> torch.Tensor:
    x = torch.randn(16, 32, generator=torch.Generator().manual_seed(seed))
    return model(x, seed % 3).square().mean()


def llama_folder(folder: Path, tokenizer: bool = False) -> Path:
    """A folder that transformers wrote; with ``tokenizer`` one of single letters and bytes."""
    made = folder / "llama"
    model = causal_model("llama")
    model.generation_config.do_sample = False
    model.save_pretrained(made)
    if tokenizer:
        from tokenizers import Tokenizer
        from tokenizers.models import BPE
        from tokenizers.pre_tokenizers import ByteLevel

        letters = "abcdefghijklmnopqrstuvwxyzĠĊ"
        vocabulary = {letters[i] if i < len(letters) else f"<{i}>": i for i in range(VOCABULARY)}
        tokens = Tokenizer(BPE(vocabulary, [], unk_token="<95>"))
        tokens.pre_tokenizer = ByteLevel(add_prefix_space=False)  # pyright: ignore[reportAttributeAccessIssue]
        tokens.save(str(made / "tokenizer.json"))
    return made


def make_stack(folder: Path, fast_kib: float, host_kib: float | None = None) -> vb.VGPUStack:
    """An arena over RAM; with ``host_kib`` RAM is short, and a disk lies below."""
    levels = [
        {"device": "arena", "capacity_mb": fast_kib / 1024},
        {"device": "cpu", "capacity_mb": 16 if host_kib is None else host_kib / 1024},
    ]
    if host_kib is not None:
        levels.append({"device": "ssd", "capacity_mb": 64, "path": str(folder)})
    return vb.VGPUStack({"levels": levels})
