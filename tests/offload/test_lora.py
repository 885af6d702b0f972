"""Adapters over a frozen base in a stack: peft's training, peft's files, merged folders;
and a base packed to FP4 that streams.
"""

from __future__ import annotations

import json

import peft
import pytest
import torch
from safetensors import safe_open
from safetensors.torch import load_file, save_file
from torch import nn
from transformers import AutoModelForCausalLM, FalconConfig, PhimoeConfig, Qwen2MoeConfig

from tests.offload.test_round_trip_models import (
    CONFIGS,
    RATES,
    same_bits,
    step,
    tokens,
    written,  # noqa: F401 - a fixture
)
from vblackwell.errors import ConfigurationError, Unsupported
from vblackwell.folders.weights import parameters_on_meta
from vblackwell.generate.adapters import PACKED, adapted, check_base, fingerprint, read_lora, save_adapter
from vblackwell.generate.causal_lm import load_causal_lm, save_causal_lm
from vblackwell.nn.convert.lora import Lora, adapter_targets, add_adapters, is_adapter
from vblackwell.nn.linear.stored_fp4 import StoredFP4Linear
from vblackwell.numerics.fp4 import quantize
from vblackwell.offload.api import offload_of
from vblackwell.offload.engine import Offload
from vblackwell.offload.optimizer import VGPUAdamW
from vblackwell.offload.state import export_state, import_state

# peft asks the first, the second has another name in the newest transformers alone
pytestmark = pytest.mark.filterwarnings(
    "ignore:.(is_gradient_checkpointing|gradient_checkpointing_enable). is deprecated:FutureWarning"
)
LORA = Lora(2, alpha=8)
LEVEL0 = 96 << 10


def trained(model) -> list[torch.nn.Parameter]:
    return [param for param in model.parameters() if param.requires_grad]


def load(folder, make_stack, **options):
    options = {"lora": LORA, "placement": "streamed", "seed": 5} | options
    return load_causal_lm(folder, make_stack(LEVEL0), **options)


def rounded_(model, format: str = "nvfp4") -> None:
    """Give a plain model the weights that a packed base stands for."""
    with torch.no_grad():
        for name, module in model.named_modules():
            if type(module) is torch.nn.Linear and name != "lm_head":
                module.weight.copy_(quantize(module.weight, format).dequantize())


def adapters_of(model) -> dict[str, torch.Tensor]:
    return {name: state["weight"] for name, state in export_state(model, only=is_adapter)}


@pytest.mark.parametrize("kind", ["llama", pytest.param("gpt2", marks=pytest.mark.slow)])
def test_training_is_that_of_peft(kind, written, make_stack, tmp_path):  # noqa: F811
    """The same adapters after two steps, bit for bit; the files open in peft and transformers, with equal logits."""
    folder = written(kind)
    model = load(folder, make_stack)
    assert isinstance(offload_of(model), Offload) and all(
        is_adapter(name) for name, p in model.named_parameters() if p.requires_grad
    )
    config = peft.LoraConfig(
        **{
            key: value
            for key, value in adapted(model).config.items()
            if key in ("r", "lora_alpha", "target_modules", "fan_in_fan_out", "task_type")
        }
    )
    plain = peft.get_peft_model(AutoModelForCausalLM.from_pretrained(folder), config).train()
    theirs = dict(plain.base_model.model.named_parameters())
    with torch.no_grad():
        for name, value in adapters_of(model).items():
            theirs[name].copy_(value)
    ours, other = VGPUAdamW(trained(model), **RATES), torch.optim.AdamW(trained(plain), fused=True, **RATES)
    for _ in range(2):
        assert same_bits(step(model, ours), step(plain, other))
    found = adapters_of(model)
    assert len(found) == len(trained(plain)) and all(same_bits(value, theirs[name]) for name, value in found.items())

    again = AutoModelForCausalLM.from_pretrained(folder)
    opened = peft.PeftModel.from_pretrained(again, save_adapter(model, tmp_path / "adapter")).eval()
    merged = AutoModelForCausalLM.from_pretrained(save_causal_lm(model, tmp_path / "merged")).eval()
    with torch.no_grad():
        logits = plain.eval()(input_ids=tokens()).logits
        assert torch.equal(opened(input_ids=tokens()).logits, logits)
        # W + BA in one product instead of two: sums of a few dozen fp32 products in another order
        torch.testing.assert_close(merged(input_ids=tokens()).logits, logits, rtol=1e-4, atol=1e-5)
    base = AutoModelForCausalLM.from_pretrained(folder).eval()
    with torch.no_grad():
        assert (base(input_ids=tokens()).logits - logits).norm() > 1e-2 * logits.norm(), "the adapters do nothing"


