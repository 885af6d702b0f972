"""A run from the command line to the files that others read."""

from __future__ import annotations

import json
import re
import shutil

import pytest
import torch
from safetensors.torch import load_file

from tests.cli.conftest import LEVELS
from vblackwell.folders.commit import MANIFEST, hash_file, verify_folder


def metrics_of(run):
    return [json.loads(line) for line in (run / "metrics.jsonl").read_text().splitlines()]


def test_a_run_learns_and_reports(finished):
    place, run, output = finished
    lines = metrics_of(run)
    assert [line["step"] for line in lines] == list(range(1, 25))
    keys = {"step", "loss", "lr", "grad_norm", "tokens_per_second", "level_bytes", "link_bytes", "stall_seconds"}
    assert all(set(line) in (keys, keys | {"val_loss"}) for line in lines)
    validated = {line["step"]: line["val_loss"] for line in lines if "val_loss" in line}
    assert sorted(validated) == [1, 8, 16, 24]
    assert validated[1] > 5.4  # ln 300 is 5.70: an untrained model knows nothing
    assert validated[24] < validated[1] - 1.0
    assert list(lines[0]["level_bytes"]) == ["arena", "cpu", "ssd"]
    assert all(size > 0 for size in lines[-1]["level_bytes"].values()), "a level held nothing"
    assert sum(lines[-1]["link_bytes"].values()) > 0
    report = json.loads((run / "report.json").read_text())
    assert report["placement"] == "streamed" and report["ssd_written_bytes"] > 0
    assert all(level["peak_bytes"] <= level["capacity_bytes"] for level in report["levels"])
    for part in ("validation", "sample:\ndef ", "weights found there", "time waited for weights", "written to the SSD"):
        assert part in output or part == "validation", part
    assert any((run / "tensorboard").iterdir())
    assert sorted(path.name for path in (run / "checkpoints").iterdir()) == ["step-00000010", "step-00000020"]
    assert not list(place.folder.rglob("*.tmp"))


def test_transformers_opens_checkpoint_and_final_with_equal_logits(finished):
    from transformers import AutoModelForCausalLM, AutoTokenizer

    from vblackwell.generate.load import load_model

    _, run, _ = finished
    for folder in (run / "final", run / "checkpoints" / "step-00000020"):
        verify_folder(folder)
        theirs = AutoModelForCausalLM.from_pretrained(folder, dtype=torch.float32)
        ours = load_model(folder, dtype=torch.float32)
        input_ids_BS = torch.arange(2 * 16).view(2, 16) % 300
        with torch.no_grad():
            assert torch.equal(ours(input_ids_BS), theirs(input_ids_BS).logits)
        tokenizer = AutoTokenizer.from_pretrained(folder)
        assert tokenizer.decode(tokenizer("def main():")["input_ids"]) == "def main():"


def test_optimizer_state_has_torch_s_names_and_shapes(finished):
    _, run, _ = finished
    folder = run / "checkpoints" / "step-00000020"
    weights, states = load_file(folder / "model.safetensors"), load_file(folder / "optimizer.safetensors")
    assert set(states) == {f"{name}.{key}" for name in weights for key in ("exp_avg", "exp_avg_sq", "step")}
    for name, weight in weights.items():
        assert states[f"{name}.exp_avg"].shape == weight.shape and weight.dtype == torch.float32
        assert states[f"{name}.step"] == 20
        assert states[f"{name}.exp_avg_sq"].gt(0).any()


def test_where_bytes_live_changes_no_bit(finished, place):
    """The same run, resident in one arena: the same losses and the same final weights as the streamed one."""
    _, run, _ = finished
    words = place.train_words("--max-steps", "24", "--checkpoint-every", "0", "--eval-every", "8", "--out", "resident")
    output = place.vb(*words).stdout
    assert "placement: resident" in output
    resident = place.folder / "resident"
    assert [line["loss"] for line in metrics_of(resident)] == [line["loss"] for line in metrics_of(run)]
    assert (resident / "final/model.safetensors").read_bytes() == (run / "final/model.safetensors").read_bytes()
    assert not (resident / "checkpoints").exists()


