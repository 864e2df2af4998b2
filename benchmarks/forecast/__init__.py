"""Benchmark of all forecasters on the same windows."""
