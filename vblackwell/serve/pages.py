"""Pages of keys and values of all models: who holds which, and which prompt's beginning each still has.

A block is one range of bytes of level 0; a page is a block seen as a model's keys and values of P positions, of all
layers, (layers, 2, P, K, H), so that it moves as one copy. Every model's page is a block, whatever its shape: P is as
many positions as a block holds.

A page that is full is known by the hash of its tokens and of the page before. A hit is checked token by token and page
by page, for a hash may collide, and another's text must not come of it. Pages that nobody holds keep what they know
until they are needed; the one that was given up first goes first. Only the engine's thread calls. Legend: S positions.
"""

from collections import OrderedDict, deque
from collections.abc import Sequence
from dataclasses import dataclass

import xxhash
from numpy import asarray, int64

from vblackwell.errors import ConfigurationError


@dataclass
class _Known:
    """What a full page holds: ``serial`` is of this content and of no other, ``before`` the serial of the page that
    it follows (0: none), ``salt`` the model's."""

    key: bytes
    tokens: tuple[int, ...]
    salt: str
    before: int
    serial: int

    def holds(self, tokens: tuple[int, ...], before: int, salt: str) -> bool:
        """Whether it is these, after that, of that model: equal hashes do not say so."""
        return self.tokens == tokens and self.before == before and self.salt == salt


class PagePool:
    """``total`` blocks, handed out and counted; see the module. Raises ConfigurationError for no block."""

    def __init__(self, total: int) -> None:
        if total < 1:
            raise ConfigurationError(f"{total} pages of keys and values: give memory for at least 1")
        self.total = total
        self._blank = deque(range(total))  # free, and nothing known of what is in them
        self._idle: OrderedDict[int, None] = OrderedDict()  # free, given up in this order, and still of use
        self._holders = [0] * total
        self._known: dict[int, _Known] = {}
        self._page_of: dict[bytes, int] = {}
        self._serials = 0
        self.gained = 0  # how often a known page came to be held: by so many, at most, more of a text is in held pages
        self._live = {0}  # serials of known pages, and of no page

    @property
    def free(self) -> int:
        """Pages that nobody holds."""
        return len(self._blank) + len(self._idle)

    @property
    def used(self) -> int:
        return self.total - self.free

    def count_held(self, pages: Sequence[int]) -> int:
        """How many of ``pages`` somebody holds."""
        return sum(self._holders[page] > 0 for page in pages)

    def take(self) -> int | None:
        """A page for one holder, with anything in it; None where all are held."""
        if self._blank:
            page = self._blank.popleft()
        elif self._idle:
            page, _ = self._idle.popitem(last=False)
            self._forget(page)
        else:
            return None
        self._holders[page] = 1
        return page

    def hold(self, page: int) -> None:
        """One more holder of a page, held or idle."""
        if page in self._idle:
            del self._idle[page]
            self.gained += 1
        self._holders[page] += 1

    def give_up(self, pages: Sequence[int]) -> None:
        """One holder less for each of a text's ``pages``; its end is taken from before its beginning."""
        for page in reversed(pages):
            self._holders[page] -= 1
            assert self._holders[page] >= 0, "a page is given up once by each holder"
            if not self._holders[page]:
                if page in self._known:
                    self._idle[page] = None
                else:
                    self._blank.append(page)

    def forget(self, pages: Sequence[int]) -> None:
        """No later text finds these, held or idle."""
        for page in pages:
            self._forget(page)

    def _forget(self, page: int) -> None:
        known = self._known.pop(page, None)
        if known is not None:
            del self._page_of[known.key]
            self._live.remove(known.serial)
        if page in self._idle:
            del self._idle[page]
            self._blank.append(page)

    def tell(self, page: int, before: int | None, tokens: tuple[int, ...], salt: str) -> int:
        """``page`` holds the keys and values of ``tokens`` after the page ``before``; ``salt`` names the model. Gives
        the page that is known for that from now on: another, not yet held for the caller, where two texts computed the
        same at a time. Where the page before is not known any more nothing is noted; a page that followed one which is
        not known any more, and so is never found, gives way."""
        earlier = None if before is None else self._known.get(before)
        if page in self._known or (before is not None and earlier is None):
            return page
        key, serial = _key(b"" if earlier is None else earlier.key, tokens, salt), earlier.serial if earlier else 0
        other = self._page_of.get(key)
        if other is not None:
            known = self._known[other]
            if known.before in self._live:
                return other if known.holds(tokens, serial, salt) else page
            self._forget(other)
        self._serials += 1
        self._known[page] = _Known(key, tokens, salt, serial, self._serials)
        self._page_of[key] = page
        self._live.add(self._serials)
        self.gained += 1
        return page

    def find(self, tokens: Sequence[int], positions: int, salt: str, prompt: int | None = None) -> list[int]:
        """Pages, of so many ``positions`` each, that hold the beginning of ``tokens``, of which so many are ``prompt``
        (None: all), not yet held for the caller. The last token is never in them: its logits are wanted."""
        found: list[int] = []
        key, serial = b"", 0
        for begin in range(0, len(tokens) - positions, positions):
            part, salted = tuple(tokens[begin : begin + positions]), salt_of(salt, begin + positions, prompt)
            key = _key(key, part, salted)
            page = self._page_of.get(key)
            if page is None:
                break
            known = self._known[page]
            if not known.holds(part, serial, salted):  # a collision
                break
            serial = known.serial
            found.append(page)
        return found


def salt_of(name: str, end: int, prompt: int | None) -> str:
    """What tells a page up to position ``end`` from one of equal tokens and other bits: tokens of the model ``name``
    are read otherwise behind a ``prompt`` of so many."""
    return name if prompt is None or end <= prompt else f"{name}\0{prompt}"


def _key(before: bytes, tokens: tuple[int, ...], salt: str) -> bytes:
    """The hash of ``tokens`` after what ``before`` is the hash of."""
    return xxhash.xxh3_128_digest(before + salt.encode() + b"\0" + asarray(tokens, int64).tobytes())
