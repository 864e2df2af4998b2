"""What would happen: a discrete-event simulation that runs the router's own queue, batching, binding and graph code."""
