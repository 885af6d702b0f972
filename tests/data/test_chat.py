"""Conversations: told apart, written down by templates, answers found, packed into rows;
and what is wrong with a line is named.
"""

from __future__ import annotations

import json
import resource
import signal
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path
from types import SimpleNamespace

import numpy as np
import pyarrow
import pytest
import torch
import transformers
from hypothesis import given, settings
from hypothesis import strategies as st
from pyarrow import parquet
from tokenizers import AddedToken, Tokenizer

from tests.offload.test_round_trip_models import CONFIGS
from vblackwell.data.chat import (
    COMPLETION,
    DEFAULT,
    LEARNT,
    TALKED,
    ChatDataset,
    Conversation,
    chat_kind,
    conversations,
    find_template,
    prepare_chat,
    write_down,
)
from vblackwell.data.corpus import pack_rows
from vblackwell.data.documents import TextFiles, find_text
from vblackwell.data.tokenizer import train_tokenizer
from vblackwell.errors import ConfigurationError
from vblackwell.folders import chat_prompt
from vblackwell.folders.chat_prompt import open_chat
from vblackwell.train.checkpoint import generation_settings
from vblackwell.train.prepare import why_no_positions, why_not_apart

CHATML = (
    "{% for m in messages %}{{ '<|im_start|>' + m['role'] + '\n' + m['content'] | trim + '<|im_end|>' + '\n' }}"
    "{% endfor %}"
    "{% if add_generation_prompt %}{{ '<|im_start|>assistant\n' }}{% endif %}"
)
# One that says itself what is written, and one that changes earlier turns, as models that think do.
SAYING = (
    "{% for m in messages %}{% if m.role == 'assistant' %}A: {% generation %}{{ m.content }}{{ eos_token }}"
    "{% endgeneration %}"
    "{% else %}U: {{ m.content }}\n{% endif %}{% endfor %}"
)
THINKING = (
    "{% for m in messages %}{{ '<|im_start|>' + m.role + '\n' }}{% if m.role == 'assistant' and loop.last %}"
    "{{ '<think>\n</think>\n' }}{% endif %}{{ m.content + '<|im_end|>\n' }}{% endfor %}"
)
SPACED = (
    "{% for m in messages %}{{ bos_token if loop.first }}{{ m.role }} {{ m.content.strip() }} {{ eos_token }}"
    "{% endfor %}"
)
TURNS = [
    {"role": "system", "content": "Be short."},
    {"role": "user", "content": "Two and two?"},
    {"role": "assistant", "content": "  Four.\n"},
    {"role": "user", "content": "And one?"},
    {"role": "assistant", "content": "Five, of course."},
]


@pytest.fixture(scope="module")
def tokenizer(tmp_path_factory) -> Tokenizer:
    folder = tmp_path_factory.mktemp("text")
    (folder / "text.txt").write_text("Two and two are four, and one more is five, of course. " * 40)
    made = train_tokenizer(TextFiles(folder, (folder / "text.txt",), "text"), 300)
    made.add_special_tokens([AddedToken(name, special=True) for name in ("<|im_start|>", "<|im_end|>")])
    return made


@pytest.fixture
def folder_of(tokenizer, tmp_path):
    """``folder_of(template)``: a tokenizer's folder."""

    def make(template: str | None) -> Path:
        folder = tmp_path / "tokenizer"
        fast = transformers.PreTrainedTokenizerFast(tokenizer_object=tokenizer, eos_token="<|endoftext|>")
        if template is not None:
            fast.chat_template = template
        fast.save_pretrained(folder)
        return folder

    return make


def written(path: Path, *records: object) -> TextFiles:
    path.write_text("".join(json.dumps(record) + "\n" for record in records))
    return find_text(path)


def quiet(text: str, share: float | None) -> None:
    """A report that nobody reads."""


def learnt_text(corpus, index: int, tokenizer: Tokenizer) -> list[str]:
    """Runs of learnt tokens of a conversation, as text."""
    start = int(corpus.lengths[:index].sum())
    numbers = np.asarray(corpus.tokens[start : start + corpus.lengths[index]])
    runs, run = [], []
    for number in [*numbers.tolist(), 0]:
        if number & LEARNT:
            run.append(int(number & ~LEARNT))
        elif run:
            runs.append(tokenizer.decode(run, skip_special_tokens=False))
            run = []
    return runs


@pytest.fixture(autouse=True)
def own_cache(monkeypatch, tmp_path):
    monkeypatch.setenv("XDG_CACHE_HOME", str(tmp_path / "cache"))


