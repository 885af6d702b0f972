"""Kernels: tensors in, tensors out. One op a file; ``dispatch.py`` says which backend runs and why the others do not."""
