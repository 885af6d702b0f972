"""Layers of a streamed model as CUDA graphs: the bits of those that are launched, and only where nothing else decides.

Without a GPU what would be captured is called, through the same copies.
"""

from __future__ import annotations

import contextlib
import gc
import re
import weakref
from collections.abc import Callable, Iterator
from concurrent.futures import ThreadPoolExecutor
from typing import Any

import pytest
import torch
from torch import nn
from torch.utils.checkpoint import checkpoint
from transformers.models.llama import modeling_llama

from tests.nn.convert.test_causal_lm import batch, build, gradients
from tests.nn.convert.test_fused_modules_lean import (
    FAMILIES,
    assert_equal,
    checkpointed,
    family,
    on_the_cpu,
    wanted,  # noqa: F401 - a fixture
)
from tests.offload.conftest import make_stack  # noqa: F401 - a fixture
from vblackwell.errors import StaleTensor
from vblackwell.kernels.pointwise import layer_graphs, rows_triton
from vblackwell.kernels.pointwise.layer import own_layer
from vblackwell.kernels.pointwise.layer_graphs import LayerGraphs, graphs_in_use
from vblackwell.kernels.runtime.registry import empty_of, use_backend
from vblackwell.nn.convert import fused_layers
from vblackwell.nn.convert.causal_lm import accelerate_causal_lm
from vblackwell.offload.api import enable_vgpu_stack_optimization, offload_of, release
from vblackwell.offload.movement.activations import Boundary
from vblackwell.offload.movement.weights import WeightStreamer
from vblackwell.offload.optimizer import VGPUAdamW
from vblackwell.units import format_bytes

MUCH = 1 << 40


def turned(
    q_BNSH: torch.Tensor, k_BKSH: torch.Tensor, cos: torch.Tensor, sin: torch.Tensor, inverse: bool
) -> tuple[torch.Tensor, ...]:
    """As `rows_triton.rotate`, in fp32 and with the inputs' strides: a program for each position, which takes the
    interpreter most of a test's time."""
    cos, sin = (table.float()[:, None] if table.dim() == 3 else table.float() for table in (cos, sin))
    (cos_left, cos_right), (sin_left, sin_right) = cos.chunk(2, -1), sin.chunk(2, -1)
    found = []
    for x in (q_BNSH, k_BKSH):
        left, right = x.float().chunk(2, -1)
        if inverse:
            both = (left * cos_left + right * sin_right, right * cos_right - left * sin_left)
        else:
            both = (left * cos_left - right * sin_left, right * cos_right + left * sin_right)
        found.append(empty_of(x).copy_(torch.cat(both, -1)))
    return tuple(found)


@pytest.fixture
def fused(wanted, monkeypatch) -> Iterator[None]:  # noqa: F811 - linears on the CPU may be fused
    monkeypatch.setattr(fused_layers, "MOST_WEIGHTS", 100)  # inputs here are small
    monkeypatch.setattr(rows_triton, "rotate", turned)
    with use_backend("rotary", "triton"):
        yield


def accelerated(name: str, **sizes: int) -> nn.Module:
    model = checkpointed(family(name, **sizes) if name in FAMILIES else build(name))
    accelerate_causal_lm(model, loss=False)
    return model


def step(model: nn.Module, graphs: LayerGraphs, inputs: dict[str, Any]) -> tuple[torch.Tensor, list[Any]]:
    with graphs.used():
        model.zero_grad()
        found = gradients(model, **inputs)
    graphs.end_step()
    return found


def graphed(model: nn.Module, **inputs: Any) -> LayerGraphs:
    """Graphs of what ``model`` does in steps with these inputs."""
    graphs = LayerGraphs()
    for _ in range(2):
        step(model, graphs, inputs)
    graphs.allow(MUCH)
    step(model, graphs, inputs)
    return graphs


