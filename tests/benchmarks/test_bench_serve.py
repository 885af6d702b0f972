"""The benchmark of serving: all of it on a tiny model, the policy that it is compared with, and its arithmetic."""

from __future__ import annotations

import csv
import math
import signal
from collections import Counter

import pytest
import torch

from benchmarks import bench_serve
from benchmarks.lib.serve import models
from benchmarks.lib.serve.asking import Step, Text, decode_rate, step_medians
from benchmarks.lib.serve.policy import Arrival, Service, whole_models_from_disk, zipf_arrivals
from benchmarks.lib.serve.report import Row
from vblackwell.errors import VBError
from vblackwell.offload.layout.generation import workspace_bytes
from vblackwell.serve.request import Done, Request, Token

TINY = "--shape tiny --device cpu --dtype fp32 --scale 16 --cache 8MiB --repeats 1 --interval 0.02"


@pytest.fixture
def run_tiny(tmp_path, monkeypatch):
    """`bench_serve.main` with these words more, and the rows of its file."""
    monkeypatch.setattr(signal, "signal", lambda *_: None)  # it ignores SIGTERM while it reports, and would to the end

    def run(words: str) -> tuple[list[Row], list[dict[str, str]]]:
        rows = bench_serve.main([*f"{TINY} {words}".split(), "--csv", str(tmp_path / "rows.csv")])
        with (tmp_path / "rows.csv").open(newline="") as file:
            return rows, list(csv.DictReader(file))

    return run


@pytest.mark.slow
def test_a_tiny_model_goes_through_all_sections(run_tiny, capsys):
    rows, written = run_tiny("--nvfp4 --arrivals")
    said = capsys.readouterr().out
    counts = {(section, model): 0 for section in ("swap", "first", "decode") for model in ("fp32", "nvfp4")}
    counts |= {("prefix", "fp32"): 2, ("http", "fp32"): 2, ("throughput", "fp32"): 1, ("arrivals", "nvfp4"): 3}
    counts |= {("swap", "fp32"): 3, ("swap", "nvfp4"): 3, ("first", "fp32"): 2, ("first", "nvfp4"): 2}
    counts |= {("decode", "fp32"): 2, ("decode", "nvfp4"): 3}
    assert Counter((row.section, row.model) for row in rows) == counts, said
    for row in rows:  # transformers' batching is foreign: where it fails the row says so
        assert row.value is not None or (row.section == "throughput" and "transformers: " in row.note), row
        assert row.value is None or (math.isfinite(row.value) and row.value >= 0), row
    assert [row.value for row in rows if row.what == "requests lost or starved"] == [0]
    assert all(row.value > 0 for row in rows if row.value is not None and row.what != "requests lost or starved")
    known, risen = (row for row in rows if row.section == "prefix")
    assert known.value < 0.7, "4 tokens are read in place of 260"
    assert risen.what.endswith("from RAM") and "; 0.1 MB" in risen.note  # 16 pages of 8 KiB
    assert [row["what"] for row in written] == [row.what for row in rows] and written[0]["torch"]
    table = said[said.rindex("\n\n") :].strip().splitlines()
    assert len(table) == len(rows) + 2 <= 25


@pytest.mark.slow
def test_what_fails_or_is_late_is_a_row(run_tiny, monkeypatch):
    def fail(run: bench_serve.Run, model: str) -> float:
        raise VBError("the disk is gone")

    monkeypatch.setattr(bench_serve.Run, "asleep", fail)
    rows, _ = run_tiny("--only swap,first,decode")
    assert [row.note for row in rows[:2]] == ["VBError: the disk is gone"] * 2
    assert [row.section for row in rows] == ["swap", "first", "decode", "decode"]
    late, _ = run_tiny("--only swap --seconds 0.5")
    assert [(row.value, row.verdict, row.note) for row in late] == [(None, "NOT MEASURED", "Late: no time is left")]


def test_the_command_line():
    assert bench_serve.parse([]).only == list(bench_serve.SECTIONS[:-1])
    assert bench_serve.parse(["--arrivals"]).only == list(bench_serve.SECTIONS)
    assert bench_serve.parse(["--only", "swap"]).only == ["swap"]
    assert bench_serve.parse(["--only", "swap", "--arrivals"]).only == ["swap", "arrivals"]
    for wrong in (["--only", "swaps"], ["--repeats", "0"]):
        with pytest.raises(SystemExit):
            bench_serve.parse(wrong)


