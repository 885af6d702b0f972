"""Writing with models that are larger than level 0:
the text of the plain model, alone and in batches, in chunks, over FP4.
"""

from __future__ import annotations

import io
import json
import sys
from pathlib import Path

import pytest
import torch
import transformers
from safetensors.torch import load_file, save_file
from tokenizers import Tokenizer, decoders, models, pre_tokenizers

from tests.offload.conftest import make_stack  # noqa: F401 - a fixture
from tests.offload.test_lora import rounded_
from tests.offload.test_round_trip_models import CONFIGS
from vblackwell.cli import main
from vblackwell.errors import ConfigurationError, CorruptData, FolderMismatch, Unsupported
from vblackwell.folders.folder import load_state
from vblackwell.generate import load
from vblackwell.generate.generate import generate, generate_batch
from vblackwell.generate.load import cache_bytes, load_model, open_streamed
from vblackwell.generate.sampling import Sampling
from vblackwell.nn.convert.assignment import Assignment
from vblackwell.nn.linear.fused_fp4 import FusedFP4Linear
from vblackwell.nn.linear.stored_fp4 import StoredFP4Linear
from vblackwell.nn.linear.two_part import VBOptimizedLinear
from vblackwell.offload.api import offload_of
from vblackwell.tools.quantize import quantize_folder

PROMPTS = ["Once upon", "A", "There was a wolf who"]
GREEDY = Sampling(temperature=0)


@pytest.fixture(scope="module")
def tokenizer() -> Tokenizer:
    """Bytes, but the first three numbers, which the models end texts with."""
    letters = ["<0>", "<1>", "<2>", *sorted(pre_tokenizers.ByteLevel.alphabet())]
    made = Tokenizer(models.BPE({letter: number for number, letter in enumerate(letters)}, []))
    made.pre_tokenizer = pre_tokenizers.ByteLevel(add_prefix_space=False)
    made.decoder = decoders.ByteLevel()
    return made


def saved_model(folder, kind, **changes):
    """A small random model with spread logits in ``folder``."""
    torch.manual_seed(0)
    config = CONFIGS[kind]()
    for name, value in changes.items():
        setattr(config, name, value)
    config.initializer_range = 0.3
    transformers.AutoModelForCausalLM.from_config(config).save_pretrained(folder)


@pytest.fixture(scope="module")
def folder_of(tokenizer, tmp_path_factory):
    """``folder_of(kind)``: a small random model with spread logits, and the tokenizer."""
    parent = tmp_path_factory.mktemp("models")

    def make(kind: str):
        folder = parent / kind
        if not folder.exists():
            saved_model(folder, kind, vocab_size=259)
            transformers.PreTrainedTokenizerFast(tokenizer_object=tokenizer).save_pretrained(folder)
        return folder

    return make


def plain_text(model, tokenizer: Tokenizer, prompt: str, count: int) -> str:
    ids = tokenizer.encode(prompt).ids
    with torch.no_grad():
        written = model.generate(torch.tensor([ids]), max_new_tokens=count, do_sample=False, pad_token_id=0)[0].tolist()
    new = [number for number in written[len(ids) :] if number not in (0, 2)]
    return tokenizer.decode(ids + new)[len(tokenizer.decode(ids)) :]


