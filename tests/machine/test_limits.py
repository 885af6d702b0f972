"""What a run may take of this machine."""

import tempfile
from pathlib import Path

import pytest

from vblackwell.machine import limits
from vblackwell.machine.facts import disk_facts
from vblackwell.units import MiB


def test_the_default_disk_path_is_on_a_disk(monkeypatch: pytest.MonkeyPatch):
    with tempfile.TemporaryDirectory(dir=limits.default_disk_path()) as disk:
        monkeypatch.setenv(limits.DISK_PATH_VARIABLE, disk)
        assert limits.default_disk_path() == disk
        monkeypatch.delenv(limits.DISK_PATH_VARIABLE)
        monkeypatch.setattr(limits.tempfile, "gettempdir", lambda: "/dev/shm")
        monkeypatch.setenv("XDG_CACHE_HOME", f"{disk}/missing")
        monkeypatch.chdir(disk)
        if Path("/dev/shm").is_dir():
            assert limits.default_disk_path() == str(Path(disk).resolve())
        monkeypatch.undo()


def test_a_disk_level_gets_a_share_of_what_is_free(monkeypatch: pytest.MonkeyPatch):
    path = limits.default_disk_path()
    assert 0 < limits.free_disk_bytes(path) <= disk_facts(path).free_bytes
    monkeypatch.setattr(limits, "MAX_DISK_BYTES", MiB)
    assert limits.free_disk_bytes(path) == MiB
