"""A model's first bytes: its own tensors, which must lie apart, or a function that fills what is on the meta device.

A parameter must stay the object that it is, because users tie and list parameters, and torch gives none bytes of
another device: so its content is exchanged with that of a stand-in without memory (`torch.utils.swap_tensors`).
"""

import weakref
from collections.abc import Callable, Iterable, Iterator
from contextlib import ExitStack

import torch
from torch import Tensor, nn

from vblackwell.errors import ConfigurationError
from vblackwell.offload.layout.groups import Group, Slot
from vblackwell.offload.storage.masters import Opened, round_from_fp32, write_truth

# Where torch.nn.utils.spectral_norm keeps the parameter that it computes an attribute from, anew at each forward.
ORIGINAL = "_orig"


def refuse_shared_memory(model: nn.Module) -> None:
    """Raise ConfigurationError if elements of parameters lie in one place, or a module keeps a view of a parameter."""
    params = dict(model.named_parameters())
    known = {id(param) for param in params.values()}
    kept = [(name, tensor) for name, tensor in _kept_tensors(model) if id(tensor) not in known]
    spans: list[tuple[int, int, str, Tensor]] = []
    for name, tensor in [*params.items(), *kept]:
        has_bytes = tensor.layout == torch.strided and torch._C._has_storage(tensor)
        if not has_bytes or tensor.is_meta or tensor.numel() == 0:
            continue
        if name in params and any(size > 1 and not by for size, by in zip(tensor.shape, tensor.stride(), strict=True)):
            raise ConfigurationError(
                f"elements of the parameter {name!r} share memory (shape {tuple(tensor.shape)}, stride "
                f"{tensor.stride()}): make it separate by nn.Parameter(p.detach().clone()), or keep a small parameter "
                "and expand it in forward"
            )
        spans.append((*_span(tensor), name, tensor))
    spans.sort(key=lambda span: span[:2])
    for position, (_, end, name, tensor) in enumerate(spans):
        for start, _, other_name, other in spans[position + 1 :]:
            if start >= end:
                break
            first, second = (name, other_name) if name in params else (other_name, name)
            if first in params and first + ORIGINAL != second and second + ORIGINAL != first and _meet(tensor, other):
                raise ConfigurationError(
                    f"{second!r} shares memory with the parameter {first!r}, whose bytes move when the model is "
                    "offloaded: compute it in forward, make both names one parameter (a.weight = b.weight), or give it "
                    "a copy (.clone())"
                )


def _kept_tensors(model: nn.Module) -> Iterator[tuple[str, Tensor]]:
    """Tensors that are attributes or buffers of modules, or in lists, tuples and dicts that are."""
    for prefix, module in model.named_modules():
        for name, value in {**vars(module), **module._buffers}.items():
            if name not in ("_parameters", "_modules", "_buffers"):
                values = list(value.values()) if isinstance(value, dict) else value
                for item in values if isinstance(values, (list, tuple)) else [values]:
                    if isinstance(item, Tensor):
                        yield f"{prefix}.{name}" if prefix else name, item


def _span(tensor: Tensor) -> tuple[int, int]:
    """Address of the first byte, and of the one after the last."""
    reach = sum((size - 1) * stride for size, stride in zip(tensor.shape, tensor.stride(), strict=True))
    start = tensor.data_ptr()
    return start, start + (1 + reach) * tensor.element_size()


