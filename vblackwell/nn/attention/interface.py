"""The attention of transformers' models on our dispatcher, through the registry that transformers keeps for that.

``use_dispatcher(model)`` names an implementation 'vblackwell-...' in the model's configuration; its masks are those
that transformers makes for SDPA: None where causality is the whole truth, a boolean one for padding, packed sequences
and sliding windows. What SDPA cannot say (a soft cap on scores, as in Gemma 2) the dispatcher can. Sinks and biases by
position are refused at the call, because no backend has them.
"""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

from torch import Tensor, nn

from vblackwell.errors import ConfigurationError, Unsupported, nearest
from vblackwell.nn.attention.backends import BACKENDS, attention

NAME = "vblackwell"
_UNKNOWN = ("s_aux", "position_bias", "cache")


def why_not_dispatcher(model: nn.Module) -> str | None:
    """Why ``model``'s attention cannot be given to the dispatcher; None if it can."""
    try:
        from transformers import PreTrainedModel
    except ImportError:
        return "transformers is not installed"
    if not isinstance(model, PreTrainedModel):
        return "the model is not one of transformers', whose registry names the attention"
    if not model._supports_attention_backend or not model._can_set_attn_implementation():
        return f"{type(model).__name__} computes its attention itself, past transformers' registry"
    return None


def use_dispatcher(model: nn.Module, backend: str = "auto", cached: str | None = None) -> Callable[[], None]:
    """Let ``model`` attend through the dispatcher; what is returned puts things back.

    Args:
        model: one of transformers' models; it may be in a stack.
        backend: of backends.py, by name; 'auto': the dispatcher's choice for each request.
        cached: the same for passes that continue what a cache holds; by default ``backend``.

    Raises:
        ConfigurationError: there is no such backend.
        Unsupported: with the reason of `why_not_dispatcher`.
    """
    if backend != "auto" and backend not in BACKENDS:
        raise ConfigurationError(
            f"no attention backend {backend!r}: choose one of auto, {', '.join(BACKENDS)}{nearest(backend, BACKENDS)}"
        )
    reason = why_not_dispatcher(model)
    if reason is not None:
        raise Unsupported(f"the dispatcher's attention: {reason}")
    made: Any = model
    before = made.config._attn_implementation
    made.set_attn_implementation(_registered(backend, backend if cached is None else cached))
    return lambda: made.set_attn_implementation(before)


def _registered(backend: str, cached: str) -> str:
    from transformers import AttentionInterface, AttentionMaskInterface
    from transformers.masking_utils import sdpa_mask

    # Numbers, not words: transformers takes every name with "flash" in it for one of theirs.
    numbers = ["auto", *BACKENDS]
    name = f"{NAME}-{numbers.index(backend)}-{numbers.index(cached)}"
    AttentionInterface.register(name, _Forward(backend, cached))
    AttentionMaskInterface.register(name, sdpa_mask)
    return name


class _Forward:
    """transformers' attention function: queries (B, N, S, H), keys and values (B, K, T, H) in, (B, S, N, H) and no weights out."""

    def __init__(self, backend: str, cached: str) -> None:
        self._backend, self._cached = backend, cached

    def __call__(
        self, module: Any, query: Tensor, key: Tensor, value: Tensor, attention_mask: Tensor | None, dropout: float = 0.0,
        scaling: float | None = None, is_causal: bool | None = None, softcap: float | None = None, **options: Any,
    ) -> tuple[Tensor, None]:  # fmt: skip
        asked = [name for name in _UNKNOWN if options.get(name) is not None]
        if asked:
            raise Unsupported(
                f"{type(module).__name__} attends with {asked[0]}, which no backend of the dispatcher has"
            )
        queries, keys = query.shape[2], key.shape[2]
        backend = self._backend if queries == keys else self._cached
        causal = (getattr(module, "is_causal", True) if is_causal is None else is_causal) and attention_mask is None
        causal = causal and queries > 1
        if causal and keys > queries:  # a static cache that is being filled: what follows is empty
            key, value = key[:, :, :queries], value[:, :, :queries]
        if attention_mask is not None and attention_mask.shape[-1] != key.shape[2]:
            attention_mask = attention_mask[..., : key.shape[2]]
        out_BNSH, _ = attention(
            query, key, value, mask=attention_mask, causal=causal, scale=scaling, softcap=softcap, dropout=dropout,
            backend=backend,
        )  # fmt: skip
        return out_BNSH.transpose(1, 2).contiguous(), None
