"""What is well and what is not, as conditions with stable reasons, and messages that say what to do. Pure."""

from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from typing import Any

from trimtab_kubernetes.conditions import ConditionState, failing, ok
from trimtab_operator.reconciliation.pod_state import PodState, Problem
from trimtab_pipelines.status import ADAPTER_CONDITIONS

ORDER = (
    "ObjectsWritten",
    "ProfilesReady",
    "MetricsAvailable",
    "ForecastReady",
    "OptimizationReady",
    "PlanApplied",
    "StagesReady",
    "RouteReady",
)
"""Causes before effects: Ready gives the reason of the first that is not well."""


@dataclass(frozen=True, slots=True)
class StageProgress:
    """How far one stage is with the plan it should run."""

    name: str
    wanted: int
    ready: int
    """Ready replicas of the set the plan asks for."""
    serving: int
    """Ready replicas of any set."""
    problem: Problem | None = None
    rolling: bool = False

    @property
    def missing(self) -> bool:
        """Whether nobody serves what should be served."""
        return self.wanted > 0 and self.serving == 0


def stages_ready(stages: Sequence[StageProgress]) -> ConditionState:
    """Judge the replicas; a stage that serves while it changes is well."""
    kind = "StagesReady"
    if not stages:
        return failing(kind, "NoPlan", "no plan says what to run; see the condition PlanApplied")
    for stage in sorted(stages, key=lambda stage: stage.serving):
        if stage.problem is not None and stage.ready < stage.wanted:
            return failing(kind, stage.problem.reason, f"stage {stage.name}: {stage.problem.message}")
    starting = [stage for stage in stages if stage.missing]
    if starting:
        names = ", ".join(stage.name for stage in starting)
        return failing(kind, "Starting", f"no replica is ready yet in: {names}")
    changing = [stage for stage in stages if stage.ready < stage.wanted or stage.rolling]
    if changing:
        return ok(kind, "RollingOut", f"serving, while replicas are exchanged in: {_progress(changing)}")
    return ok(kind, "AllReady", "every stage has the replicas it should have")


def route_ready(
    router_pods: Sequence[PodState], ready_replicas: int, stages: Sequence[StageProgress]
) -> ConditionState:
    """Judge the way in."""
    kind = "RouteReady"
    without = [stage.name for stage in stages if stage.missing]
    if ready_replicas > 0 and not without:
        return ok(kind, "RouterReady", "the router takes requests")
    problem = next((pod.problem for pod in router_pods if pod.problem is not None), None)
    if problem is not None and ready_replicas == 0:
        return failing(kind, "RouterStarting", f"router: {problem.message}")
    if without:
        return failing(
            kind, "NoReadyReplica", f"no ready replica in: {', '.join(without)}; see the condition StagesReady"
        )
    return failing(kind, "RouterStarting", "no router pod is ready yet")


def summary(findings: Sequence[ConditionState], others: Sequence[Mapping[str, Any]]) -> ConditionState:
    """Sum up our findings and the conditions others wrote; a condition nobody wrote is not missed."""
    by_type = {finding.type: finding for finding in findings} | {
        other["type"]: ConditionState(other["type"], other["status"], other["reason"], other.get("message", ""))
        for other in others
        if other["type"] in ADAPTER_CONDITIONS
    }
    for kind in ORDER:
        found = by_type.get(kind)
        if found is not None and found.status != "True":
            return failing("Ready", found.reason, f"{kind}: {found.message}")
    return ok("Ready", "Ready", "the pipeline serves as planned")


def _progress(stages: Sequence[StageProgress]) -> str:
    return ", ".join(f"{stage.name} ({min(stage.ready, stage.wanted)} of {stage.wanted} ready)" for stage in stages)
