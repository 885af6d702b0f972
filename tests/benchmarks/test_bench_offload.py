"""The comparison of offloaded training:
the same training for every system, honest rows for what fails, readable traces.
"""

from __future__ import annotations

import csv
import importlib
import json
import threading
from dataclasses import replace
from pathlib import Path
from types import ModuleType
from unittest import mock

import pytest
import torch

from vblackwell.errors import InsufficientMemory


@pytest.fixture
def bench() -> ModuleType:
    return importlib.import_module("benchmarks.bench_offload")


def words(folder: Path, *more: str) -> list[str]:
    start = "--shape tiny --device cpu --seq 32 --batch 2 --warmup 1 --steps 2 --cap 512KiB --host-memory 64MiB"
    return [*start.split(" "), "--csv", str(folder / "rows.csv"), *more]


def rows(folder: Path) -> list[dict[str, str]]:
    with (folder / "rows.csv").open(newline="") as file:
        return list(csv.DictReader(file))


@pytest.mark.slow
def test_all_of_ours_train_the_same(bench, tmp_path, capsys):
    """Four processes on the CPU: plain, all resident, streamed through an arena of a sixth of its state, and as the
    README has it.
    """
    results = bench.main(words(tmp_path, "--systems", "plain,resident,streamed,lines", "--max-grad-norm", "1.0"))
    said = capsys.readouterr().out
    assert [(result.system, result.status) for result in results] == [
        ("plain", "ok"),
        ("resident", "ok"),
        ("streamed", "ok"),
        ("lines", "ok"),
    ], said
    plain, resident, streamed, lines = results
    assert resident.losses == streamed.losses, "where bytes live changes no bit on the CPU"
    # transformers multiplies under autocast, ours by bf16 weights: other roundings of activations, 2^-8 of differences
    # of logits that are themselves below 0.1 at these weights.
    assert plain.losses == pytest.approx(resident.losses, abs=2e-3)
    assert plain.losses == pytest.approx(lines.losses, abs=2e-3)
    assert resident.clipped_share == 1.0 and len(resident.grad_norms) == 3
    assert streamed.level0_peak <= 512 * 1024 < resident.level0_peak
    assert streamed.link_bytes["cpu>arena"] > 0 and streamed.link_bytes["arena>cpu"] > 0
    assert all(result.tokens_per_second > 0 and len(result.step_seconds) == 2 for result in results)
    assert all(result.host_rss > 2**26 and result.first_step_seconds > 0 for result in results)
    written = rows(tmp_path)
    assert [row["system"] for row in written] == ["plain", "resident", "streamed", "lines"]
    assert [float(loss) for loss in written[2]["losses"].split()] == streamed.losses
    assert written[0]["parameters"] == "221760" and written[0]["torch"] and written[0]["date"]
    assert "streamed, tokens/s over plain" in said and "bitwise equal" in said


@pytest.mark.slow
def test_a_failure_and_a_late_system_are_rows(bench, tmp_path, capsys):
    """A cap that no layer group fits, and a limit that no process meets; the second system runs all the same."""
    results = bench.main(words(tmp_path, "--systems", "streamed", "--cap", "16KiB"))
    results += bench.main(words(tmp_path, "--systems", "resident", "--limit", "0.001"))
    assert results[0].status == "failed" and results[0].error.startswith("InsufficientMemory")
    assert results[1].status == "not up in 0 s" and results[1].tokens_per_second is None
    assert [row["status"] for row in rows(tmp_path)] == ["failed", "not up in 0 s"]
    assert "InsufficientMemory" in capsys.readouterr().out


@pytest.mark.parametrize("system", ["streamed", "lines"])
def test_a_limit_of_ram_is_the_system_s(bench, tmp_path, system):
    from benchmarks.lib.offload.measure import builder_of

    case = bench.case_of(system, bench.parse(words(tmp_path, "--host-memory", "64KiB")), None)
    with pytest.raises(InsufficientMemory):
        builder_of(system)(case, torch.device("cpu"))


def said_of(results: list) -> dict[str, str]:
    """By the words of each line of ratios what is said of its value; without either the value."""
    from benchmarks.lib.offload.case import Case
    from benchmarks.lib.offload.report import ratio_lines

    lines = ratio_lines(results, Case("lines"))[1:]
    return {line[:66].strip(): line[66:].strip().split("  ")[-1] for line in lines}


