"""Architectures of transformers, small random models of each: our text is transformers' own, and it runs the folders
that we pack.

A selection runs always; all that can be made small have the mark ``slow`` (`make test-all`).
"""

from __future__ import annotations

import copy
import re
from pathlib import Path

import pytest
import torch
from transformers import AutoModelForCausalLM

from tests.nn.convert.tiny_models import IDS, KINDS, small_kinds, tiny_model
from tests.offload.conftest import make_stack  # noqa: F401 - a fixture
from vblackwell.cli import main
from vblackwell.errors import ConfigurationError, Unsupported, VBError
from vblackwell.folders.folder import read_config, stored_dtype
from vblackwell.generate.generate import columns, draws, stepper
from vblackwell.generate.load import load_model, open_streamed
from vblackwell.generate.quantized import Packing
from vblackwell.generate.sampling import Sampling
from vblackwell.generate.steps import check_one_pass
from vblackwell.nn.convert import training
from vblackwell.nn.convert.causal_lm import accelerate_causal_lm
from vblackwell.nn.convert.model import convert
from vblackwell.nn.linear.fused_fp4 import FusedFP4Linear
from vblackwell.tools.quantize import quantize_folder

pytestmark = pytest.mark.filterwarnings("ignore")  # what architectures say about themselves is theirs
NEW, GREEDY = 5, Sampling(temperature=0)
SHORT = [IDS[0].tolist(), IDS[1, :7].tolist()]
WRITTEN = ["granitemoehybrid", "mamba", "roberta", "rwkv", "xlnet"]
# transformers' generate gives them positions from 0 on, where their forward, which we call, counts from after the
# padding token's number.
OTHER_POSITIONS = {"camembert", "data2vec-text", "roberta", "roberta-prelayernorm", "xlm-roberta", "xlm-roberta-xl"}
# FalconLinear and Conv1D, in whose place transformers puts no packed linear: this package alone reads their folders.
ALONE = {"falcon", "gpt2", "gpt-sw3", "openai-gpt"}
# Of these nothing is packed to either format, and it is said why.
READ = {"modernbert-decoder", "recurrent_gemma", "rwkv", "xlstm"}
NOT_RUN = {"hrm_text", "llama4_text"}
FP32_ALONE = {"ctrl", "xlnet"}  # and so not to nvfp4
PACKED = ["mamba", "olmoe"]


def selected(kinds: list[str], always: list[str]):
    """Those ``always`` run, the others with the mark ``slow``."""
    return [pytest.param(kind, marks=[] if kind in always else pytest.mark.slow) for kind in kinds]


def text_of(model, ids: list[int], new: int = NEW) -> list[int]:
    """What transformers writes after ``ids``, alone: some of its models mix rows up."""
    ids_1S = torch.tensor([ids])
    if model.config.model_type in OTHER_POSITIONS:
        with torch.no_grad():
            for _ in range(new):
                ids_1S = torch.cat((ids_1S, model(ids_1S).logits[:, -1:].argmax(-1)), 1)
        return ids_1S[0, len(ids) :].tolist()
    options = {"max_new_tokens": new, "do_sample": False, "pad_token_id": 0}
    return model.generate(ids_1S, attention_mask=torch.ones_like(ids_1S), **options)[0, len(ids) :].tolist()


