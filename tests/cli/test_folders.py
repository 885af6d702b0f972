"""`vb train --model FOLDER` on architectures of transformers: trained, resumed, exported;
what is wrong with a folder is named.
"""

from __future__ import annotations

import json
import math
import os
import shutil
from pathlib import Path

import pytest
import torch
import transformers
from safetensors.torch import load_file

from tests.cli.conftest import Workplace
from tests.cli.test_bad_input import refused
from tests.offload.test_round_trip_models import CONFIGS

SMALL = ["--seq-length", "16", "--batch-size", "4", "--device", "cpu", "--no-tensorboard", "--sample-tokens", "4"]
RUN = [
    *SMALL,
    "--learning-rate",
    "5e-3",
    "--max-steps",
    "4",
    "--checkpoint-every",
    "2",
    "--eval-sequences",
    "8",
    "--out",
    "run",
]


@pytest.fixture(scope="session")
def folders(finished, tmp_path_factory):
    """``folders(kind)``: a small model's folder, the vocabulary and tokenizer of a finished run; not to be changed."""
    _, run, _ = finished
    parent = tmp_path_factory.mktemp("folders")

    def make(kind: str) -> Path:
        folder = parent / kind
        if not folder.exists():
            torch.manual_seed(0)
            config = CONFIGS[kind](num_hidden_layers=3, vocab_size=300)
            model = transformers.AutoModelForCausalLM.from_config(config)
            model.to(torch.bfloat16).save_pretrained(folder, max_shard_size="40KB")
            for name in ("tokenizer.json", "tokenizer_config.json"):
                shutil.copy(run / "final" / name, folder)
        return folder

    return make


def words(place: Workplace, folder: Path, *more: str) -> list[str]:
    return ["train", "--model", str(folder), "--data", str(place.corpus), "--disk-path", str(place.folder), *more]


def metrics(run: Path) -> list[dict[str, float]]:
    return [json.loads(line) for line in (run / "metrics.jsonl").read_text().splitlines()]


@pytest.mark.parametrize("kind", ["mixtral", pytest.param("gpt2", marks=pytest.mark.slow)])
def test_other_architectures_are_trained(kind, place, folders):
    """Streamed, with the losses of a run on one level;
    the folder that comes out opens in transformers with another loss.
    """
    folder = folders(kind)
    levels = ["--placement", "streamed", "--fast-memory", "1MiB", "--host-memory", "1200KiB", "--disk-memory", "16MiB"]
    output = place.vb(*words(place, folder, *RUN, *levels)).stdout
    assert "attention: " in output and "sample:" in output
    streamed = metrics(place.folder / "run")
    assert abs(streamed[0]["val_loss"] - math.log(300)) < 0.3  # an untrained model knows nothing
    assert streamed[-1]["loss"] < streamed[0]["loss"]
    place.vb(*words(place, folder, *RUN[:-1], "resident", "--placement", "resident"))
    assert [line["loss"] for line in metrics(place.folder / "resident")] == [line["loss"] for line in streamed]

    final = place.folder / "run/final"
    model, report = transformers.AutoModelForCausalLM.from_pretrained(final, output_loading_info=True)
    assert not any(report[key] for key in ("missing_keys", "unexpected_keys", "mismatched_keys"))
    before = {name for path in folder.glob("*.safetensors") for name in load_file(path)}
    assert set(load_file(final / "model.safetensors")) == before, "other names than the folder had"
    assert (final / "tokenizer_config.json").read_bytes() == (folder / "tokenizer_config.json").read_bytes()
    assert next(model.parameters()).dtype == torch.float32

    whole = {path.name: path.read_bytes() for path in final.glob("*.safetensors")}
    shutil.rmtree(final)
    shutil.rmtree(place.folder / "run/checkpoints/step-00000004")
    assert "resumed from" in place.vb("train", "--out", "run", "--resume").stdout
    assert {path.name: path.read_bytes() for path in final.glob("*.safetensors")} == whole


def test_layers_are_computed_again_on_request(place, folders):
    place.vb(*words(place, folders("qwen3"), *RUN))
    flags = ("--gradient-checkpointing", "--use-flash-attn")  # what the CPU attends with in any case
    output = place.vb(*words(place, folders("qwen3"), *RUN[:-1], "again", *flags)).stdout
    assert "attention: flash, as --use-flash-attn asks" in output
    one, other = (load_file(place.folder / name / "final/model.safetensors") for name in ("run", "again"))
    assert all(torch.equal(one[name], other[name]) for name in one)


