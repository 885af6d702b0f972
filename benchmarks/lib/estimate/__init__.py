"""The cases, processes and tables of bench_estimate.py."""
