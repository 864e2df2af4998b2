"""Status of a pipeline and its plan, and Events for changes.

Contains the operator's own fields; the adapter writes the others with its own field manager.
"""

from collections.abc import Iterable, Sequence
from dataclasses import dataclass
from typing import Any

from trimtab_kubernetes.conditions import MAX_MESSAGE, ConditionState, conditions, failing, ok
from trimtab_kubernetes.events import event
from trimtab_kubernetes.objects import Object
from trimtab_operator.manifests.objects import ROUTER, Ref, generation_of
from trimtab_operator.reconciliation.conditions import StageProgress, route_ready, stages_ready, summary
from trimtab_operator.reconciliation.observed_state import ObservedState, hosted_variants
from trimtab_operator.reconciliation.plan_history import APPLIED
from trimtab_operator.reconciliation.plan_selection import PlanSelection
from trimtab_operator.reconciliation.profiling import InvalidProfile
from trimtab_operator.reconciliation.replica_rollout import ClusterSite
from trimtab_operator.reconciliation.write_errors import OBJECTS_WRITTEN, objects_written
from trimtab_pipelines.flavors import DEFAULT_NAME
from trimtab_pipelines.kubernetes_names import OPERATOR_MANAGER, ROUTER_REST_PORT, advisory_name, router_name
from trimtab_pipelines.plan import StagePlan
from trimtab_pipelines.resource import API_VERSION
from trimtab_pipelines.rollout import ReplicaGroupState, total
from trimtab_pipelines.status import condition_of


@dataclass(frozen=True, slots=True)
class StatusInputs:
    """Inputs of a status."""

    site: ClusterSite
    selection: PlanSelection
    profiles: ConditionState
    stages: tuple[StageProgress, ...]
    observed: ObservedState
    now: float
    scheme: str = "http"
    invalid_profiles: Sequence[InvalidProfile] = ()

    @property
    def before(self) -> dict[str, Any]:
        return self.observed.pipeline.get("status") or {}


def pipeline_status(inputs: StatusInputs) -> Object:
    pipeline, selection = inputs.site.pipeline, inputs.selection
    findings = _findings(inputs)
    before = inputs.before.get("conditions", [])
    ready = summary(findings, before)
    name, namespace = pipeline.name, pipeline.metadata.namespace
    generation = generation_of(pipeline)
    status: Object = {
        "observedGeneration": generation,
        "url": f"{inputs.scheme}://{router_name(name)}.{namespace}.svc:{ROUTER_REST_PORT}",
        "reason": ready.reason,
        "cores": f"{total(each.requested for each in inputs.site.sets).cores:g}",
        "conditions": conditions([ready, *findings], before, generation, inputs.now),
    }
    if devices := _devices(inputs.site.sets):
        status["devices"] = devices
    if selection.good is not None:
        status["planGeneration"] = selection.good.spec.generation
    if selection.plan is not None:
        stages = inputs.site.pipeline.spec.stages
        status["stages"] = [_stage(inputs, selection.plan.spec.stage(stage.name)) for stage in stages]
    if selection.schedulable is not None:
        status["schedulable"] = selection.schedulable.model_dump(mode="json", by_alias=True)
    return _status("InferencePipeline", name, namespace, status)


def _devices(sets: Iterable[ReplicaGroupState]) -> str:
    counts: dict[str, int] = {}
    for requested in (each.requested for each in sets):
        flavor = next(iter(requested.flavors), DEFAULT_NAME)
        counts[flavor] = counts.get(flavor, 0) + requested.gpus
    return ", ".join(f"{count} {flavor}" for flavor, count in counts.items() if count)


def invalid_status(document: Object, message: str, now: float, reason: str = "InvalidSpec") -> Object:
    """Status of a pipeline that cannot be reconciled; its replicas are unchanged."""
    metadata = document["metadata"]
    generation = int(metadata.get("generation", 0))
    before = (document.get("status") or {}).get("conditions", [])
    invalid = conditions([failing("Ready", reason, message)], before, generation, now)
    retained = {key: value for key, value in (document.get("status") or {}).items() if key in _OWN_FIELDS}
    others = [c for c in before if c["type"] in _OWN_CONDITIONS]
    status = {**retained, "observedGeneration": generation, "reason": reason, "conditions": [*invalid, *others]}
    return _status("InferencePipeline", metadata["name"], metadata["namespace"], status)


def invalid_events(document: Object, message: str, now: float, reason: str = "InvalidSpec") -> tuple[Object, ...]:
    """The Event of a pipeline that cannot be reconciled, unless its status has the reason already."""
    if condition_of(document, "Ready").get("reason") == reason:
        return ()
    return (event(document, reason, message, decision=message, by=OPERATOR_MANAGER, now_seconds=now, bad=True),)


_OWN_FIELDS = ("url", "planGeneration", "stages", "cores", "devices", "schedulable")
_OWN_CONDITIONS = (OBJECTS_WRITTEN, "ProfilesReady", "PlanApplied", "StagesReady", "RouteReady")


def plan_status(inputs: StatusInputs) -> Object | None:
    """Status of the published plan; None if there is none."""
    published = inputs.observed.plan
    if published is None:
        return None
    metadata = published["metadata"]
    before = published.get("status") or {}
    generation = int(metadata.get("generation", 0))
    applied = _plan_applied(inputs)
    finding = ConditionState(APPLIED, applied.status, applied.reason, applied.message)
    earlier = before.get("conditions", []) if before.get("observedGeneration") == generation else []
    status: Object = {
        "observedGeneration": generation,
        "conditions": conditions([finding], earlier, generation, inputs.now),
    }
    if inputs.selection.good is not None:
        status["appliedGeneration"] = inputs.selection.good.spec.generation
    return _status("PipelinePlan", metadata["name"], metadata["namespace"], status)


