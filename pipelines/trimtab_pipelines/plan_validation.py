"""Validation of a plan against its pipeline, shared by router and operator."""

from trimtab_pipelines.documents import DocumentError
from trimtab_pipelines.plan import PipelinePlan
from trimtab_pipelines.spec import InferencePipeline, InferencePipelineSpec


def validate_plan(plan: PipelinePlan, pipeline: InferencePipeline) -> PipelinePlan:
    """Return the plan if it fits the pipeline; DocumentError names the field that does not."""
    if plan.spec.pipeline != pipeline.name:
        raise DocumentError(f"spec.pipeline: the plan is for {plan.spec.pipeline!r}, not for {pipeline.name!r}")
    for stage in pipeline.spec.stages:
        try:
            planned = plan.spec.stage(stage.name)
            for point in planned.points:
                stage.variant(planned.variant).point(point.name)
        except KeyError as error:
            raise DocumentError(f"spec.stages: {error.args[0]}") from error
        if not planned.replicas and stage.name not in idle_stages(plan, pipeline.spec):
            raise DocumentError(f"spec.stages: {stage.name} has 0 replicas, but another stage reads its outputs")
    return plan


def idle_stages(plan: PipelinePlan, spec: InferencePipelineSpec) -> frozenset[str]:
    """Stages without traffic under a plan: encoder stages whose generation stage runs a colocated encoder."""
    return frozenset(
        encoder
        for writer, encoder in spec.encoders.items()
        if spec.stage(writer).variant(plan.spec.stage(writer).variant).colocated
    )
