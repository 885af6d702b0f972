"""Rates of machines: from data sheets, measured and kept; and what a streamed step of a real model makes of them."""

from __future__ import annotations

import json
import threading
import time
from dataclasses import asdict, replace
from pathlib import Path
from types import SimpleNamespace

import pytest
import torch

from vblackwell.machine.gpus import find_gpu, known_as
from vblackwell.machine.rates import Rates, assumed_rates, keep_rates, rates_of
from vblackwell.offload import measure as measuring
from vblackwell.offload.engine import stream
from vblackwell.offload.measure import (
    CPU_ELEMENTS,
    FEW_ELEMENTS,
    HostUpdate,
    adds_per_update,
    measured_bytes,
    rates_together,
    update_elements,
)
from vblackwell.trace.work import Work, phase_seconds
from vblackwell.units import GiB, MiB

MEASURED = Rates(779e12, 50e12, 4.27e12, 55e9, 55e9, 49.6e9, 49.6e9, 1.9e9)


@pytest.mark.parametrize(
    ("said", "card"),
    [
        ("NVIDIA H200", "H200"), ("NVIDIA H100 80GB HBM3", "H100"), ("NVIDIA A100-SXM4-80GB", "A100 80GB"),
        ("NVIDIA A10", "A10"), ("NVIDIA GeForce RTX 4060", "RTX 4060"), ("NVIDIA GeForce RTX 3090", "RTX 3090"),
        ("NVIDIA TITAN V", None),
    ],
)  # fmt: skip
def test_what_a_driver_calls_a_card(said, card):
    found = known_as(said)
    assert (found and found.name) == card


def test_data_sheets_are_near_what_an_h200_was_measured_to_do():
    """Within 5 %: the shares come from this card."""
    assumed = assumed_rates(find_gpu("H200"))
    for name in ("matmul_half", "matmul_fp32", "memory", "up", "down", "up_both", "down_both"):
        assert getattr(assumed, name) == pytest.approx(getattr(MEASURED, name), rel=0.05)


def test_rates_are_kept_and_read_again(tmp_path, monkeypatch):
    monkeypatch.setenv("XDG_CACHE_HOME", str(tmp_path))
    card = find_gpu("H200")
    assert rates_of(card).source == "data sheet of H200"
    keep_rates("NVIDIA H200", replace(MEASURED, source="measured here"))
    assert rates_of(card) == replace(MEASURED, source="measured here")
    assert rates_of(find_gpu("H100")).source == "data sheet of H100"
    (path,) = (tmp_path / "vblackwell" / "rates").glob("*.json")
    for broken in (
        "{",
        "[]",
        json.dumps({"gpu": "NVIDIA H200"}),
        json.dumps({"gpu": "NVIDIA H200"} | asdict(MEASURED) | {"up": 0}),
    ):
        path.write_text(broken)
        assert rates_of(card).source == "data sheet of H200"
    with pytest.raises(ValueError, match="the rate memory is -1"):
        Rates.from_dict(asdict(MEASURED) | {"memory": -1})


def test_doctors_numbers_become_rates():
    found = measuring.as_rates(
        {
            "host_to_gpu_gbps": 55.0,
            "gpu_to_host_gbps": 54.0,
            "both_ways_gbps": 49.6,
            "memory_gbps": 4270.0,
            "matmul_half_tflops": 779.0,
            "matmul_fp32_tflops": 50.0,
            "adamw_gparams": 100.0,
            "cpu_adamw_during_copies_gparams": 1.9,
            "issue_us": 6.0,
            "streamed_group_us": 1800.0,
            "streamed_host_group_us": 600.0,
            "issue_during_updates_us": 9.0,
            "issue_of_loop_us": 1.5,
            "read_us": 3.0,
            "adds_per_update": 2.5,
        }
    )
    streaming = {
        "group_issues": 300.0, "home_group_issues": 100.0, "busy_issues": 1.5, "loop_issues": 0.25, "read_issues": 0.5,
        "adds_per_update": 2.5,
    }  # fmt: skip
    assert found == replace(MEASURED, down=54e9, issue_seconds=6e-6, source=found.source, **streaming)
    assert found.streaming_issues(10, 0.0) == 3000 and found.streaming_issues(10, 0.25) == 2500


def test_a_streamed_group_takes_the_host_a_while(monkeypatch):
    monkeypatch.setattr(measuring, "GROUPS_STREAMED", 3)
    monkeypatch.setattr(measuring, "STEPS_ISSUED", 3)
    monkeypatch.setattr(measuring, "WARM_SECONDS", 0.0)
    found = (measuring.group_seconds(torch.device("cpu")) for _ in range(8))
    # Three plain steps may be held up as long as streamed ones take longer: on a busy machine one of several tells.
    assert any(1e-5 < seconds < 1.0 for seconds in found)


