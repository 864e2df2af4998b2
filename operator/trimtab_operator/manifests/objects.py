"""The frame of every object we write: its name, its pipeline_labels, its owner. Pure."""

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
"""On a hosting set and a Job: the hash of the pod template it was last given."""
SELECTOR = f"{MANAGED_BY}={OPERATOR_MANAGER}"
"""Selects all that we own, and the pods of what we own."""


@dataclass(frozen=True, slots=True, order=True)
class Ref:
    """An object of one namespace."""

    kind: str
    name: str


def ref_of(found: Mapping[str, Any]) -> Ref:
    """What an object is called."""
    return Ref(found["kind"], found["metadata"]["name"])


def pipeline_labels(pipeline: InferencePipeline, component: str, **more: str) -> dict[str, str]:
    """The pipeline_labels every object and pod of a pipeline carries."""
    return {MANAGED_BY: OPERATOR_MANAGER, PIPELINE_LABEL: pipeline.name, COMPONENT: component, **more}


def owned(kind: str, name: str, pipeline: InferencePipeline, marks: Mapping[str, str], **body: Any) -> Object:
    """An object that goes when the pipeline goes: no finalizer is needed for that, and none can get stuck."""
    return {
        "apiVersion": kind_of(kind).api_version,
        "kind": kind,
        "metadata": {
            "name": name,
            "namespace": pipeline.metadata.namespace,
            "labels": dict(marks),
            "ownerReferences": [owner_reference(_identity(pipeline))],
        },
        **body,
    }


def _identity(pipeline: InferencePipeline) -> Object:
    metadata = {"name": pipeline.name, "uid": uid_of(pipeline)}
    return {"apiVersion": pipeline.api_version, "kind": pipeline.kind, "metadata": metadata}


def uid_of(pipeline: InferencePipeline) -> str:
    """The uid the cluster gave the pipeline."""
    return str((pipeline.metadata.model_extra or {}).get("uid", ""))


def generation_of(pipeline: InferencePipeline) -> int:
    """The generation the cluster counts for the pipeline's spec."""
    return int((pipeline.metadata.model_extra or {}).get("generation", 0))
