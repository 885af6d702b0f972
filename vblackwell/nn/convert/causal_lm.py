"""Hugging Face causal language models, on the fused operators: norms, SwiGLU, rotary positions, and the loss.

No parameter and no name changes; on the CPU the model's bits stay, but for the loss. The loss is computed in the head's
call, chunk by chunk, by hooks alone: where ``labels`` are given, the head is called with its hidden states *and
targets* (`HiddenWithTargets`) and answers with the loss, which the model hands on to its ``loss_function``, ours.
Shift, ``ignore_index``, ``shift_labels`` and ``num_items_in_batch`` mean what they mean in transformers. Whether the
forward passes logits untouched from head to loss is tried first, on a twin of the model with a tiny head and no trunk.
"""

import inspect
import itertools
import operator
import re
import threading
import weakref
from collections import Counter
from collections.abc import Callable, Collection
from dataclasses import dataclass, field
from typing import Any

import torch
from torch import Tensor, nn
from torch.nn import functional

from vblackwell.errors import ConfigurationError, Unsupported
from vblackwell.nn.convert.alike import Answers
from vblackwell.nn.convert.fused_layers import fused_layer
from vblackwell.nn.convert.fused_modules import (
    Overrides,
    Stub,
    counted_positions,
    fused_adapter,
    fused_feed_forward,
    fused_gate,
    fused_gelu,
    fused_norm,
    fused_rotation,
    plain_class,
    reason_of,
    swap,
    twin_of,
)
from vblackwell.nn.decoder.decoder import IGNORED_TARGET, HiddenWithTargets, takes_targets
from vblackwell.nn.linear.fused_fp4 import FusedFP4Linear
from vblackwell.units import columns

KINDS: dict[str, Callable[[nn.Module], Overrides | str | None]] = {
    "norm": fused_norm,
    "feed_forward": fused_feed_forward,
    "activation": fused_gelu,
    "gate": fused_gate,
    "layer": fused_layer,
    "rotary": fused_rotation,
    "adapter": fused_adapter,
    "positions": counted_positions,
}
PROBED = ("norm", "feed_forward", "layer")  # by what takes time, and asks nothing but what `Answers` compare


@dataclass(frozen=True)
class Row:
    # linear, experts, attention, activation, norm, feed_forward, layer, gate (of experts), rotary, adapter, positions,
    # or loss
    kind: str
    name: str  # of the module; '' for the model
    became: str | None = None  # what computes it now; None if it was left
    reason: str = ""  # why it was left


@dataclass(eq=False)
class Conversion:
    """What `convert` or `accelerate_causal_lm` did to a model, a row for each candidate, and how to undo it."""

    model: nn.Module
    rows: list[Row] = field(default_factory=list)
    _undo: list[Callable[[], object]] = field(default_factory=list)

    @property
    def replaced(self) -> dict[str, list[str]]:
        found: dict[str, list[str]] = {}
        for row in self.rows:
            if row.became is not None:
                found.setdefault(row.kind, []).append(row.name)
        return found

    @property
    def left(self) -> dict[str, str]:
        """Reasons by name, 'loss' for the loss."""
        return {"loss" if row.kind == "loss" else row.name: row.reason for row in self.rows if row.became is None}

    def undo(self) -> nn.Module:
        """The model as it was, returned; packed weights come back rounded, everything else bit for bit. Idempotent.

        What was trained stays trained. ConfigurationError for packed weights in a stack, which would not know others.
        """
        names = self.replaced.get("linear", []) if self._undo else []
        made = [self.model.get_submodule(name) for name in names]
        if any(isinstance(layer, FusedFP4Linear) and layer.is_quantized for layer in made) and in_stack(self.model):
            raise ConfigurationError(f"{type(self.model).__name__} is in a stack: release(model) before weights unpack")
        while self._undo:
            self._undo.pop()()
        return self.model

    def summary(self) -> str:
        said = [f"{kind}: {len(names)} fused" for kind, names in self.replaced.items()]
        said += [f"left {count}: {reason}" for reason, count in Counter(self.left.values()).items()]
        return ", ".join(said) or "nothing in this model has a fused form"

    def __str__(self) -> str:
        """A table: layers that differ in their number alone are one line."""
        rows = ((row.kind, re.sub(r"\d+", "*", row.name), row.became, row.reason) for row in self.rows)
        cells = [
            (kind, (name or "the model") + (f" x{count}" if count > 1 else ""), became or f"left: {reason}")
            for (kind, name, became, reason), count in Counter(rows).items()
        ]
        return "\n".join(columns(cells))