@on_the_cpu
@pytest.mark.parametrize(
    "name", ["Qwen2", "GPT2", *(pytest.param(name, marks=pytest.mark.slow) for name in ("Llama", "Phi3"))]
)
def test_graphs_of_one_layer_give_the_bits_of_all(name, fused):
    model = accelerated(name)
    graphs = graphed(model, **batch())
    assert len(graphs._graphs) == 1 and graphs.about == "layers as CUDA graphs, which hold 0 B of the GPU"
    for seed in (1, 2):  # other inputs, and weights that have changed
        with torch.no_grad():
            for param in model.parameters():
                param.mul_(1.25)
        assert_equal(step(model, graphs, batch(seed)), gradients(model, **batch(seed)))


@on_the_cpu
def test_what_decides_about_kernels_makes_another_kind(fused, monkeypatch):
    """Gradients that are wanted, numbers of attention and its config, shapes, and PyTorch's switches."""
    model = accelerated("Llama")
    graphs = graphed(model, **batch())
    (found,) = graphs._graphs.values()
    calls: list[int] = []
    for name in ("output", "gradients"):
        method = getattr(found, name)
        monkeypatch.setattr(found, name, lambda *args, method=method: calls.append(0) or method(*args))
    step(model, graphs, batch())
    assert len(calls) == 4

    def launches(inputs: dict[str, Any], number: int = 4) -> None:
        before = len(calls)
        assert_equal(step(model, graphs, inputs), gradients(model, **inputs))
        assert len(calls) == before + 4 - number

    launches({name: each[:, :-1] for name, each in batch().items()})
    first, second = model.model.layers
    with monkeypatch.context() as patch:
        patch.setattr(second.self_attn, "scaling", 0.5)
        launches(batch(), 2)
    with monkeypatch.context() as patch:
        patch.setattr(model.config, "pretraining_tp", 2, raising=False)
        launches(batch())
    torch.use_deterministic_algorithms(True)
    try:
        launches(batch())
    finally:
        torch.use_deterministic_algorithms(False)
    launches(batch(), 0)
    for param in first.parameters():
        param.requires_grad_(False)
    launches(batch(), 2)


@on_the_cpu
def test_masks_of_numbers_are_launched(fused):
    mask = torch.ones(2, 12, dtype=torch.long).index_fill(1, torch.arange(3), 0)
    graphs = graphed(accelerated("Llama"), **batch(), attention_mask=mask)
    assert not graphs._graphs and not graphs._steps[-1]


def with_attention(prepare: Callable[[Any, int], Any], factor: Callable[[Any], Any]) -> nn.Module:
    """A model whose attention multiplies queries by ``factor`` of itself, of which ``prepare`` makes each."""
    model = checkpointed(family("Llama"))
    functions = modeling_llama.ALL_ATTENTION_FUNCTIONS

    class Attention(modeling_llama.LlamaAttention):
        def forward(self, hidden_states, position_embeddings, attention_mask=None, past_key_values=None, **options):
            shape = (*hidden_states.shape[:-1], -1, self.head_dim)
            parts = (self.q_proj(hidden_states), self.k_proj(hidden_states), self.v_proj(hidden_states))
            q, k, v = (part.view(shape).transpose(1, 2) for part in parts)
            q, k = modeling_llama.apply_rotary_pos_emb(q, k, *position_embeddings)
            how = {"dropout": 0.0, "scaling": self.scaling, **options}
            out, scores = functions["sdpa"](self, q * factor(self), k, v, attention_mask, **how)
            return self.o_proj(out.reshape(*hidden_states.shape[:-1], -1).contiguous()), scores

    for number, layer in enumerate(model.model.layers):
        layer.self_attn.__class__ = Attention
        prepare(layer.self_attn, number)
    accelerate_causal_lm(model, loss=False)
    return model


