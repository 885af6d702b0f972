"""A causal model from a folder's ``config.json``, its parameters on the meta device and its buffers real.

`transformers` writes the model's code; nothing of the folder is run. Buffers that no file holds (rotary frequencies,
scales of embeddings, masks) are what the model's constructors compute on the CPU, so they have the bits of a model that
was built there. Only parameters go to the meta device, as each is registered: their memory is asked for and given back
untouched.
"""

from __future__ import annotations

import threading
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import Any

import torch
from torch import nn
from torch.nn.modules.module import register_module_parameter_registration_hook
from torch.utils.weak import WeakIdKeyDictionary

from vblackwell.errors import ConfigurationError, Unsupported
from vblackwell.folders.folder import GENERATION, read_config, read_json


def build_on_meta(
    folder: Path, dtype: torch.dtype | None, *, attention: str | None = None, trust_remote_code: bool = False,
    quantized: bool = False,
) -> nn.Module:  # fmt: skip
    """The model that ``folder``/config.json describes; no weight file is looked at.

    Args:
        dtype: of its parameters; None: what config.json says.
        attention: transformers' ``attn_implementation``; by default what it chooses, and 'sdpa' for 'flex_attention' in
            the file, which compiles for every length.
        trust_remote_code: let transformers run code that lies in the folder, where the architecture is not its own.
        quantized: take a folder of quantised weights too; the model is the one that they were made of.

    Raises:
        ConfigurationError: the file is missing, or describes no causal model that can be built.
        CorruptData: it is not JSON.
        Unsupported: its weights are quantised, or the architecture is not transformers' and its code is not trusted.
    """
    from transformers import CONFIG_MAPPING, AutoConfig, AutoModelForCausalLM

    file, raw = folder / "config.json", read_config(folder)
    kind = raw.get("model_type")
    if not isinstance(kind, str):
        raise ConfigurationError(f"{file} names no model_type: give the config.json that the model was published with")
    if raw.get("quantization_config") and not quantized:
        raise Unsupported(f"{file}: the weights are quantised; training starts from the folder they were made of")
    if kind not in CONFIG_MAPPING and not trust_remote_code:
        remote = "auto_map" in raw
        raise Unsupported(
            f"{file}: transformers has no architecture {kind!r}; "
            + (
                "the folder brings code for it, which is run with trust_remote_code alone"
                if remote
                else "update transformers"
            )
        )
    options: dict[str, Any] = {} if attention is None else {"attn_implementation": attention}
    try:
        config = AutoConfig.from_pretrained(folder, trust_remote_code=trust_remote_code, local_files_only=True)
        if attention is None and config._attn_implementation == "flex_attention":
            options["attn_implementation"] = "sdpa"
        config.__dict__.pop("quantization_config", None)  # of the weights, which the caller fills
        if (chosen := dtype or config.dtype) is not None:
            options["dtype"] = chosen
        with parameters_on_meta():
            model = AutoModelForCausalLM.from_config(config, trust_remote_code=trust_remote_code, **options)
    except Exception as error:  # each architecture raises what it likes at values that it cannot use
        reason = " ".join(str(error).split()) or type(error).__name__
        raise ConfigurationError(
            f"{file}: transformers builds no causal model of it ({reason}); give the config.json that the weights were "
            "published with"
        ) from error
    if (folder / GENERATION).is_file() and hasattr(model, "generation_config"):  # from_config does not look at it
        model.generation_config = _generation_config(folder)
    unknown = [name for name, buffer in model.named_buffers() if buffer.is_meta]
    if unknown:
        raise Unsupported(f"{file}: the code of {kind!r} leaves the buffer {unknown[0]!r} without a value")
    return model.train()


def _generation_config(folder: Path) -> Any:
    from transformers import GenerationConfig

    read_json(folder / GENERATION)  # says by name what is wrong with it
    try:
        return GenerationConfig.from_pretrained(folder, local_files_only=True)
    except (OSError, ValueError, TypeError) as error:
        raise ConfigurationError(
            f"{folder / GENERATION}: transformers does not take it ({' '.join(str(error).split())}); mend or remove it"
        ) from error


@contextmanager
def parameters_on_meta() -> Iterator[None]:
    """While this lasts, parameters of modules that this thread builds go to the meta device; tensors and buffers stay
    real.
    """
    thread, moved = threading.get_ident(), WeakIdKeyDictionary()

    def send(module: nn.Module, name: str, param: nn.Parameter | None) -> nn.Parameter | None:
        if param is None or param.is_meta or threading.get_ident() != thread:
            return None
        if param not in moved:  # one that a constructor registers under two names stays one
            moved[param] = nn.Parameter(param.detach().to("meta"), requires_grad=param.requires_grad)
            moved[param].__dict__.update(param.__dict__)
        return moved[param]

    hook: Any = send  # typed as if it gave nothing back
    handle = register_module_parameter_registration_hook(hook)
    try:
        yield
    finally:
        handle.remove()
