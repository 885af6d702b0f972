"""Benchmarks: one ``bench_<claim>.py`` for each claim, what they share in ``lib/``, sweeps of plans in ``tune/``."""
