"""The official client against a real server over a real engine: every answer in OpenAI's wire format."""

from __future__ import annotations

import asyncio
import json
import os
import random
import time
from collections.abc import Iterator
from typing import Any

import openai
import pytest

from tests.serve.serving import END, POSITIONS, Serving, byte_tokenizer, serving
from vblackwell.serve.http import grammar

MESSAGES: Any = [{"role": "user", "content": "Tell me é."}]
CITY = {
    "type": "object",
    "properties": {"city": {"enum": ["Paris", "Rome"]}, "days": {"enum": [1, 2]}},
    "required": ["city", "days"],
    "additionalProperties": False,
}
TOOLS: Any = [
    {"type": "function", "function": {"name": "weather", "description": "of a city", "parameters": CITY}},
    {"type": "function", "function": {"name": "clock"}},
]


@pytest.fixture(scope="module")
def server() -> Iterator[Serving]:
    with serving({"tiny": (0, POSITIONS), "owner/other": (1, 64)}) as made:
        yield made


@pytest.fixture(scope="module")
def client(server: Serving) -> Iterator[openai.OpenAI]:
    with openai.OpenAI(base_url=f"{server.url}/v1", api_key="any", max_retries=0) as made:
        yield made


@pytest.fixture
def chat(client: openai.OpenAI) -> Any:
    def ask(**options: Any) -> Any:
        given: Any = {"model": "tiny", "messages": MESSAGES, "max_tokens": 12, "seed": 5, **options}
        return client.chat.completions.create(**given)

    return ask


@pytest.fixture
def complete(client: openai.OpenAI) -> Any:
    def ask(**options: Any) -> Any:
        given: Any = {"model": "tiny", "prompt": "Once upon", "max_tokens": 12, "seed": 5, **options}
        return client.completions.create(**given)

    return ask


def refused(ask: Any, kind: type[openai.APIStatusError], **options: Any) -> Any:
    """The error object that a request gets."""
    with pytest.raises(kind) as caught:
        ask(**options)
    body: Any = caught.value.body
    assert {"message", "type", "param", "code"} == set(body)
    return caught.value


# -- models ------------------------------------------------------------------------------------------------------------


def test_models_are_listed_with_their_state(client: openai.OpenAI):
    first, second = client.models.list().data
    assert (first.id, second.id) == ("tiny", "owner/other")
    assert first.to_dict()["state"] in ("asleep", "loading", "awake")
    assert (first.to_dict()["max_model_len"], first.to_dict()["pinned"]) == (POSITIONS, False)
    assert client.models.retrieve("owner/other").id == "owner/other"
    with pytest.raises(openai.NotFoundError):
        client.models.retrieve("../tiny")


@pytest.mark.parametrize("name", ["unknown", "/etc/passwd", "../tiny", "owner/unknown"])
def test_a_model_that_is_not_served(chat: Any, complete: Any, name: str):
    assert refused(chat, openai.NotFoundError, model=name).code == "model_not_found"
    assert refused(complete, openai.NotFoundError, model=name).code == "model_not_found"


def test_embeddings_are_refused_with_the_reason(client: openai.OpenAI):
    with pytest.raises(openai.BadRequestError, match="no embeddings"):
        client.embeddings.create(model="tiny", input="x")
    with pytest.raises(openai.NotFoundError):
        client.embeddings.create(model="unknown", input="x")


# -- chats -------------------------------------------------------------------------------------------------------------


def test_a_chat(chat: Any):
    answer = chat()
    (choice,) = answer.choices
    assert answer.object == "chat.completion" and answer.id.startswith("chatcmpl-") and answer.model == "tiny"
    assert choice.message.role == "assistant" and choice.message.content and choice.finish_reason == "length"
    assert choice.logprobs is None and choice.message.tool_calls is None
    usage = answer.usage
    assert usage.completion_tokens == 12 and usage.total_tokens == usage.prompt_tokens + 12
    assert usage.prompt_tokens_details.cached_tokens >= 0


def test_a_seed_gives_the_same_text_again_and_none_gives_others(chat: Any):
    texts = {chat(max_tokens=16).choices[0].message.content for _ in range(2)}
    assert len(texts) == 1
    assert len({chat(max_tokens=16, seed=None).choices[0].message.content for _ in range(2)}) > 1


