"""NetworkPolicies of a pipeline's pods.

Clients connect to routers, and only routers to model servers; if an encoder stage exists, model servers also connect to
each other. Metrics readers of routers may also read those of replicas that serve chats, at a separate port. Routers
connect to model servers and the API server. Model servers connect to nothing else, unless weights are remote or a
container is user-provided; then to any address except cloud metadata services. If chats may reference images by URL,
routers connect to their ports with the same exception. DNS is always allowed.
"""

from urllib.parse import urlsplit

from trimtab_kubernetes.objects import Object
from trimtab_operator.manifests.objects import MODEL_SERVER, PROFILER, ROUTER, owned, pipeline_labels
from trimtab_operator.manifests.replica_groups import DATA_PORT_NAME, data_port
from trimtab_operator.settings import Settings
from trimtab_pipelines.kubernetes_names import (
    COMPONENT,
    DATA_PORT,
    METRICS_PORT_NAME,
    PIPELINE_LABEL,
    ROUTER_ADMIN_PORT,
    ROUTER_GRPC_PORT,
    ROUTER_REST_PORT,
    profiler_name,
    router_name,
)
from trimtab_pipelines.replica_groups import replica_groups
from trimtab_pipelines.spec import InferencePipeline
from trimtab_pipelines.variants import Variant

DNS_RULE: Object = {"ports": [{"port": 53, "protocol": protocol} for protocol in ("UDP", "TCP")]}
ALL_ADDRESSES = {4: "0.0.0.0/0", 6: "::/0"}


def network_policies(pipeline: InferencePipeline, settings: Settings) -> list[Object]:
    """The policies. A pod selected by any of them has only the allowed connections."""
    name = router_name(pipeline.name)
    routers = _pods(pipeline, ROUTER)
    server_ingress, server_egress = _model_server_ports(pipeline, settings)
    api_server = {"ports": _ports(*settings.api_server_ports)}
    images = _image_egress(pipeline, settings)
    variants = (variant for stage in pipeline.spec.stages for variant in stage.variants)
    external = [_external_egress(settings)] if any(map(_needs_egress, variants)) else []
    servers = _pods(pipeline, MODEL_SERVER)
    pulls_embeddings = any(stage.encodes for stage in pipeline.spec.stages)
    peers = [{"to": [{"podSelector": servers}], **server_egress}] if pulls_embeddings else []
    clients = [{"podSelector": pods} for pods in ([routers, servers] if pulls_embeddings else [routers])]
    return [
        _policy(
            (name, pipeline, ROUTER),
            routers,
            [{"ports": _ports(*ROUTER_PORTS)}, _admin_ingress(settings)],
            _egress(settings, {"to": [{"podSelector": servers}], **server_egress}, api_server, *images),
        ),
        _policy(
            (f"{name}-only", pipeline, MODEL_SERVER),
            _pods(pipeline, MODEL_SERVER, PROFILER),
            [{"from": clients, **server_ingress}, *_metrics_ingress(pipeline, settings)],
            _egress(settings, *peers, *external),
        ),
        _policy(
            (profiler_name(pipeline.name), pipeline, PROFILER),
            _pods(pipeline, PROFILER),
            [],
            _egress(settings, api_server),
        ),
    ]


ROUTER_PORTS = (ROUTER_REST_PORT, ROUTER_GRPC_PORT)
"""Ports of a router that are open to clients."""


def _model_server_ports(pipeline: InferencePipeline, settings: Settings) -> tuple[Object, Object]:
    """Ports of model servers, as ingress rule of model servers and as egress rule of routers.

    Ingress rules name the port, since pods of older templates may use another number. Egress rules allow any port,
    limited by the ingress rules, because Cilium resolves a name to one number for all pods. TLS sidecars are referred
    to by number, since Calico before 3.29 does not resolve port names of init containers.
    """
    if settings.edge.replicas is None:
        return {"ports": [{"port": DATA_PORT_NAME, "protocol": "TCP"}]}, {}
    served = {data_port(group, settings) for stage in pipeline.spec.stages for group in replica_groups(stage)}
    ports = {"ports": _ports(*sorted({DATA_PORT} | served))}
    return ports, ports


def _policy(
    identity: tuple[str, InferencePipeline, str], pods: Object, ingress: list[Object], egress: list[Object] | None
) -> Object:
    name, pipeline, component = identity
    directions = ["Ingress"] if egress is None else ["Ingress", "Egress"]
    spec: Object = {"podSelector": pods, "policyTypes": directions, "ingress": ingress}
    if egress is not None:
        spec["egress"] = egress
    return owned("NetworkPolicy", name, pipeline, pipeline_labels(pipeline, component), spec=spec)


def _admin_ingress(settings: Settings) -> Object:
    """Admin port: the adapter and configured peers; the node's kubelet always has access."""
    release = {"matchLabels": {"kubernetes.io/metadata.name": settings.own_namespace}}
    adapter = {"namespaceSelector": release, "podSelector": {"matchLabels": {COMPONENT: "adapter"}}}
    return {"from": [adapter, *settings.admin_peers], "ports": _ports(ROUTER_ADMIN_PORT)}


def _metrics_ingress(pipeline: InferencePipeline, settings: Settings) -> list[Object]:
    """Metrics port of replicas that serve chats: configured peers only."""
    enabled = settings.admin_peers and any(stage.serves_chats for stage in pipeline.spec.stages)
    ports = [{"port": METRICS_PORT_NAME, "protocol": "TCP"}]
    return [{"from": [*settings.admin_peers], "ports": ports}] if enabled else []


def _egress(settings: Settings, *rules: Object) -> list[Object] | None:
    return [DNS_RULE, *rules, *settings.extra_egress] if settings.limits_egress else None


def _pods(pipeline: InferencePipeline, *components: str) -> Object:
    own = {PIPELINE_LABEL: pipeline.name}
    if len(components) == 1:
        return {"matchLabels": {**own, COMPONENT: components[0]}}
    named = {"key": COMPONENT, "operator": "In", "values": list(components)}
    return {"matchLabels": own, "matchExpressions": [named]}


def _needs_egress(variant: Variant) -> bool:
    """Whether replicas connect to other services: for weights and tasks, or unknown ones."""
    return variant.container is not None or any(urlsplit(uri).scheme in {"s3", "hf"} for uri in variant.storage_uris)


def _image_egress(pipeline: InferencePipeline, settings: Settings) -> list[Object]:
    """Allow fetching of images by URL, if the pipeline lists sources."""
    ports = pipeline.spec.chat_settings.images.ports if pipeline.spec.chat_settings is not None else frozenset()
    return [{**_external_egress(settings), "ports": _ports(*sorted(ports))}] if ports else []


def _external_egress(settings: Settings) -> Object:
    """Allow in-cluster services and external addresses, except blocked ranges."""
    blocks = []
    for version, everywhere in ALL_ADDRESSES.items():
        blocked = [cidr for cidr in settings.egress_blocked if (":" in cidr) == (version == 6)]
        blocks.append({"ipBlock": {"cidr": everywhere, **({"except": blocked} if blocked else {})}})
    return {"to": [{"namespaceSelector": {}}, *blocks]}


def _ports(*numbers: int) -> list[Object]:
    return [{"port": number, "protocol": "TCP"} for number in numbers]
