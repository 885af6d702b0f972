"""The package's own decoder: its configuration, blocks, caches, checkpointing and loss."""
