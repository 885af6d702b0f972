"""Attention layers and the choice of the backend that runs them."""
