"""From a body to requests of the engine: its fields, its prompts as tokens, its limits, its grammar. Runs in worker
threads: reading a long prompt takes a while.
"""

import secrets
from collections.abc import Callable, Mapping
from dataclasses import dataclass
from functools import cache
from typing import Any

from tokenizers import Tokenizer

from vblackwell.errors import ConfigurationError, VBError
from vblackwell.folders.chat_prompt import ChatTemplate
from vblackwell.generate.generate import encode
from vblackwell.serve.http.answer import Answer
from vblackwell.serve.http.embedding import Embedding, embedding_of
from vblackwell.serve.http.grammar import Grammar, Grammars
from vblackwell.serve.http.refusal import Refusal, invalid, unsupported
from vblackwell.serve.http.running import refused
from vblackwell.serve.http.text import Vocabulary
from vblackwell.serve.http.tool_calls import form_of
from vblackwell.serve.http.wire import Asked, read_json
from vblackwell.serve.request import Busy, Request

UNLIMITED_TOKENS = 4096  # new ones of a model that states no limit, where a chat does not say how many


@dataclass(frozen=True)
class Chat:
    """How a model is talked with: its template, the token that ends its turns, and names of values that the template
    takes. Made before requests come: the template, a stranger's text, runs here under `bounded`, whose limits are those
    of the whole process."""

    template: ChatTemplate
    turn_end: int | None
    values: frozenset[str] = frozenset()

    @classmethod
    def of(cls, template: ChatTemplate, tokenizer: Tokenizer) -> "Chat":
        return cls(template, template.turn_end(tokenizer), template.values())


