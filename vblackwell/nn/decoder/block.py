"""One block of the decoder: attention and SwiGLU feed-forward (Shazeer, arXiv:2002.05202), each after an RMSNorm.

On CUDA what is no matrix product runs as fused kernels (vblackwell/kernels), one pass over memory each way; on the CPU
as the plain expressions. A few rows of a packed decoder meet their first norm inside the projections
(linear/normed.py). RMSNorm rounds once, after the weight; Hugging Face's Llama rounds to the compute dtype before it
too. In fp32 both give the same bits; in bf16 ours is the nearer to the exact value.
"""

from __future__ import annotations

import torch
from torch import Tensor, nn

from vblackwell.kernels.pointwise.rows import add_rms_norm, rms_norm
from vblackwell.nn.decoder.attention import SelfAttention
from vblackwell.nn.decoder.cache import KVCache, SteadyCache
from vblackwell.nn.decoder.config import DecoderConfig
from vblackwell.nn.linear.normed import lean_feed_forward, normed, normed_later
from vblackwell.nn.linear.one_input import Unnormed, gated_product, hooked, linears_of_one_input


class RMSNorm(nn.RMSNorm):
    """``nn.RMSNorm`` over the last dimension, as one kernel each way on CUDA."""

    def __init__(self, width: int, eps: float) -> None:
        super().__init__(width, eps)
        self.epsilon = eps

    def forward(self, x: Tensor) -> Tensor:
        return rms_norm(x, self.weight, self.epsilon)


class AddRMSNorm(RMSNorm):
    """``(norm(x + residual), x + residual)``."""

    def forward(self, x: Tensor, residual: Tensor) -> tuple[Tensor, Tensor]:  # type: ignore[override]
        return add_rms_norm(x, residual, self.weight, self.epsilon)


class FeedForward(nn.Module):
    """``down(silu(gate(x)) * up(x))``; parameters named as in Hugging Face's Llama."""

    def __init__(self, config: DecoderConfig) -> None:
        super().__init__()
        self.gate_proj = nn.Linear(config.hidden_size, config.intermediate_size, bias=False)
        self.up_proj = nn.Linear(config.hidden_size, config.intermediate_size, bias=False)
        self.down_proj = nn.Linear(config.intermediate_size, config.hidden_size, bias=False)

    def forward(self, x_BSD: Tensor, wanted: bool = True) -> Tensor:
        gate_BSF, up_BSF = linears_of_one_input(x_BSD, self.gate_proj, self.up_proj)
        return gated_product(gate_BSF, up_BSF, self.down_proj, wanted)


class DecoderLayer(nn.Module):
    """``x + attention(norm(x))``, then ``x + feed_forward(norm(x))``."""

    def __init__(self, config: DecoderConfig, layer: int) -> None:
        super().__init__()
        self.self_attn = SelfAttention(config, layer)
        self.mlp = FeedForward(config)
        self.input_layernorm = RMSNorm(config.hidden_size, config.norm_eps)
        self.post_attention_layernorm = AddRMSNorm(config.hidden_size, config.norm_eps)

    def forward(
        self,
        x_BSD: Tensor,
        cos_SH: Tensor,
        sin_SH: Tensor,
        cache: KVCache | SteadyCache | None = None,
        mask_BSS: Tensor | None = None,
        wanted: bool = True,
        lean: tuple[str, ...] = (),
    ) -> Tensor:
        """(B, S, D) to the same.

        Args:
            wanted: False: the last product may be left out, because a checkpoint's second pass throws the output away.
            lean: of 'attention' and 'feed_forward', the halves that keep the residual stream alone (linear/normed.py):
                those under a checkpoint which keeps nothing of them.
        """
        attention, mlp = self.self_attn, self.mlp
        projections = (attention.q_proj, attention.k_proj, attention.v_proj)
        if hooked(attention):  # hooks that see its input expect a tensor
            rows_BSD = self.input_layernorm(x_BSD)
        else:
            rows_BSD = normed_later(x_BSD, self.input_layernorm, *projections) if "attention" in lean else None
            if rows_BSD is None:
                rows_BSD = normed(x_BSD, self.input_layernorm, *projections)
        attended_BSD = attention(rows_BSD, cos_SH, sin_SH, cache, mask_BSS)
        if "feed_forward" in lean:
            linears = (mlp.gate_proj, mlp.up_proj, mlp.down_proj)
            y_BSD = lean_feed_forward(attended_BSD, x_BSD, self.post_attention_layernorm, mlp, linears, wanted)
            if y_BSD is not None:
                return y_BSD
        normed_BSD, x_BSD = self.post_attention_layernorm(attended_BSD, x_BSD)
        return x_BSD + mlp(normed_BSD, wanted)

    def step(self, added_BSD: Tensor | None, x_BSD: Tensor, cache: SteadyCache) -> tuple[Tensor, Tensor]:
        """One position a row, (B, 1, D): as `forward` with the last sum left to the next norm, which makes it on the way.

        Args:
            added_BSD: what is still to be added to ``x_BSD``; None: nothing.

        Returns:
            The same two after this layer.
        """
        attention, mlp, norm = self.self_attn, self.mlp, self.input_layernorm
        projections = (attention.q_proj, attention.k_proj, attention.v_proj)
        if hooked(self) or hooked(norm) or hooked(attention):  # hooks expect the calls of `forward`
            x_BSD = x_BSD if added_BSD is None else x_BSD + added_BSD
            y_BSD = self(x_BSD, x_BSD, x_BSD, cache)
            return torch.zeros_like(y_BSD), y_BSD
        rows_BSD: Tensor | Unnormed
        if added_BSD is None:
            rows_BSD = normed(x_BSD, norm, *projections)
        else:
            rows_BSD, x_BSD = add_rms_norm(added_BSD, x_BSD, norm.weight, norm.epsilon)
        attended_BSD = attention(rows_BSD, x_BSD, x_BSD, cache)  # tables are the cache's
        normed_BSD, x_BSD = self.post_attention_layernorm(attended_BSD, x_BSD)
        return mlp(normed_BSD), x_BSD
