"""The engine writes what transformers writes, alone and in a batch."""

import pytest
import torch

from tests.serve.models import KINDS, Residents, ask, tiny
from vblackwell.generate.sampling import Sampling
from vblackwell.offload.layout.generation import workspace_bytes
from vblackwell.serve.engine import Engine
from vblackwell.serve.fleet import Fleet

PROMPTS = ([5], [7, 8, 9], [3 + i % 40 for i in range(37)], [11 + i % 17 for i in range(70)])


def generated(model, prompt: list[int], count: int) -> list[int]:
    ids = torch.tensor([prompt])
    made = model.generate(
        ids, attention_mask=torch.ones_like(ids), max_new_tokens=count, do_sample=False, eos_token_id=None
    )
    return made[0, len(prompt) :].tolist()


@pytest.mark.parametrize("kind", [*KINDS, "GPT2"])
def test_greedy_texts_are_those_of_transformers(kind: str):
    model = tiny(kind)
    model.set_attn_implementation("eager")  # the one that softcaps
    expected = [generated(model, prompt, 24) for prompt in PROMPTS]
    assert len({tuple(each) for each in expected}) == len(PROMPTS)
    engine = Engine(Residents({"m": model}), cache_bytes=1 << 20, max_rows=48)
    try:
        state = engine.state().models["m"]
        assert state.paged and not state.reason
        answers = [ask(engine, prompt, 24) for prompt in PROMPTS]
        assert [answer.tokens for answer in answers] == expected
        assert {answer.done.reason for answer in answers} == {"length"}
    finally:
        engine.close()


DEVICES = ["cpu", pytest.param("cuda", marks=pytest.mark.gpu)]
WORKSPACE = {"cpu": 0, "cuda": workspace_bytes(0)}  # of the budget: none is counted of an arena
WIDE = {"hidden_size": 64, "num_hidden_layers": 4}  # heads of 16, the least of the kernels


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
        found = []
        for together in (False, True):
            engine = Engine(fleet, cache_bytes=1 << 20, max_rows=40)
            try:
                answers = []
                for request in asked:
                    answers.append(ask(engine, **request))
                    assert together or answers[-1].done
                found.append([answer.told for answer in answers])
            finally:
                engine.close()
        assert found[0] == found[1]
