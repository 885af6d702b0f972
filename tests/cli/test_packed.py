"""A packed folder in every command: what it can be used for works over the packed bytes, the rest names what does; and
adapters, which are written, merged and used over the base that they were trained over.
"""

from __future__ import annotations

import json
import shutil
from pathlib import Path

import peft
import pytest
import torch
import transformers
from safetensors.torch import load_file
from tokenizers import Tokenizer, decoders, models, pre_tokenizers

from tests.generate.test_streamed_generate import PROMPTS, saved_model
from tests.offload.conftest import make_stack  # noqa: F401 - a fixture
from vblackwell.cli import main
from vblackwell.folders.folder import load_state
from vblackwell.generate.load import load_model
from vblackwell.nn.convert.lora import Lora
from vblackwell.nn.linear.stored_fp4 import StoredFP4Linear
from vblackwell.offload.api import offload_of
from vblackwell.tools.quantize import quantize_folder

# peft asks for it
pytestmark = pytest.mark.filterwarnings("ignore:.is_gradient_checkpointing. is deprecated:FutureWarning")
ADAPTER = ("--adapter", "run/adapter")
NOT_TRAINED = ("packed weights are not trained", "--lora 16", "or give the folder that it was packed from")


@pytest.fixture(scope="module")
def folders(tmp_path_factory):
    """``base``, a small Llama in bf16 with a tokenizer of bytes, and it packed to ``nvfp4``."""
    parent = tmp_path_factory.mktemp("folders")
    saved_model(parent / "base", "llama", vocab_size=259, max_position_embeddings=128, num_hidden_layers=2)
    made = transformers.AutoModelForCausalLM.from_pretrained(parent / "base", dtype=torch.bfloat16)
    made.save_pretrained(parent / "base")
    letters = ["<0>", "<1>", "<2>", *sorted(pre_tokenizers.ByteLevel.alphabet())]
    tokenizer = Tokenizer(models.BPE({letter: number for number, letter in enumerate(letters)}, []))
    tokenizer.pre_tokenizer = pre_tokenizers.ByteLevel(add_prefix_space=False)
    tokenizer.decoder = decoders.ByteLevel()
    transformers.PreTrainedTokenizerFast(tokenizer_object=tokenizer).save_pretrained(parent / "base")
    quantize_folder(parent / "base", parent / "nvfp4")
    quantize_folder(parent / "base", parent / "mxfp4", "mxfp4")
    (parent / "text.txt").write_text("def f(x):\n    return x\n" * 200)
    (parent / "prompts.txt").write_text("\n".join(PROMPTS))
    return parent


@pytest.fixture
def vb(folders, tmp_path, monkeypatch, capsys):
    """Runs ``vb`` in a folder with those of ``folders`` in it; what it printed, and with ``code`` its one line."""
    for path in folders.iterdir():
        (tmp_path / path.name).symlink_to(path)
    monkeypatch.chdir(tmp_path)

    def run(*words: str, code: int = 0) -> str:
        assert main(list(words)) == code
        said = capsys.readouterr()
        if code:
            assert said.err.count("vb: error: ") == 1
        run.err = said.err
        return said.err if code else said.out

    return run


def train(vb, model: str, out: str, *more: str, code: int = 0) -> str:
    words = ["train", "--model", model, "--data", "text.txt", "--out", out, "--max-steps", "2", "--seq-length", "32"]
    words += [
        "--batch-size",
        "2",
        "--sample-tokens",
        "0",
        "--device",
        "cpu",
        "--no-tensorboard",
        "--eval-sequences",
        "2",
    ]
    return vb(*words, "--checkpoint-every", "2", *more, code=code)


GREEDY = ("--temperature", "0", "--max-new-tokens", "4", "--device", "cpu")


def test_many_prompts_and_a_cap_write_what_one_prompt_does(vb):
    alone = [vb("generate", "--model", "nvfp4", "--prompt", prompt, *GREEDY) for prompt in PROMPTS]
    many = ("generate", "--model", "nvfp4", "--prompts", "prompts.txt", *GREEDY)
    rows = vb(*many)
    assert [row["prompt"] + row["text"] + "\n" for row in map(json.loads, rows.splitlines())] == alone
    assert vb(*many, "--batch-size", "1") == rows
    assert vb(*many, "--fast-memory", "40KiB", "--host-memory", "1MiB") == rows
    refused = vb("generate", "--model", "nvfp4", "--prompts", "none.txt", *GREEDY, code=2)
    assert "--prompts none.txt cannot be read (No such file or directory): give a text file" in refused
    assert vb(*many, "--use-fp4") == rows, "it is what is asked for"
    assert "mxfp4 already, and --use-fp4 (fp4=) asks for nvfp4: drop it" in vb(
        "generate", "--model", "mxfp4", "--prompt", "a", "--use-fp4", *GREEDY, code=2
    )