@pytest.mark.parametrize(
    ("template", "learnt"),
    [
        (CHATML, ["Four.<|im_end|>", "Five, of course.<|im_end|>"]),
        (SAYING, ["  Four.\n<|endoftext|>", "Five, of course.<|endoftext|>"]),
        (THINKING, ["Four.\n<|im_end|>", "Five, of course.<|im_end|>"]),
        (SPACED, ["Four. <|endoftext|>", " Five, of course. <|endoftext|>"]),
        (None, ["Four.\n<|endoftext|>", "Five, of course.<|endoftext|>"]),
    ],
)
def test_what_is_learnt_is_what_the_model_writes(template, learnt, folder_of, tokenizer, tmp_path):
    """The tokens are those of transformers;
    learnt are the answers and the mark that ends a turn, where it follows at once.
    """
    folder = folder_of(template)
    source = written(tmp_path / "chat.jsonl", {"messages": TURNS}, {"messages": TURNS[1:3]})
    corpus = prepare_chat(source, "messages", folder, lambda text, share: None)
    theirs = transformers.AutoTokenizer.from_pretrained(folder)
    expected = theirs.apply_chat_template(TURNS, chat_template=template or DEFAULT, return_dict=False)
    assert (np.asarray(corpus.tokens[: corpus.lengths[0]]) & ~LEARNT).tolist() == expected
    assert corpus.template.is_default == (template is None)
    found = learnt_text(corpus, 0, tokenizer)
    assert [text.strip() for text in found] == [text.strip() for text in learnt]
    assert all(answer in text for answer, text in zip(("Four.", "Five, of course."), found, strict=True))
    assert not any(word in text for text in found for word in ("Two", "And", "short", "user", "think"))
    said: list[str] = []
    again = prepare_chat(source, "messages", folder, lambda text, share: said.append(text))
    assert not any("encoding" in text for text in said), "not from the cache"
    assert again.fingerprint == corpus.fingerprint and np.array_equal(again.tokens, corpus.tokens)


@pytest.mark.parametrize(
    ("template", "end"), [(CHATML, "<|im_end|>"), (SAYING, "<|endoftext|>"), (THINKING, "<|im_end|>")]
)
def test_a_message_is_written_as_the_template_says_and_the_end_of_an_answer_found(template, end, folder_of, tokenizer):
    folder = folder_of(template)
    number = tokenizer.token_to_id(end)
    assert find_template(tokenizer, folder).turn_end(tokenizer) == number
    chat = open_chat(folder)
    assert chat.turn_end(tokenizer) == number
    asked = [{"role": "user", "content": "And one?"}]
    opened = transformers.AutoTokenizer.from_pretrained(folder)
    assert chat.prompt("And one?") == opened.apply_chat_template(asked, tokenize=False, add_generation_prompt=True)
    adapter = folder.parent / "adapter"
    adapter.mkdir()
    assert open_chat(folder, adapter).prompt("And one?") == chat.prompt("And one?")
    (adapter / "chat_template.jinja").write_text(SPACED)
    assert open_chat(folder, adapter).prompt("And one?") == "user And one? <|endoftext|>"


def test_a_folder_without_a_template_and_one_that_refuses_are_named(folder_of):
    with pytest.raises(ConfigurationError, match="tokenizer has no chat template"):
        open_chat(folder_of(None))
    with pytest.raises(ConfigurationError, match="tokenizer refuses a user's message .nobody asks"):
        open_chat(folder_of("{{ raise_exception('nobody asks') }}")).prompt("Hi")


@pytest.mark.parametrize("config", [None, {"model_type": "strange"}])
def test_code_in_a_folder_is_neither_run_nor_asked_about(config, folder_of, tokenizer, monkeypatch):
    folder = folder_of("{{ messages }}")
    asked = []
    monkeypatch.setattr("builtins.input", asked.append)
    path = folder / "tokenizer_config.json"
    stated = json.loads(path.read_text())
    stated |= {"tokenizer_class": "Strange", "auto_map": {"AutoTokenizer": ["strange.Strange", "strange.Strange"]}}
    path.write_text(json.dumps(stated))
    (folder / "strange.py").write_text(f"open({str(folder / 'ran')!r}, 'w')\nclass Strange: pass\n")
    if config is not None:
        (folder / "config.json").write_text(json.dumps(config))
    for opened in (lambda: open_chat(folder), lambda: find_template(tokenizer, folder)):
        with pytest.raises(ConfigurationError, match="is code in that folder .* never run here"):
            opened()
    assert not asked and not (folder / "ran").exists()