@pytest.mark.parametrize("placement", ["streamed", pytest.param("resident", marks=pytest.mark.slow)])
def test_a_packed_base_is_in_the_stack(placement, written, make_stack, tmp_path):  # noqa: F811
    """Training over FP4 is training over the rounded weights; the packed bytes have storage, and come and go."""
    folder = written("qwen2")
    plain = AutoModelForCausalLM.from_pretrained(folder)
    weight_bytes = sum(4 * param.numel() for param in plain.parameters())
    rounded_(plain)
    config = peft.LoraConfig(r=2, lora_alpha=8, target_modules="all-linear", task_type="CAUSAL_LM")
    plain = peft.get_peft_model(plain, config).train()

    stack = make_stack(4 << 20 if placement == "resident" else LEVEL0)
    model = load_causal_lm(folder, stack, lora=LORA, fp4="nvfp4", placement=placement, seed=5)
    packed = [module for module in model.modules() if isinstance(module, StoredFP4Linear)]
    assert len(packed) == 4 * 7 and not any(name.endswith("base_layer.weight") for name, _ in model.named_parameters())
    held = offload_of(model).storage.plan.bytes_by_level()["weight"]
    assert (held[0] == 0) == (placement == "streamed") and sum(
        held
    ) < 0.75 * weight_bytes  # every small tensor takes 512
    theirs = dict(plain.base_model.model.named_parameters())
    with torch.no_grad():
        for name, value in adapters_of(model).items():
            theirs[name].copy_(value)
    ours, other = VGPUAdamW(trained(model), **RATES), torch.optim.AdamW(trained(plain), fused=True, **RATES)
    for _ in range(3):
        # fp32 products with a weight that is decoded in tiles, against one that was decoded before: another order of
        # sums
        torch.testing.assert_close(step(model, ours), step(plain, other), rtol=1e-4, atol=1e-5)
    if placement == "streamed":
        stats = stack.get_stats()["levels"]
        assert stats[0]["peak_bytes"] <= LEVEL0 < sum(held), "level 0 held it all"
        moments = offload_of(model).storage.plan.bytes_by_level()["exp_avg"]
        assert sum(moments) < sum(held) / 2, "moments of a frozen base are kept"

    merged = AutoModelForCausalLM.from_pretrained(save_causal_lm(model, tmp_path / "merged")).eval()
    model.eval()
    with torch.no_grad():
        logits = model(input_ids=tokens(), use_cache=False).logits
        torch.testing.assert_close(merged(input_ids=tokens()).logits, logits, rtol=1e-4, atol=1e-5)  # as above
    base = AutoModelForCausalLM.from_pretrained(folder)
    rounded_(base)
    opened = peft.PeftModel.from_pretrained(base, save_adapter(model, tmp_path / "adapter")).eval()
    with torch.no_grad():
        torch.testing.assert_close(opened(input_ids=tokens()).logits, logits, rtol=1e-4, atol=1e-5)


@pytest.mark.parametrize("fp4", [pytest.param(None, marks=pytest.mark.slow), "nvfp4"])
def test_bf16_with_recompute(fp4, written, make_stack, tmp_path):  # noqa: F811
    """Compute in bf16 with fp32 masters of the adapters: layers computed again in backward give the same bits;
    merging keeps it.
    """
    folder, ends = written("llama", num_hidden_layers=2), []
    for recompute in (False, True):
        model = load(folder, make_stack, fp4=fp4, compute_dtype=torch.bfloat16)
        if recompute:
            model.gradient_checkpointing_enable(gradient_checkpointing_kwargs={"use_reentrant": False})
        optimizer = VGPUAdamW(trained(model), lr=2e-2, update_in_backward=True)
        losses = []
        for _ in range(6):
            loss = model(input_ids=tokens(), labels=tokens(), use_cache=False).loss
            loss.backward()
            optimizer.step()
            optimizer.zero_grad()
            losses.append(float(loss.detach()))
        assert losses[-1] < losses[0] - 0.05
        ends.append(adapters_of(model))
        assert all(same_bits(value, ends[0][name]) for name, value in ends[-1].items())
    merged = AutoModelForCausalLM.from_pretrained(save_causal_lm(model, tmp_path / "merged"))
    with torch.no_grad():  # fp32 against bf16, one step later
        assert abs(float(merged(input_ids=tokens(), labels=tokens()).loss) - losses[-1]) < 0.1


