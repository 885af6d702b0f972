"""Answers that follow a JSON schema or call a tool: which tokens may come next. By llguidance, imported when used."""

import json
from collections.abc import Collection, Mapping
from typing import Any

import numpy as np
import torch
from tokenizers import Tokenizer
from torch import Tensor

from vblackwell.errors import ConfigurationError, Unsupported
from vblackwell.serve.http.tool_calls import CLOSE, OPEN

# Between parts of JSON: small models write white space without end where they may.
_SPACE = {"whitespace_pattern": "[ \\n\\r\\t]{1,40}"}


class Grammars:
    """What compiles grammars for a model's tokenizer. Making one walks its vocabulary, about a second of a large one.
    Raises Unsupported: llguidance is not installed, or cannot read the tokenizer."""

    def __init__(self, tokenizer: Tokenizer, end_tokens: Collection[int]) -> None:
        try:
            import llguidance
        except ImportError as error:
            raise Unsupported("llguidance is not installed: pip install 'vblackwell[serve]'") from error
        ends = sorted(end_tokens)
        try:
            self._tokenizer = llguidance.LLTokenizer(tokenizer.to_str(), eos_token=ends or None)
        except Exception as error:  # it raises bare ValueError and others of its own for what it does not read
            raise Unsupported(f"llguidance cannot read this model's tokenizer ({error})") from error
        self._ends, self._library = frozenset(ends), llguidance
        # Where the tags are tokens, these are meant, and not their letters.
        known = all(tokenizer.token_to_id(tag) is not None for tag in (OPEN, CLOSE))
        self._tags = [tag if known else json.dumps(tag) for tag in (OPEN, CLOSE)]
        self._limits = llguidance.LLParserLimits(verbose_errors=False)

    def schema(self, schema: Mapping[str, Any]) -> "Grammar":
        """JSON that ``schema`` allows. Raises ConfigurationError: it is none, or uses what is not supported."""
        return self._grammar(self._library.LLMatcher.grammar_from_json_schema(json.dumps(schema), overrides=_SPACE))

    def calls(self, tools: Mapping[str, Mapping[str, Any]], *, tagged: bool, several: bool) -> "Grammar":
        """Calls of ``tools``, schemas of arguments by name: in tags, or one in bare JSON. Raises as `schema`."""
        rules = [
            f"call_{place}: %json {json.dumps(_call_schema(name, schema, 'arguments' if tagged else 'parameters'))}"
            for place, (name, schema) in enumerate(tools.items())
        ]
        one = " | ".join(f"call_{place}" for place in range(len(tools)))
        around = f'{self._tags[0]} "\\n" any_call "\\n" {self._tags[1]}' if tagged else "any_call"
        start = 'call ("\\n" call)*' if several and tagged else "call"
        text = "\n".join([f"start: {start}", f"call: {around}", f"any_call: {one}", *rules])
        return self._grammar(self._library.LLMatcher.grammar_from_lark(text))

    def _grammar(self, text: str) -> "Grammar":
        matcher = self._library.LLMatcher(self._tokenizer, text, log_level=0, limits=self._limits)
        if matcher.is_error():
            raise ConfigurationError(f"this schema is not supported: {' '.join(matcher.get_error().split())[:500]}")
        return Grammar(matcher, self._ends)


def _call_schema(name: str, schema: Mapping[str, Any], key: str) -> dict[str, Any]:
    """The schema of a call; definitions move to its top, where references look for them."""
    inner = dict(schema) or {"type": "object"}
    outer = {part: inner.pop(part) for part in ("$defs", "definitions") if part in inner}
    fields = {"name": {"const": name}, key: inner}
    whole = {"type": "object", "properties": fields, "required": [*fields], "additionalProperties": False}
    return outer | whole | {"x-guidance": _SPACE}


class Grammar:
    """A `Constraint`: where one text is in its grammar."""

    def __init__(self, matcher: Any, ends: frozenset[int]) -> None:
        self._matcher, self._ends = matcher, ends

    def mask(self, logits_V: Tensor) -> None:
        """See `Constraint`. Raises ConfigurationError where the grammar has become too complex."""
        bits = np.frombuffer(self._matcher.compute_bitmask(), dtype=np.uint8)
        self._check()
        allowed = np.zeros(len(logits_V), dtype=bool)
        known = np.unpackbits(bits, bitorder="little")[: len(logits_V)]
        allowed[: len(known)] = known
        logits_V.masked_fill_(~torch.from_numpy(allowed).to(logits_V.device), float("-inf"))

    def accept(self, token: int) -> bool:
        """See `Constraint`. Raises ConfigurationError for a token that the grammar does not allow."""
        if token in self._ends:
            return True
        self._matcher.consume_token(token)
        self._check()
        return self._matcher.is_stopped()

    def _check(self) -> None:
        if self._matcher.is_error():
            raise ConfigurationError(f"the grammar failed: {' '.join(self._matcher.get_error().split())[:500]}")
