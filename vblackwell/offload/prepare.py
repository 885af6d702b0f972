"""`prepare`: a model and its optimizer in one call, as `create_vgpu_stack`, `enable_vgpu_stack_optimization` and
`VGPUAdamW` with their defaults give them; `release` gives everything back.
"""

import itertools
from typing import Any

import torch
from torch import nn

from vblackwell.errors import ConfigurationError
from vblackwell.memory.cache.stack import VGPUStack, create_vgpu_stack
from vblackwell.offload import api
from vblackwell.offload.optimizer import VGPUAdamW


def prepare(
    model: nn.Module,
    *,
    lr: float = 1e-3,
    betas: tuple[float, float] = (0.9, 0.999),
    eps: float = 1e-8,
    weight_decay: float = 1e-2,
    max_grad_norm: float | None = None,
    accumulation_steps: int = 1,
    stack: VGPUStack | None = None,
    name: str | None = None,
) -> tuple[nn.Module, VGPUAdamW]:
    """Put ``model`` into a stack and make its optimizer: ``model, optimizer = vb.prepare(model, lr=3e-4)``.

    Train as with PyTorch: ``loss.backward()``, ``optimizer.step()``, ``optimizer.zero_grad()``; inputs go to the GPU,
    if there is one. Weights are computed with in the type that they have, and fp32 masters are kept of bf16 and fp16.
    `release` finishes pending updates, makes a plain module again, and closes the stack that was made here.

    Args:
        model: any module, with its parameters on the CPU or on level 0's device. The same object is returned.
        lr: learning rate; with ``betas``, ``eps`` and ``weight_decay`` of all parameters that are trained, as of
            `torch.optim.AdamW`.
        max_grad_norm: clip the 2-norm of all gradients to this at each `step`; None: gradients are taken as they are.
        accumulation_steps: calls of ``loss.backward()`` per `step`. A group's update starts after the last of them,
            while the others' gradients are made; the numbers do not depend on it.
        stack: where the model goes, next to others in it; None: a stack of its own, of all that is free on this machine
            (GPU, RAM and disk, or without a GPU RAM and disk).
        name: tells models in one stack apart; None: 'model', 'model-2' and so on.

    Levels of other sizes, another compute type, formats and placements: `create_vgpu_stack`,
    `enable_vgpu_stack_optimization` and `VGPUAdamW` one after the other.

    Raises:
        ConfigurationError: a number outside its range, or what is no number; nothing to train; a model that is in a
            stack already, or has gradients; no directory on a disk for the stack's lowest level.
        Unsupported: a parameter that is to be trained is neither fp32, bf16 nor fp16.
        KeyClash: ``stack`` has a model of this ``name``.
        InsufficientMemory: the levels cannot hold the model.
        In all cases the model is as it was.
    """
    trained = [param for param in model.parameters() if param.requires_grad]
    if not trained:
        raise ConfigurationError(f"{type(model).__name__} has nothing to train: give parameters requires_grad=True")
    scaled = any(param.dtype is torch.float16 for param in trained)  # by a factor that only the step takes away
    settings: dict[str, Any] = {"lr": lr, "betas": betas, "eps": eps, "weight_decay": weight_decay}
    settings |= {"max_grad_norm": max_grad_norm, "accumulation_steps": accumulation_steps}
    settings["update_in_backward"] = not scaled
    _check(settings)
    before = [torch.empty(0, dtype=param.dtype, device=param.device) for param in model.parameters()]
    made = create_vgpu_stack() if stack is None else None
    target = stack if made is None else made
    assert target is not None
    try:
        if name is None:
            names = ("model" if number == 1 else f"model-{number}" for number in itertools.count(1))
            name = next(each for each in names if not api.holds_model(target, each))
        api.enable_vgpu_stack_optimization(model, target, name)
    except BaseException:
        if made is not None:
            made.close()
        raise
    if made is not None:
        api.close_at_release(model, made)
    try:
        return model, VGPUAdamW(model.parameters(), **settings)
    except BaseException:  # there is no room for its states
        api.release(model, before[0].device)
        for param, was in zip(model.parameters(), before, strict=True):
            param.data = param.data.to(was.dtype)  # of masters that are the weights yet
        raise


def _check(settings: dict[str, Any]) -> None:
    """Raises what an optimizer with these ``settings`` raises, before the model is touched."""
    try:
        VGPUAdamW([nn.Parameter(torch.zeros(1))], **settings)
    except ConfigurationError:
        raise
    except ValueError as error:  # torch's, of betas, eps and weight_decay
        raise ConfigurationError(f"{error}: give a number in AdamW's range") from error
