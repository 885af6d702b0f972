"""Blocks of a decoder: attention and a feed-forward network, each after an RMSNorm, and the keys and values they keep.

Pre-norm (arXiv:2002.04745), SwiGLU (arXiv:2002.05202), grouped-query attention; parameters are named as in Hugging
Face's Llama. RMSNorm rounds once, after the weight; theirs rounds to the compute dtype before it too: the same bits in
fp32. Attention is ``is_causal`` wherever that is the whole truth: an explicit mask sends SDPA to its slow backends, so
on CUDA prompts that continue a filled cache go to the dispatcher, and packed documents have no mask (`Documents`).

B batch, S new positions, T all positions, D model width, F feed-forward width, N query, K key heads, H head width.
"""

from functools import partial
from typing import Any

import torch
from torch import Tensor, nn
from torch.nn import functional

from vblackwell.errors import ConfigurationError, Unsupported
from vblackwell.kernels.attention.decode import decode_attention
from vblackwell.kernels.fp4.reference import activate
from vblackwell.kernels.pointwise.rows import add_rms_norm, rms_norm, rotary, store_rotated
from vblackwell.nn.attention.backends import Variant, attention
from vblackwell.nn.attention.documents import Documents
from vblackwell.nn.attention.layer import FlashAttention, rotary_tables
from vblackwell.nn.decoder.checkpoint import checkpoint
from vblackwell.nn.decoder.config import DecoderConfig
from vblackwell.nn.linear import one_input
from vblackwell.nn.linear.fused_fp4 import FusedFP4Linear
from vblackwell.nn.linear.one_input import Unnormed, hooked, linears_of_one_input, normed, output_is_read


class KVCache:
    """Keys and values of every layer of a ``Decoder``; memory for ``max_length`` positions comes with the first."""

    def __init__(self, config: DecoderConfig, max_length: int) -> None:
        if not 1 <= max_length <= config.max_position:
            raise ConfigurationError(f"a cache of {max_length} positions: the model's limit is {config.max_position}")
        self.max_length = max_length
        self.length = 0  # positions read so far, by all layers
        self._layers: dict[int, tuple[Tensor, Tensor]] = {}  # (B, K, max_length, H) each

    def extend(self, layer: int, k_BKSH: Tensor, v_BKSH: Tensor) -> tuple[Tensor, Tensor]:
        """Stores the new keys and values of a layer; returns all of them so far, (B, K, T, H) each."""
        end = self.length + k_BKSH.shape[2]
        if end > self.max_length:
            raise ConfigurationError(f"position {end} is beyond the cache's {self.max_length}: make a longer cache")
        if layer not in self._layers:
            shape = (*k_BKSH.shape[:2], self.max_length, k_BKSH.shape[3])
            self._layers[layer] = (k_BKSH.new_empty(shape), v_BKSH.new_empty(shape))
        keys, values = self._layers[layer]
        if keys.shape[0] != k_BKSH.shape[0]:
            raise ConfigurationError(f"a batch of {k_BKSH.shape[0]} for a cache of {keys.shape[0]}: make a new cache")
        keys[:, :, self.length : end] = k_BKSH
        values[:, :, self.length : end] = v_BKSH
        return keys[:, :, :end], values[:, :, :end]

    def tensors(self, layer: int) -> tuple[Tensor, Tensor]:
        """Keys and values of a layer that has stored some, all positions (B, K, max_length, H) each."""
        return self._layers[layer]


