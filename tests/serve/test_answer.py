"""From the engine's events to bodies, for texts that no random model writes: calls that it chooses itself, and ends;
and vectors instead of texts."""

from __future__ import annotations

import json
from collections.abc import Iterator, Sequence
from pathlib import Path
from typing import Any

import openai
import pytest
import torch
import transformers
from tokenizers.processors import TemplateProcessing
from torch import Tensor

from tests.serve.models import tiny
from tests.serve.serving import END, byte_tokenizer, serving
from vblackwell.serve.http.answer import Answer, Piece
from vblackwell.serve.http.text import Vocabulary
from vblackwell.serve.http.wire import Reply, event, read_chat
from vblackwell.serve.request import Done, Request, Token

TOKENIZER = byte_tokenizer()
BODY: Any = {
    "model": "m",
    "messages": [{"role": "user", "content": "x"}],
    "tools": [{"type": "function", "function": {"name": name}} for name in ("weather", "clock")],
    "logprobs": True,
}
CALLS = (
    'Ah é.\n<tool_call>\n{"name": "weather", "arguments": {"city": "Rome"}}\n</tool_call>\n'
    '<tool_call>\n{"name": "clock", "arguments": {}}\n</tool_call>'
)


def written(text: str, end: bool = True, **options: Any) -> tuple[Answer, list[Piece]]:
    """The answer that has all of ``text``, a byte at a time, and its pieces."""
    request = Request("m", (1,), 999, end_tokens=frozenset({256}), logprobs=0)
    answer = Answer(0, 0, request, TOKENIZER, Vocabulary(TOKENIZER), **options)
    pieces, count = list[Piece | None](), 0
    for token in [*TOKENIZER.encode(text).ids, *([256] if end else [])]:
        if answer.over:
            break
        count += 1
        pieces.append(answer.add(Token(token, -1.0)))
    reason = "cancelled" if answer.over else "stop" if end else "length"
    pieces.append(answer.end(Done(reason, None, 1, 0, count)))
    return answer, [piece for piece in pieces if piece is not None]


@pytest.mark.parametrize("stream", [False, True])
def test_calls_that_the_model_chooses(stream: bool):
    reply = Reply(read_chat(BODY | {"stream": stream}))
    answer, pieces = written(CALLS, tools=("weather", "clock"))
    whole = reply.whole(pieces, [answer])["choices"][0]
    assert whole["finish_reason"] == "tool_calls" and whole["message"]["content"] == "Ah é."
    functions = [call["function"] for call in whole["message"]["tool_calls"]]
    assert functions == [{"name": "weather", "arguments": '{"city": "Rome"}'}, {"name": "clock", "arguments": "{}"}]
    assert len({call["id"] for call in whole["message"]["tool_calls"]}) == 2
    chunks = [chunk["choices"][0] for piece in pieces for chunk in reply.pieces(piece)]
    assert [chunk["finish_reason"] for chunk in chunks] == [None] * (len(chunks) - 1) + ["tool_calls"]
    assert "".join(chunk["delta"].get("content") or "" for chunk in chunks) == "Ah é."
    parts = [part for chunk in chunks for part in chunk["delta"].get("tool_calls", ())]
    for index, function in enumerate(functions):
        mine = [part for part in parts if part["index"] == index]
        assert mine[0]["function"]["name"] == function["name"] and mine[0]["type"] == "function" and mine[0]["id"]
        assert all(set(part) == {"index", "function"} for part in mine[1:])
        assert "".join(part["function"]["arguments"] for part in mine) == function["arguments"]
    told = [token for chunk in chunks if chunk["logprobs"] for token in chunk["logprobs"]["content"]]
    assert b"".join(bytes(token["bytes"]) for token in told).decode() == CALLS  # the end token is not told


def test_one_call_where_one_is_asked_for():
    answer, pieces = written(CALLS, tools=("weather", "clock"), several=False)
    assert answer.over and [piece.finish for piece in pieces][-1] == "tool_calls"
    assert {part.index for piece in pieces for part in piece.calls} == {0}
    assert answer.new_tokens < len(CALLS) // 2 + 20


