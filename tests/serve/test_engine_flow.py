"""Requests on their way: shared beginnings, turns, cancelling, failing alone, limits, and the end."""

import math
import threading
import time
from typing import Any

import pytest
import torch
import transformers

from tests.serve.models import GREEDY, VOCABULARY, Answer, Residents, ask, tiny
from vblackwell.errors import ConfigurationError, CorruptData, Unsupported, VBError
from vblackwell.generate.sampling import Sampling
from vblackwell.serve import engine as engine_module
from vblackwell.serve.draw import tell, why_not_told
from vblackwell.serve.engine import Engine
from vblackwell.serve.http.metrics import Metrics
from vblackwell.serve.request import Busy, Done, EngineClosed, Request, RequestTooLong, Token, UnknownModel

PROMPT = [3 + i % 50 for i in range(50)]


@pytest.fixture(scope="module")
def llama() -> Any:
    return tiny("Llama")


@pytest.fixture
def engine(llama: Any):
    made = Engine(Residents({"m": llama}), cache_bytes=40 * 16 * 256, max_rows=32)
    yield made
    made.close(grace_s=0)


def eventually(holds: Any) -> None:
    end = time.monotonic() + 30
    while not holds():
        assert time.monotonic() < end
        time.sleep(0.002)


def test_a_beginning_is_computed_once_and_told(engine: Engine):
    first = ask(engine, PROMPT, 4)
    assert first.done.cached_tokens == 0 and first.done.prompt_tokens == 50 and first.done.new_tokens == 4
    steps = engine.state().steps
    again = ask(engine, PROMPT, 4)
    assert again.done.cached_tokens == 48 and again.tokens == first.tokens
    assert engine.state().steps - steps == 4  # what is left of the prompt gives the first token
    assert ask(engine, PROMPT[:48], 4).done.cached_tokens == 32  # its last token's logits are wanted
    other = ask(engine, [*PROMPT[:20], 1, *PROMPT[21:]], 4)
    assert other.done.cached_tokens == 16


def test_equal_prompts_of_a_pass_keep_one_set_of_pages(engine: Engine):
    alone = ask(engine, PROMPT[::-1], 30)
    held = threading.Event()
    engine.submit(Request("m", (5,), 1, GREEDY), lambda event: isinstance(event, Done) or held.wait(30) or None)
    eventually(lambda: engine.state().models["m"].running)
    used, at = list[int](), list[Answer]()
    for _ in range(4):
        answer = Answer()

        def listen(event: Any, answer: Answer = answer) -> None:
            used.append(engine.state().pages_used)
            answer(event)

        engine.submit(Request("m", tuple(PROMPT[::-1]), 30, GREEDY), listen)
        at.append(answer)
    held.set()
    assert [answer.tokens for answer in at] == [alone.tokens] * 4
    assert max(used) <= 4 + 4 * 3  # four whole pages of all; each its own, and the fourth text's while it is computed
    assert engine.state().pages_used == 0


def test_a_conversation_finds_its_own_answer(engine: Engine):
    first = ask(engine, PROMPT, 20)
    following = [*PROMPT, *first.tokens, 9, 9]
    assert ask(engine, following, 2).done.cached_tokens == 64  # of 69 that were read


def test_a_beginning_that_sank_to_ram_is_not_computed_again(llama: Any, monkeypatch: pytest.MonkeyPatch):
    fleet = Residents({"m": llama}, sunk=6)
    engine = Engine(fleet, cache_bytes=5 * 16 * 256)
    try:
        first, other = ask(engine, PROMPT, 4), ask(engine, PROMPT[::-1], 20)
        assert first.done.cached_tokens == other.done.cached_tokens == 0
        state = engine.state()
        assert (state.pages_sunk, state.pages_sunk_total, state.pages_total, state.page_bytes) == (3, 6, 5, 16 * 256)
        assert {"vb_pages_sunk 3", "vb_pages_sunk_total 6", "vb_pages_total 5"} <= {*Metrics().lines(state)}
        again = ask(engine, PROMPT, 4)
        assert again.tokens == first.tokens and again.done.cached_tokens == 48
        assert ask(engine, PROMPT[::-1], 20).tokens == other.tokens and fleet.sunk is not None
        monkeypatch.setattr(fleet.sunk, "move", lambda moves: False)  # what is in RAM cannot be read
        lost = ask(engine, PROMPT, 4)
        assert lost.tokens == first.tokens and lost.done.reason == "length" and lost.done.cached_tokens < 48
    finally:
        engine.close()
    assert not fleet.reserved


