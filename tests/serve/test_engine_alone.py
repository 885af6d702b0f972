"""Which models share passes, found by looking; those that cannot are read one text at a time by the same engine."""

from typing import Any

import pytest
import torch
import transformers

from tests.serve.models import VOCABULARY, Residents, ask, tiny
from vblackwell.errors import Unsupported
from vblackwell.generate.sampling import Sampling
from vblackwell.serve.engine import Engine
from vblackwell.serve.form import LayerForm, layers_of

SMALL = {"vocab_size": VOCABULARY, "hidden_size": 32, "num_hidden_layers": 2, "bos_token_id": 1, "eos_token_id": 2,
    "pad_token_id": 0}  # fmt: skip
HEADS = {"intermediate_size": 48, "num_attention_heads": 4, "num_key_value_heads": 2, "max_position_embeddings": 256}
WORDS: dict[str, tuple[dict[str, Any], str]] = {
    "Mamba": ({}, "keeps a state"),
    "Jamba": (HEADS, "keeps a state"),
    "Falcon": ({"num_attention_heads": 4}, "compute by"),
    "Bloom": ({"n_head": 4}, "takes no positions"),
    "Llama4Text": ({**HEADS, "head_dim": 8, "intermediate_size_mlp": 48}, "chunked_attention"),
    "GptOss": ({**HEADS, "head_dim": 8, "num_local_experts": 4}, "other than as linears"),
    "Phimoe": ({**HEADS, "sliding_window": 8}, "no more than 8 tokens"),
}


def on_meta(kind: str, sizes: dict[str, Any]) -> Any:
    config = getattr(transformers, f"{kind}Config")(**SMALL, **sizes)
    with torch.device("meta"):
        return getattr(transformers, f"{kind.removesuffix('Text')}ForCausalLM")(config)


@pytest.mark.parametrize("kind", WORDS)
def test_a_model_that_cannot_share_says_why(kind: str):
    forms, reason, _ = layers_of(on_meta(kind, WORDS[kind][0]))
    assert forms == () and WORDS[kind][1] in reason


def test_scaled_positions_that_depend_on_the_longest_text_do_not_share():
    longest = {"rope_type": "dynamic", "factor": 2.0, "rope_theta": 10000.0}
    assert "dynamic" in layers_of(on_meta("Llama", {**HEADS, "rope_parameters": longest}))[1]


def test_a_model_of_another_kind_says_so():
    assert "transformers' causal" in layers_of(torch.nn.Linear(2, 2))[1]


def test_the_form_of_each_layer_is_found():
    assert layers_of(on_meta("Llama", HEADS)) == ((LayerForm(2, 8),) * 2, "", False)
    assert layers_of(on_meta("Gemma2", {**HEADS, "head_dim": 16})) == ((LayerForm(2, 16),) * 2, "", False)


def mamba() -> Any:
    torch.manual_seed(0)
    model = transformers.MambaForCausalLM(transformers.MambaConfig(**SMALL, state_size=8, use_mambapy=False))
    with torch.no_grad():
        model.get_input_embeddings().weight.normal_()
    return model.eval()


def falcon() -> Any:
    torch.manual_seed(0)
    model = transformers.FalconForCausalLM(transformers.FalconConfig(**SMALL, num_attention_heads=4))
    with torch.no_grad():
        for param in model.parameters():
            if param.dim() > 1:
                param.normal_(std=0.3)
    return model.eval()


@pytest.mark.filterwarnings("ignore")  # transformers' own, of kernels that are not installed
@pytest.mark.parametrize("make", [mamba, falcon])
def test_texts_of_such_a_model_are_those_of_transformers_one_after_the_other(make: Any):
    model, prompts = make(), ([5, 6, 7], [9, 8, 7, 6], [30])
    expected = []
    for prompt in prompts:
        ids = torch.tensor([prompt])
        options = {"attention_mask": torch.ones_like(ids), "do_sample": False, "eos_token_id": None}
        expected.append(model.generate(ids, max_new_tokens=8, **options)[0, len(prompt) :].tolist())
    engine = Engine(Residents({"m": model, "llama": tiny("Llama")}), cache_bytes=1 << 20)
    try:
        state = engine.state().models
        assert not state["m"].paged and state["m"].reason and state["llama"].paged
        shared = ask(engine, prompts[0], 8, "llama")
        answers = [ask(engine, prompt, 8) for prompt in prompts]
        assert [answer.tokens for answer in answers] == expected
        assert shared.done.reason == "length" and answers[0].done.cached_tokens == 0
        drawn = [ask(engine, [5], 8, sampling=Sampling(1.0), seed=7, logprobs=1) for _ in range(2)]
        assert drawn[0].told == drawn[1].told and drawn[0].told[0].logprob is not None
        stopped = ask(engine, [5], 200)
        engine.cancel(stopped.number)
        assert stopped.done.reason == "cancelled"
        with pytest.raises(Unsupported, match="one text at a time"):
            ask(engine, [5], prompt_logprobs=True)
    finally:
        engine.close()
