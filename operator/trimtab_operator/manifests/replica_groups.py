"""Objects of a replica group: a Deployment, the Service through which routers find it, and a disruption budget.

The pod template changes only if the served models change, or a termination grace period above half a minute; batch
sizes, operating points and replicas are not part of it.
"""

import json
from collections.abc import Mapping
from pathlib import Path, PurePosixPath

from trimtab_kubernetes.objects import Object, fingerprint
from trimtab_operator.manifests.mutual_tls import (
    TLS_PORT_NAME,
    identity_arguments,
    identity_mounts,
    identity_volumes,
    probed_port,
    routed_port,
    tls_sidecar_containers,
    tls_sidecar_volumes,
)
from trimtab_operator.manifests.objects import MODEL_SERVER, TEMPLATE_HASH, owned, pipeline_labels
from trimtab_operator.manifests.pod_spec import (
    ZONE,
    credentials,
    deployment_spec,
    environment_variables,
    image_pull_secrets,
    node_placement,
    pod,
    pre_stop,
    probe,
    resources,
    scratch,
    security_of_container,
    security_of_pod,
    security_of_user_pod,
    spread,
    termination_grace,
)
from trimtab_operator.manifests.pod_templates import with_pod_template
from trimtab_operator.settings import Settings
from trimtab_pipelines.engines import ENGINES
from trimtab_pipelines.kubernetes_names import (
    COMPONENT,
    DATA_PORT,
    FLAVOR_LABEL,
    METRICS_PORT,
    METRICS_PORT_NAME,
    PIPELINE_LABEL,
    REPLICA_GROUP_LABEL,
    STAGE_LABEL,
    VARIANT_LABEL_PREFIX,
    replica_group_name,
    router_name,
    tasks_name,
)
from trimtab_pipelines.model_spec import CACHE_TENANT_VARIABLE, model_spec, split_variable
from trimtab_pipelines.replica_groups import ReplicaGroup, memory_bytes
from trimtab_pipelines.spec import InferencePipeline
from trimtab_pipelines.stages import Stage
from trimtab_pipelines.variants import Container, Variant

SHIPPED_PIPELINES = PurePosixPath("/opt/trimtab/pipelines")
DATA_PORT_NAME = "data"
SHARED_MEMORY = "shared-memory"
CACHE_FOLDER = "/var/cache/trimtab"
TASKS_FOLDER = "/etc/trimtab-tasks"
QUEUE_LABEL = "kueue.x-k8s.io/queue-name"
LONGEST_START_SECONDS = 1800
"""Time after which a container that never became ready is restarted; rollouts give up earlier (readyTimeout)."""


def group_labels(pipeline: InferencePipeline, stage: Stage, group: ReplicaGroup) -> dict[str, str]:
    flavor = {FLAVOR_LABEL: group.flavor} if group.flavor else {}
    own = {STAGE_LABEL: stage.name, REPLICA_GROUP_LABEL: group.name, **flavor}
    return pipeline_labels(pipeline, MODEL_SERVER, **own)


def replica_group(
    pipeline: InferencePipeline, stage: Stage, group: ReplicaGroup, settings: Settings, *, replicas: int, surge: bool
) -> Object:
    """The Deployment, or the SeldonDeployment if the pipeline asks for one."""
    labels, pods = group_labels(pipeline, stage, group), template(pipeline, stage, group, settings)
    variants, kind = variant_labels(group), pipeline.spec.deployer
    if kind == "SeldonDeployment":
        spec = {"replicas": replicas, **_seldon_spec(labels | variants, pods)}
    else:
        spec = deployment_spec(replicas, _selector(labels), pods, surge=surge)
    name = replica_group_name(pipeline.name, stage.name, group.name)
    queue = {key: value for key, value in pipeline.metadata.labels.items() if key == QUEUE_LABEL}
    written = owned(kind, name, pipeline, labels | variants | queue, spec=spec)
    written["metadata"]["annotations"] = {TEMPLATE_HASH: fingerprint(pods)}
    return written


def _seldon_spec(labels: Mapping[str, str], pods: Object) -> Object:
    """Seldon Core 1 creates a Deployment for each component, here without its orchestrator.

    Uses documented fields only; routers find the pods by their labels.
    """
    predictor = {
        "name": "default",
        "annotations": {"seldon.io/no-engine": "true"},
        "graph": {"name": pods["spec"]["containers"][0]["name"], "type": "MODEL", "children": []},
        "componentSpecs": [{"metadata": pods["metadata"], "spec": pods["spec"]}],
        "labels": labels,
    }
    return {"protocol": "v2", "predictors": [predictor]}


def _selector(labels: Mapping[str, str]) -> dict[str, str]:
    return {key: labels[key] for key in (PIPELINE_LABEL, STAGE_LABEL, REPLICA_GROUP_LABEL)}


