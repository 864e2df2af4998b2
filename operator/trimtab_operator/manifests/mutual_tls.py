"""Mutual TLS of a pipeline's routers and replicas: a Secret mounted in the pods of both.

Trimtab's model servers terminate TLS themselves; user-provided containers have an Envoy sidecar.
"""

import json
from pathlib import Path

from trimtab_kubernetes.objects import Object
from trimtab_operator.manifests.pod_spec import resources, security_of_container
from trimtab_operator.settings import Settings
from trimtab_pipelines.kubernetes_names import HEALTH_PORT, TLS_SIDECAR_PORT, router_name
from trimtab_pipelines.spec import InferencePipeline
from trimtab_pipelines.variants import Container
from trimtab_router.envoy.certificates import certificate_files, terminator_bootstrap
from trimtab_router.envoy.process import command

FOLDER = "/etc/trimtab-replicas"
TLS_SIDECAR = "tls-sidecar"
TLS_PORT_NAME = "data-tls"
_CONFIG_FOLDER = "/etc/trimtab-tls-sidecar"
_VOLUME, _CONFIG_VOLUME = "replicas-tls", "tls-sidecar"
_TLS_SIDECAR_MEMORY = 64 * 2**20


def identity_volumes(settings: Settings) -> list[Object]:
    secret = settings.edge_replicas_secret
    return [{"name": _VOLUME, "secret": {"secretName": secret}}] if secret else []


def identity_mounts(settings: Settings) -> list[Object]:
    secret = settings.edge_replicas_secret
    return [{"name": _VOLUME, "mountPath": FOLDER, "readOnly": True}] if secret else []


def identity_arguments(settings: Settings) -> list[str]:
    """Arguments of a model server; the kubelet, which has no client certificate, uses a separate health port."""
    identity = settings.edge.replicas
    if identity is None:
        return []
    return ["--identity", identity.model_dump_json(by_alias=True), "--health-port", str(HEALTH_PORT)]


def probed_port(settings: Settings, data_port: int) -> int:
    return data_port if settings.edge.replicas is None else HEALTH_PORT


def routed_port(container: Container, settings: Settings) -> int:
    """Port at which routers reach a user-provided container."""
    if settings.edge.replicas is None:
        return container.port
    return TLS_SIDECAR_PORT + (container.port == TLS_SIDECAR_PORT)


def tls_sidecar_files(pipeline: InferencePipeline, settings: Settings) -> dict[str, str]:
    """Files of the TLS sidecars by name, in the routers' ConfigMap."""
    identity = settings.edge.replicas
    if identity is None or not any(v.container for stage in pipeline.spec.stages for v in stage.variants):
        return {}
    return {_config_map_key(name): json.dumps(content) for name, content in certificate_files(identity).items()}


def tls_sidecar_containers(container: Container, settings: Settings) -> list[Object]:
    """The pod's `initContainers`: an Envoy that starts before the container and ends after it."""
    identity = settings.edge.replicas
    if identity is None:
        return []
    port = routed_port(container, settings)
    config = terminator_bootstrap(identity, port=port, served_port=container.port, folder=Path(_CONFIG_FOLDER))
    return [
        {
            "name": TLS_SIDECAR,
            "image": settings.edge_image or settings.control_image,
            "imagePullPolicy": settings.image_pull_policy,
            "restartPolicy": "Always",
            "command": command("envoy", "--config-yaml", json.dumps(config)),
            "ports": [{"name": TLS_PORT_NAME, "containerPort": port, "protocol": "TCP"}],
            "resources": resources(settings.edge_cores, _TLS_SIDECAR_MEMORY),
            "securityContext": security_of_container(),
            "readinessProbe": {"tcpSocket": {"port": TLS_PORT_NAME}, "periodSeconds": 2, "failureThreshold": 2},
            "volumeMounts": [
                *identity_mounts(settings),
                {"name": _CONFIG_VOLUME, "mountPath": _CONFIG_FOLDER, "readOnly": True},
            ],
        }
    ]


def tls_sidecar_volumes(pipeline: InferencePipeline, settings: Settings) -> list[Object]:
    identity = settings.edge.replicas
    if identity is None:
        return []
    items = [{"key": _config_map_key(name), "path": name} for name in certificate_files(identity)]
    return [
        *identity_volumes(settings),
        {"name": _CONFIG_VOLUME, "configMap": {"name": router_name(pipeline.name), "items": items}},
    ]


def _config_map_key(file: str) -> str:
    """Key in the ConfigMap, which also holds the proxy's files."""
    return f"tls-sidecar-{file}"
