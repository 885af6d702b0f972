"""Pages: who holds them, what is found in them again, and which goes first."""

import random
from typing import Any

import pytest
import torch

from tests.serve.models import GREEDY, Residents, tiny
from vblackwell.errors import ConfigurationError
from vblackwell.serve import pages as pages_module
from vblackwell.serve.draw import Drawing
from vblackwell.serve.paged_model import PagedModel
from vblackwell.serve.pages import PagePool
from vblackwell.serve.request import Request
from vblackwell.serve.scheduler import Scheduler, Text

P = 4
PROMPT = [3 + i % 50 for i in range(50)]


def _fill(pool: PagePool, tokens: list[int], salt: str = "m") -> list[int]:
    """A text's pages: those found, and new ones for the rest, told where full."""
    found = pool.find(tokens, P, salt)
    for page in found:
        pool.hold(page)
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
        now += 0.1 + load_s * swapped
        swaps, awake = swaps + swapped, found.line.name
        if swapped and fails:
            scheduler.remove(found.parts[0][0])  # the others go on
            continue
        scheduler.advance(found)
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
