"""Passes in which each text reads one token, as CUDA graphs: their kernels take less time than the host's launches.

A graph is for as many texts and as many pages of the longest, both rounded up; it reads what differs from one tensor,
and leaves the logits in another, which the next replay of any overwrites. A kind's first pass runs as it is, for which
kernels are compiled and chosen; the second is captured, replayed, and compared with itself as it is, bit by bit.
Weights that have moved since end all graphs.
"""

import logging
from collections.abc import Callable
from typing import Any, cast

import torch
from torch import Tensor

from vblackwell.kernels.runtime.capture import Captured, capturing

_log = logging.getLogger(__name__)
Kind = tuple[int, int]  # texts, pages of the longest
MOST = 32  # graphs that are kept


def kind_of(texts: int, pages: int) -> Kind:
    """Powers of two, of pages every other one from 16 on."""
    width = 16
    while width < pages:
        width *= 4
    return 1 << (texts - 1).bit_length(), width


class StepGraphs:
    """Graphs of one model, called ``name`` in what is logged; without a GPU their passes run as they are."""

    def __init__(self, name: str) -> None:
        self.declined = ""  # why passes are launched kernel by kernel
        self._name, self._pool = name, cast(Any, None)
        self._place: int | None = None
        self._seen = set[Kind]()
        self._graphs = dict[Kind, tuple[Tensor, Captured[None]]]()
        self._outputs = dict[int, Tensor]()  # by number of texts

    @property
    def count(self) -> int:
        return len(self._graphs)

    def has(self, kind: Kind) -> bool:
        """Whether the next pass of this kind is one launch, if weights stay where they are."""
        return kind in self._graphs

    def clear(self) -> None:
        """Nothing lies where it did; what they held is free."""
        self._pool = None  # torch takes no more for a pool whose graphs are all gone
        self._graphs.clear()
        self._seen.clear()
        self._outputs.clear()

    def logits(
        self, place: int, kind: Kind, numbers: Tensor, tokens_R: Tensor | None, compute: Callable[[Tensor], Tensor]
    ) -> Tensor:
        """``compute(numbers)`` (L, V) fp32, where ``tokens_R``, if given, stand for the first of ``numbers``. ``place``
        differs where weights have moved."""
        if place != self._place:
            self.clear()
            self._place = place
        if kind in self._graphs:
            static, graph = self._graphs[kind]
            _fill(static, numbers, tokens_R)
            graph()
            return self._outputs[kind[0]]
        static = torch.empty_like(numbers)
        _fill(static, numbers, tokens_R)
        found_LV = compute(static)
        if kind in self._seen and not self.declined:
            self._capture(kind, static, compute, found_LV)
        self._seen.add(kind)
        return found_LV

    def _capture(self, kind: Kind, static: Tensor, compute: Callable[[Tensor], Tensor], found_LV: Tensor) -> None:
        if len(self._graphs) >= MOST:
            self._graphs.pop(next(iter(self._graphs)))
        out_LV = self._outputs.setdefault(kind[0], torch.empty_like(found_LV))

        def run() -> None:
            out_LV.copy_(compute(static))

        try:
            if static.is_cuda:
                with capturing(static.device) as side:
                    run()
                    side.synchronize()
                    self._pool = self._pool or torch.cuda.graph_pool_handle()
                    graph = Captured[None](run, self._pool)
            else:
                graph = Captured[None](run, None)
            graph()
            if not torch.equal(out_LV, found_LV):
                raise AssertionError("a replay gives other bits")
        except Exception as error:  # no memory, or whatever the model's code raises: a reason to launch it
            self.declined = " ".join(f"{type(error).__name__}: {error}".split())[:300]
            _log.warning("%s: its passes are launched kernel by kernel: capturing one: %s", self._name, self.declined)
            self.clear()
        else:
            self._graphs[kind] = static, graph


def _fill(static: Tensor, numbers: Tensor, tokens_R: Tensor | None) -> None:
    static.copy_(numbers, non_blocking=True)
    if tokens_R is not None:
        static[: len(tokens_R)] = tokens_R.clamp(min=0)  # of a row without a token nobody looks at what follows