def test_adapters_over_the_bytes_of_the_folder(vb, folders):
    output = train(vb, "nvfp4", "run", "--lora", "4")
    assert "the base is frozen, packed to nvfp4 in" in output and "as the folder has them (left: lm_head" in output
    train(vb, "nvfp4", "same", "--lora", "4", "--use-fp4")
    train(vb, "nvfp4", "streamed", "--lora", "4", "--placement", "streamed", "--fast-memory", "256KiB")
    adapters = [load_file(f"{run}/adapter/adapter_model.safetensors") for run in ("run", "same", "streamed")]
    for other in adapters[1:]:
        assert adapters[0].keys() == other.keys()
        assert all(torch.equal(value, other[name]) for name, value in adapters[0].items())
    assert any(value.any() for name, value in adapters[0].items() if ".lora_B." in name), "they were trained"
    for words in (("--use-fp4", "--keep", "q_proj"), ("--use-fp4", "--fp4-layers", "mlp")):
        refused = train(vb, "nvfp4", "other", "--lora", "4", *words, code=2)
        assert "--fp4-layers and --keep choose what --use-fp4 packs: drop them" in refused
    assert "is packed to mxfp4 already" in train(vb, "mxfp4", "other", "--lora", "4", "--use-fp4", code=2)
    refused = train(vb, "nvfp4", "other", code=2)
    assert all(part in refused for part in NOT_TRAINED)


@pytest.mark.parametrize("form", ["nvfp4", "mxfp4"])
def test_the_packed_base_is_the_folders(form, folders, make_stack):  # noqa: F811
    """What moves are the folder's bytes, and the untrained adapters leave the packed model's numbers."""
    from vblackwell import load_causal_lm

    model = load_causal_lm(folders / form, make_stack(1 << 22), lora=Lora(4), dtype=torch.bfloat16).eval()
    ids = torch.arange(12)[None] + 40
    with torch.no_grad():
        assert torch.equal(model(ids, use_cache=False).logits, load_model(folders / form)(ids))
    held = dict(load_state(folders / form))
    codes = {name: value for name, value in held.items() if name.endswith("weight_packed")}
    stored = {name: each for name, each in model.named_modules() if isinstance(each, StoredFP4Linear)}
    assert len(stored) == len(codes) > 0
    for name, linear in stored.items():
        assert torch.equal(linear.weight_codes, codes[name.replace(".base_layer", "") + ".weight_packed"].flatten())
    trained = [name for name, param in model.named_parameters() if param.requires_grad]
    assert trained and all(".lora_" in name for name in trained)
    offload_of(model).close()


def test_what_is_merged(vb, folders):
    output = train(vb, "nvfp4", "packed", "--lora", "4")
    assert "model: not merged" in output and not (folders / "packed/final").exists()
    assert "has finished its 2 steps already" in vb("train", "--resume", "--out", "packed")
    refused = vb("generate", "--model", "packed", "--prompt", "a", code=2)
    assert "an adapter and no merged model" in refused and "--adapter packed/adapter" in refused
    over = vb("generate", "--adapter", "packed/adapter", "--prompt", "def ", *GREEDY)
    output = vb("train", "--resume", "--out", "packed", "--merge", "fp32")
    assert "nothing was trained" in output and "(the adapter merged, float32)" in output
    assert {value.dtype for value in load_file("packed/final/model.safetensors").values()} == {torch.float32}
    assert vb("generate", "--model", "packed", "--prompt", "def ", *GREEDY) == over

    assert "(the adapter merged, bfloat16)" in train(vb, "base", "plain", "--lora", "4")  # as the base is
    merged = load_file("plain/final/model.safetensors")
    assert {value.dtype for value in merged.values()} == {torch.bfloat16}
    assert json.loads(Path("plain/final/config.json").read_text())["dtype"] == "bfloat16"
    base = transformers.AutoModelForCausalLM.from_pretrained("base", dtype=torch.bfloat16)
    opened = peft.PeftModel.from_pretrained(base, "plain/adapter").merge_and_unload().state_dict()
    for name, value in merged.items():
        assert (opened[name].float() - value.float()).norm() <= 2**-8 * value.float().norm()
    for kind in ("float16", "float32"):
        shutil.copytree("base", kind)
        base.to(getattr(torch, kind)).save_pretrained(kind)
        assert f"(the adapter merged, {kind})" in train(vb, kind, f"of-{kind}", "--lora", "4")
    train(vb, "base", "alone", "--lora", "4", "--merge", "none")
    assert not (folders / "alone/final").exists()
    assert "--merge is of adapters" in train(vb, "base", "other", "--merge", "bf16", code=2)


