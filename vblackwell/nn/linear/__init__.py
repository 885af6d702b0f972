"""Linear layers: in FP4, in two parts, several of one input as one product, around adapters."""
