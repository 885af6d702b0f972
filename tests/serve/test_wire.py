"""Bodies are read field by field: what is known is taken, what is not supported is refused, nothing is ignored."""

from __future__ import annotations

import json
from typing import Any

import pytest
from openai.types import completion_create_params as completion_params
from openai.types.chat import completion_create_params as chat_params
from openai.types.embedding_create_params import EmbeddingCreateParams

from vblackwell.serve.http.refusal import Refusal
from vblackwell.serve.http.wire import (
    CHAT_FIELDS,
    COMPLETION_FIELDS,
    EMBEDDING_FIELDS,
    WITHOUT_EFFECT,
    Asked,
    read_chat,
    read_completion,
    read_embedding,
    read_json,
)

MESSAGES = [{"role": "user", "content": "hello"}]
IMAGE = {"type": "image_url", "image_url": {"url": "file:///etc/passwd"}}
WEATHER = {"type": "function", "function": {"name": "weather", "parameters": {"type": "object"}}}


def chat(**fields: Any) -> Asked:
    return read_chat({"model": "m", "messages": MESSAGES, **fields})


def completion(**fields: Any) -> Asked:
    return read_completion({"model": "m", "prompt": "hello", **fields})


def refusal(read: Any, **fields: Any) -> tuple[int, str | None]:
    """Status and field of what is said to a body."""
    with pytest.raises(Refusal) as caught:
        read(**fields)
    error = caught.value.body["error"]
    assert error["message"] and error["type"] and set(error) == {"message", "type", "param", "code"}
    return caught.value.status, error["param"]


def test_every_field_of_the_published_schema_is_known():
    """A new one in the client's package must be decided on: supported, or refused by name."""
    chats = {*chat_params.CompletionCreateParamsBase.__annotations__, "stream"}
    completions = {*completion_params.CompletionCreateParamsBase.__annotations__, "stream"}
    assert chats <= CHAT_FIELDS | set(WITHOUT_EFFECT)
    assert completions <= COMPLETION_FIELDS | set(WITHOUT_EFFECT)
    assert EmbeddingCreateParams.__annotations__.keys() <= EMBEDDING_FIELDS
    assert not (CHAT_FIELDS | COMPLETION_FIELDS | EMBEDDING_FIELDS) & set(WITHOUT_EFFECT)


@pytest.mark.parametrize("name", [*WITHOUT_EFFECT, "enable_magic", "__proto__"])
@pytest.mark.parametrize("read", [chat, completion])
def test_a_field_that_is_not_supported_is_refused(name: str, read: Any):
    assert refusal(read, **{name: {"a": "value"}}) == (422, name)


@pytest.mark.parametrize("name", WITHOUT_EFFECT)
def test_a_field_is_taken_with_the_value_that_asks_for_nothing(name: str):
    for value in (None, *WITHOUT_EFFECT[name]):
        assert chat(**{name: value}) == chat()


def test_best_of_may_be_as_many_as_are_shown():
    assert completion(n=2, best_of=2) == completion(n=2)
    assert refusal(completion, n=2, best_of=3) == (422, "best_of")


def test_the_bound_that_was_hit_is_named():
    for value, bound in ((1 << 63, str((1 << 63) - 1)), (-(1 << 64), str(-(1 << 63)))):
        with pytest.raises(Refusal, match=f"seed: .*{bound}"):
            chat(seed=value)


def test_an_unknown_field_is_refused_even_as_null():
    assert refusal(chat, unheard=None) == (422, "unheard")


def test_null_is_as_left_out():
    names = CHAT_FIELDS - {"model", "messages"}
    assert chat(**dict.fromkeys(names)) == chat()
    assert completion(**dict.fromkeys(COMPLETION_FIELDS - {"model", "prompt"})) == completion()


@pytest.mark.parametrize(
    ("name", "values"),
    [
        ("model", ["", 3, []]),
        ("messages", [[], "hello", [3], [{}], [{"role": "robot", "content": "x"}], [{"role": "user"}]]),
        ("max_tokens", [0, -1, 1.5, "4", True, 1 << 40]),
        ("max_completion_tokens", [0, "many"]),
        ("temperature", [-0.1, 2.1, "warm", float("inf"), True]),
        ("top_p", [-0.1, 1.1]),
        ("top_k", [-1, 0.5]),
        ("min_p", [-1, 2]),
        ("n", [0, 129, 1.0]),
        ("seed", [0.5, 1 << 63, "x"]),
        ("presence_penalty", [-2.1, 3]),
        ("frequency_penalty", ["x", 2.5]),
        ("repetition_penalty", [0, -1, 1000]),
        ("logit_bias", [[], {"a": 1}, {"-1": 1}, {"1": 101}, {"1": "x"}, {str(i): 1 for i in range(1025)}]),
        ("logprobs", [2, "yes"]),
        ("top_logprobs", [1]),
        ("stop", [3, ["a"] * 17, [""], [1], "x" * 501]),
        ("stream", [1, "true"]),
        ("stream_options", [{"include_usage": True}, 3]),
        ("user", [3]),
        ("tools", [{}, [3], [{}], [{"type": "function"}], [WEATHER] * 2]),
        ("tool_choice", ["always", "required", {"type": "function", "function": {"name": "x"}}, 3]),
        ("parallel_tool_calls", ["no"]),
        ("response_format", ["json", {"type": "xml"}, {"type": "json_schema"}]),
        ("chat_template_kwargs", [{"tools": 1}, {"messages": "x"}, {"X": 1}, {"a": []}, []]),
    ],
)
def test_a_value_of_the_wrong_type_or_range_is_refused(name: str, values: list[Any]):
    for value in values:
        status, param = refusal(chat, **{name: value})
        assert status == 400 and param is not None and param.startswith(name), (value, status, param)


