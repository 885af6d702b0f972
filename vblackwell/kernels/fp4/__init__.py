"""Products with packed weights: FP4, FP4 on FP8 tensor cores, and weights in two parts."""
