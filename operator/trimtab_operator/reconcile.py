"""Reconciliation of one pipeline: the objects to write, from its complete observed state.

Level-triggered: the same state leads to the same objects, whatever was missed, deleted or interrupted before.
"""

from collections.abc import Iterable, Sequence
from dataclasses import dataclass

from trimtab_kubernetes.objects import Object
from trimtab_operator.manifests.network_policies import network_policies
from trimtab_operator.manifests.objects import OPTIONAL_KINDS, OWNED_KINDS, Ref, ref_of
from trimtab_operator.manifests.replica_groups import replica_monitors
from trimtab_operator.manifests.routers import planned_routers, router_objects
from trimtab_operator.reconciliation import plan_history as planning
from trimtab_operator.reconciliation.object_diff import is_replaced, with_fingerprint
from trimtab_operator.reconciliation.observed_state import ObservedState, pod_states
from trimtab_operator.reconciliation.plan_selection import PlanSelection, select_plan
from trimtab_operator.reconciliation.profiling import profiling
from trimtab_operator.reconciliation.replica_rollout import ClusterSite, decide_replicas, stage_states
from trimtab_operator.reconciliation.status import (
    StatusInputs,
    invalid_events,
    invalid_status,
    pipeline_status,
    plan_status,
)
from trimtab_operator.reconciliation.status import events as events_of
from trimtab_operator.settings import Settings
from trimtab_pipelines.documents import DocumentError, parse_pipeline
from trimtab_pipelines.kubernetes_names import STAGE_LABEL, router_name
from trimtab_pipelines.memory_profile import with_measured_memory

_PRUNED_KINDS = {*OWNED_KINDS, *OPTIONAL_KINDS} - {"Pod"}


@dataclass(frozen=True, slots=True)
class Reconciliation:
    """Objects to write, and when to reconcile again without a change."""

    apply: tuple[Object, ...] = ()
    patch: tuple[Object, ...] = ()
    """Replica numbers of objects that the pipeline no longer describes, and deletion costs of pods."""
    delete: tuple[Ref, ...] = ()
    """Objects that are no longer wanted, or must be deleted before they can be created again; pods to replace."""
    pipeline_status: Object | None = None
    plan_status: Object | None = None
    events: tuple[Object, ...] = ()
    requeue_after_seconds: float | None = None


def reconcile(observed: ObservedState, settings: Settings, now: float) -> Reconciliation:
    if "deletionTimestamp" in observed.pipeline["metadata"]:
        return Reconciliation()  # owned objects are garbage-collected
    try:
        pipeline = parse_pipeline(observed.pipeline, "InferencePipeline", settings.flavors)
    except DocumentError as error:
        return invalid_reconciliation(observed, str(error), now)
    measured = profiling(pipeline, observed.profiles, observed.owned, settings)
    sized = with_measured_memory(pipeline, measured.memory)
    site = ClusterSite(sized, observed.owned, pod_states(observed.pods, observed.leaving), settings)
    config_map = observed.owned.get(Ref("ConfigMap", router_name(pipeline.name)))
    selection = select_plan(site, planning.read_plan_history(pipeline, observed.plan, config_map, now), now)
    replicas = decide_replicas(site, selection.plan, selection.limit)
    monitored = "PodMonitor" in observed.kinds
    successors = site.router_successors(planned_routers(pipeline, selection.good))
    wanted = [
        *router_objects(pipeline, selection.good, settings, pod_monitor=monitored, successors=successors),
        *network_policies(pipeline, settings),
        *(replica_monitors(pipeline) if monitored else ()),
        *measured.objects,
        *replicas.objects,
    ]
    replaced = frozenset(ref_of(each) for each in wanted if is_replaced(observed.owned.get(ref_of(each)), each))
    scheme = "https" if settings.edge.tls else "http"
    stages = stage_states(site, selection.plan)
    facts = StatusInputs(site, selection, measured.finding, stages, observed, now, scheme, measured.invalid)
    return Reconciliation(
        apply=tuple(with_fingerprint(manifest) for manifest in wanted if ref_of(manifest) not in replaced),
        patch=replicas.scaled + site.deletion_costs,
        delete=tuple(
            sorted({*_without_terminating(observed, replaced), *_prunable(observed, wanted, replicas.kept, selection)})
        )
        + tuple(Ref("Pod", name) for name in site.unhealthy),
        pipeline_status=pipeline_status(facts),
        plan_status=plan_status(facts),
        events=events_of(facts),
        requeue_after_seconds=selection.requeue_after_seconds,
    )


def invalid_reconciliation(
    observed: ObservedState, message: str, now: float, reason: str = "InvalidSpec"
) -> Reconciliation:
    """Status and Event of a pipeline that cannot be reconciled; its objects stay."""
    return Reconciliation(
        pipeline_status=invalid_status(observed.pipeline, message, now, reason),
        events=invalid_events(observed.pipeline, message, now, reason),
    )


def _without_terminating(observed: ObservedState, refs: Iterable[Ref]) -> list[Ref]:
    """References of objects that are not being deleted."""
    return [ref for ref in refs if "deletionTimestamp" not in observed.owned[ref]["metadata"]]


def _prunable(
    observed: ObservedState, wanted: Sequence[Object], kept: frozenset[Ref], selection: PlanSelection
) -> list[Ref]:
    """Owned objects that are no longer wanted.

    A replica group that is being released keeps its Service and disruption budget until it is gone; one of the other
    deployer serves until the plan is applied without it.
    """
    desired = {ref_of(manifest) for manifest in wanted}
    prunable = []
    for ref, live in observed.owned.items():
        if ref in desired or ref.kind not in _PRUNED_KINDS or "deletionTimestamp" in live["metadata"]:
            continue
        of_stage = STAGE_LABEL in live["metadata"].get("labels", {})
        if of_stage and (ref in kept or not selection.applied):
            continue
        if ref.kind == "Job" and (live.get("status") or {}).get("conditions"):
            continue  # finished Jobs are deleted by their TTL
        prunable.append(ref)
    return sorted(prunable)