def test_adapters_come_and_go_without_their_base(written, make_stack):  # noqa: F811
    folder = written("llama")
    one, other = (
        load(folder, make_stack),
        load(folder, make_stack, seed=6, fp4="nvfp4", fp4_layers="mlp", keep="layers.0"),
    )
    assert sum(isinstance(module, StoredFP4Linear) for module in other.modules()) == 9
    optimizer = VGPUAdamW(trained(one), **RATES)
    step(one, optimizer)
    states = dict(export_state(one, optimizer, only=is_adapter))
    assert all("exp_avg" in state for state in states.values())
    assert not same_bits(
        *(adapters_of(model)["model.layers.0.mlp.up_proj.lora_A.default.weight"] for model in (one, other))
    )
    into = VGPUAdamW(trained(other), **RATES)
    import_state(other, into, states.__getitem__, only=is_adapter)
    for name, state in export_state(other, into, only=is_adapter):
        assert all(same_bits(state[key], states[name][key]) for key in state)
    assert adapted(one).base == adapted(other).base == fingerprint(folder)


def test_an_adapter_is_brought_along(written, make_stack, tmp_path):  # noqa: F811
    """From peft's folder into a stack: the same logits; trained on from there; one for another base is named."""
    folder = written("llama")
    plain = peft.get_peft_model(
        AutoModelForCausalLM.from_pretrained(folder), peft.LoraConfig(r=2, target_modules=["q_proj", "down_proj"])
    )
    with torch.no_grad():
        for param in trained(plain):
            param.normal_(0, 0.3)
        logits = plain.eval()(input_ids=tokens()).logits
    plain.save_pretrained(tmp_path / "adapter")
    model = load(folder, make_stack, lora=None, adapter=tmp_path / "adapter", trainable=False).eval()
    assert not trained(model)
    with torch.no_grad():
        assert torch.equal(model(input_ids=tokens(), use_cache=False).logits, logits)
    again = load(folder, make_stack, lora=None, adapter=tmp_path / "adapter", fp4="nvfp4")
    assert len(trained(again)) == 2 * 2 * 4
    with pytest.raises(ConfigurationError, match="no such linear"):
        load(written("gpt2"), make_stack, lora=None, adapter=tmp_path / "adapter")
    other = CONFIGS["llama"]()
    other.num_hidden_layers, other.intermediate_size = 5, 64
    AutoModelForCausalLM.from_config(other).save_pretrained(tmp_path / "other")
    with pytest.raises(
        ConfigurationError, match=r"another base than .*lacks .*layers\.4.*; it has .*\(2, 48\) instead of \(2, 64\)"
    ):
        load(tmp_path / "other", make_stack, lora=None, adapter=tmp_path / "adapter")
    with pytest.raises(ConfigurationError, match="give one"):
        load(folder, make_stack, adapter=tmp_path / "adapter")
    config = tmp_path / "adapter/adapter_config.json"
    plain = json.loads(config.read_text())
    for change in ({"use_dora": True}, {"alora_invocation_tokens": [3]}, {"init_lora_weights": "pissa_niter_4"}):
        config.write_text(json.dumps(plain | change))
        with pytest.raises(Unsupported, match=f"adapter_config.json: {next(iter(change))}"):
            load(folder, make_stack, lora=None, adapter=tmp_path / "adapter")
    config.write_text(json.dumps(plain | {"init_lora_weights": "gaussian"}))
    assert read_lora(tmp_path / "adapter").rank == plain["r"]


