"""What plans predicted next to what runs measured: kept, read and summed up."""

from __future__ import annotations

import json
import threading
from pathlib import Path

import pytest

from vblackwell.cli import main
from vblackwell.planner.predictions import keep_prediction, kept_predictions, prediction_lines


@pytest.fixture(autouse=True)
def cache(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    monkeypatch.setenv("XDG_CACHE_HOME", str(tmp_path))
    return tmp_path / "vblackwell"


def compared(gpu: tuple[float, float], speed: tuple[float, float | None]) -> dict:
    pairs = {"gpu_bytes": gpu, "host_bytes": (0, 0), "tokens_per_second": speed}
    return {"choice": "resident"} | {name: {"predicted": said, "measured": was} for name, (said, was) in pairs.items()}


def test_errors_by_machine_and_rates(capsys: pytest.CaptureFixture[str]):
    assert main(["doctor", "--predictions"]) == 0
    assert capsys.readouterr().out == "No run with a plan has ended here yet.\n"
    keep_prediction("H200", "measured here by vb doctor", compared((110, 100), (50, 100)))
    keep_prediction("H200", "measured here by vb doctor", compared((100, 100), (110, 100)))
    keep_prediction("H200", "measured here by vb doctor", compared((90, 100), (120, None)))
    keep_prediction("CPU", "products and copies on this CPU", compared((0, 0), (80, 100)))
    assert main(["doctor", "--predictions"]) == 0
    rows = [line.split() for line in capsys.readouterr().out.splitlines()]
    assert [row[-4:] for row in rows[1:]] == [
        ["3", "+0.0%", "10.0%", "+10.0%"],
        ["2", "-20.0%", "30.0%", "-50.0%"],
        ["1", "-20.0%", "20.0%", "-20.0%"],
    ]
    assert main(["doctor", "--predictions", "--json"]) == 0
    assert [run["machine"] for run in json.loads(capsys.readouterr().out)] == ["H200"] * 3 + ["CPU"]


def test_a_damaged_line_is_left_out(cache: Path):
    keep_prediction("H200", "", compared((1, 1), (1, 1)))
    with (cache / "predictions.jsonl").open("ab") as file:
        for left_out in ("rates", "tokens_per_second"):
            line = {"machine": "H200", "rates": ""} | compared((1, 1), (1, 1))
            del line[left_out]
            file.write(json.dumps(line).encode() + b"\n")
        file.write(b'{"machine": "H200"}\n\xff\xfe\n[1]\n{"machine": 3, "gpu_bytes"\n')
    keep_prediction("H200", "", compared((2, 1), (1, 1)))
    assert [run["gpu_bytes"]["predicted"] for run in kept_predictions()] == [1, 2]
    assert len(prediction_lines(kept_predictions())) == 3


def test_runs_that_end_together_keep_whole_lines():
    def end() -> None:
        for _ in range(50):
            keep_prediction("H200", "", compared((1, 1), (1, 1)))

    threads = [threading.Thread(target=end) for _ in range(4)]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join()
    assert len(kept_predictions()) == 200


def test_a_cache_that_cannot_be_written_is_no_error(tmp_path: Path, monkeypatch: pytest.MonkeyPatch):
    (tmp_path / "file").write_text("")
    monkeypatch.setenv("XDG_CACHE_HOME", str(tmp_path / "file"))
    keep_prediction("H200", "", compared((1, 1), (1, 1)))
    assert kept_predictions() == []
