"""safetensors files, written as a stream of tensors and read straight into memory that exists already.

The format is a table (eight bytes of length, then JSON: names, types, shapes, offsets) in front of the data, without
holes (https://huggingface.co/docs/safetensors). Written, the caller first declares what will come; then the table is
written, the file's size reserved, and each tensor goes to its place, wider types first, so that all are aligned (the
library's ``save_file`` wants all tensors in memory and renames without ``fsync``). Read, the library checks the whole
table on opening, and the data comes by ``pread``: a mapping would count as this process' memory too.
"""

import json
import os
from collections.abc import Generator, Iterable, Mapping
from contextlib import AbstractContextManager, suppress
from dataclasses import dataclass
from math import prod
from pathlib import Path
from typing import Any

import torch
from safetensors import SafetensorError, safe_open
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
MAX_TABLE_BYTES = 100_000_000  # what the library takes


@dataclass(frozen=True)
class TensorSpec:
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
    shards: list[list[TensorSpec]] = [[]]
    names, held = set[str](), 0
    for spec in sorted(specs, key=lambda spec: -spec.dtype.itemsize):
        if spec.name in names:
            raise ConfigurationError(f"tensor {spec.name!r} is declared twice: names must differ")
        if spec.dtype not in NAMES:
            raise ConfigurationError(f"tensor {spec.name!r} is {spec.dtype}, which safetensors cannot hold: cast it")
        if shards[-1] and held + spec.size_bytes > max_shard_bytes:
            shards.append([])
            held = 0
        shards[-1].append(spec)
        names.add(spec.name)
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


