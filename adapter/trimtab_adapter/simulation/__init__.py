"""Discrete-event simulation that drives the router's own schedulers and graph executor."""
