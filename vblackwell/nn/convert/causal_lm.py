"""Hugging Face causal language models, as they are, on the fused operators: norms, SwiGLU, rotary positions, and the loss.

``accelerate_causal_lm(model)`` changes no parameter and no name. It replaces every module that provably computes the
same by its fused form (fused_modules.py), and tells what it left and why. On CUDA that removes most passes over memory
between the matrix products; on the CPU the plain expressions run, with the model's bits but for the loss. Call it
before or after `enable_vgpu_stack_optimization`; a model that streams keeps its hooks.

In half precision the fused ops round once where transformers' round after every operation: nearer to the exact value,
and not the same bits.
"""

from __future__ import annotations

import weakref
from collections import Counter
from dataclasses import dataclass, field
from typing import Any

from torch import nn

from vblackwell.errors import ConfigurationError
from vblackwell.nn.convert import fused_loss
from vblackwell.nn.convert.fused_loss import FusedLoss
from vblackwell.nn.convert.fused_modules import KINDS, swap, unswap


@dataclass(frozen=True)
class Acceleration:
    """What `accelerate_causal_lm` did.

    Attributes:
        replaced: names of the modules that now run fused, by kind: 'norm', 'feed_forward', 'experts', 'rotary',
            'adapter', 'loss'.
        left: why not, by module name, for those that looked like one of the kinds, and 'loss' for the loss.
    """

    replaced: dict[str, list[str]] = field(default_factory=dict)
    left: dict[str, str] = field(default_factory=dict)

    def __str__(self) -> str:
        lines = [f"{kind}: {len(names)} fused" for kind, names in self.replaced.items()]
        lines += [f"left {count}: {reason}" for reason, count in Counter(self.left.values()).items()]
        return "\n".join(lines) or "nothing in this model has a fused form"


_done: weakref.WeakKeyDictionary[nn.Module, tuple[list[nn.Module], FusedLoss | None]] = weakref.WeakKeyDictionary()


def accelerate_causal_lm(
    model: nn.Module, *, modules: bool = True, loss: bool = True, chunk_tokens: int | None = None
) -> Acceleration:
    """Make ``model`` run with fused operators, in place.

    Args:
        model: any module; the loss needs one of transformers' causal models. Copies and pickles of it are plain.
        modules: replace norms, feed-forwards, gates of experts, rotary positions and adapters over FP4.
        loss: where ``labels`` are given, compute the loss in chunks of tokens; the output's ``logits`` are then None. A
            step whose labels are all ignored has loss 0, not NaN.
        chunk_tokens: tokens whose logits exist at a time; by default what 256 MiB hold.

    Raises:
        ConfigurationError: the model is accelerated already.
    """
    if model in _done:
        raise ConfigurationError(f"{type(model).__name__} is accelerated already: restore_causal_lm(model) first")
    report = Acceleration()
    swapped = _replace_modules(model, report) if modules else []
    fused = None
    if loss:
        reason = fused_loss.why_not(model)
        if reason is None:
            fused = FusedLoss(model, chunk_tokens)
            report.replaced["loss"] = [_name_of(model, _head_of(model))]
        else:
            report.left["loss"] = reason
    _done[model] = (swapped, fused)
    return report


def is_accelerated(model: nn.Module) -> bool:
    """Whether `accelerate_causal_lm` was called for this very model; a copy of it is plain."""
    return model in _done


def has_fused_loss(model: nn.Module) -> bool:
    """Whether this model, called with ``labels``, computes their loss in chunks and gives no logits."""
    return model in _done and _done[model][1] is not None


def restore_causal_lm(model: nn.Module) -> nn.Module:
    """Undo `accelerate_causal_lm`; a model that was not accelerated is returned as it is."""
    swapped, fused = _done.pop(model, ([], None))
    for module in swapped:
        unswap(module)
    if fused is not None:
        fused.remove(model)
    return model


def _replace_modules(model: nn.Module, report: Acceleration) -> list[nn.Module]:
    swapped: list[nn.Module] = []
    for name, module in model.named_modules():
        for kind, find in KINDS.items():
            found = find(module)
            if isinstance(found, str):
                report.left[name] = f"{kind} ({type(module).__name__}): {found}"
            elif found is not None:
                swap(module, found)
                swapped.append(module)
                report.replaced.setdefault(kind, []).append(name)
    return swapped


def _head_of(model: Any) -> nn.Module:
    return model.get_output_embeddings()


def _name_of(model: nn.Module, wanted: nn.Module) -> str:
    return next(name for name, module in model.named_modules() if module is wanted)
