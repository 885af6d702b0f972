"""Which parameters stream together, and at which modules they are needed. Structure only: no bytes, no devices.

A *layer group* is what moves as one flat range: each child of an outermost `nn.ModuleList` (a transformer block), and
each remaining module that owns parameters directly (an embedding, a head, a final norm). A parameter that several
modules share belongs to the first; the others list that group among what they need.

Within a group every parameter starts at a multiple of 512 bytes, as torch's allocators place single tensors, so that
matrix kernels choose the same path for a view as for a separate tensor, and vectorised optimizers round alike.
"""

from __future__ import annotations

from collections.abc import Callable, Iterable, Sequence
from dataclasses import dataclass, field
from functools import partial
from typing import Any

import torch
from torch import nn

from vblackwell.errors import ConfigurationError, Unsupported
from vblackwell.offload.layout.formats import (
    EXACT,
    MOMENTS,
    NARROW_KINDS,
    PACKED_MOMENTS,
    Formats,
    range_bytes,
    supports,
)
from vblackwell.units import align_up

ALIGNMENT = 512
MAX_TRAINED = 4  # where frozen parameters are more than so many times the others, they form a separate group
# These read the parameters of modules inside them, whose forwards do not run; in eval mode for kernels with other bits,
# if all are plain.
READERS = (nn.MultiheadAttention, nn.TransformerEncoderLayer)
TRAINED = "/trained"  # the name of the others' group then ends with this


@dataclass(eq=False)
class Slot:
    """One parameter's place in its group.

    Attributes:
        name: the parameter's first name in the model.
        param: the parameter itself; it stays the same object for the model's whole life.
        shape, stride, dtype: of the compute weight. ``stride`` is kept so that layouts such as channels_last survive.
        offset: bytes from the group's start, for anything in ``dtype`` (compute weight, gradient).
        offset_fp32: bytes from the group's start in ranges of fp32 (master, moments, accumulated gradient).
        plain_class: what the parameter is while its group is in use, `nn.Parameter` or the user's own child of it.
    """

    name: str
    param: nn.Parameter
    shape: torch.Size
    stride: tuple[int, ...]
    dtype: torch.dtype
    offset: int
    offset_fp32: int
    group: Group
    plain_class: type

    @property
    def num_elements(self) -> int:
        return self.shape.numel()

    def view(self, flat: torch.Tensor) -> torch.Tensor:
        """This parameter inside ``flat``, the group's uint8 range in compute dtype; in its own shape and stride."""
        return _strided(flat, self.offset, self.dtype, self.shape, self.stride)

    def view_fp32(self, flat: torch.Tensor) -> torch.Tensor:
        """The same inside a range of fp32."""
        return _strided(flat, self.offset_fp32, torch.float32, self.shape, self.stride)

    def flat(self, flat: torch.Tensor, dtype: torch.dtype | None = None) -> torch.Tensor:
        """Like `view`, as one dimension in memory order, which optimizers and sums work on.

        ``dtype``: of the same width, to read the bytes as.
        """
        return flat[self.offset : self.offset + self.num_elements * self.dtype.itemsize].view(dtype or self.dtype)

    def flat_fp32(self, flat: torch.Tensor) -> torch.Tensor:
        """Like `view_fp32`, as one dimension in memory order."""
        return flat[self.offset_fp32 : self.offset_fp32 + self.num_elements * 4].view(torch.float32)


def _strided(
    flat: torch.Tensor, offset: int, dtype: torch.dtype, shape: torch.Size, stride: tuple[int, ...]
) -> torch.Tensor:
    piece = flat[offset : offset + shape.numel() * dtype.itemsize].view(dtype)
    return piece.as_strided(shape, stride, piece.storage_offset())


