"""The cases, processes and tables of bench_generate.py and bench_lora.py."""
