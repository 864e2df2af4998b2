"""Profile Jobs: one for each kind of node that a pipeline uses.

A Job's name includes the run of its task, so that a changed task or a longer SLO creates a new Job. A Job with another
pod template, for example after a wrong image, is replaced. A failed Job is deleted by its TTL and created again, which
retries it.
"""

from trimtab_kubernetes.objects import Object, fingerprint
from trimtab_operator.manifests.objects import PROFILER, TEMPLATE_HASH, owned, pipeline_labels
from trimtab_operator.manifests.pod_spec import (
    credentials,
    environment_variables,
    image_pull_secrets,
    node_placement,
    pod,
    resources,
    scratch,
    security_of_container,
    security_of_pod,
)
from trimtab_operator.manifests.replica_groups import CACHE_FOLDER
from trimtab_operator.manifests.routers import FOLDER, PIPELINE_FILE, role_binding
from trimtab_operator.settings import Settings
from trimtab_pipelines.kubernetes_names import profile_job_name, profiler_name, router_name
from trimtab_pipelines.profiling import FINGERPRINT_ANNOTATION, ProfileTask
from trimtab_pipelines.replica_groups import memory_bytes
from trimtab_pipelines.spec import InferencePipeline

PROFILER_ROLE = "trimtab-profiler"
PROFILER_MEMORY_BYTES = 512 * 2**20
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
    account, flavor = profiler_name(pipeline.name), pipeline.spec.flavor(variants[0])
    container: Object = {
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
        **credentials(variants[0].secret_name),
        "resources": resources(
            max(variant.resources.cpu for variant in variants),
            PROFILER_MEMORY_BYTES + _largest_stage(pipeline, task),
            max(variant.resources.gpu for variant in variants),
            flavor,
        ),
        "securityContext": security_of_container(),
        "volumeMounts": [
            {"name": "config", "mountPath": FOLDER, "readOnly": True},
            {"name": "tmp", "mountPath": "/tmp"},  # noqa: S108
            {"name": "weights", "mountPath": CACHE_FOLDER},
        ],
    }
    template = pod(
        labels,
        [container],
        serviceAccountName=account,
        automountServiceAccountToken=True,
        restartPolicy="Never",
        securityContext=security_of_pod(),
        volumes=[*scratch("tmp", "weights"), {"name": "config", "configMap": {"name": router_name(pipeline.name)}}],
        **node_placement(variants[0], flavor),
        **image_pull_secrets(settings),
    )
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


def _largest_stage(pipeline: InferencePipeline, task: ProfileTask) -> int:
    return max(
        memory_bytes([pipeline.spec.stage(stage).variant(name) for name in names])
        for stage, names in task.variants_by_stage.items()
    )
