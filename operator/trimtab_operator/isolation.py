"""Who may connect to a pipeline's pods: clients reach the routers, only the routers reach model servers. Pure."""

from trimtab_operator.objects import MODEL_SERVER, PROFILER, ROUTER, Object, labels, owned
from trimtab_operator.replica_sets import data_port
from trimtab_pipelines.cluster import (
    COMPONENT,
    DATA_PORT,
    MLSERVER_GRPC_PORT,
    MLSERVER_HTTP_PORT,
    PIPELINE_LABEL,
    ROUTER_GRPC_PORT,
    ROUTER_REST_PORT,
    router_name,
)
from trimtab_pipelines.hosting import hosting_groups
from trimtab_pipelines.spec import InferencePipeline


def network_policies(pipeline: InferencePipeline) -> list[Object]:
    """Return both policies. A pod that any policy names takes nothing but what a policy lets in."""
    name = router_name(pipeline.name)
    own = {PIPELINE_LABEL: pipeline.name}
    routers = {"matchLabels": {**own, COMPONENT: ROUTER}}
    others = {
        "matchLabels": own,
        "matchExpressions": [{"key": COMPONENT, "operator": "In", "values": [MODEL_SERVER, PROFILER]}],
    }
    served = {data_port(group) for stage in pipeline.spec.stages for group in hosting_groups(stage)}
    return [
        _ingress(name, pipeline, ROUTER, routers, {"ports": _ports(ROUTER_REST_PORT, ROUTER_GRPC_PORT)}),
        _ingress(
            f"{name}-only",
            pipeline,
            MODEL_SERVER,
            others,
            {
                "from": [{"podSelector": routers}],
                "ports": _ports(*sorted({DATA_PORT, MLSERVER_HTTP_PORT, MLSERVER_GRPC_PORT} | served)),
            },
        ),
    ]


def _ingress(name: str, pipeline: InferencePipeline, component: str, pods: Object, rule: Object) -> Object:
    spec = {"podSelector": pods, "policyTypes": ["Ingress"], "ingress": [rule]}
    return owned("NetworkPolicy", name, pipeline, labels(pipeline, component), spec=spec)


def _ports(*numbers: int) -> list[Object]:
    return [{"port": number, "protocol": "TCP"} for number in numbers]
