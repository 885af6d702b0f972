"""Numbers that are known otherwise: published parameter counts, state per parameter, sums that must add up."""

from __future__ import annotations

import pytest
import torch
from torch import nn

from vblackwell.errors import ConfigurationError
from vblackwell.planner.known_models import KNOWN_MODELS, NUM_PARAMETERS
from vblackwell.planner.memory_estimate import (
    OPTIMIZERS,
    Batches,
    Run,
    estimate_trace,
    fits,
    peak_of,
)
from vblackwell.planner.model_spec import of_config
from vblackwell.trace.allocator import replay
from vblackwell.trace.causal_lm import build_causal_lm, language_batch, language_loss
from vblackwell.trace.trace import CATEGORIES, Trace, trace_training
from vblackwell.units import GiB

PARTS = (*CATEGORIES, "fragmentation", "context")
SMALL = {
    "llama": {
        "vocab_size": 500,
        "hidden_size": 64,
        "intermediate_size": 128,
        "num_hidden_layers": 3,
        "num_attention_heads": 4,
    },
    "gpt2": {"vocab_size": 500, "n_embd": 64, "n_layer": 3, "n_head": 4, "n_positions": 64},
    "mixtral": {
        "vocab_size": 500,
        "hidden_size": 64,
        "intermediate_size": 128,
        "num_hidden_layers": 2,
        "num_attention_heads": 4,
        "num_key_value_heads": 2,
        "num_local_experts": 4,
        "num_experts_per_tok": 2,
    },
}


def trace_of(kind: str, batch: int = 2, optimizer: str = "adamw", autocast: torch.dtype | None = None) -> Trace:
    model = build_causal_lm({"model_type": kind} | SMALL[kind], kind)
    return trace_training(
        model, language_batch(500, batch, 32), language_loss, OPTIMIZERS[optimizer], autocast=autocast
    )


@pytest.mark.parametrize(
    ("name", "parameters"),
    [
        ("gpt2", 124_439_808),
        ("gpt2-medium", 354_823_168),
        ("gpt2-large", 774_030_080),
        ("gpt2-xl", 1_557_611_200),
        ("llama-7b", 6_738_415_616),
        ("llama-3-8b", 8_030_261_248),
        ("llama-3-70b", 70_553_706_496),
        ("qwen2.5-7b", 7_615_616_512),
        ("mixtral-8x7b", 46_702_792_704),
        ("tinyllama-1.1b", 1_100_048_384),
        ("mistral-7b", 7_241_732_096),
        ("llama-3.1-405b", 405_853_388_800),
        ("llama-3.2-1b", 1_235_814_400),
        ("llama-3.2-3b", 3_212_749_824),
        ("qwen2.5-1.5b", 1_543_714_304),
        ("qwen2.5-3b", 3_085_938_688),
        ("qwen2.5-14b", 14_770_033_664),
        ("qwen2.5-32b", 32_763_876_352),
        ("qwen2.5-72b", 72_706_203_648),
        ("qwen3-0.6b", 596_049_920),
        ("qwen3-1.7b", 1_720_574_976),
        ("qwen3-4b", 4_022_468_096),
        ("qwen3-8b", 8_190_735_360),
        ("qwen3-14b", 14_768_307_200),
        ("qwen3-32b", 32_762_123_264),
        ("qwen3-30b-a3b", 30_532_122_624),
        ("gemma-2-2b", 2_614_341_888),
        ("gemma-2-9b", 9_241_705_984),
        ("gemma-2-27b", 27_227_128_320),
        ("gemma-3-1b", 999_885_952),
        ("phi-2", 2_779_683_840),
        ("phi-3-mini", 3_821_079_552),
        ("phi-4", 14_659_507_200),
        ("gpt-oss-20b", 20_914_757_184),
        ("gpt-oss-120b", 116_829_156_672),
    ],
)
def test_published_parameter_counts(name, parameters):
    """Which the models are built with, by test_known_models.py."""
    assert NUM_PARAMETERS[name] == parameters


def test_llama_7b_has_107_8_gb_of_state():
    model = build_causal_lm(KNOWN_MODELS["llama-7b"], "llama-7b")
    trace = trace_training(model, language_batch(32000, 1, 128), language_loss, OPTIMIZERS["adamw-for-loop"])
    estimate = estimate_trace(trace)
    assert estimate.parameters == 6_738_415_616
    buffers = 2 * 64 * 4  # transformers keeps the rotary frequencies twice
    assert estimate.state_bytes == 16 * 6_738_415_616 + buffers
    assert round(estimate.state_bytes / 1e9, 1) == 107.8


@pytest.mark.each_value
@pytest.mark.parametrize("kind", SMALL)
@pytest.mark.parametrize("autocast", [None, torch.bfloat16])
def test_categories_add_up(kind, autocast):
    estimate = estimate_trace(trace_of(kind, autocast=autocast), (9, 0))
    values = estimate.as_dict()
    assert sum(values[name] for name in PARTS) == estimate.peak_p50 < estimate.peak_p99
    assert estimate.reserved >= estimate.allocated > 16 * estimate.parameters
    assert all(value >= 0 for value in values.values())


