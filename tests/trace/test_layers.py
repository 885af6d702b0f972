"""A model of many equal layers, from traces of few: the same trace, to the event, as of all of them."""

from __future__ import annotations

from bisect import bisect
from collections.abc import Callable
from dataclasses import replace
from functools import partial
from itertools import groupby
from typing import Any

import pytest
import torch
from torch import nn

from vblackwell.nn.convert import fused_layers
from vblackwell.nn.convert.causal_lm import accelerate_causal_lm
from vblackwell.nn.convert.linears import store_linears
from vblackwell.nn.convert.lora import Lora, add_adapters
from vblackwell.nn.decoder.config import DecoderConfig
from vblackwell.planner.memory_estimate import Run
from vblackwell.planner.model_spec import ModelSpec, of_config, of_decoder
from vblackwell.trace import layers as layers_of_few
from vblackwell.trace import recorder
from vblackwell.trace import trace as tracing
from vblackwell.trace.causal_lm import build_causal_lm, language_batch
from vblackwell.trace.layers import (
    FEW,
    FEW_RECOMPUTED,
    Layers,
    Recording,
    change_alike,
    copy_on_meta,
    equal_layers,
    lengthened,
)
from vblackwell.trace.trace import Trace, trace_forward

LAYERS = sum(FEW_RECOMPUTED) + 1  # the fewest that are not all traced
LLAMA: dict[str, Any] = {
    "model_type": "llama", "vocab_size": 500, "hidden_size": 64, "intermediate_size": 128, "num_hidden_layers": LAYERS,
    "num_attention_heads": 4, "num_key_value_heads": 2, "tie_word_embeddings": False,
}  # fmt: skip
WIDER = {**LLAMA, "hidden_size": 128, "intermediate_size": 256}
QWEN = {**LLAMA, "model_type": "qwen2"}
MIXTRAL = {**LLAMA, "model_type": "mixtral", "num_local_experts": 4, "num_experts_per_tok": 2}
GEMMA2 = {**LLAMA, "model_type": "gemma2", "head_dim": 16, "sliding_window": 16}
GEMMA2 |= {"num_hidden_layers": 2 * LAYERS}  # two kinds by turns
GPT2 = {"model_type": "gpt2", "vocab_size": 500, "n_embd": 64, "n_layer": LAYERS, "n_head": 4, "n_positions": 64}
GPT2 |= {"bos_token_id": 1, "eos_token_id": 2}
DECODER = of_decoder("decoder", DecoderConfig(500, 64, 128, LAYERS, 4, max_position=64))


def spec_of(fields: dict[str, Any], change: Callable[[nn.Module], object] | None = None) -> ModelSpec:
    spec = of_config(fields, "a model", 64)

    def build(dtype: torch.dtype) -> nn.Module:
        model = spec.build(dtype)
        if change is not None:
            change(model)
        return model.to(dtype).train()

    return replace(spec, build=build)


def in_order(trace: Trace) -> Trace:
    """What is released at once by number: two runs of an interpreter may do it in another order."""
    starts = [start for start, _, _ in trace.marks]
    numbered = groupby(enumerate(trace.events), lambda each: (each[1] < 0, bisect(starts, each[0])))
    runs = [(gone, [event for _, event in run]) for (gone, _), run in numbered]
    return replace(trace, events=tuple(event for gone, run in runs for event in (sorted(run) if gone else run)))


def both(monkeypatch: pytest.MonkeyPatch, trace: Callable[[], Any]) -> tuple[Any, Any, list[bool]]:
    """The trace, that of all layers, and whether each attempt to lengthen one of few succeeded."""
    tried: list[bool] = []

    def spy(*args: Any) -> Recording | None:
        found = lengthened(*args)
        tried.append(found is not None)
        return found

    with monkeypatch.context() as patch:
        patch.setattr(tracing, "lengthened", spy)
        found = trace()
    with monkeypatch.context() as patch:
        patch.setattr(tracing, "equal_layers", lambda model: None)
        return found, trace(), tried


def packed_with_adapters(model: nn.Module) -> None:
    """As ``vb train --lora --use-fp4`` makes it."""
    add_adapters(model, Lora(4))
    store_linears(model, "all", None, "nvfp4", tiled=False)
    accelerate_causal_lm(model)


slow = partial(pytest.param, marks=pytest.mark.slow)  # whose parts are in the others, too


