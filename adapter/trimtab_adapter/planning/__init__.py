"""How a plan is decided: options, latency, the program, what to give up, what changed. Values in, values out."""
