"""Observed state of one pipeline."""

from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field
from typing import Any

from trimtab_kubernetes.objects import Object
from trimtab_operator.manifests.objects import MODEL_SERVER, Ref
from trimtab_operator.manifests.pod_spec import GPU_RESOURCE
from trimtab_operator.reconciliation.pod_state import PodState
from trimtab_operator.reconciliation.write_errors import RejectedWrite
from trimtab_pipelines.kubernetes_names import REPLICA_GROUP_LABEL, STAGE_LABEL, VARIANT_LABEL_PREFIX
from trimtab_pipelines.quantity import parse_quantity
from trimtab_pipelines.rollout import Capacity, ReplicaGroupState


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
    """Variants of a replica group, from its labels."""
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
        terminating=len(pods_of_group) - len(present),
        surging=_surges(found) and (changing or rolling(found)),
    )


def desired_replicas(found: Object) -> int:
    """Replicas in the spec of a replica group."""
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
    """Pod spec of a Deployment or SeldonDeployment."""
    if found["kind"] == "SeldonDeployment":
        spec: Mapping[str, Any] = found["spec"]["predictors"][0]["componentSpecs"][0]["spec"]
    else:
        spec = found["spec"]["template"]["spec"]
    return spec


def _replica_capacity(found: Object) -> Capacity:
    requests = pod_spec(found)["containers"][0].get("resources", {}).get("requests", {})
    return Capacity(parse_quantity(requests.get("cpu", 0)), int(requests.get(GPU_RESOURCE, 0)))