def test_a_prompt_that_was_read_before_is_cached(chat: Any):
    long = [{"role": "user", "content": "cached " * 40}]
    assert chat(messages=long).usage.prompt_tokens_details.cached_tokens == 0
    usage = chat(messages=long).usage
    assert 0 < usage.prompt_tokens_details.cached_tokens < usage.prompt_tokens


def test_a_stream_is_the_text_in_chunks(chat: Any):
    whole = chat(max_tokens=20, temperature=0).choices[0].message.content
    chunks = list(chat(max_tokens=20, temperature=0, stream=True))
    assert len({chunk.id for chunk in chunks}) == 1 and {chunk.object for chunk in chunks} == {"chat.completion.chunk"}
    first, *rest = [chunk.choices[0] for chunk in chunks]
    assert first.delta.role == "assistant" and first.delta.content == ""
    assert all(choice.delta.role is None for choice in rest)
    assert [choice.finish_reason for choice in rest] == [None] * (len(rest) - 1) + ["length"]
    assert "".join(choice.delta.content or "" for choice in rest) == whole
    assert all(chunk.usage is None for chunk in chunks)


def test_a_stream_ends_with_the_usage_where_it_is_asked_for(chat: Any):
    *chunks, last = chat(stream=True, stream_options={"include_usage": True})
    assert not last.choices and last.usage.completion_tokens == 12
    assert last.usage.total_tokens == last.usage.prompt_tokens + 12
    assert all(chunk.usage is None and chunk.choices for chunk in chunks)


def test_several_choices(chat: Any):
    answer = chat(n=3)
    assert [choice.index for choice in answer.choices] == [0, 1, 2]
    assert answer.usage.completion_tokens == 36 and answer.usage.prompt_tokens < 40
    # the n-th text is that of the n-th seed
    assert answer.choices[2].message.content == chat(seed=7).choices[0].message.content
    texts = ["", "", ""]
    for chunk in chat(n=3, stream=True):
        texts[chunk.choices[0].index] += chunk.choices[0].delta.content or ""
    assert texts == [choice.message.content for choice in answer.choices]


def test_logprobs_of_a_chat(chat: Any):
    answer = chat(logprobs=True, top_logprobs=3, temperature=0)
    told = answer.choices[0].logprobs.content
    assert len(told) == 12 and answer.choices[0].logprobs.refusal is None
    for token in told:
        assert token.logprob <= 0 and len(token.top_logprobs) == 3
        # without temperature the likeliest token is taken
        assert token.top_logprobs[0].logprob == token.logprob and token.top_logprobs[0].bytes == token.bytes
    raw = b"".join(bytes(token.bytes) for token in told)
    assert raw.decode(errors="replace") == answer.choices[0].message.content
    streamed = list(chat(logprobs=True, top_logprobs=3, temperature=0, stream=True))
    pieces = [chunk.choices[0].logprobs for chunk in streamed if chunk.choices[0].logprobs]
    assert [token for piece in pieces for token in piece.content] == told
    assert chat(logprobs=True).choices[0].logprobs.content[0].top_logprobs == []


def test_the_end_token_ends_a_text_and_is_not_shown(chat: Any):
    bias = {"256": 100}
    answer = chat(logit_bias=bias, logprobs=True)
    assert answer.choices[0].finish_reason == "stop" and answer.choices[0].message.content == ""
    assert answer.choices[0].logprobs.content == [] and answer.usage.completion_tokens == 1


@pytest.mark.parametrize("stream", [False, True])
def test_stop_strings_are_never_shown(chat: Any, stream: bool):
    text = chat(max_tokens=40, temperature=0).choices[0].message.content
    stop = text[15:18]
    assert len(stop) == 3 and text.index(stop) > 0
    given: Any = {"max_tokens": 40, "temperature": 0, "stop": ["never there", stop], "stream": stream, "logprobs": True}
    if stream:
        choices = [chunk.choices[0] for chunk in chat(**given)]
        shown, finish = "".join(choice.delta.content or "" for choice in choices), choices[-1].finish_reason
        told = [token for choice in choices if choice.logprobs for token in choice.logprobs.content]
    else:
        (choice,) = chat(**given).choices
        shown, finish, told = choice.message.content, choice.finish_reason, choice.logprobs.content
    assert shown == text[: text.index(stop)] and finish == "stop"
    raw = b"".join(bytes(token.bytes) for token in told).decode(errors="replace")
    assert raw.startswith(shown) and stop not in raw


