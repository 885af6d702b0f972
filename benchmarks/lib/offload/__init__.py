"""The systems, cases and tables of bench_offload.py."""
