"""Eight things about Triton 3.6's interpreter, which runs the kernels where there is no GPU (conftest.py turns it on).

numpy 2.4 takes an array of one element for no index, and the interpreter asks it to for loops to a loaded bound.

It looks through all of triton.language, some thousand names, each time a kernel calls a function of Triton or
``tl.sum``, to replace what it has replaced already: half of its time with kernels as small as a test's. It also puts
all back after each launch, for the next one to replace: a fifth of what was left. Here that is done once a process for
each set of modules, and stays: where the interpreter is on, nothing is compiled.

It works out the type and the shape of every value anew, name and all: a third of what is left. Here each is worked out
once a process.

It makes a table of all types whenever it asks which one of numpy's a type is, and names all that a kernel calls as
often as it is called: another third. It asks of what is the same object, or cannot be constant, whether it is.

It makes a tuple of Triton's of each shape that it compares, to see that two tensors have the same one.

It checks sums of integers for overflow, in a dozen operations each, and throws the answer away unless it debugs.

It loses bf16's subnormal numbers on their way to fp32, and cuts fp32 off instead of rounding it to bf16.
"""

from __future__ import annotations

import dataclasses
import inspect
from typing import Any

import numpy as np


def repair() -> None:
    """All eight, at most once a process. The interpreter must be on."""
    from triton.runtime import interpreter

    if hasattr(interpreter, "vblackwell_repaired"):
        return
    interpreter.vblackwell_repaired = True
    tl = interpreter.tl
    patch_tensor, patch_lang = interpreter._patch_lang_tensor, interpreter._patch_lang
    ready: set[frozenset[int]] = set()  # sets of modules that are replaced
    modules: dict[int, tuple[Any, frozenset[int]]] = {}  # of the globals of a function that was called, which it keeps

    def patched_tensor(tensor: Any, scope: Any) -> None:
        patch_tensor(tensor, scope)
        scope.set_attr(tensor, "__index__", lambda self: self.handle.data.item())

    def patched_lang(function: Any) -> Any:
        names = function.__globals__
        if id(names) not in modules:
            modules[id(names)] = names, frozenset(id(each) for each in names.values() if each is tl or each is tl.core)
        used = modules[id(names)][1]
        if used not in ready:
            patch_lang(function)
            ready.add(used)
        return interpreter._LangPatchScope()  # with nothing to restore

    builtins: dict[Any, list[tuple[str, Any]]] = {}  # of a module or a class, before any of them is replaced

    def patched_builtin(owner: Any, builder: Any, scope: Any) -> None:
        if owner not in builtins:
            builtins[owner] = [pair for pair in inspect.getmembers(owner) if tl.core.is_builtin(pair[1])]
        for name, member in builtins[owner]:
            interpreter._patch_attr(owner, name, member, builder, scope)

    interpreter._patch_builtin = patched_builtin
    interpreter._patch_lang_tensor = patched_tensor
    interpreter._patch_lang = patched_lang
    _remember_types(tl.core)
    _remember_numpy_types(interpreter)
    _compare_shapes(tl.core, interpreter.TritonSemantic)
    interpreter._patch_attr = _patched_attr(interpreter.TritonSemantic)
    builder = interpreter.interpreter_builder
    assert not builder.options.debug
    builder.options = dataclasses.replace(builder.options, sanitize_overflow=False)
    _convert_bf16(interpreter)


def _convert_bf16(interpreter: Any) -> None:
    """By bits: bf16 is the upper half of fp32."""
    convert, bf16, fp32 = interpreter._convert_float, interpreter.tl.bfloat16, interpreter.tl.float32

    def converted(values: Any, given: Any, wanted: Any, rounding: Any) -> Any:
        if (given, wanted) == (bf16, fp32):
            return values.astype(np.uint32) << 16
        if (given, wanted) == (fp32, bf16):
            bits = values.view(np.uint32)
            nearest = bits + (0x7FFF + ((bits >> 16) & 1))  # of two alike the even one
            return (np.where(np.isnan(values), bits | 0x400000, nearest) >> 16).astype(np.uint16)
        return convert(values, given, wanted, rounding)

    interpreter._convert_float = converted


def _remember_numpy_types(interpreter: Any) -> None:
    ask = interpreter._get_np_dtype
    types: dict[str, Any] = {}

    def numpy_type(of: Any) -> Any:
        name = of.scalar.name
        if name not in types:
            types[name] = ask(of)
        return types[name]

    interpreter._get_np_dtype = numpy_type


def _compare_shapes(core: Any, semantic: Any) -> None:
    same, broadcast = core.tuple.__eq__, semantic.broadcast_impl_value

    def equal(self: Any, other: Any) -> Any:
        if type(other) is core.tuple:
            other = other.values
        return core.constexpr(self.values == other) if type(other) is list else same(self, other)

    def broadcast_impl_value(self: Any, lhs: Any, rhs: Any) -> tuple[Any, Any]:
        if lhs.type.is_block() and rhs.type.is_block() and lhs.type.shape.values == rhs.type.shape.values:
            return lhs, rhs
        return broadcast(self, lhs, rhs)

    core.tuple.__eq__, semantic.broadcast_impl_value = equal, broadcast_impl_value


def _patched_attr(semantic_of: Any) -> Any:
    """As the interpreter's function, whose members copy their keywords without the one that is given anew."""

    def patch_attr(obj: Any, name: str, member: Any, builder: Any, scope: Any) -> None:
        semantic = semantic_of(builder)

        def new_member(*args: Any, **kwargs: Any) -> Any:
            kwargs["_semantic"] = semantic
            return member(*args, **kwargs)

        scope.set_attr(obj, name, new_member)

    return patch_attr


def _remember_types(core: Any) -> None:
    make_type, make_tensor = core.block_type.__init__, core.tensor.__init__
    types: dict[tuple[Any, ...], dict[str, Any]] = {}
    shapes: dict[tuple[int, ...], tuple[Any, Any]] = {}

    def block_type(self: Any, element_ty: Any, shape: Any) -> None:
        key = (element_ty.name, *(getattr(size, "value", size) for size in shape))
        if key not in types:
            make_type(self, element_ty, shape)
            types[key] = dict(self.__dict__)
        self.__dict__.update(types[key])
        self.element_ty = element_ty

    def tensor(self: Any, handle: Any, type: Any) -> None:
        key = tuple(type.shape.values) if type.is_block() else ()
        if key not in shapes:
            make_tensor(self, handle, type)
            shapes[key] = self.shape, self.numel
        self.handle, self.type, self.dtype = handle, type, type.scalar
        self.shape, self.numel = shapes[key]

    core.block_type.__init__, core.tensor.__init__ = block_type, tensor
    compare, unwrap = core.dtype.__eq__, core._unwrap_if_constexpr
    plain = {core.tensor, core.dtype, core.block_type, core.pointer_type, int, float, bool, str, type(None)}
    core.dtype.__eq__ = lambda self, other: self is other or compare(self, other)
    core._unwrap_if_constexpr = lambda value: value if type(value) in plain else unwrap(value)