def test_characters_of_several_bytes_come_whole(chat: Any):
    """A grammar lets the model write nothing else."""
    form: Any = {"type": "json_schema", "json_schema": {"name": "x", "schema": {"const": "日本語 🚀 é"}}}
    chunks = [c.choices[0].delta.content or "" for c in chat(max_tokens=60, response_format=form, stream=True)]
    assert "".join(chunks) == '"日本語 🚀 é"' and "🚀" in chunks


def test_penalties_and_biases_reach_the_engine(chat: Any):
    plain = chat(temperature=0).choices[0].message.content
    assert chat(temperature=0, logit_bias={"40": 100}).choices[0].message.content != plain
    same = chat(temperature=0, logit_bias={"40": 90}, max_tokens=8).choices[0].message.content
    assert len(set(same)) == 1
    options: Any = {"frequency_penalty": 2, "presence_penalty": 2, "extra_body": {"repetition_penalty": 90.0}}
    assert len(set(chat(temperature=0, logit_bias={"40": 1}, max_tokens=8, **options).choices[0].message.content)) > 1


def test_values_of_the_template(chat: Any):
    """The folder's own; its refusals are told."""
    error = refused(chat, openai.BadRequestError, messages=[{"role": "user", "content": "x"}] * 1000)
    assert error.code == "context_length_exceeded" and error.param == "messages"
    plain = chat().usage.prompt_tokens
    assert chat(extra_body={"chat_template_kwargs": {"suffix": "12345"}}).usage.prompt_tokens == plain + 5


@pytest.mark.parametrize("name", ["limited", "refusal", "self", "spans", "values", "raise_exception", "thinking"])
def test_a_value_that_the_template_does_not_have(chat: Any, name: str):
    extra = {"chat_template_kwargs": {name: True}}
    assert refused(chat, openai.UnprocessableEntityError, extra_body=extra).param == "chat_template_kwargs"


def test_a_text_that_is_too_long_is_refused_and_never_cut(chat: Any, complete: Any):
    for ask in (chat, complete):
        assert refused(ask, openai.BadRequestError, max_tokens=POSITIONS).code == "context_length_exceeded"
    fits = complete(model="owner/other", prompt=[1] * 63, max_tokens=1)
    assert fits.usage.total_tokens == 64
    refused(complete, openai.BadRequestError, model="owner/other", prompt=[1] * 64, max_tokens=1)
    # without a number, a chat goes on as long as the model reads
    answer = chat(model="owner/other", max_tokens=None)
    assert answer.choices[0].finish_reason in ("stop", "length") and answer.usage.total_tokens <= 64


def test_a_token_that_the_model_does_not_have(complete: Any):
    assert refused(complete, openai.BadRequestError, prompt=[5000]).param == "prompt"
    assert refused(complete, openai.BadRequestError, logit_bias={"5000": 1}).param == "logit_bias"


@pytest.mark.parametrize("stream", [False, True])
def test_a_call_that_is_cut_off_does_not_become_text(chat: Any, stream: bool):
    answer = chat(tools=TOOLS, tool_choice="required", max_tokens=6, stream=stream)
    if stream:
        choices = [chunk.choices[0] for chunk in answer]
        assert not any(choice.delta.content for choice in choices)
        finish = choices[-1].finish_reason
    else:
        assert answer.choices[0].message.content is None
        finish = answer.choices[0].finish_reason
    assert finish == "length"


# -- tools and structured output ---------------------------------------------------------------------------------------


