"""Fine parts of packed linears in a stack: coarse parts stay and answer at once, fine ones come when the link has time for them.

Each layer's fine part becomes a key of the stack, on a level below 0. Before a layer computes, it takes its fine part if that is on level 0
and goes on with its coarse one if not; nothing ever waits. Where level 0 has room for all, all come and stay. Otherwise the first layers'
parts stay (by their priority nothing of ours pushes them out), and the rest pass through the room of ``ahead + 1`` parts, asked for in
the order in which layers compute: a link that moves a share of them in the time of a forward gives that share of them both parts.
"""

from __future__ import annotations

from collections.abc import Callable, Iterable
from dataclasses import dataclass
from typing import Any

from torch import Tensor, nn

from vblackwell.errors import ConfigurationError
from vblackwell.memory.cache.stack import VGPUStack
from vblackwell.nn.linear.two_part_linear import VBOptimizedLinear
from vblackwell.units import align_up

STAYS, PASSES = 6, 4  # priorities: both start on level 1, and who passes never pushes out who stays


def _fine(layer: VBOptimizedLinear) -> Tensor:
    fine = layer.weight_fine
    assert isinstance(fine, Tensor)
    return fine


@dataclass
class Served:
    """How often layers computed from both parts, and from the coarse one alone."""

    both: int = 0
    coarse: int = 0

    @property
    def share(self) -> float:
        """Of the calls, those that had both parts."""
        return self.both / max(1, self.both + self.coarse)


class FineStream:
    """The fine parts of ``model`` in ``stack``, until `close`.

    Args:
        model: with layers that are packed in two parts and have their fine ones; not to be trained meanwhile.
        stack: on whose level 0 the layers compute.
        name: tells models in one stack apart.
        ahead: layers whose fine parts are asked for before they compute.

    Attributes:
        served: calls by parts so far.

    Raises:
        ConfigurationError: no such layer, one that computes elsewhere, or a depth below 1.
        InsufficientMemory, KeyClash: the stack does not take them; the model is as it was.
    """

    def __init__(self, model: nn.Module, stack: VGPUStack, name: str = "model", *, ahead: int = 4) -> None:
        if ahead < 1:
            raise ConfigurationError(f"ahead {ahead!r} must be at least 1 layer")
        found = {path: m for path, m in model.named_modules() if isinstance(m, VBOptimizedLinear) and m.has_fine}
        if not found:
            raise ConfigurationError(
                f"{type(model).__name__} has no layer in two parts with its fine one: enable_vb_optimization(model, 'inference') and "
                "quantize() its layers first"
            )
        self._stack, self._ahead, self.served = stack, ahead, Served()
        self._layers = {f"{name}/{path}/fine": layer for path, layer in found.items()}
        for key, layer in self._layers.items():
            if _fine(layer).device != stack.level0_device:
                raise ConfigurationError(
                    f"{key}: the layer is on {_fine(layer).device}, level 0 on {stack.level0_device}: move one of them"
                )
        self._order = list(self._layers)
        self._place = {key: place for place, key in enumerate(self._order)}
        self._asked: set[str] = (
            set()
        )  # and not computed since: asking at every layer would fill the queue with what is past
        self._hooks: list[Any] = []
        staying = self._staying()
        registered: list[str] = []
        try:
            for key, layer in self._layers.items():
                stack.register(key, _fine(layer), STAYS if key in staying else PASSES, owner=name)
                registered.append(key)
        except BaseException:
            for key in registered:
                stack.remove(key)
            raise
        for key, layer in self._layers.items():
            layer.drop_fine()
            self._hooks.append(layer.register_forward_pre_hook(self._before(key)))
            self._hooks.append(layer.register_forward_hook(self._after))

    def _staying(self) -> set[str]:
        """Whose parts level 0 keeps: everybody's, or the first ones' beside room for those that pass."""
        level = self._stack.levels[0]
        sizes = {key: align_up(_fine(layer).nbytes, level.alignment) for key, layer in self._layers.items()}
        free = level.capacity_bytes - level.used_bytes
        if sum(sizes.values()) <= free:
            return set(sizes)
        free -= (self._ahead + 1) * max(sizes.values())
        staying = set()
        for key, size in sizes.items():
            free -= size
            if free < 0:
                break
            staying.add(key)
        return staying

    def _before(self, key: str) -> Callable[..., None]:
        def take(layer: nn.Module, _: Any) -> None:
            assert isinstance(layer, VBOptimizedLinear)
            self._asked.discard(key)
            if self._stack.level_of(key) == 0:
                layer.attach_fine(self._stack.access(key))
                self.served.both += 1
            else:
                self.served.coarse += 1
            self._ask(key)

        return take

    def _after(self, layer: nn.Module, *_: Any) -> None:
        assert isinstance(layer, VBOptimizedLinear)
        if layer.has_fine:
            layer.drop_fine()  # so that the level may let it go

    def _ask(self, key: str) -> None:
        """For the next layers' fine parts, the first of the model behind the last."""
        at, count = self._place[key] + 1, len(self._order)
        wanted = [self._order[(at + step) % count] for step in range(min(self._ahead, count))]
        missing = [other for other in wanted if other not in self._asked and self._stack.level_of(other) != 0]
        if missing:
            self._asked.update(missing)
            self._stack.prefetch(missing)

    def wait(self) -> int:
        """Bring up the parts that stay; how many of all are on level 0 then."""
        for key in self._order:
            if self._stack.priority_of(key) == STAYS:
                self._stack.move(key, 0)
        return sum(self._stack.level_of(key) == 0 for key in self._order)

    def keys(self) -> Iterable[str]:
        """The stack's keys of the fine parts, in the order of the layers."""
        return tuple(self._order)

    def close(self) -> None:
        """Give every layer its fine part back and leave the stack. Idempotent."""
        for hook in self._hooks:
            hook.remove()
        self._hooks.clear()
        while self._order:
            key = self._order[-1]
            self._layers[key].attach_fine(self._stack.access(key).clone())
            self._stack.remove(key)
            del self._layers[self._order.pop()]  # what failed before this may be tried again
