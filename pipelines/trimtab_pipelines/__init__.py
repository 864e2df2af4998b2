"""What was asked and what was answered: the words every other part of Trimtab shares.

A user writes an `InferencePipeline`, the profiler a `ModelProfile`, the adapter a `PipelinePlan`; whoever makes a
plan true writes `Endpoints`. All four are frozen pydantic models in the shape of Kubernetes resources, so that a
laptop and a cluster read the same files.
"""
