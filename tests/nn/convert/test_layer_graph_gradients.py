"""Where graphs of layers write gradients: into the memory that a stream would copy them to."""

from __future__ import annotations

from typing import Any

import pytest
import torch
from torch import nn

from tests.nn.convert.test_causal_lm import batch, build
from tests.nn.convert.test_fused_modules_lean import FAMILIES, checkpointed, family, on_the_cpu, wanted  # noqa: F401
from tests.nn.convert.test_layer_graphs import MUCH, accelerated, fused, graphed, step  # noqa: F401 - and a fixture
from tests.offload.conftest import make_stack  # noqa: F401
from vblackwell.kernels.pointwise.layer_graphs import LayerGraphs
from vblackwell.offload.api import enable_vgpu_stack_optimization, offload_of, release
from vblackwell.offload.movement.gradients import GradientCollector
from vblackwell.offload.optimizer import VGPUAdamW


@on_the_cpu
@pytest.mark.parametrize(
    ("name", "shared"), [("GPT2", False), pytest.param("Llama", False, marks=pytest.mark.slow), ("Llama", True)]
)
def test_graphs_write_gradients_where_they_are_taken(name, shared, fused, make_stack, monkeypatch):  # noqa: F811
    """But for those that somebody else sees, or that come twice."""
    found, took = list[bool](), GradientCollector.take

    def noted(self: GradientCollector, slot: Any) -> Any:
        with torch._C.DisableTorchFunctionSubclass():
            buffer, gradient = self.filling.get(slot.group), slot.param.grad
        if buffer is not None and gradient is not None:
            found.append(gradient.data_ptr() == slot.view(buffer.bytes).data_ptr())
        return took(self, slot)

    monkeypatch.setattr(GradientCollector, "take", noted)
    runs = []
    for placement, level0 in (("resident", 8 << 20), ("streamed", 256 << 10)):
        model = checkpointed(family(name) if name in FAMILIES else build(name))
        layers = model.transformer.h if name == "GPT2" else model.model.layers
        if shared:
            layers[1] = layers[0]
        model = enable_vgpu_stack_optimization(model, make_stack(level0), placement=placement, accelerate=True)
        optimizer, engine = VGPUAdamW(model.parameters(), lr=1e-2, update_in_backward=True), offload_of(model)
        if placement == "streamed":
            engine.step_control.graphs = graphs = LayerGraphs()
            graphs.places = engine._places_of_gradients
        for seed in range(6):
            found.clear()
            if seed == 5:  # of each layer somebody else sees a gradient
                for each in {id(layer): layer for layer in layers}.values():
                    next(each.parameters()).register_hook(lambda gradient: None)
            loss = model(**batch(seed)).loss
            loss.backward()
            optimizer.step()
            optimizer.zero_grad()
            runs.append(loss.item())
            if placement == "streamed":
                graphs.end_step()
                if seed == 2:
                    graphs.allow(MUCH)
                per_layer = sum(1 for _ in layers[0].parameters())
                if seed == 3:  # which captures with the first layer that comes
                    assert sum(found) == (0 if shared else per_layer)
                elif not shared:
                    assert sum(found) == (2 * per_layer if seed == 4 else 0), seed
        release(model)
    assert runs[:6] == runs[6:]


@on_the_cpu
def test_gradients_that_are_asked_for_get_no_place(fused):  # noqa: F811
    """`torch.autograd.grad` gives them away: they must not be what somebody takes bytes from."""
    model, asked = accelerated("Llama"), list[Any]()
    graphs = graphed(model, **batch())
    graphs.places = asked.append
    step(model, graphs, batch())
    assert len(asked) == 2 and all(isinstance(each, nn.Parameter) for leaves in asked for each in leaves)
    asked.clear()
    some = [model.model.layers[0].mlp.up_proj.weight, model.model.layers[1].self_attn.q_proj.weight]
    with graphs.used():
        found = torch.autograd.grad(model(**batch()).loss, some)
    assert asked == [[], []]
    model.zero_grad()
    model(**batch()).loss.backward()
    assert all(torch.equal(a, b.grad) for a, b in zip(found, some, strict=True))
