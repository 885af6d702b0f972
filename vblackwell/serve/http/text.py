"""New tokens as text for a client: characters are held back until whole, and stop strings are never shown. However
tokens divide the text, what comes out of all pieces is the same.
"""

import re
from collections.abc import Collection, Sequence
from typing import Any

from tokenizers import Tokenizer

from vblackwell.generate.generate import CONTEXT

MAX_HELD = 4 * CONTEXT  # tokens that may wait for the rest of a character: it has at most four bytes


class NewText:
    """The text of tokens that follow ``prompt``, which is not told again.

    Decoding starts `CONTEXT` tokens before what is new, because a decoder of words drops the space before the first
    token that it is given, and no earlier, so that a token takes as long however many came before.
    """

    def __init__(self, tokenizer: Tokenizer, prompt: Sequence[int]) -> None:
        self._tokenizer, self._tokens, self._past = tokenizer, list(prompt[-CONTEXT:]), 0
        self._slide()

    def _slide(self) -> None:
        """All that was decoded so far has been told."""
        self._tokens = self._tokens[-CONTEXT:]
        self._known, self._told = len(self._tokens), 0
        self._before = len(self._tokenizer.decode(self._tokens))

    def _new(self) -> str:
        return self._tokenizer.decode(self._tokens)[self._before :]

    def add(self, token: int) -> str:
        """What ``token`` completes."""
        self._tokens.append(token)
        text, waiting = self._new(), len(self._tokens) - self._known
        whole = text if waiting >= MAX_HELD else text.rstrip("\ufffd")
        told = whole[self._told :]
        self._told = max(self._told, len(whole))
        if whole == text and waiting >= CONTEXT:
            self._slide()
        return told

    def end(self) -> str:
        """What was still held back."""
        return self._new()[self._told :]


class StopStrings:
    """Text up to the first of ``stops`` that is complete; what may become one is held back."""

    def __init__(self, stops: Collection[str]) -> None:
        self._stops, self._held, self.found = tuple(stops), "", False

    def add(self, text: str) -> str:
        """What of the text so far may be shown and was not; nothing once a stop string was ``found``."""
        if self.found:
            return ""
        text, self._held = self._held + text, ""
        ends = [(place + len(stop), place) for stop in self._stops if (place := text.find(stop)) >= 0]
        if ends:
            self.found = True
            return text[: min(ends)[1]]
        held = max((overlap(text, stop) for stop in self._stops), default=0)
        self._held = text[len(text) - held :]
        return text[: len(text) - held]

    def end(self) -> str:
        """What was held back and became no stop string."""
        held, self._held = self._held, ""
        return held


def overlap(text: str, stop: str) -> int:
    """Length of the longest end of ``text`` with which ``stop`` begins, if not all of it."""
    longest = min(len(text), len(stop) - 1)
    return next((size for size in range(longest, 0, -1) if text.endswith(stop[:size])), 0)


class Vocabulary:
    """Single tokens as text and bytes, as logprobs tell them."""

    def __init__(self, tokenizer: Tokenizer) -> None:
        self._tokenizer = tokenizer
        self._added = {token: added.content for token, added in tokenizer.get_added_tokens_decoder().items()}
        decoder: Any = tokenizer.decoder
        kind = b"" if decoder is None else bytes(decoder.__getstate__())
        self._byte_level, self._spaces = b"ByteLevel" in kind, "▁".encode() in kind or b"\\u2581" in kind

    def bytes_of(self, token: int) -> bytes:
        """The bytes that ``token`` adds to a text; of special tokens their names, of a number beyond the vocabulary
        none."""
        if token in self._added:
            return self._added[token].encode()
        piece = self._tokenizer.id_to_token(token)
        if piece is None:
            return b""
        if self._byte_level and all(letter in _BYTES for letter in piece):
            return bytes(_BYTES[letter] for letter in piece)
        if found := re.fullmatch("<0x([0-9A-Fa-f]{2})>", piece):
            return bytes([int(found[1], 16)])
        return (piece.replace("▁", " ") if self._spaces else self._tokenizer.decode([token])).encode()

    def text_of(self, token: int) -> str:
        """``token`` as text; part of a character as its bytes."""
        found = self.bytes_of(token)
        try:
            return found.decode()
        except UnicodeDecodeError:
            return "bytes:" + "".join(f"\\x{value:02x}" for value in found)


def _byte_letters() -> dict[str, int]:
    """The letters by which byte-level vocabularies write bytes: printable ones of Latin-1 stand for themselves, the
    others in turn for those from 256 on."""
    shown = {*range(33, 127), *range(161, 173), *range(174, 256)}
    others = [value for value in range(256) if value not in shown]
    return {chr(value): value for value in shown} | {chr(256 + place): value for place, value in enumerate(others)}


_BYTES = _byte_letters()
