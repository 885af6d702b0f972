"""AdamW on the CPU in one pass over memory, sums of gradients, and masters that are split: C, by threads of its own,
without the interpreter's lock; where there is no C compiler, torch's operations, which take two to three times as long
and the lock.

Both have the bits of `adamw_piece`: the C is asked once, in all its types, and not used where it differs. An update
that may have to be taken back writes new states next to the old: past the caches, that is as fast as in place (26 bytes
a parameter with a split master; torch also reads what it overwrites).
"""

import ctypes
import functools
import itertools
import os
import warnings
from collections.abc import Callable, Sequence
from dataclasses import dataclass, replace
from pathlib import Path
from typing import Any, NamedTuple

import torch
from torch import Tensor

from vblackwell.errors import Unsupported
from vblackwell.kernels.optimizer.adamw import CHUNK, GRADIENTS, AdamWStep, Then, adamw_piece, torch_order
from vblackwell.kernels.optimizer.adamw import split as split_by_torch
from vblackwell.kernels.runtime.host_compiler import shared_library

SOURCE = Path(__file__).with_name("adamw.c")
OTHER_THREADS = 3  # that are busy while updates run: two that launch the model's kernels, one that hands out updates


@functools.cache
def update_threads() -> int:
    """How many threads update in this process: torch's number when that was asked first, but some cores are left to
    busy ones."""
    return max(1, min(torch.get_num_threads(), _most_threads()))


def _most_threads() -> int:
    cores = len(os.sched_getaffinity(0)) if hasattr(os, "sched_getaffinity") else os.cpu_count() or 1
    return max(2, cores - OTHER_THREADS)


def few_threads() -> str:
    """For reports: that torch's number leaves more than half of the cores unused; '' where it does not."""
    found, most = update_threads(), _most_threads()
    if 2 * found >= most:
        return ""
    return (
        f"{found} of {most} threads that the CPU has for updates, as torch.get_num_threads() says: "
        "raise OMP_NUM_THREADS (torchrun sets it to 1) or call torch.set_num_threads"
    )


def _copy(tensor: Tensor | None) -> Any:
    return None if tensor is None else tensor.clone()


class States(NamedTuple):
    """Of a parameter or a part of it, all flat: an fp32 weight, or a bf16 one with its remainder; fp32 moments."""

    weight: Tensor
    remainder: Tensor | None
    exp_avg: Tensor
    exp_avg_sq: Tensor


class New(NamedTuple):
    """What an update writes, each like that of `States`; None: it is computed and not kept."""

    weight: Tensor
    remainder: Tensor | None = None
    exp_avg: Tensor | None = None
    exp_avg_sq: Tensor | None = None


@dataclass(frozen=True)
class Update:
    """One AdamW step that makes ``new`` of ``old``, the same memory or other; ``gradient``: (n,) of any float type,
    times ``factor``, an fp32 scalar. With ``then``, the new weight is the one after that step too, and the rest of
    ``new`` is still the rest after the first.
    """

    new: States | New
    old: States
    gradient: Tensor
    factor: Tensor | None
    numbers: AdamWStep
    then: Then | None = None

    def __len__(self) -> int:
        return len(self.gradient)


@dataclass(frozen=True)
class Sum:
    """``total``, (n,) fp32, becomes ``first`` (None: what it was) plus ``addend`` (None: 0), of any float type."""

    total: Tensor
    first: Tensor | None
    addend: Tensor | None

    def __len__(self) -> int:
        return len(self.total)


def update(updates: Sequence[Update]) -> None:
    """Make ``updates`` by `update_threads`; on return none of them is at work any more. Raises ValueError where tensors
    have not as many elements, or an fp32 weight's update has a new remainder, before any update is made."""
    for each in updates:
        tensors = (*each.new, *each.old, *([each.then.gradient] if each.then else []))
        sizes = [tuple(tensor.shape) for tensor in tensors if tensor is not None]
        if sizes != [(len(each),)] * len(sizes):
            raise ValueError(f"a gradient of {len(each)} elements, and states of {sizes}")
        if each.old.remainder is None and each.new.remainder is not None:
            raise ValueError("a new remainder, and an old weight without one: fp32 weights have none")
    native = library()
    updates = [_of_known_types(each) for each in updates]
    if native is None:
        _update_by_torch(updates)
    else:
        _call(native.update, _Update, [_update_words(each) for each in updates])


