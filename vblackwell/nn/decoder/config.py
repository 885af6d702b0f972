"""The shape of a decoder, to and from Hugging Face's ``config.json``, and the shapes that ``--config`` knows by name.

Llama's family and nothing more. A foreign configuration that asks for anything else is refused by name: a decoder that
ignores a key computes something else than the file says.
"""

from dataclasses import dataclass
from numbers import Real
from typing import Any

from vblackwell.errors import ConfigurationError, Unsupported, check_known

# Fields of a configuration and their names in ``config.json``: those it must have, and others.
_SIZES = {
    "vocab_size": "vocab_size",
    "hidden_size": "hidden_size",
    "intermediate_size": "intermediate_size",
    "num_layers": "num_hidden_layers",
    "num_heads": "num_attention_heads",
}
_OPTIONAL = {"num_kv_heads": "num_key_value_heads", "head_dim": "head_dim", "max_position": "max_position_embeddings"}


@dataclass(frozen=True)
class DecoderConfig:
    """Shape of a ``Decoder``; ConfigurationError where it does not fit together."""

    vocab_size: int
    hidden_size: int  # width of the residual stream
    intermediate_size: int  # width inside the SwiGLU feed-forward
    num_layers: int
    num_heads: int  # of queries
    num_kv_heads: int = None  # type: ignore[assignment]  # a divisor of num_heads; None: as many
    head_dim: int = None  # type: ignore[assignment]  # even; None: hidden_size / num_heads
    max_position: int = 2048  # longest sequence in tokens
    rope_theta: float = 10000.0  # base of the rotary wavelengths
    norm_eps: float = 1e-5  # added to the mean square in RMSNorm
    initializer_range: float = 0.02  # standard deviation of the initial weights
    bos_token_id: int | None = None  # begins and ends a document, where the tokenizer has such tokens
    eos_token_id: int | None = None

    def __post_init__(self) -> None:
        for name in (*_SIZES, "max_position"):
            value = getattr(self, name)
            if not isinstance(value, Real) or value < 1:
                raise ConfigurationError(f"{name} is {value!r}: give at least 1")
        if self.num_kv_heads is None:
            object.__setattr__(self, "num_kv_heads", self.num_heads)
        if self.head_dim is None:
            if self.hidden_size % self.num_heads:
                wrong = f"hidden_size {self.hidden_size} is not a multiple of num_heads {self.num_heads}"
                raise ConfigurationError(f"{wrong}: change one of them, or give head_dim")
            object.__setattr__(self, "head_dim", self.hidden_size // self.num_heads)
        if self.num_kv_heads < 1 or self.num_heads % self.num_kv_heads:
            wrong = f"num_heads {self.num_heads} is not a multiple of num_kv_heads {self.num_kv_heads}"
            raise ConfigurationError(f"{wrong}: choose a divisor")
        if self.head_dim < 2 or self.head_dim % 2:
            wrong = f"head_dim {self.head_dim} is not even"
            raise ConfigurationError(f"{wrong}: rotary positions turn pairs; choose an even one")
        if min(self.rope_theta, self.norm_eps, self.initializer_range) <= 0:
            given = f"rope_theta {self.rope_theta}, norm_eps {self.norm_eps}"
            raise ConfigurationError(f"{given} and initializer_range {self.initializer_range} must all be positive")

    @property
    def num_parameters(self) -> int:
        """Parameters of the decoder, embedding and head included."""
        attention = self.hidden_size * self.head_dim * 2 * (self.num_heads + self.num_kv_heads)
        layer = attention + 3 * self.hidden_size * self.intermediate_size + 2 * self.hidden_size
        return 2 * self.vocab_size * self.hidden_size + self.num_layers * layer + self.hidden_size

    def to_hf(self) -> dict[str, Any]:
        """The ``config.json`` of a ``LlamaForCausalLM`` with the same weights and mathematics."""
        return {
            "architectures": ["LlamaForCausalLM"],
            "model_type": "llama",
            **{key: getattr(self, field) for field, key in (_SIZES | _OPTIONAL).items()},
            "rope_theta": self.rope_theta,
            "rope_parameters": {"rope_type": "default", "rope_theta": self.rope_theta},
            "rms_norm_eps": self.norm_eps,
            "initializer_range": self.initializer_range,
            "bos_token_id": self.bos_token_id,
            "eos_token_id": self.eos_token_id,
            "pad_token_id": None,
            "hidden_act": "silu",
            "attention_bias": False,
            "attention_dropout": 0.0,
            "mlp_bias": False,
            "tie_word_embeddings": False,
            "use_cache": True,
        }

    @classmethod
    def from_hf(cls, config: dict[str, Any]) -> "DecoderConfig":
        """The shape described by a Llama ``config.json``. Raises Unsupported for what ``Decoder`` does not compute,
        ConfigurationError for a missing key or a shape that does not fit together."""
        if reasons := "; ".join(not_supported_reasons(config)):
            raise Unsupported(f"Decoder cannot compute this config.json: {reasons}. Open it with transformers")
        for key in _SIZES.values():
            if key not in config:
                raise ConfigurationError(f"config.json lacks the key {key!r}: it is no complete Llama configuration")
        eos = config.get("eos_token_id")
        return cls(
            **{field: config[key] for field, key in (_SIZES | _OPTIONAL).items() if key in config},
            rope_theta=float(_rope(config).get("rope_theta", config.get("rope_theta", 10000.0))),
            norm_eps=config.get("rms_norm_eps", 1e-6),
            initializer_range=config.get("initializer_range", 0.02),
            bos_token_id=config.get("bos_token_id"),
            eos_token_id=eos[0] if isinstance(eos, list) else eos,
        )


def _rope(config: dict[str, Any]) -> dict[str, Any]:
    return config.get("rope_parameters") or config.get("rope_scaling") or {}


def not_supported_reasons(config: dict[str, Any]) -> list[str]:
    """Why ``Decoder`` would not compute what this ``config.json`` describes; empty if it would."""
    reasons = []
    if config.get("model_type") != "llama":
        reasons.append(f"model_type is {config.get('model_type')!r}, not 'llama'")
    rope = _rope(config)
    kind = rope.get("rope_type", rope.get("type", "default"))
    if kind != "default":
        reasons.append(f"rotary scaling {kind!r}")
    if config.get("hidden_act", "silu") != "silu":
        reasons.append(f"activation {config['hidden_act']!r}")
    reasons += [f"{key} is true" for key in ("attention_bias", "mlp_bias", "tie_word_embeddings") if config.get(key)]
    if config.get("attention_dropout"):
        reasons.append(f"attention_dropout is {config['attention_dropout']}")
    if config.get("pretraining_tp", 1) not in (None, 1):
        reasons.append(f"pretraining_tp is {config['pretraining_tp']}")
    if config.get("quantization_config"):
        reasons.append("its weights are quantised")
    return reasons


TOKENIZER_SIZE = 4096  # tokens of the byte-pair tokenizer that a run trains where none is given

# Widths are multiples of 64 so that every block format divides them. ``7b`` is Llama 2's shape (6.74 G with its 32,000
# tokens). ``tiny`` is deep and narrow: its embedding, the largest single group, is under a fifth of the model, so it
# streams through a third of its training state. A run with another tokenizer has that one's vocabulary.
PRESETS: dict[str, DecoderConfig] = {
    "tiny": DecoderConfig(TOKENIZER_SIZE, 128, 384, 9, 4, max_position=256),
    "small": DecoderConfig(TOKENIZER_SIZE, 512, 1536, 12, 8, max_position=1024),
    "medium": DecoderConfig(TOKENIZER_SIZE, 768, 2048, 12, 12, max_position=1024),
    "large": DecoderConfig(TOKENIZER_SIZE, 1024, 2752, 24, 16, max_position=1024),
    "xl": DecoderConfig(TOKENIZER_SIZE, 2048, 5632, 22, 16, max_position=2048),
    "7b": DecoderConfig(TOKENIZER_SIZE, 4096, 11008, 32, 32, max_position=4096),
}
# Sequences and tokens of each that `vb train --config` gives a forward, and other commands mean by the same name.
PRESET_BATCHES: dict[str, tuple[int, int]] = {
    "tiny": (8, 128), "small": (8, 512), "medium": (8, 1024), "large": (8, 1024), "xl": (8, 2048), "7b": (8, 2048),
}  # fmt: skip


def find_preset(name: str) -> DecoderConfig:
    """The preset called ``name``; ConfigurationError, with the nearest name, if there is none."""
    check_known("preset", name, PRESETS)
    return PRESETS[name]
