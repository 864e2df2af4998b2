"""The pods that take a pipeline's requests, and what they start from. Pure.

They restart when what they read at the start changes, never for a plan: plans they follow by themselves.
"""

import json

from trimtab_operator.objects import ROUTER, Object, labels, owned, uid_of
from trimtab_operator.pods import (
    image_pull_secrets,
    pod,
    probe,
    resources,
    scratch,
    security_of_container,
    security_of_pod,
    variables,
)
from trimtab_operator.replica_sets import disruption_budget, fingerprint
from trimtab_operator.settings import Settings
from trimtab_pipelines.cluster import (
    COMPONENT,
    GROUP,
    PIPELINE_LABEL,
    PROFILE_ANNOTATION,
    ROUTER_GRPC_PORT,
    ROUTER_REST_PORT,
    router_name,
)
from trimtab_pipelines.documents import dump_yaml
from trimtab_pipelines.plan import PipelinePlan
from trimtab_pipelines.spec import InferencePipeline

ROUTER_ROLE = "trimtab-router"
FOLDER = "/etc/trimtab"
PIPELINE_FILE = "pipeline.yaml"
PLAN_FILE = "plan.json"
PIPELINE_HASH = f"{GROUP}/pipeline-hash"
_UNREAD = {"mode", "objective", "budget", "adaptation", "router", "rollout", "deployer", "service_account_name"}
"""Fields of a pipeline that a router has no use for: a change of one restarts nothing."""
_MEBIBYTE = 2**20


def router_objects(
    pipeline: InferencePipeline, plan: PipelinePlan | None, settings: Settings, *, pod_monitor: bool
) -> list[Object]:
    """Return all objects of a pipeline's router."""
    name, marks = router_name(pipeline.name), labels(pipeline, ROUTER)
    selector = _selector(pipeline)
    ports = [("rest", ROUTER_REST_PORT), ("grpc", ROUTER_GRPC_PORT)]
    monitor = {
        "selector": {"matchLabels": selector},
        "podMetricsEndpoints": [{"port": "rest", "path": "/metrics", "interval": "5s"}],
    }
    return [
        owned("ServiceAccount", name, pipeline, marks, automountServiceAccountToken=False),
        role_binding(name, ROUTER_ROLE, pipeline, marks, settings),
        config_map(pipeline, plan),
        owned(
            "Service",
            name,
            pipeline,
            marks,
            spec={
                "selector": selector,
                "ports": [{"name": n, "port": p, "targetPort": n, "protocol": "TCP"} for n, p in ports],
            },
        ),
        _deployment(pipeline, settings),
        disruption_budget(name, pipeline, marks, selector),
        *([owned("PodMonitor", name, pipeline, marks, spec=monitor)] if pod_monitor else []),
    ]


def config_map(pipeline: InferencePipeline, plan: PipelinePlan | None) -> Object:
    """Return what a router starts from: the pipeline and the last good plan."""
    data = {PIPELINE_FILE: dump_yaml(trimmed(pipeline))}
    if plan is not None:
        data[PLAN_FILE] = json.dumps(plan_document(plan), indent=1)
    return owned("ConfigMap", router_name(pipeline.name), pipeline, labels(pipeline, ROUTER), data=data)


def plan_document(plan: PipelinePlan) -> Object:
    """Return a plan without what a cluster added to its metadata."""
    document = plan.model_dump(mode="json", by_alias=True, exclude_none=True)
    document["metadata"] = {"name": plan.metadata.name, "namespace": plan.metadata.namespace}
    return document


def trimmed(pipeline: InferencePipeline) -> InferencePipeline:
    """Return a pipeline without what a cluster added to its metadata, but with what asks for new profiles."""
    metadata = pipeline.metadata
    kept = {key: value for key, value in metadata.annotations.items() if key == PROFILE_ANNOTATION}
    identity = {"name": metadata.name, "namespace": metadata.namespace, "annotations": kept}
    return InferencePipeline.model_validate({**pipeline.model_dump(), "metadata": identity})


