"""AdamW with the same bits on the CPU and the GPU."""
