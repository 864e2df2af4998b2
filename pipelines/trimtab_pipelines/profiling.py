"""What must be measured before a pipeline can be planned in a cluster: a task for each kind of node and Secret. Pure.

The operator makes a Job of each task, the profiler carries it out; both find it by this one rule. A task's fingerprint
changes exactly when nothing of what was measured before counts any longer. The SLO is not in it: what was measured
within one stays true under another, but a longer one asks for the batch sizes that a shorter one left out.
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
"""On a ModelProfile: the fingerprint of the task it answers."""
_PROFILED_FIELDS = {
    "name",
    "family",
    "parameters",
    "storage_uri",
    "digest",
    "container",
    "resources",
    "node_selector",
    "tolerations",
    "runtime_class_name",
    "max_batch_size",
    "operating_points",
}
_ACCURACY_FIELDS = ("accuracy", "accuracyEvidence", "accuracyByTask", "escalations")
"""Of an operating point."""


@dataclass(frozen=True, slots=True)
class ProfileTask:
    """Variants of a pipeline that run on one kind of node, with one Secret or none.

    `accelerator` is None on nodes used without one; `run` names its Job: the fingerprint, and the SLO measured within.
    """

    name: str
    accelerator: str | None
    variants: tuple[tuple[str, str], ...]
    fingerprint: str
    run: str

    def of_stage(self, stage: str) -> tuple[str, ...]:
        """The variants to measure in a stage."""
        return tuple(variant for owner, variant in self.variants if owner == stage)

    @property
    def stages(self) -> tuple[str, ...]:
        """The stages that have something to measure, in order."""
        return tuple(dict.fromkeys(stage for stage, _ in self.variants))


def profile_tasks(pipeline: InferencePipeline) -> tuple[ProfileTask, ...]:
    """Divide a pipeline's variants by the kind of node they ask for and by the Secret their weights are fetched with.

    Two Secrets in one pod would name the same variables. Variants with a container of their own fall out.
    """
    kinds: dict[str, list[tuple[Stage, Variant]]] = {}
    for stage in pipeline.spec.stages:
        for variant in stage.variants:
            if variant.container is not None:
                continue
            kinds.setdefault(_node_kind(variant), []).append((stage, variant))
    asked = pipeline.metadata.annotations.get(PROFILE_ANNOTATION, "")
    image = [pipeline.spec.model_server_image] if pipeline.spec.model_server_image else []
    drawn = [f"{key}: {told}" for key, told in pipeline.metadata.annotations.items() if key in INPUT_ANNOTATIONS]
    wanted = [asked, *image, *sorted(drawn)] if image or drawn else asked
    return tuple(_task(pipeline.spec, members, wanted) for members in kinds.values())


def missing_profile_tasks(pipeline: InferencePipeline, profiles: Iterable[ModelProfile]) -> tuple[ProfileTask, ...]:
    """The tasks whose stages are not all profiled yet, or whose profiles are out of date or end before the SLO does."""
    known = {
        (profile.spec.stage, profile.metadata.annotations.get(FINGERPRINT_ANNOTATION, ""))
        for profile in profiles
        if profile.spec.pipeline == pipeline.name and _covers_slo(profile, pipeline.spec.slo.latency_seconds)
    }
    return tuple(
        task for task in profile_tasks(pipeline) if any((stage, task.fingerprint) not in known for stage in task.stages)
    )


def _covers_slo(profile: ModelProfile, slo_seconds: float) -> bool:
    """Whether all batch sizes that may keep the SLO were measured, however long that was when they were."""
    return slo_seconds <= (profile.spec.longest_batch_seconds or math.inf)


def unprofiled_containers(pipeline: InferencePipeline, profiles: Iterable[ModelProfile]) -> tuple[tuple[str, str], ...]:
    """The (stage, variant)s with containers of their own that no profile has points of.

    The profiler cannot start them; who brings the container gives a ModelProfile, of any name and without fingerprint.
    """
    known = {
        (profile.spec.stage, point.variant)
        for profile in profiles
        if profile.spec.pipeline == pipeline.name
        for point in profile.spec.points
    }
    named = ((stage.name, one.name) for stage in pipeline.spec.stages for one in stage.variants if one.container)
    return tuple(one for one in named if one not in known)


def _node_kind(variant: Variant) -> str:
    keys = {"node_selector", "tolerations", "runtime_class_name"}
    placement = variant.model_dump(mode="json", include=keys)
    secret = [variant.secret_name] if variant.secret_name else []
    return json.dumps([placement, variant.resources.gpu > 0, *secret], sort_keys=True)


def _measured(variant: Variant) -> dict[str, Any]:
    """What of a variant its seconds hang on: how accurate its operating points are is not among it."""
    found = variant.model_dump(mode="json", include=_PROFILED_FIELDS)
    for point in found["operatingPoints"]:
        for field in _ACCURACY_FIELDS:
            point.pop(field, None)
    return found


def _read(spec: InferencePipelineSpec, stage: Stage) -> list[tuple[str, str, list[int]]]:
    """What the rows are that a stage is measured with: of each tensor it reads the name, the datatype and the shape."""
    tensors = ((read.name, source_of(spec, read.source)) for read in stage.inputs)
    return [(name, tensor.datatype, [*tensor.shape]) for name, tensor in tensors]


def _task(spec: InferencePipelineSpec, members: list[tuple[Stage, Variant]], wanted: str | list[str]) -> ProfileTask:
    first = members[0][1]
    accelerator = "gpu" if first.resources.gpu else None
    measured = [
        [stage.name, _read(spec, stage), [*stage.batch_sizes], _measured(variant)] for stage, variant in members
    ]
    fingerprint = hashlib.sha256(json.dumps([measured, wanted], sort_keys=True).encode()).hexdigest()[:16]
    kind = hashlib.sha256(_node_kind(first).encode()).hexdigest()[:5]
    return ProfileTask(
        name=f"{accelerator or 'cpu'}-{kind}",
        accelerator=accelerator,
        variants=tuple((stage.name, variant.name) for stage, variant in members),
        fingerprint=fingerprint,
        run=f"{fingerprint}/{spec.slo.latency_seconds}",
    )
