"""The keyed stack on top of the pool: entries, policies, and the plans of moves between levels."""
