"""Kernels: tensors in, tensors out. ``runtime/registry.py`` says which backend runs, and why not the others."""