@dataclass(eq=False)
class Group:
    """Parameters that move as one flat range of ``num_bytes`` (``num_bytes_fp32`` for fp32 states).

    ``formats`` says what else is kept of them, and what their offsets are multiples of.

    While all parameters have one compute type, element ``i`` of the one range is element ``i`` of the other
    (`uniform`), so that any interval of elements can be cut out of all of them alike.
    """

    index: int
    name: str
    slots: list[Slot] = field(default_factory=list)
    num_bytes: int = 0
    num_bytes_fp32: int = 0
    formats: Formats = EXACT

    def append(self, name: str, param: nn.Parameter, dtype: torch.dtype) -> Slot:
        """Give ``param`` the next place."""
        start, start_fp32 = self.num_bytes, self.num_bytes_fp32
        slot = Slot(name, param, param.shape, _dense_stride(param), dtype, start, start_fp32, self, type(param))
        self.slots.append(slot)
        alignment = max(ALIGNMENT, self.formats.block * dtype.itemsize)
        self.num_bytes = align_up(slot.offset + slot.num_elements * dtype.itemsize, alignment)
        self.num_bytes_fp32 = align_up(slot.offset_fp32 + slot.num_elements * 4, max(ALIGNMENT, self.formats.block * 4))
        if self.uniform:
            self.num_bytes_fp32 = max(self.num_bytes_fp32, self.num_bytes // dtype.itemsize * 4)
        return slot

    @property
    def uniform(self) -> bool:
        """Whether all compute weights have one type, of at most 4 bytes."""
        return len({slot.dtype for slot in self.slots}) == 1 and self.slots[0].dtype.itemsize <= 4

    @property
    def is_fp32(self) -> bool:
        """Whether gradients are fp32 already, so that their sum needs no range ``accumulated``."""
        return all(slot.dtype == torch.float32 for slot in self.slots if slot.dtype.is_floating_point)

    @property
    def needs_master(self) -> bool:
        """Whether some compute weight is narrower than the fp32 in which its truth is kept."""
        return not self.formats.stochastic and any(
            slot.dtype.is_floating_point and slot.dtype != torch.float32 for slot in self.slots
        )

    @property
    def dtype_names(self) -> str:
        """The compute types, for messages."""
        return ", ".join(sorted({str(slot.dtype).removeprefix("torch.") for slot in self.slots}))

    def size_of(self, kind: str) -> int:
        """Bytes of its range of ``kind``."""
        if kind in PACKED_MOMENTS:
            itemsize = self.slots[0].dtype.itemsize
            return range_bytes(kind, self.num_bytes // itemsize, itemsize)
        return self.num_bytes if kind in NARROW_KINDS else self.num_bytes_fp32

    def trainable(self) -> list[Slot]:
        """Slots whose parameter requires a gradient now; read anew each time because users freeze and unfreeze."""
        return [slot for slot in self.slots if slot.param.requires_grad]


def moment_ranges(groups: Sequence[Group]) -> list[tuple[Group, str]]:
    """The ranges that the moments of ``groups`` need, kind by kind."""
    return [(group, kind) for kind in (*MOMENTS, *PACKED_MOMENTS) for group in groups if kind in group.formats.moments]


@dataclass(eq=False)
class Site:
    """A module at whose forward some groups must be on level 0, if ``when(args, kwargs)``."""

    name: str
    module: nn.Module
    groups: list[Group]
    when: Callable[[Any, Any], bool] = lambda args, kwargs: True


def _dense_stride(param: torch.Tensor) -> tuple[int, ...]:
    """The parameter's stride if its memory is dense, else the row-major one (storing gaps would move dead bytes)."""
    dense = torch.empty_like(param, device="meta", memory_format=torch.preserve_format)
    return tuple(dense.stride())


def compute_dtype_of(param: torch.Tensor, wanted: torch.dtype | None) -> torch.dtype:
    """``wanted`` for floating-point parameters, their own type otherwise."""
    return wanted if wanted is not None and param.is_floating_point() else param.dtype


def find_groups(
    model: nn.Module,
    compute_dtype: torch.dtype | None = None,
    given: Iterable[str] | None = None,
    formats: Formats = EXACT,
) -> tuple[list[Group], list[Site]]:
    """Layer groups of ``model`` in registration order, and the modules that need them.

    Args:
        given: names of modules that each form one group (with all that is inside them), instead of the children of
            outermost ModuleLists.
        formats: of what AdamW keeps; frozen groups that cannot be kept so stay exact.

    Raises:
        ConfigurationError: a given name is not a module of the model.
        Unsupported: a group that is to be trained cannot be kept so.
    """
    whole = _with_readers(model, _given_roots(model, given) if given is not None else _list_children(model))
    groups: list[Group] = []
    sites: list[Site] = []
    owner: dict[nn.Parameter, Group] = {}
    inside: set[nn.Module] = set()
    for name, module in model.named_modules():
        if module in inside:
            continue
        recurse = module in whole
        if recurse:
            inside.update(module.modules())
        params = list(module.named_parameters(prefix=name, recurse=recurse))
        if not params:
            continue
        fresh = [(param_name, param) for param_name, param in params if param not in owner]
        for part in _apart(fresh):
            label = (name or type(model).__name__) + (
                TRAINED if len(part) < len(fresh) and part[0][1].requires_grad else ""
            )
            group = Group(len(groups), label, formats=formats)
            for param_name, param in part:
                group.append(param_name, param, compute_dtype_of(param, compute_dtype))
                owner[param] = group
            groups.append(group)
        needed = list(dict.fromkeys(owner[param] for _, param in params))
        sites.append(Site(name, module, needed))
    for name, module in model.named_modules():
        if isinstance(module, nn.TransformerEncoder) and module not in inside:
            first = dict.fromkeys(owner[param] for param in module.layers[0].parameters())
            sites.append(Site(name, module, list(first), partial(_may_nest, module)))
    for group in groups:
        if not supports(formats, (slot.dtype for slot in group.slots)):
            _refuse_formats(group)
            group.formats = EXACT
    return groups, sites


def _apart(params: list[tuple[str, nn.Parameter]]) -> list[list[tuple[str, nn.Parameter]]]:
    """Frozen parameters and the others, each as a separate group, where only a little is trained, as with adapters.

    Gradients, masters and moments have the length of their group, which must not be that of a frozen base.
    """
    frozen = [(name, param) for name, param in params if not param.requires_grad]
    trained = [(name, param) for name, param in params if param.requires_grad]
    bytes_apart = bool(trained) and any(not param.is_floating_point() for _, param in frozen)
    small = bytes_apart or sum(param.numel() for _, param in trained) * MAX_TRAINED < sum(
        param.numel() for _, param in frozen
    )
    return [part for part in ((frozen, trained) if small else (params,)) if part]


def _refuse_formats(group: Group) -> None:
    if group.trainable():
        found = group.dtype_names
        wanted = group.formats
        able = "bf16" if wanted.stochastic else "bf16 or fp32"
        raise Unsupported(
            f"states={wanted.states!r} with masters={wanted.masters!r} is for groups that compute in {able} alone, and "
            f"{group.name!r} has {found}: give compute_dtype=torch.bfloat16, or keep states='fp32' and masters='exact'"
        )


def _list_children(model: nn.Module) -> set[nn.Module]:
    """Children of the outermost ModuleLists, where those children own parameters."""
    children: set[nn.Module] = set()
    nested: set[nn.Module] = set()
    for module in model.modules():
        if isinstance(module, nn.ModuleList) and module not in nested:
            children.update(child for child in module if any(True for _ in child.parameters()))
            nested.update(inner for child in module for inner in child.modules())
    return children


def _may_nest(encoder: nn.TransformerEncoder, args: Any, kwargs: Any) -> bool:
    """Whether ``encoder`` reads its first layer's parameters, to leave out padding if none needs a gradient."""
    padding = kwargs.get("src_key_padding_mask", args[2] if len(args) > 2 else None)
    return padding is not None and not encoder.layers[0].training


def _with_readers(model: nn.Module, roots: set[nn.Module]) -> set[nn.Module]:
    """``roots`` and the `READERS` that have none of them inside."""
    readers = {module for module in model.modules() if isinstance(module, READERS)}
    return roots | {reader for reader in readers if roots.isdisjoint(reader.modules())}


def _given_roots(model: nn.Module, given: Iterable[str]) -> set[nn.Module]:
    modules = dict(model.named_modules())
    unknown = [name for name in given if name not in modules]
    if unknown:
        raise ConfigurationError(
            f"no module named {unknown[0]!r} in {type(model).__name__}: give names as in named_modules()"
        )
    return {modules[name] for name in given}