def test_whole_models_from_a_disk_wait_for_each_other():
    """Room for two, 4 s a load, texts of 2 s whose first token comes after 1 s; worked out by hand."""
    service = Service(1.0, 0.0, 1.0)
    coming = [Arrival(at, model, 10, 2) for at, model in ((0, 0), (0, 1), (0, 2), (1, 0), (20, 2), (30, 1))]
    waits = whole_models_from_disk(coming, service, 2, 4.0)
    # Models 0 and 1 are read until 4 and 8. 0 ended at 6 and is thrown out: 2 is there at 12. 0 is read again until 16,
    # in the place of 1. 2 is there still, and was used last: 1 comes in the place of 0, from 30 to 34.
    assert waits == [5.0, 9.0, 13.0, 16.0, 1.0, 5.0]
    assert whole_models_from_disk(coming[:2], service, 2, 4.0, loaded=(0, 1)) == [1.0, 1.0]
    busy = [Arrival(0, 0, 10, 9), Arrival(0, 1, 10, 2)]
    assert whole_models_from_disk(busy, service, 1, 4.0) == [5.0, 18.0], "a text that is written is waited for"


def test_service_and_arrivals():
    service = Service(0.5, 0.01, 0.1)
    assert service.first_s(Arrival(0, 0, 100, 11)) == 1.5 and service.whole_s(Arrival(0, 0, 100, 11)) == 2.5
    coming = zipf_arrivals(4000, 8, 2.0, (64, 512), (8, 64), seed=3)
    assert coming == zipf_arrivals(4000, 8, 2.0, (64, 512), (8, 64), seed=3)
    counts = Counter(arrival.model for arrival in coming)
    # The first has 1 / 2.718 of 4,000, 1472, the last an eighth of that; five deviations of a binomial are 153 and 66.
    assert abs(counts[0] - 1472) < 153 and abs(counts[7] - 184) < 66
    assert abs(coming[-1].at_s / 4000 - 2.0) < 0.16, "five deviations of the mean of 4,000 intervals"
    assert all(64 <= arrival.prompt <= 512 and 8 <= arrival.new <= 64 for arrival in coming)


def text_of(asked: float, times: list[float], *, wanted: int | None = None) -> Text:
    text = Text(Request("m", (1,), wanted or len(times)), asked)
    for _ in times:
        text.hear(Token(3))
    text.hear(Done("length", None, 1, 0, len(times)))
    text.times = times
    return text


def test_rates_are_of_the_time_in_which_all_are_written():
    first, second = text_of(0.0, [1.0, 2.0, 3.0, 4.0, 5.0, 6.0]), text_of(0.5, [3.0, 4.0, 5.0, 6.0, 7.0, 8.0])
    assert (first.first_s, second.first_s) == (1.0, 2.5) and first.is_whole
    assert not text_of(0.0, [1.0], wanted=2).is_whole
    assert decode_rate([first]) == 1.0 and decode_rate([text_of(0.0, [1.0, 1.5])]) == 2.0
    with pytest.raises(VBError, match="never written at the same time"):
        decode_rate([first, second])  # from 6 to 6
    second.times = [2.0, 3.0, 4.0, 5.0, 6.0, 7.0]
    assert decode_rate([first, second]) == 2.0  # from 5 to 6, one of each


def test_steps_count_where_all_texts_write_one_token():
    steps = [Step(began, rows, lambda: 0.25) for began, rows in ((0, 0), (5, 2), (7, 2), (8, 2), (9, 2), (9.5, 1))]
    assert step_medians(steps, 2) == (1.0, 0.25)  # the first, from 5 to 7, does not count
    with pytest.raises(VBError, match="wrote 3 texts"):
        step_medians(steps, 3)


@pytest.mark.parametrize(
    ("value", "more", "verdict"),
    [
        (1.2, False, "MISSED"),
        (1.1, False, "floor met"),
        (1.0, False, "aim met"),
        (math.nan, False, "MISSED"),
        (1.06, True, "MISSED"),
        (1.2, True, "floor met"),
        (None, True, "NOT MEASURED"),
    ],
)
def test_a_row_is_judged_by_floor_and_aim(value, more, verdict):
    row = Row("first", "bf16", "first token", value, "s", 1.15, 1.25 if more else 1.05, more, "why")
    assert row.verdict == verdict == row.cells()["verdict"]
    assert row.line().endswith(f"{verdict} why") and row.line().startswith("bf16 first token, s")


def test_models_are_those_they_say():
    # Llama 3.1 8B has 8,030,261,248 parameters, as its model card and its files have it.
    assert models.SHAPES["8B"].num_parameters == 8_030_261_248
    tokenizer = models.tokenizer_of(4096)
    assert tokenizer.get_vocab_size() == 4096 and tokenizer.decode([256, 4095]) == "aa avR"
    for needed in (1 << 28, 40 << 30):
        budget = models.budget_for(needed, torch.device("cuda"))
        assert needed <= budget - workspace_bytes(budget) <= needed + 1