@pytest.mark.parametrize(
    ("spec", "options"),
    [
        (spec_of(LLAMA), {}),
        slow(spec_of(LLAMA), {"optimizer": "sgd-momentum"}),
        slow(spec_of(LLAMA), {"optimizer": "adamw-fused", "precision": "bf16"}),
        slow(spec_of(QWEN), {"optimizer": "adafactor", "precision": "autocast"}),
        (spec_of(QWEN), {"precision": "autocast", "checkpointing": True, "steps": 1}),
        (spec_of(GPT2), {"optimizer": "adafactor"}),
        slow(spec_of(MIXTRAL), {"checkpointing": True}),
        (spec_of(MIXTRAL, accelerate_causal_lm), {"precision": "bf16"}),
        slow(spec_of(LLAMA, accelerate_causal_lm), {"precision": "bf16", "checkpointing": True}),
        slow(spec_of(LLAMA, lambda model: add_adapters(model, Lora(4))), {"checkpointing": True}),
        (spec_of({**WIDER, "num_hidden_layers": sum(FEW) + 1}, packed_with_adapters), {"steps": 1}),
        slow(spec_of(WIDER, packed_with_adapters), {"checkpointing": True}),
        (spec_of({**GEMMA2, "num_hidden_layers": 2 * (sum(FEW) + 1)}), {"optimizer": "adafactor", "steps": 1}),
        slow(spec_of(GEMMA2, accelerate_causal_lm), {"precision": "bf16", "checkpointing": True}),
        (DECODER, {"optimizer": "adamw-for-loop"}),
        slow(DECODER, {"precision": "bf16", "checkpointing": True}),
    ],
)
def test_the_same_trace(monkeypatch, spec, options):
    steps = options.get("steps", 2)
    run = Run(spec, 64, **{name: value for name, value in options.items() if name != "steps"})
    found, whole, tried = both(monkeypatch, partial(run.trace, 2, steps=steps))
    assert in_order(found) == in_order(whole) and tried == [True]


def test_a_layer_is_one_operation_where_a_run_makes_it_one(monkeypatch):
    """Though a trace watches every call of a module."""
    calls, op = list[int](), fused_layers.layer_block
    monkeypatch.setattr(fused_layers, "layer_block", lambda *given: calls.append(0) or op(*given))
    monkeypatch.setattr(tracing, "equal_layers", lambda model: None)
    run = Run(spec_of(LLAMA, accelerate_causal_lm), 64, precision="bf16", checkpointing=True)
    run.trace(2, steps=1)
    assert len(calls) == run.model.config.num_hidden_layers


def test_the_same_forward(monkeypatch):
    model = build_causal_lm(MIXTRAL, "a model", torch.bfloat16).eval()
    given = language_batch(500, 1, 1), lambda m, batch: m(input_ids=batch["input_ids"]).logits, (8, 0)
    found, whole, tried = both(monkeypatch, lambda: trace_forward(model, *given))
    assert found == whole and tried == [True]


def test_the_model_is_left_as_it_is():
    run = Run(spec_of(LLAMA), 64)
    before = [name for name, _ in run.model.named_modules()]
    trace = run.trace(1, steps=1)
    assert [name for name, _ in run.model.named_modules()] == before
    assert trace.num_parameters == sum(each.numel() for each in run.model.parameters())


def first_shared(model: Any) -> None:
    model.model.layers[3].mlp = model.model.layers[0].mlp


def first_knows_the_head(model: Any) -> None:
    model.model.layers[0].mlp.shared = model.lm_head.weight


def one_scale(model: Any) -> None:
    model.model.layers[3].self_attn.scaling = 0.5


def one_hook(model: Any) -> None:
    model.model.layers[3].register_forward_hook(lambda module, args, out: None)


@pytest.mark.parametrize(
    "spec",
    [
        spec_of({**QWEN, "use_sliding_window": True, "sliding_window": 16, "max_window_layers": 4}),
        spec_of({**GEMMA2, "num_hidden_layers": 2 * LAYERS - 1}),
        spec_of({**GEMMA2, "num_hidden_layers": 2 * sum(FEW)}),
        spec_of({**MIXTRAL, "model_type": "qwen3_moe", "num_experts": 4, "mlp_only_layers": [3]}),
        spec_of({**LLAMA, "num_hidden_layers": sum(FEW)}),
        spec_of({**MIXTRAL, "output_router_logits": True}),
        spec_of({**LLAMA, "output_hidden_states": True}),
        spec_of(LLAMA, first_shared),
        spec_of(LLAMA, first_knows_the_head),
        spec_of(LLAMA, one_scale),
        spec_of(LLAMA, one_hook),
    ],
)
def test_layers_that_differ_are_traced_whole(spec):
    assert equal_layers(spec.build(torch.float32)) is None


def test_answers_are_of_one_default_type():
    """Numbers that a forward makes are of it, and so are sizes."""
    spec = spec_of({**LLAMA, "num_hidden_layers": 1})
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(tracing, "equal_layers", lambda model: None)
        wide = Run(spec, 64, precision="bf16").trace(2)
        torch.set_default_dtype(torch.bfloat16)
        try:
            after = Run(spec, 64, precision="bf16").trace(2)
            recorder._answers.cache_clear()
            assert Run(spec, 64, precision="bf16").trace(2) == after
        finally:
            torch.set_default_dtype(torch.float32)
    assert Run(spec, 64, precision="bf16").trace(2) == wide