@pytest.mark.parametrize("kind", selected(small_kinds(), WRITTEN))
def test_the_text_is_that_of_transformers(kind, tmp_path, make_stack):  # noqa: F811
    tiny_model(kind).save_pretrained(tmp_path)
    plain = AutoModelForCausalLM.from_pretrained(tmp_path).eval()
    plain.generation_config.eos_token_id = plain.generation_config.forced_eos_token_id = None
    expected = [text_of(plain, ids) for ids in SHORT]
    size = sum(4 * parameter.numel() for parameter in plain.parameters())
    resident = load_model(tmp_path)
    with torch.no_grad():
        written = list(draws(stepper(resident, 64), torch.tensor(SHORT[:1]), NEW, GREEDY, 0, ahead=0))
        assert [token for (token,) in written] == expected[0]
        streamed = open_streamed(tmp_path, make_stack(size * 9 // 10))
        assert torch.tensor(list(columns(streamed, SHORT, NEW, GREEDY, 0, None))).T.tolist() == expected


@pytest.mark.each_value
@pytest.mark.parametrize("seed", range(2))
@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16, torch.float16], ids=str)
@pytest.mark.parametrize(
    "changes",
    [
        {},
        {"mlp_bias": True, "attention_bias": True},
        pytest.param({"num_key_value_heads": 4, "tie_word_embeddings": True}, marks=pytest.mark.slow),
        {"hidden_act": "silu"},
    ],
    ids=str,
)
def test_arcee_writes_the_text_of_transformers(changes, dtype, seed, tmp_path, make_stack):  # noqa: F811
    """Its feed forward, with a squared ReLU and without a gate, was suspected of another text: 12 tokens, each way."""
    made = tiny_model("arcee", seed=seed, **changes).to(dtype)
    if seed % 2:  # texts of small weights repeat one word
        for weight in made.parameters():
            weight.data *= 4 if weight.dim() > 1 else 1
    made.save_pretrained(tmp_path)
    plain = AutoModelForCausalLM.from_pretrained(tmp_path, dtype=dtype).eval()
    plain.generation_config.eos_token_id = None
    expected = [text_of(plain, ids, 12) for ids in SHORT]
    assert len({word for text in expected for word in text}) > 1
    accelerated = copy.deepcopy(plain)
    accelerate_causal_lm(accelerated)
    assert [text_of(accelerated, ids, 12) for ids in SHORT] == expected
    with torch.no_grad():
        resident = list(draws(stepper(load_model(tmp_path), 64), torch.tensor(SHORT[:1]), 12, GREEDY, 0, ahead=0))
        assert [token for (token,) in resident] == expected[0]
        size = sum(weight.numel() * weight.element_size() for weight in plain.parameters())
        streamed = open_streamed(tmp_path, make_stack(size * 9 // 10))
        assert torch.tensor(list(columns(streamed, SHORT[:1], 12, GREEDY, 0, None))).flatten().tolist() == expected[0]


def test_a_prompt_that_is_read_in_one_pass_has_no_chunks():
    with pytest.raises(ConfigurationError, match="prefill chunk 4: MambaForCausalLM reads a prompt in one pass"):
        check_one_pass(tiny_model("mamba"), 4)
    check_one_pass(tiny_model("qwen3"), 4)


@pytest.mark.parametrize(
    "kind", selected([kind for kind in small_kinds() if kind not in ALONE | READ | NOT_RUN], PACKED)
)
def test_a_packed_folder_of_an_fp32_one_runs_in_transformers(kind, tmp_path):
    """In the type that its config.json says. nvfp4 is decoded to bf16 there, int8 to fp32: as exact as these."""
    pytest.importorskip("compressed_tensors")  # of the extras `dev` and `export`; GPU machines may be without
    tiny_model(kind).save_pretrained(tmp_path / "model")
    for form, dtype, off in (("nvfp4", torch.bfloat16, 2**-6), ("int8", torch.float32, 1e-5)):
        if form == "nvfp4" and kind in FP32_ALONE:
            continue
        quantize_folder(tmp_path / "model", tmp_path / form, form)
        theirs = AutoModelForCausalLM.from_pretrained(tmp_path / form).eval()
        assert theirs.dtype == stored_dtype(tmp_path / form) == dtype
        with torch.no_grad():
            expected, found = theirs(IDS).logits.float(), load_model(tmp_path / form)(IDS)
        found = found.float() if isinstance(found, torch.Tensor) else found.logits.float()
        assert (found - expected).norm() < off * expected.norm(), form


def as_linears(model: torch.nn.Module) -> torch.nn.Module:
    """The same model with an `nn.Linear` of the transposed weight for each Conv1D, and for each FalconLinear."""
    for owner in [*model.modules()]:
        for name, child in owner.named_children():
            if type(child).__name__ in ("Conv1D", "FalconLinear"):
                weight = child.weight if type(child).__name__ == "FalconLinear" else child.weight.t().contiguous()
                made = torch.nn.Linear(weight.shape[1], weight.shape[0], child.bias is not None)
                made.load_state_dict({"weight": weight} | ({} if child.bias is None else {"bias": child.bias}))
                setattr(owner, name, made)
    return model


@pytest.mark.each_value
@pytest.mark.parametrize("kind", selected(sorted(ALONE), ["falcon", "gpt2"]))
@pytest.mark.parametrize("form", ["nvfp4", "int8"])
def test_other_linears_are_packed_as_those_that_they_stand_for(kind, form, tmp_path, capsys):
    """Bit for bit; and the folder says that it is ours, so that no other package takes its bytes for (N, K)."""
    model = tiny_model(kind)
    model.save_pretrained(tmp_path / "model")
    assert main(["quantize", "--model", str(tmp_path / "model"), "--out", str(tmp_path / form), "--format", form]) == 0
    assert "vb alone opens the folder" in capsys.readouterr().out
    opened, while_loading = load_model(tmp_path / form), load_model(tmp_path / "model", packing=Packing(form))
    packed = [name for name, module in opened.named_modules() if isinstance(module, FusedFP4Linear)]
    assert packed and stored_dtype(tmp_path / form) == stored_dtype(tmp_path / "model")
    convert(as_linears(model), format=form, pack=True, fused=False, attention=None)
    for other in (opened, while_loading):
        for name in packed:
            one, two = (made.get_submodule(name).packed.tensors() for made in (other, model))
            assert all(torch.equal(one[part], two[part]) for part in two), name
        torch.testing.assert_close(other(IDS).logits, model(IDS).logits, rtol=1e-5, atol=1e-5)
    assert read_config(tmp_path / form)["quantization_config"]["quant_method"] == "vblackwell"


@pytest.mark.parametrize("kind", selected(sorted(ALONE), ["falcon", "gpt2"]))
def test_other_linears_train_straight_through_as_those_that_they_stand_for(kind):
    """The same gradients, in the shapes of the parameters; and fused layers round, too."""
    mine, theirs = tiny_model(kind), as_linears(tiny_model(kind))
    unrounded = mine(IDS).logits
    done, _ = (convert(each, fused=False, attention=None) for each in (mine, theirs))
    assert done.replaced["linear"]
    for model in (mine, theirs):
        model(IDS).logits.square().sum().backward()
    assert not torch.allclose(mine(IDS).logits, unrounded, rtol=1e-3)
    turned = {f"{name}.weight" for name, module in mine.named_modules() if hasattr(module, "nf")}
    assert bool(turned) == (kind != "falcon")
    for name, parameter in mine.named_parameters():
        expected = theirs.get_parameter(name).grad
        found = parameter.grad.t() if name in turned else parameter.grad
        torch.testing.assert_close(found, expected, rtol=1e-4, atol=1e-4)
    expected = mine(IDS).logits
    training.fuse(mine.train())
    torch.testing.assert_close(mine.eval()(IDS).logits, expected, rtol=1e-4, atol=1e-4)


@pytest.mark.parametrize(
    ("kind", "form", "error", "reason"),
    [
        ("rwkv", "int8", ConfigurationError, "transformers reads its weight when it opens a packed folder"),
        ("hrm_text", "int8", Unsupported, "packed names of mlp.gate_up_proj.weight, which it cuts up"),
        ("llama4_text", "int8", Unsupported, "it makes modules of the experts"),
        ("xlnet", "nvfp4", Unsupported, "in float32 alone, and nvfp4 in torch.bfloat16. Give --format nf4"),
        *(pytest.param(kind, "int8", VBError, "", marks=pytest.mark.slow) for kind in sorted(READ)),
    ],
)
def test_what_transformers_would_not_run_is_not_written(kind, form, error, reason, tmp_path):
    tiny_model(kind).save_pretrained(tmp_path / "model")
    with pytest.raises(error, match=reason):
        quantize_folder(tmp_path / "model", tmp_path / "out", form)
    assert not (tmp_path / "out").exists()


def test_the_documentation_names_them():
    text = (Path(__file__).parents[3] / "docs/models.md").read_text(encoding="utf-8")
    section = text.split("## Architectures")[1].split("\n## ")[0]
    assert set(re.findall(r"^> (.*)$", section, re.MULTILINE)[0].split()) == set(KINDS.split())
    for kinds in (ALONE, READ, NOT_RUN, FP32_ALONE):
        assert kinds <= set(re.findall(r"`([\w-]+)`", section))
