"""`vb bench` as a process: its JSON, and refusals on one line."""

from __future__ import annotations

import json

from tests.cli.test_bad_input import refused

QUICK = ["--device", "cpu", "--batch-size", "1", "--seq-length", "16", "--vocab-size", "512", "--phases", "inference"]


def test_a_preset_into_a_file(place):
    result = place.vb("bench", "tiny", *QUICK, "--rungs", "bf16", "--json", "bench.json")
    found = json.loads((place.folder / "bench.json").read_text())
    assert [row["name"] for row in found["rungs"]] == ["bf16"]
    assert all(row["inference"]["milliseconds"] > 0 and not row["refused"] for row in found["rungs"])
    assert "ms a token" in result.stdout and "1/1 bf16: inference" in result.stderr


def test_refusals_are_one_line(place):
    (place.folder / "empty").mkdir()
    bench = ["bench", "--device", "cpu"]
    refused(place, bench, "vb bench", "model")
    refused(place, [*bench, "tinny"], "tinny", "did you mean", "tiny")
    refused(place, [*bench, "empty"], "empty", "config.json")
    refused(place, [*bench, "tiny", "--rungs", "fp8"], "--rungs", "fp8", "fp4")
    refused(place, [*bench, "tiny", "--json", "gone/x.json"], "gone/x.json", "folder that exists")
    refused(place, [*bench, "tiny", "--step", "3"], "--step", "--steps")