def service(pipeline: InferencePipeline, stage: Stage, group: ReplicaGroup, settings: Settings) -> Object:
    """The headless Service, labelled with the variants of its pods.

    It refers to the pods' port by name, so that pods of an older template with another port number remain reachable.
    """
    labels = group_labels(pipeline, stage, group)
    guarded = group.variants[0].container is not None and settings.edge.replicas is not None
    named = TLS_PORT_NAME if guarded else DATA_PORT_NAME
    port = {"port": data_port(group, settings), "targetPort": named, "protocol": "TCP"}
    return owned(
        "Service",
        replica_group_name(pipeline.name, stage.name, group.name),
        pipeline,
        labels | variant_labels(group),
        spec={"clusterIP": "None", "selector": _selector(labels), "ports": [{"name": DATA_PORT_NAME, **port}]},
    )


def disruption_budget(
    name: str, pipeline: InferencePipeline, labels: dict[str, str], selector: dict[str, str]
) -> Object:
    """Allow a node drain to evict one pod at a time, even with one replica."""
    return owned(
        "PodDisruptionBudget", name, pipeline, labels, spec={"maxUnavailable": 1, "selector": {"matchLabels": selector}}
    )


def replica_group_budget(pipeline: InferencePipeline, stage: Stage, group: ReplicaGroup) -> Object:
    labels = group_labels(pipeline, stage, group)
    name = replica_group_name(pipeline.name, stage.name, group.name)
    return disruption_budget(name, pipeline, labels | variant_labels(group), _selector(labels))


def data_port(group: ReplicaGroup, settings: Settings) -> int:
    container = group.variants[0].container
    return routed_port(container, settings) if container else DATA_PORT


def variant_labels(group: ReplicaGroup) -> dict[str, str]:
    return {f"{VARIANT_LABEL_PREFIX}{variant.name}": "true" for variant in group.variants}


def template(pipeline: InferencePipeline, stage: Stage, group: ReplicaGroup, settings: Settings) -> Object:
    first = group.variants[0]
    account = {"serviceAccountName": a} if (a := pipeline.spec.service_account_name) else {}
    # Not over nodes: an autoscaler would add one for each replica.
    of_stage = {PIPELINE_LABEL: pipeline.name, COMPONENT: MODEL_SERVER, STAGE_LABEL: stage.name}
    shared = {
        **spread(of_stage, ZONE),
        **node_placement(first, pipeline.spec.flavor(first)),
        **image_pull_secrets(settings),
        **account,
        **termination_grace(pipeline.spec.slo),
    }
    labels = group_labels(pipeline, stage, group)
    if first.container is not None:
        guards = tls_sidecar_containers(first.container, settings)
        volumes = [*user_volumes(first), *tls_sidecar_volumes(pipeline, settings)]
        shared |= {"volumes": volumes} | ({"initContainers": guards} if guards else {})
        container, security = user_container(pipeline, first, first.container), security_of_user_pod()
        return with_pod_template(pod(labels, [container], securityContext=security, **shared), first.pod_template)
    container = _model_server(pipeline, stage, group, settings)
    volumes = [
        *scratch("tmp"),
        _cache(pipeline, settings),
        *identity_volumes(settings),
        *_task_volumes(pipeline, stage, group),
    ]
    rendered = pod(labels, [container], securityContext=security_of_pod(), volumes=volumes, **shared)
    return with_pod_template(rendered, first.pod_template)


def _model_server(pipeline: InferencePipeline, stage: Stage, group: ReplicaGroup, settings: Settings) -> Object:
    folder = Path(SHIPPED_PIPELINES / pipeline.name)
    specs = [
        model_spec(pipeline, folder, stage, variant, group.cores).replace(
            tasks_folder=f"{TASKS_FOLDER}/{variant.name}" if variant in stage.variants_with_tasks else ""
        )
        for variant in group.variants
    ]
    models = json.dumps([spec.model_dump(mode="json", by_alias=True, exclude_none=True) for spec in specs])
    first = group.variants[0]
    environment = {"HOME": "/tmp", "TRIMTAB_WEIGHTS_CACHE": CACHE_FOLDER}  # noqa: S108
    environment |= split_variable("TRIMTAB_MODELS", models)
    weights = {"name": "weights", "mountPath": CACHE_FOLDER}
    if _node_cache(pipeline, settings):
        environment[CACHE_TENANT_VARIABLE] = weights["subPath"] = pipeline.metadata.namespace
    return {
        "name": MODEL_SERVER,
        "image": pipeline.spec.model_server_image or settings.model_server_image,
        "imagePullPolicy": settings.image_pull_policy,
        "command": ["python", "-m", "trimtab_model_servers"],
        "args": [
            *("--models-env", "TRIMTAB_MODELS", "--host", "0.0.0.0", "--data-port", str(DATA_PORT)),  # noqa: S104
            *identity_arguments(settings),
            *(("--metrics-port", str(METRICS_PORT)) if stage.serves_chats else ()),
        ],
        "env": environment_variables(environment),
        **credentials(first.secret_name),
        "ports": [
            {"name": DATA_PORT_NAME, "containerPort": DATA_PORT, "protocol": "TCP"},
            *(
                [{"name": METRICS_PORT_NAME, "containerPort": METRICS_PORT, "protocol": "TCP"}]
                if stage.serves_chats
                else ()
            ),
        ],
        "resources": resources(group.cores, memory_bytes(group.variants), group.gpus, pipeline.spec.flavor(first)),
        "securityContext": security_of_container(),
        "lifecycle": pre_stop(),
        **_probes("/v2/health/live", "/v2/health/ready", probed_port(settings, DATA_PORT)),
        "volumeMounts": [
            {"name": "tmp", "mountPath": "/tmp"},  # noqa: S108
            weights,
            *identity_mounts(settings),
            *(
                {"name": name, "mountPath": f"{TASKS_FOLDER}/{variant.name}", "readOnly": True}
                for name, variant in _numbered_variants_with_tasks(stage, group)
            ),
        ],
    }


