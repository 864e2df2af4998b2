"""Renderers of files generated from the models: CRDs, JSON schemas and dashboards."""
