"""Payload sources: content of requests and scores of responses."""
