"""Follows plans and replicas, as files or the cluster tell of them."""