def test_what_ends_an_answer_ends_the_trained_folders_texts(folder_of, tokenizer):
    folder = folder_of(CHATML)
    number, found = tokenizer.token_to_id("<|im_end|>"), find_template(tokenizer, folder)
    prepared = SimpleNamespace(
        model_config={"eos_token_id": 0}, tokenizer_folder=folder, turn_end=found.turn_end(tokenizer)
    )
    assert generation_settings(prepared) == {"eos_token_id": [number, 0]}
    (folder / "generation_config.json").write_text(json.dumps({"eos_token_id": [7, number], "top_k": 20}))
    assert generation_settings(prepared) == {"eos_token_id": [7, number], "top_k": 20}
    prepared.tokenizer_folder = prepared.turn_end = None
    assert generation_settings(prepared) == {"_from_model_config": True, "eos_token_id": 0}


def test_the_kinds_mean_the_same(folder_of, tmp_path):
    folder, tokens = folder_of(CHATML), []
    talk = [{"from": name, "value": turn["content"]} for name, turn in zip(("human", "gpt"), TURNS[1:3], strict=True)]
    for kind, record in (
        (
            "messages",
            {"messages": [*TURNS[:2], TURNS[2] | {"weight": None}], "tools": None},
        ),  # as tables write what is not there
        ("sharegpt", {"conversations": talk, "system": "Be short."}),
        ("alpaca", {"instruction": "Two and two?", "input": "", "output": "  Four.\n", "system": "Be short."}),
    ):
        source = written(tmp_path / f"{kind}.jsonl", record, record)
        assert chat_kind(source) == kind
        tokens.append(np.asarray(prepare_chat(source, kind, folder, lambda text, share: None).tokens))
    assert all(np.array_equal(one, tokens[0]) for one in tokens)
    source = written(tmp_path / "more.jsonl", {"instruction": "Add.", "input": "1 and 2", "output": "3"})
    assert next(conversations(source, "alpaca")).messages[0]["content"] == "Add.\n\n1 and 2"
    assert chat_kind(written(tmp_path / "text.jsonl", {"text": "plain"})) is None
    assert chat_kind(written(tmp_path / "notes.txt", "plain")) is None


def test_arrays_and_tables_mean_what_lines_mean(folder_of, tmp_path):
    folder = folder_of(CHATML)
    asked, answered = {"role": "user", "content": "Two and two?"}, {"role": "assistant", "content": "Four."}
    for name, record in {
        "messages": {"messages": [asked, answered]},
        "sharegpt": {"conversations": [{"from": "human", "value": "Two?"}, {"from": "gpt", "value": "Two."}]},
        "alpaca": {"instruction": "Two and two?", "input": None, "output": "Four.", "text": "left out"},
        COMPLETION: {"prompt": "Two and two are", "completion": " four."},
        TALKED: {"prompt": [asked], "completion": [answered]},
    }.items():
        lines, array, table = (tmp_path / f"a.{suffix}" for suffix in ("jsonl", "json", "parquet"))
        array.write_text(json.dumps([record, record], indent=1))
        parquet.write_table(pyarrow.Table.from_pylist([record | {"images": "x"}, record]), table)
        found = [prepare_chat(source, name, folder, quiet) for source in (written(lines, record, record),)]
        for path in (array, table):
            source = find_text(path)
            assert chat_kind(source) == name
            found.append(prepare_chat(source, name, folder, quiet))
        assert all(np.array_equal(each.tokens, found[0].tokens) for each in found)


def test_a_completion_is_learnt_whole_with_the_end_of_the_text_and_its_prompt_is_not(folder_of, tokenizer, tmp_path):
    source = written(tmp_path / "p.jsonl", *[{"prompt": "Two and two are", "completion": "\n\nfour."}] * 2)
    corpus = prepare_chat(source, COMPLETION, folder_of(CHATML), quiet)
    assert chat_kind(source) == COMPLETION and corpus.template is None
    end = tokenizer.token_to_id("<|endoftext|>")
    expected = [*tokenizer.encode("Two and two are").ids, *tokenizer.encode("\n\nfour.").ids, end]
    assert (np.asarray(corpus.tokens[: corpus.lengths[0]]) & ~LEARNT).tolist() == expected
    assert learnt_text(corpus, 0, tokenizer) == ["\n\nfour.<|endoftext|>"]


