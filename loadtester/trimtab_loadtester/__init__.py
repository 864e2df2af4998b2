"""Push it: arrivals × payloads → results, open loop, with every request accounted for."""
