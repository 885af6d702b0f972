"""OpenAI's wire format: bodies to values, and values to bodies. Every field is known by name: what is not supported is
refused with 422, what has the wrong type or range with 400, and nothing is ignored. No engine and no HTTP is here.
"""

import json
import re
import secrets
import time
from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass, field
from typing import Any

from vblackwell.generate.sampling import Sampling
from vblackwell.serve.http.answer import Answer, Chosen, Piece
from vblackwell.serve.http.conversation import Tools, read_messages, read_tools
from vblackwell.serve.http.embedding import told
from vblackwell.serve.http.refusal import invalid, number, only, parsed, typed, unsupported
from vblackwell.serve.request import MAX_BIASES

MAX_CHOICES, MAX_STOPS, MAX_STOP_LENGTH = 128, 16, 500  # of one request; lm-eval sends more stops than OpenAI takes
DEFAULT_COMPLETION_TOKENS = 16  # OpenAI's


@dataclass(frozen=True)
class Asked:
    """A request of either endpoint. ``prompts``: texts or tokens; a chat has ``messages`` instead. ``max_tokens``: None
    for all that the model's limit leaves. ``logprobs``: of how many likeliest tokens, None for none. ``schema``: what
    the text must follow. ``template``: values for the chat template. ``vectors``: the format of the vectors that are
    asked for instead of texts, with so many ``dimensions``, None for all. Others as in OpenAI's reference."""

    model: str
    n: int
    max_tokens: int | None
    sampling: Sampling
    seed: int | None
    penalties: Mapping[str, float]
    logit_bias: Mapping[int, float]
    logprobs: int | None
    stop: tuple[str, ...]
    stream: bool
    include_usage: bool
    prompts: tuple[str | tuple[int, ...], ...] = ()
    echo: bool = False
    messages: tuple[dict[str, Any], ...] = ()
    tools: Tools = field(default_factory=Tools)
    schema: Mapping[str, Any] | None = None
    template: Mapping[str, Any] = field(default_factory=dict)
    vectors: str | None = None
    dimensions: int | None = None

    @property
    def source(self) -> str:
        """The field that the texts are from."""
        return "messages" if self.messages else "prompt" if self.vectors is None else "input"


_SHARED = {
    "model", "n", "max_tokens", "temperature", "top_p", "top_k", "min_p", "seed", "repetition_penalty", "user",
    "presence_penalty", "frequency_penalty", "logit_bias", "logprobs", "stop", "stream", "stream_options",
}  # fmt: skip
CHAT_FIELDS = _SHARED | {
    "messages", "max_completion_tokens", "top_logprobs", "tools", "tool_choice", "parallel_tool_calls",
    "response_format", "chat_template_kwargs",
}  # fmt: skip
COMPLETION_FIELDS = _SHARED | {"prompt", "echo"}
EMBEDDING_FIELDS = {"model", "input", "encoding_format", "dimensions", "user"}
# Fields of OpenAI's schema that are taken with a value that asks for nothing, as null does.
WITHOUT_EFFECT: dict[str, tuple[Any, ...]] = {
    "store": (False,), "modalities": (["text"],), "service_tier": ("auto", "default"), "best_of": (1,), "suffix": ("",),
    "audio": (), "prediction": (), "metadata": ({},), "reasoning_effort": (), "verbosity": (), "moderation": (),
    "web_search_options": (), "functions": (), "function_call": (), "safety_identifier": (), "prompt_cache_key": (),
    "prompt_cache_retention": (), "prompt_cache_options": (),
}  # fmt: skip
# What the server gives templates itself.
_OWN = {
    "messages", "tools", "documents", "chat_template", "conversations", "add_generation_prompt",
    "continue_final_message", "return_assistant_tokens_mask",
}  # fmt: skip


def read_json(raw: bytes) -> dict[str, Any]:
    """The object that a body is; raises Refusal."""
    try:
        body = parsed(raw.decode())
    except ValueError as error:
        raise invalid(None, f"the body is not JSON: {str(error)[:200]}") from error
    if not isinstance(body, dict):
        raise invalid(None, "the body is no JSON object")
    return body


def _fields(body: dict[str, Any], known: set[str]) -> dict[str, Any]:
    """What was given, without what has no effect: null is as if left out."""
    for name, value in body.items():
        neutral = WITHOUT_EFFECT.get(name)
        if name == "best_of" and type(value) is int and value == body.get("n"):
            continue  # as many as are shown
        if name not in known and (neutral is None or not (value is None or value in neutral)):
            raise unsupported(
                name[:100], "this server does not support it: leave it out; `vb docs serve` lists what it does"
            )
    return {name: value for name, value in body.items() if value is not None and name in known}