def add_up(sums: Sequence[Sum]) -> None:
    """Make ``sums`` by `update_threads`."""
    native = library()
    by_torch = [each for each in sums if native is None or not _known(each.first, each.addend)]
    for each in by_torch:
        if each.first is not None:
            each.total.copy_(each.first)
        if each.addend is not None:
            each.total.add_(each.addend)
    if native is not None and len(by_torch) < len(sums):
        rest = [each for each in sums if _known(each.first, each.addend)]
        _call(native.add_up, _Sum, [_sum_words(each) for each in rest])


def split(master: Tensor, weight: Tensor, remainder: Tensor) -> bool:
    """Make of an fp32 ``master`` its bf16 ``weight`` and their int16 ``remainder``, each (n,), dense and in RAM, by
    `update_threads`, as `adamw.split` does; False, and nothing was done, without the C."""
    native = library()
    if native is not None:
        _call(native.split, _Split, [_split_words(master, weight, remainder)])
    return native is not None


def _known(*tensors: Tensor | None) -> bool:
    return all(each is None or each.dtype in GRADIENTS for each in tensors)


def _of_known_types(update: Update) -> Update:
    then = update.then
    if then is not None and not _known(then.gradient):
        update = replace(update, then=replace(then, gradient=then.gradient.float()))
    return update if _known(update.gradient) else replace(update, gradient=update.gradient.float())


@torch.no_grad()
def _update_by_torch(updates: Sequence[Update]) -> None:
    for each in updates:
        made, is_split = each.new, each.old.remainder is not None
        if each.then is None and isinstance(made, States) and (made.remainder is not None) == is_split:
            for new, old in zip(made, each.old, strict=True):
                if new is not None and old is not None and new.data_ptr() != old.data_ptr():
                    new.copy_(old)
            adamw_piece(*made, each.gradient, each.numbers, factor=each.factor)
        else:
            for start in range(0, len(each), CHUNK):
                _update_apart(each, slice(start, start + CHUNK))


def _update_apart(update: Update, part: slice) -> None:
    """The elements ``part`` by torch, in copies, of which what is wanted is kept."""
    new, then = update.new, update.then
    states = States(*(_copy(None if old is None else old[part]) for old in update.old))
    adamw_piece(*states, update.gradient[part], update.numbers, factor=update.factor)
    for to, made in zip(new[1:], states[1:], strict=True):
        if to is not None and made is not None:
            to[part] = made
    if then is not None:
        adamw_piece(*states, then.gradient[part], then.numbers)
    new.weight[part] = states.weight


# -- the library -------------------------------------------------------------------------------------------------------


class _Update(ctypes.Structure):
    _fields_ = [
        *((name, ctypes.c_void_p) for name in ("weight", "remainder", "exp_avg", "exp_avg_sq")),
        *((name, ctypes.c_void_p) for name in ("old_weight", "old_remainder", "old_exp_avg", "old_exp_avg_sq")),
        *((name, ctypes.c_void_p) for name in ("gradient", "factor", "then_gradient")),
        *((name, ctypes.c_int64) for name in ("count", "tail_start")),
        *((name, ctypes.c_int32 * 7) for name in ("by", "then_by")),
        *((name, ctypes.c_int32) for name in ("gradient_type", "then_type")),
    ]


class _Sum(ctypes.Structure):
    _fields_ = [
        *((name, ctypes.c_void_p) for name in ("total", "first", "addend")),
        ("count", ctypes.c_int64),
        *((name, ctypes.c_int32) for name in ("first_type", "addend_type")),
    ]


class _Split(ctypes.Structure):
    _fields_ = [*((name, ctypes.c_void_p) for name in ("master", "weight", "remainder")), ("count", ctypes.c_int64)]


def _split_words(*tensors: Tensor) -> _Split:
    return _Split(*map(_address, tensors), len(tensors[0]))


def _update_words(each: Update) -> _Update:
    assert each.factor is None or (each.factor.dtype == torch.float32 and each.factor.device.type == "cpu")
    then = each.then or Then(each.gradient, each.numbers)  # without which the address is none
    tensors = (*each.new, *each.old, each.gradient, each.factor, then.gradient if each.then else None)
    numbers = ((ctypes.c_int32 * 7)(*step.numbers.words) for step in (each, then))
    types = (GRADIENTS[step.gradient.dtype] for step in (each, then))
    return _Update(*map(_address, tensors), len(each), torch_order().tail_start(len(each)), *numbers, *types)


