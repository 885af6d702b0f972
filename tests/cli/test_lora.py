"""`vb train --lora`: adapters over a frozen base, packed or not; resumed; opened by peft and transformers;
wrong bases refused.
"""

from __future__ import annotations

import json
import shutil
from typing import Any

import peft
import pytest
import torch
import transformers
from safetensors.torch import load_file

from tests.cli.test_bad_input import refused
from tests.cli.test_folders import RUN, folders, metrics, words  # noqa: F401 - a fixture
from vblackwell.kernels.fp4.encode import quantize
from vblackwell.train.runfolder import read_stored_config

# peft asks for it
pytestmark = pytest.mark.filterwarnings("ignore:.is_gradient_checkpointing. is deprecated:FutureWarning")
FAST = ["--learning-rate", "2e-2"]


def loss_of(model, ids: torch.Tensor) -> float:
    with torch.no_grad():
        return float(model.eval()(input_ids=ids, labels=ids).loss)


@pytest.mark.parametrize(
    ("kind", "fp4", "fp8"), [pytest.param("llama", True, False, marks=pytest.mark.slow), ("llama", True, True)]
)
def test_adapters_are_trained(kind, fp4, fp8, place, folders):  # noqa: F811
    """Streamed; checkpoints hold adapters alone; a resumed run ends with the same bytes; both folders open."""
    folder = folders(kind)
    levels = ["--placement", "streamed", "--fast-memory", "1MiB", "--host-memory", "1MiB", "--disk-memory", "16MiB"]
    lora = ["--lora", "4,alpha=16", *(["--use-fp4"] if fp4 else [])]
    lora += ["--fp8-activations", "--batch-size", "64"] if fp8 else []  # 1,024 rows
    steps = ["--max-steps", "2", "--checkpoint-every", "1"]
    output = place.vb(*words(place, folder, *RUN, *steps, *FAST, *levels, *lora)).stdout
    form = "mxfp4" if fp8 else "nvfp4"
    assert "--lora: rank 4, scale 4, around" in output and (f"packed to {form} in" in output) == fp4
    assert ("--fp8-activations: of the packed base, inputs of 897 rows" in output) == fp8
    run = place.folder / "run"
    assert read_stored_config(run)["fp8_activations"] == fp8
    lines = metrics(run)
    assert lines[-1]["val_loss"] < lines[0]["val_loss"]
    ids = torch.arange(30).view(2, 15) + 60
    merged = transformers.AutoModelForCausalLM.from_pretrained(run / "final")
    base = transformers.AutoModelForCausalLM.from_pretrained(folder, dtype=torch.float32)
    opened = peft.PeftModel.from_pretrained(base, run / "adapter")
    # Over a packed base the merged folder has the rounded weights; peft's adapter over the unrounded ones is near it.
    assert loss_of(opened, ids) == pytest.approx(loss_of(merged, ids), rel=0.05 if fp4 else 1e-4)
    assert json.loads((run / "adapter/adapter_config.json").read_text())["base_model_name_or_path"] == str(folder)
    checkpoint = run / "checkpoints/step-00000002"
    assert not list(checkpoint.glob("model*")) and set(load_file(checkpoint / "adapter_model.safetensors")) == set(
        load_file(run / "adapter/adapter_model.safetensors")
    )
    assert "sample:" in output and place.vb("generate", "--model", "run", "--prompt", "def ", "--max-new-tokens", "3")

    writes = [
        "generate",
        "--model",
        str(folder),
        "--adapter",
        "run/adapter",
        "--prompt",
        "def ",
        "--max-new-tokens",
        "3",
    ]
    same = [*(["--use-fp4"] if fp4 else []), *(["--fp8-activations"] if fp8 else [])]
    found = place.vb(*writes, *same)
    assert "warning" not in found.stderr
    how = "mxfp4 with --fp8-activations" if fp8 else "nvfp4"
    trained = place.vb(*writes)
    assert trained.stdout == found.stdout and f"over its base packed to {how}, as here" in trained.stderr
    (line,) = (line for line in place.vb(*writes, "--no-use-fp4").stderr.splitlines() if "warning" in line)
    assert line.startswith(
        f"vb: warning: run/adapter was trained over the base packed to {how}, which here is as it is"
    )

    whole = {path.name: path.read_bytes() for path in (run / "final").glob("*.safetensors")}
    for lost in (run / "final", run / "adapter", checkpoint):  # an adapter of the last step would be merged
        shutil.rmtree(lost)
    other = f"--{'no-' * fp8}fp8-activations"
    refused(place, ["train", "--out", "run", "--resume", other], f"--fp8-activations is {not fp8}, the run was started")
    assert "resumed from" in place.vb("train", "--out", "run", "--resume").stdout
    assert {path.name: path.read_bytes() for path in (run / "final").glob("*.safetensors")} == whole


