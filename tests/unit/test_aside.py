"""A function in a child beside the caller: its answer, and the same answer where there is no child or it fails."""

from __future__ import annotations

import os
import signal
import time

import pytest

from vblackwell.train import aside
from vblackwell.train.aside import Aside, can_fork


@pytest.fixture(params=[True, False])
def forks(request, monkeypatch):
    if request.param and not hasattr(os, "fork"):
        pytest.skip("no fork here")
    monkeypatch.setattr(aside, "can_fork", lambda: request.param)
    return request.param


def test_its_answer_is_the_child_s(forks):
    child, data = Aside(lambda: (os.getpid(), b"x" * 300_000)).result()  # more than a pipe holds
    assert (child != os.getpid()) == forks and len(data) == 300_000


def test_a_child_that_fails_or_hangs_is_replaced(forks, monkeypatch):
    here = os.getpid()

    def only_here() -> int:
        if os.getpid() != here:
            raise ValueError("not in a child")
        return 7

    assert Aside(only_here).result() == 7
    monkeypatch.setattr(aside, "LONGEST", 0.2)

    def quick_here() -> int:
        if os.getpid() != here:
            time.sleep(60)
            return 9  # too late to be heard
        return 8

    assert Aside(quick_here).result() == 8


def test_a_child_that_nobody_asks_is_ended(forks):
    waiting = Aside(lambda: time.sleep(60))
    child = waiting._child
    assert (child > 0) == forks
    waiting.cancel()
    if forks:
        with pytest.raises(ChildProcessError):  # waited for; other tests may have left children of their own
            os.waitpid(child, os.WNOHANG)


def test_where_no_process_may_begin_it_is_called_here(monkeypatch):
    def refused() -> int:
        raise BlockingIOError(11, "Resource temporarily unavailable")

    monkeypatch.setattr(aside, "can_fork", lambda: True)
    monkeypatch.setattr(aside.os, "fork", refused)
    assert Aside(os.getpid).result() == os.getpid()


def test_no_fork_beside_other_threads(monkeypatch):
    monkeypatch.setattr(aside.threading, "active_count", lambda: 2)
    assert not can_fork()


@pytest.mark.skipif(not hasattr(signal, "SIGCHLD"), reason="no children here")
def test_no_fork_where_nobody_waits_for_children(monkeypatch):
    monkeypatch.setattr(aside.os, "sched_getaffinity", lambda process: {0, 1}, raising=False)
    monkeypatch.setattr(aside.torch.cuda, "is_initialized", lambda: False)
    monkeypatch.setattr(aside.threading, "active_count", lambda: 1)
    assert can_fork()
    before = signal.signal(signal.SIGCHLD, signal.SIG_IGN)
    try:
        assert not can_fork()
    finally:
        signal.signal(signal.SIGCHLD, before)
