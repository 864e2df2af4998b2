"""Router pods of a pipeline and their configuration.

They restart if their configuration changes, but not for a new plan, which they watch.
"""

import json
from collections.abc import Iterable, Mapping
from pathlib import Path

from trimtab_kubernetes.objects import Object, fingerprint
from trimtab_operator.manifests.mutual_tls import identity_mounts, identity_volumes, tls_sidecar_files
from trimtab_operator.manifests.objects import ROUTER, owned, pipeline_labels, uid_of
from trimtab_operator.manifests.pod_spec import (
    ZONE,
    deployment_spec,
    environment_variables,
    image_pull_secrets,
    pod,
    probe,
    resources,
    scratch,
    security_of_container,
    security_of_pod,
    spread,
    termination_grace,
)
from trimtab_operator.manifests.replica_groups import disruption_budget
from trimtab_operator.settings import Settings
from trimtab_pipelines.documents import dump_yaml
from trimtab_pipelines.kubernetes_names import (
    ADMIN_KEYS_SECRET,
    ADMIN_PORT_NAME,
    COMPONENT,
    GROUP,
    PIPELINE_LABEL,
    PROFILE_ANNOTATION,
    ROUTER_ADMIN_PORT,
    ROUTER_GRPC_PORT,
    ROUTER_REST_PORT,
    STAGE_LABEL,
    router_admin_name,
    router_name,
    tasks_name,
)
from trimtab_pipelines.plan import PipelinePlan
from trimtab_pipelines.router_state import LIVE_PATH, READY_PATH
from trimtab_pipelines.spec import InferencePipeline
from trimtab_pipelines.synthetic_inputs import INPUT_ANNOTATIONS
from trimtab_router.envoy.bootstrap import bootstrap
from trimtab_router.envoy.certificates import discovery_files
from trimtab_router.envoy.process import command
from trimtab_router.envoy.sockets import SocketFolder, Sockets
from trimtab_router.limits import payload_bytes

ROUTER_ROLE = "trimtab-router"
FOLDER = "/etc/trimtab"
PIPELINE_FILE = "pipeline.yaml"
PLAN_FILE = "plan.json"
PIPELINE_HASH = f"{GROUP}/pipeline-hash"
_UNUSED_FIELDS = {
    *("mode", "objective", "budget", "flavors", "adaptation", "router", "rollout", "deployer", "service_account_name")
}
"""Pipeline fields that routers do not use; changes do not restart them."""
_CLIENT_PORTS = (("rest", ROUTER_REST_PORT), ("grpc", ROUTER_GRPC_PORT))
EDGE = "edge"
SETTINGS_FILE = "edge.json"
ENVOY_FILE = "envoy.json"
SOCKETS = "/run/trimtab"
TLS_FOLDER = "/etc/trimtab-tls"
JWKS_FOLDER = "/etc/trimtab-jwks"
ADMIN_KEYS_FOLDER = "/etc/trimtab-admin-keys"


