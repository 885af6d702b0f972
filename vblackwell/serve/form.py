"""What a model's attention looks like, found by running a copy without weights: whether requests can share its passes.

Layers show themselves to an attention function that notes what they give it. A model whose rows mix in another way
(state spaces, convolutions, cross attention, masks of its own), or whose products the tiles of rows do not reach, is
refused with the reason. Legend: S queries, N query heads, K key heads, H head width.
"""

import copy
import inspect
import re
from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager
from contextvars import ContextVar
from dataclasses import dataclass
from functools import cache, partial
from typing import Any

import torch
from torch import Tensor, nn
from torch.nn import functional as F
from torch.overrides import TorchFunctionMode

from vblackwell.errors import Unsupported
from vblackwell.generate import steps
from vblackwell.generate.generate import position_limit
from vblackwell.nn.convert.fused_modules import plain_class
from vblackwell.serve.row_tiles import PRODUCTS

NAME = "vb_paged"  # of the attention, for transformers
# What layers may say of their attention: understood, or without a meaning where keys are in pages.
_UNDERSTOOD = {"dropout", "scaling", "sliding_window", "softcap", "is_causal", "position_ids", "cache_position",
    "use_cache", "output_attentions", "output_hidden_states", "return_dict", "output_router_logits", "past_key_values",
    "position_embeddings", "head_mask", "layer_idx", "num_items_in_batch", "logits_to_keep"}  # fmt: skip
_OTHER_PRODUCTS = (torch.bmm, Tensor.bmm, torch.baddbmm, torch.einsum, F.scaled_dot_product_attention,
    F.conv1d, F.conv2d, torch.addbmm, torch.cumsum, Tensor.cumsum)  # fmt: skip
_ROPES = ("dynamic", "longrope")  # their angles depend on the longest text of a pass
Attend = Callable[[Any, Tensor, Tensor, Tensor, Tensor | None, dict[str, Any]], Tensor]
_attend: ContextVar[Attend | None] = ContextVar("what attends in a pass", default=None)


@dataclass(frozen=True)
class LayerForm:
    """Keys of a layer: K heads of width H; values are no wider."""

    key_heads: int
    width: int


class _Odd(Exception):
    """Why requests cannot share a pass."""


def configs_of(model: nn.Module) -> list[Any]:
    """The configs of all modules of a model, each once: to be kept, for this takes as long as there are modules."""
    return [*{id(each.config): each.config for each in model.modules() if hasattr(each, "config")}.values()]


@cache
def _register() -> None:
    from transformers import AttentionInterface

    AttentionInterface.register(NAME, _call)


@contextmanager
def attending(configs: Sequence[Any], attend: Attend) -> Iterator[None]:
    """Inside, in this thread, the layers of a model with these configs (`configs_of`) attend by ``attend(module, q, k,
    v, mask, options)``, q (1, N, S, H), k and v (1, K, S, H), which gives (1, S, N, H); experts are called one by
    one."""
    _register()
    kept = [(each, each._attn_implementation, each._experts_implementation) for each in configs]
    token = _attend.set(attend)
    try:
        for config in configs:
            config._attn_implementation, config._experts_implementation = NAME, "eager"
        yield
    finally:
        _attend.reset(token)
        for config, attention, experts in kept:
            config._attn_implementation, config._experts_implementation = attention, experts


def _call(
    module: nn.Module, query: Tensor, key: Tensor, value: Tensor, attention_mask: Tensor | None, **options: Any
) -> tuple[Tensor, None]:
    attend = _attend.get()
    if attend is None:
        raise Unsupported("this model is in a pass of a serving engine: call it when the engine is closed")
    return attend(module, query, key, value, attention_mask, options), None


def layers_of(model: Any) -> tuple[tuple[LayerForm, ...], str, bool]:
    """The form of each layer's keys in the order of the calls, or nothing and the reason why requests cannot share
    passes of ``model``. Whether it multiplies rows otherwise than by torch's own linears and packed ones."""
    try:
        _check_kind(model)
        return _run_without_weights(model)
    except _Odd as odd:
        return (), str(odd), True


def _check_kind(model: Any) -> None:
    """Raises _Odd for what need not be run to be seen."""
    config, name = getattr(model, "config", None), type(model).__name__
    if not hasattr(model, "prepare_inputs_for_generation") or config is None:
        raise _Odd(f"{name} is not one of transformers' causal models")
    takes = inspect.signature(plain_class(model).forward).parameters
    if getattr(config, "is_encoder_decoder", False) or getattr(config, "add_cross_attention", False):
        raise _Odd(f"{name} attends to an encoder")
    if steps.keeps_own_state(model) or getattr(model, "_is_stateful", False):
        raise _Odd(f"{name} keeps a state that is not keys and values")
    for needed, what in (("position_ids", "positions"), ("logits_to_keep", "word on which logits are wanted")):
        if needed not in takes:
            raise _Odd(f"{name} takes no {what}")
    if not steps.reads_masks(model):
        raise _Odd(f"{name} counts positions by itself")
    text = config.get_text_config() if hasattr(config, "get_text_config") else config
    kinds = set(getattr(text, "layer_types", None) or ()) - {"full_attention", "sliding_attention"}
    if kinds:
        raise _Odd(f"{name} has layers of kind {', '.join(sorted(kinds))}")
    ropes = getattr(text, "rope_parameters", None) or getattr(text, "rope_scaling", None) or {}
    kinds = {str(each.get("rope_type")) for each in (ropes, *ropes.values()) if isinstance(each, dict)}
    if kinds & {*_ROPES}:
        raise _Odd(f"{name} turns positions by the length of the longest text ({', '.join(sorted(kinds & {*_ROPES}))})")


