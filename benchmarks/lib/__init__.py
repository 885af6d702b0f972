"""What benchmarks share: processes, times, reports, and the cases of each claim."""
