"""The chart's dashboards: every panel's queries, one file a topic."""
