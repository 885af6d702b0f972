"""Sweeps over plans of kernels, from which the rules of `vblackwell.kernels` come."""