def test_told_probabilities_are_the_models_own(llama: Any, engine: Engine):
    """Neither temperature, penalties nor biases change them."""
    answer = ask(
        engine,
        PROMPT,
        5,
        sampling=Sampling(2.0),
        seed=3,
        logprobs=3,
        prompt_logprobs=True,
        logit_bias={7: 2.0},
        repetition_penalty=1.2,
    )
    told = answer.told
    tokens = [token.token for token in told]
    assert tokens[:50] == PROMPT and [token.of_prompt for token in told] == [True] * 50 + [False] * 5
    assert told[0].logprob is None and told[0].top == ()
    with torch.no_grad():
        expected = torch.log_softmax(llama(torch.tensor([tokens])).logits[0], -1)
    for place, token in enumerate(told[1:]):
        assert token.logprob == pytest.approx(expected[place, tokens[place + 1]].item(), abs=1e-4)  # fp32 sums
        top = expected[place].topk(3)
        assert [number for number, _ in token.top] == top.indices.tolist()
        assert [each for _, each in token.top] == pytest.approx(top.values.tolist(), abs=1e-4)


def test_no_likeliest_tokens_are_told_where_none_are_asked_for(engine: Engine):
    (token,) = ask(engine, PROMPT, 1, logprobs=0).told
    assert token.logprob is not None and token.top == ()
    assert ask(engine, PROMPT, 1).told[0].logprob is None


def test_penalties_and_biases_are_as_defined(llama: Any, engine: Engine):
    more = {"repetition_penalty": 1.5, "presence_penalty": 0.7, "frequency_penalty": 0.4, "logit_bias": {5: 1.0, 8: -9}}
    answer = ask(engine, PROMPT, 12, **more)
    assert answer.done.reason == "length"
    text, expected = list(PROMPT), []
    for _ in range(12):
        with torch.no_grad():
            logits = llama(torch.tensor([text])).logits[0, -1]
        for token in set(text):
            logits[token] = logits[token] / 1.5 if logits[token] > 0 else logits[token] * 1.5
        for token in set(expected):
            logits[token] -= 0.7 + 0.4 * expected.count(token)
        logits[5] += 1.0
        logits[8] -= 9
        expected.append(int(logits.argmax()))
        text.append(expected[-1])
    assert answer.tokens == expected
    assert answer.tokens != ask(engine, PROMPT, 12).tokens


def test_a_seed_gives_the_same_text_and_another_seed_another(engine: Engine):
    texts = [ask(engine, PROMPT, 12, sampling=Sampling(1.5), seed=seed) for seed in (1, 1, 2)]
    assert texts[0].tokens == texts[1].tokens != texts[2].tokens


def test_an_end_token_ends_and_is_told(engine: Engine):
    tokens = ask(engine, PROMPT, 12).tokens
    end = tokens[5]
    answer = ask(engine, PROMPT, 12, end_tokens=frozenset({end}))
    assert answer.tokens == tokens[: tokens.index(end) + 1] and answer.done.reason == "stop"


def test_a_cancelled_request_gives_its_pages_back_within_two_steps(engine: Engine):
    answer, at = Answer(), list[int]()

    def listen(event: Any) -> None:
        answer(event)
        if len(answer.events) == 3:
            engine.cancel(number)
            at.append(engine.state().steps)

    number = engine.submit(Request("m", tuple(PROMPT), 150, GREEDY), listen)
    assert answer.done.reason == "cancelled" and answer.done.new_tokens < 6
    assert engine.state().pages_used == 0 and engine.state().steps - at[0] <= 2
    engine.cancel(number)
    engine.cancel(10_000)  # neither is known any more
    assert ask(engine, PROMPT, 2).done.reason == "length"


def test_one_that_waits_is_cancelled_too(llama: Any):
    engine = Engine(Residents({"m": llama}), cache_bytes=16 * 16 * 256, max_running=1)
    try:
        first, second = ask(engine, PROMPT, 100), ask(engine, PROMPT, 100)
        engine.cancel(second.number)
        assert second.done.reason == "cancelled" and second.done.new_tokens == 0
        engine.cancel(first.number)
    finally:
        engine.close()


