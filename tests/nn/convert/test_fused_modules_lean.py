"""Layers of transformers under its checkpoints: the half after attention keeps the residual stream alone. On a GPU
only, so here in Triton's interpreter, as if linears on the CPU might be fused.
"""

from __future__ import annotations

import copy
import gc
import sys
import weakref
from collections.abc import Iterator
from typing import Any

import pytest
import torch
import transformers
from torch import nn
from torch.utils.checkpoint import checkpoint
from transformers import LlamaConfig, LlamaForCausalLM

from tests.nn.convert.test_causal_lm import SHAPE, batch, build, gradients
from tests.offload.conftest import make_stack  # noqa: F401 - a fixture
from tests.waiting import wait_until
from vblackwell.kernels.runtime.registry import use_backend
from vblackwell.nn.convert import fused_layers
from vblackwell.nn.convert.causal_lm import accelerate_causal_lm
from vblackwell.nn.linear import one_input
from vblackwell.offload.api import enable_vgpu_stack_optimization, release
from vblackwell.offload.optimizer import VGPUAdamW

on_the_cpu = pytest.mark.skipif(torch.cuda.is_available(), reason="a GPU computes fp32 products by other kernels")


def checkpointed(model: str | nn.Module, reentrant: bool = False) -> nn.Module:
    model = (build(model) if isinstance(model, str) else model).train()
    enable = getattr(model, "activation_checkpointing_enable", None) or model.gradient_checkpointing_enable
    enable({"use_reentrant": reentrant})
    return model


@pytest.fixture
def wanted(monkeypatch) -> Iterator[list[bool]]:
    """Linears on the CPU may be fused; for each layer, or feed-forward of one, whether its result was wanted."""
    found: list[bool] = []
    layer, feed_forward = fused_layers.layer_block, fused_layers.feed_forward_block

    def noted_layer(*args):
        found.append(True)  # as one operation, without a second pass
        return layer(*args)

    def noted(*args):
        found.append(args[-1])
        return feed_forward(*args)

    monkeypatch.setattr(one_input, "may_fuse", lambda x, *linears: all(map(one_input.is_plain, linears)))
    monkeypatch.setattr(fused_layers, "layer_block", noted_layer)
    monkeypatch.setattr(fused_layers, "feed_forward_block", noted)
    with use_backend("rms_norm", "triton"), use_backend("swiglu", "triton"):
        yield found


def short(seed: int = 0) -> dict[str, torch.Tensor]:
    """Five tokens a row, of which some have no label: the interpreter runs a program for each."""
    return {name: of[:, 3:8] for name, of in batch(seed).items()}


def assert_close(found, expected) -> None:
    """Of fp32 sums in another order."""
    (loss, grads), (right_loss, right) = found, expected
    torch.testing.assert_close(loss, right_loss, rtol=1e-6, atol=0)
    for grad, other in zip(grads, right, strict=True):
        torch.testing.assert_close(grad, other, rtol=1e-4, atol=1e-6)


@on_the_cpu
@pytest.mark.parametrize("reentrant", [False, True])
@pytest.mark.parametrize("name", ["Llama", pytest.param("Qwen3", marks=pytest.mark.slow)])
def test_a_second_pass_computes_no_feed_forward_and_one_operation_has_none(name, reentrant, wanted):
    plain = checkpointed(name, reentrant)
    model = copy.deepcopy(plain)
    accelerate_causal_lm(model, loss=False)
    inputs = batch()
    assert_close(gradients(model, **inputs), gradients(plain, **inputs))
    assert wanted == ([True, True] if name == "Llama" else [True, True, False, False])


class Both:
    """A checkpointed model that keeps the inputs of its layers alone, and one whose attention is called."""

    def __init__(self, plain: nn.Module, monkeypatch) -> None:
        self.whole, self.by_parts, self.monkeypatch = plain, copy.deepcopy(plain), monkeypatch
        for model in (self.whole, self.by_parts):
            accelerate_causal_lm(model, loss=False)

    def run(self, inputs) -> list[tuple[torch.Tensor, list[torch.Tensor | None]]]:
        def refuse(*args):
            raise AssertionError("the other one's operator")

        found = []
        for model, other in ((self.whole, "feed_forward_block"), (self.by_parts, "layer_block")):
            with self.monkeypatch.context() as patch:
                patch.setattr(fused_layers, other, refuse)
                if model is self.by_parts:
                    patch.setattr(fused_layers, "_attention_as_probed", lambda *args: False)
                model.zero_grad()
                found.append(gradients(model, **inputs))
        return found


