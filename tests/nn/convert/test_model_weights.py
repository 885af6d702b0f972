"""Conversion of weights that more than one thing holds: tied, shared, trained meanwhile, in a stack;
and every reason of the table.
"""

from __future__ import annotations

import pytest
import torch
import transformers
from torch import nn

from tests.nn.convert.test_linears import Tiny
from tests.nn.convert.test_model import IDS, build, logits, snapshot
from tests.offload.conftest import make_stack  # noqa: F401 - a fixture
from tests.offload.test_round_trip_models import step
from vblackwell.errors import ConfigurationError
from vblackwell.nn.convert.model import convert
from vblackwell.nn.linear.fused_fp4 import FusedFP4Linear
from vblackwell.numerics.fp4 import quantize
from vblackwell.offload.api import enable_vgpu_stack_optimization, release
from vblackwell.offload.optimizer import VGPUAdamW

RATES = {"lr": 1e-2, "weight_decay": 0.1}


@pytest.mark.parametrize("kind", ["qwen2", "mixtral", "gpt2"])  # a tied head; experts; transposed linears
def test_trained_while_converted(kind):
    """All at once, one step with an optimizer from before, and back: the trained weights in the modules of before."""
    model = build(kind).train()
    before, classes = snapshot(model), {name: type(module) for name, module in model.named_modules()}
    optimizer = torch.optim.AdamW(model.parameters(), **RATES)
    done = convert(model, loss=True)
    model(input_ids=IDS, labels=IDS, use_cache=False).loss.backward()
    assert all(parameter.grad is not None for parameter in model.parameters())
    optimizer.step()
    assert done.undo() is done.undo() is model
    assert {name: type(module) for name, module in model.named_modules()} == classes
    for name, parameter in model.named_parameters():
        assert id(parameter) == before[name][0] and not torch.equal(parameter, before[name][1]), name
    plain = build(kind)
    plain.load_state_dict(model.state_dict())
    assert torch.equal(logits(model.eval()), logits(plain))


def test_tied_and_shared_weights_there_and_back():
    torch.manual_seed(0)
    model, tokens = Tiny(), torch.arange(12).view(2, 6)
    expected, parameters = model(tokens), {name: id(parameter) for name, parameter in model.named_parameters()}
    for pack in (False, True):
        before = snapshot(model)
        done = convert(model, pack=pack, fused=False)
        assert done.replaced["linear"] == ["up", "down"] and set(done.left) >= {"left", "right", "output", "lm_head"}
        assert model.again is model.up and model.up.is_quantized == pack
        assert not torch.equal(model(tokens), expected)
        done.undo()
        assert model.again is model.up and type(model.up) is nn.Linear
        assert model.right.weight is model.left.weight and model.output.weight is model.embed.weight
        for name, parameter in model.named_parameters():
            rounded = pack and name in ("up.weight", "down.weight")
            wanted = quantize(before[name][1], "nvfp4").dequantize() if rounded else before[name][1]
            assert torch.equal(parameter, wanted), name
            assert parameter.requires_grad and (rounded or id(parameter) == parameters[name])
        if not pack:
            assert torch.equal(model(tokens), expected)


def test_converted_models_train_in_a_stack_and_come_back(make_stack):  # noqa: F811
    """Two steps streamed, the second on the undone model:
    those of the converted and then plain model without a stack.
    """
    resident, streamed = build("llama").train(), build("llama").train()
    conversions = [convert(model, fused=False, attention=None) for model in (resident, streamed)]
    enable_vgpu_stack_optimization(streamed, make_stack(96 << 10), placement="streamed")
    optimizers = (
        torch.optim.AdamW(resident.parameters(), fused=True, **RATES),
        VGPUAdamW(streamed.parameters(), **RATES),
    )
    for undo in (True, False):
        expected, found = (step(*pair) for pair in zip((resident, streamed), optimizers, strict=True))
        assert torch.equal(found, expected)
        for conversion in conversions if undo else ():
            conversion.undo()
            assert not any(isinstance(module, FusedFP4Linear) for module in conversion.model.modules())
    assert torch.equal(logits(streamed.eval()), logits(resident.eval()))


def test_packed_weights_do_not_come_back_in_a_stack(make_stack):  # noqa: F811
    model = build("llama")
    done = convert(model, pack=True, fused=False, attention=None)
    expected = logits(model)
    enable_vgpu_stack_optimization(model, make_stack(1 << 20), placement="streamed")
    with pytest.raises(ConfigurationError, match=r"in a stack: release\(model\)"):
        done.undo()
    assert torch.equal(logits(model), expected)
    release(model)
    done.undo()
    assert not any(isinstance(module, FusedFP4Linear) for module in model.modules())


def _gpt_oss() -> nn.Module:
    sizes = {"hidden_size": 32, "intermediate_size": 32, "num_hidden_layers": 1, "head_dim": 8, "num_local_experts": 4}
    heads = {"num_attention_heads": 4, "num_key_value_heads": 2, "layer_types": ["full_attention"]}
    return transformers.AutoModelForCausalLM.from_config(transformers.GptOssConfig(vocab_size=96, **sizes, **heads))


def _bloom() -> nn.Module:
    config = transformers.BloomConfig(vocab_size=96, hidden_size=32, n_layer=1, n_head=4)
    return transformers.AutoModelForCausalLM.from_config(config)


@pytest.mark.parametrize(
    ("make", "name", "reason"),
    [
        (_gpt_oss, "model.layers.0.mlp.experts", "stored as (inputs, outputs)"),
        (_gpt_oss, "model.layers.0.self_attn", "could not be probed"),
        (_bloom, "", "BloomForCausalLM computes its attention itself, past transformers' registry"),
        (_bloom, "transformer.ln_f", "torch's own is one kernel already"),
        (lambda: build("mixtral", _experts_implementation="eager"), "model.layers.0.mlp.experts", "use 'grouped_mm'"),
        (lambda: build("gemma"), "model.norm", "something else than weight * x / rms(x)"),
        (lambda: build("gemma"), "model.layers.0.mlp", "something else than down(silu(gate(x)) * up(x))"),
        (lambda: build("gemma"), "lm_head", "the output head"),
        (lambda: nn.Sequential(nn.Linear(4, 4)), "", "not one of transformers'"),
    ],
)
def test_every_reason_is_told(make, name, reason):
    done = convert(make())
    assert reason in done.left[name]
    assert reason in str(done)


def test_experts_follow_names():
    for options, reason in (
        ({"keep": r"layers\.0\.mlp"}, "among those to keep"),
        ({"fp4_layers": r"layers\.1"}, "does not match"),
        ({"pack": True}, "no packed form"),
    ):
        done = convert(build("mixtral"), **options)
        assert reason in done.left["model.layers.0.mlp.experts"]
        assert ("model.layers.1.mlp.experts" in done.replaced.get("experts", [])) == ("pack" not in options)