def _shared(given: dict[str, Any], max_tokens: int | None, logprobs: int | None) -> dict[str, Any]:
    """Fields of `Asked` that both endpoints have."""
    if not typed(given, "model", str):
        raise invalid("model", "the name of a model that is served is needed; GET /v1/models lists them")
    stream, options = typed(given, "stream", bool, False), typed(given, "stream_options", dict, {})
    if "stream_options" in given and not stream:
        raise invalid("stream_options", "it is only for stream")
    only(options, {"include_usage", "include_obfuscation"}, "stream_options")
    if options.get("include_obfuscation") not in (None, False):
        raise unsupported("stream_options", "include_obfuscation is not supported: leave it out")
    stop = given.get("stop", [])
    stops = [stop] if isinstance(stop, str) else stop
    if not isinstance(stops, list) or len(stops) > MAX_STOPS or not all(map(_is_stop, stops)):
        raise invalid("stop", f"up to {MAX_STOPS} strings of 1 to {MAX_STOP_LENGTH} characters are needed")
    biases = typed(given, "logit_bias", dict, {})
    if len(biases) > MAX_BIASES or not all(re.fullmatch("[0-9]{1,9}", token) for token in biases):
        raise invalid("logit_bias", f"up to {MAX_BIASES} numbers of tokens are needed")
    typed(given, "user", str, "")
    penalties = {name: float(number(given, name, -2, 2, 0.0)) for name in ("presence_penalty", "frequency_penalty")}
    top_p = float(number(given, "top_p", 0, 1, 1.0))
    return {
        "model": given["model"],
        "n": number(given, "n", 1, MAX_CHOICES, 1, whole=True),
        "max_tokens": max_tokens,
        "sampling": Sampling(
            float(number(given, "temperature", 0, 2, 1.0)),
            number(given, "top_k", 0, 1 << 30, 0, whole=True),
            top_p or 1e-9,  # OpenAI allows 0: the likeliest token
            float(number(given, "min_p", 0, 1, 0.0)),
        ),
        "seed": number(given, "seed", -(1 << 63), (1 << 63) - 1, None, whole=True),
        "penalties": penalties | {"repetition_penalty": float(number(given, "repetition_penalty", 0.01, 100, 1.0))},
        "logit_bias": {int(each): float(number(biases, each, -100, 100, None, where="logit_bias.")) for each in biases},
        "logprobs": logprobs,
        "stop": tuple(stops),
        "stream": stream,
        "include_usage": bool(options.get("include_usage") and typed(options, "include_usage", bool)),
    }


def _is_stop(value: Any) -> bool:
    return isinstance(value, str) and 0 < len(value) <= MAX_STOP_LENGTH


def _is_tokens(value: Any) -> bool:
    return isinstance(value, list) and bool(value) and all(type(each) is int and 0 <= each < 1 << 31 for each in value)


def read_completion(body: dict[str, Any]) -> Asked:
    """The body of /v1/completions; raises Refusal."""
    given, echo = _fields(body, COMPLETION_FIELDS), typed(body, "echo", bool, None)
    most = number(given, "max_tokens", 0 if echo else 1, 1 << 30, DEFAULT_COMPLETION_TOKENS, whole=True)
    shared = _shared(given, most, number(given, "logprobs", 0, 5, None, whole=True))
    return Asked(**shared, prompts=_prompts(given, "prompt", shared["n"]), echo=bool(echo))


def _prompts(given: dict[str, Any], name: str, n: int) -> tuple[str | tuple[int, ...], ...]:
    prompt = given.get(name)
    prompts: Any = [prompt] if isinstance(prompt, str) or _is_tokens(prompt) else prompt
    if not isinstance(prompts, list) or not prompts or not all(isinstance(e, str) or _is_tokens(e) for e in prompts):
        raise invalid(name, "a text, a list of numbers of tokens, or a list of either, is needed")
    if (count := len(prompts) * n) > MAX_CHOICES:
        raise invalid(name, f"with n these are {count} texts: at most {MAX_CHOICES} are written at once")
    return tuple(each if isinstance(each, str) else tuple(each) for each in prompts)


