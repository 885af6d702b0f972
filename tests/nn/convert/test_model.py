"""Converting whole models: what is replaced, what is left and why, equal results, and the conversion back."""

from __future__ import annotations

import copy
import re

import pytest
import torch
import transformers
from peft import LoraConfig, inject_adapter_in_model
from torch import nn
from torch.nn import functional

from tests.nn.convert.test_linears import Tiny
from tests.nn.convert.tiny_models import tiny_model
from tests.nn.decoder.test_decoder_equality import config
from tests.offload.test_round_trip_models import CONFIGS
from vblackwell.errors import ConfigurationError, Unsupported
from vblackwell.memory.cache.stack import VGPUStack
from vblackwell.nn.convert.model import convert
from vblackwell.nn.decoder.decoder import Decoder
from vblackwell.nn.linear.fused_fp4 import FusedFP4Linear
from vblackwell.numerics.fp4 import quantize
from vblackwell.offload.api import enable_vgpu_stack_optimization, release

IDS = torch.arange(24).view(2, 12) % 90


def build(kind: str, **changes) -> nn.Module:
    torch.manual_seed(0)
    config = CONFIGS[kind]()
    for name, value in changes.items():
        setattr(config, name, value)
    return transformers.AutoModelForCausalLM.from_config(config).eval()


def logits(model: nn.Module) -> torch.Tensor:
    with torch.no_grad():
        return model(input_ids=IDS, use_cache=False).logits


def snapshot(model: nn.Module) -> dict[str, tuple[int, torch.Tensor]]:
    return {name: (id(parameter), parameter.detach().clone()) for name, parameter in model.named_parameters()}


@pytest.mark.parametrize("kind", CONFIGS)
def test_any_architecture_there_and_back(kind):
    """Without FP4 the model computes what it computed; with it, another thing;
    undone, the same bits on the same parameters.
    """
    model = build(kind)
    classes = {name: type(module) for name, module in model.named_modules()}
    before, expected = snapshot(model), logits(model)

    exact = convert(model, fp4_layers=None)
    assert exact.replaced["attention"] == [""], str(exact)
    # Other kernels add the same few dozen fp32 products in another order.
    torch.testing.assert_close(logits(model), expected, rtol=1e-4, atol=1e-5)
    exact.undo()
    assert torch.equal(logits(model), expected)

    done = convert(model, fused=False, attention=None)
    # GPT-2's are Conv1D, whose class reads the weight rounded.
    replaced = [name for name, module in model.named_modules() if type(module) is not classes[name]]
    assert done.replaced["linear"]
    assert set(replaced) == {*done.replaced["linear"], *done.replaced.get("experts", ())}
    assert "lm_head" in done.left and not isinstance(model.get_output_embeddings(), FusedFP4Linear)
    assert {name: id(parameter) for name, parameter in model.named_parameters()} == {
        name: number for name, (number, _) in before.items()
    }
    assert not torch.equal(logits(model), expected)
    assert done.undo() is model
    assert torch.equal(logits(model), expected)
    assert {name: type(module) for name, module in model.named_modules()} == classes
    for name, parameter in model.named_parameters():
        assert id(parameter) == before[name][0] and torch.equal(parameter, before[name][1])


def test_the_table_says_why():
    model = Tiny()
    done = convert(model, keep="^down$", fused=False)
    assert done.replaced == {"linear": ["up"]}
    table = str(done)
    for kind, name, part in (
        ("linear", "up", "FusedFP4Linear, nvfp4, straight through"),
        ("linear", "down", "among those to keep"),
        ("linear", "left", "shared with right.weight"),
        ("linear", "output", "shared with embed.weight"),
        ("linear", "lm_head", "among those to keep"),
        ("linear", "attention.out_proj", "NonDynamicallyQuantizableLinear"),
        ("attention", "attention", "from_multihead_attention"),
    ):
        assert re.search(rf"^{kind} +{name} +.*{re.escape(part)}", table, re.MULTILINE), table
    assert "layers.*.mlp.up_proj x4" in str(convert(build("llama")))


def test_our_own_decoder_still_computes():
    """Its feed-forward is called with more than its input, which a foreign one's fused form would not take."""
    model = Decoder(config(), seed=3).eval()
    ids = torch.arange(12)[None]
    expected = model(ids)
    done = convert(model, fp4_layers=None)
    assert torch.equal(model(ids), expected)
    assert "takes wanted in addition to its input" in str(done)
    convert(done.undo(), pack=True)
    assert torch.isfinite(model(ids)).all()


def test_what_cannot_be_converted_leaves_the_model_alone():
    model = build("llama")
    expected = logits(model)
    for options, part in (
        ({"fp4_layers": "("}, "'(' is no regular expression"),
        ({"keep": "("}, "'(' is no regular expression"),  # as it was given
        ({"fp4_layers": "nothing"}, "selects no linear of LlamaForCausalLM: model.layers.0.self_attn.q_proj"),
        ({"format": "fp3"}, "fp3"),
        ({"attention": "fast"}, "attention backend 'fast' is not known"),
    ):
        with pytest.raises(ConfigurationError, match=re.escape(part)):
            convert(model, **options)
        assert torch.equal(logits(model), expected)
        assert not any(isinstance(module, FusedFP4Linear) for module in model.modules())
    hooked = nn.Sequential(nn.Linear(4, 4), nn.Linear(4, 4))
    hooked[0].register_forward_hook(lambda *args: None)
    assert "hooks" in convert(hooked).left["0"]
    stack = VGPUStack({"levels": [{"device": "arena", "capacity_mb": 8}, {"device": "cpu", "capacity_mb": 8}]})
    enable_vgpu_stack_optimization(model, stack)
    with pytest.raises(ConfigurationError, match="in a stack"):
        convert(model)
    release(model)
    stack.close()


