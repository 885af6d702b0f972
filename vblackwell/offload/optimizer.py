"""`VGPUAdamW`: AdamW whose states live in the stack next to the weights they belong to.

Plain parameters are stepped by torch's own fused kernels; those of a streamed model group by group in the background.
Clipping is exact, over both kinds together: the norm of per-parameter norms in optimizer order, then ``g *= min(1,
max_grad_norm / (norm + 1e-6))``, as `torch.nn.utils.clip_grad_norm_` does.
"""

import functools
import inspect
import math
from collections.abc import Callable, Collection, Iterable, Iterator, Sequence
from contextlib import contextmanager, nullcontext
from numbers import Integral, Real
from typing import Any

import torch
from torch import Tensor, nn

from vblackwell.errors import ConfigurationError, Unsupported
from vblackwell.memory.transfer import current_stream
from vblackwell.offload import resident
from vblackwell.offload.engine import Offload, locked
from vblackwell.offload.layout.groups import MOMENTS, Slot, find_groups
from vblackwell.offload.movement.gradients import after_norms, norm_of_norms
from vblackwell.offload.movement.state import Hyper, defer_sigint
from vblackwell.offload.parameters import engine_and_slot
from vblackwell.offload.resident import Resident, resident_of, restride, updates_here
from vblackwell.offload.state import read_slot_states, write_slot_states

# Without the profiling and grad-mode layers that torch puts around each class's step: ours has them.
_ADAMW_STEP = inspect.unwrap(torch.optim.AdamW.step)


_hyper = functools.lru_cache(64)(Hyper)  # asked for every parameter, several times a step


def _refuse_other_than_numbers(values: dict[str, Any]) -> None:
    """Raises ConfigurationError; torch takes learning rates and betas in tensors too."""
    for name, value in values.items():
        if not isinstance(value, (Real, Tensor)):
            raise ConfigurationError(f"{name}={value!r} is no number: give one in AdamW's range")


def _selected(engines: Sequence[Offload], only: Iterable[Any]) -> set[Tensor]:
    """The parameters that a step is restricted to; ConfigurationError if a key names no group of the models."""
    by_key = {engine.key_of(group): group for engine in engines for group in engine.groups}
    params: set[Tensor] = set()
    for item in only:
        if not isinstance(item, Tensor) and item not in by_key:
            known = next(iter(by_key), None)
            raise ConfigurationError(f"only={item!r} is neither a parameter nor a group such as {known!r}")
        params.update([item] if isinstance(item, Tensor) else (slot.param for slot in by_key[item].slots))
    return params


