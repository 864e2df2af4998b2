"""Renders what is generated from the models: CRDs, JSON schemas, dashboards."""
