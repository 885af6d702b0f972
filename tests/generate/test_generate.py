"""Sampling, text from models of both kinds, and finding the model that a path means."""

import copy
import json
import os
import re
import warnings

import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st
from transformers import (
    BertConfig,
    BertLMHeadModel,
    GPT2Config,
    GPT2LMHeadModel,
    LlamaConfig,
    LlamaForCausalLM,
    T5Config,
    T5ForConditionalGeneration,
)

from tests.nn.decoder.test_decoder_equality import config, save
from vblackwell.data.documents import TextFiles
from vblackwell.data.tokenizer import train_tokenizer
from vblackwell.errors import ConfigurationError, CorruptData, Unsupported
from vblackwell.folders.commit import CommitFolder
from vblackwell.folders.folder import read_tokenizer
from vblackwell.generate.command import Places, generate_command
from vblackwell.generate.generate import CONTEXT, Pace, draws, encode, generate
from vblackwell.generate.generate import _Text as Text
from vblackwell.generate.load import load_model, resolve_model
from vblackwell.generate.sampling import Arrival, Sampling, sample
from vblackwell.generate.steps import read_in_chunks
from vblackwell.kernels.pointwise.sampling_reference import kept_tokens
from vblackwell.nn.decoder.decoder import Decoder


@pytest.fixture(scope="module")
def tokenizer(tmp_path_factory):
    path = tmp_path_factory.mktemp("text") / "t.txt"
    path.write_text("def f(x):\n    return x + 1\n\nclass Größe:\n    pass\n" * 30)
    return train_tokenizer(TextFiles(path.parent, (path,), "text"), 300)


@pytest.fixture(scope="module")
def model(tokenizer):
    made = Decoder(config(vocab_size=tokenizer.get_vocab_size()), seed=3)
    with torch.no_grad():
        for parameter in made.parameters():
            parameter.mul_(6.0)  # so that logits differ enough for temperature to matter
    return made


@pytest.mark.parametrize("prompt", ["def f(x):", "class Größe:\n" * 300, "日本語 🚀", " \t\n "])
@pytest.mark.parametrize("special", [True, False])
def test_prompts_are_encoded_as_the_tokenizer_does_one_by_one(model, tokenizer, prompt, special):
    assert encode(model, tokenizer, prompt, special) == tokenizer.encode(prompt, add_special_tokens=special).ids


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
    model.train().layers[1].eval()  # a part may have another mode
    rng, modes = torch.get_rng_state(), [module.training for module in model.modules()]
    generate(model, tokenizer, "x", 3)
    assert model.training and torch.equal(rng, torch.get_rng_state())
    assert modes == [module.training for module in model.modules()]
    model(torch.tensor([[1, 2]]), torch.tensor([[2, 3]])).backward()  # nothing was made under inference mode
    model.zero_grad()


def test_tokens_arrive_as_whole_characters(model, tokenizer):
    seen = []
    text = generate(model, tokenizer, "日本", 40, temperature=2.0, seed=5, on_token=seen.append)
    assert (
        "".join(seen) == text and len(seen) > 10 and "\ufffd" in text
    )  # random bytes: broken ones are shown at the end


def test_telling_a_token_takes_no_longer_the_more_came_before(tokenizer):
    numbers, lengths, seen = tokenizer.encode("class Größe:\n    return x + 1\n" * 40).ids, [], []

    class Decoder:
        def decode(self, given: list[int]) -> str:
            lengths.append(len(given))
            return tokenizer.decode(given)

    text = Text(Decoder(), numbers[:200], seen.append)
    lengths.clear()
    for number in numbers[200:]:
        text.add(number)
    assert len(numbers) > 300 and max(lengths) <= 3 * CONTEXT
    whole = text.finish()
    assert "".join(seen) == whole == tokenizer.decode(numbers)[len(tokenizer.decode(numbers[:200])) :]


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
    with pytest.raises(ConfigurationError, match="prefill chunk -1: give at least 1"):
        generate(model, tokenizer, "x", 3, prefill_chunk=-1)
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


