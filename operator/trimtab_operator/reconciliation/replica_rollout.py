"""Replica groups of a pipeline and their next number of replicas, from the observed state and the plan."""

from collections.abc import Mapping, Sequence
from dataclasses import dataclass

from trimtab_kubernetes.objects import Object, fingerprint
from trimtab_operator.manifests.objects import MODEL_SERVER, ROUTER, TEMPLATE_HASH, Ref
from trimtab_operator.manifests.replica_groups import replica_group, replica_group_budget, service, template
from trimtab_operator.manifests.routers import PIPELINE_HASH, pipeline_hash
from trimtab_operator.reconciliation.conditions import StageProgress
from trimtab_operator.reconciliation.observed_state import (
    DELETION_COST,
    PodState,
    Problem,
    live_sets,
    replica_group_states,
    rolling,
)
from trimtab_operator.reconciliation.plan_history import rollout_targets
from trimtab_operator.settings import Settings
from trimtab_pipelines.kubernetes_names import replica_group_name, router_name
from trimtab_pipelines.plan import PipelinePlan
from trimtab_pipelines.replica_groups import ReplicaGroup, replica_groups
from trimtab_pipelines.rollout import Capacity, ReplicaGroupState, Target, decide, successors, surge_allowed
from trimtab_pipelines.spec import InferencePipeline
from trimtab_pipelines.stages import Stage
from trimtab_pipelines.status import condition_of


@dataclass(frozen=True, slots=True)
class ClusterSite:
    """State of a pipeline's replicas."""

    pipeline: InferencePipeline
    owned: Mapping[Ref, Object]
    pods: Sequence[PodState]
    settings: Settings

    @property
    def groups(self) -> dict[str, tuple[Stage, ReplicaGroup]]:
        return {
            replica_group_name(self.pipeline.name, stage.name, group.name): (stage, group)
            for stage in self.pipeline.spec.stages
            for group in replica_groups(stage)
        }

    def node_startup_seconds(self, pod: PodState) -> float:
        """Usual time until there is another node of a pod's flavor; 0 if its group is no longer described."""
        groups = ((stage.name, group) for stage, group in self.groups.values())
        own = (group for stage, group in groups if (stage, group.name) == pod.group_key)
        return next((self.pipeline.spec.flavor(each.variants[0]).node_startup_seconds for each in own), 0.0)

    @property
    def unhealthy(self) -> list[str]:
        """Pods to replace because of a device."""
        return [pod.name for pod in self.pods if pod.has_unhealthy_device and not pod.terminating]

    @property
    def newly_leaving(self) -> list[PodState]:
        """Pods whose node is about to go, and that do not have a low deletion cost yet."""
        return [pod for pod in self._serving if pod.leaving and not pod.deleted_first]

    @property
    def deletion_costs(self) -> tuple[Object, ...]:
        """Annotations by which pods on nodes that are about to go are deleted first."""
        staying = [pod for pod in self._serving if pod.deleted_first and not pod.leaving]
        costs = {pod.name: "-1" for pod in self.newly_leaving} | {pod.name: "0" for pod in staying}
        namespace = self.pipeline.metadata.namespace
        return tuple(
            {
                "apiVersion": "v1",
                "kind": "Pod",
                "metadata": {"name": name, "namespace": namespace, "annotations": {DELETION_COST: cost}},
            }
            for name, cost in costs.items()
        )

    @property
    def _serving(self) -> list[PodState]:
        return [pod for pod in self.pods if pod.component in {MODEL_SERVER, ROUTER} and not pod.terminating]

    def router_successors(self, planned: int) -> int:
        """Routers to add for those on nodes that are about to go."""
        routers = [pod for pod in self._serving if pod.component == ROUTER]
        ready = sum(pod.ready for pod in routers if not pod.leaving)
        return successors(planned, sum(bool(pod.leaving) for pod in routers), ready)

    @property
    def live(self) -> dict[str, Object]:
        return live_sets(self.owned, self.pipeline.spec.deployer)

    @property
    def sets(self) -> tuple[ReplicaGroupState, ...]:
        groups = self.groups
        changing = {name for name, found in self.live.items() if name in groups and self._changes(found, *groups[name])}
        return replica_group_states(self.live, self.pods, frozenset(changing))

    def _changes(self, found: Object, stage: Stage, group: ReplicaGroup) -> bool:
        wanted = fingerprint(template(self.pipeline, stage, group, self.settings))
        return bool(found["metadata"].get("annotations", {}).get(TEMPLATE_HASH) != wanted)


@dataclass(frozen=True, slots=True)
class Replicas:
    """Replica groups to write, and those to retain."""

    objects: tuple[Object, ...]
    scaled: tuple[Object, ...]
    """Replica groups that the pipeline no longer describes, with their new number of replicas only."""
    kept: frozenset[Ref]
    """Replica groups that exist or are being released, with Service and budget."""


