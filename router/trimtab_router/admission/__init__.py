"""Admission of requests: validation, memory, and the number of concurrent requests."""
