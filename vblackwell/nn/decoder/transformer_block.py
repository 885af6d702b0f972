"""``OptimizedTransformerBlock``: attention and a feed-forward network, each after an RMSNorm.

Pre-norm (Xiong et al., arXiv:2002.04745): the sum that runs through the model is never normalised itself.

A block to build models of one's own from, with biases, GELU and dropout as in ``nn.TransformerEncoderLayer``; the
decoder that `vb train` trains has its own (block.py), in Llama's form. RMSNorm instead of LayerNorm, because norm and
residual sum are then one kernel on a GPU (kernels/pointwise/rows.py).

Legend: B batch, S positions, T keys, D model width, F feed-forward width, N heads.
"""

from __future__ import annotations

import torch
from torch import Tensor, nn
from torch.nn import functional

from vblackwell.errors import ConfigurationError
from vblackwell.kernels.fp4.reference import activate
from vblackwell.nn.attention.layer import FlashAttention
from vblackwell.nn.decoder.block import AddRMSNorm, RMSNorm
from vblackwell.nn.decoder.checkpoint import checkpoint
from vblackwell.nn.linear.fused_fp4 import FusedFP4Linear

NORM_EPSILON = 1e-6


class OptimizedTransformerBlock(nn.Module):
    """``h = x + attention(norm(x))``, then ``h + down(gelu(up(norm(h))))``; dropout on both branches and on attention's probabilities.

    Args:
        d_model: D, the width of inputs and outputs.
        n_heads: query heads, a divisor of ``d_model``.
        d_ff: F, the width between the two linears of the feed-forward network.
        dropout: probability, while training.
        use_fp4: all four projections train straight through nvfp4, and ``quantize()`` packs them.
        use_checkpoint: keep only the input for backward and compute the block again there.
        n_kv_heads, causal, window, rotary_theta, backend: as for ``FlashAttention``.

    Raises:
        ConfigurationError: sizes below 1, heads that do not divide the width, a dropout outside [0, 1).
    """

    def __init__(
        self, d_model: int, n_heads: int, d_ff: int, dropout: float = 0.0, use_fp4: bool = False,
        use_checkpoint: bool = False, *, n_kv_heads: int | None = None, causal: bool = False, window: int | None = None,
        rotary_theta: float | None = None, backend: str = "auto",
    ) -> None:  # fmt: skip
        super().__init__()
        if d_ff < 1:
            raise ConfigurationError(f"a feed-forward width of {d_ff}: give at least 1, usually 4 x {d_model}")
        self.dropout, self.use_fp4, self.use_checkpoint = dropout, use_fp4, use_checkpoint
        self.attention = FlashAttention(
            d_model, n_heads, dropout, n_kv_heads=n_kv_heads, causal=causal, window=window, rotary_theta=rotary_theta,
            backend=backend, use_fp4=use_fp4,
        )  # fmt: skip
        self.attention_norm = RMSNorm(d_model, NORM_EPSILON)
        self.feed_forward_norm = AddRMSNorm(d_model, NORM_EPSILON)
        self.up_proj: nn.Linear | FusedFP4Linear
        self.down_proj: nn.Linear | FusedFP4Linear
        if use_fp4:
            self.up_proj = FusedFP4Linear(d_model, d_ff, activation="gelu", use_fp4=True)
            self.down_proj = FusedFP4Linear(d_ff, d_model, use_fp4=True)
        else:
            self.up_proj, self.down_proj = nn.Linear(d_model, d_ff), nn.Linear(d_ff, d_model)

    def extra_repr(self) -> str:
        return f"dropout={self.dropout}, use_fp4={self.use_fp4}, use_checkpoint={self.use_checkpoint}"

    def quantize(self) -> OptimizedTransformerBlock:
        """Packs all projections; those that are packed stay as they are, and without ``use_fp4`` there are none. Returns the block.

        Raises:
            ConfigurationError: a weight has inf or NaN.
        """
        for module in (self.attention, self.up_proj, self.down_proj):
            if isinstance(module, (FlashAttention, FusedFP4Linear)):
                module.quantize()
        return self

    def forward(self, x_BSD: Tensor, mask: Tensor | None = None) -> Tensor:
        """(B, S, D) of (B, S, D).

        Args:
            mask: (S, S), (B, S, S) or (B, N, S, S), each dimension may be 1: boolean (True attends) or added to the
                scores.

        Raises:
            ConfigurationError: an input or mask of another shape or type.
        """
        if self.use_checkpoint and torch.is_grad_enabled():
            # no buffers to protect: nothing in the block writes one, and packed weights, which are buffers, would be
            # copied
            return checkpoint(self._compute, x_BSD, mask, modules=())
        return self._compute(x_BSD, mask)

    def _compute(self, x_BSD: Tensor, mask: Tensor | None) -> Tensor:
        attended_BSD = self._drop(self.attention(self.attention_norm(x_BSD), mask))
        normed_BSD, x_BSD = self.feed_forward_norm(attended_BSD, x_BSD)
        hidden_BSF = self.up_proj(normed_BSD)
        if not self.use_fp4:  # a FusedFP4Linear applies it itself
            hidden_BSF = activate(hidden_BSF, "gelu")
        return x_BSD + self._drop(self.down_proj(hidden_BSF))

    def _drop(self, x: Tensor) -> Tensor:
        return functional.dropout(x, self.dropout, self.training) if self.dropout else x
