"""What the stack knows of one key: its layout, where its bytes are, and the tensors that its users may hold.

The bytes of a key are one extent of row-major parts, each at a multiple of 64 bytes: one for a tensor, one per
component for a packed tensor. On level 0 `access` hands out aliases of tensors over the extent, and the storage's use
count tells whether any are still held: by a variable, a view, or autograd.
"""

from collections.abc import Callable
from dataclasses import dataclass, field
from functools import cache
from typing import Any

import torch

from vblackwell.errors import ConfigurationError
from vblackwell.memory.level import Extent
from vblackwell.memory.transfer import flat_bytes
from vblackwell.numerics.packed import PackedTensor
from vblackwell.units import align_up

PART_ALIGNMENT = 64


@dataclass(frozen=True, slots=True)
class Part:  # one tensor inside an extent
    name: str
    offset: int
    shape: torch.Size
    dtype: torch.dtype
    num_bytes: int


@dataclass(frozen=True, slots=True)
class Layout:
    """How an extent's bytes become the value that was registered. Those of equal parts take each other's bytes."""

    parts: tuple[Part, ...]
    num_bytes: int
    meta: dict[str, Any] | None  # of a packed tensor

    def tensors_over(self, buffer: torch.Tensor) -> tuple[torch.Tensor, ...]:
        """The parts as aliases of ``buffer``, a flat uint8 tensor of at least ``num_bytes``."""
        pieces = (buffer[part.offset : part.offset + part.num_bytes].view(part.dtype) for part in self.parts)
        return tuple(piece.view(part.shape).detach() for piece, part in zip(pieces, self.parts, strict=True))

    def value(self, tensors: tuple[torch.Tensor, ...]) -> Any:
        """What the user sees, made of aliases of ``tensors``."""
        if self.meta is None:
            return tensors[0].detach()
        named = {part.name: tensor.detach() for part, tensor in zip(self.parts, tensors, strict=True)}
        return PackedTensor.from_tensors(named, self.meta)


def layout_of(value: Any) -> tuple[Layout, tuple[torch.Tensor, ...]]:
    """The layout for ``value``, and its tensors, contiguous and detached; raises ConfigurationError for no tensor."""
    meta, named = None, {"": value}
    if isinstance(value, PackedTensor):
        meta, named = value.meta(), value.tensors()
    elif not isinstance(value, torch.Tensor):
        raise ConfigurationError(f"a stack holds tensors and packed tensors, not {type(value).__name__}")
    tensors = tuple(_plain(tensor) for tensor in named.values())
    parts, offset = [], 0
    for name, tensor in zip(named, tensors, strict=True):
        parts.append(Part(name, offset, tensor.shape, tensor.dtype, tensor.nbytes))
        offset = align_up(offset + tensor.nbytes, PART_ALIGNMENT)
    return Layout(tuple(parts), parts[-1].offset + parts[-1].num_bytes if parts else 0, meta), tensors


def _plain(tensor: torch.Tensor) -> torch.Tensor:
    if tensor.layout != torch.strided or tensor.is_meta or tensor.is_quantized:
        raise ConfigurationError(
            f"a stack holds dense tensors with bytes in memory, not {tensor.layout} {tensor.dtype} on {tensor.device}: "
            f"call .to_dense(), or give it a device"
        )
    return tensor.detach().resolve_conj().resolve_neg().contiguous()


def packed_bytes(layout: Layout, tensors: tuple[torch.Tensor, ...]) -> torch.Tensor:
    """The extent's bytes for ``tensors``: an alias where there is one part, a fresh buffer otherwise."""
    if len(tensors) == 1:
        return flat_bytes(tensors[0])
    buffer = torch.zeros(layout.num_bytes, dtype=torch.uint8, device=tensors[0].device)
    for part, tensor in zip(layout.parts, tensors, strict=True):
        buffer[part.offset : part.offset + part.num_bytes].copy_(flat_bytes(tensor))
    return buffer


@dataclass(eq=False, slots=True)
class Entry:
    """One key of a stack. Everything but the constants changes under the stack's lock only. No extent means that
    `stray` has the bytes, in RAM outside all levels."""

    key: str
    priority: int
    layout: Layout
    level: int = 0
    owner: str | None = None
    extent: Extent | None = None
    stray: torch.Tensor | None = None
    # Tensors over the extent while the key is on level 0 and is not being moved or written.
    resident: tuple[torch.Tensor, ...] | None = None
    pins: int = 0  # how many `borrow` blocks hold it
    expected: bool = False  # a prefetch brought it up and it has not been accessed since
    error: BaseException | None = None  # what its last prefetch ran into; raised by the next access
    # But the default one, that were given its tensors since its bytes were written.
    side_streams: set[torch.cuda.Stream] = field(default_factory=set)
    last_use: int = 0  # on the policy's clock
    next_use: float = float("inf")
    seat: tuple[int, int] | None = None  # in the policy's order
    _storage: int = 0
    _own_count: int = 0

    @property
    def num_bytes(self) -> int:
        return max(1, self.layout.num_bytes)  # a tensor without elements has a place, too

    def show(self, buffer: torch.Tensor) -> None:
        """Make the tensors over ``buffer``, the extent on level 0."""
        with torch.inference_mode(False):
            self.resident = self.layout.tensors_over(buffer)
        self._storage = buffer.untyped_storage()._cdata
        self._own_count = _count_unshared() + len(self.resident)  # the level's own tensor, and ours

    def held(self) -> bool:
        """Whether somebody other than the stack holds bytes of the extent on level 0."""
        if self.pins or self.resident is None:
            return bool(self.pins)
        return USE_COUNT(self._storage) > self._own_count


@cache
def _count_unshared() -> int:
    """The use count of a storage that one tensor has: torch releases differ in whether its Python object counts too."""
    tensor = torch.empty(1, device="cpu")
    return USE_COUNT(tensor.untyped_storage()._cdata)


USE_COUNT: Callable[[int], int] = torch._C._storage_Use_Count  # pyright: ignore[reportAttributeAccessIssue]

KIND_PRIORITIES = (
    (3, ("norm", "ln_")),
    (10, ("embed", "wte", "wpe", "lm_head", "tok_")),
    (7, ("attn", "attention", "q_proj", "k_proj", "v_proj", "o_proj", "qkv")),
)


def default_priority(key: str) -> int:
    """Priority by what the name says: embedding 10, attention 7, feed-forward 5, norm 3; 5 where it says nothing."""
    return next((priority for priority, words in KIND_PRIORITIES if any(word in key.lower() for word in words)), 5)