def test_a_finished_adapter_is_merged_and_not_trained_again(vb):
    """In the type that is asked for, each time; with what was written when the run ended, and from the adapter alone.
    A later ``--resume`` without a word keeps the type."""

    def held(*names: str) -> list[bytes]:
        return [path.read_bytes() for name in names for path in sorted(Path(name).rglob("*")) if path.is_file()]

    def dtype() -> torch.dtype:
        (kind,) = {value.dtype for value in load_file("run/final/model.safetensors").values()}
        return kind

    again, done = ("train", "--resume", "--out", "run"), "run has finished its 2 steps already"
    train(vb, "base", "whole", "--lora", "4", "--learning-rate", "0.1")
    streamed = ("--placement", "streamed", "--fast-memory", "256KiB")
    output = train(vb, "base", "run", "--lora", "4", "--learning-rate", "0.1", "--merge", "none", *streamed)
    assert "to merge it: vb train --resume --out run --merge bf16" in output
    shutil.rmtree("run/checkpoints")  # nor is it trained from the start
    before = held("run/adapter", "run/metrics.jsonl", "run/report.json")
    for name, kind in (("fp32", torch.float32), ("bf16", torch.bfloat16)):
        output = vb(*again, "--merge", name)
        assert f"{done}: nothing was trained" in output and dtype() == kind
        assert f"model: run/final (the adapter merged, {str(kind).removeprefix('torch.')})" in output
        assert f"{done}: nothing to do" in vb(*again) and dtype() == kind
    assert held("run/final/model.safetensors") == held("whole/final/model.safetensors")
    assert held("run/adapter", "run/metrics.jsonl", "run/report.json") == before

    file = Path("run/adapter/adapter_model.safetensors")
    file.write_bytes(file.read_bytes()[:-1])
    output = vb(*again, "--merge", "fp32")
    assert "passed over a damaged adapter" in output and "no checkpoint yet: starting over" in output
    assert held("run/adapter/adapter_model.safetensors") == held("whole/adapter/adapter_model.safetensors")


def test_a_merged_model_that_is_older_than_its_adapter_is_not_taken_for_it(vb):
    train(vb, "base", "run", "--lora", "4", "--checkpoint-every", "1")
    output = vb("train", "--resume", "--out", "run", "--max-steps", "3", "--merge", "none")
    assert "run/final is what an earlier --merge made, of step 2" in output
    refused = vb("generate", "--model", "run", "--prompt", "def ", *GREEDY, code=2)
    assert "run/final is of step 2, and the adapter beside it of step 3: name the one that you mean" in refused
    older = vb("generate", "--model", "run/final", "--prompt", "def ", *GREEDY)
    told = Path("run/adapter/trainer.json").rename("told")  # an adapter that does not say its step, as peft's
    assert vb("generate", "--model", "run", "--prompt", "def ", *GREEDY) == older
    told.rename("run/adapter/trainer.json")
    assert "nothing to do" in vb("train", "--resume", "--out", "run")  # neither its end nor its --merge is the old one
    vb("train", "--resume", "--out", "run", "--merge", "bf16")
    merged, over = (vb("generate", *what, "--prompt", "def ", *GREEDY) for what in (("--model", "run"), ADAPTER))
    assert merged == over


def test_a_finished_run_without_checkpoints_is_not_begun_anew(vb):
    train(vb, "base", "run", "--lora", "4", "--checkpoint-every", "0")
    before = {path: path.read_bytes() for path in Path("run").rglob("*") if path.is_file()}
    refused = vb("train", "--resume", "--out", "run", "--max-steps", "3", code=2)
    assert "run has finished its 2 steps, and kept no checkpoint to go on from: train what it made" in refused
    assert {path: path.read_bytes() for path in Path("run").rglob("*") if path.is_file()} == before
    Path("run/settings.json").unlink()  # nor are settings of a run that does not go on written
    more = ("--lora", "4", "--checkpoint-every", "0", "--resume", "--max-steps", "3")
    assert "kept no checkpoint" in train(vb, "base", "run", *more, code=2)
    assert not Path("run/settings.json").exists()
    assert "--out base is the folder of --model: choose another" in train(vb, "base", "base", code=2)


