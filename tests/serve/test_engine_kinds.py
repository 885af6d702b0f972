"""Every causal architecture of transformers that can be made small: the engine writes what transformers writes, whether
their texts share passes or not. A selection runs always, all with the mark ``slow``."""

from typing import Any

import pytest
import torch

from tests.nn.convert.test_architectures import selected, text_of
from tests.nn.convert.tiny_models import small_kinds, tiny_model
from tests.serve.models import Residents, ask
from vblackwell.errors import Unsupported
from vblackwell.serve.engine import Engine
from vblackwell.serve.fleet import Fleet
from vblackwell.serve.paged_model import PagedModel, Share, block_bytes_of

pytestmark = pytest.mark.filterwarnings("ignore")  # what architectures say about themselves is theirs
ALWAYS = ["deepseek_v3", "gpt_neox", "granitemoe", "olmo3", "opt", "phi3"]
NEW = 5
SHARING = ("llama qwen2 qwen3 mistral gemma2 gemma3_text mixtral gpt2 qwen3_moe glm4_moe phi starcoder2 olmoe stablelm "
    "cohere2 glm4_moe_lite smollm3 exaone4")  # fmt: skip


@torch.no_grad()
def rows_of(model: Any, prompt: list[int]) -> torch.Tensor:
    """What transformers has for a text after the last norm."""
    return model.base_model(torch.tensor([prompt]), use_cache=False).last_hidden_state[0].float()


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
        if kind == "opt":  # its head is called on a part of its base model
            assert isinstance(ask(engine, prompts[0], 0, pooling="last").done.error, Unsupported)
        elif engine.state().models["m"].paged:
            for prompt in prompts:
                rows = rows_of(model, prompt)
                found = [ask(engine, prompt, 0, pooling=how).vector for how in ("last", "mean")]
                # fp32 through a few layers
                torch.testing.assert_close(found, [rows[-1], rows.mean(0)], rtol=1e-3, atol=1e-4)
    finally:
        engine.close()


@pytest.mark.parametrize("kind", selected(small_kinds(), ALWAYS))
def test_rows_are_the_same_in_any_company(kind: str):
    """In a fleet, where linears tile themselves unless a model multiplies otherwise as well."""
    draw = torch.Generator().manual_seed(1)
    lengths, pages = (5, 19, 30, 11), ([1], [2, 3], [4, 5], [6])
    prompts = [torch.randint(3, 93, (length,), generator=draw).tolist() for length in lengths]
    shares = [Share(prompt, 0, held, len(prompt), True) for prompt, held in zip(prompts, pages, strict=True)]
    with Fleet.of_modules({"m": tiny_model(kind)}, budget="64MiB", host_memory="64MiB", device="cpu") as fleet:
        model = PagedModel(fleet.models["m"])
        if not model.paged:
            return
        block = block_bytes_of([model])
        model.place(fleet.reserve(block * 8), block)
        fleet.models["m"].touch()
        alone = [model.logits([share]).clone() for share in shares]
        assert torch.equal(model.logits(shares), torch.cat(alone))
