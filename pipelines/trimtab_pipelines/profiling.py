"""Profile tasks: the measurements that a pipeline needs before it can be planned in a cluster.

There is one task for each kind of node and Secret, and one for each user container. The operator creates a Job for each
task and the profiler runs it. A task's fingerprint changes exactly when its earlier measurements no longer apply. The
SLO is not part of it: measurements stay valid under another SLO, but a longer one needs batch sizes that a shorter one
skipped.
"""

import hashlib
import json
import math
from collections.abc import Iterable
from dataclasses import dataclass
from typing import Any

from trimtab_pipelines.kubernetes_names import GROUP, PROFILE_ANNOTATION
from trimtab_pipelines.model_spec import source_of
from trimtab_pipelines.profile import ModelProfile
from trimtab_pipelines.spec import InferencePipeline, InferencePipelineSpec
from trimtab_pipelines.stages import Stage
from trimtab_pipelines.synthetic_inputs import INPUT_ANNOTATIONS
from trimtab_pipelines.variants import Variant

FINGERPRINT_ANNOTATION = f"{GROUP}/fingerprint"
"""On a ModelProfile: the fingerprint of its task."""
_PROFILED_FIELDS = {
    "name",
    "family",
    "parameters",
    "storage_uri",
    "digest",
    "container",
    "resources",
    "flavor",
    "node_selector",
    "tolerations",
    "runtime_class_name",
    "max_batch_size",
    "operating_points",
}
_ACCURACY_FIELDS = ("accuracy", "accuracyEvidence", "accuracyByTask", "escalations")
"""Fields of an operating point that do not affect its latency."""


@dataclass(frozen=True, slots=True)
class ProfileTask:
    """Variants of a pipeline that run on one kind of node, with one Secret or none; or one with its own container."""

    name: str
    accelerator: str | None
    """None for nodes used without accelerator."""
    variants: tuple[tuple[str, str], ...]
    fingerprint: str
    run: str
    """Identifies the task's Job: the fingerprint and the SLO."""
    container: bool = False
    """Whether its only variant has its own container."""

    @property
    def variants_by_stage(self) -> dict[str, tuple[str, ...]]:
        stages = dict.fromkeys(stage for stage, _ in self.variants)
        return {stage: tuple(variant for owner, variant in self.variants if owner == stage) for stage in stages}


def profile_tasks(pipeline: InferencePipeline) -> tuple[ProfileTask, ...]:
    """Group a pipeline's variants by kind of node and by the Secret of their weights.

    Two Secrets in one pod could set the same variables. A variant with its own container is a task of its own.
    """
    kinds: dict[str, list[tuple[Stage, Variant]]] = {}
    for stage in pipeline.spec.stages:
        for variant in stage.variants:
            own = (stage.name, variant.name) if variant.container is not None else ()
            kinds.setdefault(_node_kind(variant, *own), []).append((stage, variant))
    request = pipeline.metadata.annotations.get(PROFILE_ANNOTATION, "")
    image = [pipeline.spec.model_server_image] if pipeline.spec.model_server_image else []
    inputs = [f"{key}: {value}" for key, value in pipeline.metadata.annotations.items() if key in INPUT_ANNOTATIONS]
    version = [request, *image, *sorted(inputs)] if image or inputs else request
    return tuple(_task(pipeline.spec, kind, members, version) for kind, members in kinds.items())


def missing_profile_tasks(pipeline: InferencePipeline, profiles: Iterable[ModelProfile]) -> tuple[ProfileTask, ...]:
    """Tasks with stages that have no profile, an outdated one, or one that skipped batch sizes within the SLO.

    A user container for which a user applied a profile, without fingerprint, is not measured.
    """
    own = [profile for profile in profiles if profile.spec.pipeline == pipeline.name]
    applied = {
        (profile.spec.stage, point.variant)
        for profile in own
        if FINGERPRINT_ANNOTATION not in profile.metadata.annotations
        for point in profile.spec.points
    }
    profiled = {
        (profile.spec.stage, profile.metadata.annotations.get(FINGERPRINT_ANNOTATION, ""))
        for profile in own
        if _covers_slo(profile, pipeline.spec.slo.latency_seconds)
    }
    return tuple(
        task
        for task in profile_tasks(pipeline)
        if any((stage, task.fingerprint) not in profiled for stage in task.variants_by_stage)
        and not (task.container and task.variants[0] in applied)
    )


def _covers_slo(profile: ModelProfile, slo_seconds: float) -> bool:
    """Whether all batch sizes within the SLO were measured."""
    return slo_seconds <= (profile.spec.longest_batch_seconds or math.inf)


def _node_kind(variant: Variant, *own: str) -> str:
    """Key of a task; `own` are stage and name of a variant with its own container."""
    keys = {"flavor", "node_selector", "tolerations", "runtime_class_name", "pod_template"}
    placement = variant.model_dump(mode="json", include=keys)
    secret = [variant.secret_name] if variant.secret_name else []
    return json.dumps([placement, variant.resources.gpu > 0, *secret, *own], sort_keys=True)


def _profiled_fields(variant: Variant) -> dict[str, Any]:
    fields = variant.model_dump(mode="json", include=_PROFILED_FIELDS)
    for point in fields["operatingPoints"]:
        for field in _ACCURACY_FIELDS:
            point.pop(field, None)
    return fields


def _input_tensors(spec: InferencePipelineSpec, stage: Stage) -> list[tuple[str, str, list[int]]]:
    tensors = ((read.name, source_of(spec, read.source)) for read in stage.inputs)
    return [(name, tensor.datatype, [*tensor.shape]) for name, tensor in tensors]


def _task(
    spec: InferencePipelineSpec, kind: str, members: list[tuple[Stage, Variant]], version: str | list[str]
) -> ProfileTask:
    first = members[0][1]
    accelerator = "gpu" if first.resources.gpu else None
    measured = [
        [stage.name, _input_tensors(spec, stage), [*stage.batch_sizes], _profiled_fields(variant)]
        for stage, variant in members
    ]
    fingerprint = hashlib.sha256(json.dumps([measured, version], sort_keys=True).encode()).hexdigest()[:16]
    return ProfileTask(
        name=f"{accelerator or 'cpu'}-{hashlib.sha256(kind.encode()).hexdigest()[:5]}",
        accelerator=accelerator,
        variants=tuple((stage.name, variant.name) for stage, variant in members),
        fingerprint=fingerprint,
        run=f"{fingerprint}/{spec.slo.latency_seconds}",
        container=first.container is not None,
    )