def _meet(one: Tensor, other: Tensor) -> bool:
    """Whether two tensors whose spans overlap have an element in common: halves of a matrix's rows have none."""
    width, spans = one.element_size(), [_span(one), _span(other)]
    if width != other.element_size():
        return True
    first, last = min(start for start, _ in spans), max(end for _, end in spans)
    taken = torch.zeros((last - first) // width, dtype=torch.bool)
    taken.as_strided(one.shape, one.stride(), (spans[0][0] - first) // width).fill_(True)
    return bool(taken.as_strided(other.shape, other.stride(), (spans[1][0] - first) // width).any())


Initialize = Callable[[str, Tensor], None]

_CHECKED = (torch.float32, torch.bfloat16, torch.float16, torch.float64)


class ModelSource:
    """The first values of one model's parameters and buffers, in place if possible: no machine need hold it twice.
    ``initialize`` (see `enable_vgpu_stack_optimization`) gets floats as NaN, so that what it forgets is loud.

    Raises ConfigurationError: something is on the meta device without ``initialize``, or the reverse; or a parameter
    there has hooks or weak references, which would be lost.
    """

    def __init__(self, model: nn.Module, initialize: Initialize | None) -> None:
        params = [(name, param) for name, param in model.named_parameters() if param.is_meta]
        buffers = [(name, buffer) for name, buffer in model.named_buffers() if buffer.is_meta]
        if (params or buffers) and initialize is None:
            raise ConfigurationError(
                f"{(params or buffers)[0][0]!r} of {type(model).__name__} is on the meta device and has no bytes: give "
                "initialize=function, which is called with each name and a tensor to fill in place (e.g. from a "
                "checkpoint), or build the model on the CPU"
            )
        if initialize is not None and not (params or buffers):
            raise ConfigurationError(
                f"initialize= fills what is on the meta device, and nothing of {type(model).__name__} is: build it "
                "under torch.device('meta'), or leave initialize out"
            )
        for name, param in params:
            # What hangs on a tensor's content, and not on the object, would stay with the content.
            hooked = param._backward_hooks or getattr(param, "_post_accumulate_grad_hooks", None)
            if hooked or weakref.getweakrefs(param):
                raise ConfigurationError(
                    f"{name!r} is on the meta device and has {'hooks' if hooked else 'weak references'}: register them "
                    "after the model was put into its stack"
                )
        self._model, self._initialize = model, initialize
        self._filled: dict[Tensor, Tensor] = {}  # buffers, which take their places in `take_over`
        self._undo = ExitStack()  # of that
        for name, buffer in buffers:
            self._filled[buffer] = real = torch.empty_like(buffer, device="cpu", requires_grad=False)
            self._fill(name, real)

    @torch.no_grad()
    def write(self, slot: Slot, opened: Opened) -> None:
        """Make the parameter's first value its truth, in all forms that ``opened`` has (`masters.open_weights`)."""
        if not slot.param.is_meta:
            write_truth(slot, slot.param.detach(), opened)
            return
        dtype, floating = slot.param.dtype, slot.dtype.is_floating_point
        in_ram = opened["weight"].device.type == "cpu"
        if in_ram and dtype == torch.float32 and floating and "master" in opened:
            self._fill(slot.name, slot.view_fp32(opened["master"]))
            round_from_fp32(slot.flat_fp32(opened["master"]), slot.flat(opened["weight"]))
        elif in_ram and dtype == slot.dtype and "master" not in opened:
            self._fill(slot.name, slot.view(opened["weight"]))
            if "remainder" in opened:
                slot.flat(opened["remainder"], torch.int16).zero_()
        else:
            value = torch.empty_strided(slot.shape, slot.stride, dtype=dtype, device="cpu")
            self._fill(slot.name, value)
            write_truth(slot, value, opened)

    def _fill(self, name: str, tensor: Tensor) -> None:
        assert self._initialize is not None
        checked = tensor.dtype in _CHECKED and tensor.numel() > 0
        with torch.no_grad(), torch.inference_mode(False):
            tensor.fill_(float("nan")) if checked else tensor.zero_()
            self._initialize(name, tensor)
        if checked and any(bool(end.isnan()) for end in (tensor.flatten()[0], tensor.flatten()[-1])):
            raise ConfigurationError(
                f"initialize left {name!r} of shape {tuple(tensor.shape)} unfilled (its first or last element is NaN): "
                "fill the tensor in place, e.g. tensor.copy_(value) or torch.nn.init.normal_(tensor)"
            )

    # -- the model gets them -------------------------------------------------------------------------------------------

    def take_over(self, groups: Iterable[Group]) -> None:
        """Exchange the contents of meta parameters with stand-ins on the CPU, and put the filled buffers in place."""
        for slot in (slot for group in groups for slot in group.slots if slot.param.is_meta):
            with torch.inference_mode(False):
                empty = torch.zeros((), dtype=slot.param.dtype, device="cpu").expand(slot.shape)
                stand_in = nn.Parameter(empty, requires_grad=slot.param.requires_grad)
            _swap_content(slot.param, stand_in)
            self._undo.callback(_swap_content, slot.param, stand_in)
        for module in self._model.modules():
            for key, buffer in module._buffers.items():
                if buffer is not None and buffer in self._filled:
                    self._undo.callback(module._buffers.__setitem__, key, buffer)
                    module._buffers[key] = self._filled[buffer]

    def give_back(self) -> None:
        """Undo `take_over`, as far as it came."""
        self._undo.close()


def _swap_content(param: Tensor, other: Tensor) -> None:
    """Exchange the tensors' memory and requires_grad; classes and attributes stay where they are."""
    before = [(tensor, tensor.__class__, vars(tensor)) for tensor in (param, other)]
    param.__class__ = other.__class__ = nn.Parameter
    torch.utils.swap_tensors(param, other)
    for tensor, kind, values in before:
        setattr(tensor, "__dict__", values)  # noqa: B010 (typed as read-only)
        tensor.__class__ = kind


def move_buffers(model: nn.Module, device: torch.device) -> None:
    """Put every buffer on ``device``; one that several modules share stays shared."""
    moved: dict[Tensor, Tensor] = {}
    for module in model.modules():
        for key, buffer in module._buffers.items():
            if buffer is not None and buffer.device != device:
                if buffer not in moved:
                    moved[buffer] = buffer.to(device)
                module._buffers[key] = moved[buffer]
