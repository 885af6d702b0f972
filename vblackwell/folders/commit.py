"""The commit protocol: a folder of files is on disk complete and verifiable under its name, or not at all.

    step-N.tmp/     files, each synced            a crash here leaves a ``.tmp``, which the next start removes
    manifest.json   sizes and XXH3, synced        what verification reads
    the folder      synced
    rename          step-N.tmp -> step-N          the commit
    the parent      synced
    prune           older folders                 never before the new one is safe

Where we write the bytes ourselves, they are hashed on their way to the file: reading them back would only meet the page
cache. A refused write names file, offset, size and what is free. A failed ``fsync`` abandons the folder: the kernel may
have dropped the pages, and a second call would succeed.
"""

from __future__ import annotations

import errno
import json
import os
import re
import shutil
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import Any, BinaryIO

import xxhash

from vblackwell.errors import ConfigurationError, CorruptData, DiskError
from vblackwell.machine.lock import SUFFIX, disk_error, make_work_folder, remove_if_abandoned
from vblackwell.units import MiB, format_bytes

MANIFEST = "manifest.json"
FORMAT = 1
REPLACED = ".replaced"
WRITE_BYTES = 16 * MiB
NO_ROOM = (errno.ENOSPC, errno.EDQUOT, errno.EFBIG)
_STEP = re.compile(r"step-\d+")


class CommitFolder:
    """``with CommitFolder(parent, name) as folder:`` write into ``folder``; leaving the block commits, an exception
    abandons.

    A folder that already has the name is replaced at the commit, if it is empty or was committed too, or if
    ``own_parent`` says that no other program writes into ``parent`` (one without a manifest is then a damaged one).
    While the block runs the work folder is locked, so that no other process takes it for a leftover. ``needed_bytes``
    are refused at once if the disk has less.

    Raises:
        ConfigurationError: what has the name holds files and was never committed: it is somebody's own.
        DiskError: the disk is full or failed, with needed and free bytes; the work folder is gone, older ones are as
            before.
    """

    def __init__(
        self, parent: Path, name: str, needed_bytes: int | None = None, *, own_parent: bool = False
    ) -> None:  # fmt: skip
        self._own_parent = own_parent
        final = parent / name
        if final.is_symlink():  # the folder goes where the link points to, say to a larger disk
            final = final.resolve()
        self.parent, self.name, self.needed_bytes = final.parent, final.name, needed_bytes
        self.path = final.with_name(f"{final.name}{SUFFIX}")
        self._entries: dict[str, dict[str, Any]] = {}

    def __enter__(self) -> CommitFolder:
        try:
            self.parent.mkdir(parents=True, exist_ok=True)
        except OSError as error:
            raise disk_error("creating", self.parent, error) from error
        clean_leftovers(self.parent, self.name)
        self._check_replaceable(self.parent / self.name)
        free = shutil.disk_usage(self.parent).free
        if self.needed_bytes is not None and self.needed_bytes > free:
            raise DiskError(
                f"{self.parent / self.name} needs {format_bytes(self.needed_bytes)}, {format_bytes(free)} are free on "
                "its disk: make room, or choose another folder"
            )
        self._lock = make_work_folder(self.path)
        return self

    def _check_replaceable(self, final: Path) -> None:
        if not final.exists() or (final / MANIFEST).is_file() or (self._own_parent and final.is_dir()):
            return
        if not final.is_dir() or any(final.iterdir()):
            raise ConfigurationError(
                f"{final} exists and has no {MANIFEST}, so this package did not write it: choose another folder, or "
                "move it away"
            )

    def __exit__(self, kind: type[BaseException] | None, *_: object) -> None:
        try:
            if kind is None:
                self._commit()
                return
            shutil.rmtree(self.path, ignore_errors=True)
        except BaseException:
            shutil.rmtree(self.path, ignore_errors=True)
            raise
        finally:
            os.close(self._lock)

    @contextmanager
    def open(self, name: str) -> Iterator[HashedFile]:
        """A file to write front to back, hashed on the way and synced at the end."""
        path = self.path / name
        try:
            path.parent.mkdir(parents=True, exist_ok=True)
            with path.open("xb", buffering=0) as raw:
                file = HashedFile(path, WholeWrites(raw))  # pyright: ignore[reportArgumentType]
                yield file
                self._entries[name] = file.finish()
        except BaseException as error:
            path.unlink(missing_ok=True)  # a caller that catches this must not commit half a file
            if isinstance(error, OSError) and not isinstance(error, DiskError):
                raise disk_error("writing", path, error) from error
            raise

    def add(self, name: str, data: bytes | memoryview) -> None:
        with self.open(name) as file:
            file.write(data)

    def add_json(self, name: str, value: Any) -> None:
        """Writes ``value`` as JSON that people can read."""
        self.add(name, (json.dumps(value, indent=2, ensure_ascii=False) + "\n").encode())

    def _commit(self) -> None:
        for path in sorted(self.path.rglob("*")):
            name = path.relative_to(self.path).as_posix()
            if path.is_file() and name not in self._entries:  # written by a library straight into the folder
                self._entries[name] = sync_and_hash(path)
        self.add_json(MANIFEST, {"format": FORMAT, "files": dict(sorted(self._entries.items()))})
        for path in (*(found for found in self.path.rglob("*") if found.is_dir()), self.path):
            sync_folder(path)
        final, replaced = self.parent / self.name, self.parent / f"{self.name}{REPLACED}{SUFFIX}"
        try:
            if final.exists():
                os.rename(final, replaced)
            os.rename(self.path, final)
        except OSError as error:
            if replaced.exists() and not final.exists():
                os.rename(replaced, final)
            raise disk_error("renaming", self.path, error) from error
        sync_folder(self.parent)
        if replaced.exists():
            remove_if_abandoned(replaced)