class VGPUAdamW(torch.optim.AdamW):
    """AdamW for offloaded and plain parameters alike; arguments and results of `torch.optim.AdamW(fused=True)`.

    Args:
        params: parameters or parameter groups. Managed parameters must already be offloaded.
        max_grad_norm: clip the global 2-norm to this at `step`. With it (``inf`` measures and never clips) a step whose
            gradients are not finite changes nothing and sets `skipped`; without it nothing is measured, as in PyTorch.
        update_in_backward: start a group's update after its backward, with an exact rollback (`StepControl.roll_back`).
        undo: keep what a rollback of updates after the backward needs. False is a promise that every backward is
            followed by its `step` with the hyperparameters as they are: it saves host memory (14 bytes a parameter with
            bf16 weights) and gradients' way to host memory. Should the step not come, `StepAbandoned` is raised. Such
            an update consumes its gradient: after `step` there is none, as after `zero_grad`. Cannot be had with
            ``max_grad_norm``.
        accumulation_steps: forwards of the whole model per `step`; only with ``update_in_backward`` must it be right
            for speed.
        loss_scale: the factor that the loss was multiplied by, a power of two; gradients are divided by it. May be
            changed between steps through the attribute of this name.

    Attributes:
        skipped: whether the last `step` changed nothing because a gradient was not finite.

    Raises:
        ConfigurationError: a number outside its range, what is no number, or no parameters.
        Unsupported: an earlier optimizer has some of the parameters of an offloaded model and others; one that has no
            others is replaced, and raises when it is used.
    """

    def __init__(
        self,
        params: Any,
        lr: float = 1e-3,
        betas: tuple[float, float] = (0.9, 0.999),
        eps: float = 1e-8,
        weight_decay: float = 1e-2,
        *,
        max_grad_norm: float | None = None,
        update_in_backward: bool = False,
        undo: bool = True,
        accumulation_steps: int = 1,
        loss_scale: float = 1.0,
    ) -> None:
        singles = {"lr": lr, "eps": eps, "weight_decay": weight_decay, "loss_scale": loss_scale}
        _refuse_other_than_numbers(singles | ({} if max_grad_norm is None else {"max_grad_norm": max_grad_norm}))
        if not isinstance(betas, Sequence) or isinstance(betas, str) or len(betas) != 2:
            raise ConfigurationError(f"betas={betas!r} is no pair: give two numbers, e.g. (0.9, 0.999)")
        _refuse_other_than_numbers({f"betas[{index}]": beta for index, beta in enumerate(betas)})
        if not lr >= 0 or math.isinf(lr):
            raise ConfigurationError(f"lr {lr} is not a learning rate: give a finite number >= 0, e.g. 3e-4")
        if max_grad_norm is not None and not max_grad_norm > 0:
            raise ConfigurationError(f"max_grad_norm {max_grad_norm} must be > 0 (or None, for gradients as they are)")
        if not undo and max_grad_norm is not None:
            raise ConfigurationError(
                "undo=False makes updates final before the norm is known: use undo=True, or max_grad_norm=None"
            )
        if not isinstance(accumulation_steps, Integral) or accumulation_steps < 1:
            raise ConfigurationError(f"accumulation_steps {accumulation_steps!r} must be a whole number >= 1")
        if not isinstance(params, Tensor) and not (params := list(params)):  # torch refuses a tensor by itself
            raise ConfigurationError(
                "there are no parameters to update: every one was left out, or the whole model is frozen; "
                "give those to train requires_grad=True before the optimizer is made"
            )
        self.max_grad_norm, self.update_in_backward, self.undo = max_grad_norm, update_in_backward, undo
        self.accumulation_steps, self.loss_scale = int(accumulation_steps), loss_scale
        self._norm: Tensor | None = None
        self._group_of: dict[Tensor, dict[str, Any]] = {}
        self._slots: dict[Tensor, Slot] = {}
        self._engines: list[Offload] = []
        self.skipped = self._updates_here = self._replaced = self._adopts = False
        super().__init__(params, lr=lr, betas=betas, eps=eps, weight_decay=weight_decay, fused=True)
        # What torch refuses it has refused by now, while an earlier optimizer still has its states.
        self._replace_earlier()
        self._adopts = True
        self._adopt(self.param_groups)

    def _replace_earlier(self) -> None:
        """An earlier optimizer loses all its parameters and their states; Unsupported: it has others as well."""
        wanted = {param for group in self.param_groups for param in group["params"]}
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
                "this VGPUAdamW was replaced by another for its parameters, and has no states: use that one"
            )

    def _check_adopted(self) -> None:
        """Raises Unsupported where a model went into a stack after this optimizer was made: its states are not there.

        The parameters' dictionaries are looked at as they are, for every step does this.
        """
        held = map(vars, self._group_of)
        engines = {each.get("_vb_binding") or each.get("_vb_resident") for each in held}
        for engine in engines:
            if engine is not None and not any(optimizer is self for optimizer in engine.optimizers()):
                raise Unsupported(
                    f"model {engine.name!r} went into its stack after this VGPUAdamW was made, so nothing was updated: "
                    "make a new VGPUAdamW of its parameters and load_state_dict this one's state_dict() into it"
                )

    def add_param_group(self, param_group: dict[str, Any]) -> None:
        self._check_current()
        super().add_param_group(param_group)
        if self._adopts:
            try:
                self._adopt(self.param_groups[-1:])
            except BaseException:
                for param in self.param_groups.pop()["params"]:
                    self._group_of.pop(param, None)
                    self._slots.pop(param, None)
                raise

    def _adopt(self, groups: list[dict[str, Any]]) -> None:
        """Take ``groups``, all of a model at once: where its states are is one decision."""
        fresh: dict[Offload, list[Slot]] = {}
        residents: dict[Resident, list[Tensor]] = {}
        self._group_of |= (group_of := {param: group for group in groups for param in group["params"]})
        for param in group_of:
            if (found := engine_and_slot(param)) is not None:
                self._slots[param] = found[1]
                fresh.setdefault(found[0], []).append(found[1])
            elif (holder := resident_of(param)) is not None:
                residents.setdefault(holder, []).append(param)
            self._updates_here |= updates_here(param)
        for holder, held in residents.items():
            self.state.update(holder.adopt_optimizer(self, held))
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
        return _hyper(*map(float, (group["lr"], beta1, beta2, group["eps"], group["weight_decay"])))

    # -- the step ----------------------------------------------------------------------------------------------------

    def step(  # pyright: ignore[reportIncompatibleMethodOverride]
        self, closure: Callable[[], Any] | None = None, *, only: Iterable[Any] | None = None
    ) -> Any:
        """One AdamW step. Updates of offloaded groups run on in the background, each until its group is next used.
        ``only``: keys from `select_top_k_gradients`, or parameters: update (and measure) just these.

        Raises Unsupported, and changes nothing, where a model went into a stack after the optimizer was made.
        """
        self._check_current()
        self._check_adopted()
        ours = self._engines or self._updates_here or self.max_grad_norm is not None or self.loss_scale != 1.0
        if only is None and not ours:
            with torch.no_grad():
                return _ADAMW_STEP(self, closure)  # at torch's cost
        loss = None
        if closure is not None:
            with torch.enable_grad():
                loss = closure()
        with torch.no_grad(), locked(self._engines):
            self._step(None if only is None else _selected(self._engines, only))
        return loss

    def _step(self, only: set[Tensor] | None) -> None:
        if self._updates_here:
            for param in self._group_of:
                restride(param)
        self.skipped = False
        for engine in self._engines:
            engine.worker.check_gradients()
        factor = None
        if self.loss_scale != 1.0:
            factor = torch.tensor(1.0 / self.loss_scale, dtype=torch.float32, device="cpu")
        if self.max_grad_norm is not None:
            factor = self._measure(only)
        if self.skipped:
            for engine in self._engines:
                engine.step_control.skip_step()
            return
        steps = [engine.step_control for engine in self._engines]
        asked = [step.prepare(lambda slot: only is None or slot.param in only, factor) for step in steps]
        with defer_sigint():  # all groups of all models, or none
            for step, jobs in zip(steps, asked, strict=True):
                step.commit(jobs, factor)
            self._step_plain(only, factor)

    def _measure(self, only: set[Tensor] | None) -> Tensor | None:
        """The global norm into `grad_norm`; the factor that clips, None if that is 1."""
        assert self.max_grad_norm is not None
        _collect(self._engines)
        streamed = self._engines and len(self._slots) == len(self._group_of)  # no gradient is still being made here
        collectors = [engine.gradients for engine in self._engines] if streamed else []
        with after_norms(collectors, self._engines[0].device) if streamed else nullcontext():
            params = (param for param in self._group_of if only is None or param in only)
            total, measured = _measured(params, self._engines)
            inverse_scale = 1.0 / self.loss_scale
            self._norm = total = total if inverse_scale == 1.0 else total * inverse_scale
            if not measured:
                return None
            factor = torch.clamp(self.max_grad_norm / (total + 1e-6), max=1.0) * inverse_scale
            # Both at once: every copy to the host takes its turn after one of a gradient or of states.
            self._norm, factor = _on_host(torch.stack((total, factor))).unbind()
            self.skipped = not bool(torch.isfinite(self._norm))
            return None if factor == 1.0 else factor

    def _step_plain(self, only: set[Tensor] | None, factor: Tensor | None) -> None:
        torchs: set[Tensor] = set()
        for param, group in self._group_of.items():
            if param in self._slots or param.grad is None or (only is not None and param not in only):
                continue
            if updates_here(param):
                resident.update_resident(param, param.grad, self.state[param], self._hyper(group), factor)
            else:
                torchs.add(param)
                if factor is not None:
                    param.grad.mul_(factor.to(param.grad.device))
        if torchs:
            with self._without(self._group_of.keys() - torchs):
                _ADAMW_STEP(self)

    @contextmanager
    def _without(self, params: Collection[Tensor]) -> Iterator[None]:
        before = [(group, group["params"]) for group in self.param_groups]
        try:
            if params:
                for group, everything in before:
                    group["params"] = [param for param in everything if param not in params]
            yield
        finally:
            for group, everything in before:
                group["params"] = everything

    def zero_grad(self, set_to_none: bool = True) -> None:
        """Forget all gradients, and every update that was started for a step that has not come."""
        self._check_current()
        if not self._engines:
            return super().zero_grad(set_to_none)
        with locked(self._engines):
            for engine in self._engines:
                control = engine.step_control
                control.begin_window()
                if held := [slot for slot in self._slots_of(engine) if engine.gradients.has(slot)]:
                    control.clear_gradients(held, to_zero=not set_to_none)
                engine.worker.forgive()
        with self._without(self._slots.keys()):
            super().zero_grad(set_to_none)

    # -- states ------------------------------------------------------------------------------------------------------

    def state_dict(self) -> dict[str, Any]:
        """As `torch.optim.AdamW` would write it; states of offloaded parameters come as CPU tensors."""
        self._check_current()
        found = super().state_dict()
        index_of = {param: index for index, param in enumerate(self._group_of)}
        for param, state in self.state.items():
            found["state"][index_of[param]] = resident.plain_state(param, state)
        for engine in self._engines:
            engine.finish()
            engine.worker.check_whole()
            for group in engine.groups:
                for slot, state in read_slot_states(engine, group):
                    found["state"][index_of[slot.param]] = state
        return found

    def load_state_dict(self, state_dict: dict[str, Any]) -> None:
        """Accepts what `torch.optim.AdamW` or this class wrote for the same parameters, wherever they lived."""
        self._check_current()
        params, loaded = list(enumerate(self._group_of)), dict[int, dict[str, Tensor]](state_dict["state"])
        slot_of = {index: self._slots[param] for index, param in params if param in self._slots}
        # Of what is updated here, states stay in their own types: torch would make moments as narrow as the weights.
        held_of = {index: (param, self.state[param]) for index, param in params if updates_here(param)}
        states = {slot_of[index]: state for index, state in loaded.items() if index in slot_of}
        plain = {index: state for index, state in loaded.items() if index not in slot_of and index not in held_of}
        super().load_state_dict({**state_dict, "state": plain})
        self._group_of = {param: group for group in self.param_groups for param in group["params"]}
        for index, (param, held) in held_of.items():
            resident.write_state(param, held, loaded.get(index))
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
        for slot in self._slots_of(engine):
            del self._slots[slot.param]
        self._engines.remove(engine)

    def _slots_of(self, engine: Offload) -> list[Slot]:
        return [slot for param, slot in self._slots.items() if engine_and_slot(param) == (engine, slot)]

    @property
    def grad_norm(self) -> float | None:
        """The global 2-norm of the gradients at the last `step` before clipping; None without ``max_grad_norm``."""
        return None if self._norm is None else float(self._norm)


