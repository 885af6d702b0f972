"""Four things about Triton 3.6's interpreter, which runs the kernels where there is no GPU (conftest.py turns it on).

numpy 2.4 takes an array of one element for no index, and the interpreter asks it to for loops to a loaded bound.

It looks through all of triton.language, some thousand names, each time a kernel calls a function of Triton or
``tl.sum``, to replace what it has replaced already: half of its time with kernels as small as a test's. Here that is
done once a launch for each set of modules.

It works out the type and the shape of every value anew, name and all: a third of what is left. Here each is worked out
once a process.

It loses bf16's subnormal numbers on their way to fp32, and cuts fp32 off instead of rounding it to bf16.
"""

from __future__ import annotations

from typing import Any

import numpy as np


def repair() -> None:
    """All four, at most once a process. The interpreter must be on."""
    from triton.runtime import interpreter

    if hasattr(interpreter, "vblackwell_repaired"):
        return
    interpreter.vblackwell_repaired = True
    tl = interpreter.tl
    patch_tensor, patch_lang, launch = (
        interpreter._patch_lang_tensor,
        interpreter._patch_lang,
        interpreter.GridExecutor.__call__,
    )
    ready: set[frozenset[int]] = set()  # sets of modules that are replaced as long as the launch lasts

    def patched_tensor(tensor: Any, scope: Any) -> None:
        patch_tensor(tensor, scope)
        scope.set_attr(tensor, "__index__", lambda self: self.handle.data.item())

    def patched_lang(function: Any) -> Any:
        used = frozenset(id(value) for value in function.__globals__.values() if value is tl or value is tl.core)
        if used in ready:
            return interpreter._LangPatchScope()  # with nothing to restore
        ready.add(used)
        return patch_lang(function)

    def launched(self: Any, *args: Any, **kwargs: Any) -> None:
        ready.clear()
        try:
            launch(self, *args, **kwargs)
        finally:
            ready.clear()

    interpreter._patch_lang_tensor = patched_tensor
    interpreter._patch_lang = patched_lang
    interpreter.GridExecutor.__call__ = launched
    _remember_types(tl.core)
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