def test_generate_reads_runs_and_folders(finished):
    place, run, _ = finished
    texts = [
        place.vb("generate", "--model", str(folder), "--prompt", "def ", "--max-new-tokens", "12").stdout
        for folder in (run, run / "final")
    ]
    assert texts[0] == texts[1] and texts[0].startswith("def ") and len(texts[0]) > 8


def test_a_hugging_face_folder_is_trained_further(finished, place):
    """The first loss is the trained model's, and its tokenizer and shape are taken over."""
    _, run, _ = finished
    words = [
        "train",
        "--model",
        str(run / "final"),
        "--data",
        str(place.corpus),
        "--seq-length",
        "32",
        "--batch-size",
        "auto",
    ]
    short = ["--max-steps", "3", "--eval-sequences", "16", "--sample-tokens", "0"]  # the sequences that `finished` took
    told = place.vb(*words, *short, "--device", "cpu", "--plan").stdout
    assert not (place.folder / "runs").exists(), "a plan writes nothing"
    output = place.vb(*words, *short, "--device", "cpu", "--vgpu-auto").stdout
    plans = [
        re.findall(r"plan: .*|fast memory [\d.]+ \S+ \(at most .*\)$", text, re.MULTILINE) for text in (told, output)
    ]
    assert len(plans[0]) == 2 and plans[0] == plans[1], (told, output)
    assert "final: 0.05 M parameters" in output and ", then disk " in output, output
    assert "plan: resident, 8 sequences" in output and "predicted  measured" in output, output
    report = json.loads((place.folder / "runs/final/report.json").read_text())
    assert report["placement"] == "resident" and report["plan"]["tokens_per_second"]["measured"] > 0
    lines = metrics_of(place.folder / "runs/final")
    last = [line["val_loss"] for line in metrics_of(run) if "val_loss" in line][-1]
    assert abs(lines[0]["val_loss"] - last) < 0.3  # an untrained one is above 5.4


def test_a_finished_run_is_left_alone(finished):
    place, run, _ = finished
    before = {path: path.stat().st_mtime_ns for path in (run / "final").iterdir()}
    assert "nothing to do" in place.vb("train", "--out", "run", "--resume").stdout
    assert {path: path.stat().st_mtime_ns for path in (run / "final").iterdir()} == before
    changed = ["train", "--out", "run", "--resume", "--plan", "--seq-length", "64"]
    assert "the run was started with 32" in place.vb(*changed, code=2).stderr, "as the run that it plans"


def test_a_checkpoint_of_one_stack_goes_on_in_another(finished, place):
    """24 steps with one stack = 10 streamed steps, then 14 in another placement from the checkpoint."""
    _, run, _ = finished
    shutil.copytree(run, place.folder / "run")
    for name in ("final", "checkpoints/step-00000020"):
        shutil.rmtree(place.folder / "run" / name)
    output = place.vb("train", "--out", "run", "--resume", "--fast-memory", "4MiB", "--host-memory", "1MiB").stdout
    assert "resumed from" in output and "after step 10" in output and "last bits" not in output
    assert (place.folder / "run/final/model.safetensors").read_bytes() == (run / "final/model.safetensors").read_bytes()


