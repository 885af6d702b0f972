"""Reading safetensors files straight into memory that exists already.

The format is a table (eight bytes of length, then JSON: names, types, shapes, offsets) in front of the data
(https://huggingface.co/docs/safetensors). `TensorFile` checks the whole table when it is opened: a file that was cut
short, or whose table does not describe its bytes, is named before anything is read from it. The data is read with
``pread`` into the tensor that wants it. A mapping of the file would count as this process' memory, in addition to the
weights themselves: a second copy.
"""

from __future__ import annotations

import json
import os
from dataclasses import dataclass
from math import prod
from pathlib import Path
from types import TracebackType
from typing import Any

import torch
from torch import Tensor

from vblackwell.errors import ConfigurationError, CorruptData, DiskError, Unsupported
from vblackwell.folders.shards import DTYPES

MAX_TABLE_BYTES = 100_000_000  # what the reference implementation takes
CONVERSION_BYTES = 8 << 20  # of one piece on its way to another type
_COMPARED = (torch.float64, torch.float32, torch.bfloat16, torch.float16)


@dataclass(frozen=True)
class StoredTensor:
    """A tensor in a file.

    Attributes:
        begin: offset of its first byte in the file.
    """

    name: str
    file: TensorFile
    dtype: torch.dtype
    shape: tuple[int, ...]
    begin: int

    @property
    def size_bytes(self) -> int:
        """Bytes of its elements."""
        return prod(self.shape) * self.dtype.itemsize

    @torch.no_grad()
    def read_into(self, out: Tensor) -> None:
        """Fill ``out`` (this shape, on the CPU, any strides and type) with the file's values, cast to its type.

        Raises:
            DiskError: the disk failed.
            CorruptData: the file became shorter since it was opened.
        """
        assert tuple(out.shape) == self.shape and out.device.type == "cpu"
        if out.is_contiguous() and out.dtype == self.dtype:
            self.file.read(_bytes_of(out), self.begin)
            return
        whole = out.is_contiguous()
        flat = out.view(-1) if whole else torch.empty(out.numel(), dtype=out.dtype)
        step = CONVERSION_BYTES // self.dtype.itemsize
        buffer = torch.empty(min(step, out.numel()), dtype=self.dtype)
        for start in range(0, out.numel(), step):
            piece = buffer[: min(step, out.numel() - start)]
            self.file.read(_bytes_of(piece), self.begin + start * self.dtype.itemsize)
            flat[start : start + piece.numel()].copy_(piece)
        if not whole:
            out.copy_(flat.view(out.shape))

    def equals(self, other: StoredTensor) -> bool:
        """Whether type, shape and every byte are the same."""
        if (self.dtype, self.shape) != (other.dtype, other.shape):
            return False
        one, two = bytearray(min(self.size_bytes, CONVERSION_BYTES)), bytearray(min(self.size_bytes, CONVERSION_BYTES))
        for start in range(0, self.size_bytes, CONVERSION_BYTES):
            count = min(CONVERSION_BYTES, self.size_bytes - start)
            self.file.read(memoryview(one)[:count], self.begin + start)
            other.file.read(memoryview(two)[:count], other.begin + start)
            if one[:count] != two[:count]:
                return False
        return True

    def load(self) -> Tensor:
        """A new tensor of the file's type and values."""
        out = torch.empty(self.shape, dtype=self.dtype)
        self.read_into(out)
        return out


def all_finite(tensor: Tensor) -> bool:
    """Whether no element is NaN or inf; integers and types that torch does not compare have none.

    A sum, at the speed of memory, unless that is not finite itself: large values may overflow it.
    """
    if tensor.dtype not in _COMPARED or tensor.numel() == 0 or bool(tensor.sum().isfinite()):
        return True
    return bool(torch.stack(torch.aminmax(tensor)).isfinite().all())


def refuse_not_finite(tensor: Tensor, name: str, path: Path) -> None:
    """Raises ConfigurationError where an element of the weight is NaN or inf, with how many are."""
    if not all_finite(tensor):
        bad = tensor.numel() - int(tensor.isfinite().sum())
        raise ConfigurationError(
            f"{path}: {name} has {bad} NaN or inf of {tensor.numel()} elements: nothing can be learnt or packed from "
            "them; fetch the folder again, or give weights from before they overflowed"
        )


def _bytes_of(tensor: Tensor) -> memoryview:
    flat: Any = tensor.detach().reshape(-1).view(torch.uint8).numpy()
    return memoryview(flat)