@pytest.mark.parametrize(("template", "learnt"), [(CHATML, "Five.<|im_end|>"), (SAYING, "Five.<|endoftext|>")])
def test_of_a_conversational_prompt_nothing_is_learnt(template, learnt, folder_of, tokenizer, tmp_path):
    """Not even its own answers, which ``messages`` would learn."""
    answer = {"role": "assistant", "content": "Five."}
    record = {"prompt": TURNS[1:4], "completion": [answer], "system": "Be short."}
    source = written(tmp_path / "p.jsonl", record, record)
    corpus = prepare_chat(source, TALKED, folder_of(template), quiet)
    assert learnt_text(corpus, 0, tokenizer) == [learnt]
    (first, _) = conversations(source, TALKED)
    assert first.messages == [{"role": "system", "content": "Be short."}, *TURNS[1:4], answer]


@pytest.mark.parametrize(
    ("record", "part"),
    [
        ({"prompt": "x", "chosen": "a", "rejected": "b"}, "write 'chosen' as 'completion'"),
        ({"chosen": TURNS, "rejected": TURNS}, "is a preference (chosen, rejected)"),
        ({"messages": TURNS, "chosen": TURNS, "rejected": TURNS}, "keep 'messages' and drop 'chosen' and 'rejected'"),
        ({"prompt": "x", "completion": "a", "label": False}, "the records whose label is true"),
    ],
)
def test_preferences_are_refused_by_name(record, part, tmp_path):
    with pytest.raises(ConfigurationError, match="p.jsonl: line 1 is a preference .*next-token loss") as caught:
        chat_kind(written(tmp_path / "p.jsonl", record))
    assert part in str(caught.value)


@pytest.mark.parametrize(
    ("first", "record", "part"),
    [
        ("x", {"prompt": "x", "completion": ""}, "an empty completion"),
        ("x", {"prompt": "x", "completion": 3}, "no text under 'completion', but a number"),
        ("x", {"prompt": "x"}, "holds 'prompt', the first record is of kind prompt-completion"),
        ("x", {"prompt": TURNS[:2], "completion": TURNS[2:3]}, "is of kind prompt-completion of messages"),
        (TURNS[:2], {"prompt": TURNS[:2], "completion": "Four."}, "'completion' is no list of messages"),
        (TURNS[:2], {"prompt": TURNS[:2], "completion": TURNS[:1]}, "no message of the assistant"),
    ],
)
def test_a_prompt_that_cannot_be_used_is_named(first, record, part, folder_of, tmp_path):
    good = {"prompt": first, "completion": "y" if first == "x" else TURNS[2:3]}
    source = written(tmp_path / "p.jsonl", good, record)
    kind = chat_kind(source)
    assert kind is not None
    with pytest.raises(ConfigurationError, match="p.jsonl: line 2") as caught:
        prepare_chat(source, kind, folder_of(CHATML), quiet)
    assert part in str(caught.value)


@pytest.mark.parametrize(
    ("record", "part"),
    [
        ({"messages": [{"content": "who?"}]}, "message 1 has no 'role'"),
        ({"messages": [{"role": "asistant", "content": "x"}]}, "did you mean 'assistant'"),
        ({"messages": [{"role": "user", "content": ["x"]}]}, "no text under 'content'"),
        ({"messages": TURNS[:2]}, "no message of the assistant"),
        ({"messages": []}, "'messages' is no list of messages"),
        ({"instruction": "x", "output": "y"}, "is of kind alpaca, the first record is of kind messages"),
        ({"text": "x"}, "holds 'text', the first record is of kind messages"),
        ({"chosen": "x", "rejected": "y"}, "is a preference (chosen, rejected)"),
        ({"messages": [*TURNS[1:2], {"role": "assistant", "content": ""}]}, "answers without a token"),
        ({"messages": TURNS, "tools": [{"name": "add"}]}, "has 'tools', which is not read"),
        ({"messages": [*TURNS[1:2], TURNS[2] | {"weight": 0}]}, "message 2 has weight 0"),
        ([1], "holds a list, not an object"),
    ],
)
def test_a_line_that_cannot_be_used_is_named(record, part, folder_of, tmp_path):
    source = written(tmp_path / "chat.jsonl", {"messages": TURNS}, record)
    with pytest.raises(ConfigurationError) as caught:
        prepare_chat(source, "messages", folder_of(SPACED.replace(" {{ eos_token }}", "")), lambda text, share: None)
    assert f"{tmp_path / 'chat.jsonl'}: line 2" in str(caught.value) and part in str(caught.value)


