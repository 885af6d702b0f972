"""The benchmark of FP4 linears says so where a peer is wrong or slow, and draws the same cases for a seed."""

from __future__ import annotations

import functools
import importlib
import threading
import weakref
from pathlib import Path
from types import SimpleNamespace
from unittest.mock import MagicMock

import pytest
import torch


@pytest.fixture(autouse=True)
def _path(monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> None:
    monkeypatch.setenv("XDG_CACHE_HOME", str(tmp_path / "cache"))


def test_a_peer_that_is_wrong_or_slow_is_not_timed():
    bench, peers = (
        importlib.import_module("benchmarks.bench_fp4"),
        importlib.import_module("benchmarks.lib.kernels.fp4_peers"),
    )
    wrong = peers.Peer("wrong", "torch", lambda w: lambda x: x @ w.t() * 2)
    broken = peers.Peer("broken", "torch", lambda w: w.no_such_attribute)
    right = peers.Peer("right", "torch", peers._plain)
    w = torch.randn(48, 64)
    slow = peers.Peer("slow", "torch", lambda w: threading.Event().wait(60.0))
    assert bench.peer_layers((slow,), w, 3, 0.1) == ({}, {"slow": "failed: TimeoutError: not done in 0.1 s"})
    layers, reasons = bench.peer_layers((wrong, broken, right), w, 3, 60.0)
    assert list(layers) == ["right"] and len(layers["right"]) == 3
    assert len({layer.weight.data_ptr() for layer in layers["right"]}) == 3
    assert "relative error" in reasons["wrong"] and "no_such_attribute" in reasons["broken"]
    assert right.installed and not peers.Peer("absent", "no_such_module_here", lambda w: None).installed
    assert peers.choose("none") == ()
    assert [peer.name for peer in peers.choose("humming")] == ["humming mxfp4", "humming e2m1 e4m3/16"]
    assert {peer.module for peer in peers.choose("humming,torchao")} == {"humming", "torchao"}
    with pytest.raises(SystemExit, match="choose none, or of torchao"):
        peers.choose("marlin")
    assert bench.parse_shapes("4096x4096,14336x4096") == [(4096, 4096), (14336, 4096)]


def test_draws_are_those_of_the_seed_alone():
    draw = importlib.import_module("benchmarks.lib.kernels.fp4_draw")
    # Written down: the same on every machine and Python.
    written = [(5, 4491, 9728, 6), (33, 1101, 4669, 47), (287, 640, 18432, 21), (2611, 1088, 1600, 138)]
    assert [(product.m, product.n, product.k, product.layers) for product in draw.draws(4, 7)] == written
    found = draw.draws(30, 7)
    assert found == draw.draws(30, 7) and found[:10] == draw.draws(10, 7)
    assert found != draw.draws(30, 8)


def test_draws_are_in_their_ranges_and_fit():
    draw = importlib.import_module("benchmarks.lib.kernels.fp4_draw")
    found = [product for seed in range(200) for product in draw.draws(30, seed)]
    sizes = [size for product in found for size in (product.n, product.k)]
    assert min(sizes) >= 512 and max(sizes) <= 32768 and len({size % 64 for size in sizes if size % 64}) == 32
    odd = [size for size in sizes if size % 2]
    assert {size % 64 for size in sizes if size % 2 == 0} == {0} and 0.2 < len(odd) / len(sizes) < 0.3
    assert {0, 1, 2, 3, 4, 5} == {(size // 512).bit_length() - 1 for size in sizes if size < 32768}, "every octave"
    rows = [product.m for product in found]
    assert min(rows) == 1 and max(rows) > 8000 and max(rows) <= 8192
    for number, (low, high) in enumerate(draw.GOALS):
        assert all(low <= product.m <= high for seed in (0, 1) for product in draw.draws(30, seed)[number::4])
    for product in found:
        elements = product.n * product.k
        assert product.layers * elements * 9 / 16 >= 128 << 20, "a replay's weights stay in the L2"
        # dense, ours, three peers; the weight that is dequantised, in a graph and before; x and five systems' y
        weights = product.layers * elements * (2 + 4 * 9 / 16) + 4 * elements
        assert weights + 2 * product.m * (product.k + 5 * product.n) < 20e9


def test_what_is_compiled_ahead_is_what_is_launched(monkeypatch):
    from vblackwell.kernels.fp4 import launch, linear
    from vblackwell.kernels.fp4.mma_plan import H200
    from vblackwell.kernels.runtime import nvrtc
    from vblackwell.kernels.runtime.registry import Request, choose

    draw, asked = importlib.import_module("benchmarks.lib.kernels.fp4_draw"), set()

    def kernel(files, entry, macros, device):
        asked.add((files, tuple(macros.items())))

    for module in (launch, linear):
        monkeypatch.setattr(module, "gpu_of", lambda device: H200)
    for prepare in ("prepare_mma", "prepare_wgmma"):  # which keep nothing here
        monkeypatch.setattr(linear, prepare, getattr(launch, prepare).__wrapped__)
    monkeypatch.setattr(launch, "processors", lambda device: H200.processors)
    monkeypatch.setattr(launch, "kernel", kernel)
    monkeypatch.setattr(launch, "Chain", lambda *_: SimpleNamespace(queue=None))
    monkeypatch.setattr(nvrtc, "why_not", lambda: [])
    device, dtype = torch.device("cuda", 0), torch.bfloat16
    seen = set()
    # few rows, without bulk copies; hundreds; whole rounds and a tail of other tokens; more than are fused
    cells = [(3, 4096, 4096), (8, 4096, 1001), (200, 2560, 6912), (1024, 11008, 4096), (8192, 4096, 4096)]
    for m, n, k in cells:
        asked.clear()
        request = Request(device, H200.capability, dtype, "nvfp4-tiled", m, n, k)
        choose("fp4_linear", linear.LINEAR, request).run(request, launch.Given((m, n, k), dtype, "none", 3, device))
        assert set(draw.linear_sources(draw.Product(n, k, m))) == asked, (m, n, k)
        seen.add(len(asked))
    assert seen == {0, 1, 2}


@pytest.mark.parametrize(("n", "k", "m"), [(40, 136, 3), (33, 77, 1), (1001, 1023, 70), (512, 512, 5)])
def test_a_wrong_product_is_seen(n, k, m):
    from vblackwell.kernels.fp4 import reference
    from vblackwell.kernels.fp4.linear import fp4_linear

    layers = importlib.import_module("benchmarks.lib.kernels.fp4_layers")
    torch.manual_seed(0)
    w, x = layers.random_tiled(n, k, "cpu"), torch.randn(m, k).bfloat16()
    whole = reference.dequantize(*w, layers.FORMAT, -(-n // 32) * 32, -(-k // 64) * 64)
    assert whole[:n, :k].any() and not whole[n:].any() and not whole[:, k:].any(), "kernels read what tiles hold beyond"
    y = fp4_linear(x, *w, None, layers.FORMAT, "none", n, k)
    assert layers.error_over_bound(y, x, w, n, k) <= 1
    for place, value in (((-1, -1), y.std() / 10), ((0, 0), float("nan"))):
        spoiled = y.clone()
        spoiled[place] += value
        assert layers.error_over_bound(spoiled, x, w, n, k) > 1


def test_the_summary_has_worst_and_median_by_rows_and_the_fastest_peer():
    draw = importlib.import_module("benchmarks.lib.kernels.fp4_draw")
    systems = ("cublas bf16", "fp4_linear nvfp4", "humming mxfp4", "torchao int4 g32")
    times = {1: (30.0, 10.0, 12.0, 9.0), 16: (20.0, 10.0, 30.0, 40.0), 40: (9.0, 10.0, 20.0, 20.0)}
    rows = [
        {"n": 512, "k": 513, "m": m, "system": system, "us": us, "ratio": ""}
        for m, found in times.items()
        for system, us in zip(systems, found, strict=True)
    ]
    rows.append({"n": 512, "k": 513, "m": 50, "system": "fp4_linear nvfp4", "note": "WRONG: .."})
    said = [" ".join(line.split()) for line in draw.summary(rows)]
    assert said[0].startswith("1 to 16 rows, graphed, over cuBLAS bf16, worst of 2 2.000")
    assert said[1].startswith("... the median 2.500")
    assert any(line.startswith("17 to 64 rows, graphed, over cuBLAS bf16, worst of 1 0.900") for line in said)
    assert "65 to 300 rows, graphed, over cuBLAS bf16: no case" in said
    assert said[-1] == "graphed, over the fastest peer, worst of 3 0.900 1 1.3 MISSED"
    line = draw.case_line(draw.Product(512, 513, 16, 9), [{**rows[4], "ratio": ""}, {**rows[5], "ratio": 2.0}])
    assert line == "16 rows, 512 x 513, 9 layers; cublas bf16 0.0200 ms; fp4_linear nvfp4 0.0100 ms: 2.000"


def test_systems_take_turns_and_a_peer_that_fails_says_why(monkeypatch):
    bench = importlib.import_module("benchmarks.bench_fp4")

    def graph_of(calls):
        return calls[0]()

    def fails():
        raise RuntimeError("no kernel\nfor this")

    monkeypatch.setattr(bench, "graph_of", graph_of)
    monkeypatch.setattr(bench, "turns_us", lambda graphs, rounds: [rounds * graph for graph in graphs])
    compared = [
        ("cublas", "", [lambda: 12.0] * 2),
        ("theirs", "cublas", [fails]),
        ("ours", "cublas", [lambda: 4.0] * 2),
    ]
    found = bench.time_systems(compared, {"theirs"}, 3, 60.0)
    assert found[0] == {"system": "cublas", "us": 18.0, "ratio": ""}
    assert found[1]["note"] == "failed: RuntimeError: no kernel" and "us" not in found[1]
    assert found[2] == {"system": "ours", "us": 6.0, "ratio": 3.0}
    with pytest.raises(RuntimeError, match="theirs failed: no kernel"):
        bench.time_systems(compared, set(), 3, 60.0)


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


@pytest.mark.gpu
def test_a_packed_model_decodes_by_a_plain_loop(monkeypatch, capsys):
    fp4_models = importlib.import_module("benchmarks.lib.kernels.fp4_models")
    small = {"hidden_size": 256, "intermediate_size": 512, "num_attention_heads": 4}
    monkeypatch.setattr(fp4_models, "SIZES", fp4_models.SIZES | small)
    lines = fp4_models.bench_models(2)
    assert len(lines) == 3 and "14 weights" in capsys.readouterr().out
