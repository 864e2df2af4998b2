"""Takes batches to the model servers and brings back how each ended: HTTP, connections, health."""
