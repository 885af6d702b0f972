"""One model of a fleet, as engine and server see it."""

from collections.abc import Callable, Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import Any

from tokenizers import Tokenizer

from vblackwell.errors import ConfigurationError, Unsupported
from vblackwell.generate.generate import end_tokens, position_limit
from vblackwell.serve.sources import naming, stated_ends
from vblackwell.serve.weights import State, Weights


class Served:
    """``name`` is what requests call it; ``module`` a causal model of transformers whose weights are on ``device`` or
    come there when it is called; ``dtype`` that of its keys and values; ``position_limit`` tokens of the longest text,
    None where the model states none; ``end_tokens`` those that end a text. ``folder`` is where it is from and
    ``adapter`` that of an adapter over it, None each for a module that was given; ``tokenizer`` is None where that came
    without one. ``weights``: None where they stay where they are, always awake. ``make_room`` lets others give way to
    them; ``hand_back`` gives other programs what is free.
    """

    def __init__(
        self,
        name: str,
        module: Any,
        weights: Weights | None,
        make_room: Callable[[Weights], None],
        hand_back: Callable[[], None],
        tokenizer: Tokenizer | None = None,
        folder: Path | None = None,
        adapter: Path | None = None,
    ) -> None:
        self.name, self.module, self.weights = name, module, weights
        self.tokenizer, self.folder, self.adapter, self.config = tokenizer, folder, adapter, module.config
        self._make_room, self._hand_back = make_room, hand_back
        first = next(param for param in module.parameters() if param.is_floating_point())
        self.dtype = first.dtype
        self.device = first.device if weights is None else weights.engine.device
        self.position_limit = position_limit(module)
        self.end_tokens = frozenset(end_tokens(module)) | stated_ends(folder)

    @property
    def pinned(self) -> bool:
        return self.weights is not None and self.weights.pinned

    @property
    def weight_bytes(self) -> int:
        """In host memory, of all models over the same base; 0 for a module that stays where it is."""
        return 0 if self.weights is None else self.weights.num_bytes

    @property
    def level0_bytes(self) -> int:
        """Of `weight_bytes`, what is on level 0 or on its way there."""
        return 0 if self.weights is None else self.weights.loaded_bytes

    @property
    def progress(self) -> float:
        """See `Weights`."""
        return 1.0 if self.weights is None else self.weights.progress

    @property
    def state(self) -> State:
        """See `Weights`."""
        return "awake" if self.weights is None else self.weights.state

    def touch(self) -> None:
        """It is about to be used: it wakes, and others give way before it does. Costs nothing when it is awake."""
        if self.weights is not None:
            self.weights.use()
            if not self.weights.engine.bound:
                self.wake()

    @property
    def is_whole(self) -> bool:
        """Whether all of it stays on level 0 from one forward to the next."""
        return self.weights is None or bool(self.weights.engine.bound)

    @contextmanager
    def held(self) -> Iterator[int | None]:
        """Inside, without gradients, weights that are on level 0 as a whole stay there: a number, another one each time
        that they came; None where they come and go."""
        if self.weights is None:
            yield 0
            return
        bound = self.weights.engine.bound
        bound.enter()
        try:
            yield bound.times if bound else None
        finally:
            bound.leave()

    def wake(self) -> None:
        """Start to load it, in the order of use; returns at once, and its forward runs after each group's arrival.
        Raises what reading its bytes raises."""
        if self.weights is None or self.weights.state == "awake":
            return
        with self.weights.engine.lock, naming(self.name):
            self.weights.use()
            self._make_room(self.weights)
            self.weights.load()

    def sleep(self) -> None:
        """Drop all of it from level 0, with what other models over the same base have there. Raises ConfigurationError
        where it is pinned or in use, Unsupported for a module that stays where it is."""
        if self.weights is None:
            raise Unsupported(f"model {self.name!r} was given without a budget and stays where it is: give budget=")
        if self.weights.pinned:
            raise ConfigurationError(f"model {self.name!r} is pinned and does not sleep: serve it without pinning it")
        if not self.weights.drop():
            raise ConfigurationError(f"model {self.name!r} is in use: let it sleep when its forward is over")
        self._hand_back()
