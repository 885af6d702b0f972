"""Whether the step of a batch fits the cap of its process, asked before the forward that brings it.

A model in a stack meets a batch first in its forward. Then the step is traced without bytes, as for a plan, on a twin
of the model on meta: a tenth of a second, once for each batch that is larger than those before. What somebody watches
or changes (dispatch modes, hooks on all modules or on what is saved, another forward) is not traced, nor what cannot
be: of those batches nothing is said.
"""

import bisect
import copy
from collections import OrderedDict
from contextlib import suppress
from functools import partial
from typing import Any

import torch
from torch import Tensor, nn
from torch.nn.modules import module as every_module

from vblackwell.errors import InsufficientMemory, Unsupported
from vblackwell.machine.device import process_cap
from vblackwell.nn.convert.causal_lm import accelerate_causal_lm, has_fused_loss, is_accelerated, is_causal_lm
from vblackwell.nn.convert.fused_modules import plain_class
from vblackwell.nn.decoder.checkpoint import top_hooks
from vblackwell.nn.decoder.decoder import Decoder
from vblackwell.offload.layout.forecast import checkpoint_bytes, level0_bytes, step_bytes
from vblackwell.offload.parameters import BeforeForward, is_transformed
from vblackwell.offload.resident import Resident
from vblackwell.trace.causal_lm import language_batch
from vblackwell.trace.layers import copy_on_meta
from vblackwell.trace.trace import peak_with_gradients, trace_training
from vblackwell.units import format_bytes

# Of what is expected a step was seen to take 0.91 at least (docs/journal/offload.md): what is refused cannot run, and
# what may take a little more than the cap is left to torch's own error.
SURELY = 0.9
_RECOMPUTING = "gradient_checkpointing", "_gradient_checkpointing_func"  # where transformers and our decoder say it


