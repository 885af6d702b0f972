"""Which texts have a share of the next pass, and who gives pages up where there are not enough.

Within a model texts go first come, first served: passes in which those that wait for one more token have one row each
take turns with passes that read prompts, in chunks, in the order of arrival. Models take turns. A text takes pages as
it grows; where none is left the youngest text of all gives its pages up, and is computed again when there is room. So
the oldest always goes on, and every text is once the oldest. New texts start only where the pages of all their tokens
are free, and not before an older one that waits for pages. Only the engine's thread calls.
"""

import time
from bisect import insort
from collections.abc import Callable, Iterable, Sequence
from dataclasses import dataclass, field

from torch import Tensor

from vblackwell.serve.draw import Drawing
from vblackwell.serve.paged_model import PagedModel
from vblackwell.serve.pages import PagePool, salt_of
from vblackwell.serve.request import Event, Request

PROMPT_ROWS_TOLD = 64  # rows of a pass whose logits are wanted all, (rows, vocabulary) each
LOADS_A_TURN = 4  # times that its first pass took, which waits for the weights: loads take at most a fifth of the time


@dataclass(eq=False)
class Text:
    """A request on its way. ``computed`` tokens have their keys and values in ``pages``; what comes after them is still
    to be read."""

    number: int
    request: Request
    on_event: Callable[[Event], None]
    tokens: list[int]
    drawing: Drawing
    pages: list[int] = field(default_factory=list)
    computed: int = 0
    cached: int = 0  # tokens found when it first began
    found: int = 0  # pages, the first ones, that others computed
    most_held: int | None = None  # while it waits: that much more than `PagePool.gained` of its pages are held, at most
    begun: bool = False
    told: int = 0  # tokens of the prompt that its events have told
    known: int = 0  # pages that others may find
    alone: bool = False  # a pass that it shared failed: it is tried by itself
    step: Callable[[Sequence[int]], Tensor] | None = None  # of a model whose texts cannot share passes
    pooled_D: Tensor | None = None  # of its computed rows, where their mean is wanted

    def __lt__(self, other: "Text") -> bool:
        return self.number < other.number

    @property
    def left(self) -> int:
        """Tokens still to be read before the next can be drawn."""
        return len(self.tokens) - self.computed

    @property
    def reads_prompt(self) -> bool:
        """Whether what it reads next is of its prompt."""
        return self.computed < len(self.request.tokens)

    @property
    def left_alike(self) -> int:
        """Of those left, how many one pass may read: tokens of the prompt, or those that were written."""
        return (len(self.request.tokens) if self.reads_prompt else len(self.tokens)) - self.computed

    @property
    def tells_prompt(self) -> bool:
        return self.request.prompt_logprobs and self.told < len(self.request.tokens)


@dataclass(eq=False)
class Line:
    """A model's texts, both in the order of arrival."""

    model: PagedModel
    waiting: list[Text] = field(default_factory=list)
    running: list[Text] = field(default_factory=list)
    read_prompts: bool = False  # in its last pass

    @property
    def name(self) -> str:
        return self.model.served.name

    def prompt_of(self, text: Text) -> int | None:
        """Tokens that are read otherwise than those after them; None where all are read alike."""
        return None if self.model.tile == self.model.prompt_tile else len(text.request.tokens)


@dataclass(frozen=True)
class Pass:
    """Texts of one model and how many tokens each reads, ``of_prompts`` or of those written."""

    line: Line
    parts: Sequence[tuple[Text, int]]
    of_prompts: bool = False


