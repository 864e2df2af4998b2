"""Scheduling of one stage: queue, batching, dispatch, concurrency, escalation, load shedding and batch completion."""