def test_adapters_stay_and_what_they_wrap_is_packed():
    model = build("qwen2")
    expected = logits(model)
    inject_adapter_in_model(LoraConfig(r=2, target_modules=["q_proj", "v_proj"]), model)
    done = convert(model, pack=True, fused=False, attention=None)
    inside = [name for name in done.replaced["linear"] if name.endswith("q_proj.base_layer")]
    assert len(inside) == 4 and "an adapter's own matrix" in done.left["model.layers.0.self_attn.q_proj.lora_A.default"]
    assert not any(name.endswith(".base_layer.weight") for name, _ in model.named_parameters())
    model(input_ids=IDS, labels=IDS).loss.backward()
    trained = [name for name, parameter in model.named_parameters() if parameter.grad is not None and "lora" in name]
    assert len(trained) == 16
    packed = quantize(build("qwen2").model.layers[0].self_attn.q_proj.weight, "nvfp4").dequantize()
    done.undo()
    assert torch.equal(model.model.layers[0].self_attn.q_proj.base_layer.weight, packed), (
        "packed weights come back rounded"
    )
    assert (logits(model) - expected).norm() < 0.2 * expected.norm()


def test_experts_train_straight_through():
    model, plain = build("mixtral"), build("mixtral")
    done = convert(model, fp4_layers=r"\.experts$|q_proj", format="mxfp4", attention=None)
    assert len(done.replaced["experts"]) == 4 and len(done.replaced["linear"]) == 4
    with torch.no_grad():  # the same model with weights that were rounded beforehand
        for name, module in plain.named_modules():
            if name in done.replaced["experts"]:
                for weight in (module.gate_up_proj, module.down_proj):
                    rounded = quantize(weight.flatten(0, 1), "mxfp4", "max").dequantize()
                    weight.copy_(rounded.view_as(weight))
            elif name in done.replaced["linear"]:
                module.weight.copy_(quantize(module.weight, "mxfp4", "max").dequantize())
    torch.testing.assert_close(logits(model), logits(plain), rtol=1e-4, atol=1e-5)  # as above
    for made in (model, plain):
        made(input_ids=IDS, labels=IDS).loss.backward()
    gradient, other = (made.model.layers[2].mlp.experts._parameters["down_proj"].grad for made in (model, plain))
    assert gradient is not None and (gradient - other).norm() < 1e-4 * other.norm()
    names = list(model.state_dict())
    done.undo()
    assert list(model.state_dict()) == names == list(plain.state_dict())
    assert "no packed form" in str(convert(build("mixtral"), pack=True))


def test_activations_go_into_epilogues():
    torch.manual_seed(0)
    model = nn.Sequential(nn.Linear(8, 32), nn.GELU(), nn.Linear(32, 32), nn.GELU(approximate="tanh"), nn.Linear(32, 4))
    x, plain = torch.randn(3, 8), copy.deepcopy(model)
    done = convert(model, format="int8")
    assert done.replaced == {"linear": ["0", "2", "4"], "activation": ["1"]}
    assert model[0].activation == "gelu" and isinstance(model[1], nn.Identity)
    rounded = functional.gelu(
        functional.linear(x, quantize(plain[0].weight, "int8", "max").dequantize(), plain[0].bias)
    )
    torch.testing.assert_close(model[1](model[0](x)), rounded, rtol=1e-5, atol=1e-6)  # sums of eight
    done.undo()
    assert torch.equal(model(x), plain(x)) and type(model[1]) is nn.GELU


def test_activations_with_hooks_stay():
    for hook in ("register_forward_hook", "register_full_backward_hook"):
        model = nn.Sequential(nn.Linear(8, 8), nn.GELU())
        getattr(model[1], hook)(lambda *args: None)
        convert(model)
        assert type(model[1]) is nn.GELU, hook


@pytest.mark.filterwarnings("ignore")  # what architectures say about themselves is theirs
def test_attention_that_picks_its_keys_is_refused():
    """Where the attention is another than transformers' own, the model leaves it to this to read the picked ones."""
    model = tiny_model("deepseek_v32")
    convert(model, fp4_layers=None, fused=False)
    with pytest.raises(Unsupported, match="DeepseekV32Attention attends with indices"):
        logits(model)


@pytest.mark.parametrize("kind", ["mistral", "gpt2", "qwen3"])
def test_the_dispatcher_attends_as_sdpa_does(kind):
    """With padding, packed sequences, a sliding window, and a cache."""
    model = build(kind)
    mask = torch.ones(2, 12, dtype=torch.long)
    mask[0, :4] = 0
    positions = torch.cat((torch.arange(5), torch.arange(7))).repeat(2, 1)

    def outputs() -> list[torch.Tensor]:
        with torch.no_grad():
            padded = model(input_ids=IDS, attention_mask=mask, use_cache=False).logits[1]
            packed = model(input_ids=IDS, position_ids=positions, use_cache=False).logits
            written = model.generate(IDS, max_new_tokens=4, do_sample=False, pad_token_id=0)
        return [padded, packed, written.float()]

    expected = outputs()
    done = convert(model, fp4_layers=None, fused=False)
    assert convert(build(kind), fp4_layers=None, fused=False, attention="flash").replaced == {"attention": [""]}
    for got, right in zip(outputs(), expected, strict=True):
        torch.testing.assert_close(got, right, rtol=1e-4, atol=1e-5)  # as above
    done.undo()
    convert(model, fp4_layers=None, fused=False, attention="cudnn")
    with pytest.raises(Unsupported, match="'cudnn' refuses.*flash: accepts"):
        logits(model)
