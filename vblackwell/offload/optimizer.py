"""`VGPUAdamW`: AdamW whose states live in the stack next to the weights they belong to.

It is a `torch.optim.AdamW`: parameters that are plain (not offloaded, or all resident on level 0) are stepped by
torch's own fused kernels at torch's own cost. Parameters of a streamed model are stepped group by group in the
background, where their states are. Clipping is exact: the norm of per-parameter norms in optimizer order, then ``g *=
min(1, max_grad_norm / (norm + 1e-6))``, as `torch.nn.utils.clip_grad_norm_` does, over both kinds together.
"""

from __future__ import annotations

import inspect
import math
from collections.abc import Callable, Collection, Iterable, Iterator, Sequence
from contextlib import contextmanager
from typing import Any

import torch
from torch import nn

from vblackwell.errors import ConfigurationError, Unsupported
from vblackwell.offload.engine import Offload, locked
from vblackwell.offload.layout.groups import MOMENTS, Slot, find_groups
from vblackwell.offload.movement.gradients import norm_of_norms
from vblackwell.offload.movement.state import Hyper
from vblackwell.offload.parameters import engine_and_slot
from vblackwell.offload.resident import (
    Resident,
    plain_norm,
    plain_state,
    resident_of,
    restride,
    update_resident,
    updates_here,
    write_state,
)  # fmt: skip
from vblackwell.offload.state import read_slot_states, write_slot_states

# Without the profiling and grad-mode layers that torch puts around each class's step: ours has them.
_ADAMW_STEP = inspect.unwrap(torch.optim.AdamW.step)


def _selected(engines: Sequence[Offload], only: Iterable[Any]) -> set[torch.Tensor]:
    """The parameters that a step is restricted to.

    Raises:
        ConfigurationError: a key names no group of the optimizer's models.
    """
    by_key = {engine.key_of(group): group for engine in engines for group in engine.groups}
    params: set[torch.Tensor] = set()
    for item in only:
        if isinstance(item, torch.Tensor):
            params.add(item)
        elif item in by_key:
            params.update(slot.param for slot in by_key[item].slots)
        else:
            raise ConfigurationError(
                f"only={item!r} is neither a parameter nor a group such as {next(iter(by_key), None)!r}"
            )
    return params