def edge_files(pipeline: InferencePipeline, settings: Settings) -> dict[str, str]:
    """Files of the router and Envoy by name; they are mounted at `FOLDER`."""
    sockets = SocketFolder(
        Sockets(Path(SOCKETS)),
        host="0.0.0.0",  # noqa: S104
        rest_port=ROUTER_REST_PORT,
        grpc_port=ROUTER_GRPC_PORT,
        max_payload_bytes=payload_bytes(pipeline, settings.edge),
        folder=Path(FOLDER),
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


def edge_container(settings: Settings) -> Object:
    """Envoy; it starts before and ends after the router, so that clients see no gap."""
    mounts = [{"name": "config", "mountPath": FOLDER, "readOnly": True}, {"name": "sockets", "mountPath": SOCKETS}]
    if settings.edge_tls_secret:
        mounts.append({"name": "tls", "mountPath": TLS_FOLDER, "readOnly": True})
    return {
        "name": EDGE,
        "image": settings.edge_image or settings.control_image,
        "imagePullPolicy": settings.image_pull_policy,
        "restartPolicy": "Always",
        "command": command("envoy", "--config-path", f"{FOLDER}/{ENVOY_FILE}"),
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
    volumes: list[Object] = [{"name": "sockets", "emptyDir": {"medium": "Memory", "sizeLimit": "1Mi"}}]
    if settings.edge_tls_secret:
        volumes.append({"name": "tls", "secret": {"secretName": settings.edge_tls_secret}})
    if settings.edge_jwks_config_map:
        volumes.append({"name": "jwks", "configMap": {"name": settings.edge_jwks_config_map}})
    return volumes


def router_objects(
    pipeline: InferencePipeline,
    plan: PipelinePlan | None,
    settings: Settings,
    *,
    pod_monitor: bool,
    successors: int = 0,
) -> list[Object]:
    """Objects of the routers; `successors` are more routers than planned, for those that are about to go."""
    name, labels = router_name(pipeline.name), pipeline_labels(pipeline, ROUTER)
    selector = _selector(pipeline)
    admin_name, admin = router_admin_name(pipeline.name), [(ADMIN_PORT_NAME, ROUTER_ADMIN_PORT)]
    monitor = {
        "selector": {"matchLabels": selector},
        "podMetricsEndpoints": [{"port": ADMIN_PORT_NAME, "path": "/metrics", "interval": "5s"}],
    }
    return [
        owned("ServiceAccount", name, pipeline, labels, automountServiceAccountToken=False),
        role_binding(name, {"kind": settings.role_kind, "name": ROUTER_ROLE}, pipeline, labels),
        config_map(pipeline, plan, settings),
        *task_objects(pipeline, labels),
        owned("Service", name, pipeline, labels, spec={"selector": selector, "ports": _ports(_CLIENT_PORTS)}),
        owned("Service", admin_name, pipeline, labels, spec={"selector": selector, "ports": _ports(admin)}),
        _deployment(pipeline, planned_routers(pipeline, plan) + successors, settings),
        disruption_budget(name, pipeline, labels, selector),
        *([owned("PodMonitor", name, pipeline, labels, spec=monitor)] if pod_monitor else []),
    ]


def planned_routers(pipeline: InferencePipeline, plan: PipelinePlan | None) -> int:
    return pipeline.spec.router.clamp(1 if plan is None else plan.spec.routers)


def config_map(pipeline: InferencePipeline, plan: PipelinePlan | None, settings: Settings) -> Object:
    """Configuration of a router and its proxy: the pipeline, the last applied plan, and Envoy's files."""
    data = {PIPELINE_FILE: dump_yaml(router_pipeline(pipeline)), **edge_files(pipeline, settings)}
    data |= tls_sidecar_files(pipeline, settings)
    if plan is not None:
        data[PLAN_FILE] = json.dumps(plan_document(plan), indent=1)
    return owned("ConfigMap", router_name(pipeline.name), pipeline, pipeline_labels(pipeline, ROUTER), data=data)


def plan_document(plan: PipelinePlan) -> Object:
    document = plan.model_dump(mode="json", by_alias=True, exclude_none=True)
    document["metadata"] = {"name": plan.metadata.name, "namespace": plan.metadata.namespace}
    return document


def router_pipeline(pipeline: InferencePipeline) -> InferencePipeline:
    """A pipeline without server-side metadata and prices, with the annotations that profiles depend on."""
    metadata = pipeline.metadata
    annotations = {
        key: value for key, value in metadata.annotations.items() if key in {PROFILE_ANNOTATION, *INPUT_ANNOTATIONS}
    }
    identity = {"name": metadata.name, "namespace": metadata.namespace, "annotations": annotations}
    document = pipeline.model_dump(exclude={"spec": {"flavors"}})
    return InferencePipeline.model_validate({**document, "metadata": identity})


def role_binding(
    account: str, role: Mapping[str, str], pipeline: InferencePipeline, labels: dict[str, str], name: str = ""
) -> Object:
    """Bind a role, given by kind and name, to a ServiceAccount in the pipeline's namespace."""
    return owned(
        "RoleBinding",
        name or account,
        pipeline,
        labels,
        roleRef={"apiGroup": "rbac.authorization.k8s.io", **role},
        subjects=[{"kind": "ServiceAccount", "name": account, "namespace": pipeline.metadata.namespace}],
    )


def task_objects(pipeline: InferencePipeline, labels: dict[str, str]) -> list[Object]:
    """ConfigMaps of the tasks registered at run time, whose content routers write, and their right to these only."""
    config_maps = [
        owned(
            "ConfigMap",
            tasks_name(pipeline.name, stage.name, variant.name),
            pipeline,
            labels | {STAGE_LABEL: stage.name},
        )
        for stage in pipeline.spec.stages
        for variant in stage.variants_with_tasks
    ]
    account = router_name(pipeline.name)
    role = f"{account}-tasks"
    rule = {"apiGroups": [""], "resources": ["configmaps"], "verbs": ["get", "list", "watch", "patch"]}
    rule["resourceNames"] = [each["metadata"]["name"] for each in config_maps]
    rights = [
        owned("Role", role, pipeline, labels, rules=[rule]),
        role_binding(account, {"kind": "Role", "name": role}, pipeline, labels, role),
    ]
    return [*config_maps, *rights] if config_maps else []


def _ports(ports: Iterable[tuple[str, int]]) -> list[Object]:
    return [{"name": name, "port": port, "targetPort": name, "protocol": "TCP"} for name, port in ports]


def _selector(pipeline: InferencePipeline) -> dict[str, str]:
    return {PIPELINE_LABEL: pipeline.name, COMPONENT: ROUTER}


def pipeline_hash(pipeline: InferencePipeline, settings: Settings) -> str:
    """Hash of a router's configuration; pods carry it as PIPELINE_HASH."""
    spec = pipeline.spec.model_dump(mode="json", exclude=_UNUSED_FIELDS)
    return fingerprint([spec, uid_of(pipeline), edge_files(pipeline, settings)])


def _deployment(pipeline: InferencePipeline, routers: int, settings: Settings) -> Object:
    name, labels = router_name(pipeline.name), pipeline_labels(pipeline, ROUTER)
    template = pod(
        labels,
        [_container(pipeline, settings)],
        initContainers=[edge_container(settings)],
        serviceAccountName=name,
        automountServiceAccountToken=True,
        securityContext=security_of_pod(),
        volumes=[
            *scratch("tmp"),
            {"name": "config", "configMap": {"name": name}},
            *edge_volumes(settings),
            *identity_volumes(settings),
            {"name": "admin-keys", "secret": {"secretName": ADMIN_KEYS_SECRET, "optional": True}},
        ],
        **spread(_selector(pipeline), ZONE, "kubernetes.io/hostname"),
        **image_pull_secrets(settings),
        **termination_grace(pipeline.spec.slo),
    )
    template["metadata"]["annotations"] = {PIPELINE_HASH: pipeline_hash(pipeline, settings)}
    return owned("Deployment", name, pipeline, labels, spec=deployment_spec(routers, _selector(pipeline), template))


def _container(pipeline: InferencePipeline, settings: Settings) -> Object:
    requested = pipeline.spec.router.resources
    arguments = {
        "--pipeline": f"{FOLDER}/{PIPELINE_FILE}",
        "--plan": f"{FOLDER}/{PLAN_FILE}",
        "--namespace": pipeline.metadata.namespace,
        "--host": "0.0.0.0",  # noqa: S104
        "--admin-port": str(ROUTER_ADMIN_PORT),
        "--sockets": SOCKETS,
        "--edge": f"{FOLDER}/{SETTINGS_FILE}",
        "--admin-keys": ADMIN_KEYS_FOLDER,
    }
    environment = {"HOME": "/tmp"}  # noqa: S108
    if settings.otlp_collector:
        environment["OTEL_EXPORTER_OTLP_ENDPOINT"] = f"http://{settings.otlp_collector}"
    mounts: list[Object] = [
        {"name": "config", "mountPath": FOLDER, "readOnly": True},
        {"name": "sockets", "mountPath": SOCKETS},
        {"name": "tmp", "mountPath": "/tmp"},  # noqa: S108
        {"name": "admin-keys", "mountPath": ADMIN_KEYS_FOLDER, "readOnly": True},
    ]
    if settings.edge_jwks_config_map:
        mounts.append({"name": "jwks", "mountPath": JWKS_FOLDER, "readOnly": True})
    mounts += identity_mounts(settings)
    return {
        "name": ROUTER,
        "image": settings.control_image,
        "imagePullPolicy": settings.image_pull_policy,
        "command": ["python", "-m", "trimtab_router"],
        "args": ["--cluster", *(part for pair in arguments.items() for part in pair)],
        "env": environment_variables(environment),
        "ports": [{"name": ADMIN_PORT_NAME, "containerPort": ROUTER_ADMIN_PORT, "protocol": "TCP"}],
        "resources": resources(requested.cpu, requested.memory),
        "securityContext": security_of_container(),
        "startupProbe": probe(LIVE_PATH, ADMIN_PORT_NAME, periodSeconds=1, timeoutSeconds=5, failureThreshold=120),
        "readinessProbe": probe(READY_PATH, ADMIN_PORT_NAME, periodSeconds=2, timeoutSeconds=5, failureThreshold=2),
        "livenessProbe": probe(LIVE_PATH, ADMIN_PORT_NAME, periodSeconds=10, timeoutSeconds=10, failureThreshold=6),
        "volumeMounts": mounts,
    }
