"""Layers, peers, times and tables of the benchmarks of kernels."""
