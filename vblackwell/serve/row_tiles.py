"""Products of rows with weights in tiles of a fixed number of rows, so that a row's bits do not depend on the others.

A matrix product picks its kernel, and with it the order of its sums, by the number of rows; with one number of rows
there is one kernel. A tile that is not full is filled up with zeros. Inside `RowTiles`, every linear of torch and of
transformers does that, those of experts too, and so do packed linears that `tile_packed` has prepared. What else
a decoder does with a row (norms, activations, rotations) does not see the others, but for gates of few numbers a row on
a CPU (`_sigmoid`). Legend: M rows, K inputs, N outputs.
"""

from collections.abc import Callable, Iterator
from contextlib import contextmanager
from contextvars import ContextVar
from functools import cache
from typing import Any

import torch
from torch import Tensor, nn
from torch.nn import functional as F
from torch.overrides import TorchFunctionMode

from vblackwell.nn.convert.fused_modules import swap
from vblackwell.nn.linear.one_input import is_plain, joined
from vblackwell.nn.linear.packed_linear import PackedLinear

PRODUCTS = (torch.matmul, Tensor.matmul, Tensor.__matmul__, torch.mm, Tensor.mm)
SIGMOIDS = (torch.sigmoid, Tensor.sigmoid)
VECTOR_BYTES = 128  # of two registers of AVX-512, which torch's loops take at once
_rows: ContextVar[tuple[int, int] | None] = ContextVar("rows of a tile, and of packed linears' tiles", default=None)
_threads: ContextVar[int] = ContextVar("threads of a product", default=1)


def in_tiles(x: Tensor, product: Callable[[Tensor], Tensor], rows: int) -> Tensor:
    """``product`` of (..., K), computed for so many ``rows`` at a time, (..., N)."""
    x_MK = x.reshape(-1, x.shape[-1])
    count = x_MK.shape[0]
    if missing := -count % rows:
        x_MK = F.pad(x_MK, (0, 0, 0, missing))
    threads = _threads.get()
    if threads > 1:
        torch.set_num_threads(threads)
    parts = [product(part) for part in x_MK.split(rows)] if count else [product(x_MK)]
    if threads > 1:
        torch.set_num_threads(1)
    y_MN = parts[0] if len(parts) == 1 else torch.cat(parts)
    return y_MN[:count].reshape(*x.shape[:-1], y_MN.shape[-1])


@contextmanager
def products_in_threads() -> Iterator[None]:
    """Inside, on the CPU, only products in tiles use torch's threads. Those of another operation share its numbers out
    by their count, and numbers at the end of a share are not computed as the others are."""
    threads = torch.get_num_threads()
    token = _threads.set(threads)
    torch.set_num_threads(1)
    try:
        yield
    finally:
        torch.set_num_threads(threads)
        _threads.reset(token)


class RowTiles(TorchFunctionMode):
    """Inside, linears compute in tiles of ``rows``, packed ones in tiles of ``packed``, in this thread."""

    def __init__(self, rows: int, packed: int) -> None:
        super().__init__()
        self._size, self._packed = rows, packed

    def __enter__(self) -> "RowTiles":
        self._before = _rows.set((self._size, self._packed))
        return super().__enter__()

    def __exit__(self, *error: Any) -> None:
        super().__exit__(*error)
        _rows.reset(self._before)

    def __torch_function__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        kwargs = kwargs or {}
        if func is F.linear:
            x, *rest = (args[0] if args else kwargs["input"], *args[1:])
            named = {name: value for name, value in kwargs.items() if name != "input"}
            return in_tiles(x, lambda part: F.linear(part, *rest, **named), self._size)
        if func is torch.addmm and len(args) == 3 and args[0].dim() == 1:  # transformers' Conv1D
            bias, x, weight = args
            return in_tiles(x, lambda part: torch.addmm(bias, part, weight, **kwargs), self._size)
        if func in PRODUCTS and len(args) == 2 and args[1].dim() == 2 and not kwargs:  # of adapters
            return in_tiles(args[0], lambda part: torch.matmul(part, args[1]), self._size)
        if func in SIGMOIDS and len(args) == 1 and not kwargs and args[0].device.type == "cpu":
            return _sigmoid(args[0])
        return func(*args, **kwargs)


