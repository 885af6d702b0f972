"""Causal grouped-query self-attention of the decoder, on PyTorch's ``scaled_dot_product_attention`` or a backend given by name.

The mask is given as ``is_causal`` wherever that is the whole truth: an explicit mask sends SDPA to its slow backends,
on an H200 nine times slower for eight documents in a row of 8k (docs/journal/attention.md). So on CUDA packed
documents, and prompts that continue a filled cache, go to the dispatcher.

Legend: B batch, S new positions, T all positions, D model width, N query heads, K key-value heads, H head width.
"""

from __future__ import annotations

import torch
from torch import Tensor, nn
from torch.nn import functional

from vblackwell.errors import Unsupported
from vblackwell.kernels.pointwise.rows import rotary
from vblackwell.nn.attention.backends import attention
from vblackwell.nn.decoder.cache import KVCache, SteadyCache
from vblackwell.nn.decoder.config import DecoderConfig
from vblackwell.nn.linear.one_input import linears_of_one_input


class SelfAttention(nn.Module):
    """Attention of one block; parameters named as in Hugging Face's Llama.

    Attributes:
        backend: the backend of nn/attention/backends.py that passes without a cache run on; None: PyTorch chooses.
    """

    def __init__(self, config: DecoderConfig, layer: int) -> None:
        super().__init__()
        width, head = config.hidden_size, config.head_size
        self.layer, self.head_dim = layer, head
        self.backend: str | None = None
        self.grouped = config.kv_heads != config.num_heads
        self.q_proj = nn.Linear(width, config.num_heads * head, bias=False)
        self.k_proj = nn.Linear(width, config.kv_heads * head, bias=False)
        self.v_proj = nn.Linear(width, config.kv_heads * head, bias=False)
        self.o_proj = nn.Linear(config.num_heads * head, width, bias=False)

    def forward(
        self,
        x_BSD: Tensor,
        cos_SH: Tensor,
        sin_SH: Tensor,
        cache: KVCache | SteadyCache | None = None,
        mask_BSS: Tensor | None = None,
    ) -> Tensor:
        """(B, S, D); tables may be (B, S, H) too. ``mask_BSS`` is what may be attended to, causality included."""
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
        if cache is None and self.backend is not None and mask_BSS is None:
            y_BNSH, _ = attention(q_BNSH, k_BKTH, v_BKTH, causal=True, backend=self.backend)
            return self.o_proj(y_BNSH.transpose(1, 2).reshape(*x_BSD.shape[:2], -1))
        if mask_BSS is not None:
            return self.o_proj(self._masked(q_BNSH, k_BKTH, v_BKTH, mask_BSS))
        new, known = q_BNSH.shape[2], k_BKTH.shape[2]
        mask_ST = None
        if 1 < new < known and q_BNSH.is_cuda:
            y_BNSH, _ = attention(q_BNSH, k_BKTH, v_BKTH, causal=True, bottom_right=True)
            return self.o_proj(y_BNSH.transpose(1, 2).reshape(*x_BSD.shape[:2], -1))
        if 1 < new < known:
            mask_ST = torch.ones(new, known, dtype=torch.bool, device=x_BSD.device).tril(known - new)
        y_BNSH = functional.scaled_dot_product_attention(
            q_BNSH, k_BKTH, v_BKTH, attn_mask=mask_ST, is_causal=new == known > 1, enable_gqa=self.grouped
        )
        return self.o_proj(y_BNSH.transpose(1, 2).reshape(*x_BSD.shape[:2], -1))

    def _masked(self, q_BNSH: Tensor, k_BKTH: Tensor, v_BKTH: Tensor, mask_BSS: Tensor) -> Tensor:
        if self.backend is not None:
            raise Unsupported(
                f"packed documents need a mask, and attention is fixed to {self.backend!r}, which may have none: pack nothing, or leave "
                "the choice open"
            )
        if q_BNSH.is_cuda:
            y_BNSH, _ = attention(q_BNSH, k_BKTH, v_BKTH, mask=mask_BSS[:, None])
            return y_BNSH.transpose(1, 2).reshape(q_BNSH.shape[0], q_BNSH.shape[2], -1)
        if self.grouped:  # with a mask, SDPA has no fused kernel for grouped heads
            k_BKTH, v_BKTH = (x.repeat_interleave(q_BNSH.shape[1] // x.shape[1], dim=1) for x in (k_BKTH, v_BKTH))
        y_BNSH = functional.scaled_dot_product_attention(q_BNSH, k_BKTH, v_BKTH, attn_mask=mask_BSS[:, None])
        return y_BNSH.transpose(1, 2).reshape(q_BNSH.shape[0], q_BNSH.shape[2], -1)


def within_documents(positions_BS: Tensor) -> Tensor:
    """What each token of packed documents may attend to, (B, S, S): itself and what is before it in its own document.

    Args:
        positions_BS: counted from 0 in each document.
    """
    document_BS = (positions_BS == 0).cumsum(1)
    length = positions_BS.shape[1]
    causal = torch.ones(length, length, dtype=torch.bool, device=positions_BS.device).tril()
    return (document_BS[:, :, None] == document_BS[:, None, :]) & causal
