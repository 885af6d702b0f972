"""Precision per layer: each linear in bf16, two parts (8.5 bits) or nvfp4 (4.5), in as few bytes as a budget allows.

Measured is, for one changed linear at a time, the Kullback-Leibler divergence of the changed from the unchanged
predictions, which hardly varies and is never negative. All linears begin in nvfp4; the one that saves the most
divergence for a byte steps up, along the lower convex hull of its choices, until the sum is within the budget: the
greedy solution of the multiple-choice knapsack. While the real loss rises by more, the choice is made again, for less.
"""

import json
import math
import os
from collections.abc import Iterator, Mapping, Sequence
from contextlib import contextmanager, suppress
from dataclasses import dataclass, field
from functools import partial
from pathlib import Path
from typing import Any

import torch
from torch import Tensor, nn
from torch.nn import functional

from vblackwell.errors import ConfigurationError, CorruptData
from vblackwell.machine.lock import disk_error
from vblackwell.nn.convert.linears import find_linears, replace_modules, select_linears
from vblackwell.nn.linear.packed_linear import pack
from vblackwell.nn.linear.two_part import VBOptimizedLinear

BITS = {"nvfp4": 4.5, "two-part": 8.5, "bf16": 16.0}  # cheapest first
VERSION = 1
DEFAULT_BUDGET = 0.004
_ROUNDS = 6
Batches = Sequence[tuple[Tensor, Tensor]]
Shape = tuple[int, int]  # (N, K)


@dataclass(frozen=True)
class Sensitivity:
    """The unchanged mean cross entropy, and what each linear at each precision diverges by, in nats a token."""

    loss: float
    shapes: dict[str, Shape]
    divergence: dict[str, dict[str, float]]


@dataclass(frozen=True)
class Assignment:
    precisions: dict[str, str]  # 'bf16', 'two-part' or 'nvfp4'
    shapes: dict[str, Shape]
    measured: dict[str, float] = field(default_factory=dict)  # 'loss', 'loss_after', 'budget' of the calibration

    def __post_init__(self) -> None:
        unknown = sorted(set(self.precisions.values()) - set(BITS))
        wrong = f"precision {unknown[0]!r}" if unknown else "" if self.precisions else "no linears"
        if wrong or self.precisions.keys() != self.shapes.keys():
            said = f"an assignment with {wrong or 'a linear without a shape'}"
            raise ConfigurationError(f"{said}: each linear has a shape and one of {', '.join(BITS)}")

    @property
    def bits(self) -> float:
        sizes = {name: n * k for name, (n, k) in self.shapes.items()}
        return sum(BITS[self.precisions[name]] * size for name, size in sizes.items()) / sum(sizes.values())

    def names(self, precision: str) -> list[str]:
        return [name for name, given in self.precisions.items() if given == precision]

    def save(self, path: Path | str) -> None:
        """Write the file, whole or not at all, and its folder; DiskError if the disk refuses."""
        linears = {name: {"precision": p, "shape": list(self.shapes[name])} for name, p in self.precisions.items()}
        text = json.dumps({"version": VERSION, "measured": self.measured, "linears": linears}, indent=1)
        path = Path(path)
        part = path.with_name(f"{path.name}.part")
        try:
            path.parent.mkdir(parents=True, exist_ok=True)
            part.write_text(text + "\n", encoding="utf-8")
            os.replace(part, path)
        except OSError as error:
            with suppress(OSError):
                part.unlink()
            raise disk_error("writing", path, error) from error

    @classmethod
    def load(cls, path: Path | str) -> "Assignment":
        """Read the file; ConfigurationError if it cannot be read or has another version, CorruptData if it is none."""
        path = Path(path)
        if path.exists() and not path.is_file():  # a device may never end
            raise ConfigurationError(f"assignment {path} is no file: give the one that vb quantize --budget wrote")
        try:
            raw = json.loads(path.read_text(encoding="utf-8"))
            if raw["version"] != VERSION:
                raise ConfigurationError(f"{path} is of version {raw['version']!r}, not {VERSION}: make it again")
            linears: dict[str, Any] = raw["linears"]
            shapes = {name: (int(row["shape"][0]), int(row["shape"][1])) for name, row in linears.items()}
            measured = {name: float(value) for name, value in raw["measured"].items()}
            return cls({name: str(row["precision"]) for name, row in linears.items()}, shapes, measured)
        except ConfigurationError:
            raise
        except OSError as error:
            raise ConfigurationError(f"assignment {path} cannot be read: {error.strerror}") from error
        except (KeyError, TypeError, IndexError, AttributeError, ValueError, RecursionError) as error:
            raise CorruptData(f"{path} is no assignment of precisions: {error!r}; make it again") from error

    def check(self, shapes: Mapping[str, Shape], what: str) -> None:
        """Raises ConfigurationError where its linears are not among those of ``what``, by name and shape."""
        there = {name: "x".join(map(str, shape)) for name, shape in shapes.items()}
        misfits = [(name, shape) for name, shape in self.shapes.items() if shapes.get(name) != shape]
        wrong = [f"{name} {n}x{k} ({there.get(name, 'not there')})" for name, (n, k) in misfits]
        if wrong:
            found = f"{len(wrong)} of its {len(self.shapes)} linears do not fit, e.g. {', '.join(wrong[:2])}"
            remedy = "make one with vb quantize --budget, or give the model it was made of"
            raise ConfigurationError(f"the assignment is for another model than {what}: {found}; {remedy}")


