"""What is wrong with a folder, a tokenizer or a prompt is named before `vb generate` writes:
resident and streamed alike.
"""

from __future__ import annotations

import json
import os
import shutil
from contextlib import ExitStack
from pathlib import Path

import peft
import pytest
import transformers
from huggingface_hub import constants

from tests.generate.test_streamed_generate import folder_of, tokenizer  # noqa: F401 (fixtures)
from vblackwell.cli import main
from vblackwell.errors import ConfigurationError
from vblackwell.planner.model_spec import find_model
from vblackwell.train.config import TrainConfig
from vblackwell.train.model import find_model as find_trainable

STREAMED = ["--fast-memory", "128KiB", "--host-memory", "4MiB"]


@pytest.fixture
def refused(capsys):
    """``refused(words, *parts)``: exit code 2, one line with the parts, and nothing was written."""

    def check(words: list[str], *parts: str) -> None:
        assert main(["generate", *words, "--max-new-tokens", "2", "--device", "cpu"]) == 2
        said = capsys.readouterr()
        errors = [line for line in said.err.splitlines() if line.startswith("vb: error: ")]
        assert len(errors) == 1 and not said.out
        for part in parts:
            assert part in errors[0], errors[0]

    return check


@pytest.fixture(params=["llama", "mixtral"])  # the first is also computed by our own decoder
def folder(request, folder_of, tmp_path) -> Path:  # noqa: F811
    return Path(shutil.copytree(folder_of(request.param), tmp_path / "model"))


def test_a_wrong_folder_never_writes(folder, refused):
    words = ["--model", str(folder), "--prompt", "ab"]
    config, weights = folder / "config.json", folder / "model.safetensors"
    good, whole = config.read_text(), weights.read_bytes()

    def change(**values) -> None:
        config.write_text(json.dumps(json.loads(good) | values))

    os.truncate(weights, len(whole) - 3)
    for levels in ([], STREAMED):
        refused([*words, *levels], str(weights), "not fully covered")
    weights.unlink()
    refused(words, str(folder), "safetensors")
    (folder / "pytorch_model.bin").write_bytes(b"")
    refused(words, str(folder), "pickled")
    weights.write_bytes(whole)
    config.write_text('{\n"model_type": "llama",\n}')
    refused(words, str(config), "not JSON", "line 3")
    change(hidden_size="wide")
    refused(words, str(config), "hidden_size", "wide")
    change(model_type="lama")
    refused(words, str(config), "'lama'")
    change(num_hidden_layers=5, layer_types=None)  # transformers alone would draw the fifth at random, and write
    refused(words, str(folder), "lacks model.layers.4.", "model.safetensors")
    change(vocab_size=260)
    refused(words, "lm_head.weight (259, 32) in model.safetensors", "instead of (260, 32)")
    config.write_text(good)
    for levels in ([], STREAMED):
        assert main(["generate", *words, *levels, "--max-new-tokens", "2", "--device", "cpu"]) == 0


def test_a_tokenizer_that_does_not_belong_is_named(folder, refused):
    words, file = ["--model", str(folder), "--prompt", "ab"], folder / "tokenizer.json"
    larger = json.loads(file.read_text())
    larger["model"]["vocab"]["wider"] = 259
    file.write_text(json.dumps(larger))
    refused([*words, *STREAMED], f"{file} has 260 tokens", f"{folder / 'config.json'} a vocab_size of 259")
    file.write_text("{}")
    refused(words, str(file), "not one that")
    file.unlink()
    refused(words, str(file), "there is no file")


def test_a_prompt_that_is_too_long_is_named_with_its_line(folder_of, tmp_path, refused):  # noqa: F811
    folder, file = folder_of("llama"), tmp_path / "prompts.txt"
    stated = f"the model's limit is 64 (max_position_embeddings in {folder / 'config.json'})"
    file.write_text("short\n\n" + "x" * 70 + "\nshort\n")
    words = ["--model", str(folder), "--batch-size", "1"]
    refused(
        [*words, *STREAMED, "--prompts", str(file)], f"{file}: line 3: the prompt has 70 tokens", stated, "at most 63"
    )
    refused([*words, "--prompt", "x" * 64], "--prompt: the prompt has 64 tokens", stated)
    refused([*words, "--prompt", "x" * 63], "with 2 new ones 65", stated, "ask for at most 1")


def test_a_prompt_ends_at_a_line_feed_alone(folder_of, tmp_path, capsys):  # noqa: F811
    """Unicode's other line ends are of the prompt, as what else it holds; empty lines are counted on standard error."""
    file, asked = tmp_path / "prompts.txt", ["one\u2028two\x85three\x0bfour\x0cfive", " six\r", "seven"]
    words = ["generate", "--model", str(folder_of("llama")), "--prompts", str(file), "--max-new-tokens", "1"]
    for text, said in (
        (f"{asked[0]}\n\n{asked[1]}\r\n \r\n{asked[2]}", f"vb: --prompts {file}: 2 of its lines are empty"),
        ("\r\n".join(asked) + "\r\n", ""),
    ):
        file.write_bytes(text.encode())
        assert main([*words, "--device", "cpu"]) == 0
        found = capsys.readouterr()
        assert [json.loads(line)["prompt"] for line in found.out.rstrip("\n").split("\n")] == asked
        assert found.err.startswith(said) and ("empty" in found.err) == bool(said)


