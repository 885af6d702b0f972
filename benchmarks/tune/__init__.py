"""Sweeps over plans of the FP4 kernels, from which the rules of its mma_plan.py and wgmma_plan.py come."""
