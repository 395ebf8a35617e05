"""Benchmarks: each checks its results first, then times, and prints one line a case. `make bench` runs them all."""