def assert_equal(found, right) -> None:
    assert torch.equal(found[0], right[0]) and len(found[1]) == len(right[1])
    for grad, other in zip(found[1], right[1], strict=True):
        assert (grad is None and other is None) or torch.equal(grad, other)


FAMILIES = ["Llama", "Mistral", "Qwen2"]  # grouped heads; a window; biases


def family(name: str, **sizes: int) -> nn.Module:
    torch.manual_seed(0)
    config = getattr(transformers, f"{name}Config")(**{**SHAPE, **sizes})
    model = getattr(transformers, f"{name}ForCausalLM")(config)
    with torch.no_grad():
        for param in model.parameters():
            if param.dim() == 1:
                param.add_(torch.randn_like(param) * 0.1)
    return model


@on_the_cpu
@pytest.mark.parametrize("inside", [False, pytest.param(True, marks=pytest.mark.slow)])
def test_attention_is_computed_again_under_the_same_autocast(inside, wanted, monkeypatch):
    """Which rounds a mask of numbers; a backward is mostly outside."""
    both = Both(checkpointed(family("Llama", num_hidden_layers=1).bfloat16()), monkeypatch)
    length = short()["input_ids"].shape[1]
    mask = torch.full((length, length), -3.3).triu(1).expand(2, 1, length, length)

    def found(model: nn.Module, **inputs: Any) -> tuple[torch.Tensor, list[torch.Tensor | None]]:
        with torch.autocast("cpu", dtype=torch.bfloat16):
            loss = model(**inputs).loss
            if inside:
                loss.backward()
        if not inside:
            loss.backward()
        return loss.detach(), [param.grad for param in model.parameters()]

    monkeypatch.setattr(sys.modules[__name__], "gradients", found)
    with use_backend("rotary", "triton"):
        assert_equal(*both.run({**short(), "attention_mask": mask}))


@on_the_cpu
@pytest.mark.parametrize(
    ("name", "reentrant"),
    [
        pytest.param("Llama", False, marks=pytest.mark.slow),
        ("Qwen2", True),
        *(
            pytest.param(name, reentrant, marks=pytest.mark.slow)
            for name, reentrant in (("Mistral", False), ("Qwen2", False), ("Llama", True), ("Mistral", True))
        ),
    ],
)
def test_a_layer_that_keeps_its_input_alone_gives_the_bits_of_its_parts(name, reentrant, wanted, monkeypatch):
    both = Both(checkpointed(family(name, num_hidden_layers=1), reentrant), monkeypatch)
    with use_backend("rotary", "triton"):
        assert_equal(*both.run(short()))
        masked = {**short(1), "attention_mask": torch.ones(2, 5, dtype=torch.long).index_fill(1, torch.arange(2), 0)}
        assert_equal(*both.run(masked))


@on_the_cpu
def test_weights_that_are_frozen_get_no_gradients(wanted, monkeypatch):
    plain = checkpointed(family("Qwen2"))
    for number, param in enumerate(plain.parameters()):
        param.requires_grad_(number % 3 == 0)
    both = Both(plain, monkeypatch)
    assert_equal(*both.run(batch()))
    assert all((param.grad is None) != param.requires_grad for param in both.whole.parameters())


@on_the_cpu
def test_a_checkpoint_keeps_the_input_and_weights_of_a_layer(wanted, monkeypatch):
    """And the graph of backward, made by hand, goes with it."""
    model = checkpointed(family("Llama"))
    accelerate_causal_lm(model, loss=False)
    kept = []
    op = fused_layers.layer_block

    def noted(*args):
        with torch.autograd.graph.saved_tensors_hooks(lambda each: kept.append(each) or each, lambda each: each):
            return op(*args)

    monkeypatch.setattr(fused_layers, "layer_block", noted)
    layer = model.model.layers[0]
    x = torch.randn(2, 6, 32, requires_grad=True)
    tables = model.model.rotary_emb(x, torch.arange(6)[None])
    layer(x, position_embeddings=tables).sum()
    assert [each is x for each in kept].count(True) == 1 and len(kept) == 10
    assert {id(each) for each in kept} == {id(each) for each in (x, *layer.parameters())}


