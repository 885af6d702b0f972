"""A training step on tensors without bytes: what it allocates, when, and what its operators cost."""
