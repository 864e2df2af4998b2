"""Benchmarks: each a command that prints its figures and whether its bars hold."""
