"""Benchmarks of a chat replica: cancellation, images encoded once, embedding transfer."""
