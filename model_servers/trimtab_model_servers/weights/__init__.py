"""Weights: sources, cache and loading."""
