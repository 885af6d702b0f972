"""One text that a request asks for: from the engine's events to the pieces that a client is sent."""

from collections.abc import Sequence
from dataclasses import dataclass, field

from tokenizers import Tokenizer
from torch import Tensor

from vblackwell.serve.http.text import NewText, StopStrings, Vocabulary
from vblackwell.serve.http.tool_calls import CallPart, ToolCalls
from vblackwell.serve.request import Done, Pooled, Request, Token


@dataclass(frozen=True)
class Chosen:
    """A token as logprobs tell it: its text and bytes, the same of the likeliest ones, and the number of characters
    before it."""

    text: str
    raw: bytes
    logprob: float | None
    top: tuple[tuple[str, bytes, float], ...]
    offset: int


@dataclass(frozen=True)
class Piece:
    """More of the text number ``index``; ``finish`` is told with the last."""

    index: int
    text: str = ""
    calls: tuple[CallPart, ...] = ()
    chosen: tuple[Chosen, ...] = ()
    finish: str | None = None


@dataclass
class Answer:
    """Text number ``index``, and what was asked of the engine for it.

    ``stop``: strings that end it. ``tools``: names that may be called; ``several`` of them, or one. ``forced``: OpenAI
    tells a call of a function that the request names as finished by 'stop'. ``echo``: text that comes first. ``last``:
    whether logprobs tell the end token. ``silent``: no new token is told. ``open_ended``: as many
    tokens as there is memory for. ``prompt``: number of the prompt that it
    follows. ``vector_D``: its vector, where that is asked for, to be told with length 1 for ``normalize``. ``over``:
    nothing that still comes is told, and the engine need not go on.
    """

    index: int
    prompt: int
    request: Request
    tokenizer: Tokenizer
    vocabulary: Vocabulary
    stop: Sequence[str] = ()
    tools: Sequence[str] = ()
    several: bool = True
    forced: bool = False
    echo: str = ""
    last: bool = False
    silent: bool = False
    open_ended: bool = False
    normalize: bool = False
    vector_D: Tensor | None = None
    over: bool = False
    new_tokens: int = 0
    done: Done | None = None
    _waiting: list[Chosen] = field(default_factory=list)
    _read: int = 0  # characters of the text so far, and how many of them were told
    _told: int = 0

    def __post_init__(self) -> None:
        self._text = NewText(self.tokenizer, self.request.tokens)
        self._prompt = NewText(self.tokenizer, ())
        self._stops = StopStrings(self.stop)
        self._calls = ToolCalls(self.tools) if self.tools else None

    def begin(self) -> Piece | None:
        """What is told before the first token."""
        self._told = self._read = len(self.echo)
        if self.request.prompt_logprobs:
            self._read = 0  # counted again, token by token
        return Piece(self.index, self.echo) if self.echo else None

    def add(self, event: Token | Pooled) -> Piece | None:
        """What ``event`` adds; None for nothing yet."""
        if isinstance(event, Pooled):
            self.vector_D = event.vector_D
            return None
        if self.over:
            return None
        if event.of_prompt:
            self._note(event)
            self._read += len(self._prompt.add(event.token))
            return None
        if self.silent:
            return self._piece("")
        if not self.new_tokens:
            self._read = len(self.echo)
        self.new_tokens += 1
        ends = event.token in self.request.end_tokens
        if self.last or not ends:
            self._note(event)
        text = "" if ends else self._text.add(event.token)
        self._read += len(text)
        return self._piece(self._stops.add(text))

    def _note(self, event: Token) -> None:
        if self.request.logprobs is not None:
            told, top = self.vocabulary, event.top
            likeliest = tuple((told.text_of(token), told.bytes_of(token), value) for token, value in top)
            text, raw = told.text_of(event.token), told.bytes_of(event.token)
            self._waiting.append(Chosen(text, raw, event.logprob, likeliest, self._read))

    def _piece(self, text: str, finish: str | None = None) -> Piece | None:
        self._told += len(text)
        # Tokens that a stop string cut off are not told.
        whole = finish is not None and not self._stops.found
        count = sum(1 for each in self._waiting if whole or each.offset < self._told)
        chosen, self._waiting = tuple(self._waiting[:count]), self._waiting[count:]
        parts: list[str | CallPart] = [text] if self._calls is None else self._calls.add(text)
        if self._calls is not None and finish is not None:
            parts += self._calls.end()
        single = self._calls is not None and not self.several and self._calls.ended > 0
        if single:
            parts = [part for part in parts if not (isinstance(part, CallPart) and part.index > 0)]
        self.over = self._stops.found or single
        said = "".join(part for part in parts if isinstance(part, str))
        calls = tuple(part for part in parts if isinstance(part, CallPart))
        return Piece(self.index, said, calls, chosen, finish) if said or calls or chosen or finish else None

    def end(self, done: Done) -> Piece:
        """The last piece."""
        self.done = done
        rest = self._stops.add(self._text.end()) + self._stops.end()
        called = self._calls is not None and self._calls.count > 0 and not self.forced
        cut = self.silent or (done.reason == "length" and not self.over)
        if self._calls is not None and self._stops.found and self._calls.ended < self._calls.count:
            called = False  # in the middle of one
        reason = "length" if cut else "tool_calls" if called else "stop"
        piece = self._piece("" if self.over else rest, reason)
        assert piece is not None, "a piece with a reason is never empty"
        return piece
