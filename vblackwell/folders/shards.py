"""safetensors files written as a stream, one tensor at a time.

The format puts a table of names, types, shapes and offsets in front of the data, so the caller first declares what will
come; then the table is written, the file's size reserved, and each tensor goes straight to its place. ``safetensors``'
own ``save_file`` wants all tensors of a file in memory and renames without ``fsync``. Wider types come first in the
order, so that every tensor is aligned to its element whatever is mixed.
"""

from __future__ import annotations

import json
from collections.abc import Generator, Iterable, Mapping
from dataclasses import dataclass
from math import prod
from types import TracebackType

import torch
from torch import Tensor

from vblackwell.errors import ConfigurationError
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
        """Bytes of its elements."""
        return prod(self.shape) * self.dtype.itemsize


def spec_of(name: str, tensor: Tensor) -> TensorSpec:
    """The spec of an existing tensor."""
    return TensorSpec(name, tuple(tensor.shape), tensor.dtype)


def plan_shards(specs: Iterable[TensorSpec], max_shard_bytes: int) -> list[list[TensorSpec]]:
    """Tensors by file: wider elements first, otherwise as given; a file ends before it would exceed
    ``max_shard_bytes``.

    Raises:
        ConfigurationError: a name twice, or a type that safetensors does not know.
    """
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
    """Writes declared tensors into ``prefix.safetensors``, or, if they need several files, into numbered ones with an
    index.

    ``with SafetensorsShards(folder, 'model', specs) as shards: for name in shards.names: shards.write(name, tensor)``

    Args:
        folder: the commit that the files belong to.
        prefix: of the file names.
        specs: every tensor that will come.
        max_shard_bytes: of one file, unless a single tensor is larger.
        metadata: strings to keep in each file with the tensors.

    Attributes:
        names: the order in which ``write`` wants the tensors.
        total_bytes: of all files together, tables included.
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

    def __exit__(
        self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None
    ) -> None:
        if kind is not None:
            self._coming.close()
            return
        missing = next(self._coming, None)
        assert missing is None, f"{missing[0].name} was declared but not written"
        if len(self._shards) > 1:
            self._write_index()

    def write(self, name: str, tensor: Tensor) -> None:
        """Appends the next tensor of ``names``; any device, any strides.

        Raises:
            DiskError: the disk refused.
        """
        spec, file = next(self._coming)
        assert spec == spec_of(name, tensor), f"expected {spec}, got {spec_of(name, tensor)}"
        flat = tensor.detach().reshape(-1)
        step = max(1, PART_BYTES // spec.dtype.itemsize)
        for start in range(
            0, flat.numel(), step
        ):  # a part at a time: a tensor on a GPU needs no copy of itself on the host
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
        return (
            f"{self._prefix}.safetensors" if count == 1 else f"{self._prefix}-{number:05d}-of-{count:05d}.safetensors"
        )

    def _write_index(self) -> None:
        places = {spec.name: self._file_name(number) for number, specs in enumerate(self._shards, 1) for spec in specs}
        size = sum(spec.size_bytes for specs in self._shards for spec in specs)
        index = {"metadata": {"total_size": size}, "weight_map": places}
        self._folder.add_json(f"{self._prefix}.safetensors.index.json", index)


def save_tensors(folder: CommitFolder, prefix: str, tensors: dict[str, Tensor], max_shard_bytes: int = 5 * GiB) -> None:
    """Writes tensors that are all at hand."""
    with SafetensorsShards(folder, prefix, (spec_of(*item) for item in tensors.items()), max_shard_bytes) as shards:
        for name in shards.names:
            shards.write(name, tensors[name])
