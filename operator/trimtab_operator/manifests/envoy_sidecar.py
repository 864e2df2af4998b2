"""Envoy sidecar of each router; it starts before and ends after the router, so that clients see no gap."""

import json
from pathlib import Path

from trimtab_kubernetes.objects import Object
from trimtab_operator.manifests.pod_spec import resources, security_of_container
from trimtab_operator.settings import Settings
from trimtab_pipelines.kubernetes_names import ROUTER_GRPC_PORT, ROUTER_REST_PORT
from trimtab_pipelines.spec import InferencePipeline
from trimtab_router.envoy.bootstrap import bootstrap
from trimtab_router.envoy.certificates import discovery_files
from trimtab_router.envoy.process import command
from trimtab_router.envoy.sockets import SocketFolder, Sockets
from trimtab_router.limits import payload_bytes

NAME = "edge"
SETTINGS_FILE = "edge.json"
ENVOY_FILE = "envoy.json"
SOCKETS = "/run/trimtab"
TLS_FOLDER = "/etc/trimtab-tls"
JWKS_FOLDER = "/etc/trimtab-jwks"


def edge_files(pipeline: InferencePipeline, settings: Settings, folder: str) -> dict[str, str]:
    """Files of the router and Envoy by name; they are mounted at `folder`."""
    sockets = SocketFolder(
        Sockets(Path(SOCKETS)),
        host="0.0.0.0",  # noqa: S104
        rest_port=ROUTER_REST_PORT,
        grpc_port=ROUTER_GRPC_PORT,
        max_payload_bytes=payload_bytes(pipeline, settings.edge),
        folder=Path(folder),
        chats=pipeline.spec.chat_settings is not None,
    )
    tls = settings.edge.tls
    certificates = {} if tls is None else {name: json.dumps(content) for name, content in discovery_files(tls).items()}
    config = bootstrap(settings.edge, sockets, pipeline=pipeline.name, otlp=settings.otlp_collector)
    return {
        SETTINGS_FILE: settings.edge.model_dump_json(by_alias=True, exclude_none=True),
        ENVOY_FILE: json.dumps(config),
        **certificates,
    }


def edge_container(settings: Settings, folder: str) -> Object:
    """The container; `folder` holds its files."""
    mounts = [
        {"name": "config", "mountPath": folder, "readOnly": True},
        {"name": "sockets", "mountPath": SOCKETS},
    ]
    if settings.edge_tls_secret:
        mounts.append({"name": "tls", "mountPath": TLS_FOLDER, "readOnly": True})
    return {
        "name": NAME,
        "image": settings.edge_image or settings.control_image,
        "imagePullPolicy": settings.image_pull_policy,
        "restartPolicy": "Always",
        "command": command("envoy", "--config-path", f"{folder}/{ENVOY_FILE}"),
        "ports": [
            {"name": "rest", "containerPort": ROUTER_REST_PORT, "protocol": "TCP"},
            {"name": "grpc", "containerPort": ROUTER_GRPC_PORT, "protocol": "TCP"},
        ],
        "resources": resources(settings.edge_cores, settings.edge.memory),
        "securityContext": security_of_container(),
        "readinessProbe": {
            "tcpSocket": {"port": "rest"},
            "periodSeconds": 2,
            "timeoutSeconds": 5,
            "failureThreshold": 2,
        },
        "volumeMounts": mounts,
    }


def edge_volumes(settings: Settings) -> list[Object]:
    """Volumes for sockets and certificates."""
    volumes: list[Object] = [{"name": "sockets", "emptyDir": {"medium": "Memory", "sizeLimit": "1Mi"}}]
    if settings.edge_tls_secret:
        volumes.append({"name": "tls", "secret": {"secretName": settings.edge_tls_secret}})
    if settings.edge_jwks_config_map:
        volumes.append({"name": "jwks", "configMap": {"name": settings.edge_jwks_config_map}})
    return volumes
