"""Whether a model has anything to train: asked before a step, whose own words for it would be autograd's."""

from __future__ import annotations

from torch import nn

from vblackwell.errors import ConfigurationError


def refuse_frozen(model: nn.Module) -> None:
    """Do nothing for a model that can be trained.

    Raises:
        ConfigurationError: none of its parameters has ``requires_grad``; with what to do.
    """
    parameters = list(model.parameters())
    if any(param.requires_grad for param in parameters):
        return
    found = (
        f"all of its {len(parameters)} parameters are frozen (requires_grad is False)"
        if parameters
        else "it has no parameters"
    )
    raise ConfigurationError(
        f"{type(model).__name__} has nothing to train: {found}; call requires_grad_(True) on what is to learn, or train adapters over a "
        "frozen base (vb train --model FOLDER --lora 16)"
    )