@pytest.mark.each_value
@pytest.mark.parametrize("stream", [False, True])
@pytest.mark.parametrize("choice", ["required", {"type": "function", "function": {"name": "weather"}}])
def test_a_tool_is_called(chat: Any, stream: bool, choice: Any):
    given: Any = {"tools": TOOLS[:1], "tool_choice": choice, "max_tokens": 500, "stream": stream}
    answer = chat(parallel_tool_calls=False, **given)
    if stream:
        choices = [chunk.choices[0] for chunk in answer]
        parts = [part for each in choices for part in each.delta.tool_calls or []]
        assert parts[0].id and parts[0].type == "function" and all(part.index == 0 for part in parts)
        assert all(part.id is None and part.function.name is None for part in parts[1:]) and len(parts) > 5
        name, text = parts[0].function.name, "".join(part.function.arguments for part in parts)
        assert not any(each.delta.content for each in choices)
        finish = choices[-1].finish_reason
    else:
        (call,) = answer.choices[0].message.tool_calls
        name, text, finish = call.function.name, call.function.arguments, answer.choices[0].finish_reason
        assert answer.choices[0].message.content is None
    arguments = json.loads(text)
    assert name == "weather" and arguments["city"] in ("Paris", "Rome") and arguments["days"] in (1, 2)
    assert finish == ("tool_calls" if choice == "required" else "stop")


def test_tools_that_may_be_called_are_in_the_prompt(chat: Any):
    plain, offered = chat().usage.prompt_tokens, chat(tools=TOOLS).usage.prompt_tokens
    assert offered > plain + 100
    assert chat(tools=TOOLS, tool_choice="none").usage.prompt_tokens == plain
    assert chat(tools=TOOLS).choices[0].message.content  # a random model calls none


def test_a_result_of_a_tool_is_taken(chat: Any):
    call = {"id": "c", "type": "function", "function": {"name": "clock", "arguments": "{}"}}
    messages = [
        *MESSAGES,
        {"role": "assistant", "tool_calls": [call]},
        {"role": "tool", "tool_call_id": "c", "content": "9"},
    ]
    assert chat(messages=messages, tools=TOOLS).usage.prompt_tokens > chat(tools=TOOLS).usage.prompt_tokens


def test_references_inside_of_parameters(chat: Any):
    schema = {"type": "object", "properties": {"at": {"$ref": "#/$defs/place"}}, "required": ["at"],
        "additionalProperties": False, "$defs": {"place": {"enum": ["here"]}}}  # fmt: skip
    tool: Any = {"type": "function", "function": {"name": "go", "parameters": schema}}
    answer = chat(tools=[tool], tool_choice="required", parallel_tool_calls=False, max_tokens=500)
    (call,) = answer.choices[0].message.tool_calls
    assert json.loads(call.function.arguments) == {"at": "here"}


def test_json_follows_its_schema(chat: Any):
    form: Any = {"type": "json_schema", "json_schema": {"name": "trip", "schema": CITY, "strict": True}}
    answer = chat(response_format=form, max_tokens=500).choices[0]
    value = json.loads(answer.message.content)
    assert answer.finish_reason == "stop" and set(value) == {"city", "days"} and value["city"] in ("Paris", "Rome")


def test_json_of_any_kind(chat: Any):
    """Whatever the tokens are, what there is of it is the beginning of an object."""
    text = chat(response_format={"type": "json_object"}, max_tokens=40).choices[0].message.content
    assert text.lstrip().startswith("{") and text.lstrip()[1:].lstrip()[:1] in ('"', "}", "")


def test_a_schema_that_is_none(chat: Any):
    form: Any = {"type": "json_schema", "json_schema": {"name": "x", "schema": {"type": "thing"}}}
    assert refused(chat, openai.BadRequestError, response_format=form).param == "response_format"


def nested(depth: int) -> dict[str, Any]:
    schema: dict[str, Any] = {}
    for _ in range(depth):
        schema = {"items": schema}
    return schema


SLOW = [{"type": "string", "pattern": f"^(.*a.{{{count}}}.*)$"} for count in range(1, 40)]


def chained(patterns: list[Any]) -> dict[str, Any]:
    """All of them at once, without allOf."""
    names = [f"#/$defs/{place}" for place in range(len(patterns))]
    links = [{"$ref": name} for name in names[1:]] + [{}]
    defs = {str(place): each | link for place, (each, link) in enumerate(zip(patterns, links, strict=True))}
    return {"$ref": names[0], "$defs": defs}