def test_an_answer_that_is_cut_off_ends_by_its_length():
    _, pieces = written('<tool_call>\n{"name": "weather", "arguments": {"ci', end=False, tools=("weather",))
    assert pieces[-1].finish == "length"
    assert "".join(part.arguments for piece in pieces for part in piece.calls) == '{"ci'


def test_a_function_that_the_request_names_ends_by_stop():
    """As OpenAI's do."""
    _, pieces = written(CALLS, tools=("weather", "clock"), forced=True)
    assert pieces[-1].finish == "stop"


@pytest.mark.parametrize("end", [False, True])
def test_what_was_held_back_comes_at_the_end(end: bool):
    _, pieces = written("é <tool_ca", end, tools=("weather",), stop=("never",))
    assert "".join(piece.text for piece in pieces) == "é <tool_ca"
    assert [piece.finish for piece in pieces if piece.finish] == ["stop" if end else "length"]


def test_a_stop_string_ends_calls_as_well():
    """By "stop" in the middle of one, which nobody can call."""
    whole, pieces = written(CALLS, tools=("weather", "clock"), stop=("clock",))
    assert whole.over and pieces[-1].finish == "tool_calls"  # the first is whole
    answer, pieces = written(CALLS, tools=("weather", "clock"), stop=("Rome",))
    assert answer.over and pieces[-1].finish == "stop"
    assert "".join(part.arguments for piece in pieces for part in piece.calls) == '{"city": "'


def test_events_are_lines_of_json():
    said = {"a": 'é\n\r\n"\x85\u2028\u2029\x0b'}
    text = event(said)
    assert text.startswith("data: ") and text.endswith("\n\n") and len(text.splitlines()) == 2
    assert json.loads(text[6:]) == said


# -- embeddings --------------------------------------------------------------------------------------------------------

TEXTS = ["hello", "é " * 70 + "end", "a", "hello, and more"]
KINDS = ["Transformer", "Pooling", "Normalize"]


def embedding_folder(
    folder: Path, pooling: dict[str, Any], kinds: Sequence[str] = KINDS, kind: str = "Qwen3", **config: Any
) -> Path:
    """A folder as sentence-transformers writes it, of a model without a head whose tokenizer adds an end."""
    size = {"vocab_size": byte_tokenizer().get_vocab_size(), "pad_token_id": None, "tie_word_embeddings": True}
    tiny(kind, **size, **config).base_model.save_pretrained(folder)
    tokenizer = byte_tokenizer()
    tokenizer.post_processor = TemplateProcessing(single="$0 <|end|>", special_tokens=[(END, 256)])
    transformers.PreTrainedTokenizerFast(tokenizer_object=tokenizer, eos_token=END).save_pretrained(folder)
    modules = [
        {"idx": at, "path": f"{at}_{kind}" if at else "", "type": f"sentence_transformers.models.{kind}"}
        for at, kind in enumerate(kinds)
    ]
    (folder / "modules.json").write_text(json.dumps(modules))
    (folder / "1_Pooling").mkdir()
    (folder / "1_Pooling" / "config.json").write_text(json.dumps({"word_embedding_dimension": 32} | pooling))
    return folder


@torch.no_grad()
def vector(folder: Path, text: str, mean: bool, normalize: bool) -> Tensor:
    """What transformers alone computes."""
    ids = transformers.AutoTokenizer.from_pretrained(folder)(text, return_tensors="pt").input_ids
    rows = transformers.AutoModel.from_pretrained(folder).eval()(ids).last_hidden_state[0].double()
    pooled = rows.mean(0) if mean else rows[-1]
    return pooled / pooled.norm() if normalize else pooled


