"""Stated formats of optimizer states from the command line: killed, resumed elsewhere, reported, and kept to."""

from __future__ import annotations

import json
import signal

import pytest

from tests.cli.conftest import COMMITTED

# Level 0 holds the ring of 8-bit states (92 KiB, a quarter of what is free) and little more, so that the run streams.
STREAMED = ["--fast-memory", "420KiB", "--host-memory", "8MiB", "--placement", "streamed"]
RESIDENT = ["--fast-memory", "16MiB", "--host-memory", "8MiB", "--placement", "resident"]


@pytest.mark.parametrize(
    "flags",
    [pytest.param(["--precision", "fp32"], marks=pytest.mark.slow), ["--precision", "bf16", "--masters", "stochastic"]],
    ids=str,
)
def test_a_killed_run_ends_elsewhere_with_the_same_weights(place, flags):
    words = place.train_words(
        *("--optimizer-states", "8bit", *flags),
        *("--max-steps", "4", "--checkpoint-every", "2", "--eval-every", "0", "--sample-tokens", "0"),
    )
    place.vb(*words, *STREAMED, "--out", "whole")
    killed = place.start(*words, *STREAMED, "--out", "killed", signal_after=(COMMITTED, [signal.SIGKILL]))
    assert killed.wait() == -signal.SIGKILL
    result = place.vb("train", "--resume", "--out", "killed", "--disk-path", str(place.folder), *RESIDENT)
    whole, resumed = (place.folder / name / "final/model.safetensors" for name in ("whole", "killed"))
    assert whole.read_bytes() == resumed.read_bytes()
    report = json.loads((place.folder / "killed/report.json").read_text())
    masters = "stochastic" if "stochastic" in flags else "exact"
    assert report["formats"] == {"states": "8bit", "masters": masters} and report["placement"] == "resident"
    assert f"AdamW: 8bit states, {masters} masters" in result.stdout
    refusal = place.vb("train", "--resume", "--out", "killed", "--optimizer-states", "fp32", code=2).stderr
    assert "--optimizer-states" in refusal or "--masters" in refusal, refusal


def test_a_compute_type_that_cannot_be_kept_so_is_refused(place):
    for flags, text in (
        (["--precision", "fp16"], "--optimizer-states 8bit cannot be had with float16 compute: add --precision bf16"),
        (["--masters", "stochastic"], "--masters stochastic cannot be had with float32 compute"),
    ):
        result = place.vb(*place.train_words("--optimizer-states", "8bit", *flags), code=2)
        assert text in result.stderr and not (place.folder / "runs").exists()
