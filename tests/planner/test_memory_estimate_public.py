"""The estimator by its public names."""

from __future__ import annotations

import functools
from dataclasses import replace

import pytest
import torch

import vblackwell as vb
from vblackwell.machine.gpus import RUNTIME_BYTES, context_bytes, find_gpu
from vblackwell.machine.limits import DISK_THREAD_BYTES
from vblackwell.machine.rates import assumed_rates
from vblackwell.memory.cache.config import parse_levels
from vblackwell.planner.forecast import Forecast, Machine, estimate_offload, minimum_gpu_bytes
from vblackwell.planner.memory_estimate import P99_BYTES, P99_PERCENT, fits
from vblackwell.planner.memory_estimate import Run as TrainingRun
from vblackwell.planner.model_spec import find_model, of_decoder
from vblackwell.planner.placement import Bounds, Choice, Lacking
from vblackwell.units import GiB, MiB

SHAPE = {"vocab_size": 1000, "hidden_size": 64, "num_layers": 3, "num_heads": 4, "seq_length": 64}


def test_shape_in_bytes_out():
    config = vb.ModelConfig(**SHAPE, batch_size=4)
    estimate = vb.VGPUResourceEstimator().estimate_transformer(config)
    assert isinstance(estimate, vb.MemoryEstimate)
    assert estimate.state_bytes == 16 * estimate.parameters
    wider = vb.VGPUResourceEstimator().estimate_transformer(vb.ModelConfig(**SHAPE, batch_size=8))
    assert wider.activations > estimate.activations and wider.parameters == estimate.parameters


def test_the_recommended_batch_fits_and_the_next_does_not():
    estimator, config = vb.VGPUResourceEstimator(), vb.ModelConfig(**SHAPE)
    gpu_mb = 900
    batch = estimator.recommend_batch_size(config, gpu_memory_mb=gpu_mb)
    assert batch > 1
    run = TrainingRun(of_decoder("decoder", config.decoder()), config.seq_length)
    assert fits(run.trace(batch), gpu_mb << 20, (8, 0)) and not fits(run.trace(batch + 1), gpu_mb << 20, (8, 0))
    assert estimator.recommend_batch_size(config, gpu_memory_mb=100) == 0


def test_below_the_minimum_nothing_streams():
    run = TrainingRun(of_decoder("decoder", vb.ModelConfig(**SHAPE).decoder()), 64)
    least, why = minimum_gpu_bytes(run) or (0, "")
    # The context that is assumed of capability 8.0, what the runtime adds to it, and P99's margin: 620, 70 and 64 MiB.
    assert 754 << 20 < least < 760 << 20 and "CUDA context" in why
    assert minimum_gpu_bytes(run, least) is None and minimum_gpu_bytes(run, 754 << 20) is not None
    assert estimate_offload(run, run.trace(1), 1, 754 << 20, 1 << 40, 0).refused  # the two agree


def test_what_an_estimate_says_fits_is_what_a_run_accepts():
    """TinyLlama with a disk: a run's forecast and `vb estimate` answer alike, where states pass through RAM, too."""
    spec = find_model("tinyllama-1.1b", {}, 16)
    run = TrainingRun(spec, 16, precision="bf16", checkpointing=True, capability=(8, 6), expandable=True)
    trace, disk = run.trace(1), 64 * GiB
    traces = {}  # the run's, without an optimizer
    for gpu_gib, host_gib, words in ((1, 3, "level 0 (GPU) has"), (1.25, 3, "states on a disk pass"), (1.25, 8, None)):
        gpu, host = int(gpu_gib * GiB), int(host_gib * GiB)
        estimate = estimate_offload(run, trace, 1, gpu, host, disk)
        bounds = Bounds(gpu - context_bytes(run.capability) - RUNTIME_BYTES, host - DISK_THREAD_BYTES, disk)
        machine = Machine(bounds, assumed_rates(find_gpu("H200")))
        found = Forecast(run, machine, traces=traces).predict(Choice("streamed", 1, 1, True))
        if words is not None:
            assert isinstance(found, Lacking) and words in str(found) and words in str(estimate.refused)
            continue
        assert isinstance(found, tuple) and estimate.refused is None
        assert estimate.disk == found[1].disk > 0 and estimate.host <= found[1].host + found[1].threads
        assert estimate.level0 + estimate.step <= found[1].gpu <= bounds.gpu


def test_refusals():
    with pytest.raises(vb.ConfigurationError, match="the nearest: gpt2-medium, "):
        vb.quick_estimate("gpt2-mediun")
    with pytest.raises(vb.ConfigurationError, match="hidden_size is -1"):
        vb.ModelConfig(hidden_size=-1)
    with pytest.raises(vb.ConfigurationError, match="gpu_memory_mb is -5"):
        vb.VGPUResourceEstimator().recommend_batch_size(vb.ModelConfig(**SHAPE), gpu_memory_mb=-5)


@functools.cache
def small_run() -> tuple[vb.MemoryEstimate, vb.VGPUResourceEstimator]:
    estimator = vb.VGPUResourceEstimator()
    return estimator.estimate_transformer(vb.ModelConfig(**SHAPE, batch_size=1)), estimator