def test_an_adapter_writes_over_the_base_it_was_trained_over(vb):
    train(vb, "base", "run", "--lora", "4", "--use-fp4", "--keep", "q_proj", "--learning-rate", "0.1")
    words = ("generate", "--adapter", "run/adapter", "--prompt", "def ", *GREEDY)
    packed = vb(*words, "--model", "base", "--use-fp4", "--keep", "q_proj")
    assert "vb:" not in vb.err
    assert vb(*words) == packed == vb(*words, "--model", "base")
    assert "over its base packed to nvfp4 with --keep q_proj, as here" in vb.err
    with pytest.warns(UserWarning, match="base packed to nvfp4 with --keep q_proj, which here is as it is"):
        vb(*words, "--no-use-fp4")
    train(vb, "nvfp4", "over", "--lora", "4")
    vb("generate", "--adapter", "over/adapter", "--prompt", "a", *GREEDY)
    assert "vb:" not in vb.err
    refused = vb("generate", "--adapter", "over/adapter", "--model", "base", "--prompt", "a", *GREEDY, code=2)
    assert "adapter for another base than base" in refused and "give the model that it was trained over" in refused
    shutil.copytree("run/adapter", "moved")
    config = json.loads(Path("moved/adapter_config.json").read_text())
    for named, said in (("/nowhere", "names the base /nowhere, which is not there"), (None, "names no base")):
        Path("moved/adapter_config.json").write_text(json.dumps(config | {"base_model_name_or_path": named}))
        assert f"{said}: give the folder" in vb("generate", "--adapter", "moved", "--prompt", "a", code=2)
    for words in (("--adapter", "nowhere"), ("--adapter", "nowhere", "--model", "base", "--use-fp4")):
        refused = vb("generate", *words, "--prompt", "a", *GREEDY, code=2)
        assert "nowhere: no such folder; give the folder of an adapter" in refused
    assert "base holds no adapter_config.json; give the" in vb("generate", "--adapter", "base", "--prompt", "a", code=2)
    assert "needs --model, or an --adapter" in vb("generate", "--prompt", "a", code=2)


def test_an_estimate_is_of_what_it_can_do(vb, folders):
    size = sum(value.nbytes for name, value in load_state(folders / "nvfp4"))
    found = json.loads(vb("estimate", "nvfp4", "--json"))
    assert found["packed"]["format"] == "nvfp4" and found["packed"]["bytes"] == size
    assert set(found["ways"]) == {"run", "adapters"} and set(found["commands"]) == {"run", "adapters"}
    assert all("--use-fp4" not in command for command in found["commands"].values())
    # No tiles, to which a miniature is padded on a GPU; a page a group is rounded to.
    assert size <= found["ways"]["run"]["host"] < 2 * size
    table = vb("estimate", "nvfp4/config.json", "--gpu", "RTX 3090")
    assert "linears in nvfp4)" in table and "run, as it is packed" in table and "all weights" not in table
    assert "tokens/s" in vb("estimate", "nvfp4", "--gpu", "RTX 3090", "--lora", "4", "--seq-length", "64")
    assert ", 128 tokens a sequence" in vb("estimate", "nvfp4", "--lora", "4")
    assert "nvfp4 learnt 128 positions (max_position_embeddings): --seq-length is 128 by default" in vb.err
    for model, words in (
        ("nvfp4", ["--batch-size", "2"]),
        ("nvfp4/config.json", ["--gpu-memory", "8GiB"]),
        ("nvfp4", ["--learning-rate", "1e-3"]),
    ):
        refused = vb("estimate", model, *words, code=2)
        assert all(part in refused for part in NOT_TRAINED)
        assert ("or with --gpu, --ram and --disk alone" in refused) == (words[0] != "--learning-rate")


def test_the_python_calls(folders, tmp_path, make_stack):  # noqa: F811
    """Compared, saved unpacked, and what is refused."""
    import vblackwell as vb

    ids = torch.arange(12)[None] + 40
    packed = load_model(folders / "nvfp4")
    apart = vb.compare(load_model(folders / "base"), packed, ids, per_layer=True, repeats=0)
    assert 0 < apart.sqnr_db < 40 and "lm_head" in apart.layers
    model = vb.load_causal_lm(folders / "nvfp4", make_stack(1 << 22), trainable=False, fp4="nvfp4")
    vb.save_causal_lm(model, tmp_path / "plain", tokenizer=folders / "nvfp4", dtype=torch.bfloat16)
    offload_of(model).close()
    with torch.no_grad():
        plain = load_model(tmp_path / "plain")(ids)
        assert vb.compare(packed, load_model(tmp_path / "plain"), ids, repeats=0).sqnr_db > 30, (
            "blocks are exact in bf16"
        )
        assert plain.dtype == torch.bfloat16
    with pytest.raises(vb.Unsupported, match="packed weights are not trained: add --lora 16"):
        vb.load_causal_lm(folders / "nvfp4", make_stack(1 << 22))
    with pytest.raises(vb.ConfigurationError, match="packed to nvfp4 already, and --use-fp4"):
        vb.load_causal_lm(folders / "nvfp4", make_stack(1 << 22), trainable=False, fp4="mxfp4")