def clean_leftovers(parent: Path, name: str | None = None) -> list[Path]:
    """Removes work folders whose writers are dead, puts back a folder that was being replaced; returns what was
    removed.

    Only those of checkpoints (``step-N``) and of ``name``: others' may end in ``.tmp`` as well.
    """
    removed = []
    for path in sorted(parent.glob(f"*{SUFFIX}")):
        original = path.with_name(path.name.removesuffix(SUFFIX).removesuffix(REPLACED))
        if not path.is_dir() or (original.name != name and not _STEP.fullmatch(original.name)):
            continue
        if path.name.endswith(REPLACED + SUFFIX) and not original.exists():
            os.rename(path, original)
            sync_folder(parent)
        elif remove_if_abandoned(path):
            removed.append(path)
    return removed


def verify_folder(path: Path) -> None:
    """Checks every file of a committed folder against its manifest; raises CorruptData naming the file that is missing
    or differs, or the manifest."""
    manifest = path / MANIFEST
    try:
        files = json.loads(manifest.read_text(encoding="utf-8"))["files"]
        expected = {name: (entry["size"], entry["xxh3"]) for name, entry in files.items()}
    except FileNotFoundError as error:
        raise CorruptData(f"{manifest} is missing: the folder was never committed; use another checkpoint") from error
    except OSError as error:
        raise CorruptData(f"{manifest} cannot be read: {error.strerror}; use another checkpoint") from error
    except (ValueError, KeyError, TypeError, AttributeError, RecursionError) as error:
        raise CorruptData(f"{manifest} is damaged ({error}); use another checkpoint") from error
    for name, (size, digest) in expected.items():
        file = path / name
        if not file.is_file():
            raise CorruptData(f"{file} is missing; use another checkpoint")
        if file.stat().st_size != size:
            raise CorruptData(f"{file} has {file.stat().st_size} bytes, written were {size}; use another checkpoint")
        try:
            found = hash_file(file)["xxh3"]
        except OSError as error:
            raise CorruptData(f"{file} cannot be read: {error.strerror}; use another checkpoint") from error
        if found != digest:
            raise CorruptData(
                f"{file} differs from what was written (XXH3 {found}, not {digest}); use another checkpoint"
            )


def newest_complete(parent: Path, prefix: str = "step-") -> list[Path]:
    """Committed folders ``prefix`` + number under ``parent``, the newest first; not verified yet."""
    return [path for path in _numbered(parent, prefix) if (path / MANIFEST).is_file()]


def step_of(path: Path, prefix: str = "step-") -> int:
    return int(path.name.removeprefix(prefix))


def _numbered(parent: Path, prefix: str) -> list[Path]:
    """Folders ``prefix`` + number under ``parent``, the newest first."""
    found = []
    for path in parent.glob(f"{prefix}*"):
        number = path.name.removeprefix(prefix)
        if number.isdecimal() and path.is_dir():
            found.append((int(number), path))
    return [path for _, path in sorted(found, reverse=True)]


