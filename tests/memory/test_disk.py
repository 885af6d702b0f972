"""A disk that is full, broken, lying or no disk at all."""

from __future__ import annotations

import errno
import fcntl
import os
import stat
from collections.abc import Callable
from contextlib import nullcontext
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import pytest
import torch

from tests.memory.conftest import random_bytes
from vblackwell.errors import ConfigurationError, CorruptData, DiskError, InsufficientMemory
from vblackwell.machine.facts import disk_facts
from vblackwell.memory import disk as disk_module
from vblackwell.memory import transfer
from vblackwell.memory.disk import DiskFull, DiskLevel
from vblackwell.memory.host import map_slab
from vblackwell.units import GiB, KiB, MiB

PIECE = 64 * KiB


class Calls:
    """System calls that can be told to fail, or to do only part of the work."""

    def __init__(self) -> None:
        self.read_error: int | None = None
        self.write_error: int | None = None
        self.room: int | None = None
        self.no_room = errno.ENOSPC
        self.at_most: int | None = None

    def preadv(self, fd: int, buffers: list[memoryview], offset: int) -> int:
        if self.read_error:
            raise OSError(self.read_error, os.strerror(self.read_error))
        return self._short(os.preadv(fd, buffers, offset))

    def pwritev(self, fd: int, buffers: list[memoryview], offset: int) -> int:
        if self.write_error:
            raise OSError(self.write_error, os.strerror(self.write_error))
        return self._short(os.pwritev(fd, buffers, offset))

    def _short(self, count: int) -> int:
        return count if self.at_most is None else min(count, self.at_most)

    def posix_fallocate(self, fd: int, offset: int, length: int) -> None:
        if self.room is not None and offset + length > self.room:
            raise OSError(self.no_room, os.strerror(self.no_room))
        os.posix_fallocate(fd, offset, length)


@pytest.fixture
def calls() -> Calls:
    return Calls()


@pytest.fixture
def disk(disk_path: str, calls: Calls):
    level = DiskLevel(disk_path, 4 * MiB, piece_bytes=PIECE, threads=2)
    level._file.calls = calls
    yield level
    level.close()


def stored(disk: DiskLevel, num_bytes: int, seed: int = 0):
    extent, source = disk.allocate(num_bytes), random_bytes(num_bytes, seed)
    disk.write(extent, source).wait()
    return extent, source


def read(disk: DiskLevel, extent, num_bytes: int | None = None) -> torch.Tensor:
    out = torch.zeros(num_bytes or extent.num_bytes, dtype=torch.uint8)
    disk.read(extent, out).wait()
    return out


def test_the_file_is_private_unlinked_and_goes_with_the_level(disk_path: str):
    level = DiskLevel(disk_path, 4 * MiB)
    fd = level._file.fd
    status = os.fstat(fd)
    assert stat.S_IMODE(status.st_mode) == 0o600 and status.st_nlink == 0
    assert os.listdir(disk_path) == []
    level.close()
    with pytest.raises(OSError):
        os.fstat(fd)


def test_space_is_reserved_at_allocation(disk: DiskLevel):
    before = os.fstat(disk._file.fd).st_blocks * 512
    extent = disk.allocate(3 * MiB)
    assert os.fstat(disk._file.fd).st_blocks * 512 >= before + 3 * MiB
    disk.free(extent)


def test_ordinary_files_where_tmpfile_and_direct_are_missing(disk_path: str, monkeypatch: pytest.MonkeyPatch):
    real = os.open

    def without(path, flags, mode=0o777, **kwargs):
        if flags & os.O_TMPFILE == os.O_TMPFILE:
            raise OSError(errno.EOPNOTSUPP, "not here")
        return real(path, flags, mode, **kwargs)

    def refuse_direct(fd, command, flags=0):
        if flags & os.O_DIRECT:
            raise OSError(errno.EINVAL, "not here")
        return real_fcntl(fd, command, flags)

    real_fcntl = fcntl.fcntl
    monkeypatch.setattr(os, "open", without)
    monkeypatch.setattr(fcntl, "fcntl", refuse_direct)
    level = DiskLevel(disk_path, 4 * MiB, piece_bytes=PIECE)
    assert not level._file.direct and os.listdir(disk_path) == []
    assert os.fstat(level._file.fd).st_mode & 0o777 == 0o600
    extent, source = stored(level, 200_001)
    assert torch.equal(read(level, extent), source)
    level.close()


@pytest.mark.skipif(not os.path.isdir("/dev/shm"), reason="needs a tmpfs")
def test_tmpfs_is_refused():
    with pytest.raises(ConfigurationError, match="/dev/shm is on tmpfs, which is RAM"):
        DiskLevel("/dev/shm", MiB)


def test_paths_that_are_no_directories(disk_path: str):
    with pytest.raises(ConfigurationError, match="No such file"):
        DiskLevel(f"{disk_path}/missing", MiB)
    Path(disk_path, "file").touch()
    with pytest.raises(ConfigurationError, match="is a file"):
        DiskLevel(f"{disk_path}/file", MiB)


