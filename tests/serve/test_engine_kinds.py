"""Every causal architecture of transformers that can be made small: the engine writes what transformers writes, whether
their texts share passes or not. A selection runs always, all with the mark ``slow``."""

import pytest
import torch

from tests.nn.convert.test_architectures import selected, text_of
from tests.nn.convert.tiny_models import small_kinds, tiny_model
from tests.serve.models import Residents, ask
from vblackwell.serve.engine import Engine

pytestmark = pytest.mark.filterwarnings("ignore")  # what architectures say about themselves is theirs
ALWAYS = ["deepseek_v3", "gpt_neox", "granitemoe", "olmo3", "phi3"]
NEW = 5
SHARING = ("llama qwen2 qwen3 mistral gemma2 gemma3_text mixtral gpt2 qwen3_moe glm4_moe phi starcoder2 olmoe stablelm "
    "cohere2 glm4_moe_lite smollm3 exaone4")  # fmt: skip


@pytest.mark.parametrize("kind", selected(small_kinds(), ALWAYS))
def test_the_text_is_that_of_transformers(kind: str):
    model = tiny_model(kind)
    if getattr(model.config.get_text_config(), "attn_logit_softcapping", None):
        model.set_attn_implementation("eager")  # SDPA has no softcap; without a mask not every eager one is causal
    draw = torch.Generator().manual_seed(0)
    prompts = [torch.randint(3, 93, (length,), generator=draw).tolist() for length in (3, 11, 25)]
    expected = [text_of(model, prompt, NEW) for prompt in prompts]
    engine = Engine(Residents({"m": model}), cache_bytes=1 << 21, max_rows=20)
    try:
        assert engine.state().models["m"].paged or kind not in {*SHARING.split(), *ALWAYS}, (
            engine.state().models["m"].reason
        )
        answers = [ask(engine, prompt, NEW) for prompt in prompts]
        assert [answer.done.error for answer in answers] == [None] * 3
        assert [answer.tokens for answer in answers] == expected
    finally:
        engine.close()
