"""Execution of a request: its service terms, its path through the pipeline graph, and its response."""
