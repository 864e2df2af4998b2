"""Payload sources: the content of requests, and the scoring of answers."""
