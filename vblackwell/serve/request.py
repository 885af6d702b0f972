"""What is asked of the engine, and what it tells of it: plain values that server, engine and fleet share.

A request is tokens and how to go on from them; it names a model that is served, never a path. What comes of it are
events: a ``Token`` for each new one, then one ``Done``. Legend: V vocabulary.
"""

from collections.abc import Collection, Mapping
from contextlib import AbstractContextManager
from dataclasses import dataclass, field
from typing import Any, Literal, Protocol

import torch
from torch import Tensor

from vblackwell.errors import ConfigurationError, VBError
from vblackwell.generate.sampling import Sampling
from vblackwell.serve.pooling import Rows
from vblackwell.serve.sunk import SunkPages

MAX_LOGPROBS = 64  # likeliest tokens told with each new one
MAX_BIASES = 1024  # tokens whose logits a request changes
MAX_NUMBER = torch.finfo(torch.float32).max  # of what is added to logits or divides them


class Busy(VBError):
    """As many requests wait as may; nothing was begun. ``retry_after_s`` is when it may be worth trying again."""

    def __init__(self, message: str, *, retry_after_s: float) -> None:
        super().__init__(message)
        self.retry_after_s = retry_after_s


class UnknownModel(ConfigurationError):
    """The engine serves no model of this name."""


class RequestTooLong(ConfigurationError):
    """Prompt and new tokens exceed what the model can read or what the pages can hold: ``wanted`` and ``limit``, in
    tokens. A prompt is never cut."""

    def __init__(self, message: str, *, wanted: int, limit: int) -> None:
        super().__init__(message)
        self.wanted, self.limit = wanted, limit


class EngineClosed(VBError, RuntimeError):
    """The engine is closed or closing and takes no requests."""


class Constraint(Protocol):
    """A grammar that says which tokens may follow. Called from the engine's thread, for one request alone. An error
    that it raises ends its request and no other."""

    def mask(self, logits_V: Tensor) -> None:
        """Set the logits (V,) fp32 of tokens that must not follow to -inf, in place."""
        ...

    def accept(self, token: int) -> bool:
        """Note that ``token`` follows; True: nothing more may."""
        ...


@dataclass(frozen=True)
class Request:
    """How one text goes on. Raises ConfigurationError: a value outside its range.

    model: name of a model that is served. tokens: the prompt, at least one. max_new_tokens: at least 1.
    sampling, seed: how tokens are drawn; the n-th draw of a seed is the same in any batch.
    repetition_penalty: logits of tokens in prompt or text are divided by it where positive, multiplied where negative
    (Keskar et al., arXiv:1909.05858); 1: none.
    presence_penalty, frequency_penalty: taken from the logits of tokens of the new text, once and once a time; 0: none.
    logit_bias: added to the logits of these tokens. logprobs: so many likeliest tokens are told with each new one, 0:
    only its own probability, None: nothing. prompt_logprobs: the prompt's tokens are told too, before the new ones.
    end_tokens: of these the first ends the text and is told. constraint: a grammar.
    pooling: no token is drawn (max_new_tokens is 0), and one ``Pooled`` told: of the rows after the last norm the last
    token's, or the mean.
    """

    model: str
    tokens: tuple[int, ...]
    max_new_tokens: int
    sampling: Sampling = field(default_factory=Sampling)
    seed: int = 0
    repetition_penalty: float = 1.0
    presence_penalty: float = 0.0
    frequency_penalty: float = 0.0
    logit_bias: Mapping[int, float] = field(default_factory=dict)
    logprobs: int | None = None
    prompt_logprobs: bool = False
    end_tokens: frozenset[int] = frozenset()
    constraint: Constraint | None = None
    pooling: Rows | None = None

    def __post_init__(self) -> None:
        biases = self.logit_bias.values()
        for name, holds, advice in (
            ("tokens", len(self.tokens) > 0, "give at least one token"),
            ("max_new_tokens", self.max_new_tokens >= 1 or self.pooling is not None, "give at least 1"),
            ("max_new_tokens", self.max_new_tokens == 0 or self.pooling is None, "give 0: pooling draws no token"),
            ("seed", -(1 << 63) <= self.seed < 1 << 63, f"give a number from {-(1 << 63)} to {(1 << 63) - 1}"),
            ("repetition_penalty", 0 < self.repetition_penalty <= MAX_NUMBER, "give an fp32 number above 0; 1 is none"),
            ("presence_penalty", abs(self.presence_penalty) <= MAX_NUMBER, "give a finite fp32 number; 0 is none"),
            ("frequency_penalty", abs(self.frequency_penalty) <= MAX_NUMBER, "give a finite fp32 number; 0 is none"),
            ("logprobs", 0 <= (self.logprobs or 0) <= MAX_LOGPROBS, f"give from 0 to {MAX_LOGPROBS}, or None"),
            ("logit_bias", len(self.logit_bias) <= MAX_BIASES, f"give at most {MAX_BIASES} tokens"),
            ("logit_bias", all(abs(bias) <= MAX_NUMBER for bias in biases), "give finite fp32 numbers"),
        ):
            if not holds:
                raise ConfigurationError(f"{name} {getattr(self, name)}: {advice}")


