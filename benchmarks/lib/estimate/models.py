"""The models that estimates are checked on: each family builds a module on meta, makes its batch and takes its loss.

One function a family, the same for the prediction and for the real run, so that both see the same module. `materialise`
gives a module on meta real memory in the order in which a trace counts it, without the temporaries that drawing weights
would leave in the allocator.
"""

from __future__ import annotations

import warnings
from collections.abc import Callable
from dataclasses import dataclass
from functools import partial
from typing import Any

import torch
from torch import Tensor, nn

Batch = Callable[[], Any]
Loss = Callable[[nn.Module, Any], Tensor]
Fields = Callable[..., dict[str, Any]]  # of a configuration, from the numbers of a case's size


@dataclass(frozen=True)
class Built:
    """A module on meta, how its batch is made (on 'cuda' or 'cpu') and its loss."""

    model: nn.Module
    batch: Callable[[str], Batch]
    loss: Loss


def tokens(vocab_size: int, batch: int, seq: int) -> Callable[[str], Batch]:
    """Makes token numbers (B, S) that are their own targets."""

    def make(device: str) -> dict[str, Tensor]:
        ids = torch.randint(0, vocab_size, (batch, seq), device=device)
        return {"input_ids": ids, "labels": ids}

    return lambda device: partial(make, device)


def pictures(size: int, batch: int, dtype: torch.dtype) -> Callable[[str], Batch]:
    """Makes pictures (B, 3, size, size) of 1000 classes."""

    def make(device: str) -> dict[str, Tensor]:
        pixels = torch.rand(batch, 3, size, size, device=device, dtype=dtype)
        return {"pixel_values": pixels, "labels": torch.randint(0, 1000, (batch,), device=device)}

    return lambda device: partial(make, device)


def hf_loss(model: nn.Module, batch: Any) -> Tensor:
    """The loss that transformers' model computes itself."""
    with warnings.catch_warnings():
        warnings.simplefilter("ignore")
        return model(**batch).loss


def _from_transformers(auto: str, fields: dict[str, Any], dtype: torch.dtype, attention: str) -> nn.Module:
    import transformers
    from transformers.models.auto.configuration_auto import CONFIG_MAPPING

    fields = dict(fields)
    config = CONFIG_MAPPING[fields.pop("model_type")](**fields)
    config.use_cache = False
    more = {"experts_implementation": "grouped_mm"} if "num_local_experts" in fields else {}
    with torch.device("meta"), warnings.catch_warnings():
        warnings.simplefilter("ignore")
        model = getattr(transformers, auto).from_config(config, dtype=dtype, attn_implementation=attention, **more)
    if auto == "AutoModelForCausalLM":
        model.loss_type = "ForCausalLM"
    return model.train()


