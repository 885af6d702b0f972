"""What ``p.grad`` is once a gradient has left level 0: it can be measured, scaled, made zero and copied to the CPU,
where it lies.

`torch.nn.utils.clip_grad_norm_`, and so accelerate's and `transformers.Trainer`'s, asks each gradient for its norm and
multiplies it by the factor that clips; ``zero_grad(set_to_none=False)`` makes it zero. All of this happens in host
memory, in the arithmetic of `vblackwell.clip_grad_norm_`. What else is asked of it is refused, so that torch's own
optimizers and scalers do not pass it by.
"""

from __future__ import annotations

from typing import Any

import torch

from vblackwell.errors import Unsupported
from vblackwell.offload.layout.groups import Slot

_T: Any = torch.Tensor
_METADATA = frozenset(
    {
        getattr(_T, name).__get__
        for name in (
            "shape", "dtype", "device", "layout", "is_cuda", "is_cpu", "is_sparse", "ndim", "requires_grad", "is_leaf",
            "grad_fn", "nbytes",
            "itemsize", "is_sparse_csr", "is_meta",
        )
    }
    | {_T.size, _T.dim, _T.numel, _T.nelement, _T.element_size, _T.is_floating_point, _T.is_complex, _T.__len__}
    | {_T.__hash__}
)  # fmt: skip
_ITSELF = frozenset({_T.data.__get__, _T.detach, _T.detach_})  # it is not part of a graph
_NORMS = frozenset({_T.norm, torch.norm, torch.linalg.norm, torch.linalg.vector_norm})
_TWO = (2, "fro", None)  # how callers name the 2-norm


class DepartedGradient(torch.Tensor):
    """Shape, type and device of a gradient; its values are in host memory. Made by `departed_gradient`."""

    _vb_engine: Any
    _vb_slot: Slot

    @classmethod
    def __torch_function__(cls, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        kwargs = kwargs or {}
        if func in _METADATA:
            with torch._C.DisableTorchFunctionSubclass():
                return func(*args, **kwargs)
        first = args[0] if args else None
        if isinstance(first, DepartedGradient):
            said = {name: value for name, value in kwargs.items() if value is not None and value is not False}
            engine, slot, rest = first._vb_engine, first._vb_slot, (*args[1:], *said.values())
            if slot.param.__dict__.get("_vb_binding") is not engine or not engine.has_gradient(slot):
                raise Unsupported(
                    f"the gradient of {slot.name!r} was cleared, or its model released, since it was read: read p.grad "
                    "again after "
                    "a backward"
                )
            if func in _ITSELF or (func is _T.requires_grad_ and rest == (False,)):
                return first
            if func in _NORMS and len(rest) <= 1 and said.keys() <= {"p", "ord"} and (*rest, 2)[0] in _TWO:
                return engine.gradient_norm(slot)
            if func in (_T.mul_, _T.__imul__) and len(rest) == 1 and _is_scalar(rest[0]):
                engine.scale_gradient(slot, torch.as_tensor(rest[0]))
                return first
            if func is _T.zero_ and not rest:
                engine.zero_gradient(slot)
                return first
            if func is _T.cpu and not rest:
                return engine.read_gradient(slot)
        raise Unsupported(
            f"{getattr(func, '__name__', func)} on the gradient of {_name(args, kwargs)}, which has left level 0 for "
            "the optimizer: "
            "what is possible there is its global 2-norm (clip_grad_norm_ without norm_type and foreach), mul_ by a "
            "number, zero_, and "
            "cpu() for a copy of its values; to train use VGPUAdamW (its max_grad_norm, grad_norm and loss_scale), or "
            "release(model) first"
        )

    def __repr__(self, *, tensor_contents: Any = None) -> str:
        return f"DepartedGradient(of {self._vb_slot.name!r}, shape={tuple(self.shape)}, dtype={self.dtype})"


def _is_scalar(value: Any) -> bool:
    return isinstance(value, (int, float)) or (type(value) is torch.Tensor and value.dim() == 0)


def _name(*found: Any) -> str:
    """Of the first gradient in arguments that may hold lists."""
    for item in found:
        if isinstance(item, DepartedGradient):
            return repr(item._vb_slot.name)
        if isinstance(item, (list, tuple, dict)):
            name = _name(*(item.values() if isinstance(item, dict) else item))
            if name != _UNNAMED:
                return name
    return _UNNAMED


_UNNAMED = "an offloaded parameter"


def departed_gradient(engine: Any, slot: Slot, seen: torch.Tensor) -> DepartedGradient:
    """The gradient of ``slot``, which shows shape, type and device of ``seen``, a tensor without bytes of its own."""
    view = torch.Tensor._make_subclass(DepartedGradient, seen)
    view._vb_engine, view._vb_slot = engine, slot
    return view