def test_other_than_decoders_are_refused(tokenizer):
    t5 = T5ForConditionalGeneration(T5Config(vocab_size=300, d_model=16, d_ff=16, num_layers=1, num_heads=2, d_kv=8))
    with pytest.raises(Unsupported, match="encoder-decoder"):
        generate(t5, tokenizer, "x", 2)
    bert = BertLMHeadModel(
        BertConfig(vocab_size=300, hidden_size=16, num_hidden_layers=1, num_attention_heads=2, intermediate_size=16)
    )
    with pytest.raises(Unsupported, match="BertLMHeadModel gives no past_key_values, as encoders do"):
        generate(bert, tokenizer, "x", 2)


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


def reads_nothing(vocabulary=50):
    """A step that counts the tokens it was given; the logits depend on the last of them."""
    table, given = torch.randn(vocabulary, vocabulary, generator=torch.Generator().manual_seed(0)), []

    def step(tokens_BS):
        given.append(tokens_BS.shape[1])
        return table[tokens_BS[:, -1]]

    return step, given


def test_reading_a_step_late_changes_no_token():
    sampling, prompt = Sampling(1.0, top_k=20, min_p=0.01), torch.tensor([[3, 4, 5]])
    written = []
    for ahead in (0, 1, 3, 20):
        step, given = reads_nothing()
        written.append(list(draws(step, prompt, 12, sampling, 9, ahead)))
        assert given == [3] + [1] * 11
    assert all(one == written[0] for one in written) and len(written[0]) == 12
    step, given = reads_nothing()
    tokens = draws(step, prompt, 12, sampling, 9, 1)
    assert next(tokens) == written[0][0] and len(given) == 1  # the first comes at once
    assert next(tokens) == written[0][1] and len(given) == 3  # one more was begun, no other


def test_a_request_draws_the_same_alone_and_among_others():
    logits = torch.randn(4, 300, generator=torch.Generator().manual_seed(1))
    seeds, positions, sampling = torch.tensor([5, 6, 7, 8]), torch.tensor([0, 3, 9, 1]), Sampling(1.3, top_p=0.9)
    together = sample(logits, sampling, seeds, positions)
    alone = [sample(logits[i : i + 1], sampling, int(seeds[i]), int(positions[i])) for i in range(4)]
    assert torch.equal(torch.cat(alone), together)
    assert torch.equal(sample(logits.double(), sampling, seeds, positions), together)


def test_logits_that_are_not_finite_are_named_and_never_embedded():
    def step(tokens_BS):
        assert tokens_BS.min() >= 0
        return torch.full((1, 5), 0.0 if tokens_BS.shape[1] > 1 else float("nan"))

    for ahead in (0, 1):
        with pytest.raises(CorruptData, match="not finite"):
            list(draws(step, torch.tensor([[1, 1]]), 4, Sampling(), 0, ahead))
    assert Arrival(torch.tensor([3, 4])).numbers() == [3, 4]


@given(
    logits=st.lists(st.integers(-80, 80).map(lambda step: step / 4), min_size=1, max_size=30),
    temperature=st.floats(0.05, 5),
    top_k=st.integers(0, 35),
    top_p=st.floats(0.01, 1),
)
def test_what_may_be_drawn_is_the_likeliest(logits, temperature, top_k, top_p):
    row = torch.tensor(logits)
    cuts = torch.tensor([top_k], dtype=torch.int32), torch.tensor([top_p]), torch.tensor([0.0])
    stays = kept_tokens((row / temperature)[None], *cuts)[0]
    assert stays[row == row.max()].all()
    kept, gone = row[stays], row[~stays]
    assert not len(gone) or kept.min() > gone.max()
    if 0 < top_k < len(row) and len(set(logits)) == len(logits):
        assert len(kept) <= top_k
    full = (row / temperature).softmax(-1)
    if top_p < 1 and top_k == 0:
        assert full[stays].sum() >= top_p - 1e-5  # enough is kept
        ties = full[stays].min() * (kept == kept.min()).sum()
        assert full[stays].sum() - ties < top_p + 1e-5  # and nothing more than that, but equals