@on_the_cpu
@pytest.mark.parametrize(
    ("prepare", "factor", "kinds"),
    [
        pytest.param(
            lambda each, number: setattr(each, "warm", 1.0), lambda each: each.warm, 1, marks=pytest.mark.slow
        ),
        (lambda each, number: setattr(each, "_warm", 1.0 + number), lambda each: each._warm, 2),
        (lambda each, number: setattr(each, "warm", {"by": 1.0 + number}), lambda each: each.warm["by"], 0),
        (lambda each, number: each.register_buffer("warm", torch.tensor(1.0 + number)), lambda each: each.warm, 0),
    ],
)
def test_what_attention_holds_of_its_own_is_seen(prepare, factor, kinds, fused):
    model = with_attention(prepare, factor)
    graphs = graphed(model, **batch())
    assert len(graphs._graphs) == kinds
    assert_equal(step(model, graphs, batch(1)), gradients(model, **batch(1)))


@on_the_cpu
@pytest.mark.parametrize(
    "factor",
    [
        lambda each: 1.0 + (each.layer_idx == 1),
        pytest.param(lambda each: 1.0 + isinstance(each.layer_idx, bool), marks=pytest.mark.slow),
    ],
)
def test_attention_that_goes_by_its_layers_number_is_launched(factor, fused):
    model = with_attention(lambda each, number: None, factor)
    with pytest.warns(UserWarning, match="cannot be captured: Unsupported: attention that goes by the number"):
        graphs = graphed(model, **batch())
    assert not graphs._graphs
    assert_equal(step(model, graphs, batch(1)), gradients(model, **batch(1)))


@on_the_cpu
def test_settings_under_which_names_raise_are_read_by_others(fused, monkeypatch):
    """PyTorch's newer name of what fp32 products may do: where it is used, the older raises."""
    model, products = accelerated("GPT2"), torch.backends.cuda.matmul
    before, graphs = products.fp32_precision, graphed(model, **batch())
    try:
        products.fp32_precision = "tf32"
        assert_equal(step(model, graphs, batch()), gradients(model, **batch()))
        assert len(graphs._steps[-1]) == 1  # launched
    finally:
        products.fp32_precision = before


@on_the_cpu
def test_dropped_graphs_are_gone_and_a_dead_owner_is_not_used(fused):
    model = accelerated("GPT2")
    graphs = graphed(model, **batch())
    graphs.drop()
    assert_equal(step(model, graphs, batch(1)), gradients(model, **batch(1)))
    assert not graphs._graphs and len(graphs._steps[-1]) == 1
    interrupted = contextlib.ExitStack()
    interrupted.enter_context(graphs.used())
    assert graphs_in_use() is graphs
    gone = weakref.ref(graphs)
    interrupted.pop_all()
    del graphs, interrupted
    gc.collect()
    assert gone() is None and graphs_in_use() is None


@on_the_cpu
def test_where_memory_is_short_layers_are_launched_and_that_is_told(fused, monkeypatch):
    def refuse(*given: Any) -> None:
        raise torch.OutOfMemoryError("of the GPU")

    model = accelerated("GPT2")
    monkeypatch.setattr(layer_graphs, "_Graphs", refuse)
    graphs = graphed(model, **batch())
    assert not graphs._graphs and graphs.num_bytes == 0
    why = f"a graph needs more of the GPU than the {format_bytes(MUCH)} that steps leave it"
    assert graphs.about == f"layers are launched kernel by kernel: {why}"
    graphs.drop()
    assert graphs.about == ""
    assert_equal(step(model, graphs, batch(1)), gradients(model, **batch(1)))


@on_the_cpu
def test_what_attention_raises_is_a_reason_to_launch_and_a_warning(fused, monkeypatch):
    def refuse(*given: Any) -> None:
        raise RuntimeError("not while capturing")

    monkeypatch.setattr(layer_graphs, "_Graphs", refuse)
    with pytest.warns(UserWarning, match="launched kernel by kernel.*RuntimeError: not while capturing"):
        graphs = graphed(accelerated("GPT2"), **batch())
    assert not graphs._graphs and "RuntimeError: not while capturing" in graphs.about