def newest_verified(parent: Path, prefix: str = "step-") -> tuple[Path | None, list[CorruptData]]:
    """The newest folder whose bytes are intact (``None``: there is none), and what is wrong with those newer than it.

    A folder without a manifest counts as damaged: folders get their names with it, so it was lost later.
    """
    problems = []
    for path in _numbered(parent, prefix):
        try:
            verify_folder(path)
        except CorruptData as error:
            problems.append(error)
        else:
            return path, problems
    return None, problems


def prune(parent: Path, keep: int, prefix: str = "step-") -> list[Path]:
    """Removes all but the ``keep`` newest committed folders; returns those removed."""
    assert keep >= 1
    old = newest_complete(parent, prefix)[keep:]
    for path in old:
        gone = path.with_name(path.name + SUFFIX)
        try:
            # First: a crash in the middle of deleting must not leave half a checkpoint under its name.
            os.rename(path, gone)
        except OSError as error:
            raise disk_error("removing", path, error) from error
        remove_if_abandoned(gone)
    return old


class HashedFile:
    """A file of a ``CommitFolder`` being written front to back; made by ``CommitFolder.open``."""

    def __init__(self, path: Path, file: BinaryIO) -> None:
        self.path, self._file = path, file
        self._digest, self.size = xxhash.xxh3_128(), 0

    def write(self, data: bytes | memoryview) -> None:
        """Appends ``data``; raises DiskError with offset, size and free space."""
        view = memoryview(data).cast("B")
        for start in range(0, len(view), WRITE_BYTES):
            piece = view[start : start + WRITE_BYTES]
            try:
                self._file.write(piece)
            except OSError as error:
                raise write_error(self.path, self.size, len(view) - start, error) from error
            self._digest.update(piece)
            self.size += len(piece)

    def reserve(self, size_bytes: int) -> None:
        """Claims the file's final size on the disk, so that a full disk is met before the first byte is written."""
        if not size_bytes or not hasattr(os, "posix_fallocate"):
            return
        try:
            os.posix_fallocate(self._file.fileno(), 0, size_bytes)
        except OSError as error:
            if error.errno not in (errno.EOPNOTSUPP, errno.EINVAL):  # file systems without it
                raise write_error(self.path, 0, size_bytes, error) from error

    def finish(self) -> dict[str, Any]:
        """Syncs the file; returns its entry of the manifest."""
        sync(self._file.fileno(), self.path)
        return {"size": self.size, "xxh3": self._digest.hexdigest()}


class WholeWrites:
    """An unbuffered file whose ``write`` goes on after a short write."""

    def __init__(self, raw: Any) -> None:
        self._raw = raw
        self.fileno = raw.fileno

    def write(self, data: memoryview) -> None:
        while data:
            data = data[self._raw.write(data) :]


def sync(descriptor: int, path: Path) -> None:
    """``fsync``, with its refusal as a ``DiskError``: the data are then lost, whatever a second call says."""
    try:
        os.fsync(descriptor)
    except OSError as error:
        raise disk_error("syncing", path, error) from error


def sync_folder(path: Path) -> None:
    """Makes names created and renamed in ``path`` survive a power cut."""
    descriptor = os.open(path, os.O_RDONLY | os.O_DIRECTORY)
    try:
        sync(descriptor, path)
    finally:
        os.close(descriptor)


def write_error(path: Path, offset: int, size_bytes: int, error: OSError) -> DiskError:
    """A refused write as the user should read it."""
    if error.errno not in NO_ROOM:
        return DiskError(
            f"writing {size_bytes} bytes at offset {offset} of {path} failed: {error.strerror}; check the disk"
        )
    free = shutil.disk_usage(path.parent).free
    return DiskError(
        f"no room for {format_bytes(size_bytes)} at offset {offset} of {path} ({error.strerror}); {format_bytes(free)} "
        "are free on its disk: make room or lift the limit, or choose another folder; older checkpoints are untouched"
    )


def hash_file(path: Path) -> dict[str, Any]:
    """Size and XXH3 of a file, as the manifest has them."""
    digest, size = xxhash.xxh3_128(), 0
    with path.open("rb") as file:
        while block := file.read(4 * MiB):
            digest.update(block)
            size += len(block)
    return {"size": size, "xxh3": digest.hexdigest()}


def sync_and_hash(path: Path) -> dict[str, Any]:
    """Syncs a file that somebody else wrote; returns its entry of the manifest."""
    with path.open("rb") as file:
        sync(file.fileno(), path)
    return hash_file(path)