def test_losses_are_compared_with_those_of_what_is_held(bench):
    from benchmarks.lib.offload.case import Case, Result

    ran = [Result("lines", losses=[2.0, 1.5]), Result("held", losses=[2.0, 1.25])]
    said = bench.ratio_lines(ran, Case("lines"))[-1]
    assert said == "losses of 2 steps, lines against held: largest difference 0.25, not bitwise equal"
    equal = [ran[0], replace(ran[1], losses=[2.0, 1.5])]
    assert bench.ratio_lines(equal, Case("lines"))[-1].endswith(" 0, bitwise equal")


def test_the_data_are_the_chain_they_say(bench):
    from benchmarks.lib.offload.data import drawn, next_tokens, token_batches

    tokens = token_batches(32000, 4, 256, 3, seed=1)
    assert tokens.shape == (3, 4, 256) and torch.equal(tokens, token_batches(32000, 4, 256, 3, seed=1))
    followers: dict[int, set[int]] = {}
    for here, there in zip(tokens[..., :-1].flatten().tolist(), tokens[..., 1:].flatten().tolist(), strict=True):
        followers.setdefault(here, set()).add(there)
    assert len(followers) > 500 and max(len(each) for each in followers.values()) <= 4
    targets = next_tokens(tokens[0])
    assert torch.equal(targets[:, :-1], tokens[0, :, 1:]) and (targets[:, -1] == -100).all()
    weight = drawn("model.layers.0.mlp.down_proj.weight", torch.Size((256, 256)), 8, 0, torch.device("cpu"))
    assert weight.std().item() == pytest.approx(0.02 / 4, rel=0.02)  # 65,536 draws: 0.3 % is one standard error


def test_recipes_and_cases_travel(bench):
    from benchmarks.lib.offload.case import Case, Recipe

    recipe = Recipe.parse("update=device,undo=false,loss_chunk_tokens=1024")
    assert recipe == Recipe("device", False, True, 1024)
    case = Case("streamed", recipe=recipe, max_grad_norm=1.0)
    assert Case.from_json(case.to_json()) == case
    for wrong in ("updates=host", "undo=no", "update"):
        with pytest.raises(ValueError):
            Recipe.parse(wrong)
    with pytest.raises(ValueError):
        Case("megatron")


def test_drawn_cases_are_models_that_plain_pytorch_holds(bench):
    """Parameters are counted as transformers builds them, and a seed gives its cases again."""
    from benchmarks.lib.offload.case import FAMILIES, Case
    from benchmarks.lib.offload.draw import ON_GPU, SHARE_OF_GPU, draws, plain_bytes, streamed_bytes
    from benchmarks.lib.offload.systems import hf_model

    gpu = 141 * 10**9
    found = draws(200, 11, gpu)
    assert found == draws(200, 11, gpu) != draws(200, 12, gpu)
    assert {each.shape.family for each in found} == set(FAMILIES)
    assert {each.shape.tied for each in found} == {True, False} and any(each.shape.vocab_size % 2 for each in found)
    for each in found:
        shape, tokens = each.shape, each.seq * each.batch
        assert plain_bytes(shape, tokens) <= SHARE_OF_GPU * gpu and tokens <= 1.25 * ON_GPU.tokens[1]
        assert each.cap_bytes > streamed_bytes(shape, tokens, ON_GPU.fixed) and shape.hidden_size % shape.num_heads == 0
    sizes = sorted(each.shape.num_parameters for each in found)
    assert sizes[0] < 0.6e9 and sizes[-1] > 4e9
    for family in FAMILIES:
        for each in [each for each in draws(40, 3, None) if each.shape.family == family][:3]:
            case = Case("lines", "drawn", each.seq, each.batch, drawn=each.shape)
            assert Case.from_json(case.to_json()) == case
            model = hf_model(case, "meta")
            assert sum(param.numel() for param in model.parameters()) == each.shape.num_parameters, each.name


@pytest.mark.slow
def test_drawn_cases_run(bench, tmp_path, capsys):
    """Three tiny ones, a step in two parts; the same losses as plain PyTorch, whatever the family, a line for each."""
    results = bench.main(words(tmp_path, "--random", "3", "--seed", "5", "--accumulation", "2"))
    said = capsys.readouterr().out
    assert [(each.system, each.status) for each in results] == [("plain", "ok"), ("lines", "ok")] * 3, said
    for plain, lines in zip(results[::2], results[1::2], strict=True):
        assert plain.losses == pytest.approx(lines.losses, abs=2e-3)  # as above
    assert "over plain, worst of 3" in said and "caps held: 3 of 3" in said
    assert [row["shape"] for row in rows(tmp_path)] == [f"drawn-5-{n}" for n in (0, 0, 1, 1, 2, 2)]


