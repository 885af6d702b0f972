"""Rates of machines: from data sheets, measured and kept; and what a streamed step of a real model makes of them."""

from __future__ import annotations

import json
import threading
from dataclasses import replace

import pytest
import torch

from vblackwell.machine.gpus import find_gpu, known_as
from vblackwell.machine.rates import Rates, assumed_rates, keep_rates, rates_of
from vblackwell.offload import host_rates
from vblackwell.offload import measure as measuring
from vblackwell.offload.api import offload_of
from vblackwell.offload.host_rates import HostUpdate

MEASURED = Rates(779e12, 50e12, 4.27e12, 55e9, 55e9, 49.6e9, 49.6e9, 1.9e9)


@pytest.mark.parametrize(
    ("said", "card"),
    [
        ("NVIDIA H200", "H200"), ("NVIDIA H100 80GB HBM3", "H100"), ("NVIDIA A100-SXM4-80GB", "A100 80GB"),
        ("NVIDIA A10", "A10"),
        ("NVIDIA GeForce RTX 4060", "RTX 4060"), ("NVIDIA GeForce RTX 3090", "RTX 3090"), ("NVIDIA TITAN V", None),
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
        json.dumps({"gpu": "NVIDIA H200"} | MEASURED.as_dict() | {"up": 0}),
    ):
        path.write_text(broken)
        assert rates_of(card).source == "data sheet of H200"
    with pytest.raises(ValueError, match="the rate memory is -1"):
        Rates.from_dict(MEASURED.as_dict() | {"memory": -1})


def test_doctors_numbers_become_rates():
    found = measuring.as_rates(
        {
            "host_to_gpu_gbps": 55.0, "gpu_to_host_gbps": 54.0, "both_ways_gbps": 49.6, "memory_gbps": 4270.0,
            "matmul_half_tflops": 779.0,
            "matmul_fp32_tflops": 50.0, "adamw_gparams": 100.0, "cpu_adamw_beside_copies_gparams": 1.9, "issue_us": 6.0,
            "streamed_group_us": 1800.0, "streamed_home_group_us": 600.0, "issue_beside_updates_us": 9.0,
            "issue_of_loop_us": 1.5,
            "read_us": 3.0, "adds_per_update": 2.5,
        }
    )  # fmt: skip
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
    assert 1e-5 < measuring.group_seconds(torch.device("cpu")) < 1.0


def test_a_group_whose_step_fails_gives_everything_back(monkeypatch):
    engines = []

    def fail(step, finish):
        step()
        raise RuntimeError("no more memory")

    def found(model):
        engines.append(offload_of(model))
        return engines[-1]

    monkeypatch.setattr(measuring, "GROUPS_STREAMED", 3)
    monkeypatch.setattr(measuring, "steps_seconds", fail)
    monkeypatch.setattr(measuring, "offload_of", found)
    with pytest.raises(RuntimeError, match="no more memory"):
        measuring.group_seconds(torch.device("cpu"))
    assert not engines[0].finalizer.alive


def test_issuing_an_operator_takes_microseconds(monkeypatch):
    monkeypatch.setattr(measuring, "STEPS_ISSUED", 5)
    monkeypatch.setattr(measuring, "WARM_SECONDS", 0.0)
    assert 1e-7 < measuring.issue_seconds(torch.device("cpu")) < 1e-2
    looks = measuring.HostLooks(torch.device("cpu"))
    looks.look()
    assert 1e-7 < looks.loop < 1e-2 and 1e-7 < looks.issue < 1e-2 and 1e-8 < looks.read < 1e-2


def test_looks_at_a_host_that_is_disturbed_do_not_count(monkeypatch):
    """Three looks of five at a host that is a third slower, one hiccup, one step that a clock cut short:
    as if nobody had been there.
    """
    times = [[26.0] * 15, [19.0] * 14 + [90.0], [26.0] * 15, [26.0] * 15, [19.5] * 14 + [2.0]]
    given = iter([each for each in times for _ in ("issue", "loop", "read")])
    monkeypatch.setattr(measuring, "steps_seconds", lambda action, finish: next(given))
    looks = measuring.HostLooks(torch.device("cpu"))
    for _ in times:
        looks.look()
    assert looks.issue == pytest.approx(19.5 / (measuring.ISSUED_LAYERS * measuring.OPERATORS_OF_A_LAYER))
    assert looks.loop == pytest.approx(19.5 / (host_rates.LOOP_PARAMETERS * measuring.LOOP))


def test_updates_run_beside_a_block_and_end_with_it(monkeypatch):
    update = HostUpdate(1 << 16)
    before, updates = set(threading.enumerate()), []
    monkeypatch.setattr(host_rates.MasterLoop, "run", lambda loop: updates.append(loop))
    with host_rates.updating(update):
        assert updates, "the first is over when the block begins"
        names = [thread.name for thread in threading.enumerate()]
        assert "measured-updates" in names
    assert set(threading.enumerate()) <= before

    def failing(loop: object) -> None:
        raise ValueError("no")

    monkeypatch.setattr(host_rates.MasterLoop, "run", failing)
    with pytest.raises(RuntimeError, match="during the measurement failed"), host_rates.updating(update):
        pass