def decide_replicas(site: ClusterSite, plan: PipelinePlan | None, limit: Capacity) -> Replicas:
    """The next step towards a plan; without a plan, retain the current replicas."""
    sets = site.sets
    if plan is None:
        desired = {each.name: each.desired for each in sets}
    else:
        desired = decide(rollout_targets(plan, site.pipeline), sets, limit, new_routes=has_new_routes(site))
    by_name = {each.name: each for each in sets}
    objects: list[Object] = []
    scaled: list[Object] = []
    for name, count in desired.items():
        if name in site.groups:
            surge = name not in by_name or _may_surge(name, by_name, limit)
            objects += _objects(site, name, count, surge=surge)
        elif count != by_name[name].desired:
            scaled.append(_scaled(site.live[name], count))
    released = {
        name
        for name, count in desired.items()
        if name not in site.groups and count == 0 and by_name[name].present + by_name[name].terminating == 0
    }
    kinds = (site.pipeline.spec.deployer, "Service", "PodDisruptionBudget")
    kept = frozenset(Ref(kind, name) for name in desired.keys() - released for kind in kinds)
    return Replicas(tuple(objects), tuple(scaled), kept)


def has_new_routes(site: ClusterSite) -> bool:
    """Whether every router, including terminating ones, started from the current version of the pipeline."""
    found = site.owned.get(Ref("Deployment", router_name(site.pipeline.name)))
    if found is None:
        return False
    labels, status = found["spec"]["template"]["metadata"].get("annotations", {}), found.get("status") or {}
    updated = int(status.get("updatedReplicas", 0))
    return (
        labels.get(PIPELINE_HASH) == pipeline_hash(site.pipeline, site.settings)
        and int(status.get("observedGeneration", 0)) >= int(found["metadata"].get("generation", 0))
        and updated == int(status.get("replicas", 0)) == int(found["spec"].get("replicas", 1))
        and sum(pod.component == ROUTER for pod in site.pods) <= updated
    )


def stage_states(site: ClusterSite, plan: PipelinePlan | None) -> tuple[StageProgress, ...]:
    if plan is None:
        return ()
    sets, live = site.sets, site.live
    return tuple(
        _stage_state(target, sets, live.get(target.name), site) for target in rollout_targets(plan, site.pipeline)
    )


def _stage_state(
    target: Target, sets: Sequence[ReplicaGroupState], found: Object | None, site: ClusterSite
) -> StageProgress:
    own = next((each for each in sets if each.name == target.name), None)
    return StageProgress(
        target.stage,
        wanted=target.replicas,
        ready=own.ready if own else 0,
        serving=sum(
            pod.ready
            for pod in site.pods
            if pod.component == MODEL_SERVER and pod.stage == target.stage and not pod.terminating
        ),
        problem=(_creation_problem(found) if found else None) or _pod_problem(target, site),
        rolling=found is not None and (rolling(found) or bool(own and own.present > own.desired)),
    )


def _pod_problem(target: Target, site: ClusterSite) -> Problem | None:
    problems = (pod.problem for pod in pods_of(target, site) if not pod.ready)
    return next((problem for problem in problems if problem is not None), None)


def pods_of(target: Target, site: ClusterSite) -> list[PodState]:
    (stage, group), kind = site.groups[target.name], site.pipeline.spec.deployer
    own = [
        pod for pod in site.pods if pod.group_key == (stage.name, group.name) and pod.may_belong_to(kind, target.name)
    ]
    return [pod for pod in own if not pod.terminating]


def _creation_problem(found: Object) -> Problem | None:
    """Why pods cannot be created, for example a quota."""
    failure = condition_of(found, "ReplicaFailure")
    if failure.get("status") != "True":
        return None
    return Problem("ReplicaFailed", f"pods cannot be created: {failure.get('message', '')}")


def _may_surge(name: str, sets: Mapping[str, ReplicaGroupState], limit: Capacity) -> bool:
    own = sets[name]
    return surge_allowed(own, [each for each in sets.values() if each.name != name], limit)


def _objects(site: ClusterSite, name: str, count: int, *, surge: bool) -> list[Object]:
    stage, group = site.groups[name]
    return [
        replica_group(site.pipeline, stage, group, site.settings, replicas=count, surge=surge),
        service(site.pipeline, stage, group, site.settings),
        replica_group_budget(site.pipeline, stage, group),
    ]


def _scaled(found: Object, count: int) -> Object:
    identity = {key: found["metadata"][key] for key in ("name", "namespace")}
    return {"apiVersion": found["apiVersion"], "kind": found["kind"], "metadata": identity, "spec": {"replicas": count}}