class SafetensorsShards(AbstractContextManager["SafetensorsShards"]):
    """Writes declared tensors into ``prefix.safetensors``, or, if they need several files, numbered ones with an index.

    ``with SafetensorsShards(folder, 'model', specs) as shards: for name in shards.names: shards.write(name, tensor)``

    ``metadata`` are strings to keep in each file; ``names`` is the order in which `write` wants the tensors.
    """

    def __init__(
        self,
        folder: CommitFolder,
        prefix: str,
        specs: Iterable[TensorSpec],
        max_shard_bytes: int = 5 * GiB,
        metadata: Mapping[str, str] | None = None,
    ) -> None:
        self._folder, self._prefix, self._metadata = folder, prefix, metadata
        self._shards = plan_shards(specs, max_shard_bytes)
        self._coming = self._files()
        self.names = [spec.name for shard in self._shards for spec in shard]

    def __exit__(self, kind: type[BaseException] | None, *_: object) -> None:
        if kind is not None:
            self._coming.close()
            return
        missing = next(self._coming, None)
        assert missing is None, f"{missing[0].name} was declared but not written"
        if len(self._shards) > 1:
            placed = [(spec, self._file_name(number)) for number, specs in enumerate(self._shards, 1) for spec in specs]
            size = sum(spec.size_bytes for spec, _ in placed)
            index = {"metadata": {"total_size": size}, "weight_map": {spec.name: file for spec, file in placed}}
            self._folder.add_json(f"{self._prefix}.safetensors.index.json", index)

    def write(self, name: str, tensor: Tensor) -> None:
        """Appends the next tensor of ``names``; any device, any strides. Raises DiskError."""
        spec, file = next(self._coming)
        assert spec == spec_of(name, tensor), f"expected {spec}, got {spec_of(name, tensor)}"
        flat = tensor.detach().reshape(-1)
        step = max(1, PART_BYTES // spec.dtype.itemsize)
        for start in range(0, flat.numel(), step):  # a tensor on a GPU needs no whole copy of itself on the host
            file.write(bytes_of(flat[start : start + step].cpu().contiguous()))

    def _files(self) -> Generator[tuple[TensorSpec, HashedFile], None, None]:
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


CONVERSION_BYTES = 8 << 20  # of one piece on its way to another type
_COMPARED = (torch.float64, torch.float32, torch.bfloat16, torch.float16)


@dataclass(frozen=True)
class StoredTensor(TensorSpec):
    """A tensor in a file; ``begin`` is the offset of its first byte there."""

    file: "TensorFile"
    begin: int

    @torch.no_grad()
    def read_into(self, out: Tensor) -> None:
        """Fill ``out`` (this shape, on the CPU, any strides and type); raises as `TensorFile.read`."""
        assert tuple(out.shape) == self.shape and out.device.type == "cpu"
        if not out.is_contiguous():
            out.copy_(self.load())
            return
        if out.dtype == self.dtype:
            self.file.read(bytes_of(out), self.begin)
            return
        begin, step = self.begin, CONVERSION_BYTES // self.dtype.itemsize
        buffer = torch.empty(min(step, out.numel()), dtype=self.dtype)
        for part in out.view(-1).split(step):
            piece = buffer[: part.numel()]
            self.file.read(bytes_of(piece), begin)
            part.copy_(piece)
            begin += piece.nbytes

    def equals(self, other: "StoredTensor") -> bool:
        """Whether type, shape and every byte are the same."""
        if (self.dtype, self.shape) != (other.dtype, other.shape):
            return False
        for start in range(0, self.size_bytes, CONVERSION_BYTES):
            one, two = (bytearray(min(CONVERSION_BYTES, self.size_bytes - start)) for _ in range(2))
            self.file.read(memoryview(one), self.begin + start)
            other.file.read(memoryview(two), other.begin + start)
            if one != two:
                return False
        return True

    def load(self) -> Tensor:
        out = torch.empty(self.shape, dtype=self.dtype)
        self.read_into(out)
        return out


def all_finite(tensor: Tensor) -> bool:
    """Whether no element is NaN or inf. A sum, at the speed of memory, unless large values overflow that."""
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


def bytes_of(tensor: Tensor) -> memoryview:
    """The bytes of a contiguous tensor in RAM."""
    flat: Any = tensor.detach().reshape(-1).view(torch.uint8).numpy()
    return memoryview(flat)


def _open_table(path: Path) -> Any:
    try:
        return safe_open(path, framework="numpy")
    except (SafetensorError, OSError) as error:
        reason = str(error).removeprefix("Error while deserializing header: ")
        if "unknown variant" in reason:
            raise Unsupported(f"{path} has a type that this version cannot read ({reason}); convert it") from error
        raise CorruptData(
            f"{path} is not a whole safetensors file ({reason}{_sizes(path)}); fetch or write the folder again"
        ) from error


def _sizes(path: Path) -> str:
    """The bytes that a file has and those that its table describes, as far as that can be read."""
    with suppress(OSError, ValueError, TypeError, AttributeError, LookupError, RecursionError), path.open("rb") as file:
        size, length = os.fstat(file.fileno()).st_size, int.from_bytes(file.read(8), "little")
        if length > min(size - 8, MAX_TABLE_BYTES):
            return f"; it has {size} bytes, its table alone ends at {8 + length}"
        ends = [
            entry["data_offsets"][1] for name, entry in json.loads(file.read(length)).items() if name != "__metadata__"
        ]
        return f"; it has {size} bytes, its table describes {8 + length + max(ends, default=0)}"
    return ""


class TensorFile(AbstractContextManager["TensorFile"]):
    """An open safetensors file; a context manager. ``metadata``: strings that its writer left with the ``tensors``.

    Raises CorruptData where it is cut short or its table is none, Unsupported for a type that torch has not, DiskError
    where it cannot be opened or read.
    """

    def __init__(self, path: Path) -> None:
        self.path = path
        self.tensors: dict[str, StoredTensor] = {}
        try:
            self._descriptor = os.open(path, os.O_RDONLY | os.O_CLOEXEC)
        except OSError as error:
            raise DiskError(f"{path} cannot be opened: {error.strerror}") from error
        try:
            with _open_table(path) as table:
                self.metadata: dict[str, str] = table.metadata() or {}
                length = bytearray(8)
                self.read(memoryview(length), 0)
                begin = 8 + int.from_bytes(length, "little")
                for name in table.offset_keys():  # in the order of the data, which has no holes
                    entry = table.get_slice(name)
                    kind = entry.get_dtype()
                    if kind not in DTYPES:
                        raise Unsupported(f"{path}: {name} is {kind}, which this version cannot read; convert it")
                    stored = StoredTensor(name, tuple(entry.get_shape()), DTYPES[kind], self, begin)
                    self.tensors[name] = stored
                    begin += stored.size_bytes
        except BaseException:
            self.__exit__()
            raise

    def __exit__(self, *_: object) -> None:
        descriptor, self._descriptor = self._descriptor, -1  # a later read fails instead of reading another file
        if descriptor >= 0:
            os.close(descriptor)

    def read(self, into: memoryview, begin: int) -> None:
        """Fill ``into`` from byte ``begin`` on; raises DiskError, or CorruptData where the file ends before."""
        while into:
            try:
                count = os.preadv(self._descriptor, [into[: 1 << 30]], begin)
            except OSError as error:
                raise DiskError(f"reading {self.path} at byte {begin}: {error.strerror}") from error
            if count == 0:
                short = f"ends at byte {begin}, {len(into)} bytes before a tensor's end"
                raise CorruptData(f"{self.path} {short}; fetch or write the folder again")
            into, begin = into[count:], begin + count
