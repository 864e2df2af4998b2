"""What the operator is told by its environment: which images to run, where to look, who may run."""

import json
import os
from collections.abc import Mapping
from dataclasses import dataclass, field
from typing import Any, Self

from trimtab_pipelines.edge_settings import EdgeSettings
from trimtab_pipelines.quantity import parse_quantity


@dataclass(frozen=True, slots=True)
class Settings:
    """The operator's environment, read once."""

    control_image: str = "localhost/trimtab-control:dev"
    model_server_image: str = "localhost/trimtab-model-server:dev"
    image_pull_policy: str = "IfNotPresent"
    image_pull_secrets: tuple[str, ...] = ()
    role_kind: str = "ClusterRole"
    """Kind of the roles trimtab-router and trimtab-profiler: Role where the operator may not look everywhere."""
    node_cache: str = ""
    """Folder of each node that keeps weights for all pods; empty gives each pod a folder of its own."""
    limits_egress: bool = True
    """Whether network policies say whom pods of pipelines may call, too."""
    egress_blocked: tuple[str, ...] = ("169.254.0.0/16", "fd00:ec2::254/128", "fe80::/10")
    """Ranges of addresses that no pod of a pipeline may call: where clouds hand out credentials of the node."""
    api_server_ports: tuple[int, ...] = (443, 6443)
    extra_egress: tuple[dict[str, Any], ...] = ()
    """Further rules for all pods of pipelines, as a NetworkPolicy has them."""
    edge: EdgeSettings = field(default_factory=EdgeSettings)
    """Of the doors of all pipelines."""
    edge_image: str = ""
    """Another Envoy than the one in the control image."""
    edge_cores: float = 0.05
    edge_tls_secret: str = ""
    """The Secret of each pipeline's namespace that holds its door's certificate."""
    edge_replicas_secret: str = ""
    """The Secret of each pipeline's namespace that holds what its routers and replicas show each other."""
    edge_jwks_config_map: str = ""
    """The ConfigMap of each pipeline's namespace that holds token issuers' public keys."""
    otlp_collector: str | None = None
    """HOST:PORT of the collector that doors and routers send spans to."""
    admin_peers: tuple[dict[str, Any], ...] = ()
    """Who may read the routers' metrics and state beside the adapter, as a NetworkPolicy names peers."""
    namespaces: tuple[str, ...] = ()
    """Where to look for pipelines; empty means everywhere."""
    identity: str = "trimtab-operator"
    own_namespace: str = "default"
    health_port: int = 8080
    metrics_port: int = 9090

    @classmethod
    def from_environment(cls, environment: Mapping[str, str] = os.environ) -> Self:
        """Read the variables of the operator's container."""
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
            namespaces=_listed(environment.get("TRIMTAB_NAMESPACES", "")),
            identity=environment.get("POD_NAME") or f"{os.uname().nodename}-{os.getpid()}",
            own_namespace=environment.get("POD_NAMESPACE", default.own_namespace),
            health_port=int(environment.get("TRIMTAB_HEALTH_PORT", default.health_port)),
            metrics_port=int(environment.get("TRIMTAB_METRICS_PORT", default.metrics_port)),
        )


def _listed(written: str) -> tuple[str, ...]:
    return tuple(part.strip() for part in written.split(",") if part.strip())
