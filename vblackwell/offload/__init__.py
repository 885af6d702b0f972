"""Executes a placement on any `nn.Module`: weights stream in, gradients leave, updates run where the states live."""
