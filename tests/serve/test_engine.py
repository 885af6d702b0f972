"""The engine writes what transformers writes, alone and in a batch."""

import pytest
import torch

from tests.serve.models import KINDS, Residents, ask, tiny
from vblackwell.serve.engine import Engine

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
