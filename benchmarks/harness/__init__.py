"""Harness of the benchmarks: cells of a grid become rows, rows become one page and one line of JSON."""