class VGPUAdamW(torch.optim.AdamW):
    """AdamW for offloaded and plain parameters alike; arguments and results of `torch.optim.AdamW(fused=True)`.

    Args:
        params: parameters or parameter groups. Managed parameters must already be offloaded.
        max_grad_norm: clip the global 2-norm to this at `step`. With it (``inf`` measures and never clips) a step whose
            gradients are not finite changes nothing and sets `skipped`; without it nothing is measured, as in PyTorch.
        update_in_backward: start a group's update after its backward, with an exact rollback (see `Speculation`).
        undo: keep what a rollback of updates after the backward needs. False is a promise that every backward is
            followed by its `step` with the hyperparameters as they are: it saves host memory (14 bytes a parameter with
            bf16 weights) and gradients' way to host memory. Should the step not come, `StepAbandoned` is raised. Such
            an update consumes its gradient: after `step` there is none, as after `zero_grad`. Cannot be had with
            ``max_grad_norm``.
        accumulation_steps: forwards of the whole model per `step`; only with ``update_in_backward`` must it be right
            for speed.
        loss_scale: the factor that the loss was multiplied by, a power of two; gradients are divided by it. May be
            changed between steps through the attribute of this name.

    Raises:
        ConfigurationError: a number outside its range, or no parameters.
        Unsupported: an earlier optimizer has some of the parameters of an offloaded model and others; one that has no
            others is replaced, and raises when it is used.
    """

    def __init__(
        self, params: Any, lr: float = 1e-3, betas: tuple[float, float] = (0.9, 0.999), eps: float = 1e-8,
        weight_decay: float = 1e-2, *, max_grad_norm: float | None = None, update_in_backward: bool = False,
        undo: bool = True, accumulation_steps: int = 1, loss_scale: float = 1.0,
    ) -> None:  # fmt: skip
        if not lr >= 0 or math.isinf(lr):
            raise ConfigurationError(f"lr {lr} is not a learning rate: give a finite number >= 0, e.g. 3e-4")
        if max_grad_norm is not None and not max_grad_norm > 0:
            raise ConfigurationError(
                f"max_grad_norm {max_grad_norm} must be > 0 (or None, to leave gradients as they are)"
            )
        if not undo and max_grad_norm is not None:
            raise ConfigurationError(
                "undo=False makes updates final before the norm is known: use undo=True, or max_grad_norm=None"
            )
        if accumulation_steps < 1:
            raise ConfigurationError(f"accumulation_steps {accumulation_steps} must be >= 1")
        if not isinstance(params, torch.Tensor):  # which torch refuses in words of its own
            params = list(params)
        if isinstance(params, list) and not params:
            raise ConfigurationError(
                "there are no parameters to update: every one was left out, or the whole model is frozen; "
                "give those to train requires_grad=True before the optimizer is made"
            )
        self.max_grad_norm = max_grad_norm
        self.update_in_backward = update_in_backward
        self.undo = undo
        self.accumulation_steps = accumulation_steps
        self.loss_scale = loss_scale
        self._norm: torch.Tensor | None = None
        self._skipped = False
        self._group_of: dict[torch.Tensor, dict[str, Any]] = {}
        self._slots: dict[torch.Tensor, Slot] = {}
        self._engines: list[Offload] = []
        self._updates_here = False
        self._replaced = False
        if isinstance(params, list):
            params = [
                {**item, "params": list(item["params"])}  # a generator is read once
                if isinstance(item, dict) and not isinstance(item["params"], torch.Tensor)
                else item
                for item in params
            ]
            stand_ins: dict[torch.Tensor, torch.nn.Parameter] = {}
            # What torch refuses it refuses here, while an earlier optimizer still has its states.
            torch.optim.AdamW(
                _stand_in(params, stand_ins), lr=lr, betas=betas, eps=eps, weight_decay=weight_decay, fused=True
            )
            self._replace_earlier(params)
        super().__init__(params, lr=lr, betas=betas, eps=eps, weight_decay=weight_decay, fused=True)

    def _replace_earlier(self, params: list[Any]) -> None:
        """An optimizer all of whose parameters are among ``params`` loses them: states begin anew.

        Raises:
            Unsupported: an earlier optimizer has some of the parameters, and others.
        """
        wanted = set(_tensors_in(params))
        engines = dict.fromkeys(engine for param in wanted if (engine := _engine_of(param)) is not None)
        replaced: list[tuple[Offload | Resident, VGPUAdamW]] = []
        for engine in engines:
            for earlier in engine.optimizers():
                held = {param for param in earlier._group_of if _engine_of(param) is not None and not earlier._replaced}
                if held and held <= wanted:
                    replaced.append((engine, earlier))
                elif held & wanted:
                    raise Unsupported(
                        f"model {engine.name!r} already has an optimizer, for some of these parameters and others: put "
                        "all its parameters into one VGPUAdamW, or release(model) and enable it again"
                    )
        for engine, earlier in replaced:
            engine.forget_optimizer()
            earlier._replaced = True
            earlier._engines = [other for other in earlier._engines if other is not engine]

    def _check_current(self) -> None:
        if self._replaced:
            raise Unsupported(
                "this VGPUAdamW was replaced when another was made for its parameters, and has no states any more: use "
                "that one"
            )

    def add_param_group(self, param_group: dict[str, Any]) -> None:
        self._check_current()
        super().add_param_group(param_group)
        group = self.param_groups[-1]
        fresh: dict[Offload, list[Slot]] = {}
        residents: dict[Resident, list[torch.Tensor]] = {}
        for param in group["params"]:
            self._group_of[param] = group
            found = engine_and_slot(param)
            if found is not None:
                engine, slot = found
                self._slots[param] = slot
                fresh.setdefault(engine, []).append(slot)
            resident = resident_of(param)
            if resident is not None:
                residents.setdefault(resident, []).append(param)
        self._updates_here |= any(updates_here(param) for param in group["params"])
        for resident, held in residents.items():
            self.state.update(resident.adopt_optimizer(self, held))
        for engine, slots in fresh.items():
            engine.adopt_optimizer(self, slots)
            if engine not in self._engines:
                self._engines.append(engine)

    def hyper_of(self, slot: Slot) -> Hyper | None:
        """Today's numbers for ``slot``; None if it is not this optimizer's."""
        group = self._group_of.get(slot.param)
        return None if group is None else self._hyper(group)

    @staticmethod
    def _hyper(group: dict[str, Any]) -> Hyper:
        if group["amsgrad"] or group["maximize"]:
            raise Unsupported("amsgrad and maximize are not available for offloaded parameters")
        beta1, beta2 = group["betas"]
        return Hyper(float(group["lr"]), float(beta1), float(beta2), float(group["eps"]), float(group["weight_decay"]))

    # -- the step ----------------------------------------------------------------------------------------------------

    def step(  # pyright: ignore[reportIncompatibleMethodOverride]
        self, closure: Callable[[], Any] | None = None, *, only: Iterable[Any] | None = None
    ) -> Any:
        """One AdamW step. Updates of offloaded groups run on in the background, each until its group is next used.

        Args:
            only: keys from `select_top_k_gradients`, or parameters: update (and measure) just these.
        """
        self._check_current()
        is_plain = not self._engines and not self._updates_here
        if only is None and is_plain and self.max_grad_norm is None and self.loss_scale == 1.0:
            with torch.no_grad():
                return _ADAMW_STEP(self, closure)  # nothing of ours to do: torch's cost
        loss = None
        if closure is not None:
            with torch.enable_grad():
                loss = closure()
        with torch.no_grad(), locked(self._engines):
            self._step(None if only is None else _selected(self._engines, only))
        return loss

    def _step(self, only: set[torch.Tensor] | None) -> None:
        if self._updates_here:
            for param in self._group_of:
                restride(param)
        # A scale is one more reason to multiply, and a limit one more to measure; without either, nothing is read.
        self._skipped = False
        for engine in self._engines:
            engine.host_updates.check_gradients()
        if self.max_grad_norm is not None:
            factor = self._measure(only)
        else:
            factor = None if self.loss_scale == 1.0 else torch.tensor(1.0 / self.loss_scale)
        if self._skipped:
            for engine in self._engines:
                engine.step_control.skip_step()
            return
        for engine in self._engines:
            engine.step_control.commit_step(lambda slot: only is None or slot.param in only, factor)
        self._step_plain(only, factor)

    def _measure(self, only: set[torch.Tensor] | None) -> torch.Tensor | None:
        """The global norm into `grad_norm`; the factor that clips, None if that is 1."""
        assert self.max_grad_norm is not None
        for engine in self._engines:
            engine.step_control.collect()
        norms = []
        for param, slot in self._in_order(only):
            if slot is not None:
                found = engine_and_slot(param)
                assert found is not None
                norms.append(found[0].gradients.norm(slot))
            else:
                norms.append(plain_norm(param))
        if not norms:
            self._norm = torch.zeros(())
            return None
        total = norm_of_norms(norms, self._engines[0].device if self._engines else norms[0].device)
        inverse_scale = 1.0 / self.loss_scale
        if inverse_scale != 1.0:
            total = total * inverse_scale
        self._norm = total
        self._skipped = not bool(torch.isfinite(total))
        factor = torch.clamp(self.max_grad_norm / (total + 1e-6), max=1.0) * inverse_scale
        return None if factor == 1.0 else factor.cpu()

    def _in_order(self, only: set[torch.Tensor] | None) -> Iterable[tuple[torch.Tensor, Slot | None]]:
        """Parameters that have gradients, in optimizer order, with their slot if they are offloaded."""
        for group in self.param_groups:
            for param in group["params"]:
                if only is not None and param not in only:
                    continue
                slot = self._slots.get(param)
                if slot is not None:
                    found = engine_and_slot(param)
                    if found is not None and found[0].gradients.has(slot):
                        yield param, slot
                elif param.grad is not None:
                    yield param, None

    def _step_plain(self, only: set[torch.Tensor] | None, factor: torch.Tensor | None) -> None:
        plain = [param for param in self._group_of if param not in self._slots]
        if not plain:
            return
        ours = [param for param in plain if updates_here(param)]
        for param in ours:
            if param.grad is not None and (only is None or param in only):
                update_resident(param, param.grad, self.state[param], self._hyper(self._group_of[param]), factor)
        set_aside = []
        for param in plain:
            if param.grad is None or updates_here(param):
                continue
            if only is not None and param not in only:
                set_aside.append((param, param.grad))
                param.grad = None
            elif factor is not None:
                param.grad.mul_(factor.to(param.grad.device))
        try:
            with self._without(self._slots.keys() | set(ours)):
                _ADAMW_STEP(self)
        finally:
            for param, gradient in set_aside:
                param.grad = gradient

    @contextmanager
    def _without(self, params: Collection[torch.Tensor]) -> Iterator[None]:
        """Inside, torch's own methods do not meet ``params``."""
        if not params:
            yield
            return
        kept = [group["params"] for group in self.param_groups]
        try:
            for group in self.param_groups:
                group["params"] = [param for param in group["params"] if param not in params]
            yield
        finally:
            for group, everything in zip(self.param_groups, kept, strict=True):
                group["params"] = everything

    def zero_grad(self, set_to_none: bool = True) -> None:
        """Forget all gradients, and every update that was started for a step that has not come."""
        self._check_current()
        if not self._engines:
            return super().zero_grad(set_to_none)
        with locked(self._engines):
            self._forget_gradients(set_to_none)
        with self._without(self._slots.keys()):
            super().zero_grad(set_to_none)

    def _forget_gradients(self, set_to_none: bool) -> None:
        """`zero_grad` of offloaded parameters."""
        for engine in self._engines:
            engine.step_control.roll_back()
            engine.step_control.begin_window()
            slots = [slot for param, slot in self._slots.items() if engine_and_slot(param) == (engine, slot)]
            held = [slot for slot in slots if engine.gradients.has(slot)]
            if held:
                engine.gradients.finish_backward()
                if set_to_none:
                    engine.gradients.clear(held)
                else:
                    engine.step_control.drain()  # they may still read what is about to be zero
                    engine.gradients.zero(held)
            engine.host_updates.forgive()

    # -- states ------------------------------------------------------------------------------------------------------

    def state_dict(self) -> dict[str, Any]:
        """As `torch.optim.AdamW` would write it; states of offloaded parameters come as CPU tensors."""
        self._check_current()
        found = super().state_dict()
        index_of = {param: index for index, param in enumerate(self._group_of)}
        for param, state in self.state.items():
            found["state"][index_of[param]] = plain_state(param, state)
        for engine in self._engines:
            engine.finish()
            engine.host_updates.check_whole()
            for group in engine.groups:
                for slot, state in read_slot_states(engine, group):
                    found["state"][index_of[slot.param]] = state
        return found

    def load_state_dict(self, state_dict: dict[str, Any]) -> None:
        """Accepts what `torch.optim.AdamW` or this class wrote for the same parameters, wherever they lived."""
        self._check_current()
        slot_of = {index: self._slots[param] for index, param in enumerate(self._group_of) if param in self._slots}
        # States that are updated here stay where they are, in their own types: torch would make moments as narrow as
        # the weights.
        held_of = {
            index: (param, self.state[param]) for index, param in enumerate(self._group_of) if updates_here(param)
        }
        loaded: dict[int, dict[str, torch.Tensor]] = state_dict["state"]
        states = {slot_of[index]: state for index, state in loaded.items() if index in slot_of}
        plain = {index: state for index, state in loaded.items() if index not in slot_of and index not in held_of}
        super().load_state_dict({**state_dict, "state": plain})
        self._group_of = {param: group for group in self.param_groups for param in group["params"]}
        for index, (param, held) in held_of.items():
            write_state(param, held, loaded.get(index))
            self.state[param] = held
        for engine in self._engines:
            engine.finish()
            for group in engine.groups:
                held = {slot: states[slot] for slot in group.slots if slot in states}
                write_slot_states(engine, group, held)

    def let_go(self, engine: Offload, device: torch.device) -> None:
        """``engine``'s parameters become plain: its states move here, to ``device``. Called by `release`."""
        for group in engine.groups:
            for slot, state in read_slot_states(engine, group):
                moments = {kind: state[kind].to(device) for kind in MOMENTS}
                self.state[slot.param] = {"step": state["step"].to(device), **moments}
        self._slots = {param: slot for param, slot in self._slots.items() if engine_and_slot(param) != (engine, slot)}
        self._engines.remove(engine)

    @property
    def grad_norm(self) -> float | None:
        """The global 2-norm of the gradients at the last `step` before clipping; None without ``max_grad_norm``."""
        return None if self._norm is None else float(self._norm)

    @property
    def skipped(self) -> bool:
        """Whether the last `step` changed nothing because a gradient was not finite."""
        return self._skipped


