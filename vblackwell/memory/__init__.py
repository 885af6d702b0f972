"""Levels and the stack: where bytes live and how they move. Knows no models."""
