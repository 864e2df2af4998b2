"""Selection of the plan to apply, and of the capacity it may use.

A plan that cannot be applied (a replica does not become ready, no node has capacity) is given up for the last applied
one. The schedulable capacity is stored in the status, so that the adapter plans within it until it is time to try for
more.
"""

from dataclasses import dataclass, replace
from typing import Any

from trimtab_kubernetes.objects import parse_rfc3339, rfc3339
from trimtab_operator.manifests.objects import MODEL_SERVER
from trimtab_operator.reconciliation.observed_state import PodState, Problem
from trimtab_operator.reconciliation.plan_history import RETRY_SECONDS, PlanHistory, rollout_targets
from trimtab_operator.reconciliation.replica_rollout import ClusterSite, pods_of
from trimtab_pipelines.plan import PipelinePlan, budget_capacity, plan_capacity
from trimtab_pipelines.quantity import parse_quantity
from trimtab_pipelines.rollout import Capacity, total
from trimtab_pipelines.status import Schedulable

_MIN_REQUEUE_SECONDS = 1.0
_LATE_NODE = 2.0
"""Time after which a node does not come any more, over its flavor's usual time."""


@dataclass(frozen=True, slots=True)
class PlanSelection:
    """The selected plan and its limits."""

    plan: PipelinePlan | None
    """None retains the current replicas."""
    good: PipelinePlan | None
    """The last applied plan, possibly this one."""
    limit: Capacity
    applied: bool
    """Whether every replica of `plan` is ready."""
    plans: PlanHistory
    failure: Problem | None = None
    """Why the newest plan was given up."""
    schedulable: Schedulable | None = None
    requeue_after_seconds: float | None = None


def select_plan(site: ClusterSite, plans: PlanHistory, now: float) -> PlanSelection:
    spec = site.pipeline.spec
    schedulable = _schedulable(site, now)
    limit = budget_capacity(spec, spec.budget.surge_cores)
    if schedulable is not None:
        cores, gpus = min(limit.cores, parse_quantity(schedulable.cores)), min(limit.gpus, schedulable.gpus)
        limit = replace(limit, cores=cores, gpus=gpus)
    failure = _failure(site, plans, schedulable, limit, now)
    plan = plans.newest
    if plan is None or (plans.good is not None and (failure is not None or spec.mode == "Paused")):
        plan = plans.good
    applied = plan is not None and is_applied(site, plan)
    good = plan if applied else plans.good
    return PlanSelection(
        plan, good, limit, applied, plans, failure, schedulable, _requeue_after_seconds(site, plans, schedulable, now)
    )


def is_applied(site: ClusterSite, plan: PipelinePlan) -> bool:
    sets = {each.name: each for each in site.sets}
    return all(t.name in sets and sets[t.name].ready >= t.replicas for t in rollout_targets(plan, site.pipeline))


def _failure(
    site: ClusterSite, plans: PlanHistory, schedulable: Schedulable | None, limit: Capacity, now: float
) -> Problem | None:
    newest = plans.newest
    if newest is None or (plans.good is not None and plans.good.spec == newest.spec):
        return None
    if schedulable is not None and not limit.fits(plan_capacity(newest, site.pipeline.spec)):
        return Problem("Unschedulable", schedulable.message)
    if plans.given_up:
        return Problem("ReadyTimeout", plans.given_up.get("message", ""))
    return None if is_applied(site, newest) else _timed_out(site, newest, now)


def _timed_out(site: ClusterSite, plan: PipelinePlan, now: float) -> Problem | None:
    since = _waiting_since(site)
    for target in rollout_targets(plan, site.pipeline):
        for pod in pods_of(target, site):
            limit_seconds = _ready_timeout_seconds(site, pod)
            if not (pod.ready or pod.gated) and now - since[pod.name] > limit_seconds:
                cause = pod.problem.message if pod.problem else "see kubectl describe pod"
                return Problem(
                    "ReadyTimeout",
                    f"stage {target.stage}: pod {pod.name} was not ready within {limit_seconds:g} s: {cause}",
                )
    return None


def _ready_timeout_seconds(site: ClusterSite, pod: PodState) -> float:
    return site.pipeline.spec.rollout.ready_timeout_seconds + _LATE_NODE * site.node_startup_seconds(pod)


