"""A run's end."""

from __future__ import annotations


def test_a_sample_cannot_steer_the_terminal():
    from vblackwell.train.run import printable

    assert printable("a\x1b[2Jb\r\n\tc\x07é") == "a\ufffd[2Jb\ufffd\n\tc\ufffdé"
