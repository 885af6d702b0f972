"""`enable_vgpu_stack_optimization`, `release`, `model_plan`: a model goes into a stack and comes out again.

*resident*: weights, gradients and states all fit level 0, and the model stays a plain module. *streamed*: the lower
levels hold the model, and level 0 what is in use. The choice is arithmetic (`bytes_when_resident`) and can be forced.
"""

import functools
import itertools
import warnings
import weakref
from collections.abc import Collection, Iterable
from contextlib import ExitStack
from typing import Any

import torch
from torch import nn

from vblackwell.errors import ConfigurationError, InsufficientMemory, KeyClash
from vblackwell.kernels.optimizer import cpu
from vblackwell.kernels.runtime.triton_launch import know_triton
from vblackwell.memory.cache.stack import VGPUStack
from vblackwell.memory.level import level_in_words
from vblackwell.nn.convert.causal_lm import accelerate_causal_lm, is_accelerated, is_causal_lm, restore_causal_lm
from vblackwell.offload.batch_check import BatchCheck
from vblackwell.offload.engine import offload_of, stream
from vblackwell.offload.layout.groups import (
    Formats,
    bytes_when_resident,
    compute_dtype_of,
    num_elements,
    refuse_untrainable,
)
from vblackwell.offload.layout.placement import CUDA_ACTIVATION_SHARE, StreamingOptions
from vblackwell.offload.measure import rates_together
from vblackwell.offload.movement.activations import ActivationStore
from vblackwell.offload.movement.state import Level0Budget
from vblackwell.offload.resident import Resident
from vblackwell.offload.storage.initialize import Initialize, ModelSource, move_buffers, refuse_shared_memory
from vblackwell.units import format_bytes, parse_bytes

PLACEMENTS = ("auto", "resident", "streamed")

_accelerated: weakref.WeakSet[nn.Module] = weakref.WeakSet()  # by `enable_vgpu_stack_optimization`
# Of each stack the models by name, which are there while their finalizers are alive.
_names: weakref.WeakKeyDictionary[VGPUStack, dict[str, "weakref.finalize[Any, Any]"]] = weakref.WeakKeyDictionary()
_closed_at_release: weakref.WeakKeyDictionary[nn.Module, VGPUStack] = weakref.WeakKeyDictionary()