def apply_assignment(model: nn.Module, assignment: Assignment, mode: str = "auto") -> list[str]:
    """Replace the linears that are not bf16, on their own parameters, in this mode of `Settings`; their names.
    ConfigurationError, and nothing changed, where one cannot be replaced.
    """
    found = find_linears(model)
    linears: dict[str, Any] = {name: model.get_submodule(name) for name in found}
    assignment.check({name: _shape(module) for name, module in linears.items()}, type(model).__name__)
    packed = {name: precision for name, precision in assignment.precisions.items() if precision != "bf16"}
    for name, precision in packed.items():
        if type(linears[name]) is not nn.Linear:
            raise ConfigurationError(f"{name} cannot be {precision}: {found[name]}")
    make = partial(VBOptimizedLinear.from_linear, mode=mode)
    replace_modules(model, {linears[name]: make(linears[name], precision=given) for name, given in packed.items()})
    return list(packed)


def assign_precision(
    model: nn.Module, batches: Batches, budget: float = DEFAULT_BUDGET, *, max_bits: float | None = None, **which: Any
) -> Assignment:
    """The cheapest precisions by which the calibration loss rises by at most ``budget``, a share of it, or the best of
    at most ``max_bits`` a weight; ``which`` are ``pattern`` and ``keep`` of `select_linears`.

    ``model`` takes inputs and returns logits (B, S, V), or a value with ``logits``; its weights change meanwhile.
    Batches are (inputs, targets (B, S) int64, -100 where there is none). ConfigurationError for what is out of range.
    """
    if max_bits is not None and not BITS["nvfp4"] <= max_bits <= BITS["bf16"]:
        raise ConfigurationError(f"max_bits {max_bits!r}: between {BITS['nvfp4']} and {BITS['bf16']}")
    if not 0 <= budget < math.inf:
        raise ConfigurationError(f"budget {budget!r} is the relative rise of the loss that is allowed: 0 or more")
    measured = measure_sensitivity(model, batches, **which)
    linears: dict[str, Any] = {name: model.get_submodule(name) for name in measured.shapes}

    def tried(chosen: dict[str, str]) -> Assignment:
        with _weights_in(linears, chosen):
            after = mean_loss(model, batches)
        return Assignment(chosen, measured.shapes, {"loss": measured.loss, "loss_after": after, "budget": budget})

    if max_bits is not None:
        return tried(choose(measured, math.inf, max_bits=max_bits))
    limit = allowed = budget * measured.loss
    for _ in range(_ROUNDS):
        found = tried(choose(measured, allowed))
        rise = found.measured["loss_after"] - measured.loss
        if rise <= limit:
            return found
        allowed *= 0.8 * limit / rise
    return tried(dict.fromkeys(measured.shapes, "bf16"))