def role_binding(
    name: str, role: str, pipeline: InferencePipeline, marks: dict[str, str], settings: Settings
) -> Object:
    """Bind one of the chart's roles to the service account of the same name, in the pipeline's namespace only."""
    group = "rbac.authorization.k8s.io"
    return owned(
        "RoleBinding",
        name,
        pipeline,
        marks,
        roleRef={"apiGroup": group, "kind": settings.role_kind, "name": role},
        subjects=[{"kind": "ServiceAccount", "name": name, "namespace": pipeline.metadata.namespace}],
    )


def _selector(pipeline: InferencePipeline) -> dict[str, str]:
    return {PIPELINE_LABEL: pipeline.name, COMPONENT: ROUTER}


def _deployment(pipeline: InferencePipeline, settings: Settings) -> Object:
    name, marks = router_name(pipeline.name), labels(pipeline, ROUTER)
    read = pipeline.spec.model_dump(mode="json", exclude=_UNREAD)
    template = pod(
        marks,
        [_container(pipeline, settings)],
        serviceAccountName=name,
        automountServiceAccountToken=True,
        securityContext=security_of_pod(),
        volumes=[*scratch("tmp"), {"name": "config", "configMap": {"name": name}}],
        topologySpreadConstraints=[
            {
                "maxSkew": 1,
                "topologyKey": "kubernetes.io/hostname",
                "whenUnsatisfiable": "ScheduleAnyway",
                "labelSelector": {"matchLabels": _selector(pipeline)},
            }
        ],
        **image_pull_secrets(settings),
    )
    template["metadata"]["annotations"] = {PIPELINE_HASH: fingerprint([read, uid_of(pipeline)])}
    return owned(
        "Deployment",
        name,
        pipeline,
        marks,
        spec={
            "replicas": pipeline.spec.router.replicas,
            "revisionHistoryLimit": 1,
            "selector": {"matchLabels": _selector(pipeline)},
            "strategy": {"type": "RollingUpdate", "rollingUpdate": {"maxSurge": 1, "maxUnavailable": 0}},
            "template": template,
        },
    )


def _container(pipeline: InferencePipeline, settings: Settings) -> Object:
    asked = pipeline.spec.router.resources
    in_flight_mib = max(asked.memory // _MEBIBYTE // 4, 16)
    arguments = {
        "--pipeline": f"{FOLDER}/{PIPELINE_FILE}",
        "--plan": f"{FOLDER}/{PLAN_FILE}",
        "--namespace": pipeline.metadata.namespace,
        "--host": "0.0.0.0",  # noqa: S104
        "--rest-port": str(ROUTER_REST_PORT),
        "--grpc-port": str(ROUTER_GRPC_PORT),
        "--max-in-flight-mib": str(in_flight_mib),
        "--max-payload-mib": str(min(in_flight_mib, 64)),
    }
    return {
        "name": ROUTER,
        "image": settings.control_image,
        "imagePullPolicy": settings.image_pull_policy,
        "command": ["python", "-m", "trimtab_router"],
        "args": ["--cluster", *(part for pair in arguments.items() for part in pair)],
        "env": variables({"HOME": "/tmp"}),  # noqa: S108
        "ports": [
            {"name": "rest", "containerPort": ROUTER_REST_PORT, "protocol": "TCP"},
            {"name": "grpc", "containerPort": ROUTER_GRPC_PORT, "protocol": "TCP"},
        ],
        "resources": resources(asked.cpu, asked.memory),
        "securityContext": security_of_container(),
        "startupProbe": probe("/v2/health/live", "rest", periodSeconds=1, timeoutSeconds=5, failureThreshold=120),
        "readinessProbe": probe("/trimtab/v1/welcome", "rest", periodSeconds=2, timeoutSeconds=5, failureThreshold=2),
        "livenessProbe": probe("/v2/health/live", "rest", periodSeconds=10, timeoutSeconds=10, failureThreshold=6),
        "volumeMounts": [
            {"name": "config", "mountPath": FOLDER, "readOnly": True},
            {"name": "tmp", "mountPath": "/tmp"},  # noqa: S108
        ],
    }
