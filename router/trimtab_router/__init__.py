"""Carries requests through a pipeline: ingress, one deadline queue a stage, batches, dispatch, metrics."""