def test_templates_that_cannot_be_used_are_named(folder_of, tokenizer, tmp_path):
    source = written(tmp_path / "chat.jsonl", {"messages": TURNS})
    for template, part in (
        ("{{ raise_exception('no system') }}", "refuses it (no system)"),
        (
            "{% for m in messages %}{{ m.content | upper | replace('FOUR', 'x') | truncate(9) }}{% endfor %}",
            "changes the answers",
        ),
        ("{% for m in messages %}", "refuses it"),
        ("nothing of them", "changes the answers"),
    ):
        with pytest.raises(ConfigurationError, match="line 1") as caught:
            prepare_chat(source, "messages", folder_of(template), lambda text, share: None)
        assert part in str(caught.value)
    with pytest.raises(ConfigurationError, match="--tokenizer"):
        prepare_chat(source, "messages", None, lambda text, share: None)
    path = tmp_path / "alone.json"
    tokenizer.save(str(path))
    assert find_template(tokenizer, path).source == DEFAULT


@pytest.mark.parametrize(
    ("template", "part"),
    [
        ("{{ 'x' * 10**10 }}", "more than 256 MiB"),
        ("{{ messages[0].content.ljust(10**11) }}", "more than 256 MiB"),
        ("{% set n = namespace(x='ab') %}{% for i in range(60) %}{% set n.x = n.x ~ n.x %}{% endfor %}", "more than "),
        ("{{ 'x' * 2000 }}", "writes 2000 characters"),
        ("{{ range(10**9) | list | length }}", "Range too big"),
        ("{% for i in range(90000) %}{% for j in range(90000) %}{% endfor %}{% endfor %}", "more than 0.05 s"),
        ("{{ (messages | length + 1) ** (10 ** 20) }}", "more than 0.05 s"),
        ("{{ 1 // 0 }}", "by zero"),
        ("{% macro f(x) %}{{ f(x) }}{% endmacro %}{{ f(1) }}", "recursion"),
        ("{{ " + "[" * 3000 + "]" * 3000 + " }}", "recursion"),
        ("{{ ''.__class__.__mro__ }}", "unsafe"),
    ],
)
def test_a_template_is_bounded(template, part, folder_of, tokenizer, monkeypatch):
    """In memory, time and what it writes; to learn from, and to generate."""
    if part.startswith("more than"):  # the others end by themselves, on a busy machine after more than that
        monkeypatch.setattr(chat_prompt, "MAX_SECONDS", 0.05)
    monkeypatch.setattr(chat_prompt, "MAX_CHARACTERS", 1000)
    limits = resource.getrlimit(resource.RLIMIT_DATA), signal.getsignal(signal.SIGPROF)
    found = find_template(tokenizer, folder_of(template))
    with pytest.raises(ConfigurationError, match=rf"^line 1: .* refuses it \(.*{part}"):
        write_down(found, Conversation(TURNS, "line 1"))
    with pytest.raises(ConfigurationError, match=rf"refuses a user's message \(.*{part}"):
        open_chat(folder_of(template)).prompt("hello")
    assert (resource.getrlimit(resource.RLIMIT_DATA), signal.getsignal(signal.SIGPROF)) == limits
    assert signal.getitimer(signal.ITIMER_PROF) == (0.0, 0.0)


def test_a_template_is_rendered_in_any_thread(folder_of, tokenizer):
    """Signals, which bound the time, are the main thread's; memory is bounded in all."""
    found = find_template(tokenizer, folder_of(SPACED))
    with ThreadPoolExecutor(1) as pool:
        there = pool.submit(write_down, found, Conversation(TURNS, "line 1")).result()
    assert there == write_down(found, Conversation(TURNS, "line 1"))


def test_a_line_that_is_nested_too_deep_is_named(folder_of, tmp_path):
    path = tmp_path / "chat.jsonl"
    path.write_text(json.dumps({"messages": TURNS}) + '\n{"messages": ' + "[" * 100_000 + "]" * 100_000 + "}\n")
    with pytest.raises(ConfigurationError, match="line 2 is nested too deep"):
        prepare_chat(find_text(path), "messages", folder_of(SPACED), lambda text, share: None)
    path.write_text("[" * 100_000)
    with pytest.raises(ConfigurationError, match="line 1 is nested too deep"):
        chat_kind(find_text(path))


