"""Attention kernels and their plans."""
