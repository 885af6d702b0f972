"""safetensors files, written as a stream of tensors and read straight into memory that exists already.

The format is a table (eight bytes of length, then JSON: names, types, shapes, offsets) in front of the data
(https://huggingface.co/docs/safetensors). Written, the caller first declares what will come; then the table is written,
the file's size reserved, and each tensor goes to its place, wider types first, so that all are aligned (the library's
``save_file`` wants all tensors in memory and renames without ``fsync``). Read, the whole table is checked on opening,
and the data comes by ``pread``: a mapping would count as this process' memory in addition to the weights themselves.
"""

from __future__ import annotations

import json
import os
from collections.abc import Generator, Iterable, Mapping
from dataclasses import dataclass
from math import prod
from pathlib import Path
from typing import Any

import torch
from torch import Tensor

from vblackwell.errors import ConfigurationError, CorruptData, DiskError, Unsupported
from vblackwell.folders.commit import CommitFolder, HashedFile
from vblackwell.units import GiB, align_up

DTYPES = {
    "F64": torch.float64, "F32": torch.float32, "F16": torch.float16, "BF16": torch.bfloat16, "I64": torch.int64,
    "I32": torch.int32, "I16": torch.int16, "I8": torch.int8, "U8": torch.uint8, "BOOL": torch.bool,
    "F8_E4M3": torch.float8_e4m3fn, "F8_E5M2": torch.float8_e5m2, "U16": torch.uint16, "U32": torch.uint32,
    "U64": torch.uint64,
}  # fmt: skip
NAMES = {dtype: name for name, dtype in DTYPES.items()}
PART_BYTES = 64 << 20


@dataclass(frozen=True)
class TensorSpec:
    """What a tensor will be."""

    name: str
    shape: tuple[int, ...]
    dtype: torch.dtype

    @property
    def size_bytes(self) -> int:
        return prod(self.shape) * self.dtype.itemsize


def spec_of(name: str, tensor: Tensor) -> TensorSpec:
    return TensorSpec(name, tuple(tensor.shape), tensor.dtype)


def plan_shards(specs: Iterable[TensorSpec], max_shard_bytes: int) -> list[list[TensorSpec]]:
    """Tensors by file: wider elements first, otherwise as given; a file ends before it would exceed
    ``max_shard_bytes``. Raises ConfigurationError for a name twice, or a type that safetensors does not know."""
    ordered = sorted(specs, key=lambda spec: -spec.dtype.itemsize)
    names = [spec.name for spec in ordered]
    if len(set(names)) < len(names):
        raise ConfigurationError(
            f"tensor {next(n for n in names if names.count(n) > 1)!r} is declared twice: names must differ"
        )
    shards: list[list[TensorSpec]] = [[]]
    held = 0
    for spec in ordered:
        if spec.dtype not in NAMES:
            raise ConfigurationError(f"tensor {spec.name!r} is {spec.dtype}, which safetensors cannot hold: cast it")
        if shards[-1] and held + spec.size_bytes > max_shard_bytes:
            shards.append([])
            held = 0
        shards[-1].append(spec)
        held += spec.size_bytes
    return shards


def header(specs: list[TensorSpec], metadata: Mapping[str, str] | None = None) -> bytes:
    """What stands in front of the data of one file: the table's length, and the table, padded to 8 bytes."""
    table: dict[str, object] = {"__metadata__": {"format": "pt", **(metadata or {})}}
    offset = 0
    for spec in specs:
        end = offset + spec.size_bytes
        table[spec.name] = {"dtype": NAMES[spec.dtype], "shape": list(spec.shape), "data_offsets": [offset, end]}
        offset = end
    text = json.dumps(table, separators=(",", ":"), ensure_ascii=False).encode()
    text = text.ljust(align_up(len(text), 8))
    return len(text).to_bytes(8, "little") + text