@pytest.mark.parametrize(
    "schema",
    [
        {"allOf": SLOW},
        {"allOf": SLOW[:5]},
        {"type": "string", "anyOf": SLOW},
        {"patternProperties": {each["pattern"]: {} for each in SLOW}},
        chained(SLOW),
        {"type": "string", "pattern": "^(a{1000}){1000}$"},
        {"type": "string", "pattern": "a|" * 3000},
        {"type": "string", "not": SLOW[0]},
        {"type": "number", "maximum": 10**400},
        {"type": "string", "x-guidance": {"coerce_one_of": True}},
        {"items": {"x-guidance": {}}},
        nested(70),
        nested(900),
    ],
    ids=lambda schema: str(schema)[:40],
)
def test_a_schema_that_is_not_compiled(chat: Any, schema: Any):
    form: Any = {"type": "json_schema", "json_schema": {"name": "x", "schema": schema}}
    tool: Any = {"type": "function", "function": {"name": "go", "parameters": schema}}
    begun = time.monotonic()
    assert refused(chat, openai.BadRequestError, response_format=form).param == "response_format"
    assert refused(chat, openai.BadRequestError, tools=[tool], tool_choice="required").param in ("tools", "messages")
    assert time.monotonic() - begun < 2


def test_patterns_that_do_not_meet_are_many(chat: Any):
    """And a schema that refers to itself is one like others."""
    pattern = {"type": "string", "pattern": "^[a-f]{2}$"}
    uuid = {"type": "string", "pattern": "^[0-9a-f]{8}-([0-9a-f]{4}-){3}[0-9a-f]{12}$"}
    properties = {f"p{place}": (pattern, uuid)[place % 2] for place in range(20)} | {
        "more": {"anyOf": [{"$ref": "#"}, {"type": "null"}]}
    }
    schema = {"type": "object", "properties": properties, "additionalProperties": False}
    form: Any = {"type": "json_schema", "json_schema": {"name": "x", "schema": schema}}
    assert chat(response_format=form).choices[0].message.content


def test_one_schema_is_compiled_at_a_time(chat: Any, monkeypatch: pytest.MonkeyPatch):
    monkeypatch.setattr("vblackwell.serve.http.grammar.COMPILE_SECONDS", 0.05)
    form: Any = {"type": "json_object"}
    with grammar._compiling:
        error = refused(chat, openai.RateLimitError, response_format=form)
    assert int(error.response.headers["retry-after"]) >= 1
    assert chat(response_format=form).choices[0].message.content


# -- completions -------------------------------------------------------------------------------------------------------


def test_a_completion(complete: Any):
    answer = complete()
    assert answer.object == "text_completion" and answer.id.startswith("cmpl-")
    assert answer.choices[0].text and answer.choices[0].finish_reason == "length"
    assert complete(prompt=[*b"abc"]).usage.prompt_tokens == 3
    assert (
        len(complete(max_tokens=None).choices[0].text) > 0 and complete(max_tokens=None).usage.completion_tokens == 16
    )


def test_a_stream_of_a_completion(complete: Any):
    whole = complete(temperature=0).choices[0].text
    chunks = list(complete(temperature=0, stream=True, stream_options={"include_usage": True}))
    assert "".join(chunk.choices[0].text for chunk in chunks[:-1]) == whole
    assert [chunk.choices[0].finish_reason for chunk in chunks[:-1]][-1] == "length" and chunks[-1].usage


def test_several_prompts(complete: Any):
    answer = complete(prompt=["one", "two"], n=2)
    assert [choice.index for choice in answer.choices] == [0, 1, 2, 3]
    alone = complete(prompt="two", seed=6)
    assert answer.choices[3].text == alone.choices[0].text
    assert answer.usage.prompt_tokens == 6 and answer.usage.completion_tokens <= 48


