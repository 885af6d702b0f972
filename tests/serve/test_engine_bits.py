"""Bits of an answer depend on its request alone: not on the batch, chunks, pages given up, or what pages still hold."""

import itertools
import random
import time
from typing import Any

import pytest
import torch
from hypothesis import given as given_
from hypothesis import settings
from hypothesis import strategies as st
from torch import Tensor

from tests.delay import set_transfer_delay
from tests.serve.models import GREEDY, VOCABULARY, Answer, AsOnGpu, Residents, ask, tiny
from vblackwell.errors import CorruptData
from vblackwell.generate.sampling import Sampling
from vblackwell.serve import engine as engine_module
from vblackwell.serve.engine import Engine
from vblackwell.serve.request import RequestTooLong


class Even:
    """A grammar of even tokens that ends after so many."""

    def __init__(self, count: int) -> None:
        self._left = count

    def mask(self, logits_V: Tensor) -> None:
        logits_V[1::2] = float("-inf")

    def accept(self, token: int) -> bool:
        assert token % 2 == 0
        self._left -= 1
        return not self._left


def options(rng: random.Random) -> dict[str, Any]:
    """Settings of a request, of all kinds."""
    made: dict[str, Any] = {"seed": rng.randrange(1000), "sampling": GREEDY}
    if rng.random() < 0.7:
        cuts = rng.choice([{}, {}, {"top_k": 5}, {"top_p": 0.7}, {"min_p": 0.1}, {"top_k": 20, "top_p": 0.9}])
        made["sampling"] = Sampling(temperature=rng.choice([0.5, 1.0, 2.0]), **cuts)
    if rng.random() < 0.3:
        made |= rng.choice([{"repetition_penalty": 1.3}, {"presence_penalty": 1.0}, {"frequency_penalty": 0.5}])
    if rng.random() < 0.2:
        made["logit_bias"] = {rng.randrange(VOCABULARY): rng.uniform(-5, 5) for _ in range(3)}
    if rng.random() < 0.4:
        made["logprobs"] = rng.randrange(4)
        made["prompt_logprobs"] = rng.random() < 0.5
    if rng.random() < 0.2:
        made["end_tokens"] = frozenset(range(0, VOCABULARY, 7))
    return made


def requests(rng: random.Random, count: int, models: list[str]) -> list[dict[str, Any]]:
    """So many, some of which begin alike."""
    beginnings = [[rng.randrange(VOCABULARY) for _ in range(40)] for _ in range(3)]
    made = []
    for _ in range(count):
        tokens = rng.choice(beginnings)[: rng.randrange(41)]
        tokens = tokens + [rng.randrange(VOCABULARY) for _ in range(rng.randrange(1, 30))]
        even = rng.randrange(2, 9) if rng.random() < 0.15 else 0
        one = {"tokens": tokens, "count": rng.randrange(1, 25), "model": rng.choice(models), **options(rng)}
        made.append({"request": one, "even": even})
    return made


def submit(engine: Engine, given: dict[str, Any]) -> Answer:
    more = {"constraint": Even(given["even"])} if given["even"] else {}
    return ask(engine, **given["request"], **more)


def alone(models: dict[str, Any], given: list[dict[str, Any]]) -> list[list[Any]]:
    """What each request gets from an engine that has nothing else to do and remembers nothing."""
    found = []
    engine = Engine(Residents(models), cache_bytes=1 << 20)
    try:
        for each in given:
            found.append(submit(engine, each).told)
            engine._pool.forget(range(engine._pool.total + engine._pool.sunk_total))  # the engine is idle
    finally:
        engine.close()
    return found


