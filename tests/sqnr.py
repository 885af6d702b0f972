"""Decibels by which a tensor stands above its difference to another; the package adds them up over tensors instead."""

from torch import Tensor

from vblackwell.numerics.sqnr import decibels, noise_and_signal


def sqnr(x: Tensor, y: Tensor) -> float:
    return decibels(*noise_and_signal(x, y))
