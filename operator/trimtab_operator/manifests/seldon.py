"""Replica group as a SeldonDeployment, for clusters with Seldon Core 1.

Uses documented fields only. Seldon creates a Deployment for each component, here without its orchestrator; routers find
the pods by their labels.
"""

from trimtab_kubernetes.objects import Object, fingerprint
from trimtab_operator.manifests.objects import TEMPLATE_HASH, owned
from trimtab_operator.manifests.replica_groups import group_labels, template, variant_labels
from trimtab_operator.settings import Settings
from trimtab_pipelines.kubernetes_names import replica_group_name
from trimtab_pipelines.replica_groups import ReplicaGroup
from trimtab_pipelines.spec import InferencePipeline
from trimtab_pipelines.stages import Stage


def seldon_deployment(
    pipeline: InferencePipeline, stage: Stage, group: ReplicaGroup, settings: Settings, *, replicas: int
) -> Object:
    """A SeldonDeployment with one predictor, a single model with the V2 protocol."""
    labels = group_labels(pipeline, stage, group) | variant_labels(group)
    name = replica_group_name(pipeline.name, stage.name, group.name)
    pods = template(pipeline, stage, group, settings)
    container = pods["spec"]["containers"][0]
    predictor = {
        "name": "default",
        "annotations": {"seldon.io/no-engine": "true"},
        "graph": {"name": container["name"], "type": "MODEL", "children": []},
        "componentSpecs": [{"metadata": pods["metadata"], "spec": pods["spec"]}],
        "labels": labels,
    }
    written = owned(
        "SeldonDeployment",
        name,
        pipeline,
        labels,
        spec={"protocol": "v2", "replicas": replicas, "predictors": [predictor]},
    )
    written["metadata"]["annotations"] = {TEMPLATE_HASH: fingerprint(pods)}
    return written
