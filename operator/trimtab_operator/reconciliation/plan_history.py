"""Plans to choose from: the newest one, and the last that was applied.

The last applied plan is stored in the routers' ConfigMap. The failure of a plan is stored in its status, so that a
restarted operator does not retry it at once.
"""

import json
import math
from collections.abc import Mapping
from dataclasses import dataclass, field
from typing import Any

from trimtab_kubernetes.objects import Object, parse_rfc3339
from trimtab_operator.manifests.routers import PLAN_FILE
from trimtab_pipelines.documents import DocumentError, accept_plan, parse_plan
from trimtab_pipelines.kubernetes_names import ADVISORY_LABEL, replica_group_name
from trimtab_pipelines.plan import PipelinePlan
from trimtab_pipelines.replica_groups import group_of
from trimtab_pipelines.rollout import Target
from trimtab_pipelines.spec import InferencePipeline
from trimtab_pipelines.status import condition_of

RETRY_SECONDS = 300.0
"""Time after which a failed plan, or missing capacity, is tried again."""
APPLIED = "Applied"


@dataclass(frozen=True, slots=True)
class PlanHistory:
    """The plans of a pipeline."""

    newest: PipelinePlan | None = None
    """The published plan, if it fits the pipeline."""
    good: PipelinePlan | None = None
    """The last applied plan, if it still fits the pipeline."""
    rejected: str = ""
    """Why the published plan does not fit."""
    given_up: Mapping[str, Any] = field(default_factory=dict)
    """Condition Applied of the newest plan if a replica's timeout ended it in the last RETRY_SECONDS; else empty."""


def read_plan_history(
    pipeline: InferencePipeline, published: Object | None, config_map: Object | None, now: float
) -> PlanHistory:
    """Read the published and the last applied plan."""
    good = _last_good(pipeline, config_map)
    if published is None or ADVISORY_LABEL in published["metadata"].get("labels", {}):
        return PlanHistory(good=good)
    try:
        newest = accept_plan(parse_plan(published, f"PipelinePlan {pipeline.name}"), pipeline)
    except DocumentError as error:
        return PlanHistory(good=good, rejected=str(error))
    applied, generation = condition_of(published, APPLIED), published["metadata"].get("generation")
    given_up = applied.get("reason") == "ReadyTimeout" and applied.get("observedGeneration") == generation
    if given_up and now - _transition_seconds(applied) < RETRY_SECONDS:
        return PlanHistory(newest, good, given_up=applied)
    return PlanHistory(newest, good)


def _transition_seconds(condition: Mapping[str, Any]) -> float:
    """Time of a condition's last transition; long ago if it cannot be read."""
    try:
        return parse_rfc3339(str(condition.get("lastTransitionTime")))
    except ValueError:
        return -math.inf


def rollout_targets(plan: PipelinePlan, pipeline: InferencePipeline) -> tuple[Target, ...]:
    """Planned replica groups and numbers of replicas of each stage."""
    planned = ((stage, each) for stage in pipeline.spec.stages for each in plan.spec.stage(stage.name).groups)
    groups = ((stage, group_of(stage, each.variant), each.replicas) for stage, each in planned)
    return tuple(
        Target(
            stage.name,
            replica_group_name(pipeline.name, stage.name, group.name),
            replicas,
            group.capacity,
        )
        for stage, group, replicas in groups
    )


def _last_good(pipeline: InferencePipeline, config_map: Object | None) -> PipelinePlan | None:
    written = (config_map or {}).get("data", {}).get(PLAN_FILE)
    if written is None:
        return None
    try:
        return accept_plan(parse_plan(json.loads(written), PLAN_FILE), pipeline)
    except (DocumentError, ValueError):
        return None
