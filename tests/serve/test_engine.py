"""The engine writes what transformers writes, alone and in a batch."""

import random
from collections.abc import Iterator
from typing import Any

import pytest
import torch

from tests.delay import set_transfer_delay
from tests.serve.models import KINDS, AsOnGpu, Residents, ask, tiny
from vblackwell.generate.sampling import Sampling
from vblackwell.offload.layout.generation import workspace_bytes
from vblackwell.serve.engine import Engine
from vblackwell.serve.fleet import Fleet
from vblackwell.serve.paged_model import PagedModel
from vblackwell.serve.pass_graphs import PassGraphs

PROMPTS = ([5], [7, 8, 9], [3 + i % 40 for i in range(37)], [11 + i % 17 for i in range(70)])


def generated(model, prompt: list[int], count: int) -> list[int]:
    ids = torch.tensor([prompt])
    made = model.generate(
        ids, attention_mask=torch.ones_like(ids), max_new_tokens=count, do_sample=False, eos_token_id=None
    )
    return made[0, len(prompt) :].tolist()


LIKE_LLAMA = {"Qwen2", "Qwen3", "Mistral"}  # but for a bias, a norm of heads, a window; Gemma2 has the last one, too


@pytest.mark.parametrize(
    "kind", [pytest.param(kind, marks=[pytest.mark.slow] * (kind in LIKE_LLAMA)) for kind in (*KINDS, "GPT2")]
)
def test_greedy_texts_are_those_of_transformers(kind: str):
    model = tiny(kind)
    model.set_attn_implementation("eager")  # the one that softcaps
    expected = [generated(model, prompt, 18) for prompt in PROMPTS]
    assert len({tuple(each) for each in expected}) == len(PROMPTS)
    engine = Engine(Residents({"m": model}), cache_bytes=1 << 20, max_rows=48)
    try:
        state = engine.state().models["m"]
        assert state.paged and not state.reason
        answers = [ask(engine, prompt, 18) for prompt in PROMPTS]
        assert [answer.tokens for answer in answers] == expected
        assert {answer.done.reason for answer in answers} == {"length"}
    finally:
        engine.close()


def check_company(fleet: Any, asked: list[dict[str, Any]], **options: Any) -> Iterator[Any]:
    """What each request is told when it has the engine to itself is what it is told in company; the lines of both."""
    found = []
    for together in (False, True):
        engine = Engine(fleet, **options)
        try:
            answers = []
            for request in asked:
                answers.append(ask(engine, **request))
                assert together or answers[-1].done
            found.append([answer.told for answer in answers])
            yield engine._scheduler.lines.values()
        finally:
            engine.close()
    assert found[0] == found[1]


DEVICES = ["cpu", pytest.param("cuda", marks=pytest.mark.gpu)]
WORKSPACE = {"cpu": 0, "cuda": workspace_bytes(0)}  # of the budget: none is counted of an arena
WIDE = {"hidden_size": 64}  # heads of 16, the least of the kernels


@pytest.mark.parametrize("device", DEVICES)
def test_models_that_take_turns_write_what_transformers_writes(device: str):
    """In fp32, under a budget of one and a half of them; asleep they leave nothing on level 0 but the pages."""
    models = {kind: tiny(kind, **WIDE) for kind in ("Llama", "Qwen2")}
    expected = {kind: [generated(model, prompt, 12) for prompt in PROMPTS] for kind, model in models.items()}
    size = max(sum(param.nbytes for param in model.parameters()) for model in models.values())
    pages = 1 << 20
    budget = pages + 3 * size // 2 + WORKSPACE[device]
    with Fleet.of_modules(models, budget=budget, host_memory="64MiB", device=device) as fleet:
        engine = Engine(fleet, cache_bytes=pages, max_rows=48)
        try:
            answers = [(kind, place, ask(engine, PROMPTS[place], 12, kind)) for place in range(4) for kind in models]
            assert all(answer.tokens == expected[kind][place] for kind, place, answer in answers)
            for kind in models:
                engine.sleep(kind).result(60)
            assert fleet.stack.get_stats()["levels"][0]["used_bytes"] <= pages
        finally:
            engine.close()