def _sigmoid(x: Tensor) -> Tensor:
    """On a CPU, in whole registers: what fills none is computed by another function, so that 16 rows of a number each,
    which are the half of two registers of AVX-512, would get other bits than 32."""
    missing = -x.numel() % (VECTOR_BYTES // x.itemsize)
    if not missing:
        return x.sigmoid()
    return F.pad(x.reshape(-1), (0, missing)).sigmoid()[: x.numel()].view(x.shape)


def has_packed(model: nn.Module) -> bool:
    return any(isinstance(module, PackedLinear) for module in model.modules())


def tile_packed(model: nn.Module) -> None:
    """Let the packed linears of ``model``, whose kernels are no functions of torch, and adapters around them compute in
    tiles inside `RowTiles`; elsewhere they compute as before."""
    for module in model.modules():
        packed = (module, getattr(module, "base_layer", None))
        if any(isinstance(each, PackedLinear) for each in packed) and not hasattr(type(module), "computes_in_tiles"):
            swap(module, {"forward": _tiled(type(module).forward), "computes_in_tiles": True})


@cache
def _tiled(forward: Callable[..., Tensor]) -> Callable[..., Tensor]:
    def in_tiles_too(self: Any, x: Tensor, *args: Any, **named: Any) -> Tensor:
        rows = _rows.get()
        product = lambda part: forward(self, part, *args, **named)  # noqa: E731
        return product(x) if rows is None else in_tiles(x, product, rows[1])

    return in_tiles_too


def tile_linears(model: nn.Module) -> list[nn.Module]:
    """Let torch's own linears compute in tiles by themselves; returns them. Where these and packed ones are all that
    multiplies, `tiles_of` need not look at every function of torch."""
    found: list[nn.Module] = [module for module in model.modules() if type(module) is nn.Linear]
    for linear in found:
        swap(linear, {"forward": _linear_in_tiles})
    return found


def _linear_in_tiles(self: Any, x: Tensor) -> Tensor:
    rows = _rows.get()
    if rows is None:
        return F.linear(x, self.weight, self.bias)
    return in_tiles(x, lambda part: F.linear(part, self.weight, self.bias), rows[0])


@contextmanager
def tiles_of(rows: int, packed: int) -> Iterator[None]:
    """As `RowTiles`, for linears of `tile_linears`, `join_linears` and `tile_packed` alone."""
    token = _rows.set((rows, packed))
    try:
        yield
    finally:
        _rows.reset(token)


# Of one input, as transformers calls them.
_OF_ONE_INPUT = (("q_proj", "k_proj", "v_proj"), ("gate_proj", "up_proj"))


def join_linears(model: nn.Module, lie_together: Callable[[list[nn.Parameter]], bool]) -> list[nn.Module]:
    """Let linears of one input, without biases, whose weights ``lie_together`` whenever they are on their device, be
    one product inside `RowTiles`: of few rows, narrow ones leave most of a GPU without work. The linears, whose class
    is another one now (`plain_class`)."""
    found = list[nn.Module]()
    for module in model.modules():
        for names in _OF_ONE_INPUT:
            linears = [module._modules.get(name) for name in names]
            plain: list[Any] = [each for each in linears if each is not None and is_plain(each)]
            if len(plain) == len(names) and lie_together([each.weight for each in plain]):
                joint = _Joint(plain)
                for place, linear in enumerate(plain):
                    linear.__dict__["_vb_joint"] = joint, place
                    swap(linear, {"forward": _part_of_joint})
                found += plain
    return found


def restore_linears(linears: list[nn.Module]) -> None:
    """Undo `join_linears` or `tile_linears`."""
    for linear in linears:
        linear.__dict__.pop("_vb_joint", None)
        object.__setattr__(linear, "__class__", nn.Linear)


class _Joint:
    """Linears that are called one after the other with the same rows."""

    def __init__(self, linears: list[Any]) -> None:
        self._linears = linears
        self._x: Tensor | None = None
        self._parts: list[Tensor] = []

    def part(self, place: int, x: Tensor, rows: int) -> Tensor:
        if self._x is not x:
            weights = [linear.weight for linear in self._linears]
            weight = joined(weights)
            together = torch.cat(weights) if weight is None else weight
            product = in_tiles(x, lambda part: F.linear(part, together), rows)
            self._x, self._parts = x, [*product.split([len(each) for each in weights], -1)]
        found = self._parts[place]
        if place == len(self._parts) - 1:
            self._x, self._parts = None, []
        return found


def _part_of_joint(self: Any, x: Tensor) -> Tensor:
    rows = _rows.get()
    if rows is None:
        return F.linear(x, self.weight)
    joint, place = self.__dict__["_vb_joint"]
    return joint.part(place, x, rows[0])
