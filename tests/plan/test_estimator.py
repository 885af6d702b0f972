"""The estimator by its public names."""

from __future__ import annotations

import pytest

import vblackwell as vb
from vblackwell.estimator import Run as TrainingRun
from vblackwell.estimator import minimum_gpu_bytes, streams_on
from vblackwell.subject import of_decoder

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
    assert run.fits(run.trace(batch), gpu_mb << 20) and not run.fits(run.trace(batch + 1), gpu_mb << 20)
    assert estimator.recommend_batch_size(config, gpu_memory_mb=100) == 0


def test_below_the_minimum_nothing_streams():
    run = TrainingRun(of_decoder("decoder", vb.ModelConfig(**SHAPE).decoder()), 64)
    least, why = minimum_gpu_bytes(run)
    # The context that is assumed of capability 8.0, and little else.
    assert 620 << 20 < least < 650 << 20 and "CUDA context" in why
    assert streams_on(run, least) and not streams_on(run, 620 << 20)


def test_refusals():
    with pytest.raises(vb.ConfigurationError, match="did you mean 'gpt2-medium'"):
        vb.quick_estimate("gpt2-mediun")
    with pytest.raises(vb.ConfigurationError, match="hidden_size is -1"):
        vb.ModelConfig(hidden_size=-1)
    with pytest.raises(vb.ConfigurationError, match="gpu_memory_mb is -5"):
        vb.VGPUResourceEstimator().recommend_batch_size(vb.ModelConfig(**SHAPE), gpu_memory_mb=-5)
