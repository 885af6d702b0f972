"""The steps of models of transformers that take no ``past_key_values``: state-space and recurrent ones, and some that
keep nothing.

What such a model keeps has a name and form of its own (Mamba's ``cache_params``, RWKV's ``state``, XLNet's ``mems``);
transformers knows how it goes from one call to the next: its generation methods are asked, as its ``generate`` asks
them. A model that keeps nothing (GPT-1, XLM) reads the whole text for each token.

Legend: S sequence, V vocabulary.
"""

from __future__ import annotations

import inspect
from typing import Any

import torch
from torch import Tensor

from vblackwell.errors import ConfigurationError

_NAMES = ("cache_params", "state", "mems", "past_key_values")  # of what is kept, in outputs
# Take past_key_values, and either give none back, because their modules keep what they read, or want more than that.
_ODD = ("cpmant", "recurrent_gemma")
_ALIBI = ("bloom", "mpt")  # their positions follow from the mask
# Filling is not hidden by a mask where keys are selected by an index, or compressed in fours, counted from the row's
# begin; and positions that we count from 0 are wrong where a model counts from its padding token's number on.
_COUNTING = ("axk2", "deepseek_v32", "deepseek_v4", "glm_moe_dsa", "hy_v4", "camembert", "data2vec-text", "roberta",
    "roberta-prelayernorm", "xlm-roberta", "xlm-roberta-xl")  # fmt: skip


def keeps_own_state(model: Any) -> bool:
    """Whether ``model``, one of transformers' or a decoder of ours, is read by `OwnState`."""
    if not hasattr(model, "prepare_inputs_for_generation"):
        return False
    takes = inspect.signature(type(model).forward).parameters
    return "past_key_values" not in takes or model.config.model_type in _ODD


def reads_masks(model: Any) -> bool:
    """Whether a mask hides the filling in front of a row, and positions can be given or follow from the mask."""
    kind, takes = model.config.model_type, inspect.signature(type(model).forward).parameters
    return ("position_ids" in takes or kind in _ALIBI) and kind not in _COUNTING


def check_one_pass(model: Any, prefill_chunk: int | None) -> None:
    """Raises ConfigurationError for a chunk of a prompt that `OwnState` reads in one pass."""
    if prefill_chunk is not None and keeps_own_state(model):
        raise ConfigurationError(
            f"prefill chunk {prefill_chunk}: {type(model).__name__} reads a prompt in one pass; leave it out"
        )


class OwnState:
    """Reads more tokens (1, S) a call and returns the logits (1, V) after the last.

    One row: RWKV mixes several up, and most of these models look at no mask.
    """

    def __init__(self, model: Any) -> None:
        self._model, self._ids_1S = model, torch.empty(0)
        self._kept: dict[str, Any] = {"use_cache": True}
        self._remembers = False

    @torch.no_grad()
    def __call__(self, input_ids_1S: Tensor) -> Tensor:
        first = not self._ids_1S.numel()
        self._ids_1S = input_ids_1S if first else torch.cat((self._ids_1S, input_ids_1S), 1)
        inputs = self._model.prepare_inputs_for_generation(
            self._ids_1S,
            next_sequence_length=input_ids_1S.shape[1] if self._remembers else None,
            is_first_iteration=first,
            **self._kept,
        )
        output = self._model(**inputs, return_dict=True)
        self._kept = self._model._update_model_kwargs_for_generation(output, self._kept)
        self._remembers = any(output.get(name) is not None for name in _NAMES)
        return output.logits[:, -1]
