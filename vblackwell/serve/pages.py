"""Pages of keys and values of all models: who holds which, and which prompt's beginning each still has.

A block is one range of bytes of level 0; a page is a block seen as a model's keys and values of P positions, of all
layers, (layers, 2, P, K, H), so that it moves as one copy. Every model's page is a block, whatever its shape: P is as
many positions as a block holds.

A page that is full is known by the hash of its tokens and of the page before. A hit is checked token by token and page
by page, for a hash may collide, and another's text must not come of it. Pages that nobody holds keep what they know
until they are needed; the one that was given up first goes first. What is in it sinks to a block of RAM, where there
are any, and rises to a page again when a text that begins with it is found. A *place* is a page, or from ``total`` on
such a block; what is known is in one place. Only the engine's thread calls.
"""

from collections import OrderedDict, deque
from collections.abc import Sequence
from dataclasses import dataclass

import xxhash
from numpy import asarray, int64

from vblackwell.errors import ConfigurationError
from vblackwell.serve.sunk import SunkPages

TOGETHER = 32  # pages that rise at a time, after as many have sunk for them


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
    """``total`` blocks, handed out and counted, and those of RAM, ``sunk_pages``; see the module. Raises
    ConfigurationError for no block."""

    def __init__(self, total: int, sunk_pages: SunkPages | None = None) -> None:
        if total < 1:
            raise ConfigurationError(f"{total} pages of keys and values: give memory for at least 1")
        self.total, self._ram = total, sunk_pages
        self.sunk_total = 0 if sunk_pages is None else sunk_pages.total
        self._blank = deque(range(total))  # free, and nothing known of what is in them
        self._idle: OrderedDict[int, None] = OrderedDict()  # free, given up in this order, and still of use
        self._spare = deque(range(total, total + self.sunk_total))  # blocks of RAM; those used before come first
        self._sunk: OrderedDict[int, None] = OrderedDict()  # of RAM too, in the order in which they sank
        self._moves: list[tuple[int, int]] = []  # decided, and not begun
        self._holders = [0] * (total + self.sunk_total)
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

    @property
    def sunk(self) -> int:
        """Blocks of RAM with something known."""
        return len(self._sunk)

    def count_held(self, pages: Sequence[int]) -> int:
        """How many of ``pages`` somebody holds."""
        return sum(self._holders[page] > 0 for page in pages)

    def take(self) -> int | None:
        """A page for one holder, with anything in it; None where all are held. To be written after `move`."""
        if self._blank:
            page = self._blank.popleft()
        elif self._idle:
            page, _ = self._idle.popitem(last=False)
            self._sink(page)
        else:
            return None
        self._holders[page] = 1
        return page

    def _sink(self, page: int) -> None:
        """What it holds goes to RAM, for which what sank first is forgotten; or it is forgotten itself."""
        if self._ram is not None and self._known[page].before in self._live:  # else it is never found
            ready = self._spare and self._ram.is_ready(self._spare[0] - self.total)
            if not ready and self._sunk:  # all are in use, or the rest is not there yet
                self._forget(next(iter(self._sunk)))
                ready = True
            if ready:
                block = self._spare.popleft()
                self._sunk[block] = None
                self._carry(page, block)
                return
        self._forget(page)

    def _carry(self, source: int, target: int) -> None:
        self._moves.append((source, target))
        self._name(source, target)

    def _name(self, source: int, target: int) -> None:
        """What was known of one place is known of the other."""
        known = self._known[target] = self._known.pop(source)
        self._page_of[known.key] = target

    def _vacate(self, block: int) -> None:
        del self._sunk[block]
        self._spare.appendleft(block)

    def move(self) -> bool:
        """Begin the copies that are due, which end before later passes; False, and nobody finds what was to be copied
        any more, where they failed."""
        moves, self._moves = self._moves, []
        if not moves or self._ram is None or self._ram.move(moves):
            return True
        for _, target in moves:
            self._forget(target)
        return False

    def hold(self, places: Sequence[int]) -> list[int]:
        """One more holder of each of what `find` gave, held, idle or in RAM, for which pages are free; the pages. Where
        RAM cannot be read they end before the first that is there."""
        for place in places:
            if place in self._idle:
                del self._idle[place]
                self.gained += 1
            if place < self.total:
                self._holders[place] += 1
            else:
                del self._sunk[place]
        risen = self._rise([place for place in places if place >= self.total])
        pages = [risen.get(place, place) for place in places]
        if risen and not self.move():
            whole = next(count for count, page in enumerate(pages) if page not in self._known)
            self.give_up(pages[whole:])
            del pages[whole:]
        return pages

    def _rise(self, sunk: Sequence[int]) -> dict[int, int]:
        """For each of these blocks of RAM, that are not ``_sunk`` any more, a page, held once."""
        risen = dict[int, int]()
        for begin in range(0, len(sunk), TOGETHER):
            part = sunk[begin : begin + TOGETHER]
            for place, page in zip(part, [self.take() for _ in part], strict=True):
                assert page is not None, "as many pages are free as are found in RAM"
                self._carry(place, page)
                self._spare.appendleft(place)
                risen[place] = page
        self.gained += len(sunk)
        return risen

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
        elif page in self._sunk:
            self._vacate(page)

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
            if known.before not in self._live:
                self._forget(other)
            elif not known.holds(tokens, serial, salt):
                return page
            elif other < self.total:
                return other
            else:  # what is in RAM was computed again
                self._vacate(other)
                self._name(other, page)
                self.gained += 1
                return page
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
    are read otherwise after a ``prompt`` of so many."""
    return name if prompt is None or end <= prompt else f"{name}\0{prompt}"


def _key(before: bytes, tokens: tuple[int, ...], salt: str) -> bytes:
    """The hash of ``tokens`` after what ``before`` is the hash of."""
    return xxhash.xxh3_128_digest(before + salt.encode() + b"\0" + asarray(tokens, int64).tobytes())
