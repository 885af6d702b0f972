"""`vb train --model FOLDER --data chat.jsonl`: what the data is, is shown; answers are learnt;
what cannot be used is refused.
"""

from __future__ import annotations

import json
import re
from pathlib import Path

import pytest
import transformers

from tests.cli.test_bad_input import refused
from tests.cli.test_folders import RUN, folders, metrics  # noqa: F401 - a fixture

ANSWERS = ["import sys", "return self", "print(args)"]


@pytest.fixture
def chat(place) -> Path:
    path = place.folder / "chat.jsonl"
    talks = [{"instruction": f"def {number}?", "input": "", "output": ANSWERS[number % 3]} for number in range(120)]
    path.write_text("".join(json.dumps(talk) + "\n" for talk in talks))
    return path


def words(place, folder: Path, chat: Path, *more: str) -> list[str]:
    return ["train", "--model", str(folder), "--data", str(chat), "--disk-path", str(place.folder), *RUN, *more]


@pytest.mark.parametrize("kind", [pytest.param("llama", marks=pytest.mark.slow), "qwen3"])
def test_answers_are_learnt(kind, place, folders, chat):  # noqa: F811
    """By our decoder and by a model of transformers, packed and not;
    the first losses are those of nothing but answers.
    """
    sizes = ("--seq-length", "48", "--max-steps", "12", "--learning-rate", "2e-2")
    output = place.vb(*words(place, folders(kind), chat, *sizes)).stdout
    assert "120 conversations (alpaca), written with the default chat template" in output
    assert "several share a row, positions begin again at 0 with each and none sees another" in output
    sample = output.partition("sample, in answer to a conversation that was held out:\n")[2]
    assert re.match(r"### User:\ndef 8\?\n\n### Assistant:\n", sample) and sample.endswith(
        f"the data answers:\n{ANSWERS[8 % 3]}\n"
    )
    packed = metrics(place.folder / "run")
    assert packed[-1]["loss"] < 0.6 * packed[0]["loss"]
    assert packed[-1]["val_loss"] < 0.6 * packed[0]["val_loss"]
    final = place.folder / "run/final"
    opened = transformers.AutoTokenizer.from_pretrained(final)
    text = opened.apply_chat_template([{"role": "user", "content": "Hi"}], tokenize=False, add_generation_prompt=True)
    assert text == "### User:\nHi\n\n### Assistant:\n"

    alone = ("--no-packing", "--max-steps", "1", "--out", "single")
    output = place.vb(*words(place, folders(kind), chat, *sizes, *alone)).stdout
    assert "each has a separate row" in output
    single = metrics(place.folder / "single")
    # Other rows of the same answers, before anything is learnt: the same loss but for which answers are in it.
    assert abs(single[0]["loss"] - packed[0]["loss"]) < 0.3


def test_what_will_be_learnt_is_printed(place, folders, chat):  # noqa: F811
    output = place.vb(*words(place, folders("qwen3"), chat, "--seq-length", "48", "--inspect-data")).stdout
    assert not (place.folder / "run").exists()
    rows = re.split(r"^row \d: .*\n.*learns\n", output, flags=re.MULTILINE)
    assert len(rows) == 3
    for row in rows[1:]:
        learnt = re.findall(r"^ +\d+ +\d+  '.*?' +('.*')$", row, re.MULTILINE)
        text = "".join(part[1:-1] for part in learnt)
        assert re.fullmatch(f"(({'|'.join(map(re.escape, ANSWERS))})<.endoftext.>)+", text), text
    plain = place.vb(*words(place, folders("qwen3"), place.corpus, "--inspect-data")).stdout
    assert "row 0: 16 of 16 positions learn" in plain


def test_what_cannot_be_used_is_refused(place, folders, chat):  # noqa: F811
    folder, good = folders("qwen3"), chat.read_text()
    chat.write_text(good + '{"instruction": "no answer"}\n')
    refused(place, words(place, folder, chat), f"{chat}: line 121", "'output'")
    chat.write_text(good + "not json\n")
    refused(place, words(place, folder, chat), f"{chat}: line 121 is not JSON")
    chat.write_text('{"messages": [{"content": "who?"}]}\n')
    refused(place, words(place, folder, chat), f"{chat}: line 1, message 1 has no 'role'")
    chat.write_text(good)
    refused(place, ["train", "--data", str(chat)], "conversations (alpaca)", "--tokenizer")
    refused(place, words(place, folder, chat, "--seq-length", "8"), "no training conversation", "raise --seq-length")
    more = ("--seq-length", "48", "--packing")
    refused(place, words(place, folders("opt"), chat, *more), "--packing: OPTForCausalLM", "--no-packing")


def test_a_fixed_attention_for_packed_rows_is_refused_of_a_plan_too(place, folders, chat):  # noqa: F811
    for each in ([], ["--plan"]):
        more = ("--seq-length", "48", "--use-flash-attn", *each)
        refused(place, words(place, folders("llama"), chat, *more), "--use-flash-attn", "--no-packing")


@pytest.mark.parametrize(("name", "told"), [("opt", True), ("llama", False)])
def test_a_plan_says_that_it_cannot_try_whether_documents_stay_apart(name, told, place, folders, chat):  # noqa: F811
    """Which takes weights; our decoder keeps them apart."""
    made = place.vb(*words(place, folders(name), chat, "--seq-length", "48", "--packing", "--plan")).stdout
    assert ("not in the plan: whether OPTForCausalLM keeps a row's documents apart" in made) == told
    assert ("not in the plan" in made) == told and "plan: " in made


def test_a_model_that_mixes_documents_gets_a_row_for_each(place, folders, chat):  # noqa: F811
    """The run is that of --no-packing."""
    sizes = ("--seq-length", "48", "--max-steps", "2")
    output = place.vb(*words(place, folders("opt"), chat, *sizes)).stdout
    assert output.count("no packing: OPTForCausalLM lets a document see what is before it in its row") == 1
    place.vb(*words(place, folders("opt"), chat, *sizes, "--no-packing", "--out", "single"))
    mine, theirs = (metrics(place.folder / name) for name in ("run", "single"))
    assert [line["loss"] for line in mine] == [line["loss"] for line in theirs]


def test_completions_of_plain_prompts_are_learnt_without_a_template(place, folders):  # noqa: F811
    folder, data = folders("qwen3"), place.folder / "data.json"
    data.write_text(json.dumps([{"prompt": f"def {n}?", "completion": ANSWERS[n % 3]} for n in range(60)], indent=1))
    output = place.vb(*words(place, folder, data, "--seq-length", "48", "--max-steps", "1")).stdout
    assert "60 conversations (prompt-completion), written as they are; learnt are the completions" in output
    final = place.folder / "run/final"
    assert not transformers.AutoTokenizer.from_pretrained(final).chat_template
    end = json.loads((folder / "config.json").read_text())["eos_token_id"]
    assert end in [*json.loads((final / "generation_config.json").read_text())["eos_token_id"]]
