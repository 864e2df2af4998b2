"""`PodState`: readiness, scheduling and problems of a pod, from its status."""

from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from typing import Any

from trimtab_kubernetes.objects import parse_rfc3339
from trimtab_operator.manifests.pod_spec import GPU_RESOURCE
from trimtab_pipelines.kubernetes_names import COMPONENT, REPLICA_GROUP_LABEL, STAGE_LABEL
from trimtab_pipelines.quantity import parse_quantity
from trimtab_pipelines.rollout import Capacity
from trimtab_pipelines.status import condition_of

_PULL = ("ImagePullBackOff", "ErrImagePull", "InvalidImageName", "ErrImageNeverPull", "ImageInspectError")
_CRASH = ("CrashLoopBackOff", "RunContainerError", "CreateContainerConfigError", "CreateContainerError")


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
    """When it last became unready, or was created."""
    requests: Capacity
    problem: Problem | None
    deployment: str = ""
    """Name of its Deployment; empty if unknown."""

    @property
    def group_key(self) -> tuple[str, str]:
        """Stage and replica group."""
        return self.stage, self.replica_group

    def may_belong_to(self, kind: str, name: str) -> bool:
        """Whether it may belong to a Deployment or SeldonDeployment of that name, which share name and labels.

        Seldon Core creates Deployments with names of its own.
        """
        return not self.deployment or (self.deployment == name) == (kind == "Deployment")


def pod_states(pods: Sequence[Mapping[str, Any]]) -> tuple[PodState, ...]:
    """State of all pods that have not finished."""
    return tuple(_state(pod) for pod in pods if (pod.get("status") or {}).get("phase") not in {"Succeeded", "Failed"})


def _state(pod: Mapping[str, Any]) -> PodState:
    metadata, status = pod["metadata"], pod.get("status") or {}
    labels = metadata.get("labels", {})
    ready = condition_of(pod, "Ready")
    changed = ready.get("lastTransitionTime") or metadata["creationTimestamp"]
    return PodState(
        name=metadata["name"],
        component=labels.get(COMPONENT, ""),
        stage=labels.get(STAGE_LABEL, ""),
        replica_group=labels.get(REPLICA_GROUP_LABEL, ""),
        ready=ready.get("status") == "True",
        terminating="deletionTimestamp" in metadata,
        scheduled=bool(pod["spec"].get("nodeName")),
        waiting_since=max(parse_rfc3339(changed), parse_rfc3339(metadata["creationTimestamp"])),
        requests=_requests(pod),
        problem=_problem(status, condition_of(pod, "PodScheduled")),
        deployment=_deployment(metadata),
    )


def _deployment(metadata: Mapping[str, Any]) -> str:
    """Deployment of a pod's ReplicaSet, whose name is the Deployment's name and the template hash."""
    suffix = f"-{metadata.get('labels', {}).get('pod-template-hash', '')}"
    owners = [owner["name"] for owner in metadata.get("ownerReferences", []) if owner["kind"] == "ReplicaSet"]
    return next((str(name).removesuffix(suffix) for name in owners if str(name).endswith(suffix)), "")


def _requests(pod: Mapping[str, Any]) -> Capacity:
    requests = [container.get("resources", {}).get("requests", {}) for container in pod["spec"]["containers"]]
    return Capacity(
        sum(parse_quantity(request.get("cpu", 0)) for request in requests),
        sum(int(request.get(GPU_RESOURCE, 0)) for request in requests),
    )


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
    return f"the container exited with code {ended.get('exitCode')} {ended.get('reason', '')}".strip()