@torch.no_grad()
def measure_sensitivity(model: nn.Module, batches: Batches, **which: Any) -> Sensitivity:
    """What each linear at each precision does to the predictions; arguments and errors as for `assign_precision`."""
    if not batches or not any(bool((targets != -100).any()) for _, targets in batches):
        raise ConfigurationError("the calibration data is empty: give at least one batch of inputs and targets")
    linears = select_linears(model, **which)
    divergence: dict[str, dict[str, float]] = {name: {} for name in linears}
    with evaluating(model):
        before = [_log_probabilities(model, inputs) for inputs, _ in batches]
        loss = _mean_loss(before, batches)
        if not math.isfinite(loss):
            raise ConfigurationError(f"the calibration loss is {loss}: the model or the data is broken, or too long")
        for name in linears:
            for precision in ("nvfp4", "two-part"):
                with _weights_in(linears, {name: precision}):
                    divergence[name][precision] = max(0.0, _divergence(model, before, batches))
            divergence[name]["bf16"] = 0.0
    return Sensitivity(loss, {name: _shape(linear) for name, linear in linears.items()}, divergence)


def choose(measured: Sensitivity, allowed: float, *, max_bits: float | None = None) -> dict[str, str]:
    """Precisions whose summed divergence is at most ``allowed`` nats, or that fill ``max_bits``."""
    sizes = {name: n * k for name, (n, k) in measured.shapes.items()}
    chosen = dict.fromkeys(measured.divergence, "nvfp4")
    total = sum(of["nvfp4"] for of in measured.divergence.values())
    held, budget = BITS["nvfp4"] * sum(sizes.values()), math.inf if max_bits is None else max_bits * sum(sizes.values())
    while total > allowed or max_bits is not None:
        steps = []
        for name, now in chosen.items():
            of = measured.divergence[name]
            for precision in list(of)[list(of).index(now) + 1 :]:
                more, saved = (BITS[precision] - BITS[now]) * sizes[name], of[now] - of[precision]
                if saved > 0 and held + more <= budget:
                    steps.append((saved / max(more, 1e-12), name, precision, saved, more))
        if not steps:
            break
        _, name, precision, saved, more = max(steps)
        chosen[name], total, held = precision, total - saved, held + more
    return chosen


@contextmanager
def evaluating(model: nn.Module) -> Iterator[None]:
    """Inside, all of the model is in eval mode; each module gets its own mode back, which need not be the model's."""
    training = [module for module in model.modules() if module.training]
    model.eval()
    try:
        yield
    finally:
        for module in training:
            module.training = True


@contextmanager
def _weights_in(linears: Mapping[str, nn.Linear], precisions: Mapping[str, str]) -> Iterator[None]:
    """Inside, linears compute with weights of other precisions; afterwards with their own memory again."""
    own = {name: linears[name].weight.data for name, precision in precisions.items() if precision != "bf16"}
    try:
        for name, weight in own.items():
            linears[name].weight.data = pack(weight, precisions[name], f"{name}.weight").dequantize()
        yield
    finally:
        for name, weight in own.items():
            linears[name].weight.data = weight


@torch.no_grad()
def mean_loss(model: nn.Module, batches: Batches) -> float:
    """The mean cross entropy of ``batches``, as for `assign_precision`."""
    with evaluating(model):
        return _mean_loss([_log_probabilities(model, inputs) for inputs, _ in batches], batches)


def _shape(linear: Any) -> Shape:
    weight = linear._parameters.get("weight")
    return (0, 0) if weight is None or weight.dim() != 2 else (weight.shape[0], weight.shape[1])


def _log_probabilities(model: nn.Module, inputs: Tensor) -> Tensor:
    out: Any = model(inputs)
    return functional.log_softmax(getattr(out, "logits", out).float(), -1)


def _mean_loss(log_probabilities: Sequence[Tensor], batches: Batches) -> float:
    total, count = 0.0, 0
    for log_p, (_, targets) in zip(log_probabilities, batches, strict=True):
        total += float(functional.nll_loss(log_p.flatten(0, 1), targets.flatten(), ignore_index=-100, reduction="sum"))
        count += int((targets != -100).sum())
    return total / count


def _divergence(model: nn.Module, before: Sequence[Tensor], batches: Batches) -> float:
    """Mean of KL(before || now) over targets that are there, nats."""
    total, count = 0.0, 0
    for log_p, (inputs, targets) in zip(before, batches, strict=True):
        each = (log_p.exp() * (log_p - _log_probabilities(model, inputs))).sum(-1)
        there = targets != -100
        total, count = total + float(each[there].double().sum()), count + int(there.sum())
    return total / count
