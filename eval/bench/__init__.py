"""Benchmarks: `vmonarch bench`."""