@on_the_cpu
def test_where_steps_leave_nothing_none_is_tried(fused, monkeypatch):
    model, graphs = accelerated("GPT2"), LayerGraphs()
    monkeypatch.setattr(layer_graphs, "_Graphs", lambda *given: pytest.fail("tried"))
    for _ in range(2):
        step(model, graphs, batch())
    graphs.allow(0)
    step(model, graphs, batch())
    assert graphs.about == "layers are launched kernel by kernel: steps leave no memory for graphs"


@on_the_cpu
def test_only_the_step_after_captures_what_the_last_two_had(fused):
    model, graphs = accelerated("GPT2"), LayerGraphs()
    shorter = {name: each[:, :-1] for name, each in batch().items()}
    step(model, graphs, batch())
    graphs.allow(MUCH)  # one step says nothing of the next
    assert graphs.num_bytes == 0
    step(model, graphs, shorter)
    step(model, graphs, batch())
    graphs.allow(MUCH)
    assert graphs.num_bytes == 0
    step(model, graphs, batch())
    graphs.allow(MUCH)
    assert graphs.num_bytes == MUCH
    step(model, graphs, shorter)
    assert graphs.num_bytes == 0 and not graphs._graphs
    step(model, graphs, batch())
    assert not graphs._graphs


def own_layers(change: Callable[[Any], None]) -> nn.Module:
    """GPT-2's, changed before the model is accelerated."""
    model = checkpointed(build("GPT2"))
    for layer in model.transformer.h:
        change(layer)
    accelerate_causal_lm(model, loss=False)
    return model


def counting(layer: Any) -> None:
    """Let it keep something of a call."""

    class Counting(type(layer)):
        def forward(self, hidden_states, *args, **options):
            self.calls = getattr(self, "calls", 0) + 1
            return super().forward(hidden_states, *args, **options)

    Counting.__module__ = type(layer).__module__
    layer.__class__ = Counting


def answering_twice(layer: Any) -> None:
    layer.mlp.dropout.register_forward_hook(lambda *args: None)


@on_the_cpu
@pytest.mark.parametrize(
    ("change", "known"),
    [
        (lambda layer: setattr(layer.mlp.dropout, "p", 0.2), {None}),
        (counting, {None}),
        (answering_twice, set()),
        (lambda layer: layer.mlp.register_buffer("table", torch.ones(1)), set()),
        (lambda layer: layer.register_forward_hook(lambda *args: None), set()),
    ],
)
def test_layers_that_draw_numbers_or_keep_something_stay_checkpoints(change, known, fused):
    model, graphs = own_layers(change), LayerGraphs()
    torch.manual_seed(1)
    found = [step(model, graphs, batch(seed)) for seed in range(3)]
    torch.manual_seed(1)
    for seed, right in enumerate(found):
        assert_equal(right, gradients(model, **batch(seed)))
    assert set(graphs.alone.values()) == known and not any(graphs._steps[-1])


class UnderOne(nn.Module):
    """The layers of a model under one checkpoint of the user's."""

    def __init__(self, model: Any) -> None:
        super().__init__()
        self.model = model

    def forward(self, ids: torch.Tensor) -> torch.Tensor:
        trunk, positions = self.model.base_model, torch.arange(ids.shape[1])[None]
        is_llama = hasattr(trunk, "layers")
        x = (trunk.embed_tokens if is_llama else trunk.wte)(ids)
        tables = {"position_embeddings": trunk.rotary_emb(x, positions)} if is_llama else {}

        def all_of_them(x: torch.Tensor) -> torch.Tensor:
            for layer in trunk.layers if is_llama else trunk.h:
                x = layer(x, **tables)
            return x

        return checkpoint(all_of_them, x, use_reentrant=False).square().sum()