@pytest.mark.each_value
@pytest.mark.parametrize("as_on_gpu", [False, True])
@pytest.mark.parametrize("kinds", [("Llama", "Gemma2"), ("Mixtral",), ("GPT2", "Qwen3")])
def test_answers_are_those_of_each_request_alone(
    kinds: tuple[str, ...], as_on_gpu: bool, monkeypatch: pytest.MonkeyPatch
):
    if as_on_gpu:
        AsOnGpu(monkeypatch)
    torch.manual_seed(0)
    rng = random.Random(str(kinds))
    models = {kind: tiny(kind) for kind in kinds}
    given = requests(rng, 6, [*models])
    expected = alone(models, given)
    fleet = Residents(models)
    engine = Engine(fleet, cache_bytes=8 * 16 * block_of(models), max_rows=40, max_running=8)  # few pages
    try:
        answers, stopped = [], []
        for each in given:
            answers.append(submit(engine, each))
            if rng.random() < 0.3:
                stopped.append(submit(engine, each))
                time.sleep(rng.random() * 0.02)
                engine.cancel(stopped[-1].number)
        assert [answer.told for answer in answers] == expected
        for answer in stopped:
            assert answer.done.reason in ("cancelled", "stop", "length")
        assert engine.state().pages_used == 0
    finally:
        engine.close()
    assert not fleet.reserved


def test_a_text_that_gave_its_pages_up_goes_on_with_the_same_bits():
    """Each grows to 3 pages, and there are 4: the younger begins, gives up, and is computed again, tokens it has drawn
    included."""
    models = {"m": tiny("Llama", num_hidden_layers=1)}
    more = {"count": 24, "sampling": Sampling(1.0), "logprobs": 1, "frequency_penalty": 0.3}
    given = [{"request": {"tokens": [9 + row] * 16, "seed": row, **more}, "even": 0} for row in range(2)]
    expected = alone(models, given)
    engine = Engine(Residents(models), cache_bytes=4 * 16 * block_of(models))
    drawn, preempt = list[int](), engine._scheduler.preempt

    def noting(text: Any) -> None:
        drawn.append(text.drawing.drawn)
        preempt(text)

    engine._scheduler.preempt = noting  # type: ignore[method-assign]
    try:
        assert [answer.told for answer in [submit(engine, each) for each in given]] == expected
    finally:
        engine.close()
    assert max(drawn) > 0


def block_of(models: dict[str, Any]) -> int:
    """Bytes of the keys and values of a position of the widest."""
    from vblackwell.serve.paged_model import PagedModel

    return max(PagedModel(served).token_bytes for served in Residents(models).models.values())  # type: ignore[arg-type]


def test_threads_of_the_cpu_do_not_show():
    """64 rows of 1,088 numbers are shared out to three threads, and at the ends of shares torch computes otherwise."""
    threads, model = torch.get_num_threads(), tiny("Llama", intermediate_size=1088)
    rng = random.Random(3)
    prompts = [[rng.randrange(VOCABULARY) for _ in range(200)] for _ in range(4)]
    given = [{"tokens": prompt, "count": 2, "logprobs": 2, "prompt_logprobs": True} for prompt in prompts]
    torch.set_num_threads(3)
    try:
        small = Engine(Residents({"m": model}), cache_bytes=1 << 20, max_rows=16)
        expected = [ask(small, **each).told for each in given]
        small.close()
        large = Engine(Residents({"m": model}), cache_bytes=1 << 20, max_rows=64)
        answers = [ask(large, **each) for each in given]
        found = [answer.told for answer in answers]
        large.close()
    finally:
        torch.set_num_threads(threads)
    assert found == expected


@pytest.fixture(scope="module")
def beginnings() -> tuple[Any, list[dict[str, Any]], list[list[Any]]]:
    """A model, requests that begin alike, and what each gets alone."""
    rng, model = random.Random(2), tiny("Llama", num_hidden_layers=1)
    long = [[rng.randrange(VOCABULARY) for _ in range(60)] for _ in range(2)]
    prompts = [each[:length] + [9] for each in long for length in (16, 33, 60)]
    more = {"count": 3, "sampling": Sampling(1.0), "logprobs": 1}
    given = [{"request": {"tokens": each, "seed": seed, **more}, "even": 0} for seed, each in enumerate(prompts)]
    return model, given, alone({"m": model}, given)


