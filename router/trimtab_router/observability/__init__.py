"""Observability: metrics, spans, recent outcomes, arrivals and each stage's log."""
