"""More than can be served: what is kept of the maximum, with the door's bounds and without, beside plain MLServer."""
