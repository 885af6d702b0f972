"""Answers that follow a JSON schema or call a tool: which tokens may come next. By llguidance, imported when used."""

import json
import re
from collections.abc import Callable, Collection, Mapping
from threading import Lock
from typing import Any

import numpy as np
import torch
from tokenizers import Tokenizer
from torch import Tensor

from vblackwell.errors import ConfigurationError, Unsupported
from vblackwell.serve.http.tool_calls import CLOSE, OPEN
from vblackwell.serve.request import Busy

# Between parts of JSON: small models write white space without end where they may.
_SPACE = {"whitespace_pattern": "[ \\n\\r\\t]{1,40}"}
MAX_DEPTH = 64  # of a schema
MAX_PATTERN_LENGTH, MAX_WRITTEN_OUT = 4000, 5000  # characters of all patterns, and of one with its counts written out
MAX_COMBINED = 3  # patterns of a schema that demands several at once, whose automata multiply
COMPILE_SECONDS = 10.0  # that a schema waits for another that is compiled
_REMARKS = {"title", "description", "default", "examples", "deprecated", "$comment"}
_compiling = Lock()  # llguidance may take every core and much memory


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
        _check(schema)
        text = json.dumps(schema)
        return self._grammar(lambda: self._library.LLMatcher.grammar_from_json_schema(text, overrides=_SPACE))

    def calls(self, tools: Mapping[str, Mapping[str, Any]], *, tagged: bool, several: bool) -> "Grammar":
        """Calls of ``tools``, schemas of arguments by name: in tags, or one in bare JSON. Raises as `schema`."""
        _check(tools)
        rules = [
            f"call_{place}: %json {json.dumps(_call_schema(name, schema, 'arguments' if tagged else 'parameters'))}"
            for place, (name, schema) in enumerate(tools.items())
        ]
        one = " | ".join(f"call_{place}" for place in range(len(tools)))
        around = f'{self._tags[0]} "\\n" any_call "\\n" {self._tags[1]}' if tagged else "any_call"
        start = 'call ("\\n" call)*' if several and tagged else "call"
        text = "\n".join([f"start: {start}", f"call: {around}", f"any_call: {one}", *rules])
        return self._grammar(lambda: self._library.LLMatcher.grammar_from_lark(text))

    def _grammar(self, write: Callable[[], str]) -> "Grammar":
        if not _compiling.acquire(timeout=COMPILE_SECONDS):
            raise Busy("another schema is being compiled: try again", retry_after_s=COMPILE_SECONDS)
        matcher, said = None, ""
        try:
            matcher = self._library.LLMatcher(self._tokenizer, write(), log_level=0, limits=self._limits)
            said = matcher.get_error() if matcher.is_error() else said
        except Exception as error:  # it raises bare ValueError for what it does not read
            said = str(error) or type(error).__name__
        finally:
            _compiling.release()
        if said:
            raise ConfigurationError(f"this schema is not supported: {' '.join(said.split())[:500]}")
        return Grammar(matcher, self._ends)


def _check(schema: Mapping[str, Any]) -> None:
    """Raises ConfigurationError for a schema that llguidance should not see: one that is nested deep, that has orders
    for llguidance itself, or whose patterns could take minutes and gigabytes. What a reference can reach may be
    anywhere, so all of it counts."""
    patterns, combined, parts = list[str](), False, [(0, schema)]
    while parts:
        depth, part = parts.pop()
        if depth > MAX_DEPTH:
            raise ConfigurationError(f"this schema is not supported: it is nested more than {MAX_DEPTH} deep")
        if isinstance(part, Mapping):
            if "x-guidance" in part:
                raise ConfigurationError("this schema is not supported: leave x-guidance out")
            branches = part.keys() & {"anyOf", "oneOf", "$ref"}
            combined |= "allOf" in part or "not" in part or (bool(branches) and len(part.keys() - _REMARKS) > 1)
            own, keyed = part.get("pattern"), part.get("patternProperties")
            patterns += [own] if isinstance(own, str) else []
            if isinstance(keyed, Mapping):
                patterns += keyed
                combined |= len(keyed) > 1
        inner = part.values() if isinstance(part, Mapping) else part if isinstance(part, list | tuple) else ()
        parts += [(depth + 1, each) for each in inner]
    if combined and len(patterns) > MAX_COMBINED:
        raise ConfigurationError(
            f"this schema is not supported: it has {len(patterns)} patterns and demands several things at once "
            f"(allOf, or branches next to other rules): leave {len(patterns) - MAX_COMBINED} out"
        )
    if (length := sum(map(len, patterns))) > MAX_PATTERN_LENGTH:
        raise ConfigurationError(
            f"this schema is not supported: its patterns have {length} characters, more than {MAX_PATTERN_LENGTH}"
        )
    if any(_written_out(pattern) > MAX_WRITTEN_OUT for pattern in patterns):
        raise ConfigurationError(
            f"this schema is not supported: a pattern, its counts written out, is longer than {MAX_WRITTEN_OUT}"
        )


def _written_out(pattern: str) -> int:
    """About how many letters and classes a pattern has where each ``{n}`` is replaced by n copies."""
    sizes, last = [0], 0  # of open groups, and of what a count would repeat
    for part in re.findall(r"\\.|\[\^?\]?(?:\\.|[^\]\\])*\]|\{\s*[0-9][0-9,\s]*\}|.", pattern, re.DOTALL):
        if part == "(":
            sizes.append(1)
        elif part == ")" and len(sizes) > 1:
            last = sizes.pop()
            sizes[-1] += last
        elif part[0] == "{" and len(part) > 1:
            times = max(1, *map(int, re.findall("[0-9]+", part)))
            sizes[-1] += last * (times - 1)
            last *= times
        else:
            last = 1
            sizes[-1] += 1
    return sum(sizes)


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
