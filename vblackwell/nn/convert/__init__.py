"""Models of other people on this package's operators: what is replaced, and back again."""
