"""IPA's evaluation in the simulator: five pipelines, four workloads, every planner, several seeds."""
