"""Training from the command line: settings, the loop, checkpoints that survive anything, and an honest report."""
