"""Common metadata of created objects: name, labels and owner."""

from collections.abc import Mapping
from dataclasses import dataclass
from typing import Any

from trimtab_kubernetes import kind_of
from trimtab_kubernetes.objects import Object, owner_reference
from trimtab_pipelines.kubernetes_names import COMPONENT, GROUP, MANAGED_BY, OPERATOR_MANAGER, PIPELINE_LABEL
from trimtab_pipelines.spec import InferencePipeline

ROUTER = "router"
MODEL_SERVER = "model-server"
PROFILER = "profiler"
TEMPLATE_HASH = f"{GROUP}/template-hash"
"""On a replica group's Deployment and a Job: hash of the pod template last applied."""
SELECTOR = f"{MANAGED_BY}={OPERATOR_MANAGER}"
"""Selects all owned objects and their pods."""
OWN_KINDS = ("InferencePipeline", "PipelinePlan", "ModelProfile")
OWNED_KINDS = (
    "ConfigMap",
    "Deployment",
    "Job",
    "NetworkPolicy",
    "Pod",
    "PodDisruptionBudget",
    "Role",
    "RoleBinding",
    "Service",
    "ServiceAccount",
)
OPTIONAL_KINDS = ("PodMonitor", "SeldonDeployment")
"""Owned kinds that a cluster may lack."""


@dataclass(frozen=True, slots=True, order=True)
class Ref:
    """Reference to an object in a namespace."""

    kind: str
    name: str


def ref_of(found: Mapping[str, Any]) -> Ref:
    return Ref(found["kind"], found["metadata"]["name"])


def pipeline_labels(pipeline: InferencePipeline, component: str, **more: str) -> dict[str, str]:
    return {MANAGED_BY: OPERATOR_MANAGER, PIPELINE_LABEL: pipeline.name, COMPONENT: component, **more}


def owned(kind: str, name: str, pipeline: InferencePipeline, labels: Mapping[str, str], **body: Any) -> Object:
    """An object owned by the pipeline and garbage-collected with it, without a finalizer."""
    return {
        "apiVersion": kind_of(kind).api_version,
        "kind": kind,
        "metadata": {
            "name": name,
            "namespace": pipeline.metadata.namespace,
            "labels": dict(labels),
            "ownerReferences": [owner_reference(_identity(pipeline))],
        },
        **body,
    }


def _identity(pipeline: InferencePipeline) -> Object:
    metadata = {"name": pipeline.name, "uid": uid_of(pipeline)}
    return {"apiVersion": pipeline.api_version, "kind": pipeline.kind, "metadata": metadata}


def uid_of(pipeline: InferencePipeline) -> str:
    return str((pipeline.metadata.model_extra or {}).get("uid", ""))


def generation_of(pipeline: InferencePipeline) -> int:
    return int((pipeline.metadata.model_extra or {}).get("generation", 0))