def test_echo_with_logprobs_tells_the_prompt(complete: Any):
    answer = complete(prompt="abc", echo=True, logprobs=2, max_tokens=4, temperature=0)
    told = answer.choices[0].logprobs
    assert answer.choices[0].text.startswith("abc")
    assert told.tokens[:3] == ["a", "b", "c"] and len(told.tokens) == 7 and told.text_offset[:4] == [0, 1, 2, 3]
    assert told.token_logprobs[0] is None and all(value <= 0 for value in told.token_logprobs[1:])
    assert told.top_logprobs[0] is None
    for token, value, top in zip(told.tokens[1:], told.token_logprobs[1:], told.top_logprobs[1:], strict=True):
        assert top[token] == value and len(top) in (2, 3)
    # what the model says of a prompt is what it said when it wrote that
    written = [byte_tokenizer().token_to_id(letter) for letter in "abc"]
    longest = complete(prompt="a" * 1024, echo=True, logprobs=0, max_tokens=0)  # all that the model reads
    assert len(longest.choices[0].logprobs.tokens) == 1024
    nothing = complete(prompt=written, echo=True, logprobs=0, max_tokens=0)
    assert nothing.usage.completion_tokens == 0 and nothing.choices[0].text == "abc"
    assert nothing.choices[0].logprobs.token_logprobs == told.token_logprobs[:3]


def test_a_harness_may_count_the_tokens_after_a_context(complete: Any):
    """As lm-eval's client does: the last token is the new one, also where it ends the text."""
    answer = complete(prompt="abcdef", echo=True, logprobs=1, max_tokens=1, logit_bias={"256": 100})
    told = answer.choices[0].logprobs
    assert len(told.token_logprobs) == 7 and told.tokens[-1] == END and answer.choices[0].text == "abcdef"


def test_a_harness_may_send_more_stop_strings_than_openai_takes(complete: Any):
    """lm-eval's client sends those of its task, up to five, and the end token's text."""
    text = complete(max_tokens=12, temperature=0).choices[0].text
    stops = ["\nclass", "\ndef", "\n#", "\nif", "\nprint", text[5:8], END]
    choice = complete(max_tokens=12, temperature=0, stop=stops).choices[0]
    assert choice.text == text[: text.index(text[5:8])] != text and choice.finish_reason == "stop"


def test_echo_of_tokens_and_without_logprobs(complete: Any):
    tokens = [byte_tokenizer().token_to_id(letter) for letter in "AB"]
    assert complete(prompt=tokens, echo=True).choices[0].text.startswith("AB")
    assert complete(prompt="AB", echo=True).choices[0].text.startswith("AB")
    first = next(iter(complete(prompt="AB", echo=True, stream=True)))
    assert first.choices[0].text == "AB"
    longest = complete(prompt="a" * 1024, echo=True, max_tokens=0)  # all that the model reads
    assert longest.choices[0].text == "a" * 1024 and longest.choices[0].finish_reason == "length"
    assert longest.usage.completion_tokens == 0
    refused(complete, openai.BadRequestError, prompt="a" * 1025, echo=True, max_tokens=0)
    refused(complete, openai.BadRequestError, prompt="a" * 1024, echo=True, max_tokens=1)


def test_an_empty_prompt_begins_a_document(complete: Any):
    assert complete(prompt="").usage.prompt_tokens == 1


# -- many at once ------------------------------------------------------------------------------------------------------


def test_many_clients_get_what_each_would_get_alone(server: Serving, chat: Any):
    alone = [chat(seed=seed, max_tokens=8).choices[0].message.content for seed in range(6)]

    async def together() -> list[Any]:
        async with openai.AsyncOpenAI(base_url=f"{server.url}/v1", api_key="any", max_retries=0) as client:
            asked: list[Any] = [
                {"model": "tiny", "messages": MESSAGES, "max_tokens": 8, "seed": seed} for seed in range(6)
            ]
            return await asyncio.gather(*(client.chat.completions.create(**each) for each in asked))

    answers = asyncio.run(together())
    assert [answer.choices[0].message.content for answer in answers] == alone


def load(rng: random.Random) -> dict[str, Any]:
    """A chat or a completion with all that tells its bits: greedy or seeded, alone or streamed, often with a beginning
    that others have too."""
    words = MESSAGES[0]["content"] * rng.randrange(1, 4) + rng.choice(["", "And again?", "é" * rng.randrange(30)])
    given: dict[str, Any] = {"model": rng.choice(["tiny", "owner/other"]), "max_tokens": rng.randrange(1, 16)}
    given |= {"temperature": 0} if rng.random() < 0.6 else {"seed": rng.randrange(5)}
    given |= {"stream": rng.random() < 0.5, "n": rng.choice([1, 1, 1, 3])}
    if rng.random() < 0.6:
        return given | {"messages": [{"role": "user", "content": words}], "logprobs": True, "top_logprobs": 2}
    return given | {"prompt": words, "logprobs": 2, "echo": rng.random() < 0.5}