def _sum_words(each: Sum) -> _Sum:
    types = (0 if tensor is None else GRADIENTS[tensor.dtype] for tensor in (each.first, each.addend))
    return _Sum(_address(each.total), _address(each.first), _address(each.addend), len(each), *types)


def _address(tensor: Tensor | None) -> int | None:
    return None if tensor is None else tensor.data_ptr()


def _call(function: Callable[..., int], kind: type[ctypes.Structure], words: Sequence[ctypes.Structure]) -> None:
    refused = function((kind * len(words))(*words), ctypes.c_int64(len(words)), ctypes.c_int64(update_threads()))
    if refused:
        _tell(refused, update_threads())


@functools.cache
def _tell(refused: int, threads: int) -> None:
    said = f"the system refused {refused} of {threads} threads that update on the CPU, which are slower without them"
    warnings.warn(f"{said}: raise the limit of processes (ulimit -u, or the container's)", RuntimeWarning, stacklevel=4)


def library() -> ctypes.CDLL | None:
    """The compiled C; None where `why_not` says why there is none."""
    return _library()[0]


def why_not() -> str:
    """Why updates on this CPU are torch's operations; empty where they are not."""
    return _library()[1]


@functools.cache
def _library() -> tuple[ctypes.CDLL | None, str]:
    try:
        order = torch_order()
        names = ("LERP", "TAIL_LERP", "SQUARE", "TAIL_SQUARE")
        built = shared_library(SOURCE, dict(zip(names, map(int, (*order.lerp, *order.square)), strict=True)))
    except Unsupported as error:
        return None, str(error)
    with torch.device("cpu"), torch.no_grad():
        if not _has_torchs_bits(built):
            return None, f"what this machine's C compiler makes of {SOURCE.name} rounds as torch does not"
    return built, ""


def _has_torchs_bits(built: ctypes.CDLL) -> bool:
    """Whether 5,003 elements, in vectors and in the rest, come out as torch's: split and whole, from all gradients, in
    place and elsewhere, with one step more and as a weight alone, and sums; and masters that are split."""
    generator, count = torch.Generator().manual_seed(0), 5003
    values = [torch.randn(count, generator=generator, dtype=torch.float32) for _ in range(4)]
    weight, exp_avg, exp_avg_sq, rest = values[0], values[1], values[2].square(), torch.arange(count, dtype=torch.int16)
    factor, numbers = torch.tensor(0.37, dtype=torch.float32), AdamWStep(1e-2, 0.9, 0.95, 1e-8, 0.1, 3)
    for dtype, split in itertools.product(GRADIENTS, (False, True)):
        gradient, clipped = values[3].to(dtype), None if split else factor
        old = States(weight.to(torch.bfloat16) if split else weight, rest if split else None, exp_avg, exp_avg_sq)
        elsewhere, here, ahead, expected = (States(*map(_copy, old)) for _ in range(4))
        alone, then = New(torch.empty_like(old.weight)), Then(values[1].to(dtype), replace(numbers, step=4))
        forms = [(elsewhere, old, None), (here, here, None), (ahead, ahead, then), (alone, old, None)]
        ours = [Update(new, was, gradient, clipped, numbers, after) for new, was, after in forms]
        _call(built.update, _Update, [_update_words(each) for each in ours])
        adamw_piece(*expected, gradient, numbers, factor=clipped)
        second = States(*map(_copy, expected))
        adamw_piece(*second, then.gradient, then.numbers)
        total, summed = torch.empty_like(weight), weight + gradient
        _call(built.add_up, _Sum, [_sum_words(Sum(total, weight, gradient))])
        pairs = [(total, summed), *zip(elsewhere, expected, strict=True), *zip(here, expected, strict=True)]
        pairs += [(alone.weight, expected.weight), *zip(ahead, (second.weight, *expected[1:]), strict=True)]
        if not all(torch.equal(a, b) for a, b in pairs if a is not None and b is not None):
            return False
    (high, low), expected = ((torch.empty_like(weight, dtype=torch.bfloat16), torch.empty_like(rest)) for _ in range(2))
    _call(built.split, _Split, [_split_words(weight, high, low)])
    split_by_torch(weight.view(torch.int32), *expected, torch.empty_like(weight, dtype=torch.int32))
    return torch.equal(high, expected[0]) and torch.equal(low, expected[1])