@pytest.mark.parametrize("fp4", [pytest.param(False, marks=pytest.mark.slow), True])
def test_adapters_around_transposed_linears(fp4, place, folders):  # noqa: F811
    """GPT-2's Conv1D: peft opens the adapter, and what it merges is what is exported, over the base as it was packed;
    the same losses streamed."""
    folder, lora = folders("gpt2"), ["--lora", "4", "--merge", "fp32", *FAST, *(["--use-fp4"] if fp4 else [])]
    place.vb(*words(place, folder, *RUN, *lora))
    levels = ["--placement", "streamed", "--fast-memory", "1MiB", "--host-memory", "1MiB", "--disk-memory", "16MiB"]
    place.vb(*words(place, folder, *RUN, *lora, *levels, "--out", "streamed"))
    run = place.folder / "run"
    assert [line["loss"] for line in metrics(run)] == [line["loss"] for line in metrics(place.folder / "streamed")]
    base = transformers.AutoModelForCausalLM.from_pretrained(folder, dtype=torch.float32)
    before = {name: tensor.clone() for name, tensor in base.state_dict().items()}
    opened: Any = peft.PeftModel.from_pretrained(base, run / "adapter")
    assert opened.peft_config["default"].fan_in_fan_out
    merged = opened.merge_and_unload().state_dict()
    exported = transformers.AutoModelForCausalLM.from_pretrained(run / "final").state_dict()
    changed = [name for name, tensor in merged.items() if not torch.equal(tensor, before[name])]
    assert len(changed) == 4 * 3
    for name in changed:
        rounded = quantize(before[name].t().contiguous(), "nvfp4").dequantize().t() if fp4 else before[name]
        delta = merged[name] - before[name]
        torch.testing.assert_close(exported[name], rounded + delta, rtol=1e-5, atol=1e-6)


def test_what_does_not_belong_together_is_refused(place, folders):  # noqa: F811
    folder = place.folder / "base"
    shutil.copytree(folders("qwen3"), folder)
    train = words(place, folder, *RUN, "--lora", "4")
    refused(place, [*train[:-1], "4,targets=c_attn"], "targets=c_attn", "Qwen3ForCausalLM", "q_proj")
    refused(place, [*train, "--use-fp4", "--fp4-layers", "nothing"], "'nothing' selects no linear")
    refused(place, [*train, "--fp4-layers", "mlp"], "--fp4-layers", "--use-fp4")
    refused(place, [*train, "--fp8-activations"], "--fp8-activations", "add --lora and --use-fp4")
    refused(place, [*train, "--use-fp4", "--fp8-activations"], "a forward has 64 tokens", "--batch-size")
    place.vb(*train)
    shutil.rmtree(place.folder / "run/final")
    shutil.rmtree(place.folder / "run/checkpoints/step-00000004")
    (shard,) = sorted(folder.glob("*.safetensors"))[:1]
    data = bytearray(shard.read_bytes())
    data[-1] ^= 1
    shard.write_bytes(data)
    result = place.vb("train", "--out", "run", "--resume", code=2)
    assert "adapter for another base" in result.stderr and str(folder) in result.stderr