async def told(client: openai.AsyncOpenAI, given: dict[str, Any]) -> dict[int, list[Any]]:
    """By text its characters, why it ended, and what its tokens' probabilities were."""
    asked: Any = client.chat.completions if "messages" in given else client.completions
    answer = await asked.create(**given)
    found: dict[int, list[Any]] = {}
    for part in [part async for part in answer] if given["stream"] else [answer]:
        for choice in part.choices:
            text, finish, probabilities = found.setdefault(choice.index, ["", None, []])
            said = getattr(choice, "delta", None) or getattr(choice, "message", None)
            text += (choice.text if said is None else said.content) or ""
            if choice.logprobs is not None:
                each = choice.logprobs.model_dump()
                probabilities += each["content"] if said else zip(each["tokens"], each["token_logprobs"], strict=True)
            found[choice.index] = [text, choice.finish_reason or finish, probabilities]
    assert len(found) == given["n"] and all(finish in ("stop", "length") for _, finish, _ in found.values())
    return found


@pytest.mark.slow
def test_sixty_four_clients_get_whole_answers_that_are_those_of_each_request_alone():
    """For VB_SOAK_SECONDS, by default 6, with room for fewer texts to wait and pages for fewer to be written: who gets
    429 tries again. VB_SOAK_SEED draws other requests."""
    seconds, rng = float(os.environ.get("VB_SOAK_SECONDS", "6")), random.Random(int(os.environ.get("VB_SOAK_SEED", 1)))
    given = [load(rng) for _ in range(40)]
    models = {"tiny": (0, POSITIONS), "owner/other": (1, 256)}
    answered, busy = [0] * 64, 0

    def client(url: str) -> openai.AsyncOpenAI:
        return openai.AsyncOpenAI(base_url=f"{url}/v1", api_key="any", max_retries=0, timeout=120)

    async def one_by_one(url: str) -> list[dict[int, list[Any]]]:
        async with client(url) as one:
            return [await told(one, each) for each in given]

    async def together(url: str, alone: list[dict[int, list[Any]]]) -> None:
        async def one(number: int, shared: openai.AsyncOpenAI) -> None:
            nonlocal busy
            drawn, end = random.Random(number), time.monotonic() + seconds
            while time.monotonic() < end or not answered[number]:
                which = drawn.randrange(len(given))
                try:
                    assert await told(shared, given[which]) == alone[which], given[which]
                    answered[number] += 1
                except openai.RateLimitError as error:
                    assert int(error.response.headers["retry-after"]) >= 1 and error.code == "queue_full"
                    busy += 1
                    await asyncio.sleep(drawn.uniform(0.05, 0.5))

        async with client(url) as shared:
            await asyncio.gather(*(one(number, shared) for number in range(64)))

    with serving(models) as made:
        alone = asyncio.run(one_by_one(made.url))
    with serving(models, max_waiting=24, cache_bytes=272 << 10) as made:  # 1,088 positions
        asyncio.run(together(made.url, alone))
        made.until_idle()
        state = made.engine.state()
        assert state.alive and state.pages_used == 0
    assert busy > 0 and min(answered) > 0, (busy, answered)


def test_a_stream_in_asyncio_that_is_left(server: Serving):
    async def leave() -> str:
        async with openai.AsyncOpenAI(base_url=f"{server.url}/v1", api_key="any", max_retries=0) as client:
            given: Any = {"model": "tiny", "messages": MESSAGES, "max_tokens": 900}
            async with await client.chat.completions.create(**given, stream=True) as stream:
                async for chunk in stream:
                    if chunk.choices[0].delta.content:
                        return chunk.choices[0].delta.content
        return ""

    assert asyncio.run(leave())
    server.until_idle()
    assert server.engine.state().pages_used == 0


def test_models_are_told_apart(chat: Any):
    texts = {chat(model=name, temperature=0).choices[0].message.content for name in ("tiny", "owner/other")}
    assert len(texts) == 2
