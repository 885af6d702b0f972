"""What torch's clipping sees of a gradient that has left level 0: it can be measured and scaled, where it lies.

`torch.nn.utils.clip_grad_norm_`, and so accelerate's and `transformers.Trainer`'s, asks each gradient for its norm and multiplies it by the
factor that clips. Both are served at home, in the arithmetic of `vblackwell.clip_grad_norm_`; nothing comes back to level 0.
"""

from __future__ import annotations

from typing import TYPE_CHECKING, Any

import torch

from vblackwell.errors import Unsupported
from vblackwell.offload.groups import Slot

if TYPE_CHECKING:
    from vblackwell.offload.engine import Offload

_T: Any = torch.Tensor
_METADATA = frozenset(
    {getattr(_T, name).__get__ for name in ("shape", "dtype", "device", "layout", "is_cuda", "is_cpu", "is_sparse", "ndim")}
    | {_T.size, _T.dim, _T.numel}
)  # fmt: skip


class DepartedGradient(torch.Tensor):
    """Shape, type and device of a gradient; its values are at home. Made by `departed_gradient`."""

    _vb_engine: Offload
    _vb_slot: Slot

    @classmethod
    def __torch_function__(cls, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        kwargs = kwargs or {}
        if func in _METADATA:
            with torch._C.DisableTorchFunctionSubclass():
                return func(*args, **kwargs)
        first = args[0] if args else None
        if isinstance(first, DepartedGradient) and not kwargs and len(args) == 2:
            if func is torch.linalg.vector_norm and args[1] == 2:
                return _norm(first._vb_engine, first._vb_slot)
            if func is _T.mul_ and isinstance(args[1], torch.Tensor) and args[1].dim() == 0:
                _scale(first._vb_engine, first._vb_slot, args[1])
                return first
        raise Unsupported(
            f"{getattr(func, '__name__', func)} on the gradient of {_name(args)}, which has left level 0 for the optimizer: what is "
            "possible there is its global 2-norm (clip_grad_norm_ without norm_type and foreach, max_grad_norm of VGPUAdamW); for "
            "anything else release(model) first"
        )


def _name(args: Any) -> str:
    named = [repr(item._vb_slot.name) for item in args if isinstance(item, DepartedGradient)]
    return named[0] if named else "an offloaded parameter"


def departed_gradient(engine: Offload, slot: Slot, seen: torch.Tensor) -> DepartedGradient:
    """The gradient of ``slot``, which shows shape, type and device of ``seen``, a tensor without bytes of its own."""
    view = torch.Tensor._make_subclass(DepartedGradient, seen)
    view._vb_engine, view._vb_slot = engine, slot
    return view


def _norm(engine: Offload, slot: Slot) -> torch.Tensor:
    """The 2-norm of the gradient, an fp32 scalar. What was updated behind the backward stays so: to measure is not to clip.

    Raises:
        StepAbandoned: updates are final (``undo=False``) and have consumed it.
    """
    source = engine.step_control.source
    if source is not None and not source.undo:
        engine.step_control.rollback()
    engine.gradients.finish_backward()
    if not engine.gradients.is_measured(slot.group):
        engine.worker.submit(engine.gradients.home.measure, slot.group, group=slot.group.index)
        engine.worker.drain()
    return engine.gradients.norm(slot)


def _scale(engine: Offload, slot: Slot, factor: torch.Tensor) -> None:
    """Multiply the gradient by a scalar; an update that was made with the gradient as it was is taken back."""
    if factor == 1:
        return
    engine.step_control.rollback()
    engine.gradients.scale_later(slot.group, [slot], factor.cpu())