class TensorFile:
    """An open safetensors file; a context manager.

    Attributes:
        tensors: what is in it, by name. metadata: strings that its writer left with them.

    Raises:
        CorruptData: the file is cut short, or its table is none.
        Unsupported: a tensor has a type that torch has not.
        DiskError: the file cannot be opened or read.
    """

    def __init__(self, path: Path) -> None:
        self.path = path
        self.metadata: dict[str, str] = {}
        try:
            self._descriptor = os.open(path, os.O_RDONLY | os.O_CLOEXEC)
        except OSError as error:
            raise DiskError(f"{path} cannot be opened: {error.strerror}") from error
        try:
            self.tensors = self._read_table()
        except BaseException:
            self.close()
            raise

    def __enter__(self) -> TensorFile:
        return self

    def __exit__(
        self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None
    ) -> None:
        self.close()

    def close(self) -> None:
        """Give the descriptor back; a second call does nothing."""
        if self._descriptor >= 0:
            os.close(self._descriptor)
            self._descriptor = -1

    def read(self, into: memoryview, begin: int) -> None:
        """Fill ``into`` from the file's byte ``begin`` on.

        Raises:
            DiskError: the disk failed.
            CorruptData: the file ends before.
        """
        done = 0
        while done < len(into):
            try:
                count = os.preadv(self._descriptor, [into[done : done + (1 << 30)]], begin + done)
            except OSError as error:
                raise DiskError(f"reading {self.path} at byte {begin + done}: {error.strerror}") from error
            if count == 0:
                raise self._broken(f"it ends at byte {begin + done}, {len(into) - done} bytes before a tensor's end")
            done += count

    def _broken(self, reason: str) -> CorruptData:
        return CorruptData(f"{self.path} is not a whole safetensors file: {reason}; fetch or write the folder again")

    def _read_table(self) -> dict[str, StoredTensor]:
        size = os.fstat(self._descriptor).st_size
        if size < 8:
            raise self._broken(f"it has {size} bytes, fewer than the length of its table")
        head = bytearray(8)
        self.read(memoryview(head), 0)
        length = int.from_bytes(head, "little")
        if length > MAX_TABLE_BYTES:
            raise self._broken(f"its first eight bytes announce a table of {length} bytes, more than any has")
        if 8 + length > size:
            raise self._broken(f"it has {size} bytes, its table alone ends at {8 + length}")
        raw = bytearray(length)
        self.read(memoryview(raw), 8)
        try:
            table = json.loads(raw)
        except (ValueError, RecursionError) as error:
            raise self._broken(f"its table is not JSON ({error})") from error
        if not isinstance(table, dict):
            raise self._broken("its table is no JSON object")
        metadata = table.pop("__metadata__", None)
        if isinstance(metadata, dict):
            self.metadata = {key: value for key, value in metadata.items() if isinstance(value, str)}
        found = {name: self._entry(name, entry, 8 + length) for name, entry in table.items()}
        self._check_extents(found, 8 + length, size)
        return found

    def _entry(self, name: str, entry: Any, data_begin: int) -> StoredTensor:
        try:
            kind, shape, (begin, end) = entry["dtype"], tuple(entry["shape"]), entry["data_offsets"]
            sound = isinstance(kind, str) and all(
                type(number) is int and number >= 0 for number in (*shape, begin, end)
            )
        except (KeyError, TypeError, ValueError):
            sound, kind, shape, begin, end = False, None, (), 0, 0
        if not sound:
            raise self._broken(f"its table's entry of {name} has not type, shape and offsets")
        if kind not in DTYPES:
            raise Unsupported(f"{self.path}: {name} is {kind}, which this version cannot read; convert it")
        tensor = StoredTensor(name, self, DTYPES[kind], shape, data_begin + begin)
        if end - begin != tensor.size_bytes:
            raise self._broken(
                f"{name} {shape} of {kind} takes {tensor.size_bytes} bytes, its table gives it {end - begin}"
            )
        return tensor

    def _check_extents(self, found: dict[str, StoredTensor], begin: int, size: int) -> None:
        position = begin
        for tensor in sorted(found.values(), key=lambda tensor: (tensor.begin, tensor.size_bytes)):
            if tensor.begin != position:
                raise self._broken(
                    f"{tensor.name} begins at byte {tensor.begin}, what lies before it ends at {position}"
                )
            position += tensor.size_bytes
        if position != size:
            short = f"{position - size} bytes are missing" if size < position else f"{size - position} are too many"
            raise self._broken(f"it has {size} bytes, its table describes {position}: {short}")
