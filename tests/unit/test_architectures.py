"""Architectures of transformers, small random models of each: the text that we write is transformers' own.

A selection runs always; all that can be made small have the mark ``slow`` (`make test-all`).
"""

from __future__ import annotations

import pytest
import torch
from transformers import AutoModelForCausalLM

from benchmarks.tiny_models import IDS, all_kinds, tiny_model
from tests.offload.conftest import make_stack  # noqa: F401 - a fixture
from vblackwell.errors import ConfigurationError
from vblackwell.infer.batch import columns
from vblackwell.infer.generate import draws, stepper
from vblackwell.infer.load import load_model
from vblackwell.infer.own_state import check_one_pass
from vblackwell.infer.sampling import Sampling
from vblackwell.infer.streamed import open_streamed

pytestmark = pytest.mark.filterwarnings("ignore")  # what architectures say about themselves is theirs
NEW, GREEDY = 5, Sampling(temperature=0)
SHORT = [IDS[0].tolist(), IDS[1, :7].tolist()]
OWN_STATE = ["mamba", "openai-gpt", "recurrent_gemma", "rwkv", "xlnet", "xlstm"]
WRITTEN = [*OWN_STATE, "arcee", "bamba", "granitemoehybrid", "marian", "roberta"]
# transformers' generate gives them positions from 0 on, where their forward, which we call, counts from behind the padding token's number.
OTHER_POSITIONS = {"camembert", "data2vec-text", "roberta", "roberta-prelayernorm", "xlm-roberta", "xlm-roberta-xl"}
# What cannot be made small here by sizes alone, or is no text model: pictures and sound, or a fault of transformers' own.
LEFT = {
    "blt", "cohere_compass_text", "dbrx", "dots3_note", "dots3_note_text", "emu3", "fuyu", "gemma3", "gemma3n", "gemma4",
    "gemma4_assistant", "gemma4_unified", "gemma4_unified_assistant", "git", "got_ocr2", "llama4", "mllama", "moss_transcribe_diarize",
    "musicgen",
    "musicgen_melody", "phi4_multimodal", "qwen3_5", "qwen3_5_moe", "qwen4_exp", "qwen4_exp_text", "xmod", "zamba",
}  # fmt: skip
OTHERS = [kind for kind in all_kinds() if kind not in LEFT]


def selected(kinds: list[str], always: list[str]):
    """Those ``always`` run, the others with the mark ``slow``."""
    return [pytest.param(kind, marks=[] if kind in always else pytest.mark.slow) for kind in kinds]


def text_of(model, ids: list[int]) -> list[int]:
    """What transformers writes behind ``ids``, alone: some of its models mix rows up."""
    ids_1S = torch.tensor([ids])
    if model.config.model_type in OTHER_POSITIONS:
        with torch.no_grad():
            for _ in range(NEW):
                ids_1S = torch.cat((ids_1S, model(ids_1S).logits[:, -1:].argmax(-1)), 1)
        return ids_1S[0, len(ids) :].tolist()
    options = {"max_new_tokens": NEW, "do_sample": False, "pad_token_id": 0}
    return model.generate(ids_1S, attention_mask=torch.ones_like(ids_1S), **options)[0, len(ids) :].tolist()


@pytest.mark.parametrize("kind", selected(OTHERS, WRITTEN))
def test_the_text_is_that_of_transformers(kind, tmp_path, make_stack):  # noqa: F811
    tiny_model(kind).save_pretrained(tmp_path)
    plain = AutoModelForCausalLM.from_pretrained(tmp_path).eval()
    plain.generation_config.eos_token_id = plain.generation_config.forced_eos_token_id = None
    expected = [text_of(plain, ids) for ids in SHORT]
    size = sum(4 * parameter.numel() for parameter in plain.parameters())
    resident = load_model(tmp_path)
    with torch.no_grad():
        written = list(draws(stepper(resident, 64), torch.tensor(SHORT[:1]), NEW, GREEDY, 0, ahead=0))
        assert written == expected[0]
        streamed = open_streamed(tmp_path, make_stack(size * 9 // 10))
        assert torch.tensor(list(columns(streamed, SHORT, NEW, GREEDY, 0, None))).T.tolist() == expected


def test_a_prompt_that_is_read_in_one_pass_has_no_chunks():
    with pytest.raises(ConfigurationError, match="prefill chunk 4: MambaForCausalLM reads a prompt in one pass"):
        check_one_pass(tiny_model("mamba"), 4)
    check_one_pass(tiny_model("qwen3"), 4)