def user_volumes(variant: Variant) -> list[Object]:
    """Volumes of a variant's own container."""
    memory = [{"name": SHARED_MEMORY, "emptyDir": {"medium": "Memory"}}] if variant.resources.gpu > 1 else []
    return [*scratch("tmp"), *memory]


def user_container(pipeline: InferencePipeline, variant: Variant, container: Container) -> Object:
    """User-provided container: its own user, writable files and complete Secret, within the level `restricted`."""
    drain_seconds, flavor = pipeline.spec.slo.drain_seconds, pipeline.spec.flavor(variant)
    secret = {"envFrom": [{"secretRef": {"name": variant.secret_name}}]} if variant.secret_name else {}
    words = (*container.command, *container.args, *container.env.values())
    port = {"PORT": str(container.port)} if any("$(PORT)" in word for word in words) else {}
    variables = port | container.env
    option = ENGINES[container.engine].drain_option if container.engine else ""
    finishes = not option or any(word.startswith(option) for word in words)
    shared_memory = [{"name": SHARED_MEMORY, "mountPath": "/dev/shm"}] if variant.resources.gpu > 1 else []  # noqa: S108
    return {
        "name": MODEL_SERVER,
        "image": container.image,
        "imagePullPolicy": container.image_pull_policy,
        **({"command": list(container.command)} if container.command else {}),
        **({"args": list(container.args)} if container.args else {}),
        **({"env": environment_variables(variables)} if variables else {}),
        **secret,
        "ports": [{"name": DATA_PORT_NAME, "containerPort": container.port, "protocol": "TCP"}],
        "resources": resources(variant.resources.cpu, variant.resources.memory, variant.resources.gpu, flavor),
        "securityContext": security_of_container(read_only=False),
        "lifecycle": pre_stop(0.0 if finishes else drain_seconds),
        **_probes(container.ready_path, container.ready_path, container.port),
        "volumeMounts": [{"name": "tmp", "mountPath": "/tmp"}, *shared_memory],  # noqa: S108
    }


def _probes(live: str, ready: str, port: int) -> Object:
    """Readiness within a second of start-up; liveness fails after a minute only, since cores are not guaranteed."""
    return {
        "startupProbe": probe(ready, port, periodSeconds=1, timeoutSeconds=5, failureThreshold=LONGEST_START_SECONDS),
        "readinessProbe": probe(ready, port, periodSeconds=2, timeoutSeconds=5, failureThreshold=3),
        "livenessProbe": probe(live, port, periodSeconds=10, timeoutSeconds=10, failureThreshold=6),
    }


def _node_cache(pipeline: InferencePipeline, settings: Settings) -> str:
    """The node folder in which the namespace's weights are cached; empty if an image is of unknown behaviour."""
    return "" if pipeline.spec.model_server_image else settings.node_cache


def _cache(pipeline: InferencePipeline, settings: Settings) -> Object:
    if path := _node_cache(pipeline, settings):
        return {"name": "weights", "hostPath": {"path": path, "type": "DirectoryOrCreate"}}
    return scratch("weights")[0]


def _task_volumes(pipeline: InferencePipeline, stage: Stage, group: ReplicaGroup) -> list[Object]:
    """ConfigMaps of the tasks registered at run time. Optional, so that replicas start without one."""
    return [
        {"name": name, "configMap": {"name": tasks_name(pipeline.name, stage.name, variant.name), "optional": True}}
        for name, variant in _numbered_variants_with_tasks(stage, group)
    ]


def _numbered_variants_with_tasks(stage: Stage, group: ReplicaGroup) -> list[tuple[str, Variant]]:
    """Variants that accept tasks, by the name of a volume: a variant's name may be too long for one."""
    numbered = enumerate(group.variants)
    return [(f"tasks-{number}", variant) for number, variant in numbered if variant in stage.variants_with_tasks]


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
