"""Whether a plan is one for this pipeline: one rule for router and operator, so that they never disagree. Pure."""

from trimtab_pipelines.documents import DocumentError
from trimtab_pipelines.plan import PipelinePlan
from trimtab_pipelines.spec import InferencePipeline


def check_plan(plan: PipelinePlan, pipeline: InferencePipeline) -> PipelinePlan:
    """The plan, if it is one for this pipeline; raises DocumentError naming what does not fit."""
    if plan.spec.pipeline != pipeline.name:
        raise DocumentError(f"spec.pipeline: the plan is for {plan.spec.pipeline!r}, not for {pipeline.name!r}")
    for stage in pipeline.spec.stages:
        try:
            planned = plan.spec.stage(stage.name)
            for point in planned.points:
                stage.variant(planned.variant).point(point.name)
        except KeyError as error:
            raise DocumentError(f"spec.stages: {error.args[0]}") from error
    return plan
