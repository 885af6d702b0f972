"""What a user puts in a model."""