@settings(max_examples=60, deadline=None)
@given(st.lists(st.integers(1, 40), min_size=1, max_size=60))
def test_rows_hold_everything_once(lengths):
    rows = pack_rows(np.asarray(lengths), 40)
    assert sorted(index for row in rows for index in row) == list(range(len(lengths)))
    assert all(sum(lengths[index] for index in row) <= 40 for row in rows)
    assert len(rows) <= 11 / 9 * -(-sum(lengths) // 40) + len([length for length in lengths if length > 20]) + 1


def test_batches_are_conversations_side_by_side(folder_of, tmp_path):
    texts = [f"{'and ' * (number % 7)}one" for number in range(60)]
    records = [{"instruction": "Two?", "output": text} for text in texts] + [
        {"instruction": "one " * 60, "output": "x"}
    ]
    corpus = prepare_chat(
        written(tmp_path / "c.jsonl", *records[::-1]), "alpaca", folder_of(CHATML), lambda *args: None
    )
    packed, single = (ChatDataset(corpus, 64, packing=packing, seed=3) for packing in (True, False))
    assert (
        packed.left_out == packed.cut == 1
        and packed.conversations == 59 == len(single)
        and len(packed) < 0.6 * len(single)
    )
    assert packed.filled > 1.5 * single.filled
    seen = []
    for row in range(len(packed)):
        *batch, starts = packed.batch(np.asarray([row]))
        inputs, targets, places = (array[0] for array in batch)
        assert starts.unique().tolist() == [*(places == 0).nonzero().flatten().tolist(), len(places)]
        begins = [*torch.nonzero(places == 0).flatten().tolist(), 64]
        for begin, end in zip(begins, begins[1:], strict=False):
            assert torch.equal(places[begin:end], torch.arange(end - begin))
            if (targets[begin:end] != -100).any():
                seen.append(tuple(zip(inputs[begin:end].tolist(), targets[begin:end].tolist(), strict=True)))
    alone = []
    for row in range(len(single)):
        inputs, targets = (array[0] for array in single.batch(np.asarray([row])))
        alone.append((inputs.tolist(), targets.tolist()))
        wanted = (targets != -100).nonzero().flatten()
        # a target is the token that stands next, but for the last one, which the row does not hold
        assert torch.equal(targets[wanted[:-1]], inputs[wanted[:-1] + 1])
    learnt = sorted(target for row in seen for _, target in row if target != -100)
    assert learnt == sorted(target for _, targets in alone for target in targets if target != -100)
    assert not np.array_equal(packed.batch(np.arange(3))[0], packed.batch(np.arange(3) + len(packed))[0]), (
        "epochs differ"
    )
    with pytest.raises(ConfigurationError, match="no training conversation has an answer in its first 4 tokens"):
        ChatDataset(corpus, 4)


def test_a_damaged_cache_is_made_again(folder_of, tmp_path):
    source, said = written(tmp_path / "c.jsonl", {"messages": TURNS}, {"messages": TURNS}), []
    folder = folder_of(CHATML)
    corpus = prepare_chat(source, "messages", folder, lambda *args: None)
    (path,) = (tmp_path / "cache").rglob("tokens.bin")
    expected = np.array(corpus.tokens)
    path.write_bytes(path.read_bytes()[:-1] + b"\xff")
    again = prepare_chat(source, "messages", folder, lambda text, share: said.append(text))
    assert any(text.endswith("; encoding again") for text in said) and np.array_equal(again.tokens, expected)


@pytest.mark.parametrize("kind", CONFIGS)
def test_architectures_keep_packed_documents_apart(kind):
    torch.manual_seed(0)
    model = transformers.AutoModelForCausalLM.from_config(CONFIGS[kind]())
    assert why_no_positions(model) is None
    reason = why_not_apart(model, 96, torch.device("cpu"))
    if kind == "opt":  # makes its own mask, and counts positions by it
        assert reason is not None and "OPTForCausalLM lets a document see" in reason
    else:
        assert reason is None
    assert model.training


def test_a_model_that_mixes_documents_is_told():
    torch.manual_seed(0)
    config = CONFIGS["llama"]()
    model = transformers.AutoModelForCausalLM.from_config(config)
    original = model.model.forward
    model.model.forward = lambda *args, position_ids=None, **options: original(*args, **options)
    assert "LlamaForCausalLM lets a document see" in (why_not_apart(model, 96, torch.device("cpu")) or "")


def test_a_model_without_positions_is_told():
    with torch.device("meta"):
        model = transformers.BloomForCausalLM(
            transformers.BloomConfig(vocab_size=96, hidden_size=8, n_layer=1, n_head=2)
        )
    assert "BloomForCausalLM takes no positions" in (why_no_positions(model) or "")
