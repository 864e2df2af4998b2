"""The adapter in a cluster: one loop for each InferencePipeline, fed by watches, its plans and status written back."""