@pytest.mark.parametrize("device", DEVICES)
def test_bits_are_those_of_each_request_alone_in_bf16(device: str):
    """Tokens and log probabilities, of texts that share passes and of one that has the engine to itself."""
    models = {kind: tiny(kind, **WIDE).to(torch.bfloat16) for kind in ("Llama", "Gemma2")}
    asked = [
        {"tokens": prompt, "count": 10, "model": kind, "seed": place, "logprobs": 2, "sampling": Sampling(1.0)}
        for place, prompt in enumerate(PROMPTS)
        for kind in models
    ]
    budget = (8 << 20) + WORKSPACE[device]
    with Fleet.of_modules(models, budget=budget, host_memory="64MiB", device=device) as fleet:
        assert len([*check_company(fleet, asked, cache_bytes=1 << 20, max_rows=40)]) == 2


@pytest.mark.parametrize("device", DEVICES)
@pytest.mark.parametrize("kind", [pytest.param("Llama", marks=pytest.mark.slow), "Gemma2"])
def test_passes_ahead_of_their_tokens_write_the_same(kind: str, device: str, monkeypatch: pytest.MonkeyPatch):
    """Texts of several lengths, one ended by its own token, one that draws, one that wants probabilities told."""
    model = tiny(kind, **WIDE)
    end = frozenset(generated(model, PROMPTS[2], 12)[9:10])
    asked = [
        {"tokens": PROMPTS[0], "count": 40},
        {"tokens": PROMPTS[1], "count": 40, "seed": 3, "sampling": Sampling(1.0, top_k=20), "logprobs": 2},
        {"tokens": PROMPTS[2], "count": 23, "end_tokens": end},
        {"tokens": PROMPTS[3], "count": 31, "frequency_penalty": 0.5},
    ]
    found = []
    for ahead in (False, True):
        seen = AsOnGpu(monkeypatch) if ahead else None
        budget = (8 << 20) + WORKSPACE[device]
        with Fleet.of_modules({"m": model}, budget=budget, host_memory="64MiB", device=device) as fleet:
            engine = Engine(fleet, cache_bytes=1 << 20, max_rows=48)
            try:
                answers = [ask(engine, **request) for request in asked[:3]]
                assert {answer.done.reason for answer in answers} == {"length", "stop"}
                answers += [ask(engine, **request) for request in asked]
                found.append([(answer.told, answer.done.reason) for answer in answers])
                assert engine.state().pages_used == 0
            finally:
                engine.close()
        if seen is not None:
            assert seen.count > 20
    assert found[0] == found[1]


def test_a_pass_ahead_that_fails_ends_no_text_that_can_go_on(monkeypatch: pytest.MonkeyPatch):
    """One of two texts ends with the token that the pass would have read; the other is tried by itself."""
    model = tiny("Llama")
    first, second = (generated(model, prompt, 30) for prompt in PROMPTS[1:3])
    end = next(place for place in range(9, 30) if first[place] not in first[:place])
    AsOnGpu(monkeypatch)
    engine = Engine(Residents({"m": model}), cache_bytes=1 << 20, max_rows=48)
    logits, raised = PagedModel.logits, list[int]()

    def fails(self: PagedModel, shares: Any, tokens_R: Any = None) -> torch.Tensor:
        if tokens_R is not None and len(shares) == 2 and shares[0].begin == len(PROMPTS[1]) + end:
            raised.append(1)
            raise RuntimeError("too much for two")
        return logits(self, shares, tokens_R)

    monkeypatch.setattr(PagedModel, "logits", fails)
    try:
        answers = [
            ask(engine, PROMPTS[1], 30, end_tokens=frozenset(first[end : end + 1])),
            ask(engine, PROMPTS[2], 30),
        ]
        assert [answer.tokens for answer in answers] == [first[: end + 1], second]
        assert raised and [answer.done.reason for answer in answers] == ["stop", "length"]
    finally:
        engine.close()


