"""``FlashAttention``: self-attention on the fastest backend that accepts it; and tables of rotary positions.

Legend: B batch, S positions, D model width, N query heads, K key-value heads, H head width.
"""

from functools import partial
from typing import Any

import torch
from torch import Tensor, nn

from vblackwell.errors import ConfigurationError, Unsupported
from vblackwell.kernels.pointwise.rows import rotary
from vblackwell.nn.attention.backends import Variant, attention
from vblackwell.nn.linear.fused_fp4 import FusedFP4Linear


def rotary_tables(start: int, length: int, head_dim: int, theta: float, device: torch.device) -> tuple[Tensor, Tensor]:
    """`rotary_tables_at` of positions ``start`` to ``start + length``."""
    return rotary_tables_at(torch.arange(start, start + length, dtype=torch.float32, device=device), head_dim, theta)


@torch.no_grad()
def rotary_tables_at(positions: Tensor, head_dim: int, theta: float) -> tuple[Tensor, Tensor]:
    """Cosine and sine, each (..., H) in fp32, of ``positions`` (...): RoFormer (arXiv:2104.09864), halves split.

    Computed anew in every forward, once for all layers: tables would be cast by ``model.to(bf16)``, be lost under
    ``to_empty`` and become inference tensors under ``inference_mode``.
    """
    exponents = torch.arange(0, head_dim, 2, dtype=torch.float32, device=positions.device) / head_dim
    angles = positions.to(torch.float32)[..., None] * (1.0 / (theta**exponents))
    angles = torch.cat((angles, angles), dim=-1)
    return angles.cos(), angles.sin()


class FlashAttention(nn.Module):
    """Multi-head self-attention, batch first.

    Args:
        d_model: D, the width of inputs and outputs.
        n_heads: query heads; each is D / n_heads wide.
        dropout: probability to drop an attention probability while training.
        n_kv_heads: key-value heads, a divisor of ``n_heads`` (Ainslie et al., arXiv:2305.13245); default: as many.
        causal: no position sees those after it.
        window: positions seen including the own one: the last ones with ``causal``, otherwise as many to each side.
        rotary_theta: base of the rotary embedding (arXiv:2104.09864) of queries and keys; None: none.
        softcap: of the scores; see ``flash_attention``.
        bias: of the projections.
        backend: 'auto', or the name of the only one that may run.
        use_fp4: both projections train straight through nvfp4, and ``quantize()`` packs them.

    The attribute ``backend`` is the one that ran last; None before the first forward. Raises ConfigurationError for
    heads that do not divide the width or one another, or other values out of range.
    """

    def __init__(
        self,
        d_model: int,
        n_heads: int,
        dropout: float = 0.0,
        *,
        n_kv_heads: int | None = None,
        causal: bool = False,
        window: int | None = None,
        rotary_theta: float | None = None,
        softcap: float | None = None,
        bias: bool = True,
        backend: str = "auto",
        use_fp4: bool = False,
        device: torch.device | str | None = None,
        dtype: torch.dtype | None = None,
    ) -> None:
        super().__init__()
        n_kv_heads = n_heads if n_kv_heads is None else n_kv_heads
        if min(d_model, n_heads, n_kv_heads) < 1 or d_model % n_heads or n_heads % n_kv_heads:
            found = f"attention of width {d_model} with {n_heads} heads over {n_kv_heads} key heads"
            raise ConfigurationError(f"{found}: the heads must divide the width, the key heads the heads")
        if not 0 <= dropout < 1:
            raise ConfigurationError(f"a dropout of {dropout}: give at least 0 and less than 1")
        if rotary_theta is not None and d_model // n_heads % 2:
            raise ConfigurationError(f"rotary heads of {d_model // n_heads}: give an even width")
        self.d_model, self.n_heads, self.n_kv_heads, self.head_dim = d_model, n_heads, n_kv_heads, d_model // n_heads
        self.dropout, self.causal, self.window, self.softcap = dropout, causal, window, softcap
        self.rotary_theta, self.wanted_backend = rotary_theta, backend
        self.backend: str | None = None
        outputs = (n_heads + 2 * n_kv_heads) * self.head_dim
        made: Any = partial(FusedFP4Linear, use_fp4=True) if use_fp4 else nn.Linear
        self.qkv_proj: nn.Linear | FusedFP4Linear = made(d_model, outputs, bias, device=device, dtype=dtype)
        self.out_proj: nn.Linear | FusedFP4Linear = made(d_model, d_model, bias, device=device, dtype=dtype)

    def extra_repr(self) -> str:
        heads = f"{self.n_heads}/{self.n_kv_heads}"
        return f"{self.d_model}, heads={heads}, causal={self.causal}, backend={self.wanted_backend!r}"

    def quantize(self) -> "FlashAttention":
        """Packs the projections made with ``use_fp4``, as `FusedFP4Linear.quantize`. Returns the module."""
        for projection in (self.qkv_proj, self.out_proj):
            if isinstance(projection, FusedFP4Linear):
                projection.quantize()
        return self

    def forward(self, x_BSD: Tensor, mask: Tensor | None = None) -> Tensor:
        """What each position gathers, (B, S, D). ``mask``: (S, S), (B, S, S) or (B, N, S, S), each dimension may be 1:
        boolean (True attends) or added. Raises ConfigurationError for an input or mask of another shape or type;
        Unsupported, with every backend's reasons, where none (or not the one asked for) takes this.
        """
        if x_BSD.dim() != 3 or x_BSD.shape[-1] != self.d_model:
            raise ConfigurationError(f"attention of an input of {tuple(x_BSD.shape)}: give (B, S, {self.d_model})")
        mask = mask[:, None] if mask is not None and mask.dim() == 3 else mask
        heads = (self.n_heads, self.n_kv_heads, self.n_kv_heads)
        parts = self.qkv_proj(x_BSD).split([count * self.head_dim for count in heads], dim=-1)
        # Views of one tensor: the kernels read heads by their strides.
        q, k, v = (part.unflatten(-1, (-1, self.head_dim)).transpose(1, 2) for part in parts)
        if self.rotary_theta is not None:
            q, k = rotary(q, k, *rotary_tables(0, x_BSD.shape[1], self.head_dim, self.rotary_theta, x_BSD.device))
        dropout = self.dropout if self.training else 0.0
        variant = Variant(mask, self.causal, True, self.window, softcap=self.softcap, dropout=dropout)
        y_BNSH, self.backend = attention(q, k, v, variant, self.wanted_backend)
        return self.out_proj(y_BNSH.transpose(1, 2).flatten(2))