@pytest.mark.each_value
@on_the_cpu
@pytest.mark.parametrize("name", ["self_attn", "self_attn.q_proj", "self_attn.o_proj", "input_layernorm"])
@pytest.mark.parametrize("replaced", [False, True])
def test_attention_that_was_changed_since_is_called(name, replaced, wanted):
    plain = checkpointed("Llama")
    model = copy.deepcopy(plain)
    accelerate_causal_lm(model, loss=False)
    calls = []
    for each in (model, plain):
        part = each.model.layers[1].get_submodule(name)
        if replaced:
            part.forward = lambda *args, theirs=part.forward, **options: calls.append(0) or theirs(*args, **options)
        else:
            part.register_forward_pre_hook(lambda *_: calls.append(0))
    assert_close(gradients(model, **batch()), gradients(plain, **batch()))
    assert len(calls) == 4 and wanted == [True, True, False]  # one operation of the other layer


@on_the_cpu
@pytest.mark.parametrize("way", ["dropout", "eager", "adapter", "Qwen3"])
def test_attention_that_may_not_run_again_is_called(way, wanted, monkeypatch):
    """One that draws numbers, that is not PyTorch's, or that trains more than its linears."""
    model = checkpointed("Qwen3" if way == "Qwen3" else "Llama")
    accelerate_causal_lm(model, loss=False)
    if way == "eager":
        model.set_attn_implementation("eager")
    for layer in model.model.layers:
        if way == "dropout":
            layer.self_attn.attention_dropout = 0.1
        if way == "adapter":
            layer.self_attn.v_proj = nn.Sequential(layer.self_attn.v_proj, nn.Linear(16, 16))
    monkeypatch.setattr(fused_layers, "layer_block", None)
    gradients(model, **batch())
    assert wanted == [True, True, False, False]


@on_the_cpu
def test_without_a_checkpoint_nothing_is_computed_twice(wanted):
    plain = build("Llama").train()
    model = copy.deepcopy(plain)
    accelerate_causal_lm(model, loss=False)
    assert_close(gradients(model, **batch()), gradients(plain, **batch()))
    assert not wanted


def twice(model: nn.Module, x: torch.Tensor, way: str) -> list[torch.Tensor]:
    """Gradients of two layers under one checkpoint of the user's, each called in a ``way``."""
    layers = model.model.layers
    positions = torch.arange(x.shape[1])[None]
    tables = model.model.rotary_emb(x, positions)

    def both(x):
        for layer in layers:
            x = getattr(layer, way)(x, position_embeddings=tables)
        return x

    model.zero_grad()
    checkpoint(both, x, use_reentrant=False).square().sum().backward()
    return [param.grad.clone() for param in layers.parameters()]


@pytest.mark.each_value
@on_the_cpu
@pytest.mark.parametrize("way", ["__call__", "forward"])
@pytest.mark.parametrize("own", [False, True])
def test_a_checkpoint_around_several_layers_gets_what_each_gives_the_next(way, own, wanted):
    """Its second pass is in backward, too, and needs the results of all layers but the last."""
    plain = checkpointed("Llama") if own else build("Llama").train()
    model = copy.deepcopy(plain)
    accelerate_causal_lm(model, loss=False)
    x = torch.randn(2, 6, 32, generator=torch.Generator().manual_seed(3), requires_grad=True)
    for found, right in zip(twice(model, x, way), twice(plain, x, way), strict=True):
        torch.testing.assert_close(found, right, rtol=1e-4, atol=1e-6)


@on_the_cpu
@pytest.mark.parametrize("name", ["mlp", "post_attention_layernorm", "mlp.up_proj"])
def test_parts_with_hooks_are_called(name, wanted):
    model = checkpointed("Llama")
    accelerate_causal_lm(model, loss=False)
    calls = []
    model.model.layers[1].get_submodule(name).register_forward_pre_hook(lambda *_: calls.append(name))
    gradients(model, **batch())
    assert len(calls) == 2 and wanted == [True]