@on_the_cpu
@pytest.mark.parametrize("name", ["GPT2", pytest.param("Llama", marks=pytest.mark.slow)])
def test_a_checkpoint_around_layers_of_a_stream_sees_the_same_in_both_passes(name, fused, make_stack):  # noqa: F811
    """Of which only the first is inside the forward, where graphs are used."""
    grads = []
    for graphed in (True, False):
        model = UnderOne(accelerated(name))
        enable_vgpu_stack_optimization(model, make_stack(256 << 10), placement="streamed")
        offload_of(model).step_control.graphs = LayerGraphs() if graphed else None
        for seed in range(3):
            model(batch(seed)["input_ids"]).backward()
        grads.append([param.grad.cpu() for param in model.parameters() if param.grad is not None])
        release(model)
    assert grads[0] and all(torch.equal(a, b) for a, b in zip(*grads, strict=True))


@on_the_cpu
@pytest.mark.parametrize("way", ["another's", "eager", "forward AD"])
def test_attention_that_nobody_here_knows_stays_in_a_checkpoint(way, fused, monkeypatch):
    """Another's may read a tensor that wants a gradient, or draw numbers later on."""
    model, graphs = own_layers(lambda layer: None), LayerGraphs()
    if way == "another's":
        theirs = modeling_llama.ALL_ATTENTION_FUNCTIONS["sdpa"]
        monkeypatch.setitem(modeling_llama.ALL_ATTENTION_FUNCTIONS, "sdpa", lambda *args, **how: theirs(*args, **how))
    elif way == "eager":
        model.set_attn_implementation("eager")
    else:
        monkeypatch.setattr(fused_layers, "differentiating_forward", lambda: True)
    for seed in range(2):
        assert_equal(step(model, graphs, batch(seed)), gradients(model, **batch(seed)))
    assert not graphs.alone and not any(graphs._steps)


@on_the_cpu
def test_a_mask_that_was_written_to_since_the_forward_is_refused(fused):
    model, graphs = own_layers(lambda layer: None), LayerGraphs()
    layer, x, mask = model.transformer.h[0], torch.randn(2, 6, 32, requires_grad=True), torch.zeros(2, 1, 6, 6)
    with graphs.used():
        layer(x, None, mask)
        y = layer(x, None, mask)
    y.sum().backward(retain_graph=True)
    mask.sub_(1)
    with pytest.raises(StaleTensor, match="written to in place since its forward"):
        y.sum().backward()