@pytest.mark.parametrize("fields", [GEMMA2, {**MIXTRAL, "hidden_size": 128, "intermediate_size": 256}])
def test_what_is_done_to_the_first_layers_is_done_to_all(fields):
    """As if each had been changed by itself; and so a trace of it is the same."""
    model = build_causal_lm(fields, "a model", torch.bfloat16).requires_grad_(False)
    each, seen = copy_on_meta(model), list[int]()
    change_alike(model, lambda few: (seen.append(len(few.model.layers)), packed_with_adapters(few)))
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(layers_of_few, "equal_layers", lambda model: None)
        change_alike(each, packed_with_adapters)
    assert seen == [2 if fields is GEMMA2 else 1]

    def said(of: nn.Module) -> list[Any]:
        tensors = [*of.named_parameters(), *of.named_buffers()]
        forms = [(name, each.shape, each.stride(), each.dtype, each.requires_grad) for name, each in tensors]
        return [*forms, *((name, type(module), module.training) for name, module in of.named_modules())]

    assert said(model) == said(each)
    assert len({id(x) for x in model.parameters()}) == len(list(each.parameters()))
    numbers = [[m.layer_idx for m in made.modules() if hasattr(m, "layer_idx")] for made in (model, each)]
    assert numbers[0] == numbers[1]
    assert equal_layers(model) is not None and layers_of_few._same(model.model.layers[-1], each.model.layers[-1])


def test_a_copy_shares_no_parameter_and_no_module():
    model = build_causal_lm(LLAMA, "a model")
    made = copy_on_meta(model)
    assert layers_of_few._same(model.model.layers, made.model.layers) and made.config is model.config
    assert not {id(x) for x in model.modules()} & {id(x) for x in made.modules()}
    assert not {x.untyped_storage()._cdata for x in model.parameters()} & {
        x.untyped_storage()._cdata for x in made.parameters()
    }
    tied = build_causal_lm({**LLAMA, "tie_word_embeddings": True}, "a model")
    made = copy_on_meta(tied)
    assert made.lm_head.weight is made.model.embed_tokens.weight is not tied.lm_head.weight


def test_a_method_and_a_list_of_a_layer_are_its_copy_s_own():
    model = build_causal_lm(LLAMA, "a model")
    layer: Any = model.model.layers[0]
    layer.own, layer.ours = layer.mlp.forward, [1, 2]
    layer.mlp.ours = layer.ours
    made: Any = copy_on_meta(model).model.layers[0]
    assert made.own.__self__ is made.mlp and made.own.__func__ is layer.own.__func__
    assert made.ours is made.mlp.ours is not layer.ours and made.ours == [1, 2]


def test_a_model_needs_no_configuration():
    model = build_causal_lm(LLAMA, "a model")
    del model.config
    assert equal_layers(model) == Layers(model.model.layers, 1)


def test_strangers_models_are_traced_whole():
    """Their code may do anything by a layer's number."""

    class Stranger(type(build_causal_lm(LLAMA, "a model"))):
        pass

    model = build_causal_lm(LLAMA, "a model")
    assert equal_layers(model) is not None
    model.__class__ = Stranger
    assert equal_layers(model) is None


def test_what_another_layer_does_otherwise_is_not_repeated(monkeypatch):
    """Noticed where traces of few are compared; then all are traced."""
    given: list[Any] = []
    monkeypatch.setattr(tracing, "lengthened", lambda *args: given.extend(args))
    whole = Run(spec_of(LLAMA), 64).trace(2)
    few, one_more, more = given
    assert more == LAYERS - FEW[0]
    found = lengthened(few, one_more, more)
    assert found is not None and tuple(found.events) == whole.events
    sizes = [size + 512 * (number == 100) for number, size in enumerate(one_more.sizes)]
    at = next(at for at, event in enumerate(one_more.events) if at > 100 and event < 0 <= one_more.events[at - 1])
    events = [*one_more.events[: at - 1], *reversed(one_more.events[at - 1 : at + 1]), *one_more.events[at + 1 :]]
    work = [*one_more.work[:-1], replace(one_more.work[-1], num_bytes=1)]
    for changed in ({"sizes": sizes}, {"events": events}, {"work": work}):
        assert lengthened(few, replace(one_more, **changed), more) is None
    releases = [at for at, event in enumerate(one_more.events) if at > 100 and max(event, one_more.events[at - 1]) < 0]
    starts = [start for start, _, _ in one_more.marks]
    within, across = (next(at for at in releases if (at in starts) is ends) for ends in (False, True))
    for at, is_same in ((within, True), (across, False)):  # what is released at once may be in any order
        events = [*one_more.events[: at - 1], *reversed(one_more.events[at - 1 : at + 1]), *one_more.events[at + 1 :]]
        assert (lengthened(few, replace(one_more, events=events), more) is not None) is is_same
    monkeypatch.setattr(layers_of_few, "MIDDLE", 2)  # the last of three: the head's events are its own, too
    assert lengthened(few, one_more, more) is None
