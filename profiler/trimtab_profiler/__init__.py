"""How fast is it: measures each variant of each stage on real replicas, fits the latency law, sizes replicas."""
