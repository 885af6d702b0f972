"""Passes as CUDA graphs: the host's launches of a forward take longer than the kernels of so few rows.

A graph is for one form of pass; it reads what differs from one tensor, and leaves the logits in another, which the next
replay of any overwrites. A form's first passes run as they are; where it comes again and again one is captured,
replayed, and compared with itself as it is, bit by bit. Weights that have moved since end all graphs.
"""

import logging
from collections import Counter
from collections.abc import Callable
from typing import Any, NamedTuple, cast

import torch
from torch import Tensor

from vblackwell.kernels.runtime.capture import Captured, capturing

_log = logging.getLogger(__name__)
MAX_GRAPHS = 32  # that are kept, those in use last
PASSES_BEFORE_CAPTURE = 4  # which takes about as long as they lose


class Form(NamedTuple):
    """What the tensors of a pass are for: rows of a tile, rows in whole tiles, of how many logits are computed and of
    how many given, requests, pages of the longest, and most queries of a request."""

    tile: int
    rows: int
    wanted: int
    given: int
    requests: int
    pages: int
    queries: int

    @property
    def sizes(self) -> list[int]:
        """Numbers of tokens, positions, slots, rows that are wanted, starts, lengths and pages."""
        return [self.rows] * 3 + [self.wanted, self.requests + 1, self.requests, self.requests * self.pages]


class PassGraphs:
    """Graphs of one model, called ``name`` in what is logged; without a GPU their passes run as they are."""

    def __init__(self, name: str) -> None:
        self.declined = self._told = ""  # why passes are launched kernel by kernel, until weights move
        self._name, self._pool = name, cast(Any, None)
        self._place: int | None = None
        self._seen = Counter[Form]()
        self._graphs = dict[Form, tuple[Tensor, Captured[None], Tensor]]()
        self._outputs = dict[int, Tensor]()  # by number of logits

    @property
    def count(self) -> int:
        return len(self._graphs)

    def has(self, form: Form) -> bool:
        """Whether the next pass of this form is one launch, if weights stay where they are."""
        return form in self._graphs

    def clear(self) -> None:
        """Nothing lies where it did; what they held is free."""
        self._pool, self.declined = None, ""  # torch takes no more for a pool whose graphs are all gone
        self._graphs.clear()
        self._seen.clear()
        self._outputs.clear()

    def logits(
        self,
        place: int,
        form: Form,
        numbers: Tensor,
        device: torch.device,
        tokens_R: Tensor | None,
        compute: Callable[[Tensor], Tensor],
    ) -> Tensor:
        """``compute`` of ``numbers``, which are on the host, on the ``device``: (L, V) fp32. ``tokens_R``, if given,
        stand for the first of them. ``place`` differs where weights have moved."""
        if place != self._place:
            self.clear()
            self._place = place
        if form in self._graphs:
            static, graph, out_LV = self._graphs[form] = self._graphs.pop(form)
            _fill(static, numbers, tokens_R)
            graph()
            return out_LV
        static = torch.empty(numbers.shape, dtype=numbers.dtype, device=device)
        _fill(static, numbers, tokens_R)
        found_LV = compute(static)
        self._seen[form] += 1
        few = form.given <= form.requests  # logits, which a graph keeps room for
        if few and self._seen[form] >= PASSES_BEFORE_CAPTURE and not self.declined:
            self._capture(form, static, compute, found_LV)
        return found_LV

    def _capture(self, form: Form, static: Tensor, compute: Callable[[Tensor], Tensor], found_LV: Tensor) -> None:
        if len(self._graphs) >= MAX_GRAPHS:
            oldest = next(iter(self._graphs))
            del self._graphs[oldest], self._seen[oldest]
            self._outputs = {len(out_LV): out_LV for _, _, out_LV in self._graphs.values()}
        out_LV = self._outputs.get(len(found_LV))
        if out_LV is None:
            out_LV = self._outputs[len(found_LV)] = torch.empty_like(found_LV)

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
            if not torch.equal(out_LV.view(torch.int32), found_LV.view(torch.int32)):
                raise AssertionError("a replay gives other bits")
        except Exception as error:  # no memory, or whatever the model's code raises: a reason to launch it
            self.clear()
            self.declined = " ".join(f"{type(error).__name__}: {error}".split())[:300]
            if self.declined != self._told:
                self._told = self.declined
                _log.warning("%s: passes are launched kernel by kernel: capturing one: %s", self._name, self._told)
        else:
            self._graphs[form] = static, graph, out_LV


def _fill(static: Tensor, numbers: Tensor, tokens_R: Tensor | None) -> None:
    static.copy_(numbers, non_blocking=True)
    if tokens_R is not None:
        static[: len(tokens_R)] = tokens_R.clamp(min=0)  # of a row without a token nobody looks at what follows
