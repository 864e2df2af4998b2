"""What is well and what is not, as conditions with stable reasons, and messages that say what to do. Pure."""

from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from typing import Any, Literal

from trimtab_operator.pod_state import PodState, Trouble
from trimtab_operator.timestamps import written
from trimtab_pipelines.status import ADAPTER_CONDITIONS

Status = Literal["True", "False", "Unknown"]
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
_MOST_TEXT = 1000


@dataclass(frozen=True, slots=True)
class Finding:
    """A condition without its bookkeeping."""

    type: str
    status: Status
    reason: str
    message: str


@dataclass(frozen=True, slots=True)
class StageState:
    """How far one stage is with the plan it should run."""

    name: str
    wanted: int
    ready: int
    """Ready replicas of the set the plan asks for."""
    serving: int
    """Ready replicas of any set."""
    trouble: Trouble | None = None
    rolling: bool = False


def well(kind: str, reason: str, message: str) -> Finding:
    """Return a condition that is true."""
    return Finding(kind, "True", reason, message)


def ill(kind: str, reason: str, message: str) -> Finding:
    """Return a condition that is not."""
    return Finding(kind, "False", reason, message[:_MOST_TEXT])


def stages_ready(stages: Sequence[StageState]) -> Finding:
    """Judge the replicas; a stage that serves while it changes is well."""
    kind = "StagesReady"
    if not stages:
        return ill(kind, "NoPlan", "no plan says what to run; see the condition PlanApplied")
    for stage in sorted(stages, key=lambda stage: stage.serving):
        if stage.trouble is not None and stage.ready < stage.wanted:
            return ill(kind, stage.trouble.reason, f"stage {stage.name}: {stage.trouble.message}")
    starting = [stage for stage in stages if stage.serving == 0]
    if starting:
        names = ", ".join(stage.name for stage in starting)
        return ill(kind, "Starting", f"no replica is ready yet in: {names}")
    changing = [stage for stage in stages if stage.ready < stage.wanted or stage.rolling]
    if changing:
        return well(kind, "RollingOut", f"serving, while replicas are exchanged in: {_progress(changing)}")
    return well(kind, "AllReady", "every stage has the replicas it should have")


def route_ready(router_pods: Sequence[PodState], ready_replicas: int, stages: Sequence[StageState]) -> Finding:
    """Judge the way in."""
    kind = "RouteReady"
    without = [stage.name for stage in stages if stage.serving == 0]
    if ready_replicas > 0 and not without:
        return well(kind, "RouterReady", "the router takes requests")
    trouble = next((pod.trouble for pod in router_pods if pod.trouble is not None), None)
    if trouble is not None and ready_replicas == 0:
        return ill(kind, "RouterStarting", f"router: {trouble.message}")
    if without:
        return ill(kind, "NoReadyReplica", f"no ready replica in: {', '.join(without)}; see the condition StagesReady")
    return ill(kind, "RouterStarting", "no router pod is ready yet")


def summary(findings: Sequence[Finding], others: Sequence[Mapping[str, Any]]) -> Finding:
    """Sum up our findings and the conditions others wrote; a condition nobody wrote is not missed."""
    by_type = {finding.type: finding for finding in findings} | {
        other["type"]: Finding(other["type"], other["status"], other["reason"], other.get("message", ""))
        for other in others
        if other["type"] in ADAPTER_CONDITIONS
    }
    for kind in ORDER:
        found = by_type.get(kind)
        if found is not None and found.status != "True":
            return ill("Ready", found.reason, f"{kind}: {found.message}")
    return well("Ready", "Ready", "the pipeline serves as planned")


def conditions(
    findings: Sequence[Finding], before: Sequence[Mapping[str, Any]], generation: int, now: float
) -> list[dict[str, Any]]:
    """Return the conditions as written; the time of transition stays where the status stays."""
    earlier = {condition["type"]: condition for condition in before}
    return [_condition(finding, earlier.get(finding.type), generation, now) for finding in findings]


def _condition(finding: Finding, before: Mapping[str, Any] | None, generation: int, now: float) -> dict[str, Any]:
    same = before is not None and before["status"] == finding.status
    return {
        "type": finding.type,
        "status": finding.status,
        "reason": finding.reason,
        "message": finding.message,
        "lastTransitionTime": before["lastTransitionTime"] if before is not None and same else written(now),
        "observedGeneration": generation,
    }


def _progress(stages: Sequence[StageState]) -> str:
    return ", ".join(f"{stage.name} ({min(stage.ready, stage.wanted)} of {stage.wanted} ready)" for stage in stages)
