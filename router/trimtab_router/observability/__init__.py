"""What the router tells: metrics, spans, recent outcomes, arrivals, the log of a stage."""
