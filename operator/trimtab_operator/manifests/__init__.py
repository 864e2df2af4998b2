"""Manifests of the objects that the operator creates."""