@pytest.mark.slow
def test_a_part_of_a_draw_is_what_the_whole_has_there(bench, tmp_path, capsys):
    bench.main(words(tmp_path, "--random", "3", "--seed", "5", "--only", "2"))
    assert [row["shape"] for row in rows(tmp_path)] == ["drawn-5-1"] * 2
    for asked in (["--random", "3", "--only", "4"], ["--only", "1"]):
        with pytest.raises(SystemExit):
            bench.main(words(tmp_path, *asked))
    assert "--only: of 3 draws, 4 are not all from 1 to 3" in capsys.readouterr().err


def test_ratios_know_floor_and_aim(bench):
    from benchmarks.lib.offload.case import Result

    def result(system: str, speed: float, reserved: int, losses: list[float], clipped: float | None = None) -> Result:
        return Result(system, tokens_per_second=speed, peak_reserved=reserved, losses=losses, clipped_share=clipped)

    ran = [result("plain", 100, 80, [1.0]), result("resident", 120, 60, [2.0]), result("streamed", 96, 10, [2.5])]
    found = said_of(ran)
    assert found["streamed, tokens/s over plain"] == "floor met"
    assert found["streamed, tokens/s over resident"] == "MISSED"
    assert found["resident, tokens/s over plain"] == "floor met"
    assert found["peak reserved GPU memory, plain over streamed"] == "floor met"
    clipped = said_of([*ran[:2], replace(ran[2], clipped_share=1.0)])
    assert clipped["streamed, tokens/s over plain"] == "floor met"
    assert clipped["streamed, tokens/s over resident"] == "0.800", "no floor is known there"
    assert len(said_of([Result("plain", "failed"), ran[2]])) == 0, "no ratio to what did not run"


@pytest.mark.parametrize(
    ("limit", "share", "speed", "said"),
    [
        (None, None, 124, ("MISSED", None)),
        (None, None, 141, ("aim met", None)),
        (1.0, 0.1, 121, ("floor met", "MISSED")),
        (1.0, 0.0, 139, ("aim met", "aim met")),
        (1.0, 0.5, 110, ("1.100", "0.786")),  # nothing was asked for there
        (1e-3, 1.0, 94, ("MISSED", "0.671")),
    ],
)
def test_the_three_lines_are_asked_for_what_fits_how_often_they_clip(limit, share, speed, said):
    from benchmarks.lib.offload.case import Case, Result
    from benchmarks.lib.offload.report import ratio_lines

    free = Result("lines", tokens_per_second=140, peak_reserved=8 * 10**9)
    free, plain = replace(free, tokens=16384), Result("plain", tokens=16384, tokens_per_second=100)
    one = replace(free, tokens_per_second=speed, max_grad_norm=limit, clipped_share=share)
    ran = [replace(plain, peak_reserved=64 * 10**9), *([] if limit is None else [free]), one]
    lines = ratio_lines(ran, Case("lines"))
    of_one = lines[max(number for number, line in enumerate(lines) if line.startswith("three lines")) :]
    words = "no clipping" if limit is None else f"limit {limit:g}, which {share:.0%} of the steps exceed"
    assert of_one[0] == f"three lines, {words}:"
    values = {line[:66].strip(): line.split("  ")[-1].strip() for line in of_one}
    assert (values["over plain"], values.get("over the same without clipping")) == said
    assert values["reserved GPU memory, plain over it"] == "floor met"


@pytest.mark.parametrize(
    ("tokens", "free", "clipping"), [(8192, "floor met", "aim met"), (16384, "MISSED", "floor met")]
)
def test_floors_over_what_is_held_are_of_tokens_a_step(tokens, free, clipping):
    from benchmarks.lib.offload.case import SHAPES, Case, Result
    from benchmarks.lib.offload.report import ratio_lines

    held = Result("held", tokens=tokens, tokens_per_second=100)
    ours = Result("lines", tokens=tokens, tokens_per_second=50)
    limited = replace(ours, max_grad_norm=1e9, clipped_share=0.0)

    def said(case: Case) -> list[str]:
        lines = ratio_lines([held, ours, limited], case)
        return [line.split("  ")[-1].strip() for line in lines if "where all fits" in line]

    asked = Case("lines", shape="6.7B", cap_bytes=8 << 30)
    assert said(asked) == [free, clipping]
    others = Case("lines"), replace(asked, drawn=SHAPES["6.7B"]), replace(asked, cap_bytes=9 << 30)
    for other in (*others, replace(asked, device="cpu")):  # nothing was asked for there
        assert said(other) == ["0.500", "0.500"]