class Raises:
    """A grammar that raises at the third token, or forbids every one."""

    def __init__(self, where: str) -> None:
        self.where, self.count = where, 0

    def mask(self, logits_V: torch.Tensor) -> None:
        self.count += 1
        if self.where == "mask" and self.count == 3:
            raise ValueError("no such rule")
        if self.where == "all" and self.count == 3:
            logits_V[:] = float("-inf")

    def accept(self, token: int) -> bool:
        if self.where == "accept" and self.count == 3:
            raise KeyError(token)
        return False


@pytest.mark.parametrize(
    ("where", "error", "words"),
    [("mask", VBError, "no such rule"), ("accept", VBError, "KeyError"), ("all", Unsupported, "no token may follow")],
)
def test_a_grammar_that_fails_ends_its_own_text(engine: Engine, where: str, error: type, words: str):
    expected = ask(engine, PROMPT, 12).tokens
    poisoned, healthy = ask(engine, PROMPT, 12, constraint=Raises(where)), ask(engine, PROMPT, 12)
    assert poisoned.done.reason == "error" and isinstance(poisoned.done.error, error)
    assert words in str(poisoned.done.error) and len(poisoned.tokens) in (2, 3)
    assert healthy.tokens == expected and engine.state().pages_used == 0


def test_what_a_failing_request_shares_is_still_found(engine: Engine):
    """Pages of others' beginnings are forgotten only where numbers are wrong."""
    first = ask(engine, PROMPT, 4)
    assert first.done.cached_tokens == 0
    assert ask(engine, PROMPT[:40], 4, constraint=Raises("mask")).done.reason == "error"
    assert ask(engine, PROMPT, 4).done.cached_tokens == 48


def test_logits_that_are_not_finite_end_their_own_text():
    model = tiny("Llama", tie_word_embeddings=False)
    with torch.no_grad():
        model.model.embed_tokens.weight[66] = float("nan")
    engine = Engine(Residents({"m": model}), cache_bytes=1 << 20)
    try:
        expected = ask(engine, PROMPT, 12).tokens
        assert 66 not in expected
        answers = [ask(engine, tokens, 12) for tokens in (PROMPT, [*PROMPT[:40], 66], PROMPT)]
        assert answers[1].done.reason == "error" and isinstance(answers[1].done.error, CorruptData)
        assert answers[0].tokens == answers[2].tokens == expected
        assert ask(engine, [*PROMPT[:40], 66, 5], 2).done.cached_tokens <= 32  # nothing of it is found again
        told = ask(engine, [*PROMPT[:10], 66, 5], 2, prompt_logprobs=True)
        assert isinstance(told.done.error, CorruptData)
        assert not any(math.isnan(token.logprob or 0) for token in told.told)
    finally:
        engine.close()


def test_told_probabilities_that_are_no_numbers_are_an_error():
    logits_LV = torch.zeros((3, 4))
    logits_LV[1, 0] = float("-inf")  # a token that never follows
    good = tell(logits_LV, [1, 0, 2], 1)
    assert good[1][0] == float("-inf") and why_not_told(good) is None
    for damage in (float("nan"), float("inf")):
        logits_LV[2, 0] = damage
        assert isinstance(why_not_told(tell(logits_LV, [1, 0, 2], 0)), CorruptData)
    assert why_not_told([(None, ())]) is None


def test_texts_of_a_pass_that_fails_are_tried_alone(llama: Any):
    """Foreign code raises for the token 66: its text fails, and those that shared the pass do not."""

    def hook(module: Any, args: Any) -> None:
        if bool((args[0] == 66).any()):
            raise RuntimeError("the disk is gone")

    handle = llama.model.embed_tokens.register_forward_pre_hook(hook)
    engine = Engine(Residents({"m": llama}), cache_bytes=1 << 20)
    try:
        expected = ask(engine, PROMPT, 6).tokens
        answers = [ask(engine, tokens, 6) for tokens in (PROMPT, [66, 5], PROMPT, [66], PROMPT)]
        assert [answer.done.reason for answer in answers] == ["length", "error", "length", "error", "length"]
        assert all("the disk is gone" in str(answer.done.error) for answer in answers[1::2])
        assert all(answer.tokens == expected for answer in answers[::2])
        assert engine.state().pages_used == 0 and engine.state().alive
    finally:
        engine.close()
        handle.remove()


