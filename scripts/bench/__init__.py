"""Benchmarks of single operations: rows (what is timed), timing, peers and the report. `scripts/bench_kernels.py` runs
them."""
