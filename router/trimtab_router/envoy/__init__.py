"""Envoy as the door of a router: its configuration, its keys, and what the router tells it while it runs."""
