"""Which plan to make true: the newest that fits, else the last good one. Pure.

The last good plan is the last that was made true; it lies in the ConfigMap the routers start from. That a plan failed
stands in its own status, so that a restarted operator does not try it again at once.
"""

import json
from collections.abc import Mapping
from dataclasses import dataclass
from typing import Any

from trimtab_kubernetes.objects import Object
from trimtab_kubernetes.times import parse_rfc3339
from trimtab_operator.manifests.routers import PLAN_FILE
from trimtab_pipelines.documents import DocumentError, parse_plan
from trimtab_pipelines.kubernetes_names import ADVISORY_LABEL, replica_group_name
from trimtab_pipelines.plan import PipelinePlan
from trimtab_pipelines.plan_validation import validate_plan
from trimtab_pipelines.replica_groups import group_of
from trimtab_pipelines.rollout import Capacity, Target, total
from trimtab_pipelines.spec import InferencePipeline
from trimtab_pipelines.status import condition_of

RETRY_SECONDS = 300.0
"""A plan that failed is tried once more after this long; so is room that was not there."""
APPLIED = "Applied"
FAILURES = ("ReadyTimeout",)


@dataclass(frozen=True, slots=True)
class PlanHistory:
    """What there is to choose from."""

    newest: PipelinePlan | None = None
    """The plan as published, where it fits the pipeline."""
    good: PipelinePlan | None = None
    """The last plan that was made true, where it still fits the pipeline."""
    rejected: str = ""
    """Why the plan as published is not made true."""
    failed: str = ""
    """Reason for which the newest plan was given up."""
    failed_message: str = ""
    failed_at: float = 0.0


def read_plan_history(
    pipeline: InferencePipeline, published: Object | None, config_map: Object | None, now: float
) -> PlanHistory:
    """Read the plan as published and the last good one."""
    good = _last_good(pipeline, config_map)
    if published is None or ADVISORY_LABEL in published["metadata"].get("labels", {}):
        return PlanHistory(good=good)
    try:
        newest = accept_plan(parse_plan(published, f"PipelinePlan {pipeline.name}"), pipeline)
    except DocumentError as error:
        return PlanHistory(good=good, rejected=str(error))
    reason, message, since = _failure(published)
    if reason and now - since < RETRY_SECONDS:
        return PlanHistory(newest, good, failed=reason, failed_message=message, failed_at=since)
    return PlanHistory(newest, good)


def accept_plan(plan: PipelinePlan, pipeline: InferencePipeline) -> PipelinePlan:
    """A plan that fits the pipeline and its budget; raise DocumentError that says what does not."""
    validate_plan(plan, pipeline)
    asked, budget = plan_capacity(plan, pipeline), pipeline.spec.budget
    if not Capacity(budget.cores, budget.gpus).fits(asked):
        raise DocumentError(
            f"spec.stages: the plan asks for {asked.cores:g} cores and {asked.gpus} GPUs, "
            f"the budget holds {budget.cores:g} and {budget.gpus}"
        )
    return plan


def rollout_targets(plan: PipelinePlan, pipeline: InferencePipeline) -> tuple[Target, ...]:
    """The hosting set each stage should run, and how many replicas of it."""
    found = []
    for stage in pipeline.spec.stages:
        planned = plan.spec.stage(stage.name)
        group = group_of(stage, planned.variant)
        name = replica_group_name(pipeline.name, stage.name, group.name)
        found.append(Target(stage.name, name, planned.replicas, Capacity(group.cores, group.gpus)))
    return tuple(found)


def plan_capacity(plan: PipelinePlan, pipeline: InferencePipeline) -> Capacity:
    """What all replicas of a plan ask for."""
    return total(target.requested for target in rollout_targets(plan, pipeline))


def _last_good(pipeline: InferencePipeline, config_map: Object | None) -> PipelinePlan | None:
    written = (config_map or {}).get("data", {}).get(PLAN_FILE)
    if written is None:
        return None
    try:
        return accept_plan(parse_plan(json.loads(written), PLAN_FILE), pipeline)
    except (DocumentError, ValueError):
        return None


def _failure(published: Mapping[str, Any]) -> tuple[str, str, float]:
    """Why this very generation of the plan was given up before, and when."""
    applied, generation = condition_of(published, APPLIED), published["metadata"].get("generation")
    if applied.get("reason") in FAILURES and applied.get("observedGeneration") == generation:
        return applied["reason"], applied.get("message", ""), parse_rfc3339(applied["lastTransitionTime"])
    return "", "", 0.0
