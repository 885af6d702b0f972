"""Number formats as mathematics: pure torch, the oracle that kernels are held to."""
