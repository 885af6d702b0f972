"""Rates that are measured here."""

import time
from types import SimpleNamespace

import pytest
import torch
from hypothesis import strategies as st

from vblackwell.offload import host_rates
from vblackwell.offload.host_rates import (
    CPU_ELEMENTS,
    HostUpdate,
    adds_per_update,
    cpu_rate,
    duplex_rate,
    measured_bytes,
    median_sample,
    rates_together,
    update_elements,
)
from vblackwell.offload.movement.update_loop import MIN_PART
from vblackwell.units import GiB, MiB

RATES = st.floats(1e8, 1e11)


def test_what_is_measured_with_keeps_to_a_cap(monkeypatch):
    sizes = []
    for left in (8 * GiB, 384 * MiB, 0):
        monkeypatch.setattr(host_rates, "gpu_bytes_left", lambda device, left=left: left)
        sizes.append(measured_bytes(torch.device("cuda", 0), 256 * MiB))
    assert sizes == [256 * MiB, 38 * MiB, MiB]


def test_a_rate_is_measured(monkeypatch: pytest.MonkeyPatch):
    monkeypatch.setattr(host_rates, "update_elements", lambda: 1 << 20)
    assert 1e7 < cpu_rate() < 1e11


@pytest.mark.gpu
def test_a_gpu_gets_a_share():
    device = torch.device("cuda", 0)
    assert 1e9 < duplex_rate(device) < 1e12
    link, cpu = rates_together(device)
    assert 1e9 < link < 1e12 and 1e7 < cpu < 1e11
    assert rates_together(device) == (link, cpu)  # measured once


def test_the_median_of_all_samples_counts():
    # the second on a machine that was busy with something else; link rates are in another order
    assert median_sample([(52e9, 1.9e9), (50e9, 2e8), (45e9, 2.2e9)]) == (52e9, 1.9e9)


def test_every_thread_has_as_many_full_parts(monkeypatch: pytest.MonkeyPatch):
    free = SimpleNamespace(available_bytes=1 << 40)
    monkeypatch.setattr(host_rates, "memory_facts", lambda: free)
    for threads in (1, 2, 3, 13, 40, 125):
        monkeypatch.setattr(host_rates, "update_threads", lambda threads=threads: threads)
        count = update_elements()
        assert count % (threads * MIN_PART) == 0 and CPU_ELEMENTS <= count < CPU_ELEMENTS + threads * MIN_PART
    free.available_bytes = 8 << 30  # 125 threads' parts would take a fifth of it
    assert update_elements() == CPU_ELEMENTS


def test_adding_up_takes_less_than_an_update(monkeypatch: pytest.MonkeyPatch):
    """12 bytes a parameter (4 written and fetched for it, 2 and 2 read) against 28. With a whole addend widened in new
    memory, 36 MiB here, which glibc takes from the system every time, it takes longer than an update: 0.7."""
    monkeypatch.setattr(host_rates, "time", SimpleNamespace(perf_counter=time.process_time))  # whatever else runs
    assert 1.1 < adds_per_update(HostUpdate(9 << 20)) < 8
