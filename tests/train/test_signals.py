"""Requests to stop."""

from __future__ import annotations

import os
import signal

import pytest

from vblackwell.train.progress import StopRequest


def test_signals_are_noted_and_handlers_put_back():
    before = signal.getsignal(signal.SIGTERM)
    with StopRequest() as stop:
        assert not stop.wanted
        os.kill(os.getpid(), signal.SIGTERM)
        assert stop.wanted and stop.exit_code == 143
        os.kill(os.getpid(), signal.SIGINT)  # the first reason stays
        assert stop.exit_code == 143
    assert signal.getsignal(signal.SIGTERM) is before


@pytest.mark.parametrize("first", [[], [signal.SIGTERM]])
def test_two_sigints_leave_at_once_whatever_came_before(first, monkeypatch):
    left = []
    monkeypatch.setattr(os, "_exit", left.append)
    with StopRequest():
        for number in (*first, signal.SIGINT):
            os.kill(os.getpid(), number)
        assert not left
        os.kill(os.getpid(), signal.SIGINT)
        assert left == [130]
