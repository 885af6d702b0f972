"""The step of a resident decoder as one CUDA graph: one launch for a token instead of some four hundred.

A decoded token's kernels take a few microseconds each, less than the host needs to launch them. The graph is captured
once, after the prompt: the position is a number on the device that each replay raises (`SteadyCache`), so one graph
serves every length up to the cache's.

Legend: B rows, V vocabulary.
"""

from __future__ import annotations

import threading
from functools import cache

import torch
from torch import Tensor, nn

from vblackwell.errors import ConfigurationError
from vblackwell.nn.decoder.block import KVCache, SteadyCache
from vblackwell.nn.decoder.decoder import Decoder
from vblackwell.nn.linear.one_input import lay_packed_together, lay_together

MIN_STEPS = 8  # for which a graph is captured: that takes about as long as so many steps without it


def lay_out_for_decoding(model: Decoder) -> None:
    """Queries, keys and values of a layer, and gate and up, as one product each. The model is used without gradients
    from now on.
    """
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


ONE_CAPTURES = threading.Lock()  # what another thread launched on the same stream meanwhile would be captured with it


@cache
def capturing(index: int) -> torch.cuda.Stream:
    """The stream of GPU ``index`` on which steps are tried and captured: one, because torch's allocator keeps a pool
    for each it sees.
    """
    return torch.cuda.Stream(index)


class DecodeGraph:
    """A captured step after what ``cache`` holds.

    Args:
        model: see `may_capture`.
        cache: a prompt was read into it; what follows goes through `step` alone.
        rows: B.
    """

    @torch.no_grad()
    def __init__(self, model: Decoder, cache: KVCache, rows: int) -> None:
        device = cache.tensors(0)[0].device
        self._left, self._max_length = cache.max_length - cache.length, cache.max_length
        self._steady = SteadyCache(cache, model.config)
        self._ids_B1 = torch.zeros((rows, 1), dtype=torch.int64, device=device)
        self._graph = torch.cuda.CUDAGraph()
        side = capturing(torch.cuda.current_device() if device.index is None else device.index)
        with ONE_CAPTURES:
            side.wait_stream(torch.cuda.current_stream(device))
            with torch.cuda.stream(side):  # kernels are compiled and chosen before; what this stores is overwritten
                model.next_logits(self._ids_B1, self._steady)
                self._steady.restart()
            torch.cuda.current_stream(device).wait_stream(side)
            # Of this thread alone: a stack's copies, or another request, may ask CUDA for memory meanwhile, which would
            # end a capture of all.
            with torch.cuda.graph(self._graph, stream=side, capture_error_mode="thread_local"):
                self._logits_BV = model.next_logits(self._ids_B1, self._steady)

    @torch.no_grad()
    def step(self, input_ids_B1: Tensor) -> Tensor:
        """Logits (B, V) after one more token a row; they are overwritten by the next call.

        Raises:
            ConfigurationError: the cache is full.
        """
        if not self._left:
            raise ConfigurationError(f"the cache's {self._max_length} positions are taken: make a longer KVCache")
        self._left -= 1
        self._ids_B1.copy_(input_ids_B1)
        self._graph.replay()
        return self._logits_BV