def test_an_adapter_knows_its_base(written, make_stack, tmp_path):  # noqa: F811
    """Of the same shapes: ours by what is in its file, peft's by the folder that it names;
    the same weights kept otherwise are the same.
    """
    folder = written("llama", num_hidden_layers=2)
    (tmp_path / "final").mkdir()
    (tmp_path / "final" / "manifest.json").touch()  # the model of a run, say
    with pytest.raises(ConfigurationError, match="final holds something else"):
        save_adapter(load(folder, make_stack), tmp_path / "final")
    save_adapter(load(folder, make_stack), tmp_path / "ours")
    model = AutoModelForCausalLM.from_pretrained(folder)
    peft.get_peft_model(model, peft.LoraConfig(r=2, target_modules=["q_proj"])).save_pretrained(tmp_path / "theirs")
    same, other = tmp_path / "same", tmp_path / "other"
    model = AutoModelForCausalLM.from_pretrained(folder)
    model.config.use_cache = not model.config.use_cache
    model.to(torch.bfloat16).save_pretrained(same, max_shard_size="20KB")
    with torch.no_grad():
        model.model.layers[1].mlp.up_proj.weight[0, 0] += 1.0
    model.save_pretrained(other)
    assert len(list(same.glob("*.safetensors"))) > 1 and fingerprint(same) == fingerprint(folder) != fingerprint(other)
    for adapter in ("ours", "theirs"):
        load(same, make_stack, lora=None, adapter=tmp_path / adapter)
        with pytest.raises(ConfigurationError, match=f"{adapter} holds an adapter for another base than {other}"):
            load(other, make_stack, lora=None, adapter=tmp_path / adapter)
    file = tmp_path / "theirs/adapter_config.json"
    file.write_text(json.dumps(json.loads(file.read_text()) | {"base_model_name_or_path": "owner/base"}))
    load(other, make_stack, lora=None, adapter=tmp_path / "theirs")  # nothing is known of it here
    with pytest.warns(UserWarning, match="for owner/base, and the model is owner/copy"):
        check_base(tmp_path / "theirs", other, "owner/copy")


@pytest.mark.parametrize(
    ("places", "apart"),
    [((0, 3), 1), *(pytest.param(range(4), apart, marks=pytest.mark.slow) for apart in (1, 2, 3))],
)
def test_an_adapter_knows_how_its_base_was_packed(places, apart, written, make_stack, tmp_path):  # noqa: F811
    """Packed alike it is opened without a word; peft opens it over the base as it is. Packings at ``places`` against
    those that stand so far ``apart`` from them.
    """
    folder, adapter = written("llama", num_hidden_layers=1), tmp_path / "adapter"
    packings = {
        "packed to nvfp4": {"fp4": "nvfp4"},
        "packed to nf4 with --fp4-layers mlp and --keep up_proj": {
            "fp4": "nf4",
            "fp4_layers": "mlp",
            "keep": "up_proj",
        },
        "packed to mxfp4 with --fp8-activations": {"fp4": "mxfp4", "w4a8": True},
        "as it is": {},
    }
    texts = list(packings)
    for place in places:
        text, packing = texts[place], packings[texts[place]]
        save_adapter(load(folder, make_stack, **packing), adapter)
        load(folder, make_stack, lora=None, adapter=adapter, **packing)
        other = texts[(place + apart) % len(texts)]
        with pytest.warns(UserWarning, match="was trained over the base") as said:
            load(folder, make_stack, lora=None, adapter=adapter, trainable=False, **packings[other])
        (line,) = said
        assert f"over the base {text}, which here is {other}: " in str(line.message)
    peft.PeftModel.from_pretrained(AutoModelForCausalLM.from_pretrained(folder), adapter)
    (file,) = adapter.glob("*.safetensors")
    tensors = load_file(file)
    with safe_open(file, "pt") as opened:
        metadata = opened.metadata()
    save_file(tensors, file, {name: value for name, value in metadata.items() if name != PACKED})
    load(folder, make_stack, lora=None, adapter=adapter, fp4="nvfp4")  # one of before this was kept