def test_a_group_whose_step_fails_gives_everything_back(monkeypatch):
    engines = []

    def fail(step, finish):
        step()
        raise RuntimeError("no more memory")

    def found(*args):
        engines.append(stream(*args))
        return engines[-1]

    monkeypatch.setattr(measuring, "GROUPS_STREAMED", 3)
    monkeypatch.setattr(measuring, "steps_seconds", fail)
    monkeypatch.setattr(measuring, "stream", found)
    with pytest.raises(RuntimeError, match="no more memory"):
        measuring.group_seconds(torch.device("cpu"))
    assert not engines[0].finalizer.alive


def test_issuing_an_operator_takes_microseconds(monkeypatch):
    monkeypatch.setattr(measuring, "STEPS_ISSUED", 5)
    monkeypatch.setattr(measuring, "WARM_SECONDS", 0.0)
    assert 1e-7 < measuring.issue_seconds(torch.device("cpu")) < 1e-2
    samples = measuring.HostSamples(torch.device("cpu"))
    samples.take()
    assert 1e-7 < samples.loop < 1e-2 and 1e-7 < samples.issue < 1e-2 and 1e-8 < samples.read < 1e-2


def test_samples_of_a_host_that_is_disturbed_do_not_count(monkeypatch):
    """Three of five at a host a third slower, one hiccup, one step that a clock cut short: as if nothing was."""
    times = [[26.0] * 15, [19.0] * 14 + [90.0], [26.0] * 15, [26.0] * 15, [19.5] * 14 + [2.0]]
    given = iter([each for each in times for _ in ("issue", "loop", "read")])
    monkeypatch.setattr(measuring, "steps_seconds", lambda action, finish: next(given))
    samples = measuring.HostSamples(torch.device("cpu"))
    for _ in times:
        samples.take()
    assert samples.issue == pytest.approx(19.5 / (measuring.ISSUED_LAYERS * measuring.OPERATORS_OF_A_LAYER))
    assert samples.loop == pytest.approx(19.5 / (measuring.LOOP_PARAMETERS * measuring.LOOP))


def test_updates_run_during_a_block_and_end_with_it(monkeypatch):
    update = HostUpdate(1 << 16)
    before, updates = set(threading.enumerate()), []
    monkeypatch.setattr(measuring.cpu, "update", updates.append)
    with measuring.updating(update):
        assert updates, "the first is over when the block begins"
        assert "measured-updates_0" in [thread.name for thread in threading.enumerate()]
    assert set(threading.enumerate()) <= before

    def failing(made: object) -> None:
        if updates:
            raise ValueError("no second update")
        updates.append(made)

    updates.clear()
    monkeypatch.setattr(measuring.cpu, "update", failing)
    with pytest.raises(ValueError, match="no second update"), measuring.updating(update):
        pass


def test_what_is_measured_with_keeps_to_a_cap(monkeypatch):
    sizes = []
    for left in (8 * GiB, 384 * MiB, 0):
        monkeypatch.setattr(measuring, "gpu_bytes_left", lambda device, left=left: left)
        sizes.append(measured_bytes(torch.device("cuda", 0), 256 * MiB))
    assert sizes == [256 * MiB, 38 * MiB, MiB]


@pytest.mark.gpu
def test_a_gpu_gets_a_share():
    device = torch.device("cuda", 0)
    link, cpu = rates_together(device)
    assert 1e9 < link < 1e12 and 1e7 < cpu < 1e11
    assert rates_together(device) == (link, cpu)  # measured once


def test_a_later_process_takes_what_was_measured(monkeypatch: pytest.MonkeyPatch, tmp_path: Path):
    monkeypatch.setenv("XDG_CACHE_HOME", str(tmp_path))
    monkeypatch.setattr(torch.cuda, "get_device_name", lambda device: "NVIDIA H200")
    measured = iter([(48e9, 1.5e9)])

    class Samples:
        def __init__(self, update: object, device: object) -> None:
            self.found = next(measured)

        def take(self) -> None: ...

    monkeypatch.setattr(measuring, "TogetherSamples", Samples)
    monkeypatch.setattr(measuring, "HostUpdate", lambda: None)
    for _ in range(2):
        rates_together.cache_clear()
        assert rates_together(torch.device("cuda", 0)) == (48e9, 1.5e9)
    rates_together.cache_clear()