@pytest.mark.parametrize(
    ("optimizer", "bytes_each"), [("adamw-for-loop", 8), ("adamw", 8), ("sgd", 0), ("sgd-momentum", 4)]
)
def test_states_of_optimizers(optimizer, bytes_each):
    trace = trace_of("llama", optimizer=optimizer)
    assert trace.total("optimizer") == bytes_each * trace.num_parameters


def test_every_optimizer_traces():
    sizes = {name: estimate_trace(trace_of("gpt2", optimizer=name)).state_bytes for name in OPTIMIZERS}
    assert sizes["adafactor"] < sizes["sgd-momentum"] < sizes["adamw"]


@pytest.mark.parametrize("kind", ["llama", "gpt2"])
def test_any_batch_follows_from_two(kind):
    asked: list[int] = []
    family = Batches(lambda batch: asked.append(batch) or trace_of(kind, batch))
    for batch in (4, 7):
        expected, real = family.at(batch), trace_of(kind, batch)
        assert expected.events == real.events and expected.categories == real.categories
        for size, wanted, of in zip(expected.sizes, real.sizes, real.categories, strict=True):
            assert size == wanted or of == "workspace"  # those go with the kernels' configurations
    assert asked == [2, 3]


def test_the_largest_batch_is_the_boundary():
    family = Batches(lambda batch: trace_of("llama", batch))
    cap = 400 << 20
    batch = family.largest(lambda size, trace: replay(trace, cap).fits)
    assert batch > 4 and replay(family.at(batch), cap).fits and not replay(family.at(batch + 1), cap).fits
    assert family.largest(lambda size, trace: False) == 0
    assert family.largest(lambda size, trace: True, at_most=100) == 100


def test_a_size_that_stops_growing_does_not_mislead():
    """Expected from two and three sequences the size would go on growing: real traces have the last word."""

    def trace_at(batch: int) -> Trace:
        return Trace((1000 * min(batch, 5) + 10 * batch,), ("activations",), (0,), (), 1, 1)

    family = Batches(trace_at)
    assert family.at(9).sizes == (1010 * 9,) and trace_at(9).sizes == (5090,)
    assert family.largest(lambda size, trace: trace.sizes[0] <= 5500) == 50
    assert family.largest(lambda size, trace: trace.sizes[0] <= 5059) == 5


def test_fits_keeps_the_margin():
    trace = trace_of("llama")
    estimate = estimate_trace(trace)
    assert fits(trace, estimate.peak_p99, (8, 0)) and fits(trace, 8 * GiB, (8, 0))
    assert not fits(trace, estimate.allocated + estimate.context, (8, 0))


def test_an_optimizers_temporaries_can_be_left_out():
    foreach, loop = trace_of("llama", 1, "adamw"), trace_of("llama", 1, "adamw-for-loop")
    most = [peak_of(trace, ("workspace", "activations")) for trace in (foreach, loop)]
    step = [peak_of(trace, ("workspace", "activations"), outside="optimizer") for trace in (foreach, loop)]
    assert step[0] == step[1] <= most[1] <= most[0]


def test_bad_configurations_say_what_is_wrong():
    with pytest.raises(ConfigurationError, match="lacks the field 'model_type'"):
        build_causal_lm({}, "config.json")
    with pytest.raises(ConfigurationError, match="'lama' is unknown to transformers; did you mean 'llama'"):
        build_causal_lm({"model_type": "lama"}, "config.json")
    for missing in ("vocab_size", "hidden_size", "num_hidden_layers", "num_attention_heads"):
        fields = {"model_type": "llama"} | {k: v for k, v in SMALL["llama"].items() if k != missing}
        with pytest.raises(ConfigurationError, match=f"lacks the field '{missing}'"):
            build_causal_lm(fields, "config.json")
    with pytest.raises(ConfigurationError, match="'bogus' is unknown to transformers"):
        of_config({"model_type": "bogus", "vocab_size": 5}, "config.json", 8).build(torch.float32)
    for vocabulary in (0, "x", None, 1 << 40):
        with pytest.raises(ConfigurationError, match="vocab_size is .*: the field must be a number of at least 1"):
            of_config({"model_type": "llama", "vocab_size": vocabulary}, "config.json", 8)
    for value in (-64, 0, 1 << 40):
        with pytest.raises(ConfigurationError, match=f"hidden_size is {value}"):
            build_causal_lm({"model_type": "llama"} | SMALL["llama"] | {"hidden_size": value}, "config.json")
    with pytest.raises(ConfigurationError, match="does not describe a causal model"):
        build_causal_lm({"model_type": "llama"} | SMALL["llama"] | {"num_attention_heads": "four"}, "config.json")
    with pytest.raises(ConfigurationError, match="'adamv' is not known: .* did you mean 'adamw'"):
        Run(of_config(KNOWN_MODELS["gpt2"], "gpt2", 8), 8, "adamv")


def test_a_plain_module_needs_no_transformers():
    trace = trace_training(
        nn.Linear(256, 256), lambda: torch.zeros(8, 256, device="cuda"), lambda m, b: m(b).sum(), OPTIMIZERS["sgd"]
    )
    assert estimate_trace(trace).weights == 4 * (256 * 256 + 256)