def test_short_reads_and_writes_are_continued(disk: DiskLevel, calls: Calls):
    calls.at_most = 5000  # not even a whole number of pages
    extent, source = stored(disk, 300_001)
    assert torch.equal(read(disk, extent), source)
    assert torch.equal(read(disk, extent, 77_777), source[:77_777])


def test_a_disk_that_makes_no_progress_is_an_error(disk: DiskLevel, calls: Calls):
    extent, _ = stored(disk, 10_000)
    calls.at_most = 0
    with pytest.raises(DiskError, match="stopped after 0 bytes"):
        read(disk, extent)
    with pytest.raises(DiskError, match="stopped after 0 bytes"):
        stored(disk, 10_000)


def test_a_read_error_names_file_offset_and_size_and_is_raised_on_every_wait(disk: DiskLevel, calls: Calls):
    extent, source = stored(disk, PIECE)
    calls.read_error = errno.EIO
    transfer = disk.read(extent, torch.zeros(PIECE, dtype=torch.uint8))
    for _ in range(2):
        with pytest.raises(
            DiskError, match=f"reading {PIECE} bytes at offset 0 of .* failed: Input/output error"
        ) as failed:
            transfer.wait()
        causes = [failed.value.__cause__, getattr(failed.value.__cause__, "__cause__", None)]
        assert any(type(cause) is OSError and cause.errno == errno.EIO for cause in causes)
    assert transfer.done()
    calls.read_error = None
    assert torch.equal(read(disk, extent), source)  # a failed read loses nothing


def test_a_write_error_poisons_the_file(disk: DiskLevel, calls: Calls):
    good, source = stored(disk, 100_000)
    extent = disk.allocate(PIECE)
    calls.write_error = errno.EIO
    with pytest.raises(DiskError, match="writing .* failed: Input/output error"):
        disk.write(extent, random_bytes(PIECE)).wait()
    calls.write_error = None
    with pytest.raises(DiskError, match="not written to any more"):
        disk.write(extent, random_bytes(PIECE)).wait()
    with pytest.raises(DiskError, match="not written to any more"):
        disk.allocate(MiB)
    assert not disk.can_allocate(1)
    assert torch.equal(read(disk, good), source)  # what was there is still good


def test_a_piece_whose_writing_failed_cannot_be_read(disk_path: str, calls: Calls):
    """Half of it may be on the disk: neither what was there nor what was to come."""
    level = DiskLevel(disk_path, MiB, piece_bytes=PIECE, threads=2)
    level._file.calls = calls
    good, source = stored(level, PIECE)
    extent, _ = stored(level, 2 * PIECE)
    calls.write_error = errno.EIO
    with pytest.raises(DiskError, match="writing .* failed"):
        level.write(extent, random_bytes(PIECE, seed=1)).wait()
    with pytest.raises(CorruptData, match="neither the old bytes nor the new"):
        read(level, extent)
    with pytest.raises(DiskError, match="not written to any more"):  # before anything changed
        level.write(good, random_bytes(PIECE, seed=1)).wait()
    assert torch.equal(read(level, good), source)
    level.close()


def test_a_quota_that_is_nearly_reached(disk: DiskLevel, calls: Calls):
    calls.room, calls.no_room = 100_000, errno.EDQUOT
    extent, source = stored(disk, 90_000)
    assert torch.equal(read(disk, extent), source)


def test_a_full_disk_is_met_at_allocation(disk: DiskLevel, calls: Calls, disk_path: str):
    calls.room = 100_000
    extent, source = stored(disk, 90_000)
    with pytest.raises(DiskFull, match="is full: .* free some space") as caught:
        disk.allocate(50_000)
    assert isinstance(caught.value, InsufficientMemory) and isinstance(caught.value, DiskError)
    assert disk_path in str(caught.value) and caught.value.needed_bytes > 0
    assert disk.used_bytes == extent.held_bytes
    assert torch.equal(read(disk, extent), source)
    calls.room = None
    disk.free(disk.allocate(50_000))


def test_more_than_the_file_system_has_is_not_allocatable(disk_path: str):
    free = disk_facts(disk_path).free_bytes
    level = DiskLevel(disk_path, free + 1024 * GiB)
    assert not level.can_allocate(free + 512 * GiB)  # others may free some of it meanwhile
    level.close()


LIMITED = """
import resource, sys, torch
from vblackwell.errors import DiskError
from vblackwell.memory import disk as disk_module
from vblackwell.memory.disk import DiskLevel
level = DiskLevel(sys.argv[1], 64 << 20)
kept = level.allocate(1 << 20)
resource.setrlimit(resource.RLIMIT_FSIZE, (32 << 20, 32 << 20))
try:
    level.allocate(48 << 20)
except DiskError as error:
    assert "File too large" in str(error) and "could not reserve" in str(error), error
    level.write(kept, torch.ones(1 << 20, dtype=torch.uint8)).wait()
    level.close()
    print("refused")
"""


