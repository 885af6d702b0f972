"""Rates that are kept for plans, with what they are of."""

from __future__ import annotations

import os
from types import SimpleNamespace

from vblackwell.machine import rates as module
from vblackwell.machine.rates import MAX_AGE_SECONDS, Rates, keep_disk, keep_together, kept_disk, kept_together
from vblackwell.train import auto


def test_a_disk_s_rates_are_kept_for_that_disk(tmp_path, monkeypatch):
    monkeypatch.setenv("XDG_CACHE_HOME", str(tmp_path / "cache"))
    path = str(tmp_path)
    assert kept_disk(path) is None
    keep_disk(path, {"refused": "it is RAM"})
    assert kept_disk(path) is None
    keep_disk(path, {"read": 0.5, "write": 0.25})
    assert kept_disk(path) == (0.5e9, 0.25e9)
    monkeypatch.setattr(module, "disk_facts", lambda path: SimpleNamespace(file_system="another"))
    assert kept_disk(path) is None  # another disk is mounted there


def test_a_plan_measures_the_disk_once_and_goes_on_where_that_is_refused(tmp_path, monkeypatch):
    monkeypatch.setenv("XDG_CACHE_HOME", str(tmp_path / "cache"))
    rates, said = Rates(1e11, 1e11, 1e10, 5e9, 5e9, 2.5e9, 2.5e9, 1e9), []
    monkeypatch.setattr(auto, "disk_gbps", lambda path: {"refused": "it is RAM"})
    assert auto._disk_rates(str(tmp_path), rates, said.append) == (rates.disk_read, rates.disk_write)
    monkeypatch.setattr(auto, "disk_gbps", lambda path: {"read": 0.5, "write": 0.25})
    assert auto._disk_rates(str(tmp_path), rates, said.append) == (0.5e9, 0.25e9)
    assert len(said) == 2
    assert auto._disk_rates(str(tmp_path), rates, said.append) == (0.5e9, 0.25e9) and len(said) == 2
    monkeypatch.setenv("XDG_CACHE_HOME", "/proc/nowhere")  # where nothing can be kept
    assert auto._disk_rates(str(tmp_path), rates, said.append) == (0.5e9, 0.25e9) and len(said) == 3


def test_rates_of_link_and_host_are_kept_for_a_day_for_that_gpu_and_count_of_threads(tmp_path, monkeypatch):
    monkeypatch.setenv("XDG_CACHE_HOME", str(tmp_path))
    keep_together("NVIDIA H200", 13, 48e9, 1.5e9)
    assert kept_together("NVIDIA H200", 13) == (48e9, 1.5e9)
    assert kept_together("NVIDIA H200", 12) is None and kept_together("NVIDIA H100", 13) is None
    (path,) = tmp_path.rglob("together-*.json")
    then = path.stat().st_mtime - MAX_AGE_SECONDS
    os.utime(path, (then, then))
    assert kept_together("NVIDIA H200", 13) is None
    path.write_text("half a fi")
    assert kept_together("NVIDIA H200", 13) is None
