"""Operator: applies PipelinePlans to a Kubernetes cluster."""