def test_a_file_size_limit_is_met_at_allocation(disk_path: str, program: Callable[..., str]):
    """A real limit of the system, in a separate process."""
    assert program(LIMITED, disk_path) == "refused\n"


@pytest.mark.parametrize("position", [0, PIECE - 1, PIECE, 150_000])
def test_a_flipped_bit_is_found(disk: DiskLevel, position: int):
    extent, source = stored(disk, 150_001)
    name = f"/proc/self/fd/{disk._file.fd}"
    with open(name, "r+b", buffering=0) as file:
        file.seek(extent.offset + position)
        byte = file.read(1)[0]
        file.seek(extent.offset + position)
        file.write(bytes([byte ^ 1]))
        os.fsync(file.fileno())
    with pytest.raises(CorruptData, match=r"came back changed: XXH3 \w{16} instead of \w{16}"):
        read(disk, extent)
    piece = position // PIECE
    if piece:  # the pieces before the bad one are good, and a part of the bad one is not
        assert torch.equal(read(disk, extent, piece * PIECE), source[: piece * PIECE])
        with pytest.raises(CorruptData):
            read(disk, extent, piece * PIECE + 1)


def test_a_reused_range_has_no_old_checksum(disk: DiskLevel):
    extent, _ = stored(disk, 150_000)
    disk.free(extent)
    again = disk.allocate(150_000)
    assert again.offset == extent.offset
    read(disk, again)  # undefined contents, but no error
    disk.write(again, random_bytes(150_000, seed=5)).wait()
    assert torch.equal(read(disk, again), random_bytes(150_000, seed=5))


def test_overwriting_the_front_keeps_the_rest_checked(disk: DiskLevel):
    extent, source = stored(disk, 150_000)
    disk.write(extent, random_bytes(10, seed=3)).wait()
    source[:10] = random_bytes(10, seed=3)
    assert torch.equal(read(disk, extent), source)
    with open(f"/proc/self/fd/{disk._file.fd}", "r+b", buffering=0) as file:
        file.seek(extent.offset + PIECE - 1)
        file.write(bytes([int(source[PIECE - 1]) ^ 1]))
        os.fsync(file.fileno())
    with pytest.raises(CorruptData):
        read(disk, extent, 10)


def test_a_transfer_waits_for_the_current_stream_and_for_the_one_whose_pool_levels_allocate_from(
    disk: DiskLevel, monkeypatch: pytest.MonkeyPatch
):
    """On a GPU: bytes may have been produced, and memory freed, on either."""

    class OnGpu:
        is_cuda, nbytes, device = True, PIECE, torch.device("cuda", 0)

        def __getitem__(self, part: slice) -> OnGpu:
            return self

        def data_ptr(self) -> int:
            return 0

    class Stream:
        cuda_stream = 7  # which is not the default one's

        def __init__(self, name: str) -> None:
            self.name = name
            self.waited: list[str] = []

        def record_event(self, event: Any = None) -> Any:
            return event or self.name

        def wait_event(self, event: str) -> None:
            self.waited.append(event)

    class Event:
        def __init__(self, blocking: bool) -> None:
            pass

        def synchronize(self) -> None:
            pass

    copying = Stream("copying")
    monkeypatch.setattr(transfer, "current_stream", lambda device: Stream("current"))
    monkeypatch.setattr(torch.cuda, "default_stream", lambda device: Stream("default"))
    monkeypatch.setattr(torch.cuda, "stream", lambda stream: nullcontext())
    monkeypatch.setattr(torch.cuda, "Event", Event)
    monkeypatch.setattr(disk_module, "copy_streams", lambda device: SimpleNamespace(h2d=copying, d2h=copying))
    monkeypatch.setattr(torch.Tensor, "copy_", lambda self, source, non_blocking=False: self)
    extent = disk.allocate(PIECE)
    disk._start(disk._write_piece, extent, OnGpu()).wait()  # type: ignore[arg-type]
    assert copying.waited == ["current", "default"]


@pytest.mark.parametrize("num_bytes", [PIECE + 100, 2 * PIECE - 1, 50])
def test_only_the_last_page_of_aligned_memory_is_copied(
    disk: DiskLevel, num_bytes: int, monkeypatch: pytest.MonkeyPatch
):
    carried = list[int]()
    monkeypatch.setattr(disk, "_carry", lambda dst, src, ready: carried.append(src.nbytes))
    memory, out = (map_slab(2 * PIECE)[:num_bytes] for _ in range(2))
    memory.copy_(random_bytes(num_bytes))
    extent = disk.allocate(num_bytes)
    disk.write(extent, memory).wait()
    disk.read(extent, out).wait()
    assert not carried and torch.equal(out, memory)