def enable_vgpu_stack_optimization(
    model: nn.Module,
    stack: VGPUStack,
    name: str = "model",
    *,
    placement: str = "auto",
    compute_dtype: torch.dtype | None = None,
    groups: Iterable[str] | None = None,
    update: str | float = "auto",
    activations: str = "auto",
    resident_bytes: int | str = 0,
    weight_bytes: int | str | None = None,
    states: str = "fp32",
    masters: str = "exact",
    rounding_seed: int = 0,
    activation_bytes: int | str = 0,
    initialize: Initialize | None = None,
    accelerate: bool | None = None,
) -> nn.Module:
    """Put ``model`` into ``stack`` and return it, ready to run on level 0's device.

    Args:
        model: any module, its parameters on the CPU, on level 0's device, or (with ``initialize``) on the meta device.
            Train it with `VGPUAdamW`, made afterwards.
        name: tells models in one stack apart.
        placement: 'auto' (resident if weights, gradients and AdamW states fit level 0), 'resident' or 'streamed'.
        compute_dtype: type of the weights that kernels read, e.g. torch.bfloat16; trainable parameters then keep fp32
            masters.
        groups: names of modules that stream as one each; by default the children of outermost ModuleLists.
        update: where AdamW runs for a streamed model: 'device' (on level 0: states come up to the weights), 'host' (on
            the CPU), the share of the parameters that the host updates, 0 to 1, or 'auto': the share of the
            shortest step by simulation, with measured rates and the optimizer's ``accumulation_steps``; 1 without a
            GPU. It changes no bit. ('level0' and 'home' are older names of the two.)
        resident_bytes: level-0 bytes (number or "2GiB") for groups that live there with their states, from the model's
            first on (the first of forward are the last of backward: nothing hides their loads).
        weight_bytes: what loaded weights may take of level 0. More than the few groups in use saves loads: a group that
            stays over the turn from forward to backward, or from backward to forward, is not loaded again. Default: a
            few groups; on a GPU, when steps have shown what they need, what they leave of level 0 up to 78 % of it.
            CUDA graphs of layers may take what a stated size leaves of the process's cap.
        activations: where the inputs of checkpointed layers wait for backward, 'level0' or 'host' (`ActivationStore`),
            or 'auto': in RAM, as far as that has room, where level 0 is a GPU.
        states: of AdamW's moments: 'fp32', or '8bit' for 2.03 bytes a parameter instead of 8 (bf16 or fp32 weights;
            updated on level 0, with or without a GPU). A stated choice: `vb docs numerics` says what it changes.
        masters: 'exact' (fp32), or 'stochastic': bf16 weights are all there is, rounded at random; with 8-bit states
            alone.
        rounding_seed: of what is rounded at random. The bits depend on it, the parameter's name, its step and the
            element.
        activation_bytes: host bytes (number or "2GiB") that weights and states leave to activations='host': layers *
            tokens * hidden size * bytes an element. Needed where states spill to a disk, because they fill RAM first.
        initialize: fills what is on the meta device, so that the host never holds the model twice: called once for each
            parameter and buffer there with its name and a CPU tensor of its shape and type, to be filled in place
            during the call, e.g. ``lambda name, tensor: tensor.copy_(checkpoint.get_tensor(name))``. Groups go in
            order; tied parameters come once. Training then gives the bits of a model that was built with these values.
        accelerate: run a causal model of transformers on fused operators until `release`, its loss in training in
            chunks, without logits (`accelerate_causal_lm`, which is called before this or not at all). False keeps the
            model as it is; by default a GPU's are accelerated. It rounds otherwise.

    What concerns streaming (``groups`` to ``activations``, ``activation_bytes``) has no meaning for a model that is
    resident, and is ignored.

    Raises:
        ConfigurationError: unknown placement or format, formats that exclude each other, no parameters, or the model is
            in a stack already; a model on the meta device without ``initialize``, or a tensor that ``initialize`` left
            unfilled; parameters that share memory with themselves, each other or a tensor that a module keeps.
        Unsupported: a parameter that is to be trained is neither fp32, bf16 nor fp16, or its group cannot be kept in
            the formats asked for (fp16, mixed types).
        KeyClash: the stack has a model of this name.
        InsufficientMemory: level 0 cannot hold the largest group, or the lower levels the model; nothing was changed.
    """
    if placement not in PLACEMENTS:
        raise ConfigurationError(f"placement {placement!r} is none of {', '.join(PLACEMENTS)}")
    options = StreamingOptions(
        compute_dtype,
        None if groups is None else tuple(groups),
        update,
        parse_bytes(resident_bytes),
        None if weight_bytes is None else parse_bytes(weight_bytes),
        parse_bytes(activation_bytes),
        Formats(states, masters, rounding_seed),
    )
    if activations not in ("auto", "level0", "host"):
        raise ConfigurationError(f"activations {activations!r} is none of 'auto', 'level0' and 'host'")
    kind = type(model).__name__
    if not any(True for _ in model.parameters()):
        raise ConfigurationError(f"{kind} has no parameters to place")
    if offload_of(model) is not None:
        raise ConfigurationError(f"{kind} is in a stack already: release(model) first")
    if any(param.grad is not None for param in model.parameters()):
        raise ConfigurationError(f"{kind} has gradients: step with them, or zero_grad(set_to_none=True), before")
    for param_name, param in model.named_parameters():
        if param.requires_grad:
            refuse_untrainable(param_name, compute_dtype_of(param, compute_dtype))
    refuse_shared_memory(model)
    names = _names.setdefault(stack, {})
    if holds_model(stack, name):
        raise KeyClash(f"the stack already holds a model named {name!r}: give this one another name=")
    if stack.level0_device.type == "cuda":
        know_triton()
    check = BatchCheck.of(model, stack.level0_device, compute_dtype)
    with ExitStack() as undone:
        if accelerate is None:
            accelerate = stack.level0_device.type == "cuda" and is_causal_lm(model)
        if accelerate and not is_accelerated(model):
            _accelerated.add(model)
            undone.callback(_restore, model)
            accelerate_causal_lm(model, loss="training")
        source = ModelSource(model, initialize)
        stack.measure_host_memory()
        Level0Budget.drop_idle(stack)
        needed = bytes_when_resident(model, compute_dtype, options.formats)
        level, device, on_gpu = stack.levels[0], stack.level0_device, stack.level0_device.type == "cuda"
        free = level.capacity_bytes - level.used_bytes
        if placement == "resident" and needed > free:
            raise InsufficientMemory(
                f"{name!r} needs {format_bytes(needed)} resident (weights, gradients, AdamW states), level 0 "
                f"({level.name}) has {format_bytes(free)} free: raise fast_memory (the capacity of level 0) or use "
                "placement='streamed'",
                needed_bytes=needed,
                available_bytes=free,
            )
        usable = free * (1 - CUDA_ACTIVATION_SHARE) if on_gpu else free
        if placement == "resident" or (placement == "auto" and needed <= usable):
            engine: Any = Resident(model, stack, name, options, source)
        else:
            chosen = activations == "auto"
            if chosen:
                has_ram = any(each.device is not None and each.device.type == "cpu" for each in stack.levels[1:])
                activations = "host" if on_gpu and has_ram else "level0"
            store = ActivationStore(stack, f"{name}/activations", may_stay=chosen) if activations == "host" else None
            measured = functools.partial(rates_together, device) if on_gpu else None
            engine = stream(model, stack, name, options, source, store, measured)
        names[name] = engine.finalizer
        undone.pop_all()
    if check is not None:
        engine.handles.append(check.watch(model, engine))
    stack.measure_host_memory()  # the model's own is free now: moments, whose places are next, may have it
    if on_gpu and engine.updates_on_host and (reason := cpu.why_not()):
        said = (
            f"AdamW on the CPU, which the GPU waits for, is PyTorch's operations, at half the speed or less: {reason}"
        )
        warnings.warn(said, RuntimeWarning, stacklevel=2)
    return model


