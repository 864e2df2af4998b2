"""Profiler: measures the latency of every variant on real replicas, fits latency laws and sizes replicas."""