def _engine_of(param: Tensor) -> Offload | Resident | None:
    found = engine_and_slot(param)
    return resident_of(param) if found is None else found[0]


# -- gradients between backward and step -------------------------------------------------------------------------------


@torch.no_grad()
def clip_grad_norm_(model: nn.Module | Iterable[Tensor], max_norm: float) -> Tensor:
    """Scale the gradients of ``model`` (or of some parameters) in place to a global 2-norm of at most ``max_norm``.

    Call it between backward and `step`, instead of `torch.nn.utils.clip_grad_norm_` and instead of ``max_grad_norm``.
    Returns the norm before clipping, an fp32 scalar. Not finite gradients are scaled as torch does; read the value.
    """
    params = list(dict.fromkeys(model.parameters() if isinstance(model, nn.Module) else model))
    engines = list(dict.fromkeys(found[0] for param in params if (found := engine_and_slot(param)) is not None))
    for engine in engines:
        engine.step_control.roll_back()
    for param in params:
        restride(param)
    _collect(engines)
    total, measured = _measured(params, engines)
    factor = torch.clamp(max_norm / (total + 1e-6), max=1.0)
    offloaded: dict[Offload, list[Slot]] = {}
    for param, _ in measured:
        if (found := engine_and_slot(param)) is not None:
            offloaded.setdefault(found[0], []).append(found[1])
        elif param.grad is not None:
            param.grad.mul_(factor.to(param.grad.device))
    on_host = _on_host(factor) if offloaded else factor
    for engine, slots in offloaded.items():
        engine.step_control.scale_gradients(slots, on_host)
    return total