def events(inputs: StatusInputs) -> tuple[Object, ...]:
    created = []
    good = inputs.selection.good
    if good is not None and inputs.before.get("planGeneration") != good.spec.generation:
        change = good.spec.explanation.change or f"plan {good.spec.generation} is applied"
        created.append(_event(inputs, "PlanApplied", change, f"plan {good.spec.generation}"))
    generation = (inputs.observed.plan or {"metadata": {}})["metadata"].get("generation")
    written = objects_written(inputs.observed.refused)
    for finding, about in (
        (_plan_applied(inputs), f"plan {generation}"),
        (inputs.profiles, inputs.profiles.message),
        (written, written.message),
    ):
        earlier = condition_of(inputs.observed.pipeline, finding.type).get("reason")
        if finding.reason in _EVENT_REASONS and earlier != finding.reason:
            created.append(_event(inputs, finding.reason, finding.message, about))
            if finding.reason == "PlanRejected" and inputs.observed.plan is not None:
                created.append(_event(inputs, finding.reason, finding.message, about, inputs.observed.plan))
    if condition_of(inputs.observed.pipeline, "ProfilesReady").get("message") != inputs.profiles.message[:MAX_MESSAGE]:
        created += [
            _event(inputs, "InvalidSpec", message, message, found) for found, message in inputs.invalid_profiles
        ]
    created += [
        _event(inputs, "DeviceUnhealthy", f"pod {name} is replaced: a device of it is unhealthy", name)
        for name in inputs.site.unhealthy
    ]
    created += [
        _event(inputs, "NodeLeaving", f"pod {pod.name} is replaced: {pod.leaving}", pod.name)
        for pod in inputs.site.newly_leaving
        if Ref("Pod", pod.name) not in inputs.observed.refused
    ]
    return tuple(created)


def _event(inputs: StatusInputs, reason: str, message: str, decision: str, about: Object | None = None) -> Object:
    """An Event about the pipeline, or about another object."""
    is_warning, about = reason in _WARNING_REASONS, about or inputs.observed.pipeline
    return event(about, reason, message, decision=decision, by=OPERATOR_MANAGER, now_seconds=inputs.now, bad=is_warning)


_WARNING_REASONS = (
    "InvalidSpec",
    "PlanRejected",
    "ReadyTimeout",
    "Unschedulable",
    "ProfileFailed",
    "NotOwned",
    "FieldNotApplied",
    "WriteRejected",
    "DeviceUnhealthy",
)
_EVENT_REASONS = (*_WARNING_REASONS, "Profiling")


def _findings(inputs: StatusInputs) -> list[ConditionState]:
    site = inputs.site
    routers = [pod for pod in site.pods if pod.component == ROUTER and not pod.terminating]
    router = site.owned.get(Ref("Deployment", router_name(site.pipeline.name)), {})
    ready_routers = int((router.get("status") or {}).get("readyReplicas", 0))
    return [
        objects_written(inputs.observed.refused),
        inputs.profiles,
        _plan_applied(inputs),
        stages_ready(inputs.stages),
        route_ready(routers, ready_routers, inputs.stages),
    ]


def _plan_applied(inputs: StatusInputs) -> ConditionState:
    kind, selection, pipeline = "PlanApplied", inputs.selection, inputs.site.pipeline
    last = " The last applied plan remains." if selection.good is not None else ""
    if selection.plans.rejected:
        return failing(kind, "PlanRejected", f"{selection.plans.rejected}.{last}")
    if selection.failure is not None:
        return failing(kind, selection.failure.reason, f"{selection.failure.message.removesuffix(f'.{last}')}.{last}")
    if selection.plan is None:
        return failing(kind, "AwaitingPlan", _awaiting(inputs))
    if not selection.applied:
        behind = [stage for stage in inputs.stages if stage.ready < stage.wanted]
        names = ", ".join(f"{s.name} ({s.ready} of {s.wanted} ready)" for s in behind)
        return ConditionState(kind, "Unknown", "Applying", f"replicas are starting: {names}")
    if pipeline.spec.mode == "Paused":
        return ok(kind, "Paused", "the plan does not change; set spec.mode to Auto to resume")
    return ok(kind, APPLIED, f"plan {selection.plan.spec.generation} is applied")


def _awaiting(inputs: StatusInputs) -> str:
    name, mode = inputs.site.pipeline.name, inputs.site.pipeline.spec.mode
    if inputs.profiles.status != "True":
        return "waiting for profiles of all variants; see the condition ProfilesReady"
    if mode == "Advisory":
        return f"mode is Advisory: copy PipelinePlan {advisory_name(name)} to {name} to apply it"
    if mode == "Paused":
        return "mode is Paused and there is no plan; set spec.mode to Auto"
    return f"no PipelinePlan {name} yet; is the adapter running?"


def _stage(inputs: StatusInputs, planned: StagePlan) -> Object:
    ready = sum(
        each.ready
        for each in inputs.site.sets
        if each.stage == planned.name
        and hosted_variants(inputs.site.live[each.name]) & {group.variant for group in planned.groups}
    )
    return {
        "name": planned.name,
        "variant": planned.variant,
        "operatingPoint": planned.operating_point,
        "batchSize": planned.batch_size,
        "replicas": planned.all_replicas,
        "readyReplicas": ready,
    }


def _status(kind: str, name: str, namespace: str, status: Object) -> Object:
    metadata = {"name": name, "namespace": namespace}
    return {"apiVersion": API_VERSION, "kind": kind, "metadata": metadata, "status": status}