@dataclass(frozen=True)
class Token:
    """One more token. ``logprob``: of the model's own distribution, before temperature, penalties, biases and grammar;
    ``top``: the likeliest tokens with theirs, likeliest first. ``of_prompt``: a token of the prompt, where
    ``prompt_logprobs`` asks; the first of them has no logprob."""

    token: int
    logprob: float | None = None
    top: tuple[tuple[int, float], ...] = ()
    of_prompt: bool = False


@dataclass(frozen=True)
class Pooled:
    """What ``pooling`` asks for: fp32 on the CPU, not normalized."""

    vector_D: Tensor


@dataclass(frozen=True)
class Done:
    """The last event. ``stop``: an end token, the grammar's end or `Pooled`; ``length``: max_new_tokens; ``error``:
    has one. Counts are of tokens; those cached are part of the prompt's and were not computed."""

    reason: Literal["stop", "length", "cancelled", "error"]
    error: VBError | None
    prompt_tokens: int
    cached_tokens: int
    new_tokens: int


Event = Token | Pooled | Done


@dataclass(frozen=True)
class ModelState:
    """A model as the engine sees it. ``state``: asleep, loading or awake. ``paged``: its requests share passes; else
    ``reason`` says why they run one at a time."""

    state: str
    waiting: int
    running: int
    paged: bool
    reason: str = ""


@dataclass(frozen=True)
class EngineState:
    """The engine at one moment: ``alive`` until it is closed or its thread died; pages of all models, those in RAM that
    a text may find and all that may lie there, and the bytes of one; steps and new tokens since it began; seconds since
    a step ended or the engine last looked for work."""

    models: Mapping[str, ModelState]
    pages_used: int
    pages_total: int
    pages_sunk: int
    pages_sunk_total: int
    page_bytes: int
    steps: int
    tokens: int
    last_step_age_s: float
    alive: bool


class ServedModel(Protocol):
    """A model of a fleet, as the engine sees it. ``module`` is a causal model of transformers, whose weights are on
    ``device`` or come there when it is called; ``dtype`` is of its keys and values."""

    name: str
    module: Any
    dtype: torch.dtype
    device: torch.device
    position_limit: int | None
    state: str  # asleep, loading or awake

    def touch(self) -> None: ...  # it is about to be used

    def held(self) -> AbstractContextManager[int | None]: ...  # see `Served`

    @property
    def is_whole(self) -> bool: ...  # see `Served`

    def wake(self) -> None: ...

    def sleep(self) -> None: ...


class ServingFleet(Protocol):
    """Models by name, and level 0 memory for their pages."""

    models: Mapping[str, Any]  # of `ServedModel`; its values' types are the fleet's own

    def reserve(self, num_bytes: int) -> Tensor:
        """So many bytes, uint8, of level 0."""
        ...

    def reserve_ram(self, reserved: Tensor, block_bytes: int) -> SunkPages | None:
        """RAM for blocks of what `reserve` gave, until that is released; None where there is none."""
        ...

    def release(self, reserved: Tensor) -> None:
        """Give back what `reserve` gave."""
        ...

    def sleep_idle(self, busy: Collection[str]) -> object:
        """Let models sleep that were not used for long, of which none is ``busy``, by name; called between passes, and
        about twice a second."""
        ...