@pytest.mark.parametrize(
    ("fields", "param"),
    [
        ({"messages": [{"role": "user", "content": [IMAGE]}]}, "messages[0].content[0]"),
        ({"messages": [{"role": "user", "content": "x", "weight": 1}]}, "messages[0]"),
        ({"messages": [{"role": "assistant", "content": "x", "audio": {"id": "x"}}]}, "messages[0]"),
        ({"tools": [{"type": "custom", "custom": {"name": "x"}}]}, "tools[0]"),
        ({"tools": [{"type": "function", "function": {"name": "x", "strict": True}}]}, "tools[0].function.strict"),
        ({"tools": [{"type": "function", "function": {"name": "x", "returns": {}}}]}, "tools[0].function"),
        ({"tools": [WEATHER], "tool_choice": {"type": "allowed_tools"}}, "tool_choice"),
        ({"tools": [WEATHER], "response_format": {"type": "json_object"}}, "response_format"),
        ({"response_format": {"type": "json_object", "grammar": "x"}}, "response_format"),
        ({"stream": True, "stream_options": {"include_obfuscation": True}}, "stream_options"),
        ({"stream": True, "stream_options": {"chunk": 1}}, "stream_options"),
    ],
)  # fmt: skip
def test_what_is_not_supported_inside_of_fields_is_refused(fields: dict[str, Any], param: str):
    assert refusal(chat, **fields) == (422, param)


@pytest.mark.parametrize("prompt", [None, 3, [], [[]], [1, "x"], [["x"]], [-1], [True], [[1], 2]])
def test_a_prompt_that_is_none(prompt: Any):
    assert refusal(completion, prompt=prompt) == (400, "prompt")


def embedding(**fields: Any) -> Asked:
    return read_embedding({"model": "m", "input": "hello", **fields})


def test_a_body_that_asks_for_vectors():
    assert embedding(input=["a", [1, 2]], encoding_format="base64", dimensions=4, user="me").prompts == ("a", (1, 2))
    assert (embedding().vectors, embedding(dimensions=4).dimensions, embedding().source) == ("float", 4, "input")
    assert refusal(embedding, temperature=1) == (422, "temperature")
    for name, values in {
        "input": [None, 3, [], [[]], ["x"] * 129],
        "encoding_format": ["int8", {}],
        "dimensions": [0, "4"],
        "model": ["", 3],
        "user": [3],
    }.items():
        for value in values:
            assert refusal(embedding, **{name: value}) == (400, name), value


def test_prompts():
    assert completion(prompt=["a", "b"]).prompts == ("a", "b")
    assert completion(prompt=[1, 2]).prompts == ((1, 2),)
    assert completion(prompt=[[1, 2], "c"]).prompts == ((1, 2), "c")
    assert completion().max_tokens == 16
    assert refusal(completion, max_tokens=0) == (400, "max_tokens")
    assert completion(max_tokens=0, echo=True).max_tokens == 0
    assert refusal(completion, prompt=["x"] * 65, n=2) == (400, "prompt")


def test_messages_become_what_templates_take():
    call = {"id": "call_1", "type": "function", "function": {"name": "weather", "arguments": '{"city": "Rome"}'}}
    asked = chat(
        messages=[
            {"role": "system", "content": [{"type": "text", "text": "be "}, {"type": "text", "text": "kind"}]},
            {"role": "assistant", "content": None, "tool_calls": [call]},
            {"role": "tool", "tool_call_id": "call_1", "content": "sunny"},
            {"role": "assistant", "refusal": "no"},
        ]
    )
    assert [message["content"] for message in asked.messages] == ["be kind", "", "sunny", "no"]
    assert asked.messages[1]["tool_calls"][0]["function"]["arguments"] == {"city": "Rome"}
    broken = {**call, "function": {"name": "weather", "arguments": "{"}}
    messages = [{"role": "assistant", "tool_calls": [broken]}]
    assert refusal(chat, messages=messages) == (400, "messages[0].tool_calls[0].function")
    assert refusal(chat, messages=[{"role": "tool", "content": "x"}]) == (400, "messages[0].tool_call_id")


def test_tool_choices():
    clock = {"type": "function", "function": {"name": "clock"}}
    free = chat(tools=[WEATHER, clock]).tools
    assert set(free.callable) == {"weather", "clock"} and free.force is None and free.several
    forced = chat(tools=[WEATHER, clock], tool_choice={"type": "function", "function": {"name": "clock"}}).tools
    assert forced.callable == {"clock": {}} and forced.force == "named" and len(forced.shown) == 2
    assert chat(tools=[WEATHER], tool_choice="required", parallel_tool_calls=False).tools.force == "required"
    none = chat(tools=[WEATHER], tool_choice="none").tools
    assert not none.callable and not none.shown


def test_the_smaller_limit_holds():
    assert chat(max_tokens=5, max_completion_tokens=3).max_tokens == 3
    assert chat().max_tokens is None


BROKEN: list[bytes] = [
    *(b"", b"{", b"[]", b"3", b"null", b'"x"', b"\xff\xfe"),
    *(b'{"a": NaN}', b'{"a": Infinity}', b'{"a": "\\ud800"}', b'{"\\udfff": 1}'),
    *(b"[" * 200_000, b'{"a":' * 100_000, b'{"a": ' + b"9" * 5000 + b"}"),
]


@pytest.mark.parametrize("raw", BROKEN, ids=lambda raw: repr(raw[:16]))
def test_a_body_that_is_no_json_object(raw: bytes):
    with pytest.raises(Refusal) as caught:
        read_json(raw)
    assert caught.value.status == 400
    json.dumps(caught.value.body, ensure_ascii=False).encode()
