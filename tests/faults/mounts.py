"""Small file systems, and cgroups, where this machine lets us have them."""

from __future__ import annotations

import os
import subprocess
import tempfile
from collections.abc import Iterator
from contextlib import contextmanager
from functools import cache
from pathlib import Path


@contextmanager
def small_tmpfs(folder: Path, *options: str) -> Iterator[Path]:
    """A tmpfs at ``folder``, with options such as size=1m, nr_inodes=10, ro."""
    folder.mkdir(exist_ok=True)
    subprocess.run(["mount", "-t", "tmpfs", "-o", ",".join(options), "none", folder], check=True, capture_output=True)
    try:
        yield folder
    finally:
        subprocess.run(["umount", "--lazy", folder], check=True)


@contextmanager
def small_ext4(folder: Path, size_bytes: int) -> Iterator[Path]:
    """An ext4 file system of ``size_bytes`` in a file, loop-mounted at ``folder``: a disk with O_DIRECT."""
    folder.mkdir(exist_ok=True)
    image = folder.with_suffix(".img")
    with image.open("wb") as file:
        file.truncate(size_bytes)
    subprocess.run(["mke2fs", "-q", "-t", "ext4", "-m", "0", "-O", "^has_journal", "-F", image], check=True)
    subprocess.run(["mount", "-o", "loop", image, folder], check=True, capture_output=True)
    try:
        yield folder
    finally:
        subprocess.run(["umount", "--lazy", folder], check=True)


@cache
def no_mounts() -> str | None:
    """Why no small file system can be mounted; None: it can."""
    try:
        with tempfile.TemporaryDirectory() as folder, small_ext4(Path(folder) / "disk", 2 << 20):
            return None
    except (subprocess.CalledProcessError, OSError):
        return "this machine lets nobody mount a small file system: the shim's faults stand in"


@contextmanager
def memory_limit(limit_bytes: int) -> Iterator[Path]:
    """A cgroup below our own with this limit on memory; the folder whose cgroup.procs a process joins."""
    parent = _own_cgroup()
    group = parent / f"vb-faults-{os.getpid()}-{os.urandom(3).hex()}"
    group.mkdir()
    try:
        name = "memory.max" if (group / "memory.max").exists() else "memory.limit_in_bytes"
        (group / name).write_text(f"{limit_bytes}\n")
        yield group
    finally:
        group.rmdir()


def _own_cgroup() -> Path:
    for line in Path("/proc/self/cgroup").read_text().splitlines():
        _, controllers, path = line.split(":", 2)
        root = Path("/sys/fs/cgroup") / ("memory" if controllers == "memory" else "")
        if controllers in ("memory", ""):
            found = root / path.lstrip("/")
            if (found / "memory.limit_in_bytes").exists() or (found / "cgroup.subtree_control").exists():
                return found
    raise OSError("no memory cgroup")


@cache
def no_cgroups() -> str | None:
    """Why no memory limit can be set; None: it can."""
    try:
        with memory_limit(1 << 30) as group:
            (group / "cgroup.procs").read_text()
            return None
    except OSError as error:
        return f"this machine gives no memory cgroup ({error.strerror or error})"
