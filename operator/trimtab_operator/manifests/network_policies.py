"""Who may connect to a pipeline's pods, and whom these may call. Pure.

Clients reach the routers, only the routers reach model servers, and where one stage pulls what another encoded, these
reach each other; who may read routers' metrics reads those of replicas that chat, at a port of their own. Routers call
their model servers and the API server; model servers call nobody else, unless weights come from elsewhere or a
container is the user's own: then anybody but the addresses at which clouds hand out the node's own credentials. Where
chats may show images by their addresses, routers call these at their ports, with the same exception. Names may always
be looked up.
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
    """The policies. A pod that any of them names takes and calls nothing but what one of them lets it."""
    name = router_name(pipeline.name)
    routers = _pods(pipeline, ROUTER)
    served, called = _model_server_ports(pipeline, settings)
    api_server = {"ports": _ports(*settings.api_server_ports)}
    shown = _image_egress(pipeline, settings)
    elsewhere = [_external_egress(settings)] if any(_needs_egress(variant) for variant in _variants(pipeline)) else []
    servers = _pods(pipeline, MODEL_SERVER)
    pulled = any(stage.encodes for stage in pipeline.spec.stages)
    others = [{"to": [{"podSelector": servers}], **called}] if pulled else []
    callers = [{"podSelector": each} for each in ([routers, servers] if pulled else [routers])]
    return [
        _policy(
            (name, pipeline, ROUTER),
            routers,
            [{"ports": _ports(*ROUTER_PORTS)}, _admin_ingress(settings)],
            _egress(settings, {"to": [{"podSelector": servers}], **called}, api_server, *shown),
        ),
        _policy(
            (f"{name}-only", pipeline, MODEL_SERVER),
            _pods(pipeline, MODEL_SERVER, PROFILER),
            [{"from": callers, **served}, *_metrics_ingress(pipeline, settings)],
            _egress(settings, *others, *elsewhere),
        ),
        _policy(
            (profiler_name(pipeline.name), pipeline, PROFILER),
            _pods(pipeline, PROFILER),
            [],
            _egress(settings, api_server),
        ),
    ]


ROUTER_PORTS = (ROUTER_REST_PORT, ROUTER_GRPC_PORT)
"""Where anybody may connect to a router."""


def _model_server_ports(pipeline: InferencePipeline, settings: Settings) -> tuple[Object, Object]:
    """The ports at which model servers are reached, for those that take calls, and for those that make them.

    The first go by their name: pods of before serve at the number they have. The second go to any port, of which the
    first let only those be reached: for calls Cilium takes a name as one number, the same for all pods that have it.
    Guards go by their number: they are init containers, whose names Calico before 3.29 does not look up.
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
    """Let the adapter read load and state, and who is named beside it; the kubelet of the node always may."""
    release = {"matchLabels": {"kubernetes.io/metadata.name": settings.own_namespace}}
    adapter = {"namespaceSelector": release, "podSelector": {"matchLabels": {COMPONENT: "adapter"}}}
    return {"from": [adapter, *settings.admin_peers], "ports": _ports(ROUTER_ADMIN_PORT)}


def _metrics_ingress(pipeline: InferencePipeline, settings: Settings) -> list[Object]:
    """Let whoever may read a router's metrics read those of replicas that chat; without peers nobody, not everybody."""
    told = settings.admin_peers and any(stage.serves_chats for stage in pipeline.spec.stages)
    ports = [{"port": METRICS_PORT_NAME, "protocol": "TCP"}]
    return [{"from": [*settings.admin_peers], "ports": ports}] if told else []


def _egress(settings: Settings, *rules: Object) -> list[Object] | None:
    return [DNS_RULE, *rules, *settings.extra_egress] if settings.limits_egress else None


def _pods(pipeline: InferencePipeline, *components: str) -> Object:
    own = {PIPELINE_LABEL: pipeline.name}
    if len(components) == 1:
        return {"matchLabels": {**own, COMPONENT: components[0]}}
    named = {"key": COMPONENT, "operator": "In", "values": list(components)}
    return {"matchLabels": own, "matchExpressions": [named]}


def _variants(pipeline: InferencePipeline) -> list[Variant]:
    return [variant for stage in pipeline.spec.stages for variant in stage.variants]


def _needs_egress(variant: Variant) -> bool:
    """Whether its replicas call others: for weights and tasks, or for who knows what."""
    return variant.container is not None or any(urlsplit(each).scheme in {"s3", "hf"} for each in variant.storage_uris)


def _image_egress(pipeline: InferencePipeline, settings: Settings) -> list[Object]:
    """Let images be fetched that chats show by their addresses, where the pipeline lists from where."""
    ports = pipeline.spec.chat_settings.images.ports if pipeline.spec.chat_settings is not None else frozenset()
    return [{**_external_egress(settings), "ports": _ports(*sorted(ports))}] if ports else []


def _external_egress(settings: Settings) -> Object:
    """Let in-cluster stores and the world be called; addresses of a blocked range are neither."""
    blocks = []
    for version, everywhere in ALL_ADDRESSES.items():
        kept_from = [cidr for cidr in settings.egress_blocked if (":" in cidr) == (version == 6)]
        blocks.append({"ipBlock": {"cidr": everywhere, **({"except": kept_from} if kept_from else {})}})
    return {"to": [{"namespaceSelector": {}}, *blocks]}


def _ports(*numbers: int) -> list[Object]:
    return [{"port": number, "protocol": "TCP"} for number in numbers]