@on_the_cpu
@pytest.mark.parametrize("where", [{"update": "host", "activations": "host"}, {"update": "device"}])
def test_streamed_as_resident(where, wanted, make_stack, monkeypatch):  # noqa: F811
    """Weights that come and go under a layer that keeps its input alone: the bits of a model that stays."""
    monkeypatch.setattr(fused_layers, "feed_forward_block", None)  # none by parts
    runs = []
    for placement, level0 in (("resident", 8 << 20), ("streamed", 96 << 10)):
        model = checkpointed("Llama")
        enable_vgpu_stack_optimization(model, make_stack(level0), placement=placement, accelerate=True, **where)
        optimizer, losses = VGPUAdamW(model.parameters(), lr=1e-2, update_in_backward=True), []
        for step in range(3):
            loss = model(**batch(step)).loss
            loss.backward()
            losses.append(loss.item())
            optimizer.step()
            optimizer.zero_grad()
        release(model)
        runs.append((losses, [param.detach().clone() for param in model.parameters()]))
    (losses, weights), (streamed_losses, streamed_weights) = runs
    assert losses == streamed_losses and wanted == 12 * [True]
    assert all(torch.equal(a, b) for a, b in zip(weights, streamed_weights, strict=True))


@on_the_cpu
@pytest.mark.parametrize("reentrant", [False, True])
def test_hooks_of_a_layer_get_its_output_in_both_passes(reentrant, wanted):
    """transformers 5.17 runs them in the second pass as well, where a penalty saves what they are given."""
    plain = checkpointed("Llama", reentrant)
    model = copy.deepcopy(plain)
    accelerate_causal_lm(model, loss=False)
    found = []
    for each in (model, plain):
        scale = torch.ones(32, requires_grad=True)
        for layer in each.model.layers:
            layer.register_forward_hook(lambda module, args, output, scale=scale: output * scale)
        found.append((*gradients(each, **batch()), scale.grad))
    assert_close(found[0][:2], found[1][:2])
    torch.testing.assert_close(found[0][2], found[1][2], rtol=1e-4, atol=1e-6)


@pytest.mark.each_value
@on_the_cpu
@pytest.mark.parametrize("name", ["mlp", "post_attention_layernorm", "mlp.down_proj"])
@pytest.mark.parametrize("replaced", [False, True])
def test_what_was_changed_since_is_called(name, replaced, wanted):
    """A forward of the instance's own, or another module in its place."""
    plain = checkpointed("Llama")
    model = copy.deepcopy(plain)
    accelerate_causal_lm(model, loss=False)
    for each in (model, plain):
        layer = each.model.layers[1]
        if not replaced:
            part = layer.get_submodule(name)
            part.forward = lambda x, theirs=part.forward: theirs(x) * 2
        elif name == "mlp.down_proj":
            layer.mlp.down_proj = nn.Sequential(layer.mlp.down_proj, nn.Tanh())
        else:
            setattr(layer, name, nn.Sequential(layer.get_submodule(name), nn.Tanh()))
    assert_close(gradients(model, **batch()), gradients(plain, **batch()))
    assert wanted == [True]  # of the other layer, one operation


@on_the_cpu
def test_a_layer_whose_forward_is_its_own_is_left(wanted):
    model = checkpointed("Llama")
    first, second = model.model.layers
    first.forward = first.forward
    report = accelerate_causal_lm(model, loss=False)
    assert report.replaced["layer"] == ["model.layers.1"]
    seen = []
    second.self_attn.register_forward_pre_hook(lambda module, args, options: seen.append(options), with_kwargs=True)
    second.forward = second.forward  # from now on, too
    gradients(model, **batch())
    assert not wanted and seen and not any("_vb_passes" in options for options in seen)


@on_the_cpu
def test_where_triton_does_not_run_it_is_left(wanted):
    """As the registry says: fp64, which would lose half of its digits, an old GPU, a choice."""
    model = checkpointed("Llama")
    accelerate_causal_lm(model, loss=False)
    with use_backend("swiglu", "torch"):
        gradients(model, **batch())
    assert not wanted


def test_a_layer_keeps_the_name_of_its_class():
    """By which auto-wrapping and device maps find it."""
    model = checkpointed("Llama")
    accelerate_causal_lm(model)
    assert {type(layer).__name__ for layer in model.model.layers} == {"LlamaDecoderLayer"}


class Wrapped:
    """As FSDP2 makes a layer's class a separate one."""