class SteadyCache:
    """A filled ``cache`` for steps that are captured once and replayed: no launch depends on the length.

    ``position_1`` is where the next position goes, int64 on the device; who has stored it in all layers adds one.
    """

    def __init__(self, cache: KVCache, config: DecoderConfig) -> None:
        self._cache = cache
        device = cache.tensors(0)[0].device
        self.position_1 = torch.tensor([cache.length], device=device)
        self._tables = rotary_tables(0, cache.max_length, config.head_dim, config.rope_theta, device)

    def restart(self) -> None:
        self.position_1.fill_(self._cache.length)

    def attend(self, layer: int, q_BNH: Tensor, k_BKH: Tensor, v_BKH: Tensor) -> Tensor:
        """Stores a position's keys and values; returns what its queries gather, (B, N, H)."""
        held = self._cache.tensors(layer)
        q_BNH = store_rotated(q_BNH, k_BKH, v_BKH, *held, *self._tables, self.position_1)
        return decode_attention(q_BNH, *held, self.position_1)


Cache = KVCache | SteadyCache | None


class SelfAttention(nn.Module):
    """Attention of one block; passes without a cache run on ``backend``, or None: on PyTorch's choice."""

    def __init__(self, config: DecoderConfig, layer: int) -> None:
        super().__init__()
        width, head, heads, kv_heads = config.hidden_size, config.head_dim, config.num_heads, config.num_kv_heads
        self.layer, self.head_dim, self.grouped = layer, head, kv_heads != heads
        self.backend: str | None = None
        self.q_proj = nn.Linear(width, heads * head, bias=False)
        self.k_proj = nn.Linear(width, kv_heads * head, bias=False)
        self.v_proj = nn.Linear(width, kv_heads * head, bias=False)
        self.o_proj = nn.Linear(heads * head, width, bias=False)

    def forward(
        self,
        x_BSD: Tensor | Unnormed,
        cos_SH: Tensor,
        sin_SH: Tensor,
        cache: Cache = None,
        documents: Documents | None = None,
    ) -> Tensor:
        """(B, S, D); tables may be (B, S, H) too. ``documents``: of packed rows, whose ``mask`` is (B, S, S)."""
        heads = (*x_BSD.shape[:2], -1, self.head_dim)
        # Transposed views all the way: cuDNN and flash attention read and write them as they are.
        q_BNSH, k_BKTH, v_BKTH = (
            x.view(heads).transpose(1, 2)
            for x in linears_of_one_input(x_BSD, self.q_proj, self.k_proj, self.v_proj)  # no name keeps them
        )
        if isinstance(cache, SteadyCache):
            y_BNH = cache.attend(self.layer, q_BNSH.squeeze(2), k_BKTH.squeeze(2), v_BKTH.squeeze(2))
            return self.o_proj(y_BNH.reshape(*x_BSD.shape[:2], -1))
        q_BNSH, k_BKTH = rotary(q_BNSH, k_BKTH, cos_SH, sin_SH)
        if cache is not None:
            k_BKTH, v_BKTH = cache.extend(self.layer, k_BKTH, v_BKTH)
        y_BNSH = self._attended(q_BNSH, k_BKTH, v_BKTH, documents, cache is not None)
        return self.o_proj(y_BNSH.transpose(1, 2).reshape(*x_BSD.shape[:2], -1))

    def _attended(
        self, q_BNSH: Tensor, k_BKTH: Tensor, v_BKTH: Tensor, documents: Documents | None, cached: bool
    ) -> Tensor:
        if documents is not None:
            if self.backend is not None:
                fixed = f"attention is fixed to {self.backend!r}, which may know none"
                raise Unsupported(f"packed documents, and {fixed}: pack nothing, or leave the choice open")
            if (y_BNSH := documents.attention(q_BNSH, k_BKTH, v_BKTH)) is not None:
                return y_BNSH
            mask_B1SS = documents.mask[:, None]
            if q_BNSH.is_cuda:
                return attention(q_BNSH, k_BKTH, v_BKTH, Variant(mask_B1SS))[0]
            if self.grouped:  # with a mask, SDPA has no fused kernel for grouped heads
                k_BKTH, v_BKTH = (x.repeat_interleave(q_BNSH.shape[1] // x.shape[1], dim=1) for x in (k_BKTH, v_BKTH))
            return functional.scaled_dot_product_attention(q_BNSH, k_BKTH, v_BKTH, attn_mask=mask_B1SS)
        if self.backend is not None and not cached:
            return attention(q_BNSH, k_BKTH, v_BKTH, Variant(causal=True), self.backend)[0]
        new, known, mask_ST = q_BNSH.shape[2], k_BKTH.shape[2], None
        if 1 < new < known:
            if q_BNSH.is_cuda:
                return attention(q_BNSH, k_BKTH, v_BKTH, Variant(causal=True, bottom_right=True))[0]
            mask_ST = torch.ones(new, known, dtype=torch.bool, device=q_BNSH.device).tril(known - new)
        how = {"attn_mask": mask_ST, "is_causal": new == known > 1, "enable_gqa": self.grouped}
        return functional.scaled_dot_product_attention(q_BNSH, k_BKTH, v_BKTH, **how)


class RMSNorm(nn.RMSNorm):
    """``nn.RMSNorm`` over the last dimension, as one kernel each way on CUDA."""

    eps: float  # type: ignore[assignment]  # never None here

    def forward(self, x: Tensor) -> Tensor:
        return rms_norm(x, self.weight, self.eps)


class AddRMSNorm(RMSNorm):
    """``(norm(x + residual), x + residual)``."""

    def forward(self, x: Tensor, residual: Tensor) -> tuple[Tensor, Tensor]:  # type: ignore[override]
        return add_rms_norm(x, residual, self.weight, self.eps)


class FeedForward(nn.Module):
    """``down(silu(gate(x)) * up(x))``; parameters named as in Hugging Face's Llama."""

    def __init__(self, config: DecoderConfig) -> None:
        super().__init__()
        self.gate_proj = nn.Linear(config.hidden_size, config.intermediate_size, bias=False)
        self.up_proj = nn.Linear(config.hidden_size, config.intermediate_size, bias=False)
        self.down_proj = nn.Linear(config.intermediate_size, config.hidden_size, bias=False)

    def forward(self, x_BSD: Tensor, wanted: bool = True) -> Tensor:
        gate_BSF, up_BSF = linears_of_one_input(x_BSD, self.gate_proj, self.up_proj)
        return one_input.gated_product(gate_BSF, up_BSF, self.down_proj, wanted or output_is_read(self))


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
        cache: Cache = None,
        documents: Documents | None = None,
        wanted: bool = True,
        lean: bool = False,
    ) -> Tensor:
        """(B, S, D) to the same. Unless ``wanted``, the last product may be left out: a checkpoint's second pass throws
        the output away. ``lean``: under a checkpoint, both halves keep the residual stream alone (linear/one_input.py).
        """
        attention, mlp, norm = self.self_attn, self.mlp, self.input_layernorm
        projections = (attention.q_proj, attention.k_proj, attention.v_proj)
        wanted = wanted or output_is_read(self)
        # Hooks that see attention's input expect a tensor.
        rows_BSD = norm(x_BSD) if hooked(attention) else normed(x_BSD, norm, *projections, recompute=lean)
        attended_BSD = attention(rows_BSD, cos_SH, sin_SH, cache, documents)
        if lean:
            linears, norm = (mlp.gate_proj, mlp.up_proj, mlp.down_proj), self.post_attention_layernorm
            y_BSD = one_input.lean_feed_forward(attended_BSD, x_BSD, norm, mlp, linears, wanted)
            if y_BSD is not None:
                return y_BSD
        normed_BSD, x_BSD = self.post_attention_layernorm(attended_BSD, x_BSD)
        return x_BSD + mlp(normed_BSD, wanted)

    def step(self, added_BSD: Tensor | None, x_BSD: Tensor, cache: SteadyCache) -> tuple[Tensor, Tensor]:
        """One position a row, (B, 1, D): as `forward`, but the last sum is left to the next norm. ``added_BSD`` is what
        is still to be added to ``x_BSD``, None: nothing; returns the same two after this layer."""
        attention, mlp, norm = self.self_attn, self.mlp, self.input_layernorm
        projections = (attention.q_proj, attention.k_proj, attention.v_proj)
        if hooked(self) or hooked(norm) or hooked(attention):  # hooks expect the calls of `forward`
            x_BSD = x_BSD if added_BSD is None else x_BSD + added_BSD
            y_BSD = self(x_BSD, x_BSD, x_BSD, cache)
            return torch.zeros_like(y_BSD), y_BSD
        if added_BSD is None:
            rows_BSD = normed(x_BSD, norm, *projections)
        else:
            rows_BSD, x_BSD = add_rms_norm(added_BSD, x_BSD, norm.weight, norm.eps)
        attended_BSD = attention(rows_BSD, x_BSD, x_BSD, cache)  # tables are the cache's
        normed_BSD, x_BSD = self.post_attention_layernorm(attended_BSD, x_BSD)
        return mlp(normed_BSD), x_BSD


class OptimizedTransformerBlock(nn.Module):
    """``h = x + attention(norm(x))``, then ``h + down(gelu(up(norm(h))))``, to build models of one's own from.

    Biases, GELU and dropout (on both branches and on attention's probabilities) as in ``nn.TransformerEncoderLayer``.

    Args:
        d_model: D, the width of inputs and outputs.
        n_heads: query heads, a divisor of ``d_model``.
        d_ff: F, the width between the two linears of the feed-forward network.
        dropout: probability, while training.
        use_fp4: all four projections train straight through nvfp4, and ``quantize()`` packs them.
        use_checkpoint: keep only the input for backward and compute the block again there.
        attention: ``n_kv_heads``, ``causal``, ``window``, ``rotary_theta``, ``backend`` of ``FlashAttention``.

    Raises ConfigurationError for sizes below 1, heads that do not divide the width, a dropout outside [0, 1).
    """

    def __init__(
        self,
        d_model: int,
        n_heads: int,
        d_ff: int,
        dropout: float = 0.0,
        use_fp4: bool = False,
        use_checkpoint: bool = False,
        **attention: Any,
    ) -> None:
        super().__init__()
        if d_ff < 1:
            raise ConfigurationError(f"a feed-forward width of {d_ff}: give at least 1, usually 4 x {d_model}")
        self.dropout, self.use_fp4, self.use_checkpoint = dropout, use_fp4, use_checkpoint
        self.attention = FlashAttention(d_model, n_heads, dropout, use_fp4=use_fp4, **attention)
        self.attention_norm = RMSNorm(d_model, 1e-6)
        self.feed_forward_norm = AddRMSNorm(d_model, 1e-6)
        made: Any = partial(FusedFP4Linear, use_fp4=True) if use_fp4 else nn.Linear
        self.up_proj: nn.Linear | FusedFP4Linear = made(d_model, d_ff, **({"activation": "gelu"} if use_fp4 else {}))
        self.down_proj: nn.Linear | FusedFP4Linear = made(d_ff, d_model)

    def extra_repr(self) -> str:
        return f"dropout={self.dropout}, use_fp4={self.use_fp4}, use_checkpoint={self.use_checkpoint}"

    def quantize(self) -> "OptimizedTransformerBlock":
        """As `FlashAttention.quantize`, of all projections; returns the block."""
        for module in (self.attention, self.up_proj, self.down_proj):
            if isinstance(module, (FlashAttention, FusedFP4Linear)):
                module.quantize()
        return self

    def forward(self, x_BSD: Tensor, mask: Tensor | None = None) -> Tensor:
        """(B, S, D) of (B, S, D); ``mask``, and what is raised, as for ``FlashAttention``."""
        if self.use_checkpoint and torch.is_grad_enabled():
            # No buffers to protect: the block writes none, and packed weights, which are buffers, would be copied.
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