def _on_host(values: Tensor) -> Tensor:
    """``values`` in pinned host memory: as long as the driver waits in a copy to any other, the worker would wait with
    it, whose tasks let go of events.
    """
    if not values.is_cuda:
        return values.cpu()
    found = torch.empty_like(values, device="cpu", pin_memory=True)
    found.copy_(values, non_blocking=True)
    current_stream(values.device).synchronize()
    return found


def _collect(engines: Iterable[Offload]) -> None:
    for engine in engines:
        engine.step_control.collect()


def _measured(params: Iterable[Tensor], engines: Sequence[Offload]) -> tuple[Tensor, list[tuple[Tensor, Tensor]]]:
    """The global 2-norm of the gradients of ``params``, which are collected, and those that have one, in order, with
    its norm."""
    measured: list[tuple[Tensor, Tensor]] = []
    for param in params:
        found = engine_and_slot(param)
        if found is not None and found[0].gradients.has(found[1]):
            measured.append((param, found[0].gradients.norm(found[1])))
        elif found is None and param.grad is not None:
            measured.append((param, resident.plain_norm(param)))
    norms = [norm for _, norm in measured]
    if not norms:
        return torch.zeros((), dtype=torch.float32, device="cpu"), measured
    return norm_of_norms(norms, engines[0].device if engines else norms[0].device), measured