def test_a_class_of_the_layers_class_computes_the_same():
    plain = checkpointed("Llama")
    model = copy.deepcopy(plain)
    accelerate_causal_lm(model, loss=False)
    for layer in model.model.layers:
        layer.__class__ = type("Wrapped", (Wrapped, type(layer)), {})
    assert_close(gradients(model, **batch()), gradients(plain, **batch()))


@pytest.mark.gpu
@pytest.mark.parametrize("autocast", [False, True])
def test_a_gpu_needs_less_memory_and_gives_the_same_gradients(autocast):
    """bf16 gradients with an error of at most half as much again as that of transformers' own layers, against fp32."""
    torch.manual_seed(0)
    wide = {**SHAPE, "hidden_size": 256, "intermediate_size": 1024}  # a layer needs more than the logits do
    plain = checkpointed(LlamaForCausalLM(LlamaConfig(**wide)).to("cuda", torch.bfloat16))
    exact, model = copy.deepcopy(plain).float(), copy.deepcopy(plain)
    report = accelerate_causal_lm(model, loss=False)
    assert len(report.replaced["layer"]) == 2
    ids = torch.randint(97, (64, 64), device="cuda", generator=torch.Generator("cuda").manual_seed(1))
    inputs = {"input_ids": ids, "labels": ids}
    _, right = gradients(exact, **inputs)
    errors, peaks = [], []
    for each in (plain, model):
        gradients(each, **inputs)  # compiles kernels, and makes workspaces
        each.zero_grad()
        torch.cuda.reset_peak_memory_stats()
        before = torch.cuda.memory_allocated()
        with torch.autocast("cuda", torch.bfloat16, enabled=autocast):
            _, found = gradients(each, **inputs)
        peaks.append(torch.cuda.max_memory_allocated() - before)
        errors.append(sum(float((a.float() - b).square().sum()) for a, b in zip(found, right, strict=True)) ** 0.5)
    assert 0 < errors[1] <= 1.5 * errors[0]
    assert peaks[1] < peaks[0]


@pytest.mark.gpu
@pytest.mark.parametrize("deterministic", [False, True])
@pytest.mark.parametrize("name", FAMILIES)
def test_bits_and_memory_of_a_layer_by_parts_on_a_gpu(name, deterministic, monkeypatch):
    """By default attention's backward adds in no fixed order, and two runs of the same differ too."""
    sizes = {"hidden_size": 512, "intermediate_size": 1024, "num_attention_heads": 8, "num_key_value_heads": 2}
    plain = checkpointed(family(name, **sizes, max_position_embeddings=512)).to("cuda", torch.bfloat16)
    both = Both(plain, monkeypatch)
    ids = torch.randint(97, (8, 512), generator=torch.Generator().manual_seed(1)).cuda()
    inputs, peaks = {"input_ids": ids, "labels": ids}, []
    monkeypatch.setenv("CUBLAS_WORKSPACE_CONFIG", ":4096:8")
    torch.use_deterministic_algorithms(deterministic)
    try:
        whole, by_parts = both.run(inputs)
    finally:
        torch.use_deterministic_algorithms(False)
    if deterministic:
        assert_equal(whole, by_parts)
    for found, right in zip((whole[0], *whole[1]), (by_parts[0], *by_parts[1]), strict=True):
        # Sums in another order, rounded to bf16: at most 2^-8 of each value, once in attention and once after it. Not
        # of biases: keys' cancel.
        assert right.dim() == 1 or (found - right).float().norm() <= 2**-7 * right.float().norm()
    for model in (both.whole, both.by_parts):
        with monkeypatch.context() as patch:
            if model is both.by_parts:
                patch.setattr(fused_layers, "_attention_as_probed", lambda *args: False)
            model.zero_grad()
            torch.cuda.reset_peak_memory_stats()
            begun = torch.cuda.memory_allocated()
            gradients(model, **inputs)
            peaks.append(torch.cuda.max_memory_allocated() - begun)
    assert peaks[0] <= peaks[1] + (4 << 20)


def test_a_streamed_model_that_is_accelerated_is_collected(make_stack):  # noqa: F811
    model = build("Llama")
    dead, stack = weakref.ref(model), make_stack(96 << 10)
    enable_vgpu_stack_optimization(model, stack, placement="streamed", accelerate=True)
    del model
    # The worker may hold its last task a moment longer.
    wait_until(lambda: gc.collect() >= 0 and dead() is None)
