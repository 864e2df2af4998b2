"""The adapter in a cluster: one control loop per InferencePipeline, with watches as input and status as output."""