def test_levels_for_a_stack():
    estimate, estimator = small_run()
    step = estimate.activations + estimate.logits_and_loss + estimate.workspace

    def gpu_with(free_mb: float) -> float:
        """MiB of a GPU that has so much in addition to context, step and P99's margin."""
        return (estimate.context + P99_BYTES + (step + free_mb * MiB) * (1 + P99_PERCENT / 100)) / MiB + 0.01

    whole = estimator.generate_vgpu_config(estimate, gpus=[8 * 1024])
    assert [level["device"] for level in whole["levels"]] == ["cuda:0"]
    assert whole["levels"][0]["capacity_mb"] * MiB == pytest.approx(estimate.state_bytes, abs=1)
    # A little more than the step: less than all states, and with a share of the weights.
    part = estimator.generate_vgpu_config(estimate, gpus=[gpu_with(1.5)], target_hit_rate=0.5, host_memory_mb=2)
    assert [level["device"] for level in part["levels"]] == ["cuda:0", "cpu", "ssd"]
    assert part["levels"][0]["capacity_mb"] * MiB >= 0.5 * estimate.weights and part["levels"][1]["capacity_mb"] == 2
    assert sum(level["capacity_mb"] for level in part["levels"]) * MiB >= estimate.state_bytes
    more = estimator.generate_vgpu_config(estimate, gpus=[gpu_with(2), 8 * 1024])
    assert [level["device"] for level in more["levels"]] == ["cuda:0", "cuda:1"]


def test_a_stack_takes_the_levels(tmp_path):
    estimate, estimator = small_run()
    config = estimator.generate_vgpu_config(estimate, gpus=[8 * 1024])
    assert parse_levels(config)
    here = {"levels": [level | {"device": "arena"} for level in config["levels"]]}
    with vb.VGPUStack(here) as stack:
        stack.register("weight", torch.ones(1000))
        assert torch.equal(stack.access("weight"), torch.ones(1000))


@pytest.mark.parametrize(
    ("more", "words"),
    [
        ({"gpus": []}, "gpus is empty"),
        ({"gpus": [-1]}, "-1 MiB"),
        ({"gpus": [8192], "target_hit_rate": 0}, "target_hit_rate is 0"),
        ({"gpus": [8192], "target_hit_rate": 1.5}, "target_hit_rate is 1.5"),
        ({"gpus": [8192], "host_memory_mb": 0}, "0 MiB"),
    ],
)
def test_levels_that_cannot_be(more, words):
    estimate, estimator = small_run()
    with pytest.raises(vb.ConfigurationError, match=words):
        estimator.generate_vgpu_config(estimate, **more)
    with pytest.raises(vb.InsufficientMemory, match="no room for a level next to the CUDA context"):
        estimator.generate_vgpu_config(estimate, gpus=[600])


def test_a_known_model_by_name():
    estimate = vb.quick_estimate("gpt2", batch_size=1, seq_length=64, optimizer="sgd-momentum")
    assert estimate.parameters == 124_439_808
    assert 0 <= estimate.state_bytes - 12 * estimate.parameters < MiB  # weights, gradients, momentum; a few buffers
    with pytest.raises(vb.ConfigurationError, match="batch size 0"):
        vb.quick_estimate("gpt2", batch_size=0)


def test_what_a_stack_s_segments_hold_beyond_its_bytes():
    """Expandable ones, which the stack asks for, whatever the run without one would have."""
    config = vb.ModelConfig(
        vocab_size=512,
        hidden_size=768,
        num_layers=4,
        num_heads=12,
        seq_length=256,
        batch_size=4,
        intermediate_size=2100,
    )
    run = TrainingRun(of_decoder("decoder", config.decoder()), 256, precision="bf16", capability=(9, 0))
    trace = run.trace(4)
    default = estimate_offload(run, trace, 4, 2 << 30, 1 << 40, 0)
    expandable = estimate_offload(replace(run, expandable=True), trace, 4, 2 << 30, 1 << 40, 0)
    assert replace(default, forecast=None) == replace(expandable, forecast=None)
    assert 0 <= default.fragmentation < 22 * MiB  # the last page of each pool, of 20 MiB and of 2


def test_a_disk_level_s_threads_take_ram_in_addition_to_the_levels():
    config = vb.ModelConfig(vocab_size=512, hidden_size=512, num_layers=4, num_heads=8, seq_length=32)
    run = TrainingRun(of_decoder("decoder", config.decoder()), 32)
    trace = run.trace(1)
    without = estimate_offload(run, trace, 1, 2 << 30, 1 << 40, 0)
    full = without.host - 16 * MiB  # not all of it goes into RAM
    spilled = estimate_offload(run, trace, 1, 2 << 30, full + DISK_THREAD_BYTES, 1 << 30)
    placed = spilled.disk + spilled.host - DISK_THREAD_BYTES
    assert spilled.disk > 0 and without.host <= placed < without.host + 48 * MiB  # and what is staged
    unused = estimate_offload(run, trace, 1, 2 << 30, 1 << 40, 1 << 30)
    assert unused.disk == 0 and unused.host == without.host