class _Products(TorchFunctionMode):
    """Notes functions that mix rows, or multiply them, other than linears do."""

    seen = False  # a product that is none of a linear's

    def __torch_function__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        rows = next((x for x in args if isinstance(x, Tensor)), None)
        inner = 0 if rows is None or not rows.dim() else rows.shape[-1]
        if func in _OTHER_PRODUCTS or (func in PRODUCTS and args[1].dim() > 2 and inner > 1):
            raise _Odd(f"its layers compute by {func.__name__}, other than as linears over rows")
        self.seen |= func in (F.linear, torch.addmm) or (func in PRODUCTS and args[1].dim() == 2)
        return func(*args, **(kwargs or {}))


@torch.no_grad()
def _run_without_weights(model: Any) -> tuple[tuple[LayerForm, ...], str, bool]:
    kind, found = plain_class(model), list[tuple[LayerForm, int | None]]()

    def attend(
        module: Any, query: Tensor, key: Tensor, value: Tensor, mask: Tensor | None, options: dict[str, Any]
    ) -> Tensor:
        unknown = [name for name, given in options.items() if name not in _UNDERSTOOD and given is not None]
        if mask is not None or unknown:
            raise _Odd(f"its attention wants {', '.join(unknown) or 'a mask of its own'}")
        if not getattr(module, "is_causal", True) or options.get("is_causal") is False:
            raise _Odd("its attention looks ahead")
        heads, _, width = key.shape[1:]
        if not (key.shape[:3] == value.shape[:3] == (1, heads, query.shape[2]) and value.shape[3] <= width):
            raise _Odd(f"its keys {tuple(key.shape)} and values {tuple(value.shape)} are not one of each a token")
        found.append((LayerForm(heads, width), options.get("sliding_window")))
        return query[..., : value.shape[3]].transpose(1, 2).contiguous()

    try:
        config = copy.deepcopy(model.config)
        config.pad_token_id = None  # some look whether it is in a prompt
        with torch.device("meta"):
            probe = kind(config).eval()
            experts = [_check_experts(module) for module in probe.modules()]
            for linear in probe.modules():
                if type(linear) is nn.Linear:
                    linear.__dict__["forward"] = partial(_without_product, linear.out_features)
            ids_1S = torch.zeros((1, 5), dtype=torch.int64)
            with attending(configs_of(probe), attend), _Products() as products:
                probe(ids_1S, position_ids=torch.arange(5)[None], use_cache=False)
    except _Odd:
        raise
    except Exception as error:  # foreign code: whatever it raises is the reason
        first = (str(error).splitlines() or [""])[0]
        raise _Odd(f"a run without weights ended in {type(error).__name__}: {first[:200]}") from error
    text = config.get_text_config()
    layers, kinds = text.num_hidden_layers, getattr(text, "layer_types", None)
    if len(found) != layers:
        raise _Odd(f"{len(found)} of its {layers} layers attend through transformers' attention interface")
    slides = [window is not None for _, window in found]
    window, limit = getattr(text, "sliding_window", None), position_limit(model)
    unsaid = kinds is None and not any(slides) and getattr(text, "use_sliding_window", True)
    if unsaid and window is not None and (limit is None or window < limit):
        raise _Odd(f"its layers do not say whether they look back no more than {window} tokens")
    if kinds is not None and slides != [each == "sliding_attention" for each in kinds]:
        raise _Odd("its layers do not say how far they look back")
    adapted = any(type(module).__module__.startswith("peft.") for module in model.modules())
    return tuple(form for form, _ in found), "", products.seen or any(experts) or adapted


def _without_product(out_features: int, x: Tensor) -> Tensor:
    return x.new_empty((*x.shape[:-1], out_features))


def _check_experts(module: Any) -> bool:
    """Whether it is experts: they choose rows by values, which a run without weights has not. The source says how they
    multiply."""
    kind = type(module)
    if isinstance(module, (nn.Conv1d, nn.Conv2d)):
        raise _Odd(f"it has a {kind.__name__}")
    if not hasattr(kind, "_apply_gate"):
        return False
    source = inspect.getsource(inspect.unwrap(kind.forward))
    if re.search(r"\b(bmm|matmul|einsum|baddbmm)\b|@", source):
        raise _Odd(f"the experts of {kind.__name__} compute other than as linears over rows")
    module.forward = lambda hidden, *rest, **named: torch.zeros_like(hidden)  # of the copy, which is thrown away
    return True
