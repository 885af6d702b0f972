"""What layers of one forward have in common is found once, and anew as soon as anything of it is another."""

from __future__ import annotations

import contextlib
from typing import Any

import pytest
import torch
from torch import nn

from tests.nn.convert.test_causal_lm import batch, gradients
from tests.nn.convert.test_fused_modules_lean import assert_equal, on_the_cpu, wanted  # noqa: F401 - a fixture
from tests.nn.convert.test_layer_graphs import (  # noqa: F401 - and a fixture
    MUCH,
    accelerated,
    fused,
    graphed,
    own_layers,
    step,
    turned,
)
from vblackwell.kernels.pointwise import rows_triton
from vblackwell.kernels.pointwise.layer_graphs import LayerGraphs
from vblackwell.nn.convert import fused_layers

pytestmark = on_the_cpu


def before_each_layer(layers: nn.ModuleList, do: Any) -> None:
    """Let ``do(number)`` run before each layer, where a graph does not exclude it."""
    for number, layer in enumerate(layers):

        def hook(module: nn.Module, args: Any, number: int = number) -> None:
            do(number)

        hook.ignores_output = True  # type: ignore[attr-defined]
        layer.register_forward_pre_hook(hook)


@pytest.mark.parametrize("inside", [False, True])
def test_a_configuration_that_changes_between_two_layers_is_seen(inside, fused):  # noqa: F811
    model, graphs = accelerated("Llama"), LayerGraphs()
    model.config.told = {"number": -1}

    def change(number: int) -> None:
        if inside:
            model.config.told["number"] = number
        else:
            model.config.pretraining_tp = number + 1

    before_each_layer(model.model.layers, change)
    step(model, graphs, batch())
    assert len(graphs._steps[-1]) == 2


def flipping(layer: Any) -> None:
    """Let every second call give twice as much, by what it keeps in the configuration."""

    class Flipping(type(layer)):
        def forward(self, hidden_states, *args, **options):
            config = self.attn.config
            config.odd = not getattr(config, "odd", False)
            y = super().forward(hidden_states, *args, **options)
            return y * 2 if config.odd else y

    Flipping.__module__ = type(layer).__module__
    layer.__class__ = Flipping


def test_a_layer_that_keeps_something_in_its_configuration_is_no_operation(fused):  # noqa: F811
    model, graphs = own_layers(flipping), LayerGraphs()
    for seed in range(2):
        step(model, graphs, batch(seed))
    assert set(graphs.alone.values()) == {None}
    model.config.odd = False
    found = step(model, graphs, batch(2))
    model.config.odd = False
    assert_equal(found, gradients(model, **batch(2)))


def test_what_is_another_in_backward_is_not_captured(fused):  # noqa: F811
    """Its kind is that of the forward, which computed something else."""
    model, graphs = accelerated("Llama"), LayerGraphs()
    layers = [layer.self_attn for layer in model.model.layers]
    usual = layers[0].scaling

    def odd() -> None:
        with graphs.used():
            loss = model(**batch(), use_cache=False).logits.square().mean()
        for attention in layers:
            attention.scaling = 2 * usual
        loss.backward()
        for attention in layers:
            attention.scaling = usual
        graphs.end_step()

    for _ in range(2):
        odd()
    graphs.allow(MUCH)
    odd()
    assert not graphs._graphs and "changed" in graphs.declined
    assert_equal(step(model, graphs, batch(1)), gradients(model, **batch(1)))


@pytest.mark.parametrize(
    "order", [(2, 1, 0), *(pytest.param(order, marks=pytest.mark.slow) for order in ((0, 1, 2), (1, 0, 2)))]
)
def test_tables_are_those_of_the_forward_whose_backward_it_is(order, fused):  # noqa: F811
    model = accelerated("Llama")
    graphs, length = graphed(model, **batch()), batch()["input_ids"].shape[1]
    assert graphs._graphs

    def run(used: bool) -> tuple[torch.Tensor, list[torch.Tensor | None]]:
        model.zero_grad()
        losses = []
        for seed in range(3):
            with graphs.used() if used else contextlib.nullcontext():
                positions = torch.arange(length)[None] + seed
                losses.append(model(**batch(seed), position_ids=positions).logits.square().mean())
        for number in order:
            losses[number].backward()
        return torch.stack([loss.detach() for loss in losses]), [each.grad for each in model.parameters()]

    assert_equal(run(True), run(False))


def test_what_attention_is_given_is_asked_of_a_layer_that_differs(fused, monkeypatch):  # noqa: F811
    """In an argument or a number of its own; of the others once a forward."""
    model, graphs = accelerated("Llama"), LayerGraphs()
    asked, own = list[int](), fused_layers._given_to_attention
    monkeypatch.setattr(fused_layers, "_given_to_attention", lambda *a, **o: asked.append(1) or own(*a, **o))
    step(model, graphs, batch())
    assert len(asked) == 1 and len(model.model.layers) == 2
    model.model.layers[1].hidden_size += 1  # which nothing reads
    step(model, graphs, batch())
    assert len(asked) == 3

    def scaled(module: nn.Module, args: Any, options: dict[str, Any]) -> Any:
        cos, sin = options["position_embeddings"]
        return args, {**options, "position_embeddings": (cos * 2, sin)}

    scaled.ignores_output = True  # type: ignore[attr-defined]
    model.model.layers[1].hidden_size -= 1
    model.model.layers[1].register_forward_pre_hook(scaled, with_kwargs=True)
    assert_equal(step(model, graphs, batch(1)), gradients(model, **batch(1)))


@pytest.mark.parametrize("inverse", [False, True])
@pytest.mark.parametrize(("dtype", "tables"), [(torch.float32, (3, 8)), (torch.bfloat16, (2, 3, 8))])
def test_what_stands_for_the_rotation_has_its_bits_and_strides(inverse, dtype, tables):
    draw = torch.Generator().manual_seed(0)
    q, k = (torch.randn(2, 3, heads, 8, generator=draw).to(dtype).transpose(1, 2) for heads in (2, 1))
    cos, sin = (torch.randn(tables, generator=draw).to(dtype) for _ in range(2))
    found, right = turned(q, k, cos, sin, inverse), rows_triton.rotate(q, k, cos, sin, inverse)
    for one, other in zip(found, right, strict=True):
        assert torch.equal(one, other) and one.stride() == other.stride()