def _decoder(case: Any, dtype: torch.dtype) -> Built:
    from vblackwell.nn.decoder.config import DecoderConfig
    from vblackwell.nn.decoder.decoder import Decoder

    hidden, layers, heads = case.size
    wide = -(-hidden * 8 // 3 // 64) * 64
    model = Decoder(
        DecoderConfig(32000, hidden, wide, layers, heads, max_position=case.seq), device="meta", dtype=dtype
    )
    model.gradient_checkpointing = case.checkpointing
    return Built(
        model.train(),
        tokens(32000, case.batch, case.seq),
        lambda model, batch: model(batch["input_ids"], batch["labels"]),
    )


def _language(auto: str, fields: Fields) -> Callable[[Any, torch.dtype], Built]:
    def build(case: Any, dtype: torch.dtype) -> Built:
        named = fields(*case.size)
        model = _from_transformers(f"AutoModelFor{auto}", named, dtype, case.attention)
        return Built(model, tokens(named["vocab_size"], case.batch, case.seq), hf_loss)

    return build


def _vision(fields: Fields) -> Callable[[Any, torch.dtype], Built]:
    def build(case: Any, dtype: torch.dtype) -> Built:
        named = fields(*case.size) | {"num_labels": 1000, "problem_type": "single_label_classification"}
        model = _from_transformers("AutoModelForImageClassification", named, dtype, case.attention)
        return Built(model, pictures(224, case.batch, dtype), hf_loss)

    return build


def _mlp(case: Any, dtype: torch.dtype) -> Built:
    width, layers, _ = case.size
    with torch.device("meta"):
        inner = [
            part for _ in range(layers) for part in (nn.Linear(width, width, dtype=dtype), nn.GELU(), nn.Dropout(0.1))
        ]
        model = nn.Sequential(*inner, nn.Linear(width, 1000, dtype=dtype))

    def on(device: str) -> Batch:
        return lambda: (
            torch.rand(case.batch * case.seq, width, device=device, dtype=dtype),
            torch.randint(0, 1000, (case.batch * case.seq,), device=device),
        )

    return Built(model.train(), on, lambda model, batch: nn.functional.cross_entropy(model(batch[0]).float(), batch[1]))


def _gpt2(width: int, layers: int, heads: int) -> dict[str, Any]:
    sizes = {"n_embd": width, "n_layer": layers, "n_head": heads}
    return {"model_type": "gpt2", "vocab_size": 50257, "n_positions": 2048, **sizes}


def _llama_like(model_type: str, vocab_size: int, tied: bool, groups: int, **more: Any) -> Fields:
    def fields(width: int, layers: int, heads: int) -> dict[str, Any]:
        shared = groups if heads % groups == 0 else 7  # 14 heads, as Qwen2.5-0.5B has them
        return {
            "model_type": model_type,
            "vocab_size": vocab_size,
            "hidden_size": width,
            "num_hidden_layers": layers,
            "intermediate_size": -(-width * 8 // 3 // 64) * 64,
            "num_attention_heads": heads,
            "num_key_value_heads": heads // shared,
            "max_position_embeddings": 4096,
            "tie_word_embeddings": tied,
            **more,
        }

    return fields


def _t5(width: int, layers: int, heads: int) -> dict[str, Any]:
    sizes = {"d_model": width, "d_kv": 64, "d_ff": 4 * width, "num_layers": layers, "num_heads": heads}
    return {"model_type": "t5", "vocab_size": 32128, "decoder_start_token_id": 0, **sizes}


def _encoder(model_type: str, **more: Any) -> Fields:
    def fields(width: int, layers: int, heads: int) -> dict[str, Any]:
        sizes = {"hidden_size": width, "num_hidden_layers": layers, "num_attention_heads": heads}
        return {"model_type": model_type, **sizes, "intermediate_size": 4 * width, **more}

    return fields


def _resnet(*depths: int) -> dict[str, Any]:
    return {"model_type": "resnet", "depths": list(depths), "layer_type": "bottleneck"}


MIXTURE = {"intermediate_size": 2048, "num_local_experts": 4, "num_experts_per_tok": 2}
BUILDERS: dict[str, Callable[[Any, torch.dtype], Built]] = {
    "decoder": _decoder,
    "gpt2": _language("CausalLM", _gpt2),
    "llama": _language("CausalLM", _llama_like("llama", 32000, False, 1)),
    "qwen": _language("CausalLM", _llama_like("qwen2", 151936, True, 4)),
    "mixtral": _language("CausalLM", _llama_like("mixtral", 32000, False, 4, **MIXTURE)),
    "t5": _language("Seq2SeqLM", _t5),
    "bert": _language("MaskedLM", _encoder("bert", vocab_size=30522, max_position_embeddings=2048)),
    "vit": _vision(_encoder("vit")),
    "resnet": _vision(_resnet),
    "mlp": _mlp,
}


def build(case: Any) -> Built:
    """The module of ``case`` on meta, in its precision, checkpointing switched on if asked for."""
    dtype = torch.bfloat16 if case.precision == "bf16" else torch.float32
    built = BUILDERS[case.family](case, dtype)
    if case.checkpointing and case.family != "decoder":
        with warnings.catch_warnings():
            warnings.simplefilter("ignore")
            model: Any = built.model
            model.gradient_checkpointing_enable(gradient_checkpointing_kwargs={"use_reentrant": False})
    return built


def materialise(model: nn.Module, device: str) -> nn.Module:
    """Real memory for a module on meta: first all parameters, then all buffers, each once; nothing else is
    allocated.
    """
    parameters: dict[int, nn.Parameter] = {}
    for module in model.modules():
        for name, old in module._parameters.items():
            if old is not None and id(old) not in parameters:
                fresh = torch.empty(old.shape, dtype=old.dtype, device=device)
                fresh.fill_(1.0) if old.dim() == 1 else fresh.normal_(0.0, 0.02)
                parameters[id(old)] = nn.Parameter(fresh, old.requires_grad)
            if old is not None:
                module._parameters[name] = parameters[id(old)]
    for module in model.modules():
        for name, old in module._buffers.items():
            if old is not None:
                module._buffers[name] = _buffer(name, old, device)
    if hasattr(model, "tie_weights"):
        model.tie_weights()  # pyright: ignore[reportCallIssue]
    return model


def _buffer(name: str, old: Tensor, device: str) -> Tensor:
    fresh = torch.empty(old.shape, dtype=old.dtype, device=device)
    if name == "position_ids":
        fresh.copy_(torch.arange(old.shape[-1]).expand(old.shape))
    elif name == "running_var" or "inv_freq" in name:
        fresh.fill_(1)
    else:
        fresh.zero_()
    return fresh