def test_draws_follow_the_distribution():
    row = torch.tensor([0.1, 0.6, 0.3]).log()

    def drawn(sampling, count):
        return sample(row.expand(count, -1), sampling, 0, torch.arange(count))

    counts = torch.bincount(drawn(Sampling(1.0), 4000), minlength=3)
    assert torch.allclose(counts / 4000, row.exp(), atol=0.04)  # 5 sigma
    assert set(drawn(Sampling(1.0, top_k=1), 50).tolist()) == {1}
    assert set(drawn(Sampling(1.0, top_p=0.7), 200).tolist()) == {1, 2}
    assert set(drawn(Sampling(1.0, min_p=0.4), 200).tolist()) == {1, 2}
    assert drawn(Sampling(0), 2).tolist() == [1, 1]


def test_values_out_of_range_are_refused(model, tokenizer):
    cases = (
        {"temperature": -1},
        {"temperature": float("nan")},
        {"top_k": -1},
        {"top_p": 0},
        {"top_p": 1.1},
        {"min_p": 2},
    )
    for bad in cases:
        with pytest.raises(ConfigurationError, match=next(iter(bad))):
            Sampling(**bad)
    with pytest.raises(ConfigurationError, match="seed"):
        generate(model, tokenizer, "x", 1, seed=1 << 63)


@pytest.mark.gpu
def test_on_a_gpu_nothing_waits_and_the_text_is_the_same(model, tokenizer):
    expected = generate(model, tokenizer, "def f", 20, temperature=1.5, seed=4)
    moved = copy.deepcopy(model).cuda()
    assert generate(moved, tokenizer, "def f", 20, temperature=1.5, seed=4) == expected
    step, _ = reads_nothing()
    table = step(torch.arange(50)[:, None]).cuda()
    sampling, prompt = Sampling(1.0, top_k=20, top_p=0.9), torch.tensor([[3]], device="cuda")
    list(draws(lambda tokens_BS: table[tokens_BS[:, -1]], prompt, 3, sampling, 9, 1))  # kernels are compiled
    with warnings.catch_warnings(action="ignore"):  # it says that it does not see everything
        torch.cuda.set_sync_debug_mode("error")
    try:
        found = list(draws(lambda tokens_BS: table[tokens_BS[:, -1]], prompt, 12, sampling, 9, 1))
    finally:
        torch.cuda.set_sync_debug_mode("default")
    assert found == list(draws(reads_nothing()[0], prompt.cpu(), 12, sampling, 9, 0))


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
    found, problems = resolve_model(run)
    assert found == intact[-1]
    assert len(problems) == len(order) - 1 - order.index(intact[-1])


def test_paths_that_hold_no_model_are_refused(tmp_path):
    with pytest.raises(ConfigurationError, match="no such folder"):
        resolve_model(tmp_path / "gone")
    with pytest.raises(ConfigurationError, match="neither"):
        resolve_model(tmp_path)
    folder = save(Decoder(config()), tmp_path)
    assert resolve_model(folder)[0] == folder
    with CommitFolder(tmp_path, "step-9"):
        assert resolve_model(folder)[0] == folder
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
    assert resolve_model(tmp_path)[0] == old
    with pytest.raises(ConfigurationError):
        generate_command(str(tmp_path), "def " * 100)
    assert capsys.readouterr().out == ""


