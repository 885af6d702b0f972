"""Bytes on a device: a CUDA GPU, a neighbouring GPU, or, on machines without one, a capped arena in RAM.

Each extent is one uint8 allocation from torch's allocator, accounted in its 512-byte blocks. So every extent has a
storage that nothing else shares: whether a tensor of it is still held is a question torch can answer (the storage's use
count), and freeing it gives the memory back to whatever else runs in the process. Why not one big buffer cut by
ourselves: the stack would take its whole cap from the model's activations from the first second on.

The memory is taken when the extent is materialised, from the pool of the device's default stream whatever stream is
current, so that it does not matter which thread does it. Copies start after what is queued there and on the current
stream.
"""

from __future__ import annotations

import torch

from vblackwell.errors import InsufficientMemory
from vblackwell.memory.copying import flat_bytes
from vblackwell.memory.level import Extent, Level
from vblackwell.units import align_up, format_bytes

ALIGNMENT = 512


class _Block:
    """The allocation of an extent; None until it is materialised and after it was released."""

    __slots__ = ("tensor",)

    def __init__(self) -> None:
        self.tensor: torch.Tensor | None = None


class DeviceLevel(Level):
    """A level in the memory of ``device``, capped at ``capacity_bytes``; ``cpu`` makes it the arena."""

    device: torch.device

    def __init__(self, device: torch.device | str, capacity_bytes: int, name: str | None = None) -> None:
        device = torch.device(device)
        if device.type == "cuda" and device.index is None:
            device = torch.device("cuda", torch.cuda.current_device())
        super().__init__(name or ("arena" if device.type == "cpu" else str(device)), device, capacity_bytes, ALIGNMENT)

    def _take(self, held_bytes: int) -> tuple[int, _Block]:
        return 0, _Block()

    def materialise(self, extent: Extent) -> None:
        if extent.handle.tensor is None:
            extent.handle.tensor = self._allocate_bytes(extent.num_bytes)

    def _allocate_bytes(self, num_bytes: int) -> torch.Tensor:
        try:
            with torch.inference_mode(False):  # a tensor born under inference mode breaks a later backward
                if self.device.type != "cpu":
                    with torch.cuda.stream(torch.cuda.default_stream(self.device)):
                        return torch.empty(align_up(num_bytes, ALIGNMENT), dtype=torch.uint8, device=self.device)
                block = torch.empty(align_up(num_bytes, ALIGNMENT) + ALIGNMENT, dtype=torch.uint8, device="cpu")
                start = -block.data_ptr() % ALIGNMENT
                return block[start : start + align_up(num_bytes, ALIGNMENT)].detach()
        except (torch.OutOfMemoryError, MemoryError) as error:
            raise self._refused(num_bytes) from error
        except RuntimeError as error:  # torch's CPU allocator raises this, with nothing but a text
            if "memory" not in str(error):
                raise
            raise self._refused(num_bytes) from error

    def _refused(self, num_bytes: int) -> InsufficientMemory:
        return InsufficientMemory(
            f"{self.device} gave no {format_bytes(num_bytes)} although {self.name}'s cap of "
            f"{format_bytes(self.capacity_bytes)} has room: something else uses the device's memory; lower the cap",
            needed_bytes=num_bytes,
            available_bytes=0,
        )

    def adopt(self, tensor: torch.Tensor) -> Extent | None:
        """An extent that takes over the contiguous ``tensor``'s own memory, or None where that cannot be done.

        It can where the tensor is on this device, starts its storage and fills it, and the level has room.
        """
        flat = flat_bytes(tensor)
        storage_bytes = tensor.untyped_storage().nbytes()
        fits = tensor.device == self.device and tensor.storage_offset() == 0 and tensor.data_ptr() % 64 == 0
        if not fits or not 0 < storage_bytes <= align_up(flat.nbytes, ALIGNMENT) or flat.is_inference():
            return None
        if not self.can_allocate(flat.nbytes):
            return None
        extent = self.place(flat.nbytes)
        extent.handle.tensor = flat.detach()
        return extent

    def release(self, extent: Extent) -> None:
        extent.handle.tensor = None

    def view(self, extent: Extent) -> torch.Tensor:
        self.materialise(extent)
        return extent.handle.tensor[: extent.num_bytes].detach()

    def close(self) -> None:
        live = tuple(self._live)
        super().close()
        for extent in live:
            extent.handle.tensor = None