def in_stack(model: nn.Module) -> bool:
    return any("_vb_binding" in param.__dict__ or "_vb_resident" in param.__dict__ for param in model.parameters())


# By model what was swapped, and its loss: weakly, as a streamed model's engine, which parameters know, knows the model.
_done: "weakref.WeakKeyDictionary[nn.Module, tuple[list[weakref.ref[nn.Module]], weakref.ref[_FusedLoss] | None]]"
_done = weakref.WeakKeyDictionary()


def accelerate_causal_lm(
    model: nn.Module,
    *,
    modules: bool | Collection[str] = True,
    loss: bool | str = True,
    chunk_tokens: int | None = None,
) -> Conversion:
    """Make ``model`` run with fused operators, in place; copies and pickles of it are plain.

    Args:
        modules: replace norms, feed-forwards, GELU that is spelled out, gates of experts, rotary positions and adapters
            over FP4, and let layers that transformers checkpoints compute their feed-forward in chunks of tokens; those
            that are Llama's but for biases and attention's mask, with ``sdpa`` and no dropout, are one operation in
            place of the checkpoint, and in a stream so are others that draw no numbers, have no experts and get enough
            tokens for their weights: with gradients that cannot be differentiated once more. Or only of some kinds, as
            the conversion's rows call them.
        loss: of transformers' causal models: where ``labels`` are given, compute the loss in chunks of tokens; the
            output's ``logits`` are then None. A step whose labels are all ignored has loss 0, not NaN. ``'training'``:
            only of a model in training; evaluation keeps logits, and computing with a training output's raises.
        chunk_tokens: tokens whose logits exist at a time; by default what 256 MiB hold.

    Raises ConfigurationError where the model is accelerated already, or a kind is unknown.
    """
    wanted = [*KINDS] if modules is True else list(modules or ())
    if unknown := [kind for kind in wanted if kind not in KINDS]:
        raise ConfigurationError(f"modules {unknown[0]!r}: choose of {', '.join(KINDS)}")
    if model in _done:
        raise ConfigurationError(f"{type(model).__name__} is accelerated already: restore_causal_lm(model) first")
    done, fused = Conversion(model, _undo=[lambda: restore_causal_lm(model)]), None
    swapped: list[nn.Module] = []
    answers = Answers()
    with torch.random.fork_rng(devices=[]):  # probes draw numbers
        for (name, module), kind in itertools.product(model.named_modules(), wanted):
            find = KINDS[kind]
            found = answers.of(find, module) if kind in PROBED else find(module)
            if isinstance(found, str):
                done.rows.append(Row(kind, name, None, f"{kind} ({type(module).__name__}): {found}"))
            elif found is not None:
                swap(module, found)
                swapped.append(module)
                done.rows.append(Row(kind, name, "fused"))
        if loss:
            head_name, reason = "", _why_not_loss(model)
            if reason is None:
                fused = _FusedLoss(model, chunk_tokens, only_training=loss == "training")
                head_name = next(name for name, each in model.named_modules() if each is fused.head)
            done.rows.append(Row("loss", head_name, None if reason else "fused", reason or ""))
    _done[model] = (list(map(weakref.ref, swapped)), None if fused is None else weakref.ref(fused))
    return done


def is_causal_lm(model: Any) -> bool:
    """Whether it is a causal language model of transformers."""
    config = getattr(model, "config", None)
    writes = callable(getattr(model, "can_generate", None)) and model.can_generate()
    return writes and not getattr(config, "is_encoder_decoder", True)


def is_accelerated(model: nn.Module) -> bool:
    """Whether `accelerate_causal_lm` was called for this very model; a copy of it is plain."""
    return model in _done


def has_fused_loss(model: nn.Module) -> bool:
    """Whether this model, called with ``labels``, computes their loss in chunks and gives no logits."""
    return model in _done and _done[model][1] is not None


def how_accelerated(model: nn.Module) -> dict[str, Any] | None:
    """How `accelerate_causal_lm` was told to compute this very model's loss: its arguments; None where it was not
    called."""
    fused = _done[model][1] if model in _done else None
    loss = None if fused is None else fused()
    if loss is None:
        return {"loss": False} if model in _done else None
    return {"loss": "training" if loss._only_training else True, "chunk_tokens": loss._chunk_tokens}