def _schedulable(site: ClusterSite, now: float) -> Schedulable | None:
    """Schedulable capacity: as stored before, or as observed when a pod waits too long for a node."""
    before = _recorded_schedulable(site)
    if before is not None and now - parse_rfc3339(before.since) > RETRY_SECONDS:
        before = None
    servers = [pod for pod in site.pods if pod.component == MODEL_SERVER]
    if any(pod.terminating and pod.scheduled for pod in servers):
        return before  # a terminating pod uses its resources until it is gone
    pods, since = [pod for pod in servers if not pod.terminating], _waiting_since(site)
    waiting = [
        f"stage {pod.stage}: pod {pod.name}: {pod.problem.message}"
        for pod in pods
        if pod.problem is not None
        and pod.problem.reason == "Unschedulable"
        and now - since[pod.name] >= _grace_seconds(site, pod)
    ]
    if not waiting:
        return before
    capacity = _at_least_minimum(site, total(pod.requests for pod in pods if pod.scheduled))
    if before is not None and (parse_quantity(before.cores), before.gpus) == (capacity.cores, capacity.gpus):
        return before
    return Schedulable(cores=f"{capacity.cores:g}", gpus=capacity.gpus, since=rfc3339(now), message=waiting[0][:1024])


def _waiting_since(site: ClusterSite) -> dict[str, float]:
    """Since when each pod waits, by name; without a node, anew from when another pod of its group got one.

    Nodes are being added then, and the scheduler may have given those for older pods to newer ones.
    """
    times: dict[tuple[str, str], float] = {}
    for pod in site.pods:
        times[pod.group_key] = max(times.get(pod.group_key, 0.0), pod.scheduled_at)
    return {
        pod.name: pod.waiting_since if pod.scheduled else max(pod.waiting_since, times[pod.group_key])
        for pod in site.pods
    }


def _grace_seconds(site: ClusterSite, pod: PodState) -> float:
    """Time for which a pod may wait for a node: twice what an autoscaler usually needs for one of its flavor."""
    grace_seconds = site.pipeline.spec.rollout.unschedulable_grace_seconds
    return max(grace_seconds, _LATE_NODE * site.node_startup_seconds(pod))


def _at_least_minimum(site: ClusterSite, capacity: Capacity) -> Capacity:
    """The capacity, at least that of the smallest replicas, since no plan fits in less."""
    stages = site.pipeline.spec.stages
    cores = sum(stage.min_replicas * min(variant.resources.cpu for variant in stage.variants) for stage in stages)
    gpus = sum(stage.min_replicas * min(variant.resources.gpu for variant in stage.variants) for stage in stages)
    return Capacity(max(capacity.cores, cores), max(capacity.gpus, gpus))


def _recorded_schedulable(site: ClusterSite) -> Schedulable | None:
    """The stored capacity; None if it cannot be parsed."""
    status: dict[str, Any] = site.pipeline.status or {}
    if not status.get("schedulable"):
        return None
    try:
        schedulable = Schedulable.model_validate(status["schedulable"])
        parse_quantity(schedulable.cores)
        parse_rfc3339(schedulable.since)
    except ValueError:
        return None
    return schedulable


def _requeue_after_seconds(
    site: ClusterSite, plans: PlanHistory, schedulable: Schedulable | None, now: float
) -> float | None:
    """Seconds until a timeout or retry is due; None if there is none."""
    times, since = [], _waiting_since(site)
    for pod in site.pods:
        if pod.component == MODEL_SERVER and not pod.ready and not pod.terminating:
            if not pod.scheduled:
                times.append(since[pod.name] + _grace_seconds(site, pod))
            times.append(since[pod.name] + _ready_timeout_seconds(site, pod))
    if schedulable is not None:
        times.append(parse_rfc3339(schedulable.since) + RETRY_SECONDS)
    if plans.given_up:
        times.append(parse_rfc3339(plans.given_up["lastTransitionTime"]) + RETRY_SECONDS)
    remaining = [time - now for time in times if time > now]
    return max(min(remaining), _MIN_REQUEUE_SECONDS) if remaining else None
