"""The module that a Hugging Face ``config.json`` describes, without memory for its weights.

Parameters are on the meta device, buffers are real: buffers such as rotary frequencies are computed, not loaded, and a model
made wholly on meta would lose them.
"""

from __future__ import annotations

import re
from typing import Any

import torch
from torch import nn

from vblackwell.errors import ConfigurationError
from vblackwell.nn.decoder.config import DecoderConfig, not_supported_reasons
from vblackwell.nn.decoder.decoder import Decoder


def skeleton(config: dict[str, Any]) -> nn.Module:
    """A ``Decoder`` where that computes the configuration, else a causal model of ``transformers``; in eval mode.

    Args:
        config: contents of ``config.json``; a ``quantization_config`` in it is ignored.

    Raises:
        ConfigurationError: ``transformers`` does not know the configuration.
    """
    plain = _decoded({key: value for key, value in config.items() if key != "quantization_config"})
    if not not_supported_reasons(plain):
        return Decoder(DecoderConfig.from_hf(plain), device="meta").eval()
    from transformers import AutoConfig, AutoModelForCausalLM

    kind = plain.pop("model_type", None)
    register: Any = torch.nn.modules.module.register_module_parameter_registration_hook
    hook = register(_without_memory)
    try:
        known = AutoConfig.for_model(kind, **plain)
        stated = {} if known.dtype is None else {"dtype": known.dtype}  # of buffers, which meet the weights
        model = AutoModelForCausalLM.from_config(known, trust_remote_code=False, **stated)
    except (ValueError, KeyError) as error:
        raise ConfigurationError(f"transformers has no causal model for model_type {kind!r}: {error}") from error
    finally:
        hook.remove()
    return model.eval()


def stays_fp32(model: Any, name: str) -> bool:
    """Whether transformers keeps the tensor ``name`` of a model in half precision in fp32, because the code computes with it in fp32."""
    patterns = getattr(model, "_keep_in_fp32_modules_strict", None) or ()
    return any(re.search(pattern.replace("*", ".*"), name) for pattern in patterns)  # anywhere, as there


def _decoded(value: Any) -> Any:
    """transformers writes infinities, which JSON has not, as ``{"__float__": "Infinity"}``."""
    if isinstance(value, list):
        return [_decoded(item) for item in value]
    if not isinstance(value, dict):
        return value
    if value.keys() == {"__float__"} and isinstance(value["__float__"], str):
        return float(value["__float__"])
    return {key: _decoded(item) for key, item in value.items()}


def _without_memory(module: nn.Module, name: str, parameter: nn.Parameter) -> nn.Parameter:
    if parameter is None or parameter.is_meta:
        return parameter
    return nn.Parameter(parameter.to("meta"), requires_grad=parameter.requires_grad)
