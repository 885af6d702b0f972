"""What bench_plan.py draws, watches and prints."""
