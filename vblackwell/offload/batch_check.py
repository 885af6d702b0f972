"""Whether the step of a batch fits the cap of its process, asked before the forward that brings it.

A model in a stack meets a batch first in its forward. Then the step is traced without bytes, as for a plan, on a twin
of the model on meta: a tenth of a second, once for each batch that is larger than those before. What somebody watches
or changes (modes, hooks, a forward, loss or part of their own, arguments with which a step may take less) is not
traced, nor what cannot be: of those batches nothing is said.
"""

import bisect
import copy
import warnings
from collections import OrderedDict
from dataclasses import dataclass, replace
from functools import partial
from typing import Any

import torch
from torch import Tensor, nn
from torch.nn.modules import module as every_module

from vblackwell.errors import InsufficientMemory, Unsupported
from vblackwell.machine.device import process_cap
from vblackwell.nn.convert.causal_lm import accelerate_causal_lm, how_accelerated, is_causal_lm, restore_causal_lm
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
_KNOWN = "torch.nn.", "transformers.", "peft.", "vblackwell."
# With which a step takes no less than with tokens and labels alone.
_ARGUMENTS = {
    "input_ids", "labels", "attention_mask", "position_ids", "use_cache", "return_dict", "num_items_in_batch",
    "shift_labels", "ignore_index", "output_hidden_states", "output_attentions", "output_router_logits",
    "input_ids_BS", "targets_BS", "positions_BS", "starts",
}  # fmt: skip
_MASKS = {"attention_mask", "position_ids"}
_RECOMPUTING = "gradient_checkpointing", "_gradient_checkpointing_func"  # where transformers and our decoder say it


@dataclass(frozen=True)
class Batch:
    """``size`` sequences of ``length`` tokens; ``with_loss``: the model computes it. ``masked``: somebody says what
    each token may attend to."""

    size: int
    length: int
    with_loss: bool
    masked: bool

    def is_within(self, other: "Batch") -> bool:
        same = self.with_loss == other.with_loss and self.masked == other.masked
        return same and self.size <= other.size and self.length <= other.length


class BatchTooLarge(InsufficientMemory, torch.OutOfMemoryError):
    """Also torch's error, which it comes before: loops that try a smaller batch then wait for that."""


