"""Panels of the chart's Grafana dashboards, one module per topic."""
