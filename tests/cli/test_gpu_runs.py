"""Whole runs on a GPU: the cap holds, an interrupted run goes on bit by bit, fp16 has its scaler."""

from __future__ import annotations

import json
import shutil

import pytest

from vblackwell.units import MiB

pytestmark = pytest.mark.gpu


def on_gpu(place, *words):
    """As the flags say: what a plan chooses goes by the memory that is free just now."""
    wide = "{num_layers: 8, hidden_size: 512, intermediate_size: 1536, num_heads: 4}"
    return place.train_words(
        "--device", "cuda", "--no-vgpu-auto", "--architecture", wide, "--learning-rate", "1e-3", *words
    )


def losses_of(run):
    return [json.loads(line)["loss"] for line in (run / "metrics.jsonl").read_text().splitlines()]


def test_a_cap_holds_for_the_whole_process(place):
    """27 M parameters: 420 MiB of training state under a cap of 256 MiB,
    with activations and cuBLAS' workspace of 32 MiB.
    """
    common = ["--max-steps", "8", "--checkpoint-every", "0", "--max-grad-norm", "1", "--gradient-checkpointing"]
    output = place.vb(*on_gpu(place, *common, "--fast-memory", "256MiB", "--out", "capped")).stdout
    assert "placement: streamed" in output and "cuda:0" in output
    report = json.loads((place.folder / "capped/report.json").read_text())
    assert 0 < report["gpu_peak_bytes"]["reserved"] <= 256 * MiB
    place.vb(*on_gpu(place, *common, "--out", "resident"))
    # The first loss is before any update; later ones differ in last bits (CPU and GPU AdamW).
    streamed, resident = losses_of(place.folder / "capped"), losses_of(place.folder / "resident")
    assert streamed[0] == resident[0]
    assert streamed == pytest.approx(resident, rel=2e-3)


@pytest.mark.parametrize("placement", [["--fast-memory", "256MiB"], ["--placement", "resident"]])
def test_an_interrupted_run_goes_on_bit_by_bit(place, placement):
    words = on_gpu(
        place,
        *placement,
        "--max-steps",
        "10",
        "--checkpoint-every",
        "5",
        "--mixed-precision",
        "--deterministic",
        "--out",
    )
    place.vb(*words, "whole")
    place.vb(*words, "again")
    assert losses_of(place.folder / "whole") == losses_of(place.folder / "again"), "not deterministic"
    whole = (place.folder / "whole/final/model.safetensors").read_bytes()
    shutil.rmtree(place.folder / "again/final")
    shutil.rmtree(place.folder / "again/checkpoints/step-00000010")
    assert "after step 5" in place.vb("train", "--out", "again", "--resume").stdout
    assert (place.folder / "again/final/model.safetensors").read_bytes() == whole


def test_fp16_learns_with_a_scaler(place):
    words = on_gpu(
        place, "--fast-memory", "256MiB", "--max-steps", "12", "--checkpoint-every", "12", "--precision", "fp16"
    )
    place.vb(*words, "--profile", "--out", "run")
    losses = losses_of(place.folder / "run")
    assert losses[-1] < losses[0] - 0.5
    state = json.loads((place.folder / "run/checkpoints/step-00000012/trainer.json").read_text())["state"]
    assert state["scaler"]["scale"] >= 1.0 and state["rng"]["cuda"]
    assert '"cat": "kernel"' in (place.folder / "run/trace.json").read_text()
