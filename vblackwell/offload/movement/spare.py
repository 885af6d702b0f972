"""What training leaves of a GPU's memory, for loaded weights beyond the budget that was planned before it ran, and for
graphs of layers."""

import operator
import time
from collections.abc import Hashable
from typing import Any

import torch
from torch import Tensor
from torch.utils._pytree import tree_leaves

from vblackwell.kernels.pointwise.layer_graphs import LayerGraphs
from vblackwell.machine.facts import gpu_bytes_left
from vblackwell.memory.cache.stack import VGPUStack
from vblackwell.offload.movement.weights import WeightStreamer

STEADY = 4  # steps. The first make what later ones find: states, compiled code, shadows as their pages come
CREEP = 0.01  # of level 0 that the steady ones may reserve beyond their first: expandable segments grow by pages
FILLING = 1  # steps in which weights that got more are loaded
WATCHED = 2  # steps after these, by which `LayerGraphs.allow` judges
FILLED = 0.78  # of level 0, by weights that nothing has planned: what a step needs once in a while has room there too
UNUSED = 0.05  # of level 0, by graphs
LINK_BUSY = 0.75  # of the time of steps: they wait for bytes, of which kept weights spare some and graphs none
MOST_KINDS = 64  # of forwards that are remembered


class SpareMemory:
    """Lets the loaded weights of one model have what its steps leave of level 0, up to `FILLED` and to ``most_bytes``
    (0: what they have was stated or planned): that saves loads.

    When `STEADY` steps have reserved next to nothing new, the most that torch has held is what a step needs. A forward
    may need more whose inputs are larger in some dimension than all before, or that differs in its arguments, in
    training, in recording gradients, or in how many models stream: it runs with the planned budget, what weights had
    beyond that goes back to the driver, and steps are watched anew. So does any with inputs that are no numbers,
    tensors or containers of them, or next to another streamed model.

    ``graphs`` of layers come before that, unless a link is `LINK_BUSY` with the planned budget, which they may leave to
    weights. Whether the GPU waits for the host is seen best when it waits for the fewest bytes, so they are tried
    `FILLING` and `WATCHED` steps later: in that step, weights have the planned budget once more. What graphs hold is
    known then, so that they may have all but `UNUSED`.
    """

    def __init__(self, weights: WeightStreamer, stack: VGPUStack, most_bytes: int) -> None:
        self._weights, self._stack, self._planned = weights, stack, weights.budget_bytes
        self._most_bytes = most_bytes
        self.graphs = LayerGraphs()
        self._seen: dict[Hashable, list[list[int]]] = {}  # sizes of inputs, by what else a forward's memory goes by
        self._reserved = self._used = 0  # the most that was with the planned budget, in all of the GPU and of level 0
        self._watch()

    def _watch(self) -> None:
        self._granted, self._left, self._may_capture = False, 0, False
        # Steady ones, or those since more was granted; reserved at the first steady one; forwards since the last.
        self._steps = self._first = self._forwards = 0
        self._since = self._clock()  # the first steady one

    def held_up(self) -> None:
        """Steps were held up: the time until now does not tell how busy links are in them."""
        if not self._granted:
            self._since = self._clock()

    def _clock(self) -> tuple[float, list[float]]:
        """The time, and those of links."""
        return time.perf_counter(), [link["seconds"] for link in self._stack.get_stats()["links"]]

    def _links_wait(self) -> bool:
        """Whether no link was as busy as `LINK_BUSY` in the steady steps."""
        (began, before), (now, seconds) = self._since, self._clock()
        before += [0.0] * (len(seconds) - len(before))
        busiest = max((late - early for late, early in zip(seconds, before, strict=True)), default=0.0)
        return busiest < LINK_BUSY * (now - began)

    def begin_forward(self, inputs: Any, *, training: bool) -> None:
        """A forward of the whole model with these inputs is about to start."""
        kind, sizes = _kind_and_sizes(inputs, training=training)
        seen = self._seen.setdefault(kind, []) if len(self._stack.prefetchers) == 1 and kind is not None else None
        if seen is None or not any(all(map(operator.le, sizes, larger)) for larger in seen):
            if seen is not None:
                seen[:] = [each for each in seen if not all(map(operator.le, each, sizes))] + [sizes]
            if len(self._seen) > MOST_KINDS:
                self._seen.clear()
            if self._granted:
                self.graphs.drop()
                self._weights.rebudget(self._planned)
                torch.cuda.empty_cache()  # or it would count as what a step needs
            self._watch()
        self._forwards += 1
        self.look()

    def look(self) -> None:
        """Note what is reserved now: at a forward's start, and a backward's and a step's end."""
        if not self._granted:
            self._reserved = max(self._reserved, torch.cuda.memory_reserved(self._stack.level0_device))
            self._used = max(self._used, self._stack.levels[0].used_bytes)

    def end_step(self) -> None:
        """A step is over, as far as the host is concerned."""
        self.graphs.end_step()
        if not self._forwards:
            return
        if self._granted:
            self._steps, self._forwards = self._steps + 1, 0
            if self._steps == FILLING + WATCHED and self._may_capture:
                self.graphs.allow(max(0, self._left - int(UNUSED * self._stack.levels[0].capacity_bytes)))
            self._grant()  # after that: graphs may take less than they might have, or save no time
            return
        self.look()
        steady = self._reserved - self._first <= CREEP * self._stack.levels[0].capacity_bytes
        self._steps = self._steps + 1 if steady else 0
        if not self._steps:
            self._since, self._first = self._clock(), self._reserved
        self._forwards = 0
        if self._steps == STEADY:
            level0, device = self._stack.levels[0], self._stack.level0_device
            total = gpu_bytes_left(device) + torch.cuda.memory_allocated(device)
            # What was planned has a level 0 of its weights and states alone, which they fill, and graphs are beside it.
            room = level0.capacity_bytes - self._used if self._most_bytes else total
            self._left = max(0, min(total - self._reserved, room))
            self._may_capture = self._links_wait()
            if not self._may_capture:
                self.graphs.declined = "steps wait for the link"
            self._grant()
            self._granted, self._steps = True, 0

    def _grant(self) -> None:
        rest = self._left - int((1 - FILLED) * self._stack.levels[0].capacity_bytes) - self.graphs.num_bytes
        self._weights.rebudget(self._planned + min(self._most_bytes, max(0, rest)))


def _kind_and_sizes(inputs: Any, *, training: bool) -> tuple[Hashable, list[int]]:
    """What but sizes a forward's memory goes by, None where that cannot be told, and the sizes of its tensors."""
    leaves = tree_leaves(inputs)
    sizes = [size for leaf in leaves if isinstance(leaf, Tensor) for size in leaf.shape]
    others = [leaf for leaf in leaves if not isinstance(leaf, Tensor)]
    if not all(leaf is None or isinstance(leaf, (bool, int, float, str, torch.dtype, torch.device)) for leaf in others):
        return None, sizes
    numbers = (int, float)
    named = tuple(type(leaf) if type(leaf) in numbers else leaf for leaf in others)
    return (len(sizes), training, torch.is_grad_enabled(), *inputs[-1], *named), sizes