def test_updates_do_not_count_in_the_rate_of_the_link(monkeypatch: pytest.MonkeyPatch):
    """Nor does what disturbs a machine for a while."""
    updates, alone = [0], iter([46e9, 50e9, *[12e9] * 20])

    class Copies:
        num_bytes = 64 * MiB

        def __init__(self, device: object) -> None: ...

        def queue(self, count: int) -> list[SimpleNamespace]:
            self.before = updates[0]
            return [SimpleNamespace(query=lambda: updates[0] > self.before)]

        def rate_after(self, done: object) -> float:
            return next(alone) if updates[0] == self.before else 60e9

    class Update:
        count = 1000

        def __call__(self) -> None:
            updates[0] += 1

    monkeypatch.setattr(measuring, "_BothWays", Copies)
    samples = measuring.TogetherSamples(Update(), torch.device("cpu"))
    for _ in range(3):
        samples.take()
    assert samples.found[0] == 50e9
    samples.cpus = [1.9e9, 2e8, 2.2e9]
    assert samples.found[1] == 1.9e9


def test_less_is_measured_where_ram_is_short(monkeypatch: pytest.MonkeyPatch):
    free = SimpleNamespace(available_bytes=1 << 40)
    monkeypatch.setattr(measuring, "memory_facts", lambda: free)
    assert update_elements() == CPU_ELEMENTS
    free.available_bytes = 8 << 30  # all of it would take a fifth
    assert update_elements() == FEW_ELEMENTS


def test_adding_up_takes_less_than_an_update(monkeypatch: pytest.MonkeyPatch):
    """12 bytes a parameter (4 written and fetched for it, 2 and 2 read) against 28. With a whole addend widened in new
    memory, 36 MiB here, which glibc takes from the system every time, it takes longer than an update: 0.7."""
    monkeypatch.setattr(measuring, "time", SimpleNamespace(perf_counter=time.process_time))  # whatever else runs
    assert 1.1 < adds_per_update(HostUpdate(9 << 20)) < 8


def test_a_cpu_multiplies_in_each_type_at_the_rate_of_a_linear_layer_in_that_type(monkeypatch):
    """All three products of it, for the slowest decides: of one CPU bf16 was at 3, 0.3 and 5 GFLOP/s, fp32 at 17."""
    asked, took = list[torch.dtype](), {torch.float32: 0.1, torch.bfloat16: 2.5}
    seconds = iter((1.0, 8.0, 1.0))
    monkeypatch.setattr(measuring, "seconds_of", lambda action, **limit: next(seconds))
    assert measuring.cpu_linear_gflops(torch.bfloat16, 64) == pytest.approx(3 * 2 * 64**3 / 10 / 1e9)

    def measured(dtype: torch.dtype, size: int) -> float:
        asked.append(dtype)
        return 1 / took[dtype]

    monkeypatch.setattr(measuring, "cpu_linear_gflops", measured)
    monkeypatch.setattr(measuring, "cpu_attention_gflops", {torch.float32: 2.5, torch.bfloat16: 1.0}.__getitem__)
    monkeypatch.setattr(measuring, "host_copy_gbps", lambda num_bytes: 4.0)
    monkeypatch.setattr(measuring, "issue_seconds", lambda device: 1e-5)
    rates = measuring.cpu_rates()
    assert set(asked) == set(took) and rates.matmul_fp32 == 1e10 and rates.matmul_half == 4e8
    work = [Work("forward", flops=1e9, width=width, kind="") for width in (2, 4)]
    half, fp32 = (phase_seconds([each], rates, waits=True)["forward"] for each in work)
    assert half / fp32 == pytest.approx(25, rel=0.01)
    # Products of a model's own sizes were measured: no share of them is lost. Attention has a rate in each type.
    assert fp32 == pytest.approx(0.1, rel=0.01)
    work = [replace(each, kind="attention") for each in work]
    half, fp32 = (phase_seconds([each], rates, waits=True)["forward"] for each in work)
    assert (half, fp32) == pytest.approx((1.0, 0.4), rel=0.01)


def test_attention_is_measured_forward_and_backward(monkeypatch):
    monkeypatch.setattr(measuring, "seconds_of", lambda action, **limit: [action(), 0.5][1])
    # Seven products of (256, 64) and (64, 256), of which half are behind the causal mask: 2 x 4 heads.
    assert measuring.cpu_attention_gflops(torch.float32) == pytest.approx(7 * 8 * 2 * 256 * 256 * 64 / 2 / 0.5 / 1e9)
