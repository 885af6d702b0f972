"""Pages: who holds them, what is found in them again, and which goes first."""

import random
import time
from collections.abc import Callable, Iterator
from typing import Any

import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st
from torch import Tensor

from tests.delay import set_transfer_delay
from tests.serve.models import GREEDY, Residents, tiny
from vblackwell.errors import ConfigurationError, DiskError
from vblackwell.memory.cache.stack import VGPUStack, create_vgpu_stack
from vblackwell.serve import pages as pages_module
from vblackwell.serve import sunk as sunk_module
from vblackwell.serve.draw import Drawing
from vblackwell.serve.paged_model import PagedModel
from vblackwell.serve.pages import PagePool
from vblackwell.serve.request import Request
from vblackwell.serve.scheduler import Scheduler, Text
from vblackwell.serve.sunk import SunkPages
from vblackwell.units import align_up

P = 4
PROMPT = [3 + i % 50 for i in range(50)]


def _fill(pool: PagePool, tokens: list[int], salt: str = "m") -> list[int]:
    """A text's pages: those found, and new ones for the rest, told where full."""
    found = pool.hold(pool.find(tokens, P, salt))
    held = list(found)
    while len(held) * P < len(tokens):
        page = pool.take()
        assert page is not None
        held.append(page)
    for place in range(len(found), len(tokens) // P):
        before = held[place - 1] if place else None
        pool.tell(held[place], before, tuple(tokens[place * P : place * P + P]), salt)
    return held


def test_a_beginning_is_found_again_but_never_the_last_token():
    pool, tokens = PagePool(8), list(range(8))
    held = _fill(pool, tokens)
    assert pool.find(tokens, P, "m") == held[:1]  # 8 tokens: the last one's logits are wanted
    assert pool.find([*tokens, 9], P, "m") == held
    assert pool.find([*tokens[:5], 99, 6, 7, 8], P, "m") == held[:1]
    assert pool.find([99, *tokens], P, "m") == []


def test_another_models_pages_are_not_found():
    pool = PagePool(8)
    _fill(pool, list(range(9)), "one")
    assert pool.find(list(range(9)), P, "other") == []


def test_a_collision_of_hashes_gives_nothing_of_another_text(monkeypatch: pytest.MonkeyPatch):
    monkeypatch.setattr(pages_module, "_key", lambda before, tokens, salt: bytes([len(before) and before[0] + 1]))
    pool = PagePool(8)
    held = _fill(pool, [1, 2, 3, 4, 5, 6, 7, 8, 9])
    assert pool.find([1, 2, 3, 4, 5, 6, 7, 8, 9], P, "m") == held[:2]
    assert pool.find([9, 9, 9, 9, 5, 6, 7, 8, 9], P, "m") == []
    assert pool.find([1, 2, 3, 4, 9, 9, 9, 9, 9], P, "m") == held[:1]


def test_a_collision_of_hashes_gives_nothing_of_another_model(monkeypatch: pytest.MonkeyPatch):
    made = pages_module._key
    monkeypatch.setattr(pages_module, "_key", lambda before, tokens, salt: made(before, tokens, ""))
    pool, tokens = PagePool(8), [1, 2, 3, 4, 9]
    held = _fill(pool, tokens, "one")
    assert pool.find(tokens, P, "other") == []
    assert _fill(pool, tokens, "other")[0] != held[0]
    assert pool.find(tokens, P, "one") == held[:1] and pool.find(tokens, P, "other") == []


def test_a_page_after_one_with_other_content_is_not_found():
    """The second page is still known when the first has been taken for another text that is written into it."""
    pool = PagePool(2)
    first, second = _fill(pool, [1, 2, 3, 4, 5, 6, 7, 8])
    pool.give_up([first])  # its text is over, another still holds the second
    assert pool.take() == first
    pool.tell(first, None, (9, 9, 9, 9), "m")
    assert pool.find([9, 9, 9, 9, 5, 6, 7, 8, 0], P, "m") == [first]
    assert pool.find([1, 2, 3, 4, 5, 6, 7, 8, 0], P, "m") == []
    pool.tell(first, None, (1, 2, 3, 4), "m")  # known as something else: nothing is noted
    assert pool.find([1, 2, 3, 4, 5, 6, 7, 8, 0], P, "m") == []
    assert second not in pool.find([1, 2, 3, 4, 5, 6, 7, 8, 0], P, "m")


def test_what_was_given_up_first_goes_first_and_an_end_before_its_beginning():
    pool = PagePool(4)
    old, new = _fill(pool, [1] * 9), None
    pool.give_up(old)
    assert pool.free == 4 and pool.used == 0
    new = _fill(pool, [2] * 4)  # takes the blank one
    assert pool.find([1] * 9, P, "m") == old[:2]
    taken = [pool.take(), pool.take(), pool.take()]
    assert taken[1:] == [old[1], old[0]] and taken[0] == old[2] and pool.take() is None
    assert pool.find([1] * 9, P, "m") == [] and pool.used == 4 and new


def test_a_shared_page_stays_until_its_last_holder_is_gone():
    pool = PagePool(4)
    one = _fill(pool, list(range(9)))
    other = _fill(pool, list(range(9)))
    assert other[:2] == one[:2] and other[2] != one[2]
    pool.give_up(one)
    assert pool.used == 3 and pool.free == 1
    pool.give_up(other)
    assert pool.used == 0


def test_forgotten_pages_are_not_found():
    pool = PagePool(4)
    held = _fill(pool, list(range(9)))
    pool.forget(held)
    assert pool.find(list(range(9)), P, "m") == []
    pool.give_up(held)
    pool.give_up(_fill(pool, list(range(9))))
    assert len(pool.find(list(range(9)), P, "m")) == 2
    pool.forget(range(4))
    assert pool.find(list(range(9)), P, "m") == [] and pool.free == 4
    assert len({pool.take() for _ in range(4)}) == 4


def test_what_followed_a_forgotten_page_is_found_again_once_it_is_computed_again():
    pool, tokens = PagePool(8), list(range(13))
    old = _fill(pool, tokens)
    pool.forget(old[:1])
    assert pool.find(tokens, P, "m") == []
    pool.give_up(old)
    new = _fill(pool, tokens)
    assert pool.find(tokens, P, "m") == new[:3]
    pool.give_up(new)
    assert pool.used == 0 and pool.find(tokens, P, "m") == new[:3]
    assert len({pool.take() for _ in range(5)}) == 5  # what is never found goes before what is
    assert pool.find(tokens, P, "m") == new[:3]


def test_two_texts_that_compute_the_same_keep_one_page():
    pool = PagePool(4)
    one, other = pool.take(), pool.take()
    assert one is not None and other is not None
    assert pool.tell(one, None, (1, 2, 3, 4), "m") == one
    assert pool.tell(other, None, (1, 2, 3, 4), "m") == one
    assert pool.tell(other, None, (1, 2, 3, 4), "n") == other


def test_no_memory_for_a_page_is_refused():
    with pytest.raises(ConfigurationError, match="at least 1"):
        PagePool(0)


def test_random_texts_find_only_what_is_theirs_and_every_page_comes_back():
    rng, pool = random.Random(7), PagePool(12)
    wrote: dict[int, tuple[int, ...]] = {}  # what a page holds, by its beginning: the whole text up to its end
    held: list[list[int]] = []
    for _ in range(3000):
        if held and (pool.free < 4 or rng.random() < 0.5):
            pool.give_up(held.pop(rng.randrange(len(held))))
            continue
        if rng.random() < 0.1:
            pool.forget(rng.sample(range(12), 3))
        tokens = [rng.randrange(2) for _ in range(rng.randrange(1, 4 * P + 1))]
        for place, page in enumerate(pool.find(tokens, P, "m")):
            assert wrote[page] == tuple(tokens[: (place + 1) * P])
        known = len(pool.find(tokens, P, "m"))
        mine = _fill(pool, tokens)
        for place in range(known, len(tokens) // P):
            wrote[mine[place]] = tuple(tokens[: (place + 1) * P])
        held.append(mine)
        assert pool.used == len({page for each in held for page in each})
    for each in held:
        pool.give_up(each)
    assert pool.used == 0


# -- who holds them: the scheduler ------------------------------------------------------------------------------------


def scheduler_of(names: str, pages: int, **more: Any) -> Scheduler:
    models = [PagedModel(served) for served in Residents({name: tiny("Llama") for name in names}).models.values()]
    for model in models:
        model.place(torch.zeros(pages * 16 * 256, dtype=torch.uint8), 16 * 256)
    return Scheduler(models, PagePool(pages), **{"max_rows": 64, "max_running": 8, "turn_s": 2.0, **more})


def text_of(number: int, tokens: list[int], model: str = "a", **more: Any) -> Text:
    request = Request(model, tuple(tokens), 100, GREEDY, **more)
    return Text(number, request, lambda event: None, list(tokens), Drawing(request))


@pytest.mark.parametrize("load_s", [0.5, 10.0])
@pytest.mark.parametrize("fails", [False, True])
def test_loads_take_a_small_part_of_the_time(load_s: float, fails: bool):
    """Of two models one fits: each switch loads for so long, and a pass takes 0.1 s. The clock is the test's."""
    now, swaps = 0.0, 0
    scheduler = scheduler_of("ab", 100, clock=lambda: now)
    for number in range(40):
        scheduler.add(text_of(number, [5, 6, 7], "ab"[number % 2]))
    awake = ""
    while swaps < 6:
        for name, line in scheduler.lines.items():
            line.model.served.state = "awake" if name == awake else "asleep"
        found = scheduler.next_pass()
        assert found is not None
        swapped = found.line.name != awake
        if not (swapped and fails):
            scheduler.advance(found)  # when it is launched
        now += 0.1 + load_s * swapped
        swaps, awake = swaps + swapped, found.line.name
        if swapped and fails:
            scheduler.remove(found.parts[0][0])  # the others go on
            continue
        scheduler.begin_turn()
        for text, _ in found.parts:
            text.tokens.extend([7] * (not text.left))
            if len(text.tokens) > 40:  # they never end, and hold few pages
                del text.tokens[4:]
                scheduler.preempt(text)
    loads_s, turns_s = 5 * (load_s + 0.1), now - 6 * (load_s + 0.1)  # five turns, and a sixth's first pass
    longest_s = max(2.0, 4 * (load_s + 0.1))
    assert 5 * longest_s - 1e-6 <= turns_s <= 5 * (longest_s + 0.2)  # the last pass of a turn ends a little later
    assert loads_s <= (loads_s + turns_s) / 5 + 1e-6  # rounding of sums of 0.1


def compute(scheduler: Scheduler) -> list[Text]:
    """A pass without the model, after which each text that can has one more token; its texts."""
    found = scheduler.next_pass()
    assert found is not None
    scheduler.advance(found)
    for text, _ in found.parts:
        text.tokens.extend([7] * (not text.left))
    return [text for text, _ in found.parts]


def test_a_text_knows_which_pages_others_computed():
    """They stay known where it fails."""
    scheduler = scheduler_of("a", 40)
    first = text_of(1, PROMPT)
    scheduler.add(first)
    compute(scheduler)
    assert first.found == 0
    second = text_of(2, [*PROMPT[:40], *range(60, 80)])
    scheduler.add(second)
    assert compute(scheduler) == [first] and compute(scheduler) == [second]  # prompts have passes of their own
    assert second.found == 2 and second.pages[:2] == first.pages[:2] and second.known == 3
    scheduler.pool.forget(second.pages[second.found :])
    scheduler.remove(second)
    assert second.found == 0 and scheduler.pool.find(first.tokens, 16, "a") == first.pages[:3]
    assert len(scheduler.pool.find(second.tokens, 16, "a")) == 2
    twins = [text_of(number, PROMPT[::-1][:20]) for number in (3, 4)]  # read in one pass: one page is kept
    for twin in twins:
        scheduler.add(twin)
    assert compute(scheduler) == [first] and compute(scheduler) == twins
    assert [twin.found for twin in twins] == [0, 1] and twins[0].pages[0] == twins[1].pages[0]


def test_a_text_that_waits_for_pages_is_looked_at_once(monkeypatch: pytest.MonkeyPatch):
    """While too few pages are free for it, whatever became known since."""
    scheduler, looks = scheduler_of("a", 20, max_rows=200), list[int]()
    find = scheduler.pool.find
    monkeypatch.setattr(scheduler.pool, "find", lambda tokens, *rest: looks.append(len(tokens)) or find(tokens, *rest))
    old = [text_of(number, [number, *PROMPT] * 2) for number in (1, 2)]
    last = text_of(3, [2, *PROMPT] * 2 + [*range(60, 90)] * 4)  # of 14 pages 6 are found, all held; 6 are free
    for text in (*old, last):
        scheduler.add(text)
        compute(scheduler)
    assert scheduler.lines["a"].running == old
    for _ in range(15):
        assert compute(scheduler) == old
    assert looks.count(len(last.tokens)) == 1
    scheduler.remove(old[0])
    assert compute(scheduler) == [last] and looks.count(222) == 2
    assert last.found == 6 and compute(scheduler) == [old[1], last]


# -- pages that sink ---------------------------------------------------------------------------------------------------


class Ram:
    """Storage whose contents are any values, by place; ``bad`` and ``away``: copies fail, nothing can be filled."""

    def __init__(self, pages: int, blocks: int) -> None:
        self.total, self.holds = blocks, [None] * (pages + blocks)
        self.bad = self.away = False

    def is_ready(self, block: int) -> bool:
        assert 0 <= block < self.total
        return not self.away

    def move(self, moves: Any) -> bool:
        for source, target in moves:
            self.holds[target] = None if self.bad else self.holds[source]
        return not self.bad


def pool_of(pages: int, blocks: int) -> tuple[PagePool, Ram]:
    ram = Ram(pages, blocks)
    return PagePool(pages, ram), ram  # type: ignore[arg-type]


def check(pool: PagePool, held: list[list[int]]) -> None:
    """Each place is in one state, and what is known of it is found there."""
    used = {page for each in held for page in each}
    assert sorted([*pool._blank, *pool._idle, *used]) == [*range(pool.total)]
    assert sorted([*pool._spare, *pool._sunk]) == [*range(pool.total, pool.total + pool.sunk_total)]
    assert pool._known.keys() <= {*pool._idle, *pool._sunk, *used} and not pool._known.keys() & {*pool._spare}
    assert {*pool._idle, *pool._sunk} <= pool._known.keys()
    assert {pool._page_of[known.key]: known for known in pool._known.values()} == pool._known
    assert pool._live == {0, *(known.serial for known in pool._known.values())}
    assert (pool.used, pool.sunk) == (len(used), len(pool._sunk))


def begin(pool: PagePool, ram: Ram, tokens: list[int], looks: bool = True) -> list[int]:
    """A text's pages, of which it computes those that it does not find; each holds all tokens up to its end."""
    upto = [tuple(tokens[: end + P]) for end in range(0, len(tokens), P)]
    mine = pool.hold(pool.find(tokens, P, "m")) if looks else []
    assert [ram.holds[page] for page in mine] == upto[: len(mine)]
    read = len(mine)
    while len(mine) < len(upto):
        page = pool.take()
        assert page is not None
        mine.append(page)
    pool.move()
    for place in range(read, len(tokens) // P):
        ram.holds[mine[place]] = upto[place]
        known = pool.tell(mine[place], mine[place - 1] if place else None, upto[place][-P:], "m")
        assert ram.holds[known] == upto[place]
        if known != mine[place]:
            pool.hold([known])
            pool.give_up([mine[place]])
            mine[place] = known
    return mine


@settings(max_examples=100, deadline=None, derandomize=True)
@given(pages=st.integers(2, 8), blocks=st.integers(0, 9), seed=st.integers(0, 1 << 20))
def test_any_texts_find_what_is_theirs_wherever_it_is(pages: int, blocks: int, seed: int):
    """Copies fail now and then, or RAM is not there yet, and pages are forgotten."""
    rng, (pool, ram), held = random.Random(seed), pool_of(pages, blocks), list[list[int]]()

    def text() -> list[int]:
        whole = rng.choice([[1], [1] * 8 + [0], [0]]) * pages
        return [part for part in whole[: rng.randrange(pages)] for _ in range(P)] + [2] * rng.randint(1, P)

    waits = text()  # one that looks: `gained` says how much more of it may be held since
    for _ in range(100):
        beyond, tokens = pool.count_held(pool.find(waits, P, "m")) - pool.gained, text()
        if held and (len(held) > 2 or rng.random() < 0.5):
            pool.give_up(held.pop(rng.randrange(len(held))))
        elif -(-len(tokens) // P) <= pool.free:
            held.append(begin(pool, ram, tokens, looks=rng.random() < 0.8))
        if rng.random() < 0.1:
            pool.forget(rng.sample(range(pages + blocks), min(blocks, 2)))
        ram.bad, ram.away = rng.random() < 0.1, rng.random() < 0.1
        check(pool, held)
        assert pool.count_held(pool.find(waits, P, "m")) - pool.gained <= beyond


def test_what_is_taken_for_others_is_found_in_ram_and_rises_in_the_place_of_the_oldest():
    pool, ram = pool_of(3, 3)
    one, other = [1] * 9, [2] * 9
    pool.give_up(begin(pool, ram, one))
    pool.give_up(begin(pool, ram, other))
    assert pool.sunk == 2 and pool.used == 0
    assert [place >= 3 for place in pool.find(one, P, "m")] == [True, True]
    pool.give_up(begin(pool, ram, one))  # which asserts what it finds
    assert len(pool.find(one, P, "m")) == 2 and max(pool.find(one, P, "m")) < 3
    assert len(pool.find(other, P, "m")) == 2 and min(pool.find(other, P, "m")) >= 3
    pool.give_up(begin(pool, ram, [3] * 9))
    assert len(pool.find(one, P, "m")) == 2 and len(pool.find(other, P, "m")) == 1  # whose end sank first
    check(pool, [])


def test_more_pages_rise_than_ram_has_blocks_left():
    """A whole text, from RAM that is full of it, while another's, as long, sinks: but for a few its pages stay."""
    count = 3 * pages_module.TOGETHER
    pool, ram = pool_of(count + 1, count)
    one, other = [1] * (P * count + 1), [2] * (P * count + 1)
    for tokens in (one, other, one, other, one):
        pool.give_up(begin(pool, ram, tokens))
        check(pool, [])
    assert len(pool.find(one, P, "m")) == count
    assert count - pages_module.TOGETHER <= len(pool.find(other, P, "m")) < count


def test_what_cannot_be_read_from_ram_is_computed_again():
    """And what comes before it is not; neither is what others hold."""
    pool, ram = pool_of(4, 4)
    kept = begin(pool, ram, [1] * 5)
    pool.give_up(begin(pool, ram, [1] * 8 + [2]))
    pool.give_up(begin(pool, ram, [3] * 5))  # both ends have sunk now
    assert [place >= 4 for place in pool.find([1] * 8 + [2], P, "m")] == [False, True]
    ram.bad = True
    again = pool.hold(pool.find([1] * 8 + [2], P, "m"))
    assert again == kept[:1] and pool.used == 2
    assert pool.find([1] * 8 + [2], P, "m") == again
    check(pool, [kept, again])


def test_what_is_in_ram_and_was_computed_again_leaves_it():
    """By a text that looked for nothing, as one whose prompt is told. What followed is found as before."""
    pool, ram = pool_of(3, 4)
    pool.give_up(begin(pool, ram, [1] * 9))
    pool.give_up(begin(pool, ram, [2] * 12))
    assert pool.sunk == 2
    page = pool.take()
    assert page is not None and pool.move()
    ram.holds[page] = (1,) * P
    assert pool.tell(page, None, (1,) * P, "m") == page and pool.sunk == 2  # the other's end sank for it
    assert pool.find([1] * 9, P, "m")[0] == page and pool.find([1] * 9, P, "m")[1] >= 3
    check(pool, [[page]])


def test_ram_gives_nothing_of_another_text(monkeypatch: pytest.MonkeyPatch):
    monkeypatch.setattr(pages_module, "_key", lambda before, tokens, salt: bytes([len(before) and before[0] + 1]))
    pool, ram = pool_of(2, 4)
    pool.give_up(begin(pool, ram, [1] * 8))
    pages = [pool.take(), pool.take()]
    assert pool.move() and pool.sunk == 2 and None not in pages
    for tokens, salt, count in ([1] * 9, "m", 2), ([1] * 9, "n", 0), ([1] * 4 + [2] * 5, "m", 1), ([2] * 9, "m", 0):
        assert len(pool.find(tokens, P, salt)) == count
    assert pool.tell(pages[0] or 0, None, (2,) * P, "m") == pages[0] and pool.sunk == 2


@pytest.fixture
def sunk(monkeypatch: pytest.MonkeyPatch) -> Iterator[Callable[..., tuple[Tensor, SunkPages, VGPUStack]]]:
    """``sunk(pages, blocks, device)``: pages of 1 KiB and blocks of RAM for them, in chunks of 4."""
    monkeypatch.setattr(sunk_module, "CHUNK_BYTES", 4 << 10)
    stacks = list[VGPUStack]()

    def make(pages: int, blocks: int, device: str = "cpu") -> tuple[Tensor, SunkPages, VGPUStack]:
        stacks.append(create_vgpu_stack("1MiB", "64KiB", 0, device=device, cap_process=False))
        memory = stacks[-1].reserve("pages", pages << 10, 0).bytes
        return memory, SunkPages(stacks[-1], "sunk", memory, 1 << 10, blocks), stacks[-1]

    yield make
    set_transfer_delay(None)
    for stack in stacks:
        stack.close()


def test_ram_is_taken_as_it_fills_and_given_back(sunk: Any):
    _, ram, stack = sunk(4, 15)
    host = stack.levels[1]
    for block, used in ((0, 4), (3, 4), (4, 8), (14, 15)):
        assert ram.is_ready(block) and host.used_bytes == align_up(used << 10, 4 << 10), block
    ram.close()
    ram.close()
    assert host.used_bytes == 0


def test_where_the_level_has_no_more_ram_what_is_there_is_used(sunk: Any, caplog: pytest.LogCaptureFixture):
    _, ram, stack = sunk(4, 12)
    stack.reserve("another's", 56 << 10, 1)
    assert ram.is_ready(7) and not ram.is_ready(8) and not ram.is_ready(11)
    assert "8 of 12 blocks" in caplog.text and ram.is_ready(0)


@pytest.mark.parametrize("late", [False, True])
@pytest.mark.parametrize("device", ["cpu", pytest.param("cuda", marks=pytest.mark.gpu)])
def test_copies_happen_in_order_between_what_computes(sunk: Any, device: str, late: bool):
    """Pages are written by kernels before and after each copy, and all copies go where a plain list of them does."""
    chance, (memory, ram, stack) = random.Random(5), sunk(6, 9, device)
    assert all(ram.is_ready(block) for block in range(9))
    pages, holds = memory.view(6, -1), [0] * 15
    if late:
        sleep = torch.cuda._sleep if device == "cuda" else lambda _: time.sleep(1e-4)
        set_transfer_delay(lambda kind: sleep(chance.randrange(2_000_000)))
    for serial in range(1, 60):
        page = chance.randrange(6)
        pages[page] = serial
        holds[page] = serial
        moves = list[tuple[int, int]]()
        for _ in range(chance.randrange(1, 5)):
            ends = chance.randrange(6), 6 + chance.randrange(9)
            moves.append(ends if chance.random() < 0.5 or not holds[ends[1]] else ends[::-1])
            holds[moves[-1][1]] = holds[moves[-1][0]]
        assert ram.move(moves)
    written = [place for place in range(6) if holds[place]]
    assert [pages[place].unique().tolist() for place in written] == [[holds[place]] for place in written]
    links = {(each["source"], each["destination"]): each["bytes"] for each in stack.get_stats()["links"]}
    assert len(links) == 2 and min(links.values()) > 20 << 10
    ram.close()


def test_a_copy_that_fails_is_told_and_the_next_one_works(sunk: Any, caplog: pytest.LogCaptureFixture):
    memory, ram, _ = sunk(2, 2)
    assert ram.is_ready(0)
    memory[:] = 7

    def fail(kind: str) -> None:
        raise DiskError("it broke")

    set_transfer_delay(fail)
    assert not ram.move([(0, 2)]) and "it broke" in caplog.text
    set_transfer_delay(None)
    assert ram.move([(0, 2)])
    memory[:] = 0
    assert ram.move([(2, 1)]) and memory.view(2, -1)[:, 0].tolist() == [0, 7]
    ram.close()


def test_ram_that_never_comes_keeps_none_from_what_is_there(monkeypatch: pytest.MonkeyPatch):
    """Of six blocks two are there: what sank first gives way."""
    pool, ram = pool_of(2, 6)
    monkeypatch.setattr(ram, "is_ready", lambda block: block < 2)
    for number in range(6):
        pool.give_up(begin(pool, ram, [number] * (2 * P)))
    assert pool.sunk == 2 and len(pool.find([4] * (2 * P + 1), P, "m")) == 2


def test_what_only_one_text_could_find_is_forgotten_with_it():
    """Written tokens, where a prompt's tiles are others."""
    scheduler = scheduler_of("a", 40)
    scheduler.lines["a"].model.prompt_tile = 48
    text = text_of(1, PROMPT)
    scheduler.add(text)
    for _ in range(80):
        compute(scheduler)
    pages, found = len(text.pages), scheduler.pool.find(text.tokens, 16, "a", len(PROMPT))
    assert len(found) == pages - 1 and scheduler.pool.find(text.tokens, 16, "a") == found[:3]
    scheduler.remove(text)
    assert scheduler.pool.find(text.tokens, 16, "a", len(PROMPT)) == found[:3]