@pytest.mark.parametrize("kind", ["mixtral", "opt"])
def test_the_text_is_that_of_the_plain_model(kind, folder_of, tokenizer, make_stack):  # noqa: F811
    folder = folder_of(kind)
    plain = transformers.AutoModelForCausalLM.from_pretrained(folder).eval()
    expected = [plain_text(plain, tokenizer, prompt, 5) for prompt in PROMPTS]
    size = sum(4 * parameter.numel() for parameter in plain.parameters())
    stack = make_stack(size // 2)
    model = open_streamed(folder, stack)
    assert [generate(model, tokenizer, prompt, 5, temperature=0) for prompt in PROMPTS] == expected
    assert generate(model, tokenizer, PROMPTS[2], 5, temperature=0, prefill_chunk=3) == expected[2]
    assert generate_batch(model, tokenizer, PROMPTS, 5, GREEDY) == expected
    assert generate_batch(model, tokenizer, PROMPTS, 5, GREEDY, prefill_chunk=7) == expected
    levels = stack.get_stats()["levels"]
    assert levels[0]["peak_bytes"] <= size // 2 and levels[1]["used_bytes"] >= size
    assert not any(parameter.requires_grad for parameter in model.parameters())


def test_over_fp4(folder_of, tokenizer, make_stack):  # noqa: F811
    folder = folder_of("qwen3")
    rounded = transformers.AutoModelForCausalLM.from_pretrained(folder).eval()
    rounded_(rounded)
    model = open_streamed(folder, make_stack(96 << 10), fp4="nvfp4")
    expected = [plain_text(rounded, tokenizer, prompt, 8) for prompt in PROMPTS]
    assert generate_batch(model, tokenizer, PROMPTS, 8, GREEDY) == expected


def test_draws_are_those_of_the_seed(folder_of, tokenizer, make_stack):  # noqa: F811
    model, hot = open_streamed(folder_of("qwen3"), make_stack(96 << 10)), Sampling(temperature=0.9, top_k=40)
    once = generate_batch(model, tokenizer, PROMPTS, 6, hot, seed=4)
    assert (
        once
        == generate_batch(model, tokenizer, PROMPTS, 6, hot, seed=4)
        != generate_batch(model, tokenizer, PROMPTS, 6, hot, seed=5)
    )
    alone = [generate(model, tokenizer, prompt, 6, temperature=0.9, top_k=40, seed=4) for prompt in PROMPTS]
    assert once == alone, "a row is not written as it is alone"
    assert generate_batch(model, tokenizer, [], 6, hot) == []
    with pytest.raises(ConfigurationError, match="60 tokens, (with .*, )?the model's limit is 64"):
        generate_batch(model, tokenizer, ["x" * 60, "y"], 8, hot)


def test_the_command(folder_of, tmp_path, capsys, monkeypatch):
    folder, file = folder_of("qwen3"), tmp_path / "prompts.txt"
    file.write_text("\ufeff" + "\n".join(PROMPTS) + "\n\n")  # some editors begin a file so
    levels = ["--fast-memory", "128KiB", "--host-memory", "1MiB", "--device", "cpu"]
    common = ["generate", "--model", str(folder), "--temperature", "0", "--max-new-tokens", "5"]
    assert main([*common, *levels, "--prompts", str(file), "--batch-size", "2", "--prefill-chunk", "4"]) == 0
    lines = [json.loads(line) for line in capsys.readouterr().out.splitlines()]
    assert [line["prompt"] for line in lines] == PROMPTS
    assert main([*common, *levels, "--prompt", PROMPTS[0]]) == 0
    assert capsys.readouterr().out.rstrip("\n") == (PROMPTS[0] + lines[0]["text"]).rstrip("\n")
    assert main([*common, "--device", "cpu", "--prompt", PROMPTS[0], "--use-fp4", "--keep", "layers.0"]) == 0
    capsys.readouterr()
    monkeypatch.setattr("vblackwell.folders.hub.check_reachable", lambda model: None)
    monkeypatch.setattr(load, "find_folder", lambda model: folder if model == "owner/name" else Path(model))
    assert main(["generate", "--model", "owner/name", "--device", "cpu", "--prompt", "a", "--max-new-tokens", "1"]) == 0
    capsys.readouterr()
    with monkeypatch.context() as patch:  # a terminal that knows no other letters
        patch.setattr("sys.stdout", io.TextIOWrapper(io.BytesIO(), encoding="ascii"))
        assert main([*common, *levels, "--prompt", "\u65e5"]) == 0
        assert sys.stdout.buffer.getvalue().startswith(b"\\u65e5")
    for words, part in (
        ([*levels], "--prompt TEXT or --prompts FILE"),
        ([*levels, "--prompt", "a", "--prompts", str(file)], "not both"),
        ([*levels, "--prompts", str(tmp_path / "gone")], "gone cannot be read"),
        ([*levels, "--prompt", "a", "--prefill-chunk", "0"], "prefill chunk 0"),
        ([*levels, "--prompt", "a", "--fp4-layers", "mlp"], "add it, or drop them"),
        ([*levels, "--prompt", "x" * 70], "the model's limit is 64"),
        ([*levels, "--prompt", "h\udce9"], "--prompt is not UTF-8 text (character 2)"),  # a byte of Latin-1
        (["--fast-memory", "8KiB", "--prompt", "a", "--device", "cpu"], "raise --fast-memory"),
    ):
        assert main([*common, *words]) == 2
        assert part in capsys.readouterr().err


def test_room_for_keys_and_values(folder_of, make_stack):  # noqa: F811
    config = json.loads((folder_of("qwen3") / "config.json").read_text())
    assert cache_bytes(config, rows=3, tokens=10, dtype=torch.float32) == 2 * 4 * 2 * 8 * 4 * 3 * 10
    folder = folder_of("gpt2")
    path = folder / "config.json"
    good = path.read_text()
    path.write_text(json.dumps(json.loads(good) | {"quantization_config": {"quant_method": "x"}}))
    with pytest.raises(Unsupported, match="quant_method 'x' is not read here"):
        open_streamed(folder, make_stack(1 << 20))
    path.write_text(good)


@pytest.mark.parametrize(
    ("kind", "form"),
    [
        pytest.param("qwen3", "nvfp4", marks=pytest.mark.slow),
        pytest.param("qwen2", "mxfp4", marks=pytest.mark.slow),
        pytest.param("opt", "nf4", marks=pytest.mark.slow),
        pytest.param("mixtral", "int4", marks=pytest.mark.slow),
        pytest.param("llama", "int8", marks=pytest.mark.slow),
        ("qwen3", "two parts"),
    ],
)
def test_a_packed_folder_streams_as_it_is(kind, form, folder_of, tokenizer, tmp_path, make_stack):  # noqa: F811
    source, folder = folder_of(kind), tmp_path / "packed"
    if form == "two parts":
        shapes = {f"model.layers.{layer}.mlp.{name}_proj": (48, 32) for layer in (1, 3) for name in ("up", "gate")}
        chosen = {name: "two-part" if "up" in name else "nvfp4" for name in shapes}
        quantize_folder(source, folder, assignment=Assignment(chosen, shapes))
    else:
        quantize_folder(source, folder, form)
    resident = load_model(folder)
    expected = [generate(resident, tokenizer, prompt, 8, temperature=0) for prompt in PROMPTS]
    rows = (
        None if kind == "llama" else generate_batch(resident, tokenizer, PROMPTS, 8, GREEDY)
    )  # a Decoder has no masks
    stack = make_stack(96 << 10)
    model = open_streamed(folder, stack)
    assert [generate(model, tokenizer, prompt, 8, temperature=0) for prompt in PROMPTS] == expected
    assert generate_batch(model, tokenizer, PROMPTS, 8, GREEDY) == (rows or expected)
    packed = sum(isinstance(module, StoredFP4Linear) for module in model.modules())
    assert packed == sum(isinstance(module, (FusedFP4Linear, VBOptimizedLinear)) for module in resident.modules()) > 0
    held = sum(tensor.nbytes for name, tensor in load_state(folder) if not name.endswith("_shape"))
    moved = sum(slot.param.numel() * slot.param.itemsize for slot in offload_of(model).slots())
    assert held <= moved <= held + 4 * packed, "packed bytes move, with a tensor scale where the files have none"
    assert stack.get_stats()["levels"][0]["peak_bytes"] <= 96 << 10


def test_a_damaged_packed_folder_does_not_stream(folder_of, tmp_path, make_stack):  # noqa: F811
    folder = tmp_path / "packed"
    quantize_folder(folder_of("llama"), folder)
    path, at = folder / "model.safetensors", "model.layers.0.mlp.up_proj"
    state = load_file(path)

    def open_with(changed, error, match):
        save_file(changed, path)
        with pytest.raises(error, match=match):
            open_streamed(folder, make_stack(1 << 20))

    def without(name):
        return {other: tensor for other, tensor in state.items() if other != name}

    open_with(without(f"{at}.weight_scale"), CorruptData, "up_proj lacks its entry 'weight_scale'")
    open_with(without("model.norm.weight"), FolderMismatch, r"lacks model\.norm\.weight")
    open_with(state | {"extra.weight": torch.zeros(1)}, FolderMismatch, "extra")
    open_with(state | {"extra.weight_packed": torch.zeros(1, 1)}, ConfigurationError, "no module 'extra'")
    short = state[f"{at}.weight_packed"][1:].contiguous()
    open_with(state | {f"{at}.weight_packed": short}, ConfigurationError, "packed weight .* another model")
    short = state[f"{at}.weight_scale"][:, :1].contiguous()
    open_with(state | {f"{at}.weight_scale": short}, CorruptData, "block_scales is")