def from_multihead_attention(
    module: nn.MultiheadAttention, *, causal: bool = False, backend: str = "auto"
) -> FlashAttention:
    """A ``FlashAttention`` with copies of the weights of ``module``, as self-attention, batch first. PyTorch's masks
    where a boolean mask is True; this one attends there. Raises Unsupported where ``module`` takes the sequence first
    (PyTorch's default), attends over other widths than its own, or to additional keys.
    """
    if not module.batch_first:
        remedy = "transpose its inputs and outputs, set module.batch_first = True, and convert then"
        raise Unsupported(f"a MultiheadAttention with batch_first=False, FlashAttention takes (B, S, D): {remedy}")
    if module.in_proj_weight is None:
        other = f"keys of width {module.kdim} and values of {module.vdim} over queries of {module.embed_dim}"
        only = "only self-attention of one width becomes a FlashAttention"
        raise Unsupported(f"a MultiheadAttention with {other}: {only}")
    if module.bias_k is not None or module.add_zero_attn:
        raise Unsupported("a MultiheadAttention with add_bias_kv or add_zero_attn: FlashAttention adds no keys")
    weight, bias = module.in_proj_weight, module.in_proj_bias
    options = {"causal": causal, "bias": bias is not None, "backend": backend}
    placed = {"device": weight.device, "dtype": weight.dtype}
    made = FlashAttention(module.embed_dim, module.num_heads, module.dropout, **options, **placed)
    given = {"qkv_proj.weight": weight, "out_proj.weight": module.out_proj.weight}
    if bias is not None:
        given |= {"qkv_proj.bias": bias, "out_proj.bias": module.out_proj.bias}
    made.load_state_dict(given)
    return made.train(module.training)
