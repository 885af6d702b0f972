"""Sweeps over plans of the FP4 kernels, from which the rules of `vblackwell.kernels.fp4` come."""