def test_a_listener_that_raises_loses_its_own_request(engine: Engine):
    def listen(event: Any) -> None:
        raise OSError("the client is gone")

    engine.submit(Request("m", tuple(PROMPT), 100, GREEDY), listen)
    assert ask(engine, PROMPT, 3).done.reason == "length"
    eventually(lambda: engine.state().pages_used == 0)


def test_what_cannot_be_is_refused(llama: Any, engine: Engine):
    with pytest.raises(UnknownModel, match="did you mean 'm'"):
        ask(engine, PROMPT, model="mm")
    with pytest.raises(RequestTooLong, match="reads 256") as found:
        ask(engine, PROMPT, 207)
    assert (found.value.wanted, found.value.limit) == (257, 256)
    with pytest.raises(RequestTooLong, match="257 tokens and 1 new ones: m reads 256"):
        ask(engine, [1] * 257, 1)
    assert ask(engine, [1] * 256, 1).done.reason == "length"  # what is drawn after them is not read
    for more in ({"tokens": [VOCABULARY]}, {"tokens": [-1]}, {"tokens": [1], "logit_bias": {VOCABULARY: 1.0}}):
        with pytest.raises(ConfigurationError, match="has no token"):
            ask(engine, **more)
    small = Engine(Residents({"m": llama}), cache_bytes=4 * 16 * 256)
    try:
        assert ask(small, PROMPT, 15).done.reason == "length"  # 64 positions are read
        with pytest.raises(RequestTooLong, match="hold 64"):
            ask(small, PROMPT, 16)
    finally:
        small.close()
    for more in ({"max_waiting": 0}, {"max_running": 0}, {"max_rows": 0}, {"turn_s": -1.0}, {"cache_bytes": 100}):
        with pytest.raises(ConfigurationError):
            Engine(Residents({"m": llama}), **more)


@pytest.mark.parametrize(
    "more",
    [
        {"tokens": ()},
        {"max_new_tokens": 0},
        {"logprobs": 65},
        {"logprobs": -1},
        {"repetition_penalty": 0.0},
        {"presence_penalty": float("nan")},
        {"logit_bias": {1: float("inf")}},
        {"logit_bias": {1: 10**400}},
        {"logit_bias": {1: -1e39}},
        {"repetition_penalty": 10**400},
        {"frequency_penalty": -(10**400)},
        {"seed": 1 << 63},
        {"max_new_tokens": 0},
        {"max_new_tokens": 1, "pooling": "mean"},
    ],
    ids=lambda more: str(more)[:30],
)
def test_a_request_out_of_range_is_refused(more: dict[str, Any]):
    with pytest.raises(ConfigurationError, match=next(iter(more))):
        Request(**{"model": "m", "tokens": (1,), "max_new_tokens": 1, **more})


def test_more_requests_than_may_wait_are_refused(llama: Any):
    held = threading.Event()
    engine = Engine(Residents({"m": llama}), cache_bytes=1 << 20, max_waiting=2)
    try:
        engine.submit(Request("m", (5,), 1, GREEDY), lambda event: isinstance(event, Done) or held.wait(30) or None)
        eventually(lambda: engine.state().models["m"].running)
        waiting = [ask(engine, PROMPT, 2) for _ in range(2)]
        with pytest.raises(Busy, match="2 requests wait") as found:
            ask(engine, PROMPT, 2)
        assert found.value.retry_after_s >= 1
        held.set()
        assert {answer.done.reason for answer in waiting} == {"length"}
        assert ask(engine, PROMPT, 2).done.reason == "length"
    finally:
        held.set()
        engine.close()


def test_no_model_starves(llama: Any):
    """While one has a queue, another's request gets every second pass."""
    engine = Engine(Residents({"m": llama, "other": tiny("GPT2")}), cache_bytes=1 << 20)
    try:
        many = [ask(engine, PROMPT, 60) for _ in range(6)]
        eventually(lambda: many[0].events)
        steps = engine.state().steps
        assert ask(engine, PROMPT, 5, model="other").done.reason == "length"
        assert engine.state().steps - steps <= 2 * (5 + 1) + 4
        assert not any(isinstance(answer.events[-1], Done) for answer in many)
        for answer in many:
            engine.cancel(answer.number)
    finally:
        engine.close()


