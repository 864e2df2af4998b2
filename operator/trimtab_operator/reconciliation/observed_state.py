"""Observed state of one pipeline."""

from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field
from types import MappingProxyType
from typing import Any

from trimtab_kubernetes.objects import Object, parse_rfc3339
from trimtab_operator.manifests.objects import MODEL_SERVER, Ref
from trimtab_operator.manifests.pod_spec import requested_devices
from trimtab_operator.reconciliation.write_errors import RejectedWrite
from trimtab_pipelines.kubernetes_names import (
    COMPONENT,
    FLAVOR_LABEL,
    REPLICA_GROUP_LABEL,
    STAGE_LABEL,
    VARIANT_LABEL_PREFIX,
)
from trimtab_pipelines.quantity import parse_quantity
from trimtab_pipelines.rollout import Capacity, ReplicaGroupState, total
from trimtab_pipelines.status import condition_of

_PULL = ("ImagePullBackOff", "ErrImagePull", "InvalidImageName", "ErrImageNeverPull", "ImageInspectError")
DELETION_COST = "controller.kubernetes.io/pod-deletion-cost"
"""Annotation by which a ReplicaSet deletes the cheapest of its ready pods first."""
_CRASH = ("CrashLoopBackOff", "RunContainerError", "CreateContainerConfigError", "CreateContainerError")


_ALL_STAY: Mapping[str, str] = MappingProxyType({})


@dataclass(frozen=True, slots=True)
class Problem:
    """Why a replica is not ready; `message` names the remedy."""

    reason: str
    message: str


@dataclass(frozen=True, slots=True)
class PodState:
    """State of a pod."""

    name: str
    component: str
    stage: str
    replica_group: str
    ready: bool
    terminating: bool
    scheduled: bool
    waiting_since: float
    """When it last became unready, was scheduled, or was created."""
    requests: Capacity
    problem: Problem | None
    deployment: str = ""
    """Name of its Deployment; empty if unknown."""
    has_unhealthy_device: bool = False
    """Whether the kubelet reports so, which requires its feature gate ResourceHealthStatus."""
    leaving: str = ""
    """Its node and why that is about to go; empty if it stays."""
    gated: bool = False
    """Whether another controller keeps it from being scheduled, such as Kueue until it admits it."""
    deleted_first: bool = False
    """Whether its deletion cost is lower than that of other pods."""
    scheduled_at: float = 0.0
    """When it got its node; 0 without one."""

    @property
    def group_key(self) -> tuple[str, str]:
        return self.stage, self.replica_group

    def may_belong_to(self, kind: str, name: str) -> bool:
        """Whether it may belong to a Deployment or SeldonDeployment of that name, which share name and labels.

        Seldon Core creates Deployments with names of its own.
        """
        return not self.deployment or (self.deployment == name) == (kind == "Deployment")


def pod_states(pods: Sequence[Mapping[str, Any]], leaving: Mapping[str, str] = _ALL_STAY) -> tuple[PodState, ...]:
    """State of all pods that have not finished; `leaving` are nodes that are about to go, and why."""
    living = (pod for pod in pods if (pod.get("status") or {}).get("phase") not in {"Succeeded", "Failed"})
    return tuple(_state(pod, leaving) for pod in living)


def _state(pod: Mapping[str, Any], leaving: Mapping[str, str]) -> PodState:
    metadata, status, node = pod["metadata"], pod.get("status") or {}, pod["spec"].get("nodeName", "")
    labels = metadata.get("labels", {})
    ready, placed = condition_of(pod, "Ready"), condition_of(pod, "PodScheduled")
    changes = (ready.get("lastTransitionTime"), placed.get("lastTransitionTime"), metadata["creationTimestamp"])
    return PodState(
        name=metadata["name"],
        component=labels.get(COMPONENT, ""),
        stage=labels.get(STAGE_LABEL, ""),
        replica_group=labels.get(REPLICA_GROUP_LABEL, ""),
        ready=ready.get("status") == "True",
        terminating="deletionTimestamp" in metadata,
        scheduled=bool(node),
        waiting_since=max(parse_rfc3339(change) for change in changes if change),
        requests=_requests(pod),
        problem=_problem(status, placed),
        deployment=_deployment(metadata),
        has_unhealthy_device=_has_unhealthy_device(status),
        leaving=f"node {node} is about to go ({leaving[node]})" if node in leaving else "",
        gated=bool(pod["spec"].get("schedulingGates")),
        scheduled_at=parse_rfc3339(at) if node and (at := placed.get("lastTransitionTime")) else 0.0,
        deleted_first=str(metadata.get("annotations", {}).get(DELETION_COST, "0")).startswith("-"),
    )


def _has_unhealthy_device(status: Mapping[str, Any]) -> bool:
    containers = status.get("containerStatuses", [])
    allocated = [each for container in containers for each in container.get("allocatedResourcesStatus", [])]
    return any(device.get("health") == "Unhealthy" for each in allocated for device in each.get("resources", []))


def _deployment(metadata: Mapping[str, Any]) -> str:
    """Deployment of a pod's ReplicaSet, whose name is the Deployment's name and the template hash."""
    suffix = f"-{metadata.get('labels', {}).get('pod-template-hash', '')}"
    owners = [owner["name"] for owner in metadata.get("ownerReferences", []) if owner["kind"] == "ReplicaSet"]
    return next((str(name).removesuffix(suffix) for name in owners if str(name).endswith(suffix)), "")


