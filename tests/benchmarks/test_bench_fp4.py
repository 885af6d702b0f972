"""The benchmark of FP4 linears says so where a peer is missing, wrong or slow."""

from __future__ import annotations

import csv
import functools
import importlib
import threading
import weakref
from pathlib import Path
from unittest.mock import MagicMock

import pytest
import torch


@pytest.fixture(autouse=True)
def _path(monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> None:
    monkeypatch.setenv("XDG_CACHE_HOME", str(tmp_path / "cache"))


def test_a_missing_peer_is_said_and_a_wrong_or_slow_one_is_not_timed():
    bench, peers = (
        importlib.import_module("benchmarks.bench_fp4"),
        importlib.import_module("benchmarks.lib.kernels.fp4_peers"),
    )
    absent = peers.Peer("absent", "no_such_module_here", lambda w: None)
    wrong = peers.Peer("wrong", "torch", lambda w: lambda x: x @ w.t() * 2)
    broken = peers.Peer("broken", "torch", lambda w: w.no_such_attribute)
    right = peers.Peer("right", "torch", peers._plain)
    w = torch.randn(48, 64)
    slow = peers.Peer("slow", "torch", lambda w: threading.Event().wait(60.0))
    assert bench.peer_layers((slow,), w, 0.1) == ({}, {"slow": "failed: TimeoutError: not done in 0.1 s"})
    layers, reasons = bench.peer_layers((absent, wrong, broken, right), w, 60.0)
    assert list(layers) == ["right"] and len(layers["right"]) == bench.LAYERS
    assert len({layer.weight.data_ptr() for layer in layers["right"]}) == bench.LAYERS
    assert reasons["absent"] == "not installed"
    assert "relative error" in reasons["wrong"] and "no_such_attribute" in reasons["broken"]
    assert peers.choose("none") == () and len(peers.choose("all")) == 5
    assert {peer.name for peer in peers.choose("humming,torchao")} == {
        "humming mxfp4",
        "humming e2m1 e4m3/16",
        "torchao int4 g32",
    }
    with pytest.raises(SystemExit, match="choose all, none or of torchao"):
        peers.choose("marlin")


def test_the_table_shows_ratios_and_reasons(capsys, tmp_path):
    bench = importlib.import_module("benchmarks.bench_fp4")
    found = [
        {"n": 8, "k": 16, "m": "", "system": "gemlite mxfp4", "note": "not installed"},
        {"n": 8, "k": 16, "m": 1, "system": "cublas bf16", "us": 30.0, "ratio": ""},
        {"n": 8, "k": 16, "m": 1, "system": "fp4_linear nvfp4", "us": 10.0, "ratio": 3.0, "do_bench_us": 21.0},
        {"n": 8, "k": 16, "m": 1, "system": "humming mxfp4", "us": 15.0, "ratio": 2.0},
        {"n": 8, "k": 16, "m": 4, "system": "fp4_linear nvfp4", "us": 11.0, "ratio": 2.8},
    ]
    bench.print_table(found, [(8, 16)])
    said = capsys.readouterr().out
    assert "8x16: not installed" in said
    assert "M=1: 3.0 (10.0; 21.0)" in said
    assert "M=1: 1.50 (humming mxfp4)  M=4: no peer" in said
    bench.write_rows(tmp_path / "rows.csv", found)
    with (tmp_path / "rows.csv").open(newline="") as file:
        written = list(csv.DictReader(file))
    assert [row["note"] for row in written] == ["not installed", "", "", "", ""]
    bench.print_table(
        [row for row in found if "humming" not in row["system"] and "gemlite" not in row["system"]], [(8, 16)]
    )
    assert "peer" not in capsys.readouterr().out
    assert bench.parse_shapes("4096x4096,14336x4096") == [(4096, 4096), (14336, 4096)]


def test_systems_take_turns_and_a_peer_that_fails_says_why(monkeypatch):
    bench = importlib.import_module("benchmarks.bench_fp4")

    def graph_of(calls):
        return calls[0]()

    def fails():
        raise RuntimeError("no kernel\nfor this")

    monkeypatch.setattr(bench, "graph_of", graph_of)
    monkeypatch.setattr(bench, "turns_us", lambda graphs, rounds: [rounds * graph for graph in graphs])
    monkeypatch.setattr(bench, "gpu_is_lost", lambda: False)
    compared = [
        ("cublas", "", [lambda: 12.0] * 2),
        ("theirs", "cublas", [fails]),
        ("ours", "cublas", [lambda: 4.0] * 2),
    ]
    found = bench.time_systems(compared, {"theirs"}, 3, False, 60.0)
    assert found[0] == {"system": "cublas", "us": 18.0, "ratio": ""}
    assert found[1]["note"] == "failed: RuntimeError: no kernel" and "us" not in found[1]
    assert found[2] == {"system": "ours", "us": 6.0, "ratio": 3.0}
    with pytest.raises(RuntimeError, match="theirs failed: no kernel"):
        bench.time_systems(compared, set(), 3, False, 60.0)
    monkeypatch.setattr(bench, "gpu_is_lost", lambda: True)
    with pytest.raises(bench.PeerLostGpu) as lost:
        bench.time_systems(compared, {"theirs"}, 3, False, 60.0)
    assert lost.value.args == ("theirs", "failed: RuntimeError: no kernel")


def test_a_graph_holds_what_it_was_captured_from(monkeypatch):
    timing = importlib.import_module("benchmarks.lib.kernels.graph_timing")
    monkeypatch.setattr(timing, "torch", MagicMock())  # capturing takes a GPU; who owns the inputs does not
    x = torch.ones(3)
    seen = weakref.ref(x)
    graph = timing.graph_of([functools.partial(torch.neg, x)])
    del x
    assert seen() is not None, "a replay would read freed memory"
    del graph
    assert seen() is None


@pytest.mark.parametrize("rounds", [3, 4])
def test_every_system_follows_each_neighbour_as_often(monkeypatch, rounds):
    timing = importlib.import_module("benchmarks.lib.kernels.graph_timing")
    order = []
    monkeypatch.setattr(timing, "median_us", lambda call, repeats: order.append(call()) or 1.0)
    graphs = [MagicMock(replay=lambda name=name: name) for name in "abc"]
    assert timing.turns_us(graphs, rounds) == [1.0] * 3
    timed = "".join(order[3:])  # after the round that goes before
    assert timed == "abccba" * 2
