"""Small models of different make, with a batch and a loss each. Real `transformers` architectures, random weights."""

from __future__ import annotations

import logging
from collections.abc import Callable
from dataclasses import dataclass

import torch
from torch import nn
from torch.utils.checkpoint import checkpoint

from vblackwell.nn.decoder.decoder import Decoder, DecoderConfig


@dataclass(frozen=True)
class Case:
    """A model and what to feed it: ``loss(model, seed)`` makes the same batch for the same seed."""

    name: str
    build: Callable[[bool], nn.Module]  # (with checkpointing?)
    loss: Callable[[nn.Module, int], torch.Tensor]


class MLP(nn.Module):
    def __init__(self, use_checkpoint: bool) -> None:
        super().__init__()
        self.layers = nn.ModuleList(nn.Sequential(nn.Linear(48, 96), nn.GELU(), nn.Linear(96, 48)) for _ in range(4))
        self.head = nn.Linear(48, 7)
        self.use_checkpoint = use_checkpoint

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        for layer in self.layers:
            x = x + (checkpoint(layer, x, use_reentrant=False) if self.use_checkpoint else layer(x))
        return self.head(x)


def _random(seed: int) -> torch.Generator:
    return torch.Generator().manual_seed(seed)


def _tokens(seed: int, vocabulary: int, shape: tuple[int, ...] = (2, 12)) -> torch.Tensor:
    return torch.randint(vocabulary, shape, generator=_random(seed))


def _mlp_loss(model: nn.Module, seed: int) -> torch.Tensor:
    generator = _random(seed)
    x, y = torch.randn(16, 48, generator=generator), torch.randint(7, (16,), generator=generator)
    return nn.functional.cross_entropy(model(x), y)


def _decoder(use_checkpoint: bool) -> nn.Module:
    model = Decoder(
        DecoderConfig(
            vocab_size=97,
            hidden_size=32,
            intermediate_size=64,
            num_layers=3,
            num_heads=4,
            num_kv_heads=2,
            max_position=64,
        )
    )
    model.gradient_checkpointing = use_checkpoint
    return model


def _decoder_loss(model: nn.Module, seed: int) -> torch.Tensor:
    tokens = _tokens(seed, 97, (2, 13))
    return model(tokens[:, :-1].contiguous(), tokens[:, 1:].contiguous())


def _transformer(name: str, use_checkpoint: bool) -> nn.Module:
    import transformers

    logging.getLogger("transformers").setLevel(logging.ERROR)
    if name == "gpt2":
        config = transformers.GPT2Config(
            n_layer=3,
            n_embd=32,
            n_head=4,
            vocab_size=97,
            n_positions=32,
            bos_token_id=0,
            eos_token_id=0,
            use_cache=False,
        )
        model = transformers.GPT2LMHeadModel(config)
    elif name == "t5":
        model = transformers.T5ForConditionalGeneration(
            transformers.T5Config(
                d_model=32,
                d_kv=8,
                d_ff=64,
                num_layers=2,
                num_heads=4,
                vocab_size=97,
                decoder_start_token_id=0,
                use_cache=False,
            )
        )
    else:
        model = transformers.ViTForImageClassification(
            transformers.ViTConfig(
                hidden_size=32,
                num_hidden_layers=3,
                num_attention_heads=4,
                intermediate_size=64,
                image_size=32,
                patch_size=8,
                num_labels=7,
            )
        )
    if use_checkpoint:
        # transformers is renaming this: take the new name where there is one.
        enable = getattr(model, "activation_checkpointing_enable", None) or model.gradient_checkpointing_enable
        enable({"use_reentrant": False})
    return model.train()


def _gpt2_loss(model: nn.Module, seed: int) -> torch.Tensor:
    tokens = _tokens(seed, 97)
    return model(input_ids=tokens, labels=tokens).loss


def _t5_loss(model: nn.Module, seed: int) -> torch.Tensor:
    return model(input_ids=_tokens(seed, 97), labels=_tokens(seed + 1, 97)).loss


def _vit_loss(model: nn.Module, seed: int) -> torch.Tensor:
    generator = _random(seed)
    images, labels = torch.randn(4, 3, 32, 32, generator=generator), torch.randint(7, (4,), generator=generator)
    return model(pixel_values=images, labels=labels).loss


CASES = [
    Case("mlp", MLP, _mlp_loss),
    Case("decoder", _decoder, _decoder_loss),
    Case("gpt2", lambda use: _transformer("gpt2", use), _gpt2_loss),  # tied head, dropout
    Case("t5", lambda use: _transformer("t5", use), _t5_loss),  # three uses of one embedding, dropout
    Case("vit", lambda use: _transformer("vit", use), _vit_loss),  # bare parameters, a convolution
]


def build(case: Case, use_checkpoint: bool = False, seed: int = 0) -> nn.Module:
    """The case's model with weights from ``seed``."""
    torch.manual_seed(seed)
    return case.build(use_checkpoint)


def equal(left: nn.Module, right: nn.Module) -> bool:
    """Whether all parameters are, bit by bit but for the two zeros."""
    return all(torch.equal(a, b) for a, b in zip(left.parameters(), right.parameters(), strict=True))