def read_embedding(body: dict[str, Any]) -> Asked:
    """The body of /v1/embeddings; raises Refusal."""
    given = _fields(body, EMBEDDING_FIELDS)
    if (form := given.get("encoding_format", "float")) not in ("float", "base64"):
        raise invalid("encoding_format", "float or base64 is needed")
    length = number(given, "dimensions", 1, 1 << 30, None, whole=True)
    shared = _shared(given, 0, None)
    return Asked(**shared, prompts=_prompts(given, "input", 1), vectors=form, dimensions=length)


def read_chat(body: dict[str, Any]) -> Asked:
    """The body of /v1/chat/completions; raises Refusal."""
    given = _fields(body, CHAT_FIELDS)
    messages = read_messages(typed(given, "messages", list, []))
    limits = [number(given, name, 1, 1 << 30, None, whole=True) for name in ("max_completion_tokens", "max_tokens")]
    most = min((limit for limit in limits if limit is not None), default=None)
    tell, top = typed(given, "logprobs", bool, False), number(given, "top_logprobs", 0, 20, None, whole=True)
    if top is not None and not tell:
        raise invalid("top_logprobs", "it is only for logprobs")
    schema, tools = _schema(typed(given, "response_format", dict, {})), read_tools(given)
    if schema is not None and tools.callable:
        raise unsupported("response_format", "it is not supported next to tools: set tool_choice to 'none'")
    template = typed(given, "chat_template_kwargs", dict, {})
    for name, value in template.items():
        if (
            not re.fullmatch("[a-z][a-z_]{0,63}", name)
            or name in _OWN
            or not isinstance(value, bool | int | float | str)
        ):
            raise invalid("chat_template_kwargs", "names that the template knows with plain values are needed")
    shared = _shared(given, most, (top or 0) if tell else None)
    return Asked(**shared, messages=messages, tools=tools, schema=schema, template=template)


def _schema(form: dict[str, Any]) -> dict[str, Any] | None:
    """What a ``response_format`` asks of the text."""
    kind, inner = form.get("type", "text"), form.get("json_schema")
    only(form, {"type"} | ({"json_schema"} if kind == "json_schema" else set()), "response_format")
    if kind in ("text", "json_object"):
        return {"type": "object"} if kind == "json_object" else None
    if kind != "json_schema" or not isinstance(inner, dict) or not isinstance(inner.get("schema"), dict):
        need = "type text, json_object, or json_schema with json_schema.schema, an object, is needed"
        raise invalid("response_format", need)
    only(inner, {"name", "description", "schema", "strict"}, "response_format.json_schema")
    return inner["schema"]


