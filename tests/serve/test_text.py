"""Text comes out the same however tokens divide it: characters whole, stop strings never shown, calls told apart."""

from __future__ import annotations

import json
import random

import pytest
from tokenizers import Tokenizer, decoders, models, pre_tokenizers

from tests.serve.serving import byte_tokenizer
from vblackwell.generate.generate import CONTEXT
from vblackwell.serve.http.text import MAX_HELD, NewText, StopStrings, Vocabulary
from vblackwell.serve.http.tool_calls import CallPart, ToolCalls, form_of


def divided(text: str, rng: random.Random) -> list[str]:
    """``text`` in pieces of one to five characters."""
    pieces = list[str]()
    while text:
        size = rng.randint(1, 5)
        pieces.append(text[:size])
        text = text[size:]
    return pieces


# -- characters --------------------------------------------------------------------------------------------------------


@pytest.mark.parametrize("text", ["plain", "é日本👩‍🚀 end", "a\ufffdb", "日" * 3 * CONTEXT])
def test_characters_come_whole(text: str):
    tokenizer = byte_tokenizer()
    new, told = NewText(tokenizer, tokenizer.encode("before é").ids), list[str]()
    for token in tokenizer.encode(text).ids:
        told.append(new.add(token))
    assert "".join([*told, new.end()]) == text
    assert all("\ufffd" not in piece for piece in told) or "\ufffd" in text


def test_bytes_that_make_no_character_are_told_at_last():
    tokenizer = byte_tokenizer()
    continuation = tokenizer.encode("é").ids[1]
    new = NewText(tokenizer, [])
    told = [new.add(continuation) for _ in range(3 * MAX_HELD)]
    assert "".join(told) + new.end() == "\ufffd" * 3 * MAX_HELD
    assert max(map(len, told)) <= MAX_HELD


def test_random_bytes_give_the_same_text_as_decoding_them_at_once():
    tokenizer, rng = byte_tokenizer(), random.Random(0)
    for _ in range(50):
        tokens = [rng.randrange(256) for _ in range(rng.randint(1, CONTEXT - 1))]
        new = NewText(tokenizer, [])
        assert "".join(new.add(token) for token in tokens) + new.end() == tokenizer.decode(tokens)


def test_a_decoder_of_words_keeps_the_space_after_the_prompt():
    words = Tokenizer(models.WordLevel({"one": 0, "two": 1, "three": 2}, unk_token="one"))
    words.pre_tokenizer = pre_tokenizers.Whitespace()
    new = NewText(words, [0])
    assert new.add(1) + new.add(2) == " two three"


def test_single_tokens_as_text_and_bytes():
    tokenizer = byte_tokenizer()
    known, (first, second) = Vocabulary(tokenizer), tokenizer.encode("é").ids
    assert known.bytes_of(first) + known.bytes_of(second) == "é".encode()
    assert known.text_of(first) == "bytes:\\xc3"
    assert known.text_of(tokenizer.encode(" ").ids[0]) == " "
    assert known.text_of(tokenizer.token_to_id("<|end|>")) == "<|end|>"
    assert known.bytes_of(100_000) == b""
    pieces = Tokenizer(models.BPE({"<0xE2>": 0, "▁word": 1}, []))
    pieces.decoder = decoders.Sequence([decoders.Replace("▁", " "), decoders.ByteFallback()])
    assert [Vocabulary(pieces).bytes_of(token) for token in (0, 1)] == [b"\xe2", b" word"]


# -- stop strings ------------------------------------------------------------------------------------------------------


@pytest.mark.parametrize(
    ("text", "stops", "shown"),
    [
        ("say END more", ["END"], "say "),
        ("say EN D more", ["END"], "say EN D more"),
        ("aaab", ["aab"], "a"),
        ("ab", ["abc", "b"], "a"),
        ("abc", ["abc", "b"], "a"),
        ("abcd", ["bcd", "abcd"], ""),
        ("xEN", ["END"], "xEN"),
        ("日本語", ["本"], "日"),
        ("", ["x"], ""),
        ("text", [], "text"),
    ],
)
def test_stop_strings(text: str, stops: list[str], shown: str):
    rng = random.Random(1)
    for _ in range(20):
        found = StopStrings(stops)
        told = [found.add(piece) for piece in divided(text, rng)]
        assert "".join([*told, found.end()]) == shown
        assert found.found == (shown != text)