def select_top_k_gradients(model: nn.Module, fraction: float) -> list[Any]:
    """The layer groups with the largest gradient norm per element, for `VGPUAdamW.step(only=...)` and `prefetch`: keys
    such as ``'model/layers.3'`` of an offloaded model, parameters of a plain one, after a backward, largest first.

    ``fraction``: share of the groups that have gradients, in (0, 1]; at least one is returned. Raises
    ConfigurationError: it is out of range, or there are no gradients, as with ``undo=False``.
    """
    if not 0 < fraction <= 1:
        raise ConfigurationError(f"fraction {fraction} must be in (0, 1], e.g. 0.1 for the top tenth of the groups")
    params = list(model.parameters())
    engines = list(dict.fromkeys(found[0] for param in params if (found := engine_and_slot(param)) is not None))
    sources = [engine.step_control.source for engine in engines]
    if any(source is not None and source.update_in_backward and not source.undo for source in sources):
        raise ConfigurationError("undo=False consumes gradients in backward, so none are left to rank: use undo=True")
    _collect(engines)
    norms, ranked = dict(_measured(params, engines)[1]), list[tuple[float, list[Any]]]()
    offloaded = [(engine, group) for engine in engines for group in engine.groups]
    for engine, group in offloaded or [(None, group) for group in find_groups(model)[0]]:
        slots = [slot for slot in group.slots if slot.param in norms]
        if slots:  # ranked by the root mean square: groups of different sizes become comparable
            held = [norms[slot.param] for slot in slots]
            norm = float(norm_of_norms(held, held[0].device if engine is None else engine.device))
            keys = [slot.param for slot in slots] if engine is None else [engine.key_of(group)]
            ranked.append((norm / math.sqrt(sum(slot.num_elements for slot in slots)), keys))
    if not ranked:
        raise ConfigurationError("no parameter has a gradient: call backward() before selecting by gradient")
    ranked.sort(key=lambda item: -item[0])
    return [key for _, keys in ranked[: max(1, math.ceil(fraction * len(ranked)))] for key in keys]
