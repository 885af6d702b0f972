"""The loss of a Hugging Face causal model computed in its head's call, chunk by chunk, by hooks alone.

Where ``labels`` are given, the head is called with its hidden states *and targets* (`HiddenWithTargets`) and answers
with the loss; the model hands that "logits" on to its ``loss_function``, which is ours and takes it; the output has
``logits=None``. Everything else in the model's forward runs as written, such as the routers' auxiliary loss of a
mixture of experts. Shift, ``ignore_index``, ``shift_labels`` and ``num_items_in_batch`` mean what they mean in
transformers.

Whether the forward really passes logits untouched from head to loss is tried first, on a twin of the model with a tiny
head and no trunk: models that scale or cap their logits in between are left alone.
"""

from __future__ import annotations

import inspect
import threading
from typing import Any

import torch
from torch import Tensor, nn
from torch.nn import functional

from vblackwell.errors import Unsupported
from vblackwell.nn.convert.fused_modules import reason_of, twin_of
from vblackwell.nn.decoder.head_loss import HiddenWithTargets, takes_targets

IGNORED = -100


class LossInPlaceOfLogits:
    """What the head gives instead of logits. A caller that computes with it is told that there are none."""

    def __init__(self, loss: Tensor) -> None:
        self.loss = loss

    @classmethod
    def __torch_function__(cls, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        raise Unsupported(_NO_LOGITS.format(getattr(func, "__name__", func)))

    def __getattr__(self, name: str) -> Any:
        if name.startswith("__"):
            raise AttributeError(name)
        raise Unsupported(_NO_LOGITS.format(name))

    def _refuse(self, *args: Any) -> Any:
        raise Unsupported(_NO_LOGITS.format("arithmetic"))

    __add__ = __radd__ = __sub__ = __rsub__ = __mul__ = __rmul__ = __truediv__ = __matmul__ = __neg__ = _refuse
    __getitem__ = __iter__ = __len__ = __float__ = _refuse


_NO_LOGITS = (
    "{} on the logits of a model whose loss is computed in chunks: with labels there are none. Call it without labels, or "
    "accelerate_causal_lm(model, loss=False)"
)


class FusedLoss:
    """The hooks on one model, and its loss function. Copies of the model carry inert ones.

    Args:
        model: for which `why_not` found no reason.
        chunk_tokens: as for `linear_cross_entropy`.
    """

    def __init__(self, model: Any, chunk_tokens: int | None) -> None:
        self._original = model.loss_function
        self._had_own = "_loss_function" in model.__dict__
        self._signature = inspect.signature(type(model).forward)
        self._chunk_tokens = chunk_tokens
        self._asked = threading.local()
        head = model.get_output_embeddings()
        self._handles = [
            model.register_forward_pre_hook(_Hook(self._begin), with_kwargs=True),
            model.register_forward_hook(_Hook(self._end), with_kwargs=False, always_call=False),
            head.register_forward_pre_hook(_Hook(self._enter_head)),
            head.register_forward_hook(_Hook(self._leave_head)),
        ]
        model.loss_function = self

    def remove(self, model: Any) -> None:
        """The model as it was."""
        for handle in self._handles:
            handle.remove()
        if self._had_own:
            model.loss_function = self._original
        else:
            model.__dict__.pop("_loss_function", None)

    def __call__(self, logits: Any, *args: Any, **kwargs: Any) -> Tensor:
        """In the place of the model's loss function."""
        return logits.loss if isinstance(logits, LossInPlaceOfLogits) else self._original(logits, *args, **kwargs)

    def __deepcopy__(self, memo: dict[int, Any]) -> Any:
        return self._original

    def __reduce__(self) -> Any:
        return _itself, (self._original,)

    # -- hooks ---------------------------------------------------------------------------------------------------------

    def _begin(self, model: nn.Module, args: tuple[Any, ...], kwargs: dict[str, Any]) -> None:
        bound = self._signature.bind_partial(model, *args, **kwargs)
        given = {**bound.arguments, **bound.arguments.get("kwargs", {})}
        labels, kept = given.get("labels"), given.get("logits_to_keep", 0)
        self._asked.options = None
        if labels is not None and isinstance(kept, int) and kept == 0:
            self._asked.options = {
                "labels": labels,
                "shifted": given.get("shift_labels"),
                "count": given.get("num_items_in_batch"),
                "ignore_index": given.get("ignore_index", IGNORED),
            }

    def _enter_head(self, head: nn.Module, args: tuple[Any, ...]) -> Any:
        options = getattr(self._asked, "options", None)
        if options is None or not takes_targets(head):
            return None
        hidden, targets, ignored = args[0], options["shifted"], options["ignore_index"]
        if targets is None:
            targets = functional.pad(options["labels"], (0, 1), value=ignored)[..., 1:]
        reduction = "mean" if options["count"] is None else "sum"
        fused = HiddenWithTargets(
            hidden,
            targets.to(hidden.device),
            ignore_index=ignored,
            reduction=reduction,
            chunk_tokens=self._chunk_tokens,
        )
        return (fused,)

    def _leave_head(self, head: nn.Module, args: tuple[Any, ...], output: Any) -> Any:
        if not (args and isinstance(args[0], HiddenWithTargets)):
            return None
        count = self._asked.options["count"]
        if count is not None:
            output = output / (count.to(output.device) if isinstance(count, Tensor) else count)
        return LossInPlaceOfLogits(output)

    def _end(self, model: nn.Module, args: tuple[Any, ...], output: Any) -> Any:
        self._asked.options = None
        if isinstance(output, dict):
            if any(isinstance(value, LossInPlaceOfLogits) for value in output.values()):
                kept = {name: value for name, value in output.items() if not isinstance(value, LossInPlaceOfLogits)}
                return type(output)(**kept)
            return None
        if isinstance(output, tuple):
            return tuple(value for value in output if not isinstance(value, LossInPlaceOfLogits))
        return None


class _Hook:
    """A module hook that a copy of the module does not carry."""

    def __init__(self, call: Any) -> None:
        self._call = call

    def __call__(self, *args: Any) -> Any:
        return None if self._call is None else self._call(*args)

    def __deepcopy__(self, memo: dict[int, Any]) -> _Hook:
        return _Hook(None)

    def __reduce__(self) -> Any:
        return _Hook, (None,)


def _itself(value: Any) -> Any:
    return value


_CHANGED = "its forward changes the logits between head and loss (a scale or a cap)"

# -- whether it can be done --------------------------------------------------------------------------------------------


class _Trunk(nn.Module):
    """A trunk's place in a model: whatever it is called with, it answers with the same hidden states and nothing else."""

    def __init__(self, hidden: Tensor) -> None:
        super().__init__()
        self.hidden = hidden

    def forward(self, *args: Any, **kwargs: Any) -> Any:
        return _Output(self.hidden)


class _Untouched(nn.Module):
    """A head's place: what the fused head answers with."""

    def forward(self, hidden: Tensor) -> LossInPlaceOfLogits:
        return LossInPlaceOfLogits(hidden.new_zeros(()))


class _Output:
    """Hidden states as a model's output: attributes that nobody set are None."""

    def __init__(self, hidden: Tensor) -> None:
        self.last_hidden_state = hidden

    def __getitem__(self, index: Any) -> Any:
        return (self.last_hidden_state,)[index]

    def __getattr__(self, name: str) -> None:
        if name.startswith("__"):
            raise AttributeError(name)


def why_not(model: Any) -> str | None:
    """Why the loss of ``model`` cannot be computed in its head; None if it can."""
    for name in ("get_output_embeddings", "loss_function", "base_model_prefix"):
        if not hasattr(model, name):
            return f"{type(model).__name__} has no {name}: it is no causal model of transformers"
    head = model.get_output_embeddings()
    head_name = next((name for name, child in model._modules.items() if child is head), None)
    if not isinstance(head, nn.Linear) or not takes_targets(head) or head_name is None:
        return f"its head is {type(head).__name__}, not a linear layer of its own"
    loss = getattr(model.loss_function, "__name__", type(model.loss_function).__name__)
    if loss != "ForCausalLMLoss":
        return f"its loss is {loss}, not ForCausalLMLoss"
    trunk_name = model.base_model_prefix
    if not isinstance(model._modules.get(trunk_name), nn.Module):
        return f"it has no trunk named {trunk_name!r}"
    return _why_logits_change(model, head_name, trunk_name)


def _parameters_of(model: nn.Module) -> set[str]:
    return set(inspect.signature(type(model).forward).parameters)


def _why_logits_change(model: Any, head_name: str, trunk_name: str) -> str | None:
    width, words = model.get_output_embeddings().in_features, 7
    small = nn.Linear(width, words, bias=False)
    with torch.no_grad():
        small.weight.normal_(0.0, 30.0 / width**0.5, generator=torch.Generator().manual_seed(0))
    hidden = torch.randn(1, 3, width, generator=torch.Generator().manual_seed(1))
    seen: list[Tensor] = []

    def record(logits: Tensor, *args: Any, **kwargs: Any) -> Tensor:
        seen.append(logits)
        return logits.sum()

    twin = twin_of(model, _modules={**model._modules, head_name: small, trunk_name: _Trunk(hidden)})
    twin.__dict__["_loss_function"] = record
    tokens = torch.zeros(1, 3, dtype=torch.long)
    # A trunk without routers: the auxiliary loss that is made of their logits is added to the loss, and no part of
    # this.
    options = {"output_router_logits": False} if "output_router_logits" in _parameters_of(model) else {}
    try:
        with torch.no_grad():
            type(model).forward(twin, input_ids=tokens, labels=tokens, **options)
    except Exception as error:  # whatever a foreign forward raises is a reason to leave it alone
        return reason_of(error)
    if len(seen) != 1:
        return "its forward does not call loss_function once"
    expected = small(hidden)
    if seen[0].shape != expected.shape or not torch.allclose(seen[0].float(), expected, rtol=1e-5, atol=1e-5):
        return _CHANGED
    # A scale of 1 changes nothing and would still be computed: the loss that stands in the logits' place must pass
    # untouched.
    twin._modules[head_name] = _Untouched()
    twin.__dict__["_loss_function"] = lambda *args, **kwargs: hidden.new_zeros(())
    try:
        with torch.no_grad():
            type(model).forward(twin, input_ids=tokens, labels=tokens, **options)
    except Unsupported:
        return _CHANGED
    except Exception as error:  # a comparison or a power, which the stand-in does not know
        return reason_of(error)
    return None
