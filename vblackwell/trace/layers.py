"""Traces of models with many equal layers, from traces of the same model with few.

Where two or more kinds of layers take turns, a layer here is one turn of them. Equal layers allocate and compute the
same, one after another: a trace of three layers says what a fourth adds. While it is recorded, each event is given to a
layer: in forward to the last one whose storages an operator has read, in backward to the first; in lists of an
optimizer to the layer of the parameter. What a middle layer does is repeated; where it releases what a neighbour made,
of the copy's neighbour. `lengthened` repeats it once first and compares that with a trace of one layer more: unless
both are equal, to the event (but for the order of what is released at once), it gives nothing, and the model is traced
whole. Layers that are computed again take four and five: the first product of backward may be the middle layer's of
three.

`change_alike` makes other layers of a model's by the same equality: of the first ones, for all.
"""

from collections import OrderedDict
from collections.abc import Callable, Iterable, Iterator, Sequence
from contextlib import contextmanager
from copy import deepcopy
from dataclasses import dataclass, replace
from functools import partial
from itertools import groupby
from types import MethodType
from typing import Any
from unittest import mock

import torch
from torch import Tensor, nn

from vblackwell.trace.work import Work, of_longer_lists

FEW, FEW_RECOMPUTED = (3, 4), (4, 5)
MAX_TURN = 6  # layers of one turn, of which Gemma 3 has so many
MIDDLE = 1  # the layer that is repeated
Layer = int | None  # None: of no layer
_KNOWN = ("transformers.models.", "vblackwell.nn.decoder.")  # others' code may do anything by a layer's number


@dataclass(frozen=True)
class Recording:
    """What a trace of few layers saw, as in `Trace`, with the layer of each event, storage (at its birth) and work."""

    sizes: Sequence[int]
    categories: Sequence[str]
    events: Sequence[int]
    marks: Sequence[tuple[int, int, str]]
    work: Sequence[Work]
    event_layers: Sequence[Layer]
    storage_layers: Sequence[Layer]
    work_layers: Sequence[Layer]


class _Differs(Exception):
    """The middle layer does what cannot be repeated."""


class _NoConfig:
    """Of a part of a model that has none."""


