"""Decisions of a reconciliation, from the observed state."""