@settings(max_examples=5, deadline=None, derandomize=True)
@given_(pages=st.integers(4, 7), sunk=st.integers(1, 7), draws=st.data())
def test_any_texts_get_the_same_from_pages_that_sank_and_rose(beginnings: Any, pages: int, sunk: int, draws: Any):
    """With few pages on level 0 and few in RAM, one after the other or at the same time; now and then copies fail."""
    model, given, expected = beginnings
    order = draws.draw(st.lists(st.sampled_from(range(len(given))), min_size=6, max_size=10))
    waits = draws.draw(st.lists(st.booleans(), min_size=len(order), max_size=len(order)))
    fleet = Residents({"m": model}, sunk=sunk)
    engine = Engine(fleet, cache_bytes=pages * 16 * block_of({"m": model}), max_running=3)
    every, copies = draws.draw(st.sampled_from([2, 7, 1000])), itertools.count(1)

    def fail(kind: str) -> None:
        if next(copies) % every == 0:
            raise OSError("it broke")

    set_transfer_delay(fail)
    try:
        answers = list[Answer]()
        for which, wait in zip(order, waits, strict=True):
            answers.append(submit(engine, given[which]))
            assert not wait or answers[-1].done
        assert [answer.told for answer in answers] == [expected[which] for which in order]
        assert engine.state().pages_used == 0 and engine.state().pages_sunk <= sunk
    finally:
        set_transfer_delay(None)
        engine.close()


PROMPT = [3 + i % 50 for i in range(50)]


@pytest.mark.parametrize("how", [pytest.param("last", marks=pytest.mark.slow), "mean"])
def test_a_vector_depends_on_no_pass(monkeypatch: pytest.MonkeyPatch, how: Any):
    """Not on other texts, on pages so few that texts give theirs up, nor on passes that fail and come again."""
    llama = tiny("Llama")
    given = [[*range(3, 3 + length)] for length in (1, 40, 17, 16, 90, 33)]
    engine = Engine(Residents({"m": llama}), cache_bytes=1 << 20)
    alone = [ask(engine, tokens, 0, pooling=how).vector for tokens in given]
    engine.close()
    shared, pooled = 0, engine_module._pooled

    def fail(found: Any, rows_SD: Any) -> Any:
        nonlocal shared
        shared += len(found.parts) > 1
        kept = pooled(found, rows_SD)
        if len(found.parts) > 1 and shared % 2:
            raise RuntimeError("the disk is gone")
        return kept

    monkeypatch.setattr(engine_module, "_pooled", fail)
    engine = Engine(Residents({"m": llama}), cache_bytes=8 * 16 * 256, max_rows=24)
    try:
        texts = [ask(engine, PROMPT, 20) for _ in range(3)]
        vectors = [ask(engine, tokens, 0, pooling=how) for tokens in given]
        assert all(torch.equal(one.vector, other) for one, other in zip(vectors, alone, strict=True))
        assert {answer.done.reason for answer in texts} == {"length"} and shared > 2
        assert vectors[0].done.new_tokens == 0 and engine.state().pages_used == 0
        with pytest.raises(RequestTooLong):
            ask(engine, [5] * 129, 0, pooling=how)
        assert len(ask(engine, [5] * 128, 0, pooling=how).vector) == 32
    finally:
        engine.close()


def test_a_vector_begins_anew_where_its_pages_go_to_an_older_text():
    engine = Engine(Residents({"m": tiny("Llama", num_hidden_layers=1)}), cache_bytes=8 * 16 * 128, max_rows=3)
    given: Any = {"count": 0, "pooling": "mean"}
    try:
        alone = ask(engine, [5] * 90, **given).vector
        ask(engine, PROMPT[:15], 80)
        vector = ask(engine, [5] * 90, **given)  # 6 pages of 8, when the other text has one and takes 6
        assert torch.equal(vector.vector, alone)
    finally:
        engine.close()


def test_a_vector_that_is_no_numbers_fails_alone():
    model = tiny("Llama")
    model.model.embed_tokens.weight.data[66] = float("nan")
    engine = Engine(Residents({"m": model}), cache_bytes=1 << 20)
    try:
        answers = [ask(engine, tokens, 0, pooling="mean") for tokens in (PROMPT, [66, 5], PROMPT)]
        assert [answer.done.reason for answer in answers] == ["stop", "error", "stop"]
        assert isinstance(answers[1].done.error, CorruptData)
    finally:
        engine.close()