def test_an_older_request_of_another_model_gets_the_next_pages(llama: Any):
    """One model's texts take all pages; the other's comes before those that arrive after it."""
    engine = Engine(Residents({"m": llama, "other": tiny("Qwen2")}), cache_bytes=8 * 16 * 256)
    over = list[str]()

    def noting(name: str) -> Any:
        return lambda event: over.append(name) if isinstance(event, Done) else None

    try:
        engine.submit(Request("m", tuple(PROMPT), 30, GREEDY), noting("first"))
        engine.submit(Request("other", tuple(PROMPT[:40] * 3), 2, GREEDY), noting("other"))
        for _ in range(3):
            engine.submit(Request("m", tuple(PROMPT), 12, GREEDY), noting("later"))
        eventually(lambda: len(over) == 5)
        assert over == ["first", "other", "later", "later", "later"]
    finally:
        engine.close()


def test_models_are_woken_and_put_to_sleep_between_passes(llama: Any):
    fleet = Residents({"m": llama})
    engine = Engine(fleet, cache_bytes=1 << 20)
    try:
        engine.sleep("m").result(30)
        assert engine.state().models["m"].state == "asleep"
        engine.wake("m").result(30)
        assert engine.state().models["m"].state == "awake"
        with pytest.raises(UnknownModel):
            engine.wake("n")
        held = threading.Event()
        engine.submit(Request("m", (5,), 2, GREEDY), lambda event: isinstance(event, Done) or held.wait(30) or None)
        eventually(lambda: engine.state().models["m"].running)
        asked = engine.sleep("m")
        held.set()
        with pytest.raises(Busy, match="has 1 request"):
            asked.result(30)
    finally:
        engine.close()


def test_closing_lets_requests_end_and_gives_everything_back(llama: Any):
    fleet = Residents({"m": llama})
    engine = Engine(fleet, cache_bytes=1 << 20)
    answers = [ask(engine, PROMPT, 10) for _ in range(3)]
    engine.close()
    engine.close()
    assert {answer.done.reason for answer in answers} == {"length"}
    assert not fleet.reserved and not engine.state().alive
    with pytest.raises(EngineClosed):
        ask(engine, PROMPT)
    with pytest.raises(EngineClosed):
        engine.wake("m")


def test_closing_at_once_cancels(llama: Any):
    engine = Engine(Residents({"m": llama}), cache_bytes=1 << 20)
    answers = [ask(engine, PROMPT, 150) for _ in range(3)]
    engine.close(grace_s=0)
    assert {answer.done.reason for answer in answers} == {"cancelled"}


def once(monkeypatch: pytest.MonkeyPatch, where: Any, name: str, error: Exception) -> None:
    """``where.name`` raises the first time that it is called, and then does what it did."""
    before, left = getattr(where, name), [error]

    def fails(*args: Any) -> Any:
        if left:
            raise left.pop()
        return before(*args)

    monkeypatch.setattr(where, name, fails)


@pytest.mark.parametrize(("name", "more"), [("draw", {}), ("tell", {"prompt_logprobs": True, "logprobs": 1})])
def test_memory_that_is_lacking_after_a_pass_ends_no_other_text(
    name: str, more: dict[str, Any], engine: Engine, monkeypatch: pytest.MonkeyPatch
):
    """Texts that shared the pass are tried alone and get what they get anyway; one by itself ends by it."""
    prompts = [PROMPT[:8], PROMPT[3:20]]
    expected = [ask(engine, prompt, 6, **more).told for prompt in prompts]
    held = threading.Event()
    engine.submit(Request("m", (5,), 1, GREEDY), lambda event: isinstance(event, Done) or held.wait(30) or None)
    eventually(lambda: engine.state().models["m"].running)
    once(monkeypatch, engine_module, name, torch.OutOfMemoryError("no room for (L, V)"))
    answers = [ask(engine, prompt, 6, **more) for prompt in prompts]
    held.set()
    assert [answer.told for answer in answers] == expected
    once(monkeypatch, engine_module, name, torch.OutOfMemoryError("no room for (L, V)"))
    failed = ask(engine, PROMPT[:5], 4, **more).done
    assert failed.reason == "error" and "no room for" in str(failed.error)
    assert engine.state().alive and engine.state().pages_used == 0
    assert ask(engine, PROMPT[:8], 6, **more).told == expected[0]