class Reply:
    """Bodies of the answer to ``asked``: of a stream each has the same id."""

    def __init__(self, asked: Asked) -> None:
        self._asked, self._chat = asked, bool(asked.messages)
        self._head = {
            "id": f"{'chatcmpl' if self._chat else 'cmpl'}-{secrets.token_hex(12)}",
            "object": "chat.completion" if self._chat else "text_completion",
            "created": int(time.time()),
            "model": asked.model,
        }

    def _chunk(self, choices: list[dict[str, Any]], usage: dict[str, Any] | None = None) -> dict[str, Any]:
        head = self._head | ({"object": "chat.completion.chunk"} if self._chat else {})
        return head | {"choices": choices} | ({"usage": usage} if self._asked.include_usage else {})

    def first(self, index: int) -> dict[str, Any] | None:
        """What a stream begins with for text number ``index``."""
        delta = {"role": "assistant", "content": None if self._asked.tools.force else "", "refusal": None}
        choice = {"index": index, "delta": delta, "logprobs": None, "finish_reason": None}
        return self._chunk([choice]) if self._chat else None

    def pieces(self, piece: Piece) -> Iterable[dict[str, Any]]:
        """Chunks of a stream: what ``piece`` says, and in one of its own why it ends."""
        logprobs = self._logprobs(piece.chosen)
        if not self._chat:
            choice = {"index": piece.index, "text": piece.text, "logprobs": logprobs, "finish_reason": piece.finish}
            return [self._chunk([choice])]
        deltas = [{"tool_calls": [_call_delta(call)]} for call in piece.calls]
        # where a call must come, text is the beginning of one that was cut off
        deltas = ([{"content": piece.text}] if piece.text and not self._asked.tools.force else []) + deltas
        if not deltas and piece.chosen:
            deltas = [{}]
        told = [
            {"index": piece.index, "delta": delta, "logprobs": None if place else logprobs, "finish_reason": None}
            for place, delta in enumerate(deltas)
        ]
        if piece.finish is not None:
            told.append({"index": piece.index, "delta": {}, "logprobs": None, "finish_reason": piece.finish})
        return [self._chunk([choice]) for choice in told]

    def last(self, answers: Sequence[Answer]) -> dict[str, Any] | None:
        """What a stream ends with where usage was asked for."""
        return self._chunk([], usage(answers)) if self._asked.include_usage else None

    def whole(self, pieces: Sequence[Piece], answers: Sequence[Answer]) -> dict[str, Any]:
        """The answer in one body."""
        if self._asked.vectors is not None:
            vectors = [_vector(each, self._asked) for each in answers]
            data = [{"object": "embedding", "index": at, "embedding": each} for at, each in enumerate(vectors)]
            read = {name: usage(answers)[name] for name in ("prompt_tokens", "total_tokens")}
            return {"object": "list", "data": data, "model": self._asked.model, "usage": read}
        choices = [self._choice(index, [p for p in pieces if p.index == index]) for index in range(len(answers))]
        return self._head | {"choices": choices, "usage": usage(answers)}

    def _choice(self, index: int, pieces: Sequence[Piece]) -> dict[str, Any]:
        forced = bool(self._asked.tools.force)
        text = "" if forced else "".join(piece.text for piece in pieces)
        chosen = [each for piece in pieces for each in piece.chosen]
        end = {"index": index, "logprobs": self._logprobs(chosen), "finish_reason": pieces[-1].finish}
        if not self._chat:
            return {"text": text} | end
        calls = list[dict[str, Any]]()
        for part in (part for piece in pieces for part in piece.calls):
            if part.name is not None:
                calls.append({"id": part.id, "type": "function", "function": {"name": part.name, "arguments": ""}})
            calls[part.index]["function"]["arguments"] += part.arguments
        message = {"role": "assistant", "content": text or (None if calls or forced else ""), "refusal": None}
        return {"message": message | ({"tool_calls": calls} if calls else {})} | end

    def _logprobs(self, chosen: Sequence[Chosen]) -> dict[str, Any] | None:
        if self._asked.logprobs is None or (self._asked.stream and not chosen):
            return None
        if self._chat:
            content = [
                _token(each.text, each.raw, each.logprob) | {"top_logprobs": [_token(*top) for top in each.top]}
                for each in chosen
            ]
            return {"content": content, "refusal": None}
        likeliest = [_likeliest(each) if self._asked.logprobs else None for each in chosen]
        return {
            "tokens": [each.text for each in chosen],
            "token_logprobs": [each.logprob for each in chosen],
            "top_logprobs": likeliest,
            "text_offset": [each.offset for each in chosen],
        }


def _call_delta(call: Any) -> dict[str, Any]:
    begin = {} if call.name is None else {"id": call.id, "type": "function"}
    function = ({} if call.name is None else {"name": call.name}) | {"arguments": call.arguments}
    return {"index": call.index} | begin | {"function": function}


def _token(text: str, raw: bytes, logprob: float | None) -> dict[str, Any]:
    return {"token": text, "logprob": logprob, "bytes": list(raw)}


def _likeliest(chosen: Chosen) -> dict[str, float] | None:
    """The likeliest tokens and the chosen one; of two with one text the likelier. None for the first of a text."""
    if chosen.logprob is None:
        return None
    told = dict[str, float]()
    for text, _, logprob in (*chosen.top, (chosen.text, chosen.raw, chosen.logprob)):
        told[text] = max(logprob, told.get(text, logprob))
    return told


def _vector(answer: Answer, asked: Asked) -> str | list[float]:
    assert answer.vector_D is not None and asked.vectors is not None, "its text has ended"
    return told(answer.vector_D, answer.normalize, asked.dimensions, asked.vectors)


def usage(answers: Sequence[Answer]) -> dict[str, Any]:
    """Tokens of all texts; a prompt of which several were written counts once."""
    prompts = {answer.prompt: answer.done for answer in reversed(answers) if answer.done is not None}
    read, written = sum(done.prompt_tokens for done in prompts.values()), sum(answer.new_tokens for answer in answers)
    cached = {"cached_tokens": sum(done.cached_tokens for done in prompts.values())}
    return {
        "prompt_tokens": read,
        "completion_tokens": written,
        "total_tokens": read + written,
        "prompt_tokens_details": cached,
    }


# Ends of lines in Unicode, at which some clients would cut an event.
_LINE_ENDS = {number: f"\\u{number:04x}" for number in (0x85, 0x2028, 0x2029)}


def event(body: Mapping[str, Any]) -> str:
    """A body as a server-sent event, on one line."""
    return f"data: {json.dumps(body, ensure_ascii=False, separators=(',', ':')).translate(_LINE_ENDS)}\n\n"
