"""Conditions of stages and routes, with stable reasons and messages that name the remedy."""

from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from typing import Any

from trimtab_kubernetes.conditions import ConditionState, failing, ok
from trimtab_operator.reconciliation.observed_state import PodState, Problem
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
"""Causes before effects; Ready has the reason of the first condition that is not True."""


@dataclass(frozen=True, slots=True)
class StageProgress:
    """Progress of one stage towards its plan."""

    name: str
    wanted: int
    ready: int
    """Ready replicas of the planned replica group."""
    serving: int
    """Ready replicas of any replica group."""
    problem: Problem | None = None
    rolling: bool = False

    @property
    def missing(self) -> bool:
        """Whether the stage should have replicas but none is ready."""
        return self.wanted > 0 and self.serving == 0


def stages_ready(stages: Sequence[StageProgress]) -> ConditionState:
    """Condition of the replicas; True while a stage serves during a rollout."""
    kind = "StagesReady"
    if not stages:
        return failing(kind, "NoPlan", "no plan; see the condition PlanApplied")
    for stage in sorted(stages, key=lambda stage: stage.serving):
        if stage.problem is not None and stage.ready < stage.wanted:
            return failing(kind, stage.problem.reason, f"stage {stage.name}: {stage.problem.message}")
    starting = [stage for stage in stages if stage.missing]
    if starting:
        names = ", ".join(stage.name for stage in starting)
        return failing(kind, "Starting", f"no ready replica in: {names}")
    changing = [stage for stage in stages if stage.ready < stage.wanted or stage.rolling]
    if changing:
        return ok(kind, "RollingOut", f"serving during a rollout of: {_progress(changing)}")
    return ok(kind, "AllReady", "all stages have their planned replicas")


def route_ready(
    router_pods: Sequence[PodState], ready_replicas: int, stages: Sequence[StageProgress]
) -> ConditionState:
    kind = "RouteReady"
    without = [stage.name for stage in stages if stage.missing]
    if ready_replicas > 0 and not without:
        return ok(kind, "RouterReady", "the router accepts requests")
    problem = next((pod.problem for pod in router_pods if pod.problem is not None), None)
    if problem is not None and ready_replicas == 0:
        return failing(kind, "RouterStarting", f"router: {problem.message}")
    if without:
        return failing(
            kind, "NoReadyReplica", f"no ready replica in: {', '.join(without)}; see the condition StagesReady"
        )
    return failing(kind, "RouterStarting", "no router pod is ready")


def summary(findings: Sequence[ConditionState], others: Sequence[Mapping[str, Any]]) -> ConditionState:
    """Condition Ready: summarizes own conditions and those of the adapter; absent ones are ignored."""
    by_type = {finding.type: finding for finding in findings} | {
        other["type"]: ConditionState(other["type"], other["status"], other["reason"], other.get("message", ""))
        for other in others
        if other["type"] in ADAPTER_CONDITIONS
    }
    for kind in ORDER:
        finding = by_type.get(kind)
        if finding is not None and finding.status != "True":
            return failing("Ready", finding.reason, f"{kind}: {finding.message}")
    return ok("Ready", "Ready", "the pipeline runs as planned")


def _progress(stages: Sequence[StageProgress]) -> str:
    return ", ".join(f"{stage.name} ({min(stage.ready, stage.wanted)} of {stage.wanted} ready)" for stage in stages)