class BatchCheck:
    """Knows ``model`` as it was before it came into a stack on ``device``, of which the process may take ``cap`` bytes;
    ``compute_dtype`` as of `enable_vgpu_stack_optimization`."""

    def __init__(self, model: nn.Module, device: torch.device, compute_dtype: torch.dtype | None, cap: int) -> None:
        self._cap, self._gpu = cap, dict[str, Any]()
        if device.type == "cuda":
            found = torch.cuda.get_device_properties(device)
            self._gpu = {"capability": (found.major, found.minor), "num_sms": found.multi_processor_count}
        self._twin = _twin_of(model)
        if compute_dtype is not None:
            self._twin.to(compute_dtype)
        self._fit: set[tuple[int, int, bool]] = set()  # sequences, tokens in each, whether the model computes the loss

    @classmethod
    def of(cls, model: nn.Module, device: torch.device, compute_dtype: torch.dtype | None) -> "BatchCheck | None":
        """None where nothing caps the process, or the model is neither a `Decoder` nor one of transformers' own causal
        models, whose step is known."""
        cap, known = process_cap(device), isinstance(model, Decoder)
        known = known or (is_causal_lm(model) and type(model).__module__.startswith("transformers.models."))
        return cls(model, device, compute_dtype, cap) if cap is not None and known else None

    def watch(self, model: nn.Module, engine: Any) -> Any:
        """Refuse batches of ``model``, which ``engine`` holds now, until the handle that this returns is removed. Its
        forward raises InsufficientMemory then, and nothing has changed."""
        hook = BeforeForward(partial(self._before_forward, engine))
        return model.register_forward_pre_hook(hook, prepend=True, with_kwargs=True)

    def _before_forward(self, engine: Any, model: nn.Module, args: tuple[Any, ...], kwargs: dict[str, Any]) -> None:
        if not (model.training and torch.is_grad_enabled()) or torch._C._current_graph_task_id() != -1:
            return
        tokens = kwargs.get("input_ids", kwargs.get("input_ids_BS", args[0] if args else None))
        if not isinstance(tokens, Tensor) or tokens.dim() != 2 or not tokens.numel() or is_transformed():
            return
        with_loss = len(args) > 1 if isinstance(model, Decoder) else False
        with_loss = with_loss or any(kwargs.get(name) is not None for name in ("labels", "targets_BS"))
        size, length = tokens.shape
        if any(size <= most and length <= longest and with_loss == of for most, longest, of in self._fit):
            return
        seen = torch._C._len_torch_dispatch_stack() > 0 or every_module._has_any_global_hook()
        if seen or top_hooks(True) is not None or not self._alike(model):
            return
        with suppress(Unsupported):
            held, step = self._needed(engine, model, size, length, with_loss)
            if int((held + step) * SURELY) > self._cap:
                raise self._refusal(engine, model, size, length, with_loss)
        self._fit.add((size, length, with_loss))

    def _alike(self, model: nn.Module) -> bool:
        """Let the twin train and recompute as ``model`` does now; False where it is no longer its like."""
        modules, twins = dict(model.named_modules()), dict(self._twin.named_modules())
        parameters, twin_parameters = list(model.parameters()), list(self._twin.parameters())
        if list(modules) != list(twins) or len(parameters) != len(twin_parameters):
            return False
        if any("forward" in vars(module) for module in modules.values()):  # somebody's own
            return False
        for module, twin in zip(modules.values(), twins.values(), strict=True):
            twin.training = module.training
            for name in _RECOMPUTING:
                vars(twin).pop(name, None)
                vars(twin).update({name: vars(module)[name]} if name in vars(module) else {})
        for parameter, twin in zip(parameters, twin_parameters, strict=True):
            twin.requires_grad_(parameter.requires_grad)
        if is_accelerated(model) and not is_accelerated(self._twin):
            accelerate_causal_lm(self._twin, loss="training" if has_fused_loss(model) else False)
        return True

    def _needed(self, engine: Any, model: nn.Module, size: int, length: int, with_loss: bool) -> tuple[int, int]:
        """Bytes of the GPU that the model itself takes, and what a step adds."""
        vocab_size = next((each.num_embeddings for each in model.modules() if isinstance(each, nn.Embedding)), 2)
        autocast = torch.get_autocast_dtype("cuda") if torch.is_autocast_enabled("cuda") else None
        loss = partial(_loss, with_loss=with_loss)
        make_batch = language_batch(vocab_size, size, length)
        with torch.random.fork_rng(devices=[]):
            trace = trace_training(self._twin, make_batch, loss, None, autocast=autocast, steps=1, **self._gpu)
        if isinstance(engine, Resident):
            held = sum(row[0] for row in engine.storage.plan.bytes_by_level().values())
            width = min((each.element_size() for each in self._twin.parameters() if each.requires_grad), default=4)
            return held, peak_with_gradients(trace, 4 / min(4, width))
        inputs = 0
        if engine.activations is not None and any(getattr(each, _RECOMPUTING[0], False) for each in model.modules()):
            inputs = checkpoint_bytes(self._twin, size * length)
        held = min(level0_bytes(engine.step_control.found), engine.stack.levels[0].capacity_bytes)
        return held, step_bytes(trace, engine.groups, inputs, self._cap)

    def _refusal(self, engine: Any, model: nn.Module, size: int, length: int, with_loss: bool) -> InsufficientMemory:
        def is_too_large(fewer: int) -> bool:
            return sum(self._needed(engine, model, fewer, length, with_loss)) > self._cap

        held, step = self._needed(engine, model, size, length, with_loss)
        most = bisect.bisect_left(range(1, size), True, key=is_too_large)
        remedies = [f"give at most {most} at a time" if most else "shorten them, since one is too long"]
        if not any(getattr(each, _RECOMPUTING[0], False) for each in model.modules()):
            remedies.append("recompute layers in backward (gradient checkpointing)")
        remedies.append("raise fast_memory")
        return InsufficientMemory(
            f"{size} sequences of {length} tokens are too many: a step of them takes about {format_bytes(held + step)} "
            f"of the GPU ({format_bytes(step)} for activations, logits and workspace, {format_bytes(held)} for weights "
            f"and states), and fast_memory caps this process at {format_bytes(self._cap)}: {', or '.join(remedies)}",
            needed_bytes=held + step,
            available_bytes=self._cap,
        )


def _twin_of(model: nn.Module) -> nn.Module:
    """On meta, without anybody's hooks, and on the operators that the model came with."""
    twin: nn.Module = copy_on_meta(model)
    for module in twin.modules():
        object.__setattr__(module, "__class__", plain_class(module))
        for name, value in vars(module).items():
            if "_hooks" in name and isinstance(value, dict):
                vars(module)[name] = OrderedDict()
    if "_loss_function" in vars(twin):  # a fused one has its original for a copy
        vars(twin)["_loss_function"] = copy.copy(vars(twin)["_loss_function"])
    return twin


def _loss(model: nn.Module, batch: Any, *, with_loss: bool) -> Tensor:
    """The model's own; or without one the least that somebody else's takes, the gradient of the logits."""
    if isinstance(model, Decoder):
        return model(*batch.values()) if with_loss else model(batch["input_ids"]).sum()
    if with_loss:
        return model(**batch, use_cache=False).loss
    return model(input_ids=batch["input_ids"], use_cache=False).logits.sum()
