"""Profile Jobs: one for each kind of node that a pipeline uses, and one for each user container.

A user container runs as a sidecar, which starts before the profiler. It has no credentials of the API server.

A Job's name includes the run of its task, so that a changed task or a longer SLO creates a new Job. A Job with another
pod template, for example after a wrong image, is replaced. A failed Job is deleted by its TTL and created again, which
retries it.
"""

from collections.abc import Sequence

from trimtab_kubernetes.objects import Object, fingerprint
from trimtab_operator.manifests.objects import PROFILER, TEMPLATE_HASH, owned, pipeline_labels
from trimtab_operator.manifests.pod_spec import (
    USER,
    credentials,
    environment_variables,
    image_pull_secrets,
    node_placement,
    pod,
    resources,
    scratch,
    security_of_container,
    security_of_pod,
    security_of_user_pod,
)
from trimtab_operator.manifests.pod_templates import profiler_with_pod_template
from trimtab_operator.manifests.replica_groups import CACHE_FOLDER, user_container, user_volumes
from trimtab_operator.manifests.routers import FOLDER, PIPELINE_FILE, role_binding
from trimtab_operator.settings import Settings
from trimtab_pipelines.kubernetes_names import profile_job_name, profiler_name, router_name
from trimtab_pipelines.profiling import FINGERPRINT_ANNOTATION, ProfileTask
from trimtab_pipelines.replica_groups import memory_bytes, replica_groups
from trimtab_pipelines.spec import InferencePipeline
from trimtab_pipelines.variants import Variant

PROFILER_ROLE = "trimtab-profiler"
PROFILER_MEMORY_BYTES = 512 * 2**20
CLIENT_CORES = 0.5
"""Of a profiler that measures a user container."""
_ACCOUNT_FOLDER = "/var/run/secrets/kubernetes.io/serviceaccount"
_TOKEN_SECONDS = 3607
RETRIES = 2
DEADLINE_SECONDS = 3600
TTL_SECONDS = 300
"""Time for which a finished Job is retained for its log; a failed one is retried afterwards."""


def profiler_account(pipeline: InferencePipeline, settings: Settings) -> list[Object]:
    name, labels = profiler_name(pipeline.name), pipeline_labels(pipeline, PROFILER)
    return [
        owned("ServiceAccount", name, pipeline, labels, automountServiceAccountToken=False),
        role_binding(name, {"kind": settings.role_kind, "name": PROFILER_ROLE}, pipeline, labels),
    ]


def profile_job(pipeline: InferencePipeline, task: ProfileTask, settings: Settings) -> Object:
    """The Job of one task; it requests the resources of the largest replica that it measures."""
    labels = pipeline_labels(pipeline, PROFILER)
    variants = [pipeline.spec.stage(stage).variant(name) for stage, name in task.variants]
    flavor = pipeline.spec.flavor(variants[0])
    own = variants[0].container
    sidecars = [] if own is None else [{**user_container(pipeline, variants[0], own), "restartPolicy": "Always"}]
    template = pod(
        labels,
        [_profiler(pipeline, task, variants, settings)],
        **({"initContainers": sidecars} if sidecars else {}),
        serviceAccountName=profiler_name(pipeline.name),
        restartPolicy="Never",
        securityContext=security_of_pod() if own is None else security_of_user_pod(),
        volumes=[
            *scratch("profiler-tmp", "weights"),
            {"name": "config", "configMap": {"name": router_name(pipeline.name)}},
            _token_volume(),
            *([] if own is None else user_volumes(variants[0])),
        ],
        **node_placement(variants[0], flavor),
        **image_pull_secrets(settings),
    )
    template = profiler_with_pod_template(template, variants[0].pod_template, sidecar=task.container)
    job = owned(
        "Job",
        profile_job_name(pipeline.name, task.name, task.run),
        pipeline,
        labels,
        spec={
            "backoffLimit": RETRIES,
            "activeDeadlineSeconds": DEADLINE_SECONDS,
            "ttlSecondsAfterFinished": TTL_SECONDS,
            "template": template,
        },
    )
    job["metadata"]["annotations"] = {FINGERPRINT_ANNOTATION: task.fingerprint, TEMPLATE_HASH: fingerprint(template)}
    return job


def _profiler(
    pipeline: InferencePipeline, task: ProfileTask, variants: Sequence[Variant], settings: Settings
) -> Object:
    user = {"runAsUser": USER, "runAsGroup": USER} if task.container else {}
    return {
        "name": PROFILER,
        "image": pipeline.spec.model_server_image or settings.model_server_image,
        "imagePullPolicy": settings.image_pull_policy,
        "command": ["python", "-m", "trimtab_profiler"],
        "args": [
            "--cluster",
            "--pipeline",
            f"{FOLDER}/{PIPELINE_FILE}",
            "--namespace",
            pipeline.metadata.namespace,
            "--task",
            task.name,
        ],
        "env": environment_variables({"HOME": "/tmp", "TRIMTAB_WEIGHTS_CACHE": CACHE_FOLDER}),  # noqa: S108
        **credentials(None if task.container else variants[0].secret_name),
        "resources": _resources(pipeline, task, variants),
        "securityContext": security_of_container() | user,
        "volumeMounts": [
            {"name": "config", "mountPath": FOLDER, "readOnly": True},
            {"name": "profiler-tmp", "mountPath": "/tmp"},  # noqa: S108
            {"name": "weights", "mountPath": CACHE_FOLDER},
            {"name": "token", "mountPath": _ACCOUNT_FOLDER, "readOnly": True},
        ],
    }


def _resources(pipeline: InferencePipeline, task: ProfileTask, variants: Sequence[Variant]) -> Object:
    """Resources of the profiler, whose replicas are processes in its container, unless it is a user's."""
    if task.container:
        return resources(CLIENT_CORES, PROFILER_MEMORY_BYTES)
    return resources(
        max(variant.resources.cpu for variant in variants),
        PROFILER_MEMORY_BYTES + _largest_group(pipeline, task),
        max(variant.resources.gpu for variant in variants),
        pipeline.spec.flavor(variants[0]),
    )


def _token_volume() -> Object:
    """Credentials of the API server, as the kubelet mounts them, for the profiler alone."""
    namespace = {"path": "namespace", "fieldRef": {"apiVersion": "v1", "fieldPath": "metadata.namespace"}}
    sources = [
        {"serviceAccountToken": {"path": "token", "expirationSeconds": _TOKEN_SECONDS}},
        {"configMap": {"name": "kube-root-ca.crt", "items": [{"key": "ca.crt", "path": "ca.crt"}]}},
        {"downwardAPI": {"items": [namespace]}},
    ]
    return {"name": "token", "projected": {"sources": sources}}


def _largest_group(pipeline: InferencePipeline, task: ProfileTask) -> int:
    """Memory of the largest replica that it measures."""
    return max(
        memory_bytes(group.variants)
        for stage, names in task.variants_by_stage.items()
        for group in replica_groups(pipeline.spec.stage(stage))
        if group.names & set(names)
    )
