"""Watchers of plans and replicas, in files or in a Kubernetes cluster."""