def test_where_some_steps_clip_all_of_both_count():
    from benchmarks.lib.offload.case import Case, Result
    from benchmarks.lib.offload.report import ratio_lines

    plain = Result("plain", tokens=10, tokens_per_second=10, step_seconds=[1.0, 1.0, 2.0])
    ours = Result("lines", tokens=10, tokens_per_second=20, step_seconds=[0.5, 0.5, 1.0], max_grad_norm=1.0)
    for share, over in ((0.0, "2.000"), (1 / 3, "2.000"), (1.0, "2.000")):
        assert over in ratio_lines([plain, replace(ours, clipped_share=share)], Case("lines"))[2]
    slower = replace(ours, step_seconds=[0.5, 0.5, 3.0], clipped_share=1 / 3)
    assert "1.000" in ratio_lines([plain, slower], Case("lines"))[2]


def test_a_bad_batch_is_none_of_the_last_measured_steps():
    from benchmarks.lib.offload.case import Case

    case = Case("lines", bad_every=10, steps=10)
    assert [first for first in range(6, 13) if case.ends_badly(first)] == [10, 11]
    assert not any(replace(case, bad_every=None).ends_badly(first) for first in range(13))


def test_of_bytes_and_seconds_less_is_better():
    from benchmarks.lib.results import goal_line

    ends = [goal_line("bytes", value, 27.0, 25.0, less=True).split("  ")[-1] for value in (28.0, 26.0, 24.0)]
    assert ends == ["MISSED", "floor met", "aim met"]


def test_one_batch_of_so_many_is_a_bad_one():
    from benchmarks.lib.offload.data import token_batches

    tokens = token_batches(64, 2, 8, 20, 0, 10)
    same = (tokens == tokens[:, :, :1]).all(dim=(1, 2))
    assert same.nonzero().flatten().tolist() == [9, 19]
    assert torch.equal(tokens[~same], token_batches(64, 2, 8, 20, 0)[~same])
    assert torch.equal(tokens[:7], token_batches(64, 2, 8, 7, 0, 10)), "of others there may be more or fewer batches"


@pytest.mark.slow
def test_steps_that_clip_are_counted(bench, tmp_path, capsys):
    """Three limits in one command, the middle one between the norms of usual batches and of the bad one."""
    asked = words(tmp_path, "--steps", "10", "--max-grad-norm", "none,3,1e-6", "--learning-rate", "1e-5")
    plain, free, some, each = bench.main(asked)
    assert [result.system for result in (plain, free, some, each)] == ["plain", "lines", "lines", "lines"]
    assert (free.clipped_share, some.clipped_share, each.clipped_share) == (None, 0.1, 1.0), some.grad_norms
    assert some.tokens_per_second == pytest.approx(10 * some.tokens / sum(some.step_seconds))
    said = capsys.readouterr().out
    assert "three lines, limit 3, which 10% of the steps exceed:" in said and "1 of 10 measured steps clipped" in said
    assert "lines 1e-06" in said and "over the same without clipping" in said
    assert [row["max_grad_norm"] for row in rows(tmp_path)] == ["", "", "3.0", "1e-06"]


def test_a_csv_grows_by_columns(bench, tmp_path):
    from benchmarks.lib.results import append_csv

    append_csv(tmp_path / "rows.csv", [{"a": 1}])
    append_csv(tmp_path / "rows.csv", [{"b": 2, "a": 3}])
    assert rows(tmp_path) == [{"a": "1", "b": ""}, {"a": "3", "b": "2"}]


# -- traces ------------------------------------------------------------------------------------------------------------


def event(category: str, name: str, stream: int, begin: float, length: float, num_bytes: int = 0) -> dict:
    args = {"bytes": num_bytes} if num_bytes else {}
    return {"ph": "X", "cat": category, "name": name, "pid": 0, "tid": stream, "ts": begin, "dur": length, "args": args}