class Preparation:
    """Reads requests for the models of ``fleet``; those that can chat are in ``chats``."""

    def __init__(self, fleet: Any, chats: Mapping[str, Chat]) -> None:
        self._fleet, self._chats = fleet, chats
        self._vocabulary = cache(lambda name: Vocabulary(fleet.models[name].tokenizer))
        self._longest = cache(lambda name: max(map(_size, fleet.models[name].tokenizer.get_vocab())))
        self._embeddings = cache(lambda name: embedding_of(fleet.models[name].folder))
        self._grammars = cache(lambda name: Grammars(fleet.models[name].tokenizer, self._ends(name, chat=True)))

    def served(self, name: object) -> Any:
        """The model that a request names; raises Refusal."""
        if not isinstance(name, str) or name not in self._fleet.models:
            said = f"no model {str(name)[:100]!r} is served; GET /v1/models lists those that are"
            raise Refusal(404, said, "model", "model_not_found")
        return self._fleet.models[name]

    def __call__(self, read: Callable[[dict[str, Any]], Asked], raw: bytes) -> tuple[Asked, list[Answer]]:
        """What the body ``raw`` asks, as ``read`` reads it, and its texts; raises Refusal."""
        asked = read(read_json(raw))
        served, answers = self.served(asked.model), list[Answer]()
        for number, tokens in enumerate(self._prompts(asked, served)):
            most = self._max_new_tokens(asked, served, len(tokens))
            given = asked.prompts[number] if asked.echo else ""
            echo = given if isinstance(given, str) else served.tokenizer.decode(tokens)
            answers += [self._text(asked, served, number, tokens, most, choice, echo) for choice in range(asked.n)]
        for index, answer in enumerate(answers):
            answer.index = index
        return asked, answers

    def _embedding(self, asked: Asked) -> Embedding | None:
        """How the vectors that are asked for are made; None where texts are."""
        if asked.vectors is None:
            return None
        how = self._embeddings(asked.model)
        if isinstance(how, str):
            raise invalid("model", f"{asked.model} {how}")
        if asked.dimensions is not None and asked.dimensions not in how.lengths:
            raise unsupported("dimensions", f"the folder of {asked.model} does not allow vectors of {asked.dimensions}")
        return how

    def _prompts(self, asked: Asked, served: Any) -> list[tuple[int, ...]]:
        if asked.messages:
            return [self._chat_prompt(asked, served)]
        try:
            return [
                self._encoded(prompt, served, asked.source, special_tokens=True) if isinstance(prompt, str) else prompt
                for prompt in asked.prompts
            ]
        except ConfigurationError as error:
            raise invalid(asked.source, str(error)) from error

    def _encoded(self, text: str, served: Any, param: str, *, special_tokens: bool) -> tuple[int, ...]:
        """The tokens of ``text``; one that no tokens within the model's limit can spell is refused unread."""
        limit, size = served.position_limit, len(text.encode())
        if limit is not None and 0 < limit * self._longest(served.name) < size:
            said = f"{size} bytes of text are more than the {limit} tokens that {served.name} reads can hold"
            raise invalid(param, said, "context_length_exceeded")
        # of the model `encode` asks the config alone
        return tuple(encode(served, served.tokenizer, text, special_tokens))

    def _chat_prompt(self, asked: Asked, served: Any) -> tuple[int, ...]:
        chat = self._chats.get(asked.model)
        if chat is None:
            raise Refusal(400, f"{asked.model} has no chat template: use /v1/completions", "model", "no_chat_template")
        source, tools = chat.template.source, asked.tools
        for name in asked.template.keys() - chat.values:
            said = f"the chat template of {asked.model} has no value {name!r}: leave it out"
            raise unsupported("chat_template_kwargs", said)
        if tools.callable and form_of(source) is None:
            raise unsupported("tools", f"the chat template of {asked.model} asks for no calls of a form that is read")
        as_system = {"role": "system"} if "developer" not in source else {}
        messages = [each | (as_system if each["role"] == "developer" else {}) for each in asked.messages]
        given: dict[str, Any] = {"tools": list(tools.shown)} if tools.shown else {}
        refusal = (f"the chat template of {asked.model} refuses these messages", "")
        options = dict(asked.template) | given | {"add_generation_prompt": True}
        try:
            text, _ = chat.template.write(messages, refusal, options, limited=False)
        except ConfigurationError as error:
            raise invalid("messages", str(error)) from error
        return self._encoded(text, served, "messages", special_tokens=False)

    def _max_new_tokens(self, asked: Asked, served: Any, length: int) -> int:
        limit, most = served.position_limit, asked.max_tokens
        least = int(asked.vectors is None)  # of a text that is not shown one token is drawn
        if limit is None:
            return max(UNLIMITED_TOKENS if most is None else most, least)
        wanted = max(most or least, least)
        if length + (wanted if most != 0 else 0) > limit:  # one that is drawn for its prompt is not read
            new = f" and {wanted} new ones" if wanted and most != 0 else ""
            said = f"{length} tokens{new} are more than the {limit} that {asked.model} reads"
            raise invalid(asked.source, said, "context_length_exceeded")
        return limit - length if most is None else wanted

    def _text(
        self, asked: Asked, served: Any, number: int, tokens: tuple[int, ...], most: int, choice: int, echo: str
    ) -> Answer:
        """Text number ``choice`` after prompt ``number``."""
        how = self._embedding(asked)
        seed = secrets.randbits(62) if asked.seed is None else asked.seed + choice
        request = Request(
            asked.model,
            tokens,
            most,
            asked.sampling,
            (seed + (1 << 63)) % (1 << 64) - (1 << 63),
            logit_bias=asked.logit_bias,
            logprobs=asked.logprobs,
            prompt_logprobs=asked.echo and asked.logprobs is not None,
            end_tokens=self._ends(asked.model, chat=bool(asked.messages)),
            constraint=self._constraint(asked),
            pooling=None if how is None else how.rows,
            **asked.penalties,
        )
        return Answer(
            0,
            number,
            request,
            served.tokenizer,
            self._vocabulary(asked.model),
            stop=asked.stop,
            tools=tuple(asked.tools.callable),
            several=asked.tools.several,
            forced=asked.tools.force == "named",
            echo=echo,
            last=not asked.messages,
            silent=asked.max_tokens == 0,
            open_ended=asked.max_tokens is None,
            normalize=how is not None and how.normalize,
        )

    def _ends(self, name: str, *, chat: bool) -> frozenset[int]:
        known = self._chats.get(name) if chat else None
        turn_end = {known.turn_end} if known is not None and known.turn_end is not None else frozenset[int]()
        return frozenset(self._fleet.models[name].end_tokens) | turn_end

    def _constraint(self, asked: Asked) -> Grammar | None:
        tools, chat = asked.tools, self._chats.get(asked.model)
        try:
            if asked.schema is not None:
                return self._grammars(asked.model).schema(asked.schema)
            if tools.force is None or chat is None:
                return None
            tagged = form_of(chat.template.source) == "tagged"
            return self._grammars(asked.model).calls(tools.callable, tagged=tagged, several=tools.several)
        except Busy as error:
            raise refused(error) from error
        except VBError as error:
            raise invalid("tools" if asked.schema is None else "response_format", str(error)) from error


def _size(token: str) -> int:
    return len(token.encode())
