"""Envoy as the proxy of a router: its configuration, its API keys, and its control at run time."""