def _engine_of(param: torch.Tensor) -> Offload | Resident | None:
    found = engine_and_slot(param)
    return resident_of(param) if found is None else found[0]


def _stand_in(params: Any, known: dict[torch.Tensor, torch.nn.Parameter]) -> Any:
    """``params`` as torch takes them, with an empty parameter for each leaf: ``known`` has those that were made."""
    if isinstance(params, torch.Tensor):
        if params not in known:
            known[params] = torch.nn.Parameter(torch.empty(0))
        return known[params] if params.is_leaf else params
    if isinstance(params, dict):
        return {**params, "params": _stand_in(params["params"], known)}
    if isinstance(params, (list, tuple)):
        return type(params)(_stand_in(item, known) for item in params)
    return params


def _tensors_in(params: Any) -> Iterator[torch.Tensor]:
    """In what torch takes for parameters: tensors, pairs of names and tensors, lists of these, and groups."""
    if isinstance(params, torch.Tensor):
        yield params
    elif isinstance(params, (list, tuple, dict)):
        for item in params["params"] if isinstance(params, dict) else params:
            yield from _tensors_in(item)


# -- gradients between backward and step -------------------------------------------------------------------------------


@torch.no_grad()
def clip_grad_norm_(model: nn.Module | Iterable[torch.Tensor], max_norm: float) -> torch.Tensor:
    """Scale the gradients of ``model`` (or of some parameters) in place to a global 2-norm of at most ``max_norm``.

    Call it between backward and `step`, instead of `torch.nn.utils.clip_grad_norm_` and instead of ``max_grad_norm``.

    Returns:
        The norm before clipping, an fp32 scalar. Not finite gradients are scaled as torch does; read the value.
    """
    params = list(model.parameters() if isinstance(model, nn.Module) else model)
    found = {param: engine_and_slot(param) for param in params}
    engines = list(dict.fromkeys(pair[0] for pair in found.values() if pair is not None))
    for engine in engines:
        engine.step_control.roll_back()
        engine.step_control.collect()
    norms: list[torch.Tensor] = []
    offloaded: dict[Any, list[Slot]] = {engine: [] for engine in engines}
    plain: list[torch.Tensor] = []
    for param, pair in found.items():
        if pair is None:
            if param.grad is not None:
                restride(param)
                plain.append(param.grad)
                norms.append(plain_norm(param))
        elif pair[0].gradients.has(pair[1]):
            offloaded[pair[0]].append(pair[1])
            norms.append(pair[0].gradients.norm(pair[1]))
    if not norms:
        return torch.zeros(())
    total = norm_of_norms(norms, engines[0].device if engines else norms[0].device)
    factor = torch.clamp(max_norm / (total + 1e-6), max=1.0)
    for gradient in plain:
        gradient.mul_(factor.to(gradient.device))
    for engine, slots in offloaded.items():
        engine.step_control.scale_gradients(slots, factor)
    return total


