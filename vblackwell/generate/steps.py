"""How a model reads tokens: in chunks, as one CUDA graph, or by its own state; and a text's share of level 0 meanwhile.

A resident decoder's step is one graph, for a token's kernels take less than the host needs to launch them; a number on
the device that each replay raises is the position (`SteadyCache`). Models of transformers that take no
``past_key_values`` are read as its ``generate`` reads them. Legend: B rows, S positions, V vocabulary.
"""

import inspect
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from dataclasses import dataclass, field
from functools import partial
from typing import Any

import torch
from torch import Tensor, nn

from vblackwell.errors import ConfigurationError
from vblackwell.kernels.runtime.capture import Captured, capturing
from vblackwell.nn.decoder.block import KVCache, SteadyCache
from vblackwell.nn.decoder.config import DecoderConfig
from vblackwell.nn.decoder.decoder import Decoder
from vblackwell.nn.linear.one_input import lay_packed_together, lay_together
from vblackwell.nn.linear.stored_fp4 import StoredFP4Linear
from vblackwell.offload.api import offload_of
from vblackwell.offload.engine import Offload
from vblackwell.offload.layout.generation import cache_shape, divide_level0, token_bytes, workspace_bytes
from vblackwell.offload.layout.groups import Group

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
    """Reads more tokens (1, S) a call and returns the logits (1, V) after the last; a model that keeps nothing (GPT-1,
    XLM) reads the whole text again. One row: RWKV mixes several up, and most of these look at no mask."""

    def __init__(self, model: Any) -> None:
        self._model, self._ids_1S = model, torch.empty(0)
        self._kept: dict[str, Any] = {"use_cache": True}
        self._remembers = False

    @torch.no_grad()
    def __call__(self, input_ids_1S: Tensor) -> Tensor:
        first = not self._ids_1S.numel()
        self._ids_1S = input_ids_1S if first else torch.cat((self._ids_1S, input_ids_1S), 1)
        new = input_ids_1S.shape[1] if self._remembers else None
        inputs = self._model.prepare_inputs_for_generation(
            self._ids_1S, next_sequence_length=new, is_first_iteration=first, **self._kept
        )
        output = self._model(**inputs, return_dict=True)
        self._kept = self._model._update_model_kwargs_for_generation(output, self._kept)
        self._remembers = any(output.get(name) is not None for name in _NAMES)
        return output.logits[:, -1]


MIN_STEPS = 8  # for which a graph is captured: that takes about as long as so many steps without it


def lay_out_for_decoding(model: Decoder) -> None:
    """Queries, keys and values of a layer, and gate and up, as one product each. The model is used without gradients
    from now on."""
    for layer in model.layers:
        attention, mlp = layer.self_attn, layer.mlp
        gate_up = (mlp.gate_proj, mlp.up_proj)  # type: ignore[union-attr]
        for linears in ((attention.q_proj, attention.k_proj, attention.v_proj), gate_up):  # type: ignore[union-attr]
            lay_together(*linears) or lay_packed_together(*linears)  # type: ignore[arg-type]


def may_capture(model: nn.Module) -> bool:
    """Whether ``model`` is a decoder whose parameters lie on a GPU and stay there."""
    return isinstance(model, Decoder) and all(
        param.is_cuda and "_vb_binding" not in param.__dict__ for param in model.parameters()
    )


@dataclass(eq=False)
class Stretch:
    """What runs in one launch: functions from the last one's output to the next; groups that must have arrived."""

    calls: list[Callable[[Any], Any]] = field(default_factory=list)
    passing: list[Group] = field(default_factory=list)
    graph: Captured[None] | None = None