class SafetensorsShards:
    """Writes declared tensors into ``prefix.safetensors``, or, if they need several files, numbered ones with an index.

    ``with SafetensorsShards(folder, 'model', specs) as shards: for name in shards.names: shards.write(name,
    tensor)``

    Args:
        folder: the commit that the files belong to.
        specs: every tensor that will come.
        max_shard_bytes: of one file, unless a single tensor is larger.
        metadata: strings to keep in each file with the tensors.

    Attributes:
        names: the order in which ``write`` wants the tensors. total_bytes: of all files together, tables included.
    """

    def __init__(
        self, folder: CommitFolder, prefix: str, specs: Iterable[TensorSpec], max_shard_bytes: int = 5 * GiB,
        metadata: Mapping[str, str] | None = None,
    ) -> None:  # fmt: skip
        self._folder, self._prefix, self._metadata = folder, prefix, metadata
        self._shards = plan_shards(specs, max_shard_bytes)
        self._coming = self._files()
        self.names = [spec.name for shard in self._shards for spec in shard]
        heads = (len(header(shard, metadata)) for shard in self._shards)
        self.total_bytes = sum(heads) + sum(spec.size_bytes for shard in self._shards for spec in shard)

    def __enter__(self) -> SafetensorsShards:
        return self

    def __exit__(self, kind: type[BaseException] | None, *_: object) -> None:
        if kind is not None:
            self._coming.close()
            return
        missing = next(self._coming, None)
        assert missing is None, f"{missing[0].name} was declared but not written"
        if len(self._shards) > 1:
            self._write_index()

    def write(self, name: str, tensor: Tensor) -> None:
        """Appends the next tensor of ``names``; any device, any strides. Raises DiskError."""
        spec, file = next(self._coming)
        assert spec == spec_of(name, tensor), f"expected {spec}, got {spec_of(name, tensor)}"
        flat = tensor.detach().reshape(-1)
        step = max(1, PART_BYTES // spec.dtype.itemsize)
        for start in range(0, flat.numel(), step):  # a tensor on a GPU needs no whole copy of itself on the host
            file.write(flat[start : start + step].cpu().contiguous().view(torch.uint8).numpy().data)

    def _files(self) -> Generator[tuple[TensorSpec, HashedFile], None, None]:
        """Each declared tensor with the file it goes to, opened for its first tensor and closed after its last."""
        for number, specs in enumerate(self._shards, 1):
            with self._folder.open(self._file_name(number)) as file:
                head = header(specs, self._metadata)
                file.reserve(len(head) + sum(spec.size_bytes for spec in specs))
                file.write(head)
                for spec in specs:
                    yield spec, file

    def _file_name(self, number: int) -> str:
        count = len(self._shards)
        part = "" if count == 1 else f"-{number:05d}-of-{count:05d}"
        return f"{self._prefix}{part}.safetensors"

    def _write_index(self) -> None:
        places = {spec.name: self._file_name(number) for number, specs in enumerate(self._shards, 1) for spec in specs}
        size = sum(spec.size_bytes for specs in self._shards for spec in specs)
        index = {"metadata": {"total_size": size}, "weight_map": places}
        self._folder.add_json(f"{self._prefix}.safetensors.index.json", index)


MAX_TABLE_BYTES = 100_000_000  # what the reference implementation takes
CONVERSION_BYTES = 8 << 20  # of one piece on its way to another type
_COMPARED = (torch.float64, torch.float32, torch.bfloat16, torch.float16)


@dataclass(frozen=True)
class StoredTensor:
    """A tensor in a file; ``begin`` is the offset of its first byte there."""

    name: str
    file: TensorFile
    dtype: torch.dtype
    shape: tuple[int, ...]
    begin: int

    @property
    def size_bytes(self) -> int:
        return prod(self.shape) * self.dtype.itemsize

    @torch.no_grad()
    def read_into(self, out: Tensor) -> None:
        """Fill ``out`` (this shape, on the CPU, any strides and type) with the file's values, cast to its type; raises
        DiskError, or CorruptData where the file became shorter."""
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
    """Whether no element is NaN or inf. A sum, at the speed of memory, unless that is not finite itself: large values
    may overflow it."""
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
    """An open safetensors file; a context manager. ``metadata``: strings that its writer left with the ``tensors``.

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

    def __exit__(self, kind: type[BaseException] | None, *_: object) -> None:
        self.close()

    def close(self) -> None:
        """Give the descriptor back; a second call does nothing."""
        if self._descriptor >= 0:
            os.close(self._descriptor)
            self._descriptor = -1

    def read(self, into: memoryview, begin: int) -> None:
        """Fill ``into`` from the file's byte ``begin`` on; raises DiskError, or CorruptData where the file ends
        before."""
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