def test_a_lost_device_ends_the_engine_so_that_health_tells(llama: Any, monkeypatch: pytest.MonkeyPatch):
    made = Engine(Residents({"m": llama}), cache_bytes=1 << 20)
    once(monkeypatch, engine_module, "draw", torch.AcceleratorError("CUDA error: an illegal memory access"))
    ended = list[Any]()
    monkeypatch.setattr(threading, "excepthook", ended.append)  # its thread ends by the error
    done = ask(made, PROMPT, 4).done
    made.close()
    assert done.reason == "error" and "illegal memory access" in str(done.error) and not made.state().alive
    assert [each.exc_type for each in ended] == [torch.AcceleratorError]


def test_an_order_that_nobody_waits_for_any_more_ends_nothing(llama: Any):
    fleet = Residents({"m": llama})
    made = Engine(fleet, cache_bytes=1 << 20)
    try:
        held, begun = threading.Event(), threading.Event()

        def listen(event: Any) -> None:
            begun.set()
            held.wait(30)

        made.submit(Request("m", (5, 6), 2, GREEDY), listen)
        assert begun.wait(30)
        dropped, kept = made.wake("m"), made.wake("m")
        assert dropped.cancel()
        held.set()
        assert kept.result(30) is None and made.state().alive
    finally:
        made.close()


def test_models_with_texts_are_told_to_the_fleet_whose_errors_end_nothing(llama: Any, monkeypatch: pytest.MonkeyPatch):
    fleet, seen = Residents({"m": llama, "other": llama}), list[set[str]]()

    def sleep_idle(busy: Any) -> None:
        seen.append(set(busy))
        raise OSError("no such device")

    monkeypatch.setattr(fleet, "sleep_idle", sleep_idle)
    made = Engine(fleet, cache_bytes=1 << 20)
    try:
        assert len(ask(made, PROMPT, 4).tokens) == 4 and made.state().alive
        assert {"m"} in seen and not any("other" in busy for busy in seen)
    finally:
        made.close()


def test_time_without_requests_does_not_count_for_when_to_try_again(llama: Any, monkeypatch: pytest.MonkeyPatch):
    made = Engine(Residents({"m": llama}), cache_bytes=1 << 20)
    try:
        assert ask(made, PROMPT, 2).tokens
        made._last_end -= 3600
        assert ask(made, PROMPT, 2).tokens
        assert made._interval_s < 60
    finally:
        made.close()


def test_a_pass_does_not_search_the_model_for_configs(engine: Engine, monkeypatch: pytest.MonkeyPatch):
    """Each of the modules without one would take the host its time before every pass."""
    expected, asked = ask(engine, PROMPT, 2).tokens, list[str]()
    given, register = torch.nn.Module.__getattr__, transformers.AttentionInterface.register
    monkeypatch.setattr(torch.nn.Module, "__getattr__", lambda self, name: asked.append(name) or given(self, name))
    monkeypatch.setattr(
        transformers.AttentionInterface, "register", lambda *args: asked.append("register") or register(*args)
    )
    assert ask(engine, PROMPT, 2).tokens == expected
    assert "embed_tokens" in asked and not {"config", "register"} & {*asked}


def test_a_model_is_as_it_was_after_a_pass(llama: Any, engine: Engine):
    ids = torch.tensor([PROMPT])
    before, config = llama(ids).logits, llama.config._attn_implementation
    llama.train()
    assert ask(engine, PROMPT, 2).done.reason == "length"
    assert llama.training and llama.config._attn_implementation == config
    llama.eval()
    assert torch.equal(llama(ids).logits, before)


def test_events_are_whole(engine: Engine):
    answer = ask(engine, PROMPT, 3)
    assert answer.done == answer.events[-1] == Done("length", None, 50, 0, 3)
    assert all(isinstance(event, Token) for event in answer.events[:-1]) and len(answer.events) == 4
