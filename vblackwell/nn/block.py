"""One block of the decoder: attention and SwiGLU feed-forward (Shazeer, arXiv:2002.05202), each behind an RMSNorm.

``nn.RMSNorm`` rounds once, after the weight; Hugging Face's Llama rounds to the compute dtype before it too. In fp32 both
give the same bits; in bf16 ours is the nearer to the exact value, and it runs as one fused kernel.
"""

from __future__ import annotations

from torch import Tensor, nn
from torch.nn import functional

from vblackwell.nn.attention import SelfAttention
from vblackwell.nn.cache import KVCache
from vblackwell.nn.decoder_config import DecoderConfig


class FeedForward(nn.Module):
    """``down(silu(gate(x)) * up(x))``; parameters named as in Hugging Face's Llama."""

    def __init__(self, config: DecoderConfig) -> None:
        super().__init__()
        self.gate_proj = nn.Linear(config.hidden_size, config.intermediate_size, bias=False)
        self.up_proj = nn.Linear(config.hidden_size, config.intermediate_size, bias=False)
        self.down_proj = nn.Linear(config.intermediate_size, config.hidden_size, bias=False)

    def forward(self, x_BSD: Tensor) -> Tensor:
        return self.down_proj(functional.silu(self.gate_proj(x_BSD)) * self.up_proj(x_BSD))


class DecoderLayer(nn.Module):
    """``x + attention(norm(x))``, then ``x + feed_forward(norm(x))``."""

    def __init__(self, config: DecoderConfig, layer: int) -> None:
        super().__init__()
        self.self_attn = SelfAttention(config, layer)
        self.mlp = FeedForward(config)
        self.input_layernorm = nn.RMSNorm(config.hidden_size, config.norm_eps)
        self.post_attention_layernorm = nn.RMSNorm(config.hidden_size, config.norm_eps)

    def forward(self, x_BSD: Tensor, cos_SH: Tensor, sin_SH: Tensor, cache: KVCache | None = None) -> Tensor:
        x_BSD = x_BSD + self.self_attn(self.input_layernorm(x_BSD), cos_SH, sin_SH, cache)
        return x_BSD + self.mlp(self.post_attention_layernorm(x_BSD))
