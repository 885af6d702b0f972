"""Sampling, text from models of both kinds, and finding the model that a path means."""

import os

import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st
from transformers import (
    GPT2Config,
    GPT2LMHeadModel,
    LlamaConfig,
    LlamaForCausalLM,
    T5Config,
    T5ForConditionalGeneration,
)

from tests.unit.test_decoder_equality import config, save
from vblackwell.artifacts.commit import CommitFolder
from vblackwell.artifacts.folder import read_tokenizer
from vblackwell.errors import ConfigurationError, CorruptData, Unsupported
from vblackwell.infer.command import generate_command
from vblackwell.infer.generate import generate
from vblackwell.infer.load import load_model, resolve_model
from vblackwell.infer.sampling import Sampling, probabilities, sample
from vblackwell.nn.decoder import Decoder
from vblackwell.train.documents import Source
from vblackwell.train.tokenizer import train_tokenizer


@pytest.fixture(scope="module")
def tokenizer(tmp_path_factory):
    path = tmp_path_factory.mktemp("text") / "t.txt"
    path.write_text("def f(x):\n    return x + 1\n\nclass Größe:\n    pass\n" * 30)
    return train_tokenizer(Source(path.parent, (path,), "text"), 300)


@pytest.fixture(scope="module")
def model(tokenizer):
    made = Decoder(config(vocab_size=tokenizer.get_vocab_size()), seed=3)
    with torch.no_grad():
        for parameter in made.parameters():
            parameter.mul_(6.0)  # so that logits differ enough for temperature to matter
    return made


def greedy_without_cache(model, tokenizer, prompt, count):
    numbers = tokenizer.encode(prompt).ids
    start = len(numbers)
    with torch.no_grad():
        for _ in range(count):
            numbers.append(int(model(torch.tensor([numbers]))[0, -1].argmax()))
    return tokenizer.decode(numbers)[len(tokenizer.decode(numbers[:start])) :]


def test_greedy_is_the_argmax_of_the_whole_sequence(model, tokenizer):
    text = generate(model, tokenizer, "def f", 30, temperature=0)
    assert text and text == greedy_without_cache(model, tokenizer, "def f", 30)


def test_seed_decides(model, tokenizer):
    texts = [generate(model, tokenizer, "class", 20, temperature=1.5, seed=seed) for seed in (1, 1, 2)]
    assert texts[0] == texts[1] != texts[2]


def test_the_callers_state_is_left_alone(model, tokenizer):
    model.train()
    rng = torch.get_rng_state()
    generate(model, tokenizer, "x", 3)
    assert model.training and torch.equal(rng, torch.get_rng_state())
    model(torch.tensor([[1, 2]]), torch.tensor([[2, 3]])).backward()  # nothing was made under inference mode
    model.zero_grad()


def test_tokens_arrive_as_whole_characters(model, tokenizer):
    seen = []
    text = generate(model, tokenizer, "日本", 40, temperature=2.0, seed=5, on_token=seen.append)
    assert (
        "".join(seen) == text and len(seen) > 10 and "\ufffd" in text
    )  # random bytes: broken ones are shown at the end


def test_a_document_begins_and_ends(tokenizer):
    made = Decoder(config(vocab_size=tokenizer.get_vocab_size(), eos_token_id=0), seed=3)
    with torch.no_grad():
        made.lm_head.weight.zero_()  # all tokens alike: argmax takes number 0, the end
    assert generate(made, tokenizer, "", 5, temperature=0) == ""
    endless = Decoder(config(vocab_size=tokenizer.get_vocab_size()), seed=3)
    with pytest.raises(ConfigurationError, match="empty prompt"):
        generate(endless, tokenizer, "", 5)


def test_limits_are_refused_with_numbers(model, tokenizer):
    prompt = "def " * 40
    length = len(tokenizer.encode(prompt).ids)
    assert length > 64
    with pytest.raises(ConfigurationError, match=f"prompt has {length} tokens, the model's limit is 64"):
        generate(model, tokenizer, prompt, 1)
    with pytest.raises(ConfigurationError, match="at most 63"):
        generate(model, tokenizer, "x", 64)
    with pytest.raises(ConfigurationError, match="at least 1"):
        generate(model, tokenizer, "x", 0)
    assert generate(model, tokenizer, "x", None, temperature=0) == generate(model, tokenizer, "x", 63, temperature=0)


@pytest.mark.parametrize("kind", ["llama", "gpt2"])
def test_models_of_transformers_write_too(model, tokenizer, kind):
    torch.manual_seed(0)
    size = tokenizer.get_vocab_size()
    if kind == "llama":
        theirs = LlamaForCausalLM(LlamaConfig(**model.config.to_hf()))
        theirs.load_state_dict(model.state_dict())
        expected = generate(model, tokenizer, "def f", 20, temperature=0)
    else:
        ends = {"bos_token_id": None, "eos_token_id": None}
        theirs = GPT2LMHeadModel(
            GPT2Config(vocab_size=size, n_embd=32, n_layer=2, n_head=2, n_positions=48, **ends)
        ).eval()
        expected = greedy_without_cache(lambda ids: theirs(ids).logits, tokenizer, "def f", 20)
    assert generate(theirs, tokenizer, "def f", 20, temperature=0) == expected


def test_encoder_decoders_are_refused(tokenizer):
    t5 = T5ForConditionalGeneration(T5Config(vocab_size=300, d_model=16, d_ff=16, num_layers=1, num_heads=2, d_kv=8))
    with pytest.raises(Unsupported, match="encoder-decoder"):
        generate(t5, tokenizer, "x", 2)


