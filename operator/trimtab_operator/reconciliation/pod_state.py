"""What a pod's own status says: is it ready, has it a node, what keeps it. Pure."""

from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from typing import Any

from trimtab_kubernetes.times import seconds_of
from trimtab_operator.manifests.pod_spec import GPU_RESOURCE
from trimtab_pipelines.kubernetes_names import COMPONENT, HOSTING_LABEL, STAGE_LABEL
from trimtab_pipelines.quantity import parse_quantity
from trimtab_pipelines.rollout import Capacity
from trimtab_pipelines.status import condition_of

_PULL = ("ImagePullBackOff", "ErrImagePull", "InvalidImageName", "ErrImageNeverPull", "ImageInspectError")
_CRASH = ("CrashLoopBackOff", "RunContainerError", "CreateContainerConfigError", "CreateContainerError")


@dataclass(frozen=True, slots=True)
class Trouble:
    """Why a replica is not ready; `message` says what to do."""

    reason: str
    message: str


@dataclass(frozen=True, slots=True)
class PodState:
    """A pod of ours."""

    name: str
    component: str
    stage: str
    hosting: str
    ready: bool
    leaving: bool
    scheduled: bool
    waiting_since: float
    """When it last stopped being ready, or was made."""
    room: Capacity
    trouble: Trouble | None
    deployment: str = ""
    """The Deployment that made it; empty where that is not told."""

    @property
    def set_key(self) -> tuple[str, str]:
        """Stage and hosting group."""
        return self.stage, self.hosting

    def made_for(self, kind: str, name: str) -> bool:
        """Whether it can be of a hosting set of that kind: the sets of both kinds have one name and one set of labels.

        Seldon Core makes Deployments of its own names.
        """
        return not self.deployment or (self.deployment == name) == (kind == "Deployment")


def pod_states(pods: Sequence[Mapping[str, Any]]) -> tuple[PodState, ...]:
    """Read all pods that are not at their end."""
    return tuple(_state(pod) for pod in pods if (pod.get("status") or {}).get("phase") not in {"Succeeded", "Failed"})


def _state(pod: Mapping[str, Any]) -> PodState:
    metadata, status = pod["metadata"], pod.get("status") or {}
    marks = metadata.get("labels", {})
    ready = condition_of(pod, "Ready")
    changed = ready.get("lastTransitionTime") or metadata["creationTimestamp"]
    return PodState(
        name=metadata["name"],
        component=marks.get(COMPONENT, ""),
        stage=marks.get(STAGE_LABEL, ""),
        hosting=marks.get(HOSTING_LABEL, ""),
        ready=ready.get("status") == "True",
        leaving="deletionTimestamp" in metadata,
        scheduled=bool(pod["spec"].get("nodeName")),
        waiting_since=max(seconds_of(changed), seconds_of(metadata["creationTimestamp"])),
        room=_room(pod),
        trouble=_trouble(status, condition_of(pod, "PodScheduled")),
        deployment=_deployment(metadata),
    )


def _deployment(metadata: Mapping[str, Any]) -> str:
    """The Deployment whose ReplicaSet owns a pod: one is called as its Deployment, and the hash of its pods."""
    suffix = f"-{metadata.get('labels', {}).get('pod-template-hash', '')}"
    owners = [owner["name"] for owner in metadata.get("ownerReferences", []) if owner["kind"] == "ReplicaSet"]
    return next((str(name).removesuffix(suffix) for name in owners if str(name).endswith(suffix)), "")


def _room(pod: Mapping[str, Any]) -> Capacity:
    requests = [container.get("resources", {}).get("requests", {}) for container in pod["spec"]["containers"]]
    return Capacity(
        sum(parse_quantity(request.get("cpu", 0)) for request in requests),
        sum(int(request.get(GPU_RESOURCE, 0)) for request in requests),
    )


def _trouble(status: Mapping[str, Any], scheduled: Mapping[str, Any]) -> Trouble | None:
    if scheduled.get("status") == "False" and scheduled.get("reason") == "Unschedulable":
        return Trouble("Unschedulable", f"no node has room: {scheduled.get('message', '')}")
    for container in status.get("containerStatuses", []):
        waiting = container.get("state", {}).get("waiting") or {}
        reason = waiting.get("reason", "")
        if reason in _PULL:
            return Trouble(
                "ImagePullFailed",
                f"image {container.get('image', '')} cannot be pulled ({reason}); correct its name or give the "
                "operator imagePullSecrets",
            )
        if reason in _CRASH:
            return Trouble("CrashLoop", f"{_last_words(container)} ({reason}); see kubectl logs --previous")
    return None


def _last_words(container: Mapping[str, Any]) -> str:
    ended = container.get("lastState", {}).get("terminated") or {}
    if not ended:
        return str((container.get("state", {}).get("waiting") or {}).get("message", "the container does not start"))
    return f"the container ended with exit code {ended.get('exitCode')} {ended.get('reason', '')}".strip()
