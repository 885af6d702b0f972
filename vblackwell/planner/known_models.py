"""Models that `vb estimate` knows by name: the shapes their authors published, as fields of transformers' configurations."""

from __future__ import annotations

from typing import Any


def _gpt2(width: int, layers: int, heads: int) -> dict[str, Any]:
    return {
        "model_type": "gpt2",
        "vocab_size": 50257,
        "n_positions": 1024,
        "n_embd": width,
        "n_layer": layers,
        "n_head": heads,
    }


def _llama(model_type: str = "llama", **fields: Any) -> dict[str, Any]:
    names = (
        "vocab_size",
        "hidden_size",
        "intermediate_size",
        "num_hidden_layers",
        "num_attention_heads",
        "num_key_value_heads",
    )
    values = fields.pop("shape")
    return {"model_type": model_type, "tie_word_embeddings": False} | dict(zip(names, values, strict=True)) | fields


KNOWN_MODELS: dict[str, dict[str, Any]] = {
    "gpt2": _gpt2(768, 12, 12),
    "gpt2-medium": _gpt2(1024, 24, 16),
    "gpt2-large": _gpt2(1280, 36, 20),
    "gpt2-xl": _gpt2(1600, 48, 25),
    "tinyllama-1.1b": _llama(shape=(32000, 2048, 5632, 22, 32, 4), max_position_embeddings=2048),
    "llama-7b": _llama(shape=(32000, 4096, 11008, 32, 32, 32), max_position_embeddings=2048, rms_norm_eps=1e-6),
    "llama-13b": _llama(shape=(32000, 5120, 13824, 40, 40, 40), max_position_embeddings=2048, rms_norm_eps=1e-6),
    "llama-3-8b": _llama(shape=(128256, 4096, 14336, 32, 32, 8), max_position_embeddings=8192, rope_theta=500000.0),
    "llama-30b": _llama(shape=(32000, 6656, 17920, 60, 52, 52), max_position_embeddings=2048, rms_norm_eps=1e-6),
    "llama-65b": _llama(shape=(32000, 8192, 22016, 80, 64, 64), max_position_embeddings=2048, rms_norm_eps=1e-6),
    "llama-3-70b": _llama(shape=(128256, 8192, 28672, 80, 64, 8), max_position_embeddings=8192, rope_theta=500000.0),
    "llama-3.1-405b": _llama(shape=(128256, 16384, 53248, 126, 128, 8), max_position_embeddings=131072, rope_theta=500000.0),
    "llama-3.2-1b": _llama(shape=(128256, 2048, 8192, 16, 32, 8), max_position_embeddings=131072, tie_word_embeddings=True),
    "llama-3.2-3b": _llama(shape=(128256, 3072, 8192, 28, 24, 8), max_position_embeddings=131072, tie_word_embeddings=True),
    "mistral-7b": _llama("mistral", shape=(32000, 4096, 14336, 32, 32, 8), max_position_embeddings=32768, sliding_window=None),
    "qwen2.5-0.5b": _llama("qwen2", shape=(151936, 896, 4864, 24, 14, 2), max_position_embeddings=32768, tie_word_embeddings=True),
    "qwen2.5-1.5b": _llama("qwen2", shape=(151936, 1536, 8960, 28, 12, 2), max_position_embeddings=32768, tie_word_embeddings=True),
    "qwen2.5-3b": _llama("qwen2", shape=(151936, 2048, 11008, 36, 16, 2), max_position_embeddings=32768, tie_word_embeddings=True),
    "qwen2.5-7b": _llama("qwen2", shape=(152064, 3584, 18944, 28, 28, 4), max_position_embeddings=131072),
    "qwen2.5-14b": _llama("qwen2", shape=(152064, 5120, 13824, 48, 40, 8), max_position_embeddings=131072),
    "qwen2.5-32b": _llama("qwen2", shape=(152064, 5120, 27648, 64, 40, 8), max_position_embeddings=131072),
    "qwen2.5-72b": _llama("qwen2", shape=(152064, 8192, 29568, 80, 64, 8), max_position_embeddings=131072),
    "mixtral-8x7b": _llama(
        "mixtral", shape=(32000, 4096, 14336, 32, 32, 8), max_position_embeddings=32768, num_local_experts=8, num_experts_per_tok=2
    ),
}  # fmt: skip
