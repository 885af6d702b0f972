"""Low-rank adapters (Hu et al., arXiv:2106.09685) by peft, put around the linears of any model, under peft's names.

Reading a flag must not import torch, so the functions do.
"""

import json
import math
import re
import zlib
from dataclasses import dataclass
from typing import Any

from vblackwell.errors import ConfigurationError, Unsupported, nearest

ADAPTER = "default"  # peft's name of the one adapter
# Of experts' linears before transformers stacked them; peft looks for a stacked parameter where it meets one.
_OF_EXPERTS = ("w1", "w2", "w3", "gate_proj", "up_proj", "down_proj")


@dataclass(frozen=True)
class Lora:
    """Adapters ``x W^T + (alpha / rank) x A^T B^T``; ConfigurationError for a value out of range."""

    rank: int  # rows of A
    alpha: float | None = None  # scale, by default twice the rank
    dropout: float = 0.0  # of what goes into A
    targets: tuple[str, ...] | None = None  # last parts of the names of linears; by default all but the output head

    def __post_init__(self) -> None:
        if self.rank < 1:
            raise ConfigurationError(f"rank {self.rank} of adapters: give at least 1, e.g. --lora 16")
        if self.alpha is not None and not (math.isfinite(self.alpha) and self.alpha > 0):
            raise ConfigurationError(f"alpha {self.alpha} of adapters: give a positive number")
        if not 0 <= self.dropout < 1:
            raise ConfigurationError(f"dropout {self.dropout} of adapters: give a share of at least 0 and below 1")

    @property
    def scale(self) -> float:
        return (2 * self.rank if self.alpha is None else self.alpha) / self.rank

    @classmethod
    def parse(cls, text: str) -> "Lora":
        """``'16'`` or ``'16,alpha=32,dropout=0.05,targets=q_proj+v_proj'``; ConfigurationError for anything else."""
        rank, *more = text.split(",")
        known, values = ("alpha", "dropout", "targets"), dict[str, Any]()
        try:
            for item in more:
                key, equals, value = item.strip().partition("=")
                if key not in known or not equals:
                    wrong = f"{item.strip()!r} is none of alpha=, dropout=, targets={nearest(key, known)}"
                    raise ConfigurationError(f"--lora {text!r}: {wrong}")
                values[key] = tuple(filter(None, value.split("+"))) if key == "targets" else float(value)
            return cls(int(rank), **values)
        except ConfigurationError:
            raise
        except ValueError:
            example = "--lora 16 or --lora 16,alpha=32,dropout=0.05,targets=q_proj+v_proj"
            raise ConfigurationError(f"--lora {text!r} cannot be read: write e.g. {example}") from None


def add_adapters(model: Any, lora: Lora, base: str | None = None) -> dict[str, Any]:
    """Wrap the targets in peft's layers, adapters on the meta device, and freeze the rest; returns adapter_config.json.
    ConfigurationError for a target that no linear has, Unsupported without peft, or where it refuses.
    """
    try:
        import peft
    except ImportError as error:
        raise Unsupported("adapters need the package peft: pip install 'vblackwell[lora]'") from error
    left = adapter_targets(model)
    found = {name: model.get_submodule(name) for name, why in left.items() if why is None}
    names = sorted({name.rpartition(".")[2] for name in found})
    if any(param.dim() == 3 and ".experts." in name for name, param in model.named_parameters()):
        taken = [name for name in names if name in _OF_EXPERTS]
        names = [name for name in names if name not in taken]
        if asked := [name for name in lora.targets or () if name in taken]:
            why = "where experts are stacked peft takes this name for theirs, which get no adapters here"
            raise Unsupported(f"--lora targets={asked[0]}: {why}: choose from {', '.join(names)}")
    wanted = names if lora.targets is None else list(lora.targets)
    for target in wanted:
        if target not in names:
            reasons = (f" ({name}: {why})" for name, why in left.items() if why and name.endswith(f".{target}"))
            there = f"{type(model).__name__} has no such linear{next(reasons, '')}"
            known = f"only {', '.join(names)}{nearest(target, names)}"
            raise ConfigurationError(f"--lora targets={target}: {there}, {known}")
    chosen = [module for name, module in found.items() if name.rpartition(".")[2] in wanted]
    make: Any = peft.LoraConfig  # whose alpha is stated as an int, and may be a float
    sizes = {"r": lora.rank, "lora_alpha": lora.scale * lora.rank, "lora_dropout": lora.dropout}
    transposed = all(type(module).__name__ == "Conv1D" for module in chosen)
    kind = {"bias": "none", "task_type": "CAUSAL_LM", "base_model_name_or_path": base, "fan_in_fan_out": transposed}
    config = make(target_modules=wanted, **sizes, **kind)
    try:
        peft.inject_adapter_in_model(config, model, ADAPTER, low_cpu_mem_usage=True)
    except ValueError as error:
        said = " ".join(str(error).split())
        raise Unsupported(f"peft puts no adapters into {type(model).__name__}: {said}") from error
    stated = config.to_dict() | {"inference_mode": True}
    return json.loads(json.dumps(stated, default=lambda value: sorted(value) if isinstance(value, set) else str(value)))


def adapter_targets(model: Any) -> dict[str, str | None]:
    """Every linear of ``model``: why no adapter goes around it, or None if one may."""
    from vblackwell.nn.convert.linears import HEAD, find_linears, head_of

    head, linears = head_of(model), {name: model.get_submodule(name) for name in find_linears(model)}
    return {
        name: "the output head" if linear is head or re.search(HEAD, name) else _why_no_product(linear)
        for name, linear in linears.items()
    }


def _why_no_product(linear: Any) -> str | None:
    """Why a call gives no product alone: a mixture's router may be a linear by class that answers with choices."""
    import torch
    from torch import nn

    if type(linear) is nn.Linear or not isinstance(linear, nn.Linear):
        return None
    weight, kind = linear.weight, type(linear).__name__
    try:
        output = linear(torch.empty((2, linear.in_features), dtype=weight.dtype, device=weight.device))
    except Exception as error:  # whatever a foreign forward raises, it is no plain product
        return f"{kind} given two rows failed: {' '.join(f'{type(error).__name__} {error}'.split())[:200]}"
    if isinstance(output, torch.Tensor) and output.shape == (2, linear.out_features):
        return None
    return f"{kind} answers with something else than a product"


def is_adapter(name: str) -> bool:
    return f".lora_A.{ADAPTER}." in name or f".lora_B.{ADAPTER}." in name


def file_name(name: str) -> str:
    """What peft's files call the adapter's parameter ``name``."""
    return "base_model.model." + name.replace(f".{ADAPTER}.", ".")


def base_name(name: str) -> str:
    """The name that a base's parameter had before its module was wrapped."""
    return name.replace(".base_layer.", ".")


def fill_adapter(name: str, out: Any, seed: int) -> None:
    """First values: A uniform as an ``nn.Linear``'s, B zero, so that the model begins as its base."""
    import torch

    with torch.no_grad():
        if f".lora_B.{ADAPTER}." in name:
            out.zero_()
            return
        generator = torch.Generator().manual_seed((seed << 32) ^ zlib.crc32(name.encode()))
        bound = 1 / math.sqrt(out.shape[1])
        out.copy_(torch.empty(out.shape, dtype=torch.float32).uniform_(-bound, bound, generator=generator))