def _requests(pod: Mapping[str, Any]) -> Capacity:
    flavor = pod["metadata"].get("labels", {}).get(FLAVOR_LABEL)
    return total(_capacity(container, flavor) for container in pod["spec"]["containers"])


def _capacity(container: Mapping[str, Any], flavor: str | None) -> Capacity:
    requests = container.get("resources", {}).get("requests", {})
    return Capacity.in_flavor(parse_quantity(requests.get("cpu", 0)), requested_devices(requests), flavor)


def _problem(status: Mapping[str, Any], scheduled: Mapping[str, Any]) -> Problem | None:
    if scheduled.get("status") == "False" and scheduled.get("reason") == "Unschedulable":
        return Problem("Unschedulable", f"no node has enough resources: {scheduled.get('message', '')}")
    for container in status.get("containerStatuses", []):
        waiting = container.get("state", {}).get("waiting") or {}
        reason = waiting.get("reason", "")
        if reason in _PULL:
            return Problem(
                "ImagePullFailed",
                f"image {container.get('image', '')} cannot be pulled ({reason}); correct its name or give the "
                "operator imagePullSecrets",
            )
        if reason in _CRASH:
            return Problem("CrashLoop", f"{_termination_message(container)} ({reason}); see kubectl logs --previous")
    return None


def _termination_message(container: Mapping[str, Any]) -> str:
    ended = container.get("lastState", {}).get("terminated") or {}
    if not ended:
        return str((container.get("state", {}).get("waiting") or {}).get("message", "the container cannot start"))
    if ended.get("reason") == "OOMKilled":
        return "the container exceeded its memory limit; raise resources.memory of the variants that it hosts"
    return f"the container exited with code {ended.get('exitCode')} {ended.get('reason', '')}".strip()


@dataclass(frozen=True, slots=True)
class ObservedState:
    """A pipeline and all related objects of its namespace."""

    pipeline: Object
    plan: Object | None = None
    profiles: Sequence[Object] = ()
    owned: Mapping[Ref, Object] = field(default_factory=dict)
    pods: Sequence[Object] = ()
    kinds: frozenset[str] = frozenset()
    """Optional kinds of the cluster: PodMonitor, SeldonDeployment."""
    refused: Mapping[Ref, RejectedWrite] = field(default_factory=dict)
    """Rejected writes."""
    leaving: Mapping[str, str] = field(default_factory=dict)
    """Nodes of its pods that are about to go, and why."""


def live_sets(owned: Mapping[Ref, Object], kind: str) -> dict[str, Object]:
    """Objects of a kind that run replicas of stages, by name."""
    return {
        ref.name: found
        for ref, found in owned.items()
        if ref.kind == kind and STAGE_LABEL in found["metadata"].get("labels", {})
    }


def replica_group_states(
    live: Mapping[str, Object], pods: Sequence[PodState], changing: frozenset[str]
) -> tuple[ReplicaGroupState, ...]:
    """State of every existing replica group; `changing` are about to get a new template."""
    return tuple(_replica_group_state(found, pods, name in changing) for name, found in live.items())


def hosted_variants(found: Object) -> frozenset[str]:
    labels = found["metadata"].get("labels", {})
    return frozenset(key.removeprefix(VARIANT_LABEL_PREFIX) for key in labels if key.startswith(VARIANT_LABEL_PREFIX))


def _replica_group_state(found: Object, pods: Sequence[PodState], changing: bool) -> ReplicaGroupState:  # noqa: FBT001
    labels, name = found["metadata"]["labels"], found["metadata"]["name"]
    pods_of_group = [
        pod
        for pod in pods
        if pod.component == MODEL_SERVER
        and pod.group_key == (labels[STAGE_LABEL], labels[REPLICA_GROUP_LABEL])
        and pod.may_belong_to(found["kind"], name)
    ]
    present = [pod for pod in pods_of_group if not pod.terminating]
    return ReplicaGroupState(
        name=name,
        stage=labels[STAGE_LABEL],
        per_replica=_replica_capacity(found),
        desired=desired_replicas(found),
        present=len(present),
        ready=sum(pod.ready for pod in present),
        unscheduled=sum(not pod.scheduled for pod in present),
        leaving=sum(bool(pod.leaving) for pod in present),
        ready_leaving=sum(pod.ready for pod in present if pod.leaving),
        terminating=len(pods_of_group) - len(present),
        surging=_surges(found) and (changing or rolling(found)),
    )


def desired_replicas(found: Object) -> int:
    if found["kind"] == "SeldonDeployment":
        return int(found["spec"].get("replicas", 0))
    return int(found["spec"].get("replicas", 1))


def rolling(found: Object) -> bool:
    """Whether pods of an older template exist."""
    status = found.get("status") or {}
    return int(status.get("updatedReplicas", 0)) < int(status.get("replicas", 0))


def _surges(found: Object) -> bool:
    strategy = found["spec"].get("strategy", {}).get("rollingUpdate", {})
    return bool(strategy.get("maxSurge") == 1)


def pod_spec(found: Object) -> Mapping[str, Any]:
    if found["kind"] == "SeldonDeployment":
        spec: Mapping[str, Any] = found["spec"]["predictors"][0]["componentSpecs"][0]["spec"]
    else:
        spec = found["spec"]["template"]["spec"]
    return spec


def _replica_capacity(found: Object) -> Capacity:
    return _capacity(pod_spec(found)["containers"][0], found["metadata"].get("labels", {}).get(FLAVOR_LABEL))