def made_trace() -> dict:
    """Two streams that copy, one that computes, one that updates; the computing one rests from 40 to 70."""
    return {
        "traceEvents": [
            {"ph": "X", "cat": "user_annotation", "name": "ProfilerStep#3", "pid": 9, "tid": 9, "ts": 0, "dur": 100},
            event("kernel", "void gemm<float>(int)", 7, 0, 40),
            event("kernel", "void softmax<float>(int)", 7, 70, 30),
            event("gpu_memcpy", "Memcpy HtoD (Pinned -> Device)", 13, 10, 50, 2_500_000),
            event("gpu_memcpy", "Memcpy DtoH (Device -> Pinned)", 14, 60, 20, 1_000_000),
            event("gpu_memset", "Memset (Device)", 14, 5, 1),
            event("kernel", "adamw_kernel", 15, 50, 10),
        ]
    }


def test_lanes_are_named_by_what_they_do():
    from vblackwell.train.profile import name_lanes, stream_roles

    trace = made_trace()
    roles = stream_roles(trace["traceEvents"])
    assert roles == {(0, 7): "kernels", (0, 13): "host to GPU", (0, 14): "GPU to host", (0, 15): "updates"}
    trace["traceEvents"] += [
        {"ph": "X", "cat": "cpu_op", "name": "MmBackward0", "pid": 9, "tid": 11, "ts": 0, "dur": 9},
        {"ph": "M", "name": "thread_name", "pid": 9, "tid": 11, "ts": 0, "args": {"name": "thread 11 (pt_autograd_0)"}},
        {"ph": "M", "name": "thread_name", "pid": 9, "tid": 11, "ts": 0, "args": {"name": "thread 11 (python3)"}},
    ]
    name_lanes(trace, {9: "MainThread"})
    names = {(e["pid"], e["tid"]): e["args"]["name"] for e in trace["traceEvents"] if e["name"] == "thread_name"}
    assert names[0, 13] == "host to GPU (stream 13)" and names[9, 9] == "MainThread (thread 9)"
    assert names[9, 11] == "backward (thread 11)"
    order = {(e["pid"], e["tid"]): e["args"] for e in trace["traceEvents"] if e["name"] == "thread_sort_index"}
    wanted = {(0, 7): 0, (0, 13): 1, (0, 14): 2, (0, 15): 3, (9, 9): 0, (9, 11): 1}
    assert order == {lane: {"sort_index": index} for lane, index in wanted.items()}


def traced_names(path: Path, device: torch.device, work) -> list[str]:
    from vblackwell.train import profile

    shorter = mock.patch.multiple(profile, SKIPPED_STEPS=0, TRACED_STEPS=2)
    with shorter, profile.tracing(path, device, lambda text: None) as step:
        for _ in range(3):
            with step():
                work()
    return [e["args"]["name"] for e in json.loads(path.read_text())["traceEvents"] if e.get("name") == "thread_name"]


def test_a_trace_shows_background_threads(tmp_path):
    from concurrent.futures import ThreadPoolExecutor

    with ThreadPoolExecutor(1, thread_name_prefix="vblackwell-test") as pool:
        values = torch.ones(64)
        names = traced_names(tmp_path / "t.json", torch.device("cpu"), lambda: pool.submit(values.add_, 1.0).result())
    assert any(name.startswith("vblackwell-test_0 (thread") for name in names), names
    assert threading.main_thread().name in " ".join(names)


@pytest.mark.gpu
def test_a_trace_names_the_streams(tmp_path):
    from vblackwell.memory.transfer import copy_streams

    device = torch.device("cuda", 0)
    a = torch.randn(2048, 2048, device=device)
    host = torch.empty(2**24, dtype=torch.uint8, pin_memory=True)
    there, streams = torch.empty(2**24, dtype=torch.uint8, device=device), copy_streams(device)

    def work() -> None:
        torch.mm(a, a)
        for stream, target, source in ((streams.h2d, there, host), (streams.d2h, host, there)):
            with torch.cuda.stream(stream):
                target.copy_(source, non_blocking=True)
            torch.cuda.synchronize()

    path = tmp_path / "trace.json"
    names = traced_names(path, device, work)
    for role in ("kernels", "host to GPU", "GPU to host"):
        assert sum(name.startswith(f"{role} (stream") for name in names) == 1, names
