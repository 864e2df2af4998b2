"""Resource types shared by all components.

A user writes an `InferencePipeline`, the profiler a `ModelProfile` and the adapter a `PipelinePlan`; the operator or
the local runtime writes `Endpoints`. All are frozen pydantic models in the shape of Kubernetes resources, so that a
single machine and a cluster read the same files.
"""