def test_a_saved_folder_writes_the_same(model, tokenizer, tmp_path):
    folder = save(model, tmp_path, tokenizer=tokenizer)
    opened = load_model(folder)
    assert isinstance(opened, Decoder)
    assert generate(opened, read_tokenizer(folder), "def", 20, seed=4) == generate(model, tokenizer, "def", 20, seed=4)


def test_a_gpt2_folder_opens(tmp_path):
    shape = GPT2Config(vocab_size=300, n_embd=32, n_layer=2, n_head=2, n_positions=48, bos_token_id=1, eos_token_id=1)
    GPT2LMHeadModel(shape).save_pretrained(tmp_path)
    assert type(load_model(tmp_path)) is GPT2LMHeadModel
    with pytest.raises(ConfigurationError, match="tokenizer"):
        read_tokenizer(tmp_path)


@given(
    logits=st.lists(st.integers(-80, 80).map(lambda step: step / 4), min_size=1, max_size=30),
    temperature=st.floats(0.05, 5),
    top_k=st.integers(0, 35),
    top_p=st.floats(0.01, 1),
)
def test_a_distribution_keeps_the_likeliest(logits, temperature, top_k, top_p):
    row = torch.tensor(logits)
    chances = probabilities(row, Sampling(temperature, top_k, top_p))
    assert chances.sum().item() == pytest.approx(1, abs=1e-5) and chances[row == row.max()].max() > 0
    kept, gone = row[chances > 0], row[(chances == 0) & (row > row.max() - 50 * temperature)]
    assert not len(gone) or kept.min() >= gone.max()
    if 0 < top_k < len(row) and len(set(logits)) == len(logits):
        assert len(kept) <= top_k
    full = (row / temperature).softmax(-1)
    if top_p < 1 and top_k == 0:
        assert full[chances > 0].sum() >= top_p - 1e-5  # enough is kept
        least = full[chances > 0].min()
        assert full[chances > 0].sum() - least < top_p + 1e-5  # and nothing more than that


def test_draws_follow_the_distribution():
    row, generator = torch.tensor([0.1, 0.6, 0.3]).log(), torch.Generator().manual_seed(0)
    counts = torch.bincount(torch.tensor([sample(row, Sampling(1.0), generator) for _ in range(4000)]), minlength=3)
    assert torch.allclose(counts / 4000, row.exp(), atol=0.04)  # 5 sigma
    assert {sample(row, Sampling(1.0, top_k=1), generator) for _ in range(50)} == {1}
    assert {sample(row, Sampling(1.0, top_p=0.7), generator) for _ in range(200)} == {1, 2}
    assert sample(row, Sampling(0), generator) == 1


def test_values_out_of_range_are_refused():
    for bad in ({"temperature": -1}, {"temperature": float("nan")}, {"top_k": -1}, {"top_p": 0}, {"top_p": 1.1}):
        with pytest.raises(ConfigurationError, match=next(iter(bad))):
            Sampling(**bad)
    with pytest.raises(CorruptData, match="not finite"):
        sample(torch.tensor([1.0, float("nan")]), Sampling(0), torch.Generator())


@settings(max_examples=5, deadline=None)
@given(broken=st.sets(st.sampled_from(["step-1", "step-2", "final"])))
def test_newest_intact_folder_of_a_run(tmp_path_factory, broken):
    run = tmp_path_factory.mktemp("run")
    (run / "config.json").write_text('{"preset": "tiny"}')  # a run's own settings, no model's
    made = Decoder(config(), seed=1)
    order = [
        save(made, run / "checkpoints", "step-1"),
        save(made, run / "checkpoints", "step-2"),
        save(made, run, "final"),
    ]
    for age, folder in enumerate(order):
        os.utime(folder / "manifest.json", (age, age))
        if folder.name in broken:
            path = folder / "model.safetensors"
            data = bytearray(path.read_bytes())
            data[len(data) // 2] ^= 1
            path.write_bytes(data)
    intact = [folder for folder in order if folder.name not in broken]
    if not intact:
        with pytest.raises(CorruptData, match="every checkpoint"):
            resolve_model(run)
        return
    found = resolve_model(run)
    assert found.folder == intact[-1]
    assert len(found.problems) == len(order) - 1 - order.index(intact[-1])


def test_paths_that_hold_no_model_are_refused(tmp_path):
    with pytest.raises(ConfigurationError, match="no such folder"):
        resolve_model(tmp_path / "gone")
    with pytest.raises(ConfigurationError, match="neither"):
        resolve_model(tmp_path)
    folder = save(Decoder(config()), tmp_path)
    assert resolve_model(folder).folder == folder
    with CommitFolder(tmp_path, "step-9"):
        assert resolve_model(folder).folder == folder
    (folder / "model.safetensors").write_bytes(b"damaged")
    with pytest.raises(CorruptData, match="model.safetensors"):
        resolve_model(folder)


def test_the_command_prints_prompt_and_text(model, tokenizer, tmp_path, capsys):
    old = save(model, tmp_path / "checkpoints", "step-1", tokenizer=tokenizer)
    save(model, tmp_path / "checkpoints", "step-2", tokenizer=tokenizer)
    (tmp_path / "checkpoints" / "step-2" / "tokenizer.json").write_text("{}")
    assert generate_command(str(tmp_path), "def f", 20, seed=4) == 0
    said = capsys.readouterr()
    assert said.out == "def f" + generate(model, tokenizer, "def f", 20, top_k=50, seed=4) + "\n"
    assert "passed over" in said.err and "step-2/tokenizer.json" in said.err
    assert resolve_model(tmp_path).folder == old
    with pytest.raises(ConfigurationError):
        generate_command(str(tmp_path), "def " * 100)
    assert capsys.readouterr().out == ""
