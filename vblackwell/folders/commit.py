"""The commit protocol: a folder of files is on disk complete and verifiable under its name, or not at all.

    step-N.tmp/     files, each synced            a crash here leaves a ``.tmp``, which the next start removes
    manifest.json   sizes and XXH3, synced        what verification reads
    the folder      synced
    rename          step-N.tmp -> step-N          the commit
    the parent      synced
    prune           older folders                 never before the new one is safe

Bytes are hashed on their way to the file: reading them back would only meet the page cache. A failed ``fsync`` abandons
the folder: the kernel may have dropped the pages, and a second call would succeed.
"""

import errno
import hashlib
import json
import os
import re
import secrets
import shutil
from collections.abc import Iterable, Iterator
from contextlib import contextmanager
from io import FileIO
from pathlib import Path
from typing import Any

import xxhash

from vblackwell.errors import ConfigurationError, CorruptData, DiskError
from vblackwell.machine.lock import SUFFIX, disk_error, make_work_folder, remove_if_abandoned
from vblackwell.units import MiB, format_bytes

MANIFEST = "manifest.json"
FORMAT = 1
REPLACED = ".replaced"
WRITE_BYTES = 16 * MiB
NO_ROOM = (errno.ENOSPC, errno.EDQUOT, errno.EFBIG)
PREFIX = "step-"
_STEP = re.compile(rf"{PREFIX}\d+")


class CommitFolder:
    """``with CommitFolder(parent, name) as folder:`` write into it; leaving the block commits, an exception abandons.

    A folder that already has the name is replaced at the commit, if it is empty or was committed too, or if
    ``own_parent`` says that no other program writes into ``parent`` (one without a manifest is then a damaged one), and
    else refused by ConfigurationError: it is somebody's own. While the block runs the work folder is locked, so that no
    other process takes it for a leftover. Raises DiskError where the disk failed or has less than ``needed_bytes``; the
    work folder is gone then, older ones are as before. ``shared``: several processes may write the same files at once,
    each into a separate work folder, and the first commit counts.
    """

    def __init__(
        self, parent: Path, name: str, needed_bytes: int = 0, *, own_parent: bool = False, shared: bool = False
    ) -> None:
        final = parent / name  # a link's folder goes where it points to, say to a larger disk
        self._final = final.resolve() if final.is_symlink() else final
        self._own_parent, self._needed_bytes, self._shared = own_parent, needed_bytes, shared
        unique = f".{secrets.token_hex(4)}" if shared else ""
        self.path = self._final.with_name(f"{self._final.name}{unique}{SUFFIX}")
        self._entries: dict[str, dict[str, Any]] = {}

    def __enter__(self) -> "CommitFolder":
        final, parent = self._final, self._final.parent
        try:
            parent.mkdir(parents=True, exist_ok=True)
        except OSError as error:
            raise disk_error("creating", parent, error) from error
        clean_leftovers(parent, final.name)
        ours = (final / MANIFEST).is_file() or (self._own_parent and final.is_dir())
        if final.exists() and not ours and (not final.is_dir() or any(final.iterdir())):
            raise ConfigurationError(
                f"{final} exists and has no {MANIFEST}, so this package did not write it: choose another folder, or "
                "move it away"
            )
        if self._needed_bytes > (free := shutil.disk_usage(parent).free):
            raise DiskError(
                f"{final} needs {format_bytes(self._needed_bytes)}, {format_bytes(free)} are free on its disk: make "
                "room, or choose another folder"
            )
        self._lock = make_work_folder(self.path)
        return self

    def __exit__(self, kind: type[BaseException] | None, *_: object) -> None:
        committed = False
        try:
            committed = kind is None and self._commit()
        finally:
            if not committed:
                shutil.rmtree(self.path, ignore_errors=True)
            os.close(self._lock)

    @contextmanager
    def open(self, name: str) -> Iterator["HashedFile"]:
        """A file to write front to back, hashed on the way and synced at the end."""
        path = self.path / name
        try:
            with path.open("xb", buffering=0) as raw:
                file = HashedFile(path, raw)
                yield file
                sync(raw.fileno(), path)
                self._entries[name] = {"size": file.size, "xxh3": file.digest.hexdigest()}
        except BaseException as error:
            path.unlink(missing_ok=True)  # a caller that catches this must not commit half a file
            if isinstance(error, OSError) and not isinstance(error, DiskError):
                raise disk_error("writing", path, error) from error
            raise

    def add(self, name: str, data: bytes | memoryview) -> None:
        with self.open(name) as file:
            file.write(data)

    def add_json(self, name: str, value: Any) -> None:
        self.add(name, (json.dumps(value, indent=2, ensure_ascii=False) + "\n").encode())

    def _commit(self) -> bool:
        """Whether the files now have the name; not where another process was faster."""
        self.add_json(MANIFEST, {"format": FORMAT, "files": dict(sorted(self._entries.items()))})
        sync_folder(self.path)
        final, replaced = self._final, self._final.with_name(f"{self._final.name}{REPLACED}{SUFFIX}")
        try:
            if final.exists() and not self._shared:
                os.rename(final, replaced)
            os.rename(self.path, final)
        except BaseException as error:  # an interrupt, too, leaves the older one under its name
            if self._shared and isinstance(error, OSError) and error.errno in (errno.ENOTEMPTY, errno.EEXIST):
                return False
            if replaced.exists() and not final.exists():
                os.rename(replaced, final)
            if isinstance(error, OSError):
                raise disk_error("renaming", self.path, error) from error
            raise
        sync_folder(final.parent)
        if replaced.exists():
            remove_if_abandoned(replaced)
        return True


