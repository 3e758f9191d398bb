"""Benchmarks of single operators on a GPU: microseconds, bytes, GB/s, share of the measured read ceiling."""