def release(model: nn.Module, device: torch.device | str = "cpu") -> nn.Module:
    """Take ``model`` out of its stack: a plain module again, on ``device``, with fp32 masters as its weights. A stack
    that `prepare` made for it is closed.

    Pending updates are finished first. Gradients, and the optimizer's states, come along, so that training may go on;
    operators are those that the model came with. A forward that Ctrl-C ended is forgotten. A model that was never
    offloaded is returned as it is.

    Raises:
        ConfigurationError: a forward runs in another thread; the model stays where it is.
    """
    engine = offload_of(model)
    if engine is not None:
        engine.release(torch.device(device))
        move_buffers(model, torch.device(device))
        engine.close()
        engine.stack.measure_host_memory()
    _restore(model)
    if (stack := _closed_at_release.pop(model, None)) is not None:
        stack.close()
    return model


def holds_model(stack: VGPUStack, name: str) -> bool:
    """Whether ``stack`` has a model of this ``name``."""
    finalizer = _names.get(stack, {}).get(name)
    return finalizer is not None and finalizer.alive


def close_at_release(model: nn.Module, stack: VGPUStack) -> None:
    """Let `release` close ``stack``, which was made for ``model`` alone."""
    _closed_at_release[model] = stack


def model_plan(model: nn.Module) -> str:
    """Where ``model``'s bytes are and what is done to it where, in lines for people: what the defaults chose, too;
    ConfigurationError if it is in no stack.
    """
    engine = offload_of(model)
    if engine is None:
        raise ConfigurationError(
            f"{type(model).__name__} is in no stack: enable_vgpu_stack_optimization(model, stack) first"
        )
    found, names = engine.summary(), [level_in_words(level.name) for level in engine.stack.levels]
    held = [sum(row) for row in zip(*found["bytes_by_level"].values(), strict=True)]
    largest = format_bytes(found["largest_group_bytes"])
    lines = [
        f"{found['placement']}: {found['groups']} layer groups, the largest {largest}",
        ", ".join(f"{format_bytes(size)} in {name}" for name, size in zip(names, held, strict=False) if size),
    ]
    if found["placement"] == "streamed":
        trained = [group for group in engine.groups if group.trainable()]

        def share(groups: Collection[str]) -> float:
            """Of the trained parameters."""
            mine = sum(num_elements(group) for group in trained if group.name in groups)
            return mine / max(1, sum(map(num_elements, trained)))

        above, early = share(found["updated_on_level0"]), found["updated_early"]
        where = f"{above:.0%} of the parameters in {names[0]}, others on the CPU" if above else "on the CPU"
        lines += [
            f"loaded weights may take {format_bytes(found['weights_budget_bytes'])} of {names[0]}",
            f"AdamW: {where}",
            f"inputs of checkpoints wait in {'RAM' if found['activations'] else names[0]}",
        ]
        if early is not None:
            rest = "" if share(early) == 1 else ", the others after it"
            lines.append(f"{int(100 * share(early))}% of the parameters are updated before step(){rest}")
        lines += filter(None, [found["host_share"], found["graphs"]])
        if found["steps"]:
            lines.append(f"updates were rolled back in {found['rolled_back_steps']} of {found['steps']} steps")
    if is_accelerated(model):
        lines.append("operators of accelerate_causal_lm" + (", until release" if model in _accelerated else ""))
    return "\n".join(lines)


def _restore(model: nn.Module) -> None:
    """Give ``model`` its own operators back, if it got others here."""
    if model in _accelerated:
        _accelerated.remove(model)
        restore_causal_lm(model)


_counters: weakref.WeakKeyDictionary[VGPUStack, "itertools.count[int]"] = weakref.WeakKeyDictionary()


class VGPUStackLinear(nn.Linear):
    """``y = x W^T + b`` with ``W`` (out_features, in_features) and ``b`` on the stack's lower levels, on level 0 in
    use.

    Trains with `VGPUAdamW`. Input and output are on level 0's device.

    Args:
        vgpu_stack: where the parameters live.
        name: the layer's name in the stack; 'linear-0', 'linear-1', ... by default.
    """

    def __init__(
        self,
        in_features: int,
        out_features: int,
        *,
        vgpu_stack: VGPUStack,
        bias: bool = True,
        dtype: torch.dtype | None = None,
        name: str | None = None,
    ) -> None:
        super().__init__(in_features, out_features, bias=bias, dtype=dtype)
        if name is None:
            name = f"linear-{next(_counters.setdefault(vgpu_stack, itertools.count()))}"
        enable_vgpu_stack_optimization(self, vgpu_stack, name, placement="streamed")
