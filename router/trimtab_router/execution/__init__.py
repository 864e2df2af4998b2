"""Execution of a request: its options, its path through the pipeline graph, and its response."""