def test_what_cannot_be_adapted_is_refused(written, make_stack, tmp_path):  # noqa: F811
    folder = written("llama")
    for text, part in (
        ("many", "cannot be read"),
        ("0", "at least 1"),
        ("4,alfa=8", "did you mean 'alpha'"),
        ("4,alpha=-1", "positive"),
        ("4,dropout=1", "below 1"),
    ):
        with pytest.raises(ConfigurationError, match=part):
            Lora.parse(text)
    assert Lora.parse("4, alpha=8,targets=q_proj+v_proj") == Lora(4, 8.0, 0.0, ("q_proj", "v_proj"))
    with pytest.raises(ConfigurationError, match="no such linear, only down_proj.*did you mean 'q_proj'"):
        load(folder, make_stack, lora=Lora(4, targets=("q_prj",)))
    with pytest.raises(ConfigurationError, match="'nothing' selects no linear"):
        load(folder, make_stack, fp4="nvfp4", fp4_layers="nothing")
    with pytest.raises(ConfigurationError, match="give lora="):
        load(folder, make_stack, lora=None, fp4="nvfp4")
    with pytest.raises(ConfigurationError, match="no adapters"):
        save_adapter(load(folder, make_stack, lora=None), tmp_path / "none")


def test_names_that_peft_takes_for_experts_get_no_adapters():
    config = Qwen2MoeConfig(
        vocab_size=64,
        hidden_size=16,
        intermediate_size=32,
        moe_intermediate_size=8,
        shared_expert_intermediate_size=8,
        num_experts=3,
        num_hidden_layers=1,
        num_attention_heads=2,
        num_key_value_heads=1,
    )
    with parameters_on_meta():
        model, other = (AutoModelForCausalLM.from_config(config) for _ in range(2))
    stated = add_adapters(model, Lora(2))
    assert {"q_proj", "v_proj"} < set(stated["target_modules"]) and not stated["target_parameters"]
    assert not any("lora" in name and ".experts." in name for name, _ in model.named_parameters())
    with pytest.raises(Unsupported, match="targets=up_proj: where experts are stacked"):
        add_adapters(other, Lora(2, targets=("q_proj", "up_proj")))


def test_a_router_that_is_a_linear_by_class_gets_no_adapter():
    config = PhimoeConfig(
        vocab_size=64,
        hidden_size=16,
        intermediate_size=32,
        num_local_experts=3,
        num_hidden_layers=1,
        num_attention_heads=2,
        num_key_value_heads=1,
    )
    falcon = FalconConfig(vocab_size=64, hidden_size=16, num_hidden_layers=1, num_attention_heads=2)
    with parameters_on_meta():
        model, plain = (AutoModelForCausalLM.from_config(each) for each in (config, falcon))
    assert isinstance(model.model.layers[0].mlp.router, nn.Linear)
    assert sorted(add_adapters(model, Lora(2))["target_modules"]) == ["k_proj", "o_proj", "q_proj", "v_proj"]
    assert (
        "query_key_value" in add_adapters(plain, Lora(2))["target_modules"]
    )  # of a class that computes what a linear does


class Choosing(torch.nn.Linear):
    """A linear by class that answers with choices, as routers do."""

    def forward(self, input):
        return super().forward(input).topk(2).indices


class Strict(torch.nn.Linear):
    """A linear that wants batches of sequences."""

    def forward(self, input):
        if input.dim() != 3:
            raise TypeError(f"{input.dim()} dimensions")
        return super().forward(input)


def test_linears_without_an_adapter_are_named_with_the_reason():
    model = torch.nn.Sequential()
    for name, linear in (("plain", torch.nn.Linear(4, 4)), ("gate", Choosing(4, 4)), ("strict", Strict(4, 4))):
        model.add_module(name, linear)
    assert adapter_targets(torch.nn.ModuleDict({"a": model, "lm_head": torch.nn.Linear(4, 4)})) == {
        "a.plain": None,
        "a.gate": "Choosing answers with something else than a product",
        "a.strict": "Strict given two rows failed: TypeError 2 dimensions",
        "lm_head": "the output head",
    }
    with pytest.raises(ConfigurationError, match=r"no such linear \(a.strict: .* 2 dimensions\), only plain"):
        add_adapters(torch.nn.ModuleDict({"a": model}), Lora(2, targets=("strict",)))