@pytest.fixture(scope="module")
def embedding(tmp_path_factory: pytest.TempPathFactory) -> Iterator[tuple[dict[str, Path], openai.OpenAI]]:
    made = tmp_path_factory.mktemp("models")
    off = {"pooling_mode_cls_token": False, "include_prompt": True}
    folders = {
        "last": embedding_folder(made / "last", off | {"pooling_mode_lasttoken": True}, is_matryoshka=True),
        "mean": embedding_folder(made / "mean", off | {"pooling_mode_mean_tokens": True}, KINDS[:2]),
        "cls": embedding_folder(made / "cls", {"pooling_mode_cls_token": True}),
        "dense": embedding_folder(made / "dense", {"pooling_mode": "mean"}, ["Transformer", "Pooling", "Dense"]),
        "prompt": embedding_folder(made / "prompt", {"pooling_mode": "lasttoken"}),
        "damaged": embedding_folder(made / "damaged", {"pooling_mode": "lasttoken"}),
        "alone": embedding_folder(made / "alone", {"pooling_mode": "mean"}, kind="Bloom", n_layer=1),
    }
    (folders["prompt"] / "config_sentence_transformers.json").write_text('{"default_prompt_name": "query"}')
    (folders["damaged"] / "modules.json").write_text("[")
    with serving(folders=[*folders.values()]) as server:
        with openai.OpenAI(base_url=f"{server.url}/v1", api_key="any", max_retries=0) as client:
            yield folders, client
        assert server.engine.state().pages_used == 0


@pytest.mark.parametrize(("name", "mean", "normalize"), [("last", False, True), ("mean", True, False)])
def test_vectors_are_those_of_transformers(embedding: Any, name: str, mean: bool, normalize: bool):
    """Also of a text that is read in several passes; alone, among others, and from pages they have the same bits."""
    folders, client = embedding
    answer = client.embeddings.create(model=name, input=TEXTS)  # the client asks for base64
    assert [each.index for each in answer.data] == [0, 1, 2, 3] and answer.model == name
    read = sum(len(text.encode()) + 1 for text in TEXTS)
    assert answer.usage.prompt_tokens == answer.usage.total_tokens == read
    for text, each in zip(TEXTS, answer.data, strict=True):
        expected = vector(folders[name], text, mean, normalize)
        found = torch.tensor(each.embedding, dtype=torch.float64)
        # fp32 through two layers; numbers are about 1, of a vector with length 1 about 0.2
        torch.testing.assert_close(found, expected, rtol=1e-4, atol=1e-5)
        (alone,) = client.embeddings.create(model=name, input=text, encoding_format="float").data
        assert alone.embedding == each.embedding
    tokens = [*(byte_tokenizer().encode("a").ids), 256]
    (of_tokens,) = client.embeddings.create(model=name, input=tokens).data
    (of_lists,) = client.embeddings.create(model=name, input=[tokens]).data
    assert of_tokens.embedding == of_lists.embedding == answer.data[2].embedding


def test_vectors_are_cut_where_the_folder_allows_it(embedding: Any):
    folders, client = embedding
    (cut,) = client.embeddings.create(model="last", input="hello", dimensions=8).data
    whole = vector(folders["last"], "hello", False, False)[:8]
    torch.testing.assert_close(
        torch.tensor(cut.embedding, dtype=torch.float64), whole / whole.norm(), rtol=1e-4, atol=1e-5
    )
    for name, dimensions in (("mean", 8), ("last", 33)):
        with pytest.raises(openai.UnprocessableEntityError, match="dimensions"):
            client.embeddings.create(model=name, input="hello", dimensions=dimensions)


@pytest.mark.parametrize(
    ("name", "error", "said"),
    [
        ("cls", openai.BadRequestError, "pools by cls_token"),
        ("dense", openai.BadRequestError, "Dense"),
        ("prompt", openai.BadRequestError, "default_prompt_name"),
        ("damaged", openai.BadRequestError, "cannot be read"),
        ("alone", openai.UnprocessableEntityError, "one text at a time"),
    ],
)
def test_a_folder_that_embeds_otherwise_is_refused(embedding: Any, name: str, error: Any, said: str):
    with pytest.raises(error, match=said):
        embedding[1].embeddings.create(model=name, input="hello")


def test_an_input_may_be_as_long_as_the_model_reads(embedding: Any):
    client = embedding[1]
    assert client.embeddings.create(model="mean", input="x" * 255).usage.prompt_tokens == 256
    for given in ("x" * 256, [], [[]], ["x"] * 129, 3, None):
        with pytest.raises(openai.BadRequestError, match="input"):
            client.embeddings.create(model="mean", input=given)
