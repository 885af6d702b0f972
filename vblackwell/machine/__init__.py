"""The machine: its memory, disks and GPUs, the rates measured on it, and files kept on it. Knows nothing of models."""