def test_a_resumed_run_says_what_may_change_its_last_bits(place):
    common = [
        "--eval-every",
        "0",
        "--eval-sequences",
        "4",
        "--sample-tokens",
        "0",
        "--checkpoint-every",
        "1",
        "--out",
        "run",
    ]
    place.vb(*place.train_words(*common, "--max-steps", "1"))
    checkpoint = place.folder / "run/checkpoints/step-00000001"
    trainer, manifest = (json.loads((checkpoint / name).read_text()) for name in ("trainer.json", MANIFEST))
    assert trainer["arithmetic"]["device"] == "cpu"
    trainer["arithmetic"]["device"] = "NVIDIA H200"  # as if it had begun there
    (checkpoint / "trainer.json").write_text(json.dumps(trainer))
    manifest["files"]["trainer.json"] = hash_file(checkpoint / "trainer.json")
    (checkpoint / MANIFEST).write_text(json.dumps(manifest))
    changed = ["--gradient-checkpointing", "--deterministic", "--use-flash-attn"]
    output = place.vb("train", "--resume", "--out", "run", "--max-steps", "2", *changed).stdout
    (line,) = (line for line in output.splitlines() if "last bits" in line)
    for part in (
        "--gradient-checkpointing: True, before False",
        "--deterministic: True, before False",
        "attention: ",
        "device: cpu, before NVIDIA H200",
    ):
        assert part in line
    assert "CPU threads" not in line


@pytest.mark.parametrize("precision", [pytest.param("bf16", marks=pytest.mark.slow), "fp16"])
def test_half_precision_and_accumulation(precision, place):
    """Each compute type learns; fp16 needs its scaler, whose scale is in the checkpoint."""
    words = place.train_words(
        *(*LEVELS, "--precision", precision, "--out", precision),
        *("--accumulation-steps", "2", "--max-steps", "6", "--checkpoint-every", "3"),
        *("--gradient-checkpointing", "--deterministic", "--use-flash-attn"),
    )
    output = place.vb(*words).stdout
    assert (
        f"{'bfloat16' if precision == 'bf16' else 'float16'} on cpu, attention: flash, as --use-flash-attn asks"
        in output
    )
    losses = [line["loss"] for line in metrics_of(place.folder / precision)]
    assert losses[-1] < losses[0] - 0.3
    folder = place.folder / precision / "checkpoints/step-00000006"
    scaler = json.loads((folder / "trainer.json").read_text())["state"]["scaler"]
    assert (scaler is None) == (precision == "bf16")
    weights = load_file(folder / "model.safetensors")
    assert all(weight.dtype == torch.float32 for weight in weights.values())
    # Masters, not widened compute weights: some bits lie below the compute type's.
    assert any(not torch.equal(w, w.to(torch.bfloat16).float()) for w in weights.values())


def test_fp4_weights_in_the_forward(finished, place):
    """Straight-through training streams, learns, is not the full-precision run, and is saved in full precision."""
    _, run, _ = finished
    words = ["--max-steps", "24", "--checkpoint-every", "0", "--eval-every", "24", "--use-fp4", "--out", "fp4"]
    output = place.vb(*place.train_words(*LEVELS, *words)).stdout
    assert "linears compute with their weights rounded to nvfp4" in output and "placement: streamed" in output
    lines, plain = metrics_of(place.folder / "fp4"), metrics_of(run)
    assert lines[0]["loss"] != plain[0]["loss"]
    assert lines[-1]["val_loss"] < lines[0]["val_loss"] - 1.0
    # Rounding weights to 4 bits costs little at this size, but it must not be free: then nothing would have been
    # rounded.
    assert 0 < abs(lines[-1]["val_loss"] - plain[-1]["val_loss"]) < 0.3
    weights = load_file(place.folder / "fp4/final/model.safetensors")
    assert set(weights) == set(load_file(run / "final/model.safetensors"))
    assert all(weight.dtype == torch.float32 for weight in weights.values())


def test_profile_writes_a_trace(place):
    place.vb(*place.train_words("--max-steps", "7", "--checkpoint-every", "0", "--profile", "--out", "run"))
    events = json.loads((place.folder / "run/trace.json").read_text())["traceEvents"]
    assert any("aten::" in str(event.get("name")) for event in events)


@pytest.mark.slow
def test_doctor_speaks_json(place):
    result = place.vb("doctor", "--json", "--disk-path", str(place.folder))
    found = json.loads(result.stdout)
    assert found["memory"]["available_bytes"] > 0 and found["rates"]["host_copy_gbps"] > 0
    assert "measuring" in result.stderr