@dataclass(frozen=True)
class Layers:
    """Of a decoder: nothing but their number tells those apart that are ``turn`` places from each other."""

    every: nn.ModuleList
    turn: int

    def __len__(self) -> int:
        return len(self.every) // self.turn

    @contextmanager
    def only_first(self, count: int) -> Iterator[None]:
        """Let the model have the layers of ``count`` turns."""
        kept = dict(list(self.every._modules.items())[: count * self.turn])
        with mock.patch.object(self.every, "_modules", kept):
            yield

    def numbers(self) -> dict[int, int]:
        """The number of its turn by the id of each parameter and buffer."""
        numbered = [(number // self.turn, layer) for number, layer in enumerate(self.every)]
        return {id(each): turn for turn, layer in numbered for each in (*layer.parameters(), *layer.buffers())}


def equal_layers(model: Any) -> Layers | None:
    """The layers of a decoder, ours or of transformers, if they are equal, each to the others or all that are a turn of
    2 to 6 apart, and so many that few of them are a part."""
    around = _modules_of(model, nn.ModuleList)
    outer = [each for each in around if isinstance(each, nn.ModuleList)]
    if not type(model).__module__.startswith(_KNOWN) or len(outer) != 1:
        return None
    layers, config = outer[0], vars(getattr(model, "config", _NoConfig))
    # What a model reads of its configuration, or of that of its part that reads text, by a layer's number.
    parts = [config, *(vars(each) for each in config.values() if hasattr(each, "model_type"))]
    # Outputs of layers are recorded by hooks, which a first forward puts on those layers that there are then, for good.
    if any(name.lstrip("_").startswith("output_") and value for part in parts for name, value in part.items()):
        return None
    lists = [each for part in parts for each in part.values() if isinstance(each, (list, tuple))]
    lists = [each for each in lists if len(each) == len(layers)]
    own = [_tensors_of(_modules_of(layer)) for layer in layers]
    others = _tensors_of(around)
    if sum(map(len, own)) != len(set().union(*own)) or others & set().union(*own):
        return None
    for turn in range(1, MAX_TURN + 1):
        count, rest = divmod(len(layers), turn)
        turns = rest == 0 and count > sum(FEW) and all(each == each[:turn] * count for each in lists)
        if turns and all(_same(layers[number % turn], each) for number, each in enumerate(layers)):
            return Layers(layers, turn)
    return None


def _modules_of(model: nn.Module, whole: type | tuple[()] = ()) -> list[nn.Module]:
    """Those of ``model``, without what is inside a ``whole``: faster than `nn.Module.modules`, which says names too."""
    found, left = dict[int, nn.Module](), [model]
    while left:
        each = left.pop()
        if id(each) not in found:
            found[id(each)] = each
            if not isinstance(each, whole):
                left += [inner for inner in each._modules.values() if inner is not None]
    return list(found.values())


def _tensors_of(modules: Iterable[nn.Module]) -> set[int]:
    """The id of each parameter and buffer."""
    both = (each for module in modules for each in (*module._parameters.values(), *module._buffers.values()))
    return {id(each) for each in both if each is not None}


# A number by which a layer finds its part of a cache, and what peft remembers of where a linear was.
_PLACES = {("layer_idx", int), ("layer", int), ("target_name", str)}
_PLAIN = (int, float, str, bool, type(None), torch.dtype, torch.device)
_CONTAINERS = (list, tuple, set, dict, OrderedDict)


def _same(one: Any, other: Any) -> bool:
    if one is other:
        return True
    if type(one) is not type(other):
        return False
    if type(one) in _CONTAINERS and not one:
        return not other
    if isinstance(one, nn.Module):
        return _same(one.__dict__, other.__dict__)
    if isinstance(one, dict):
        alike = list(one) == list(other)
        return alike and all(
            each is other[name] or (name, type(each)) in _PLACES or _same(each, other[name])
            for name, each in one.items()
        )
    if isinstance(one, (list, tuple)):
        return len(one) == len(other) and all(map(_same, one, other))
    if isinstance(one, partial):  # activations are some
        return one.func is other.func and _same(one.args, other.args) and _same(one.keywords, other.keywords)
    return _form(one) == _form(other) if isinstance(one, Tensor) else isinstance(one, (set, *_PLAIN)) and one == other


def _form(tensor: Tensor) -> tuple[Any, ...]:
    return tensor.shape, tensor.stride(), tensor.dtype, tensor.device, tensor.requires_grad


def few_of(model: nn.Module, layers: Layers) -> tuple[int, int]:
    """How many of its ``layers`` are traced to know the rest."""
    recomputed = any(getattr(each, "gradient_checkpointing", False) for each in (model, layers.every[0]))
    return FEW_RECOMPUTED if recomputed else FEW


def change_alike(model: nn.Module, change: Callable[[nn.Module], object]) -> None:
    """``change`` the ``model``, which is on meta, in place and for good: of equal layers the first ones, whose copies
    the others become. ``change`` must do the same to all of them."""
    layers = equal_layers(model)
    if layers is None:
        change(model)
        return
    every, turn = layers.every, layers.turn
    with layers.only_first(1):
        change(model)
        first = list(every)
        inside = {id(each) for layer in first for each in layer.modules()}
        outside: dict[int, Any] = {id(each): each for each in model.modules() if id(each) not in inside}
    for number in range(len(every)):
        every[number] = first[number] if number < turn else _copy_of(first[number % turn], dict(outside))
        for each in every[number].modules():
            for name, kind in _PLACES:
                if kind is int and vars(each).get(name) == number % turn:
                    setattr(each, name, number)


def copy_on_meta(model: nn.Module) -> Any:
    """A copy of a module on meta in a tenth of `copy.deepcopy`'s time: what is neither module, tensor nor a plain
    container, such as a configuration, is shared."""
    return _copy_of(model, {})


def _copy_of(value: Any, copies: dict[int, Any]) -> Any:
    if type(value) in _PLAIN or type(value) in _CONTAINERS and not value:
        return value if type(value) in _PLAIN else type(value)()
    if id(value) in copies:
        return copies[id(value)]
    if isinstance(value, nn.Module):
        copies[id(value)] = made = object.__new__(type(value))
        own = vars(made)
        for name, each in vars(value).items():
            own[name] = each if type(each) in _PLAIN else _copy_of(each, copies)
    elif type(value) in (Tensor, nn.Parameter):
        made = torch.empty_strided(value.size(), value.stride(), dtype=value.dtype, device="meta")
        made = nn.Parameter(made, value.requires_grad) if isinstance(value, nn.Parameter) else made
        vars(made).update(vars(value))
    elif isinstance(value, MethodType):  # a layer's own is its copy's own
        made = MethodType(value.__func__, _copy_of(value.__self__, copies))
    elif type(value) in _CONTAINERS[:3]:
        made = type(value)(_copy_of(each, copies) for each in value)
    elif type(value) in _CONTAINERS:
        made = type(value)((name, _copy_of(each, copies)) for name, each in value.items())
    elif isinstance(value, (Tensor, *_CONTAINERS)):
        made = deepcopy(value, copies)
    else:
        made = value
    copies[id(value)] = made
    return made


def lengthened(few: Recording, one_more: Recording, more: int) -> Recording | None:
    """What a model does with ``more`` layers than in ``few``, where ``one_more`` has another; None: not known."""
    try:
        work = _lengthened_work(few, one_more, more)
        tried = _lengthened_events(few, 1)
        expected = one_more.sizes, one_more.categories, one_more.events, one_more.marks
        if _by_birth(*tried) != _by_birth(*expected):
            return None
        sizes, categories, events, marks = _lengthened_events(few, more)
    except _Differs:
        return None
    return replace(one_more, sizes=sizes, categories=categories, events=events, marks=marks, work=work)


def _by_birth(
    sizes: Sequence[int], categories: Sequence[str], events: Sequence[int], marks: Sequence[Any]
) -> tuple[tuple[Any, ...], ...]:
    """The same with what is released at once in the order in which it was made: interpreters may choose another."""
    starts, found, released = {start for start, _, _ in marks}, list[int](), list[int]()
    for at, event in enumerate(events):
        if event >= 0 or at in starts:
            found += sorted(released)
            released.clear()
        (found if event >= 0 else released).append(event)
    return tuple(sizes), tuple(categories), tuple(found + sorted(released)), tuple(marks)


def _runs(layers: Sequence[Layer]) -> Iterator[tuple[Layer, range]]:
    end = 0
    for layer, run in groupby(layers):
        start, end = end, end + sum(1 for _ in run)
        yield layer, range(start, end)


def _lengthened_work(few: Recording, one_more: Recording, more: int) -> tuple[Work, ...]:
    def of_no_layer(recording: Recording) -> list[Sequence[Work]]:
        runs = _runs(recording.work_layers)
        return [recording.work[run.start : run.stop] for layer, run in runs if layer is None]

    def repeated(times: int) -> tuple[Work, ...]:
        found, rest = [], zip(of_no_layer(few), of_no_layer(one_more), strict=False)
        for layer, run in _runs(few.work_layers):
            if layer is None:
                found += _longer(*next(rest, ((), ())), times)
            else:
                found += list(few.work[run.start : run.stop]) * (1 + times * (layer == MIDDLE))
        return tuple(found)

    if repeated(1) != tuple(one_more.work):
        raise _Differs
    return repeated(more)


def _longer(few: Sequence[Work], one_more: Sequence[Work], more: int) -> list[Work]:
    """What is done for all parameters at once: longer lists, and more of what comes once for each."""
    found: list[Work] = []
    both = [[(each, sum(1 for _ in run)) for each, run in groupby(work)] for work in (few, one_more)]
    if len(both[0]) != len(both[1]):
        raise _Differs
    for (one, count), (other, longer_count) in zip(*both, strict=True):
        longer = one if one == other else of_longer_lists(one, other, more)
        if longer is None:
            raise _Differs
        found += [longer] * (count + more * (longer_count - count))
    return found


class _Counterparts:
    """Storages that neighbouring layers make at the same place of a phase: counted from the side on which the neighbour
    meets the middle layer, because what comes before all layers and after them counts as the outer ones'."""

    def __init__(self, few: Recording) -> None:
        self._few = few
        self._made: dict[tuple[Layer, int], list[int]] = {}
        self._phase: list[int] = []
        ends = [start for start, _, _ in few.marks[1:]] + [len(few.events)]
        for number, ((start, _, _), end) in enumerate(zip(few.marks, ends, strict=True)):
            for event in few.events[start:end]:
                if event >= 0:
                    self._phase.append(number)
                    self._made.setdefault((few.storage_layers[event], number), []).append(event)

    def in_middle(self, storage: int) -> int:
        maker, phase = self._few.storage_layers[storage], self._phase[storage]
        there, here = self._made[maker, phase], self._made.get((MIDDLE, phase), [])
        is_later = (maker or 0) > MIDDLE
        from_end = is_later if self._few.marks[phase][2] == "backward" else not is_later
        at = there.index(storage) - (len(there) if from_end else 0)
        if not -len(here) <= at < len(here) or self._few.sizes[here[at]] != self._few.sizes[storage]:
            raise _Differs
        return here[at]


def _lengthened_events(few: Recording, more: int) -> tuple[tuple[Any, ...], ...]:
    """Sizes, categories, events and marks with the middle layer ``more`` times more often."""
    sizes: list[int] = []
    categories: list[str] = []
    events: list[int] = []
    first: list[int] = []  # where each event of ``few`` comes first
    numbers: dict[tuple[int, Layer], int] = {}  # by storage, and by copy of the middle layer
    counterparts = _Counterparts(few)

    def released(storage: int, killer: Layer, copy: Layer) -> int:
        maker = few.storage_layers[storage]
        key: tuple[int, Layer] = storage, None
        if copy is None and maker == MIDDLE:
            if killer not in (MIDDLE - 1, MIDDLE + 1):
                raise _Differs
            key = storage, 0 if killer < MIDDLE else more
        elif copy is not None and maker is not None:
            whose = copy + maker - MIDDLE
            if 0 <= whose <= more:
                key = (storage if maker == MIDDLE else counterparts.in_middle(storage)), whose
        if key not in numbers:
            raise _Differs
        return numbers.pop(key)  # a copy that releases what another has released

    runs = list(_runs(few.event_layers))
    for at, (layer, run) in enumerate(runs):
        copies: Sequence[Layer] = (None,)
        if layer == MIDDLE:
            around = runs[at - 1][0] if at else None, runs[at + 1][0] if at + 1 < len(runs) else None
            falls = around[0] == MIDDLE + 1 or (around[0] is None and around[1] == MIDDLE - 1)
            copies = range(more, -1, -1) if falls else range(more + 1)
        first.extend(range(len(events), len(events) + len(run)))
        for copy in copies:
            for event in few.events[run.start : run.stop]:
                if event >= 0:
                    numbers[event, copy] = len(sizes)
                    events.append(len(sizes))
                    sizes.append(few.sizes[event])
                    categories.append(few.categories[event])
                else:
                    events.append(~released(~event, layer, copy))
    first.append(len(events))
    marks = tuple((first[event], step, phase) for event, step, phase in few.marks)
    return tuple(sizes), tuple(categories), tuple(events), marks
