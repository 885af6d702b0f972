"""The step of a real model, forecast from its own placement."""

from dataclasses import replace

import pytest
import torch

from vblackwell.machine.rates import Rates
from vblackwell.nn.decoder.config import DecoderConfig
from vblackwell.nn.decoder.decoder import Decoder
from vblackwell.offload.layout.forecast import forecast_step
from vblackwell.offload.layout.groups import find_groups
from vblackwell.offload.layout.lanes import LaneTimes, simulate
from vblackwell.offload.layout.placement import StreamingOptions, share_of_all
from vblackwell.units import GiB, MiB

MEASURED = Rates(779e12, 50e12, 4.27e12, 55e9, 55e9, 49.6e9, 49.6e9, 1.9e9)


def test_a_streamed_step_of_a_decoder_on_meta():
    model = Decoder(DecoderConfig(1000, 256, 704, 8, 4, max_position=64), device="meta", dtype=torch.bfloat16)
    seconds = {"forward": 0.010, "loss": 0.001, "backward": 0.030, "loss_backward": 0.002}
    parameters = sum(p.numel() for p in model.parameters())

    def times_of(rates: Rates, update: str | float = "device", input_bytes: int = 0) -> LaneTimes:
        options = StreamingOptions(update=update, weight_bytes=8 * MiB)
        found = forecast_step(model, [64 * MiB, GiB], options, seconds, input_bytes=input_bytes)
        return simulate(found.lanes, rates)

    times = times_of(MEASURED)
    # States of all, weights for two passes but for what stays, gradients of late ones: as test_lanes has by hand.
    assert 10 * parameters < times.up_bytes < 14.5 * parameters
    assert sum(seconds.values()) < times.step_seconds < 1.5 * sum(seconds.values())
    slow = replace(MEASURED, up=1e9, up_both=1e9)
    bound = times_of(slow)
    assert max(bound.busy, key=bound.busy.__getitem__) == "up" and bound.step_seconds > times.step_seconds
    options = StreamingOptions(weight_bytes=8 * MiB)
    shared = times_of(slow, share_of_all(find_groups(model)[0], options, lambda: (slow.up_both, slow.cpu_adamw)))
    assert shared.busy["cpu"] > 0 and shared.step_seconds < bound.step_seconds
    inputs = times_of(MEASURED, input_bytes=MiB)
    assert inputs.up_bytes == pytest.approx(times.up_bytes + 8 * MiB, rel=0.01)
