"""Locks of processes: who made a folder has it, also while others look for leftovers."""

from __future__ import annotations

import os
import threading
from pathlib import Path

from vblackwell.folders import commit
from vblackwell.machine import lock


def test_a_folder_taken_for_a_leftover_before_it_is_locked_is_made_again(tmp_path: Path, monkeypatch):
    """Between making a folder and locking it, another process may lock it, to remove it as a leftover."""
    work = tmp_path / "work.tmp"
    holds, may_remove = threading.Event(), threading.Event()

    def remove_leftover() -> None:
        descriptor = lock._lock(work)
        assert descriptor is not None
        holds.set()
        assert may_remove.wait(60)
        os.rmdir(work)
        os.close(descriptor)

    remover = threading.Thread(target=remove_leftover)
    lock_now = lock._lock

    def lock_late(path: Path, **how: bool) -> int | None:
        if threading.current_thread() is not remover and not holds.is_set():
            remover.start()
            assert holds.wait(60)
            threading.Timer(0.1, may_remove.set).start()  # while the maker tries to lock it
        return lock_now(path, **how)

    monkeypatch.setattr(lock, "_lock", lock_late)
    descriptor = lock.make_work_folder(work)
    remover.join()
    assert os.path.samestat(os.fstat(descriptor), os.stat(work))
    assert not lock.remove_if_abandoned(work)  # it is ours, and in use
    os.close(descriptor)
    assert lock.remove_if_abandoned(work)


def test_an_entry_that_is_dropped_may_be_swept_by_another_process(tmp_path: Path, monkeypatch):
    entry = tmp_path / "key"
    entry.mkdir()
    rename = os.rename

    def rename_and_sweep(source: Path, target: Path) -> None:
        rename(source, target)
        assert lock.remove_if_abandoned(target)

    monkeypatch.setattr(os, "rename", rename_and_sweep)
    commit.discard(entry)
    assert not list(tmp_path.iterdir())
