"""Bytes on their way: weights up, gradients down, activations, and the updates in between. Never calls up."""