def restore_causal_lm(model: nn.Module) -> nn.Module:
    """Undo `accelerate_causal_lm`, if it was called; returns the model."""
    swapped, loss = _done.pop(model, ([], None))
    for module in filter(None, (found() for found in swapped)):
        object.__setattr__(module, "__class__", plain_class(module))
    fused = None if loss is None else loss()
    if fused is not None:
        fused.remove(model)
    return model


class _NoLogitsError(Unsupported, AttributeError):
    """Also an AttributeError: libraries that look at outputs ask whether they have a dtype."""


class NoLogits:
    """What an output has instead of logits; whatever computes with it raises. ``loss`` is what the head gives the
    model's forward in their place, which hands it to the loss function.
    """

    def __init__(self, loss: Tensor | None = None) -> None:
        self.loss = loss

    @classmethod
    def __torch_function__(cls, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        raise Unsupported(_NO_LOGITS.format(getattr(func, "__name__", func)))

    def __getattr__(self, name: str) -> Any:
        raise AttributeError(name) if name.startswith("__") else _NoLogitsError(_NO_LOGITS.format(name))

    def _refuse(self, *args: Any) -> Any:
        raise Unsupported(_NO_LOGITS.format("arithmetic"))

    __add__ = __radd__ = __sub__ = __rsub__ = __mul__ = __rmul__ = __truediv__ = __matmul__ = __neg__ = _refuse
    __lt__ = __gt__ = __le__ = __ge__ = __getitem__ = __iter__ = __len__ = __float__ = _refuse


_NO_LOGITS = (
    "{} on logits: a loss in chunks has none; leave labels out, or accelerate_causal_lm(model, loss=False), or "
    "enable_vgpu_stack_optimization(..., accelerate=False)"
)


class _FusedLoss:
    """The hooks on one model, and its loss function. Copies of the model carry inert ones."""

    def __init__(self, model: Any, chunk_tokens: int | None, *, only_training: bool) -> None:
        self._only_training = only_training
        self._original = model.loss_function
        self._had_own = "_loss_function" in model.__dict__
        self._signature = inspect.signature(type(model).forward)
        self._chunk_tokens = chunk_tokens
        self._asked = threading.local()
        self.head = head = model.get_output_embeddings()
        self._handles = [
            model.register_forward_pre_hook(_Hook(self._begin), with_kwargs=True),
            model.register_forward_hook(_Hook(self._end)),
            head.register_forward_pre_hook(_Hook(self._enter_head)),
            head.register_forward_hook(_Hook(self._leave_head)),
        ]
        model.loss_function = self

    def remove(self, model: Any) -> None:
        for handle in self._handles:
            handle.remove()
        if self._had_own:
            model.loss_function = self._original
        else:
            model.__dict__.pop("_loss_function", None)

    def __call__(self, logits: Any, *args: Any, **kwargs: Any) -> Tensor:
        loss = logits.loss if isinstance(logits, NoLogits) else None
        return self._original(logits, *args, **kwargs) if loss is None else loss

    def __reduce__(self) -> Any:
        return operator.itemgetter(0), ((self._original,),)

    def _begin(self, model: nn.Module, args: tuple[Any, ...], kwargs: dict[str, Any]) -> None:
        bound = self._signature.bind_partial(model, *args, **kwargs)
        given = {**bound.arguments, **bound.arguments.get("kwargs", {})}
        labels, kept = given.get("labels"), given.get("logits_to_keep", 0)
        self._asked.options = None
        if labels is not None and isinstance(kept, int) and kept == 0 and (model.training or not self._only_training):
            count, ignored = given.get("num_items_in_batch"), given.get("ignore_index", IGNORED_TARGET)
            self._asked.options = (labels, given.get("shift_labels"), count, ignored)

    def _enter_head(self, head: nn.Module, args: tuple[Any, ...]) -> Any:
        options = getattr(self._asked, "options", None)
        if options is None or not takes_targets(head):
            return None
        hidden, (labels, targets, count, ignored) = args[0], options
        if targets is None:
            targets = functional.pad(labels, (0, 1), value=ignored)[..., 1:]
        how = {"ignore_index": ignored, "chunk_tokens": self._chunk_tokens}
        reduction = "mean" if count is None else "sum"
        return (HiddenWithTargets(hidden, targets.to(hidden.device), reduction=reduction, **how),)

    def _leave_head(self, head: nn.Module, args: tuple[Any, ...], output: Any) -> Any:
        if not (args and isinstance(args[0], HiddenWithTargets)):
            return None
        if (count := self._asked.options[2]) is not None:
            output = output / (count.to(output.device) if isinstance(count, Tensor) else count)
        return NoLogits(output)

    def _end(self, model: nn.Module, args: tuple[Any, ...], output: Any) -> Any:
        self._asked.options = None
        named: dict[Any, Any] = dict(output.items() if isinstance(output, dict) else enumerate(output))
        if not any(isinstance(each, NoLogits) for each in named.values()):
            return None
        if self._only_training:
            shown = {name: NoLogits() if isinstance(each, NoLogits) else each for name, each in named.items()}
        else:
            shown = {name: each for name, each in named.items() if not isinstance(each, NoLogits)}
        return type(output)(**shown) if isinstance(output, dict) else tuple(shown.values())


class _Hook:
    """A module hook that a copy of the module does not carry."""

    def __init__(self, call: Any) -> None:
        self._call = call

    def __call__(self, *args: Any) -> Any:
        return None if self._call is None else self._call(*args)

    def __reduce__(self) -> Any:
        return _Hook, (None,)


_CHANGED = "its forward changes the logits between head and loss (a scale or a cap)"


class _Output(tuple):  # of a trunk: hidden states, and None for every other attribute
    last_hidden_state = property(operator.itemgetter(0))

    def __getattr__(self, name: str) -> None:
        if name.startswith("__"):
            raise AttributeError(name)


def _why_not_loss(model: Any) -> str | None:
    for name in ("get_output_embeddings", "loss_function", "base_model_prefix"):
        if not hasattr(model, name):
            return f"{type(model).__name__} has no {name}: it is no causal model of transformers"
    head = model.get_output_embeddings()
    head_name = next((name for name, child in model._modules.items() if child is head), None)
    if not takes_targets(head) or head_name is None:
        return f"its head is {type(head).__name__}, not a separate linear layer"
    loss = getattr(model.loss_function, "__name__", type(model.loss_function).__name__)
    if loss != "ForCausalLMLoss":
        return f"its loss is {loss}, not ForCausalLMLoss"
    trunk_name = model.base_model_prefix
    if not isinstance(model._modules.get(trunk_name), nn.Module):
        return f"it has no trunk named {trunk_name!r}"
    width, seen = head.in_features, list[Tensor]()
    small = nn.Linear(width, 7, bias=False)
    with torch.no_grad():
        small.weight.normal_(0.0, 30.0 / width**0.5, generator=torch.Generator().manual_seed(0))
    hidden = torch.randn(1, 3, width, generator=torch.Generator().manual_seed(1))

    def record(logits: Tensor, *args: Any, **kwargs: Any) -> Tensor:
        seen.append(logits)
        return logits.sum()

    tokens = torch.zeros(1, 3, dtype=torch.long)
    given: dict[str, Any] = {"input_ids": tokens, "labels": tokens}
    if "output_router_logits" in inspect.signature(type(model).forward).parameters:
        given["output_router_logits"] = False  # the trunk has no routers: the loss of their logits is no part of this

    def why_not(head: nn.Module, loss: Callable[..., Tensor]) -> str | None:
        stubs = {head_name: head, trunk_name: Stub(lambda _: _Output((hidden,)))}
        twin = twin_of(model, _modules={**model._modules, **stubs})
        twin.__dict__["_loss_function"] = loss
        try:
            with torch.no_grad():
                type(model).forward(twin, **given)
        except Unsupported:
            return _CHANGED
        except Exception as error:  # whatever a foreign forward raises is a reason to leave it alone
            return reason_of(error)
        return None

    if reason := why_not(small, record):
        return reason
    if len(seen) != 1:
        return "its forward does not call loss_function once"
    expected = small(hidden)
    if seen[0].shape != expected.shape or not torch.allclose(seen[0].float(), expected, rtol=1e-5, atol=1e-5):
        return _CHANGED
    # A scale of 1 changes nothing and would still be computed: the loss in the logits' place must pass untouched.
    zero = hidden.new_zeros(())
    return why_not(Stub(lambda _: NoLogits(zero)), lambda *args, **kwargs: zero)
