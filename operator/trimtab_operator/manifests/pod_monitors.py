"""Whom Prometheus scrapes beside the routers: replicas that take part in chats. Pure."""

from trimtab_kubernetes.objects import Object
from trimtab_operator.manifests.objects import MODEL_SERVER, owned, pipeline_labels
from trimtab_pipelines.kubernetes_names import COMPONENT, METRICS_PORT_NAME, PIPELINE_LABEL, STAGE_LABEL, router_name
from trimtab_pipelines.spec import InferencePipeline

INTERVAL = "5s"
_LABELS = {"pipeline": PIPELINE_LABEL, "stage": STAGE_LABEL}


def replica_monitors(pipeline: InferencePipeline) -> list[Object]:
    """The PodMonitor of a pipeline whose replicas chat; none of one where they do not.

    Replicas know their models only: whose they are stands on their pods, and becomes the pipeline_labels that routers give.
    """
    if not any(stage.serves_chats for stage in pipeline.spec.stages):
        return []
    named = [{"sourceLabels": ["__meta_kubernetes_namespace"], "targetLabel": "namespace"}]
    named += [{"sourceLabels": [_of_pod(label)], "targetLabel": name} for name, label in _LABELS.items()]
    endpoint = {"port": METRICS_PORT_NAME, "path": "/metrics", "interval": INTERVAL, "relabelings": named}
    selector = {"matchLabels": {PIPELINE_LABEL: pipeline.name, COMPONENT: MODEL_SERVER}}
    spec = {"selector": selector, "podMetricsEndpoints": [endpoint]}
    name = f"{router_name(pipeline.name)}-only"  # as the policy about the same pods
    return [owned("PodMonitor", name, pipeline, pipeline_labels(pipeline, MODEL_SERVER), spec=spec)]


def _of_pod(label: str) -> str:
    """A pod's label as Prometheus knows it before relabelling."""
    return "__meta_kubernetes_pod_label_" + "".join(c if c.isalnum() or c == "_" else "_" for c in label)