@pytest.mark.gpu
def test_many_texts_share_graphs_and_keep_their_bits(monkeypatch: pytest.MonkeyPatch):
    """Sizes at which a GPU's libraries choose between kernels; two models, of which one fits next to the pages."""
    captured, capture = list[str](), PassGraphs._capture

    def spy(graphs: PassGraphs, *given: Any) -> None:
        capture(graphs, *given)
        captured.append(graphs.declined)  # looked at now: a model that falls asleep forgets its graphs

    monkeypatch.setattr(PassGraphs, "_capture", spy)
    sizes = {"hidden_size": 512, "intermediate_size": 1536, "num_hidden_layers": 4, "num_attention_heads": 8}
    sizes |= {"num_key_value_heads": 4, "vocab_size": 4000, "max_position_embeddings": 2048}
    models = {name: tiny("Llama", seed, **sizes).to(torch.bfloat16) for seed, name in enumerate("ab")}
    draw = torch.Generator().manual_seed(1)
    lengths = torch.randint(1, 400, (24,), generator=draw).tolist()
    asked = [
        {
            "tokens": torch.randint(3, 4000, (length,), generator=draw).tolist(),
            "count": 12 + place % 50,
            "model": "ab"[place % 2],
            "seed": place,
            "logprobs": 1,
            "sampling": Sampling(1.0),
        }
        for place, length in enumerate(lengths)
    ]
    size = max(sum(param.nbytes for param in model.parameters()) for model in models.values())
    pages = 64 << 20
    budget = pages + 3 * size // 2 + WORKSPACE["cuda"]
    with Fleet.of_modules(models, budget=budget, host_memory="256MiB", device="cuda") as fleet:
        for _ in check_company(fleet, asked, cache_bytes=pages, max_rows=200, turn_s=0.05):
            assert captured and not any(captured)


@pytest.mark.parametrize("device", DEVICES)
def test_bits_are_the_same_from_pages_that_sank_and_rose(
    device: str, monkeypatch: pytest.MonkeyPatch, no_delay_left: None
):
    """Two texts in turn, with pages for hardly more than one, of which the last is taken by a pass ahead of its tokens;
    on a GPU copies come late."""
    chance, models, seen = random.Random(4), {"m": tiny("Gemma2", **WIDE).to(torch.bfloat16)}, AsOnGpu(monkeypatch)
    asked = [{"tokens": [3 + (i * i + of) % 90 for i in range(70)], "count": 16, "logprobs": 2} for of in (0, 7)]
    budget = (8 << 20) + WORKSPACE[device]
    with Fleet.of_modules(models, budget=budget, host_memory="64MiB", device=device) as fleet:
        first = Engine(fleet, cache_bytes=1 << 20)
        page, expected = first.state().page_bytes, [ask(first, **request).told for request in asked]
        first.close()
        seen.count = 0
        if device == "cuda":
            set_transfer_delay(lambda kind: torch.cuda._sleep(chance.randrange(4_000_000)))
        engine = Engine(fleet, cache_bytes=7 * page, max_rows=40)
        try:
            assert [answer.told for answer in [ask(engine, **request) for request in asked]] == expected
            for request, told in list(zip(asked, expected, strict=True)) * 2:
                answer = ask(engine, **request)
                assert answer.told == told and answer.done.cached_tokens == 64
            state, names = engine.state(), [level.name for level in fleet.stack.levels]
            assert state.alive and state.pages_sunk_total == 7 and state.pages_sunk > 0
            links = {(each["source"], each["destination"]): each["bytes"] for each in fleet.stack.get_stats()["links"]}
            assert seen.count > 40
            assert links[names[0], names[1]] >= 8 * page  # nothing else goes down
        finally:
            engine.close()


@pytest.fixture
def no_delay_left() -> Iterator[None]:
    yield
    set_transfer_delay(None)