def test_what_is_not_said_is_chosen_told_and_kept(place, folders):
    """On the CPU; resumed, it ends with the bits of a run that was not interrupted."""
    run = ["--device", "cpu", "--no-tensorboard", "--sample-tokens", "0", "--eval-sequences", "4", "--max-steps", "2"]
    run += ["--checkpoint-every", "1"]
    output = place.vb(*words(place, folders("qwen3"), *run, "--out", "run")).stdout
    fp32 = "fp32, in which a CPU is several times faster than in bf16"
    assert f"chosen: {fp32}; 64 tokens a sequence: the model's positions\n" in output
    assert "2 steps of 512 tokens" in output and "float32 on cpu" in output
    settings = json.loads((place.folder / "run/settings.json").read_text())
    wanted = {"precision": "fp32", "seq_length": 64, "batch_size": 8, "vgpu_auto": False, "auto_batch_size": False}
    assert {name: settings[name] for name in wanted} == wanted
    whole = {path.name: path.read_bytes() for path in (place.folder / "run/final").glob("*.safetensors")}
    shutil.rmtree(place.folder / "run/final")
    shutil.rmtree(place.folder / "run/checkpoints/step-00000002")
    again = place.vb("train", "--resume", "--out", "run").stdout
    assert "after step 1" in again and "chosen:" not in again
    assert {path.name: path.read_bytes() for path in (place.folder / "run/final").glob("*.safetensors")} == whole

    nothing = [*run, "--no-vgpu-auto", "--out", "nothing"]
    refused(place, words(place, folders("qwen3"), *nothing), "--seq-length 256 is beyond the 64 positions")
    output = place.vb(*words(place, folders("qwen3"), *nothing, "--seq-length", "32")).stdout
    assert "chosen:" not in output and "float32 on cpu" in output and "2 steps of 256 tokens" in output


def test_attention_that_cannot_be_had_is_refused_of_a_plan_too(place, folders):
    sliding = words(place, folders("mistral"), *RUN, "--use-flash-attn")
    for each in ([], ["--plan"]):
        said = "--use-flash-attn: MistralForCausalLM: its sliding window of 8 is shorter than --seq-length 16"
        refused(place, [*sliding, *each], said)


def test_what_is_wrong_with_a_folder_is_named(place, folders):
    folder = place.folder / "model"
    shutil.copytree(folders("qwen3"), folder)
    train = words(place, folder, *RUN)
    config, tokenizer = folder / "config.json", folder / "tokenizer.json"
    good = config.read_text()

    def change(**values) -> None:
        config.write_text(json.dumps(json.loads(good) | values))

    config.write_text("{")
    refused(place, train, str(config), "not JSON")
    change(model_type="qwen33")
    refused(place, train, str(config), "'qwen33'")
    change(hidden_size="wide")
    refused(place, train, str(config), "hidden_size")
    change(num_hidden_layers=4, layer_types=None)
    refused(place, train, str(folder), "lacks model.layers.3.", "config.json")
    change(vocab_size=299)
    refused(place, train, "model.embed_tokens.weight (300, 32) in model-00001-of", "instead of (299, 32)")
    config.unlink()
    refused(place, train, str(config), "No such file")
    config.write_text(good)
    refused(place, [*train, "--seq-length", "65"], "--seq-length 65", "64 positions", str(config))

    shard = sorted(folder.glob("*.safetensors"))[1]
    whole = shard.read_bytes()
    os.truncate(shard, len(whole) - 3)
    refused(place, train, str(shard), "not fully covered")
    shard.unlink()
    refused(place, train, shard.name, "index.json")
    shard.write_bytes(whole)

    text = tokenizer.read_text()
    tokenizer.write_text("{}")
    refused(place, train, str(tokenizer), "not one that")
    larger = json.loads(text)
    larger["model"]["vocab"]["wider"] = 300
    tokenizer.write_text(json.dumps(larger))
    refused(place, train, f"{tokenizer} has 301 tokens", f"{config} a vocab_size of 300", "--tokenizer")
    tokenizer.unlink()
    refused(place, train, str(folder), "no tokenizer.json", "--tokenizer")


def test_a_wrong_llama_config_is_named(place, finished):
    _, run, _ = finished
    folder = place.folder / "model"
    shutil.copytree(run / "final", folder)
    (folder / "manifest.json").unlink()  # as of others
    config = folder / "config.json"
    good = json.loads(config.read_text())
    for values, part in (
        ({"hidden_size": "wide"}, "config.json"),
        ({"num_attention_heads": 3}, "num_heads 3"),
        ({"hidden_size": None}, "config.json"),
    ):
        config.write_text(json.dumps(good | values))
        refused(place, words(place, folder, *RUN), str(config), part)
    config.write_text(json.dumps(good | {"intermediate_size": 65}))
    refused(place, words(place, folder, *RUN), "mlp", "instead of (65, 32)", "model.safetensors")