def test_the_command_talks_as_the_folder_says(model, tokenizer, tmp_path, capsys):
    """A message goes through the template, and the answer alone is printed;
    generation_config.json says what ends it.
    """
    folder = save(model, tmp_path, tokenizer=tokenizer)
    (folder / "chat_template.jinja").write_text(
        "{% for m in messages %}{{ m.content }}:{{ eos_token if m.role == 'assistant' }}{% endfor %}"
    )
    (folder / "manifest.json").unlink()  # what it names has changed
    (tmp_path / "lines.txt").write_text("def f\nclass\n")
    asked = {"top_k": 50, "seed": 4}
    expected = [generate(model, tokenizer, f"{text}:", 12, **asked) for text in ("def f", "class")]
    assert generate_command(str(folder), "def f", 12, chat=True, seed=4) == 0
    assert capsys.readouterr().out == expected[0] + "\n"
    assert generate_command(str(folder), prompts=str(tmp_path / "lines.txt"), max_new_tokens=12, chat=True, seed=4) == 0
    lines = [json.loads(line) for line in capsys.readouterr().out.splitlines()]
    assert [line["prompt"] for line in lines] == ["def f", "class"]
    ends = list(range(0, tokenizer.get_vocab_size(), 2))  # whatever was drawn, some of it is among them
    (folder / "generation_config.json").write_text(json.dumps({"eos_token_id": ends}))
    assert generate_command(str(folder), "def f", 12, chat=True, seed=4) == 0
    shorter = capsys.readouterr().out.removesuffix("\n")
    assert expected[0].startswith(shorter) and len(shorter) < len(expected[0])
    assert shorter == generate(model, tokenizer, "def f:", 12, ends=ends, **asked)


def test_the_pace_of_texts_is_counted():
    now = iter((0.0, 2.0, 2.5, 2.75, 3.0, 10.0, 10.5, 11.0))
    pace = Pace(lambda: next(now))  # made; opened after 2 s; a token after 0.5 s, two more in 0.5 s
    pace.begin()
    for _ in range(3):
        pace.tick()
    pace.begin()  # two rows at once; one of them ends
    pace.tick(2)
    pace.tick()
    assert (
        pace.line(3 << 20)
        == "opened in 2.0 s, 6 tokens, the first after 500 ms, then 3.0 a second, took at most 3.00 MiB of fast memory"
    )


def test_a_terminal_is_told_the_pace_and_a_pipe_is_not(model, tokenizer, tmp_path, capsys, monkeypatch):
    folder = save(model, tmp_path, tokenizer=tokenizer)
    assert generate_command(str(folder), "def f", 5, seed=4) == 0
    assert capsys.readouterr().err == ""
    monkeypatch.setattr("sys.stderr.isatty", lambda: True)
    assert generate_command(str(folder), "def f", 5, seed=4) == 0
    assert re.fullmatch(r"opened in .*, 5 tokens, the first after .*, then [0-9.]+ a second\n", capsys.readouterr().err)


@pytest.mark.parametrize(
    ("length", "size", "pieces"),
    [(512, 508, [256, 256]), (512, 127, [103, 103, 103, 103, 100]), (16, 16, [16]), (3, 9, [3]), (3, 1, [1, 1, 1])],
)
def test_a_prompt_is_read_in_pieces_of_about_one_length(length, size, pieces):
    spans = []

    def read(begin, end):
        spans.append((begin, end))
        return torch.tensor(float(end))

    assert float(read_in_chunks(read, length, size)) == length
    assert [end - begin for begin, end in spans] == pieces
    assert [begin for begin, _ in spans] == [0, *(end for _, end in spans[:-1])]


def test_the_folder_of_a_run_stands_for_its_adapter(tmp_path):
    run = tmp_path / "run"
    (run / "adapter").mkdir(parents=True)
    assert Places(adapter=str(run)).adapter == str(run), "which holds none yet: what reads it says so"
    (run / "adapter" / "adapter_config.json").write_text("{}")
    assert Places(adapter=str(run)).adapter == str(run / "adapter")
    assert Places(adapter=str(run / "adapter")).adapter == str(run / "adapter")
