"""PodMonitor of replicas that serve chats."""

from trimtab_kubernetes.objects import Object
from trimtab_operator.manifests.objects import MODEL_SERVER, owned, pipeline_labels
from trimtab_pipelines.kubernetes_names import COMPONENT, METRICS_PORT_NAME, PIPELINE_LABEL, STAGE_LABEL, router_name
from trimtab_pipelines.spec import InferencePipeline

INTERVAL = "5s"
_LABELS = {"pipeline": PIPELINE_LABEL, "stage": STAGE_LABEL}


def replica_monitors(pipeline: InferencePipeline) -> list[Object]:
    """The PodMonitor of a pipeline's replicas; none if they do not serve chats.

    Replicas report model names only; pipeline and stage are added from pod labels, as in the router's metrics.
    """
    if not any(stage.serves_chats for stage in pipeline.spec.stages):
        return []
    named = [{"sourceLabels": ["__meta_kubernetes_namespace"], "targetLabel": "namespace"}]
    named += [{"sourceLabels": [_of_pod(label)], "targetLabel": name} for name, label in _LABELS.items()]
    endpoint = {"port": METRICS_PORT_NAME, "path": "/metrics", "interval": INTERVAL, "relabelings": named}
    selector = {"matchLabels": {PIPELINE_LABEL: pipeline.name, COMPONENT: MODEL_SERVER}}
    spec = {"selector": selector, "podMetricsEndpoints": [endpoint]}
    name = f"{router_name(pipeline.name)}-only"  # as the NetworkPolicy of the same pods
    return [owned("PodMonitor", name, pipeline, pipeline_labels(pipeline, MODEL_SERVER), spec=spec)]


def _of_pod(label: str) -> str:
    """Prometheus label of a pod label before relabelling."""
    return "__meta_kubernetes_pod_label_" + "".join(c if c.isalnum() or c == "_" else "_" for c in label)