class Scheduler:
    """Lines of texts over one pool of pages. ``max_rows`` of a pass; ``max_running`` texts of a model at a time, at
    most ``max_rows``; a model keeps its turn, while the next one would have to be loaded, for ``turn_s`` seconds after
    its first pass, or for `LOADS_A_TURN` times what that pass took, if that is longer."""

    def __init__(
        self,
        models: Iterable[PagedModel],
        pool: PagePool,
        *,
        max_rows: int,
        max_running: int,
        turn_s: float,
        clock: Callable[[], float] = time.monotonic,
    ) -> None:
        self.lines = {model.served.name: Line(model) for model in models}
        self.pool = pool
        self._max_rows, self._max_running = max_rows, min(max_running, max_rows)
        self._turns = list(self.lines.values())  # the model that was served last is the last
        self._turn_s, self._clock, self._turn_ends = turn_s, clock, clock()
        self._switched_at: float | None = None  # while the first pass of a turn is under way

    def add(self, text: Text) -> None:
        insort(self.lines[text.request.model].waiting, text)

    def remove(self, text: Text) -> None:
        """It is over; its pages are free, and known to others as far as they are whole."""
        self.begin_turn()
        line = self.lines[text.request.model]
        (line.running if text in line.running else line.waiting).remove(text)
        if (prompt := line.prompt_of(text)) is not None:  # no other text finds what was written after it
            self.pool.forget(text.pages[prompt // line.model.positions :])
        self._release(text)

    def preempt(self, text: Text) -> None:
        """It gives its pages up and waits again."""
        line = self.lines[text.request.model]
        line.running.remove(text)
        self._release(text)
        insort(line.waiting, text)

    def _release(self, text: Text) -> None:
        self.pool.give_up(text.pages)
        text.pages, text.computed, text.known, text.found, text.step, text.pooled_D = [], 0, 0, 0, None, None

    def next_pass(self) -> Pass | None:
        """The next pass, its pages taken; None where there is nothing to do."""
        self.begin_turn()
        for line in self._in_turn():
            found = self._plan(line) if line.model.paged else self._plan_alone(line)
            if found.parts:
                if line is not self._turns[-1]:
                    self._turns.remove(line)
                    self._turns.append(line)
                    self._switched_at = self._clock()
                return found
        return None

    def following(self, found: Pass) -> Pass | None:
        """The pass after ``found``, which is advanced, before its tokens are known: they are all that it reads. None
        where more is to be done than that, or has to be known first."""
        line, texts = found.line, [text for text, _ in found.parts]
        if not line.model.paged or line.waiting or len(texts) != len(line.running):
            return None
        if any(each is not line and (each.waiting or each.running) for each in self._turns):
            return None
        size = line.model.positions
        for text in texts:
            drawing = text.drawing
            more = drawing.drawn + 1 < text.request.max_new_tokens and not drawing.changes_logits
            more = more and text.request.pooling is None
            if text not in line.running or text.left or not more:
                return None
        if not line.model.is_one_launch([text.computed // size + 1 for text in texts]):
            return None
        for text in texts:
            if len(text.pages) * size <= text.computed:
                page = self.pool.take()
                if page is None:
                    return None
                text.pages.append(page)
        self.pool.move()
        return Pass(line, [(text, 1) for text in texts])

    def begin_turn(self) -> None:
        """A pass is over, well or not: if it was the first of a turn, that begins now."""
        if self._switched_at is not None:
            now = self._clock()
            self._turn_ends = now + max(self._turn_s, LOADS_A_TURN * (now - self._switched_at))
            self._switched_at = None

    def _in_turn(self) -> list[Line]:
        """Models with texts, the one whose turn it is first."""
        busy = [line for line in self._turns if line.waiting or line.running]
        last = self._turns[-1]
        others_sleep = len(busy) > 1 and last in busy and busy[0].model.served.state != "awake"
        if others_sleep and self._clock() < self._turn_ends:
            return [last, *busy[:-1]]
        return busy

    def _plan(self, line: Line) -> Pass:
        for prompts in (not line.read_prompts, line.read_prompts):
            if parts := self._plan_alike(line, prompts):
                line.read_prompts = prompts
                return Pass(line, parts, prompts)
        return Pass(line, [])

    def _plan_alike(self, line: Line, prompts: bool) -> list[tuple[Text, int]]:
        parts = list[tuple[Text, int]]()
        alone = next((text for text in line.running if text.alone), None)
        rows = self._max_rows - sum(text.left == 1 and not prompts for text in line.running)
        for text in [*line.running] if alone is None else [alone]:
            if text not in line.running or text.reads_prompt != prompts:  # an older one may have taken its pages
                continue
            single = text.left == 1 and not prompts
            count = 1 if single else min(text.left_alike, rows, *self._rows_told(text))
            if count < 1 or not self._take_pages(text, text.computed + count):
                continue
            rows -= 0 if single else count
            parts.append((text, count))
        while prompts and alone is None and line.waiting and rows > 0 and len(line.running) < self._max_running:
            text = line.waiting[0]
            if (text.alone and parts) or not self._begin(line, text):
                break
            if not text.reads_prompt:  # all of it was found
                continue
            count = min(text.left_alike, rows, *self._rows_told(text))
            taken = self._take_pages(text, text.computed + count)
            assert taken, "a text begins where the pages of all its tokens are free"
            rows -= count
            parts.append((text, count))
            if text.alone:
                break
        return parts

    @staticmethod
    def _rows_told(text: Text) -> tuple[int, ...]:
        return (PROMPT_ROWS_TOLD,) if text.tells_prompt else ()

    def _plan_alone(self, line: Line) -> Pass:
        if not line.running and line.waiting:
            line.running.append(line.waiting.pop(0))
        return Pass(line, [(text, text.left) for text in line.running])

    def _kept_for_older(self, text: Text) -> int:
        """Pages of the first that waits for each other model, where it is older and only pages are missing."""
        heads = [
            (line.model.positions, line.waiting[0])
            for line in self.lines.values()
            if line.model.paged and line.waiting and len(line.running) < self._max_running
        ]
        return sum(-(-len(older.tokens) // size) for size, older in heads if older < text)

    def _begin(self, line: Line, text: Text) -> bool:
        """Whether the first that waits could begin: what is known of its beginning is held then, and rises from RAM."""
        pool, size = self.pool, line.model.positions
        needed = -(-len(text.tokens) // size) + self._kept_for_older(text)
        if text.most_held is not None and needed - (text.most_held + pool.gained) > pool.free:
            return False  # without a look at all its tokens
        # Of a prompt that is told, or whose mean is, every row is wanted.
        of_all = text.tells_prompt or text.request.pooling == "mean"
        found = [] if of_all else pool.find(text.tokens, size, line.name, line.prompt_of(text))
        held = pool.count_held(found)
        if needed - held > pool.free:
            text.most_held = held - pool.gained
            return False
        found = pool.hold(found)
        text.pages, text.computed, text.known, text.found = found, len(found) * size, len(found), len(found)
        text.most_held = None
        if not text.begun:
            text.begun, text.cached = True, min(text.computed, len(text.request.tokens))
        line.waiting.pop(0)
        insort(line.running, text)
        return True

    def _take_pages(self, text: Text, positions: int) -> bool:
        """Whether ``text`` has pages for so many positions now. Younger texts give theirs up for it; where all are
        older it gives up its own."""
        size = self.lines[text.request.model].model.positions
        while len(text.pages) * size < positions:
            page = self.pool.take()
            if page is not None:
                text.pages.append(page)
                continue
            holders = [each for line in self.lines.values() for each in line.running if each.pages or each is text]
            youngest = max(holders)
            self.preempt(youngest)
            if youngest is text:
                return False
        self.pool.move()
        return True

    def advance(self, done: Pass) -> None:
        """A pass is launched: its tokens are read, and pages that are whole then may be found by others."""
        size = done.line.model.positions
        for text, count in done.parts:
            if text not in done.line.running:  # it ended when its token, which this pass read, was known
                continue
            text.computed += count
            text.alone = False
            while done.line.model.paged and (text.known + 1) * size <= text.computed:
                at = text.known
                page, before = text.pages[at], text.pages[at - 1] if at else None
                end = (at + 1) * size
                salt = salt_of(done.line.name, end, done.line.prompt_of(text))
                known = self.pool.tell(page, before, tuple(text.tokens[at * size : end]), salt)
                if known != page:  # of equal bits: one is enough
                    self.pool.hold([known])
                    self.pool.give_up([page])
                    text.pages[at] = known
                    text.found += text.found == at
                text.known += 1