class BatchCheck:
    """Knows ``model`` as it was before it came into a stack on ``device``; ``compute_dtype`` as of
    `enable_vgpu_stack_optimization`."""

    def __init__(self, model: nn.Module, device: torch.device, compute_dtype: torch.dtype | None) -> None:
        self._device, self._gpu = device, dict[str, Any]()
        if device.type == "cuda":
            found = torch.cuda.get_device_properties(device)
            self._gpu = {"capability": (found.major, found.minor), "num_sms": found.multi_processor_count}
        self._twin = _twin_of(model)
        if compute_dtype is not None:
            self._twin.to(compute_dtype)
        self._fit: set[Batch] = set()

    @classmethod
    def of(cls, model: nn.Module, device: torch.device, compute_dtype: torch.dtype | None) -> "BatchCheck | None":
        """None where nothing caps the process, or the model is neither a `Decoder` nor one of transformers' own causal
        models, whose step is known, or cannot be copied."""
        known = isinstance(model, Decoder)
        known = known or (is_causal_lm(model) and type(model).__module__.startswith("transformers.models."))
        if process_cap(device) is None or not known or not _is_known(model):
            return None
        tensors = *model.parameters(), *model.buffers()
        if any(type(each) not in (Tensor, nn.Parameter) for each in tensors):  # what they hold may be real bytes
            return None
        try:
            return cls(model, device, compute_dtype)
        except Exception:  # somebody's attribute of a module, such as a lock, may refuse to be copied
            return None

    def watch(self, model: nn.Module, engine: Any) -> Any:
        """Refuse batches of ``model``, which ``engine`` holds now, until the handle that this returns is removed. Its
        forward raises BatchTooLarge then, and nothing has changed."""
        hook = BeforeForward(partial(self._before_forward, engine))
        return model.register_forward_pre_hook(hook, prepend=True, with_kwargs=True)

    def _before_forward(self, engine: Any, model: nn.Module, args: tuple[Any, ...], kwargs: dict[str, Any]) -> None:
        if not (model.training and torch.is_grad_enabled()) or torch._C._current_graph_task_id() != -1:
            return
        batch, cap = None if is_transformed() else _batch_of(model, args, kwargs), process_cap(self._device)
        if batch is None or cap is None or any(batch.is_within(each) for each in self._fit):
            return
        modes = torch._C._len_torch_dispatch_stack() + torch._C._len_torch_function_stack()
        seen = modes or torch.is_anomaly_enabled() or every_module._has_any_global_hook()
        if seen or top_hooks(True) is not None or not _is_known(model):
            return
        refusal = self._why_not(engine, model, batch, cap)
        if refusal is not None:
            raise refusal
        self._fit.add(batch)

    def _why_not(self, engine: Any, model: nn.Module, batch: Batch, cap: int) -> BatchTooLarge | None:
        """The refusal of ``batch``; None where it fits, or that cannot be known."""
        try:
            if not self._alike(model) or (batch.masked and self._is_less_with_mask()):
                return None
            held, step = self._needed(engine, model, batch, cap)
            too_large = int((held + step) * SURELY) > cap
            return self._refusal(engine, model, batch, cap, held, step) if too_large else None
        except Unsupported:  # it cannot be traced
            return None
        except Exception as error:  # of a check, which ends no training
            said = f"whether {batch.size} sequences of {batch.length} tokens fit the GPU's cap was not found out"
            warnings.warn(f"{said}: {type(error).__name__}: {error}", RuntimeWarning, stacklevel=2)
            return None

    def _alike(self, model: nn.Module) -> bool:
        """Let the twin train and recompute as ``model`` does now; False where it is no longer its like."""
        modules, twins = dict(model.named_modules()), dict(self._twin.named_modules())
        parameters, twin_parameters = list(model.parameters()), list(self._twin.parameters())
        if list(modules) != list(twins) or len(parameters) != len(twin_parameters):
            return False
        if not any(each.requires_grad for each in parameters):
            return False
        for module, twin in zip(modules.values(), twins.values(), strict=True):
            if not issubclass(plain_class(module), plain_class(twin)):
                return False
            twin.training = module.training
            for name in _RECOMPUTING:
                vars(twin).pop(name, None)
                vars(twin).update({name: vars(module)[name]} if name in vars(module) else {})
        for parameter, twin in zip(parameters, twin_parameters, strict=True):
            twin.requires_grad_(parameter.requires_grad)
        how = how_accelerated(model)
        if how != how_accelerated(self._twin):
            restore_causal_lm(self._twin)
            with torch.autocast("cpu", enabled=False):  # where it tries what it replaces
                _ = how is None or accelerate_causal_lm(self._twin, **how)
        return how == how_accelerated(self._twin)

    def _is_less_with_mask(self) -> bool:
        """In fp32 torch writes attention of grouped queries out, scores and all, but for that with a mask, for which
        transformers repeats keys and values."""
        grouped = any(getattr(each, "num_key_value_groups", 1) > 1 for each in self._twin.modules())
        in_fp32 = any(each.dtype == torch.float32 for each in self._twin.parameters())
        return grouped and in_fp32 and not torch.is_autocast_enabled("cuda")

    def _needed(self, engine: Any, model: nn.Module, batch: Batch, cap: int) -> tuple[int, int]:
        """Bytes of the GPU that the model itself takes, and what a step adds."""
        vocab_size = next((each.num_embeddings for each in model.modules() if isinstance(each, nn.Embedding)), 2)
        autocast = torch.get_autocast_dtype("cuda") if torch.is_autocast_enabled("cuda") else None
        loss = partial(_loss, with_loss=batch.with_loss)
        make_batch = language_batch(vocab_size, batch.size, batch.length)
        trace = trace_training(self._twin, make_batch, loss, None, autocast=autocast, steps=1, **self._gpu)
        if isinstance(engine, Resident):
            held = sum(row[0] for row in engine.storage.plan.bytes_by_level().values())
            width = min((each.element_size() for each in self._twin.parameters() if each.requires_grad), default=4)
            return held, peak_with_gradients(trace, 4 / min(4, width))
        inputs = 0
        if engine.activations is not None and any(getattr(each, _RECOMPUTING[0], False) for each in model.modules()):
            inputs = checkpoint_bytes(self._twin, batch.size * batch.length)
        held = min(level0_bytes(engine.step_control.found), engine.stack.levels[0].capacity_bytes)
        return held, step_bytes(trace, engine.groups, inputs, cap)

    def _refusal(self, engine: Any, model: nn.Module, batch: Batch, cap: int, held: int, step: int) -> BatchTooLarge:
        def is_too_large(fewer: int) -> bool:
            return sum(self._needed(engine, model, replace(batch, size=fewer), cap)) > cap

        most = bisect.bisect_left(range(1, batch.size), True, key=is_too_large)
        remedies = [f"give at most {most} at a time" if most else "shorten them, since one is too long"]
        if not any(getattr(each, _RECOMPUTING[0], False) for each in model.modules()):
            remedies.append("recompute layers in backward (gradient checkpointing)")
        remedies.append("raise fast_memory")
        return BatchTooLarge(
            f"{batch.size} sequences of {batch.length} tokens are too many and would run out of memory. A step takes "
            f"about {format_bytes(held + step)} of the GPU ({format_bytes(step)} for activations, logits and "
            f"workspace, {format_bytes(held)} for weights and states), and fast_memory caps this process at "
            f"{format_bytes(cap)}: {', or '.join(remedies)}",
            needed_bytes=held + step,
            available_bytes=cap,
        )


def _batch_of(model: nn.Module, args: tuple[Any, ...], kwargs: dict[str, Any]) -> Batch | None:
    """What a forward was given; None where a step may take less than it does with nothing but tokens and labels."""
    names = ("input_ids_BS", "targets_BS", "positions_BS", "starts") if isinstance(model, Decoder) else ("input_ids",)
    given = {
        name: each for name, each in {**dict(zip(names, args, strict=False)), **kwargs}.items() if each is not None
    }
    tokens = given.get("input_ids", given.get("input_ids_BS"))
    if len(args) > len(names) or not given.keys() <= _ARGUMENTS or not isinstance(tokens, Tensor):
        return None
    if tokens.dim() != 2 or not tokens.numel():
        return None
    size, length = tokens.shape
    with_loss, masked = (bool(given.keys() & names) for names in ({"labels", "targets_BS"}, _MASKS))
    return Batch(size, length, with_loss, masked)


def _is_known(model: nn.Module) -> bool:
    """Whether no code but torch's, transformers', peft's and ours runs in a forward of ``model``: a trace would call
    it, and what it does besides computing is its own."""
    for module in model.modules():
        hooks = *module._forward_pre_hooks.values(), *module._forward_hooks.values()
        if "forward" in vars(module) or not all(map(_is_of_known, (plain_class(module), plain_class(module).forward))):
            return False
        if not all(map(_is_of_known, hooks)):
            return False
    return _is_of_known(vars(model).get("_loss_function", _is_known))


def _is_of_known(code: Any) -> bool:
    return str(getattr(code, "__module__", "")).startswith(_KNOWN)


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
