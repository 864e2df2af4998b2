"""What a pipeline and its plan say about themselves: status, and Events where it changed. Pure.

Only the operator's own fields are here; the adapter writes the others, under a field manager of its own.
"""

from collections.abc import Sequence
from dataclasses import dataclass
from typing import Any

from trimtab_kubernetes.conditions import ConditionState, conditions, failing, ok
from trimtab_kubernetes.events import event
from trimtab_kubernetes.objects import Object
from trimtab_operator.manifests.objects import ROUTER, Ref, generation_of
from trimtab_operator.reconciliation.conditions import StageProgress, route_ready, stages_ready, summary
from trimtab_operator.reconciliation.observed_state import ObservedState, hosted
from trimtab_operator.reconciliation.plan_history import APPLIED
from trimtab_operator.reconciliation.plan_selection import PlanSelection
from trimtab_operator.reconciliation.replica_rollout import ClusterSite
from trimtab_operator.reconciliation.write_errors import OBJECTS_WRITTEN, objects_written
from trimtab_pipelines.kubernetes_names import OPERATOR_MANAGER, ROUTER_REST_PORT, advisory_name, router_name
from trimtab_pipelines.plan import PipelinePlan, StagePlan
from trimtab_pipelines.resource import API_VERSION
from trimtab_pipelines.rollout import total
from trimtab_pipelines.status import condition_of


@dataclass(frozen=True, slots=True)
class StatusFacts:
    """All that a report is made of."""

    site: ClusterSite
    choice: PlanSelection
    profiles: ConditionState
    stages: tuple[StageProgress, ...]
    observed: ObservedState
    now: float
    scheme: str = "http"

    @property
    def before(self) -> dict[str, Any]:
        """The pipeline's status as it is."""
        return self.observed.pipeline.get("status") or {}


def pipeline_report(facts: StatusFacts) -> Object:
    """The operator's part of the pipeline's status."""
    pipeline, choice = facts.site.pipeline, facts.choice
    findings = _findings(facts)
    before = facts.before.get("conditions", [])
    ready = summary(findings, before)
    name, namespace = pipeline.name, pipeline.metadata.namespace
    generation = generation_of(pipeline)
    status: Object = {
        "observedGeneration": generation,
        "url": f"{facts.scheme}://{router_name(name)}.{namespace}.svc:{ROUTER_REST_PORT}",
        "reason": ready.reason,
        "cores": f"{total(each.held for each in facts.site.sets).cores:g}",
        "conditions": conditions([ready, *findings], before, generation, facts.now),
    }
    if choice.good is not None:
        status["planGeneration"] = choice.good.spec.generation
    if choice.plan is not None:
        status["stages"] = [_stage(facts, planned) for planned in _planned(facts, choice.plan)]
    if choice.schedulable is not None:
        status["schedulable"] = choice.schedulable.model_dump(mode="json", by_alias=True)
    return _status("InferencePipeline", name, namespace, status)


def invalid_report(document: Object, message: str, now: float) -> Object:
    """The status of a pipeline that cannot be used; what runs is left as it is."""
    metadata = document["metadata"]
    generation = int(metadata.get("generation", 0))
    before = (document.get("status") or {}).get("conditions", [])
    found = conditions([failing("Ready", "InvalidSpec", message)], before, generation, now)
    kept = {key: value for key, value in (document.get("status") or {}).items() if key in _OWN_FIELDS}
    others = [c for c in before if c["type"] in _OWN_CONDITIONS]
    status = {**kept, "observedGeneration": generation, "reason": "InvalidSpec", "conditions": [*found, *others]}
    return _status("InferencePipeline", metadata["name"], metadata["namespace"], status)


_OWN_FIELDS = ("url", "planGeneration", "stages", "cores", "schedulable")
_OWN_CONDITIONS = (OBJECTS_WRITTEN, "ProfilesReady", "PlanApplied", "StagesReady", "RouteReady")


def plan_report(facts: StatusFacts) -> Object | None:
    """The plan's status; None where no plan is published."""
    published = facts.observed.plan
    if published is None:
        return None
    metadata = published["metadata"]
    before = published.get("status") or {}
    generation = int(metadata.get("generation", 0))
    applied = _plan_applied(facts)
    finding = ConditionState(APPLIED, applied.status, applied.reason, applied.message)
    earlier = before.get("conditions", []) if before.get("observedGeneration") == generation else []
    status: Object = {
        "observedGeneration": generation,
        "conditions": conditions([finding], earlier, generation, facts.now),
    }
    if facts.choice.good is not None:
        status["appliedGeneration"] = facts.choice.good.spec.generation
    return _status("PipelinePlan", metadata["name"], metadata["namespace"], status)


