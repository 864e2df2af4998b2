"""Settings of the operator, from its environment variables."""

import json
import os
from collections.abc import Mapping
from dataclasses import dataclass, field
from typing import Any, Self

from trimtab_pipelines.documents import parse_flavors
from trimtab_pipelines.edge_settings import EdgeSettings
from trimtab_pipelines.flavors import ResourceFlavor
from trimtab_pipelines.kubernetes_names import FLAVORS_VARIABLE
from trimtab_pipelines.quantity import parse_quantity


@dataclass(frozen=True, slots=True)
class Settings:
    """Settings of the operator."""

    control_image: str = "localhost/trimtab-control:dev"
    model_server_image: str = "localhost/trimtab-model-server:dev"
    image_pull_policy: str = "IfNotPresent"
    image_pull_secrets: tuple[str, ...] = ()
    role_kind: str = "ClusterRole"
    """Kind of the roles trimtab-router and trimtab-profiler: Role if the operator is limited to namespaces."""
    node_cache: str = ""
    """Node folder in which all pods cache weights; if empty each pod has its own."""
    limits_egress: bool = True
    """Whether network policies limit the egress of pipeline pods."""
    egress_blocked: tuple[str, ...] = ("169.254.0.0/16", "fd00:ec2::254/128", "fe80::/10")
    """Address ranges that no pipeline pod may connect to, such as the metadata services of clouds."""
    api_server_ports: tuple[int, ...] = (443, 6443)
    extra_egress: tuple[dict[str, Any], ...] = ()
    """Additional egress rules of all pipeline pods, as in a NetworkPolicy."""
    edge: EdgeSettings = field(default_factory=EdgeSettings)
    """Edge settings of all pipelines."""
    edge_image: str = ""
    """Envoy image, if not the control image's."""
    edge_cores: float = 0.05
    edge_tls_secret: str = ""
    """Secret with the proxy's certificate, in each pipeline's namespace."""
    edge_replicas_secret: str = ""
    """Secret with the certificate of routers and replicas, in each pipeline's namespace."""
    edge_jwks_config_map: str = ""
    """ConfigMap with the public keys of JWT issuers, in each pipeline's namespace."""
    otlp_collector: str | None = None
    """HOST:PORT of the collector that proxies and routers export spans to."""
    admin_peers: tuple[dict[str, Any], ...] = ()
    """Peers that may read the routers' metrics and state in addition to the adapter, as in a NetworkPolicy."""
    flavors: tuple[ResourceFlavor, ...] = ()
    """Resource flavors of the cluster."""
    watches_nodes: bool = False
    """Whether replicas and routers on nodes that are about to go are replaced."""
    namespaces: tuple[str, ...] = ()
    """Namespaces of pipelines; all if empty."""
    identity: str = "trimtab-operator"
    own_namespace: str = "default"
    health_port: int = 8080
    metrics_port: int = 9090

    @classmethod
    def from_environment(cls, environment: Mapping[str, str] = os.environ) -> Self:
        default = cls()
        return cls(
            control_image=environment.get("TRIMTAB_CONTROL_IMAGE", default.control_image),
            model_server_image=environment.get("TRIMTAB_MODEL_SERVER_IMAGE", default.model_server_image),
            image_pull_policy=environment.get("TRIMTAB_IMAGE_PULL_POLICY", default.image_pull_policy),
            image_pull_secrets=_listed(environment.get("TRIMTAB_IMAGE_PULL_SECRETS", "")),
            role_kind=environment.get("TRIMTAB_ROLE_KIND", default.role_kind),
            node_cache=environment.get("TRIMTAB_NODE_CACHE", ""),
            limits_egress=environment.get("TRIMTAB_LIMIT_EGRESS", "true") == "true",
            egress_blocked=_listed(environment.get("TRIMTAB_EGRESS_BLOCKED", ",".join(default.egress_blocked))),
            api_server_ports=tuple(map(int, _listed(environment.get("TRIMTAB_API_SERVER_PORTS", "443,6443")))),
            extra_egress=tuple(json.loads(environment.get("TRIMTAB_EXTRA_EGRESS", "[]"))),
            edge=EdgeSettings.model_validate_json(environment.get("TRIMTAB_EDGE", "{}")),
            edge_image=environment.get("TRIMTAB_EDGE_IMAGE", ""),
            edge_cores=parse_quantity(environment.get("TRIMTAB_EDGE_CPU", default.edge_cores)),
            edge_tls_secret=environment.get("TRIMTAB_EDGE_TLS_SECRET", ""),
            edge_replicas_secret=environment.get("TRIMTAB_EDGE_REPLICAS_SECRET", ""),
            edge_jwks_config_map=environment.get("TRIMTAB_EDGE_JWKS_CONFIG_MAP", ""),
            otlp_collector=environment.get("TRIMTAB_OTLP_COLLECTOR") or None,
            admin_peers=tuple(json.loads(environment.get("TRIMTAB_ADMIN_PEERS", "[]"))),
            flavors=parse_flavors(environment.get(FLAVORS_VARIABLE, "[]")),
            watches_nodes=environment.get("TRIMTAB_WATCH_NODES") == "true",
            namespaces=_listed(environment.get("TRIMTAB_NAMESPACES", "")),
            identity=environment.get("POD_NAME") or f"{os.uname().nodename}-{os.getpid()}",
            own_namespace=environment.get("POD_NAMESPACE", default.own_namespace),
            health_port=int(environment.get("TRIMTAB_HEALTH_PORT", default.health_port)),
            metrics_port=int(environment.get("TRIMTAB_METRICS_PORT", default.metrics_port)),
        )


def _listed(written: str) -> tuple[str, ...]:
    return tuple(part.strip() for part in written.split(",") if part.strip())
