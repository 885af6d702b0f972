"""The fast path of a frozen model that is on level 0 as a whole: its parameters are plain from forward to forward.

Loading and unloading a group around each layer costs the host 0.3 ms a layer (CPU, torch 2.13), about as much as the
launches of one token. So, once all groups have arrived, they are pinned and bound together and the hooks of their
modules removed. Bytes that somebody else needs end that, and everything is as before; but not while a forward of the
model, or of one of its children (which alone count their callers), is inside: a group in use never leaves.

What is bound is meant to be read: of writes those are kept that autograd counts, not those through ``.data``. Uses of
bound groups are no hits of the stack.
"""

import threading
import time
from collections.abc import Callable
from contextlib import ExitStack
from functools import partial
from typing import Any

import torch
from torch.autograd.graph import increment_version

from vblackwell.offload.layout.groups import Group, Site, Slot
from vblackwell.offload.parameters import AfterForward, BeforeForward, is_transformed, weakly


class Entered(threading.local):
    """What one thread has entered: of the forward of the whole model; of modules' sites, the last one last, with what
    leaves each; and how many modules that count their callers."""

    def __init__(self) -> None:
        self.forward = ExitStack()
        self.sites: list[tuple[Site, Callable[[], object]]] = []
        self.counted = 0


class SiteHooks:
    """The hooks of modules' sites: ``enter`` and ``leave`` get the site, then what torch gives them."""

    def __init__(self, enter: Callable[..., None], leave: Callable[..., None]) -> None:
        self._enter, self._leave = enter, leave
        self._sites: list[Site] = []
        self._handles: list[Any] = []

    def add(self, site: Site, keep: Callable[[Any], None] | None = None) -> None:
        """Hook ``site``; with ``keep``, which gets the handles, for good."""
        if keep is None:
            self._sites.append(site)
            keep = self._handles.append
        enter, leave = BeforeForward(partial(self._enter, site)), AfterForward(partial(self._leave, site))
        keep(site.module.register_forward_pre_hook(enter, prepend=True, with_kwargs=True))
        keep(site.module.register_forward_hook(leave, always_call=True))

    def remove(self) -> None:
        """Call none of them, but those for good."""
        while self._handles:
            self._handles[-1].remove()  # first: an interrupt between the two must not leave one
            self._handles.pop()

    def restore(self) -> None:
        """End of `remove`, or of one that was interrupted."""
        self.remove()
        sites, self._sites = self._sites, []
        for site in sites:
            self.add(site)


class BoundWeights:
    """Binds the groups of ``engine``, an `Offload`, once that is ``wanted``."""

    def __init__(self, engine: Any) -> None:
        self._engine = engine
        self.wanted = False
        self.times = 0  # that it was bound: what lies where it lay then is of one time
        self._callers = 0  # of forwards that are inside, of all threads
        self._plain = False  # whether no hook of a site is called
        self._taken: list[Slot] = []
        self._groups: list[Group] = []

    def __bool__(self) -> bool:
        """Whether modules run without hooks now. What is bound stays on level 0 while a caller is counted, but hooks
        come back where one of them computes gradients."""
        return self._plain

    def want(self) -> None:
        """From now on bind a model that nothing trains at a forward that finds all groups loaded; its children count
        their callers. Once."""
        assert not self.wanted and self._engine.weights.frozen
        self.wanted, keep = True, self._engine.handles.append
        enter, leave = BeforeForward(weakly(self._count)), AfterForward(weakly(self._uncount))
        for child in self._engine.model.children():
            keep(child.register_forward_pre_hook(enter, prepend=True, with_kwargs=True))
            keep(child.register_forward_hook(leave, always_call=True))

    def enter(self) -> None:
        """A forward begins: what is bound stays on level 0 until `leave`; what is not is bound if it can be.

        Autograd and transforms save the parameter itself, whose bytes may leave before a backward reads them: for those
        the hooks come back, which save references, at once, for forwards of other threads that are inside, too.
        """
        with self._engine.lock:
            if torch.is_grad_enabled() or is_transformed():
                if not self.release():
                    self._restore_hooks()
            elif not self._plain and not self._callers:
                self.release()
                self._bind()
            self._callers += 1
            self._engine.entered.counted += 1

    def leave(self) -> None:
        if self._engine.entered.counted:
            with self._engine.lock:
                self._callers -= 1
                self._engine.entered.counted -= 1

    def unwind(self) -> None:
        """Leave what this thread has entered: no forward of it runs."""
        while self._engine.entered.counted:
            self.leave()

    def _count(self, *_: object) -> None:
        self._engine.budget.last_used = time.monotonic()
        self.enter()

    def _uncount(self, *_: object) -> None:
        self.leave()

    def _bind(self) -> None:
        engine, weights = self._engine, self._engine.weights
        if not weights.have_arrived():
            return  # the first layers need not wait for the last
        if any(map(weights.is_pinned, engine.groups)):
            return
        for group in engine.groups:
            weights.arrive(group)
        try:
            engine.used.begin(((group, group.slots) for group in engine.groups), weights.pin, self._taken, self._groups)
            for slot in self._taken:
                slot.param.__class__ = slot.plain_class
            self._plain = True
            self.times += 1
            engine.site_hooks.remove()
        except BaseException:
            self._end()
            raise

    def _end(self) -> None:
        self._restore_hooks()
        taken, groups, self._taken, self._groups = self._taken, self._groups, [], []
        self._engine.used.end(taken, groups)

    def _restore_hooks(self) -> None:
        if self._plain:
            self._engine.site_hooks.restore()
            self._plain = False

    def release(self) -> bool:
        """Let the groups be dropped again; False where nothing is bound, or somebody is inside."""
        with self._engine.lock:
            if self._callers or not self._groups:
                return False
            self._end()
            # Whoever used a parameter without a counted caller, and with gradients, may have saved it: now an error.
            increment_version(slot.param for slot in self._engine.slots())
            self._engine.weights.num_released += 1
            self._engine.weights.end_pass()
            return True

    def drop_one(self) -> bool:
        """Drop a group that nobody uses, bound or not; False if there is none."""
        drop = self._engine.weights.drop_one
        return drop() or (self.release() and drop())

    def drop_all(self) -> bool:
        """Drop all groups, those that are on their way, too; False, and nothing changed, where a forward is inside."""
        engine = self._engine
        with engine.lock:
            self.unwind()
            self.release()
            if self._callers or any(map(engine.weights.is_pinned, engine.groups)):
                return False
            engine.weights.drop_all()
            return True
