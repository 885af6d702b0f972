"""Using a trained model: finding it, opening it, and letting it write."""