def test_a_stop_string_is_held_back_no_longer_than_it_may_come():
    found = StopStrings(["END"])
    assert [found.add(piece) for piece in ("a", "E", "N", "x")] == ["a", "", "", "ENx"]


# -- calls of tools ----------------------------------------------------------------------------------------------------

NAMES = ("weather", "clock")


def read(text: str, rng: random.Random) -> tuple[str, list[tuple[str, str]]]:
    """What is said, and the calls with their arguments, of ``text`` in pieces."""
    parser, found = ToolCalls(NAMES), list[str | CallPart]()
    for piece in divided(text, rng):
        found += parser.add(piece)
    found += parser.end()
    calls = dict[int, list[str]]()
    for part in found:
        if isinstance(part, CallPart):
            if part.name is not None:
                assert part.index == len(calls) and part.id
                calls[part.index] = [part.name, ""]
            calls[part.index][1] += part.arguments
    return "".join(part for part in found if isinstance(part, str)), [(name, text) for name, text in calls.values()]


PARIS = '{"city": "Paris {\\"}", "days": [1, {"a": 2}]}'


@pytest.mark.parametrize(
    ("text", "said", "calls"),
    [
        ('<tool_call>\n{"name": "weather", "arguments": %s}\n</tool_call>', "", [("weather", PARIS)]),
        (
            'Let me see. \n<tool_call>{"name": "weather", "arguments": %s}</tool_call>\n'
            '<tool_call>{"name": "clock", "arguments": {}}</tool_call>',
            "Let me see.",
            [("weather", PARIS), ("clock", "{}")],
        ),
        ('{"name": "weather", "parameters": %s}', "", [("weather", PARIS)]),
        (
            '<|python_tag|>{"name": "weather", "parameters": %s}; {"name": "clock", "parameters": {}}',
            "",
            [("weather", PARIS), ("clock", "{}")],
        ),
        ('<tool_call>{"arguments": {"a": 1}, "name": "clock"}</tool_call>', "", [("clock", '{"a": 1}')]),
        ('{"name": "unknown", "parameters": {}} and more', '{"name": "unknown", "parameters": {}} and more', []),
        ('{"answer": {"name": "clock"}}', '{"answer": {"name": "clock"}}', []),
        ("a < b <tool_cal", "a < b <tool_cal", []),
        ("<tool_call>no JSON</tool_call> x", "<tool_call>no JSON</tool_call> x", []),
        ('<tool_call>{"name": "cl', '<tool_call>{"name": "cl', []),
        ('<tool_call>{"name": "weather", "arguments": {"city": "Pa', "", [("weather", '{"city": "Pa')]),
        ("plain text", "plain text", []),
    ],
)
def test_calls_are_told_apart(text: str, said: str, calls: list[tuple[str, str]]):
    text, rng = text.replace("%s", PARIS), random.Random(2)
    for _ in range(30):
        assert read(text, rng) == (said, calls)


def test_arguments_are_told_as_they_come():
    parser = ToolCalls(NAMES)
    assert not parser.add('<tool_call>{"name": "weather", ')
    begin, *_ = parser.add('"arguments": {"ci')
    assert isinstance(begin, CallPart) and begin.name == "weather"
    (more,) = parser.add('ty": ')
    assert isinstance(more, CallPart) and (more.index, more.name, more.arguments) == (0, None, 'ty": ')


def test_random_arguments_come_out_as_they_went_in():
    rng = random.Random(3)
    letters = 'ab{}[]",:\\ 日\n'
    for _ in range(200):
        value = {"".join(rng.choices(letters, k=3)): ["".join(rng.choices(letters, k=rng.randint(0, 9)))] * 2}
        text = json.dumps(value, ensure_ascii=rng.random() < 0.5)
        said, calls = read(f'<tool_call>\n{{"name": "clock", "arguments": {text}}}\n</tool_call>', rng)
        assert said == "" and calls == [("clock", text)] and json.loads(calls[0][1]) == value


@pytest.mark.parametrize(
    ("template", "form"),
    [
        ("{% if tools %}{{ '<tool_call>{\\\"name\\\": ...' }}", "tagged"),
        ('{% if tools %}respond with {"name": function, "parameters": ...}', "bare"),
        ('{% if tools %}<tool_call><function=x>"name"', None),
        ("{{ messages }}", None),
    ],
)
def test_the_form_that_a_template_asks_for(template: str, form: str | None):
    assert form_of(template) == form