@pytest.mark.filterwarnings("ignore:.is_gradient_checkpointing. is deprecated:FutureWarning")  # peft asks for it
def test_an_adapter_for_another_base_is_named(folder_of, tmp_path, refused):  # noqa: F811
    plain = transformers.AutoModelForCausalLM.from_pretrained(folder_of("llama"))
    adapted = peft.get_peft_model(plain, peft.LoraConfig(r=2, target_modules=["down_proj"]))
    adapted.save_pretrained(tmp_path / "adapter")
    other = Path(shutil.copytree(folder_of("llama"), tmp_path / "other"))
    config = transformers.AutoConfig.from_pretrained(other)
    config.intermediate_size = 64
    transformers.AutoModelForCausalLM.from_config(config).save_pretrained(other)
    words = ["--prompt", "ab", "--adapter", str(tmp_path / "adapter"), *STREAMED, "--model"]
    refused([*words, str(other)], f"{tmp_path / 'adapter'} holds an adapter for another base than {other}", "(2, 48)")
    refused([*words, str(folder_of("gpt2"))], "down_proj", "GPT2LMHeadModel has no such linear")
    config_file = tmp_path / "adapter/adapter_config.json"
    config_file.write_text('{"r": 2,\n')
    refused([*words, str(folder_of("llama"))], str(config_file), "not JSON", "line 2")


def test_a_run_s_folder_names_the_model_in_it(folder_of, tmp_path):  # noqa: F811
    shutil.copytree(folder_of("llama"), tmp_path / "final")
    assert find_model(str(tmp_path / "final"), {}, 16).vocab_size == 259
    for find in (
        lambda: find_model(str(tmp_path), {}, 16),
        lambda: find_trainable(TrainConfig(model=str(tmp_path)), ExitStack()),
    ):
        with pytest.raises(ConfigurationError, match=f"is the folder of a run, not of a model: give {tmp_path}/final"):
            find()


def test_an_adapter_s_folder_names_its_base(tmp_path):
    for settings, base in (
        ({"base_model_name_or_path": "owner/base"}, "its base, owner/base"),
        ({}, "the folder of its base"),
    ):
        (tmp_path / "adapter_config.json").write_text(json.dumps(settings))
        with pytest.raises(ConfigurationError, match=f"holds an adapter and no model: give {base}$"):
            find_model(str(tmp_path), {}, 16)


def test_hub_ids_come_from_the_cache_or_say_what_to_do(folder_of, tmp_path, monkeypatch, capsys, refused):  # noqa: F811
    """As without a network: what is in huggingface_hub's cache writes;
    what is not there, or in part, is refused with a remedy.
    """
    monkeypatch.setattr(constants, "HF_HUB_OFFLINE", True)
    monkeypatch.setattr(constants, "HF_HUB_CACHE", str(tmp_path))
    monkeypatch.chdir(tmp_path)
    commit = "0" * 40
    for name in ("whole", "cut"):
        cached = tmp_path / f"models--owner--{name}"
        (cached / "refs").mkdir(parents=True)
        (cached / "refs/main").write_text(commit)
        shutil.copytree(folder_of("qwen3"), cached / "snapshots" / commit)
    (cached / "snapshots" / commit / "model.safetensors").unlink()
    words = [
        "--model",
        "owner/whole",
        "--prompt",
        "ab",
        "--max-new-tokens",
        "2",
        "--device",
        "cpu",
        "--temperature",
        "0",
    ]
    assert main(["generate", *words]) == 0
    streamed, said = [*words, *STREAMED], capsys.readouterr().out
    assert main(["generate", *streamed]) == 0 and capsys.readouterr().out == said != ""
    assert main(["quantize", "--model", "owner/whole", "--out", str(tmp_path / "packed"), "--device", "cpu"]) == 0
    assert (tmp_path / "packed/config.json").is_file()
    assert find_model("owner/whole", {}, 16).vocab_size == find_model("owner/cut", {}, 16).vocab_size == 259
    capsys.readouterr()
    for name, reason in (("cut", "safetensors"), ("nothing", "not to be downloaded")):
        remedy = f"run `hf download owner/{name} --local-dir DIR`"
        refused(["--model", f"owner/{name}", "--prompt", "ab"], f"owner/{name}: no such folder", reason, remedy)
        assert main(["train", "--model", f"owner/{name}", "--out", str(tmp_path / "run")]) == 2
        assert remedy in capsys.readouterr().err and not (tmp_path / "run").exists()
        assert main(["bench", f"owner/{name}", "--device", "cpu"]) == 2
        assert remedy in capsys.readouterr().err
    assert main(["estimate", "owner/nothing"]) == 2
    assert "run `hf download owner/nothing --local-dir DIR`" in capsys.readouterr().err


@pytest.mark.parametrize("name", ["owner/two--dashes", "owner/model.git"])
def test_ids_that_no_hub_has_are_refused(name, tmp_path, monkeypatch, refused):
    monkeypatch.chdir(tmp_path)
    refused(["--model", name, "--prompt", "ab"], name, "not to be downloaded", "check the id")