def events(facts: StatusFacts) -> tuple[Object, ...]:
    """What is worth telling and was not so before."""
    told = []
    good = facts.choice.good
    if good is not None and facts.before.get("planGeneration") != good.spec.generation:
        change = good.spec.explanation.change or f"plan {good.spec.generation} is in force"
        told.append(_told(facts, "PlanApplied", change, f"plan {good.spec.generation}"))
    generation = (facts.observed.plan or {"metadata": {}})["metadata"].get("generation")
    written = objects_written(facts.observed.refused)
    for finding, about in (
        (_plan_applied(facts), f"plan {generation}"),
        (facts.profiles, facts.profiles.message),
        (written, written.message),
    ):
        earlier = condition_of(facts.observed.pipeline, finding.type).get("reason")
        if finding.reason in _TOLD and earlier != finding.reason:
            told.append(_told(facts, finding.reason, finding.message, about))
    return tuple(told)


def _told(facts: StatusFacts, reason: str, message: str, about: str) -> Object:
    pipeline, bad = facts.observed.pipeline, reason in _BAD
    return event(pipeline, reason, message, decision=about, by=OPERATOR_MANAGER, now_seconds=facts.now, bad=bad)


_BAD = ("PlanRejected", "ReadyTimeout", "Unschedulable", "ProfileFailed", "NotOurs", "NotTaken", "WriteRejected")
_TOLD = (*_BAD, "Profiling")


def _findings(facts: StatusFacts) -> list[ConditionState]:
    site = facts.site
    routers = [pod for pod in site.pods if pod.component == ROUTER and not pod.leaving]
    router = site.owned.get(Ref("Deployment", router_name(site.pipeline.name)), {})
    ready_routers = int((router.get("status") or {}).get("readyReplicas", 0))
    return [
        objects_written(facts.observed.refused),
        facts.profiles,
        _plan_applied(facts),
        stages_ready(facts.stages),
        route_ready(routers, ready_routers, facts.stages),
    ]


def _plan_applied(facts: StatusFacts) -> ConditionState:
    kind, choice, pipeline = "PlanApplied", facts.choice, facts.site.pipeline
    last = " The last good plan keeps serving." if choice.good is not None else ""
    if choice.plans.rejected:
        return failing(kind, "PlanRejected", f"{choice.plans.rejected}.{last}")
    if choice.failure is not None:
        return failing(kind, choice.failure.reason, f"{choice.failure.message.removesuffix(f'.{last}')}.{last}")
    if choice.plan is None:
        return failing(kind, "AwaitingPlan", _awaiting(facts))
    if not choice.applied:
        behind = [stage for stage in facts.stages if stage.ready < stage.wanted]
        names = ", ".join(f"{s.name} ({s.ready} of {s.wanted} ready)" for s in behind)
        return ConditionState(kind, "Unknown", "Applying", f"replicas are being brought up: {names}")
    if pipeline.spec.mode == "Paused":
        return ok(kind, "Paused", "the plan stays as it is; set spec.mode to Auto to let it change")
    return ok(kind, APPLIED, f"plan {choice.plan.spec.generation} is in force")


def _awaiting(facts: StatusFacts) -> str:
    name, mode = facts.site.pipeline.name, facts.site.pipeline.spec.mode
    if facts.profiles.status != "True":
        return "the adapter plans as soon as every variant is measured; see the condition ProfilesReady"
    if mode == "Advisory":
        return f"mode is Advisory: read PipelinePlan {advisory_name(name)}, and apply it as {name} to act on it"
    if mode == "Paused":
        return "mode is Paused and there is no plan; set spec.mode to Auto"
    return f"no PipelinePlan {name} yet; is the adapter running?"


def _planned(facts: StatusFacts, plan: PipelinePlan) -> Sequence[StagePlan]:
    return [plan.spec.stage(stage.name) for stage in facts.site.pipeline.spec.stages]


def _stage(facts: StatusFacts, planned: StagePlan) -> Object:
    ready = sum(
        each.ready
        for each in facts.site.sets
        if each.stage == planned.name and planned.variant in hosted(facts.site.live[each.name])
    )
    return {
        "name": planned.name,
        "variant": planned.variant,
        "operatingPoint": planned.operating_point,
        "batchSize": planned.batch_size,
        "replicas": planned.replicas,
        "readyReplicas": ready,
    }


def _status(kind: str, name: str, namespace: str, status: Object) -> Object:
    metadata = {"name": name, "namespace": namespace}
    return {"apiVersion": API_VERSION, "kind": kind, "metadata": metadata, "status": status}