def select_top_k_gradients(model: nn.Module, fraction: float) -> list[Any]:
    """The layer groups with the largest gradient norm per element, as `VGPUAdamW.step(only=...)` and `prefetch` take
    them.

    Args:
        model: after a backward. Offloaded or plain.
        fraction: share of the groups that have gradients, in (0, 1]; at least one is returned.

    Returns:
        Keys such as ``'model/layers.3'`` for an offloaded model, parameters for a plain one, largest first.

    Raises:
        ConfigurationError: ``fraction`` out of range, or there are no gradients.
    """
    if not 0 < fraction <= 1:
        raise ConfigurationError(f"fraction {fraction} must be in (0, 1], e.g. 0.1 for the top tenth of the groups")
    found = [engine_and_slot(param) for param in model.parameters()]
    engines = list(dict.fromkeys(pair[0] for pair in found if pair is not None))
    ranked = [item for engine in engines for item in _rank_offloaded(engine)] if engines else _rank_plain(model)
    if not ranked:
        raise ConfigurationError("no parameter has a gradient: call backward() before selecting by gradient")
    ranked.sort(key=lambda item: -item[0])
    chosen = ranked[: max(1, math.ceil(fraction * len(ranked)))]
    return [key for _, keys in chosen for key in keys]


def _rank_offloaded(engine: Any) -> list[tuple[float, list[Any]]]:
    engine.step_control.collect()
    ranked = []
    for group in engine.groups:
        slots = [slot for slot in group.slots if engine.gradients.has(slot)]
        if slots:
            norms = [engine.gradients.norm(slot) for slot in slots]  # taken on level 0, or on the host
            density = _density(norms, sum(slot.num_elements for slot in slots), engine.device)
            ranked.append((density, [engine.key_of(group)]))
    return ranked


def _rank_plain(model: nn.Module) -> list[tuple[float, list[Any]]]:
    ranked = []
    for group in find_groups(model)[0]:
        params = [slot.param for slot in group.slots if slot.param.grad is not None]
        if params:
            gradients = [param.grad for param in params if param.grad is not None]
            norms = [torch.linalg.vector_norm(gradient, dtype=torch.float32) for gradient in gradients]
            density = _density(norms, sum(param.numel() for param in params), params[0].device)
            ranked.append((density, list(params)))
    return ranked


def _density(norms: list[torch.Tensor], num_elements: int, device: torch.device) -> float:
    """Root mean square of a group's gradient: groups of different sizes become comparable."""
    return float(norm_of_norms(norms, device)) / math.sqrt(num_elements)
