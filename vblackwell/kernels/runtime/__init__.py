"""What all kernels share: compilation, launches, the choice of a backend, and the times that were measured."""