def clean_leftovers(parent: Path, name: str | None = None) -> None:
    """Removes work folders whose writers are dead, and puts back one that was being replaced.
    Only those of checkpoints (``step-N``) and of ``name``: others' may end in ``.tmp`` as well."""
    for path in sorted(parent.glob(f"*{SUFFIX}")):
        original = path.with_name(path.name.removesuffix(SUFFIX).removesuffix(REPLACED))
        if not path.is_dir() or not (original.name == name or _STEP.fullmatch(original.name)):
            continue
        if path.name.endswith(REPLACED + SUFFIX) and not original.exists():
            os.rename(path, original)
            sync_folder(parent)
        else:
            remove_if_abandoned(path)


def verify_folder(path: Path, remedy: str = "use another checkpoint") -> None:
    """Checks a committed folder against its manifest; raises CorruptData with the file that differs and ``remedy``."""
    file = path / MANIFEST

    def damaged(how: str) -> CorruptData:
        return CorruptData(f"{file} {how}; {remedy}")

    try:
        files = json.loads(file.read_text(encoding="utf-8"))["files"]
        expected = {name: (entry["size"], entry["xxh3"]) for name, entry in files.items()}
        for name, (size, digest) in expected.items():
            file = path / name
            if (held := file.stat().st_size) != size:
                raise damaged(f"has {held} bytes, written were {size}")
            if (found := hash_file(file)["xxh3"]) != digest:
                raise damaged(f"differs from what was written (XXH3 {found}, not {digest})")
    except FileNotFoundError as error:
        raise damaged("is missing" + ": the folder was never committed" * (file.name == MANIFEST)) from error
    except OSError as error:
        raise damaged(f"cannot be read: {error.strerror}") from error
    except (ValueError, KeyError, TypeError, AttributeError, RecursionError) as error:
        raise damaged(f"is damaged ({error})") from error


def step_of(path: Path) -> int:
    return int(path.name.removeprefix(PREFIX))


def numbered(parent: Path) -> list[Path]:
    """Folders ``step-N`` under ``parent``, the newest first."""
    found = [path for path in parent.glob(f"{PREFIX}*") if _STEP.fullmatch(path.name) and path.is_dir()]
    return sorted(found, key=lambda path: (step_of(path), path), reverse=True)


def newest_complete(parent: Path) -> list[Path]:
    """Those that were committed; not verified yet."""
    return [path for path in numbered(parent) if (path / MANIFEST).is_file()]


def first_intact(folders: Iterable[Path]) -> tuple[Path | None, list[CorruptData]]:
    """The first folder whose bytes are intact (``None``: there is none), and what is wrong with those before it."""
    problems = []
    for path in folders:
        try:
            verify_folder(path)
            return path, problems
        except CorruptData as error:
            problems.append(error)
    return None, problems


def prune(parent: Path, keep: int) -> None:
    assert keep >= 1
    for path in newest_complete(parent)[keep:]:
        discard(path)


def discard(path: Path) -> None:
    """Removes a committed folder, which another process may do too; readers that have its files open keep them."""
    gone = path.with_name(path.name + SUFFIX)
    try:
        os.rename(path, gone)  # first: a crash in the middle of deleting must not leave half of it under its name
    except FileNotFoundError:
        return
    except OSError as error:
        raise disk_error("removing", path, error) from error
    remove_if_abandoned(gone)


class HashedFile:
    """A file of a ``CommitFolder`` being written front to back; made by ``CommitFolder.open``."""

    def __init__(self, path: Path, raw: FileIO) -> None:
        self.path, self._raw = path, raw
        self.digest, self.size = xxhash.xxh3_128(), 0

    def write(self, data: bytes | memoryview) -> None:
        """Appends ``data``; raises DiskError with offset, size and free space."""
        view = memoryview(data).cast("B")
        for start in range(0, len(view), WRITE_BYTES):
            piece = view[start : start + WRITE_BYTES]
            try:
                write_whole(self._raw, piece)
            except OSError as error:
                raise write_error(self.path, self.size, len(view) - start, error) from error
            self.digest.update(piece)
            self.size += len(piece)

    def reserve(self, size_bytes: int) -> None:
        """Claims the file's final size on the disk, so that a full disk is met before the first byte is written."""
        try:
            os.posix_fallocate(self._raw.fileno(), 0, size_bytes)
        except OSError as error:
            if error.errno not in (errno.EOPNOTSUPP, errno.EINVAL):  # file systems without it
                raise write_error(self.path, 0, size_bytes, error) from error


def write_whole(raw: FileIO, data: memoryview) -> None:
    """All of ``data`` to an unbuffered file, going on after a short write."""
    while data:
        data = data[raw.write(data) :]


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
    if error.errno not in NO_ROOM:
        what = f"writing {size_bytes} bytes at offset {offset} of {path}"
        return DiskError(f"{what} failed: {error.strerror}; check the disk")
    free = shutil.disk_usage(path.parent).free
    return DiskError(
        f"no room for {format_bytes(size_bytes)} at offset {offset} of {path} ({error.strerror}); {format_bytes(free)} "
        "are free on its disk: make room or lift the limit, or choose another folder; older checkpoints are untouched"
    )


def hash_file(path: Path) -> dict[str, Any]:
    """Size and XXH3 of a file, as the manifest has them."""
    with path.open("rb") as file:
        digest = hashlib.file_digest(file, xxhash.xxh3_128)
        return {"size": file.tell(), "xxh3": digest.hexdigest()}
