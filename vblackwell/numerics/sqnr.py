"""Signal to quantisation noise, in decibels: ``10 log10(sum x^2 / sum (x - y)^2)``."""

import math

import torch
from torch import Tensor

from vblackwell.errors import ConfigurationError

_CHUNK = 1 << 20


def noise_and_signal(x: Tensor, y: Tensor) -> tuple[float, float]:
    """(sum (x - y)^2, sum x^2) in fp64, to be added up over tensors; ConfigurationError where shapes differ."""
    if x.shape != y.shape:
        raise ConfigurationError(f"cannot compare shapes {tuple(x.shape)} and {tuple(y.shape)}")
    noise = signal = 0.0
    for a, b in zip(x.detach().reshape(-1).split(_CHUNK), y.detach().reshape(-1).split(_CHUNK), strict=True):
        a64, b64 = a.to(torch.float64), b.to(device=a.device, dtype=torch.float64)
        noise += float((a64 - b64).square_().sum())
        signal += float(a64.square_().sum())
    return noise, signal


def decibels(noise: float, signal: float) -> float:
    """10 log10(signal / noise); inf for no noise, also where there is no signal."""
    if noise == 0:
        return math.inf
    return 10 * math.log10(signal / noise) if signal > 0 else -math.inf