@on_the_cpu
def test_layers_with_more_weights_than_inputs_stay_checkpoints(fused, monkeypatch):
    """Their gradients at once would take more than was planned for."""
    model, graphs = own_layers(lambda layer: None), LayerGraphs()
    layer = model.transformer.h[0]
    weights = sum(param.numel() for param in layer.parameters())
    monkeypatch.setattr(fused_layers, "MOST_WEIGHTS", 8)
    with graphs.used():
        for tokens, found in ((4, 0), (weights // 8 // 32, 0), (weights // 8 // 32 + 1, 1)):
            graphs._step.clear()
            for _ in range(2):
                layer(torch.randn(1, tokens, 32, requires_grad=True)).sum().backward()
            assert len(graphs._step) == found


@on_the_cpu
def test_a_layer_that_is_called_alone_is_so_in_its_thread_only(fused):
    model, graphs, seen = own_layers(lambda layer: None), LayerGraphs(), list[Any]()
    layer, x = model.transformer.h[0], torch.randn(2, 6, 32, requires_grad=True)

    def look(*args: Any) -> None:
        with ThreadPoolExecutor(1) as other:
            seen.append((layer.gradient_checkpointing, other.submit(lambda: layer.gradient_checkpointing).result()))

    look.ignores_output = True
    layer.register_forward_pre_hook(look)
    with graphs.used():
        layer(x)
        layer(x)
    assert seen == [(True, True), (False, True)]
    layer.gradient_checkpointing = False
    assert layer.gradient_checkpointing is vars(layer)["gradient_checkpointing"] is False


@on_the_cpu
def test_own_layers_keep_their_input_and_weights_alone(fused, monkeypatch):
    model, graphs, kept, op = own_layers(lambda layer: None), LayerGraphs(), list[torch.Tensor](), own_layer

    def noted(*args: Any) -> torch.Tensor:
        with torch.autograd.graph.saved_tensors_hooks(lambda each: kept.append(each) or each, lambda each: each):
            return op(*args)

    monkeypatch.setattr(fused_layers, "own_layer", noted)
    layer, x = model.transformer.h[0], torch.randn(2, 6, 32, requires_grad=True)
    with graphs.used():
        layer(x)  # draws nothing
        y = layer(x)
    assert {id(each) for each in kept} == {id(each) for each in (x, *layer.parameters())}
    assert torch.equal(y, layer(x))


@on_the_cpu
@pytest.mark.parametrize("name", ["GPT2", "Llama"])
def test_streamed_layers_bring_their_inputs_back(name, fused, make_stack, monkeypatch):  # noqa: F811
    """Once each, by the store that a checkpoint's inputs wait in; weights by one reference a layer."""
    runs, sent, took, referred = [], list[int](), Boundary.__init__, list[str]()
    monkeypatch.setattr(Boundary, "__init__", lambda self, *args: sent.append(0) or took(self, *args))
    pack = WeightStreamer.pack

    def noted(self: WeightStreamer, tensor: torch.Tensor) -> Any:
        packed = pack(self, tensor)
        if packed is not None and re.search(r"\d", packed.group.name):
            referred.append(packed.group.name)
        return packed

    monkeypatch.setattr(WeightStreamer, "pack", noted)
    for placement, level0 in (("resident", 8 << 20), ("streamed", 192 << 10)):
        model = checkpointed(family(name) if name in FAMILIES else build(name))
        where = {"placement": placement, "activations": "host", "accelerate": True}
        model = enable_vgpu_stack_optimization(model, make_stack(level0), **where)
        optimizer, engine = VGPUAdamW(model.parameters(), lr=1e-2, update_in_backward=True), offload_of(model)
        if placement == "streamed":
            engine.step_control.graphs = LayerGraphs()
            engine.activations._smallest_bytes = 0
        for seed in range(4):
            sent.clear()
            referred.clear()
            loss = model(**batch(seed)).loss
            loss.backward()
            optimizer.step()
            optimizer.zero_grad()
            runs.append(loss.item())
        if placement == "streamed":
            (launched,) = engine.step_control.graphs._step.values()
            assert launched.layers == (7 if name == "GPT2" else 8)  # one has run to be known
            assert len(sent) == 2 and len(referred) == len(set(referred)) == 2
        release(model)
    assert runs[:4] == runs[4:]


@on_the_cpu
def test_layers_that_the_gpu_does_not_wait_for_say_so(fused, monkeypatch):
    monkeypatch.setattr(layer_graphs._Launched, "waits_for_host", False)
    graphs = graphed(accelerated("Llama"), **batch())
    assert graphs.about == "layers are launched kernel by kernel: the GPU does not wait for the host"


def test_a_gpu_waits_for_the_host_where_it_is_done_when_the_next_layer_comes(monkeypatch):
    class Event:
        done = True
        query = record = lambda self: self.done

    monkeypatch.setattr(torch.cuda, "Event", Event)
    for done, waits in ((True, True), (False, False)):
        launched, Event.done = layer_graphs._Launched(), done
        for _ in range(9):
            launched.end(launched.begin(), on_gpu=True)
        assert launched.layers == 9 and launched.waits_for_host == waits
    launched.idle = 4
    assert launched.waits_for_host and layer_graphs._Launched(layers=1, last=Event()).waits_for_host
