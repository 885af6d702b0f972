"""From the engine's events to bodies, for texts that no random model writes: calls that it chooses itself, and ends."""

from __future__ import annotations

import json
from typing import Any

import pytest

from tests.serve.serving import byte_tokenizer
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
    answer, pieces = written(CALLS, tools=("weather", "clock"), stop=("Rome",))
    assert answer.over and pieces[-1].finish == "tool_calls"
    assert "".join(part.arguments for piece in pieces for part in piece.calls) == '{"city": "'


def test_events_are_lines_of_json():
    said = {"a": 'é\n\r\n"\x85\u2028\u2029\x0b'}
    text = event(said)
    assert text.startswith("data: ") and text.endswith("\n\n") and len(text.splitlines()) == 2
    assert json.loads(text[6:]) == said