class CapturedStep:
    """A step of a decoder of ``config`` after what ``cache`` holds, of B ``rows``, in stretches that are captured in
    CUDA graphs once; what follows goes through `step` alone. Without a GPU the stretches run as they are."""

    def __init__(self, config: DecoderConfig, cache: KVCache, rows: int) -> None:
        self._device = cache.tensors(0)[0].device
        self._left, self._max_length = cache.max_length - cache.length, cache.max_length
        self._steady = SteadyCache(cache, config)
        self._ids_B1 = torch.zeros((rows, 1), dtype=torch.int64, device=self._device)
        self._value: Any = self._ids_B1
        self._stretches: list[Stretch] = []

    def _run(self, stretch: Stretch) -> None:
        for call in stretch.calls:
            self._value = call(self._value)

    def _capture(self, *, empty_cache: bool = False) -> None:
        with capturing(self._device) as side:
            for stretch in self._stretches:  # what this stores is overwritten
                self._run(stretch)
            self._steady.restart()
            self._value = self._ids_B1
            side.synchronize()
            if empty_cache:
                torch.cuda.empty_cache()
            pool = torch.cuda.graph_pool_handle()
            for stretch in self._stretches:
                stretch.graph = Captured(partial(self._run, stretch), pool)

    @torch.no_grad()
    def step(self, input_ids_B1: Tensor) -> Tensor:
        """Logits (B, V) after one more token a row, on CUDA overwritten by the next call; raises ConfigurationError
        where the cache is full."""
        if not self._left:
            raise ConfigurationError(f"the cache's {self._max_length} positions are taken: ask for fewer tokens")
        self._left -= 1
        self._ids_B1.copy_(input_ids_B1)
        if not self._ids_B1.is_cuda:
            self._value = self._ids_B1
        for stretch in self._stretches:
            self._before(stretch)
            if stretch.graph is None:
                self._run(stretch)
            else:
                stretch.graph()
            self._after(stretch)
        return self._value

    def _before(self, stretch: Stretch) -> None: ...

    def _after(self, stretch: Stretch) -> None: ...


class DecodeGraph(CapturedStep):
    """The step of a resident ``model`` (see `may_capture`), in one graph."""

    @torch.no_grad()
    def __init__(self, model: Decoder, cache: KVCache, rows: int) -> None:
        super().__init__(model.config, cache, rows)
        steady = self._steady  # no circle: the graph goes with the text
        self._stretches = [Stretch([lambda ids_B1: model.next_logits(ids_B1, steady)])]
        self._capture(empty_cache=True)


def read_in_chunks(read: Callable[[int, int], Tensor], length: int, size: int, cache: Any = None) -> Tensor:
    """``read(begin, end)`` of ``length`` positions, at most ``size`` at a time, in pieces of about one length (a short
    rest would cost a pass over the weights): what the last one gave. What the GPU cannot hold is read again in halves,
    if ``cache`` (of ours) can forget it; else OutOfMemoryError goes on."""
    begin, found = 0, None
    size = -(-length // -(-length // size))
    while begin < length:
        end, found = min(length, begin + size), None
        try:
            found = read(begin, end)
        except torch.OutOfMemoryError:
            if size == 1 or not hasattr(cache, "rewind"):
                raise
        if found is not None:
            begin = end
            continue
        cache.rewind(begin)  # the error, and what its frames held, is gone
        torch.cuda.empty_cache()
        size = (end - begin + 1) // 2
    assert found is not None, "a prompt has a token"
    return found


@contextmanager
def level0_for(model: nn.Module, rows: int, positions: int) -> Iterator[tuple[Any, int | None]]:
    """Inside, level 0 is divided for a text of ``rows`` of at most ``positions``: the cache to write with, and
    positions that one pass may read; None each: transformers' own, and all. InsufficientMemory: so many rows do not
    fit."""
    engine = offload_of(model)
    cache, chunk = None, None
    if isinstance(engine, Offload) and engine.weights.frozen and engine.device.type == "cuda":
        dtype = next(param.dtype for param in model.parameters() if param.is_floating_point())
        shape = cache_shape(model.config, rows, positions, dtype)
        level = engine.stack.levels[0]
        workspace = workspace_bytes(level.capacity_bytes)
        free = level.capacity_bytes - (level.used_bytes - engine.weights.loaded_bytes) - workspace
        if shape is not None:
            from vblackwell.generate.stacked_cache import StackedCache

            if torch.cuda.memory_reserved(engine.device) - torch.cuda.memory_allocated(engine.device) > workspace // 2:
                torch.cuda.empty_cache()  # in pieces as large as another request's keys and values were
            sizes = [group.num_bytes for group in engine.groups if not engine.is_sliced(group)]
            packed = [each for each in model.modules() if isinstance(each, StoredFP4Linear)]
            # The largest packed linear's weight while many rows are multiplied by it.
            unpacked = max((each.in_features * each.out_features * each.dtype.itemsize for each in packed), default=0)
            budget = divide_level0(free, sizes, shape, token_bytes(model.config, dtype.itemsize), workspace, unpacked)
            engine.weights.rebudget(budget.weight_bytes)
            cache, chunk = StackedCache(engine.stack, shape, budget.cached_layers), budget.chunk
    try:
        yield cache, chunk
    finally:
        if cache is not None:
            cache.close()
