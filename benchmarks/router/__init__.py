"""The router against the same models in plain MLServers chained by the client."""
