"""Served system: the shipped digits-av with one policy of choosing modalities, and the plan for a known load."""

from collections.abc import Mapping
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any, Self

import yaml

import benchmarks.papers.policies  # noqa: F401 - registers the baselines
from trimtab_adapter.planning.baselines import with_pins
from trimtab_adapter.planning.decide import PlanningInputs, decide
from trimtab_loadtester.payloads.digits_av import JobOptions
from trimtab_pipelines.documents import load_pipeline
from trimtab_pipelines.plan import ForecastRecord, PipelinePlan, StagePlan
from trimtab_pipelines.profile import ModelProfile
from trimtab_pipelines.shadow_price import with_shadow_price
from trimtab_pipelines.spec import InferencePipeline
from trimtab_pipelines.stages import Pin
from trimtab_pipelines.synthetic_inputs import PAYLOADS_ANNOTATION

SOURCE = Path(__file__).parents[2] / "pipelines" / "digits-av"
STAGE, VARIANT, BATCH = "name", "late", 64
OURS, ONCE, NONE = "ours", "ours, one look", "all senses"
MOSEL, AGGRESSIVE, RANDOM = "MOSEL as printed", "aggressive", "random"
POLICIES: Mapping[str, str] = {
    OURS: "ModalityMix",
    ONCE: "ModalityMix",
    NONE: "AllModalities",
    MOSEL: "Mosel",
    AGGRESSIVE: "Aggressive",
    RANDOM: "Random",
}
POOL = 4_000
"""Different rows that jobs are made of: what an interval counts as drawn."""


@dataclass(frozen=True, slots=True)
class Jobs:
    """What is asked: `options` as the load tester's annotation of digits-av has them."""

    options: str

    @property
    def mean_rows(self) -> float:
        """Rows of a job."""
        least, most = JobOptions.parse(self.options).rows
        return (least + most) / 2

    @classmethod
    def of(cls, source: Path, recordings: Path | None, **options: str | float) -> Self:
        """Jobs of the same rows whatever the load; of recordings such whose speakers the weights have not heard."""
        written: dict[str, str | float] = {"pool": POOL, "drawn": 0, **options}
        if recordings is not None:
            weights = source / "weights" / f"{VARIANT}.safetensors"
            written |= {"recordings": str(recordings), "weights": str(weights)}
        return cls(", ".join(f"{name}={value}" for name, value in written.items()))


@dataclass(frozen=True, slots=True)
class Setting:
    """A folder with the pipeline as one method serves it.

    Attributes:
        folder: its own; weights are those of `source`.
        source: the pipeline's folder as shipped.
        method: one of `POLICIES`.
        cores: what its replica is held to.
        misjudged: batches are thought to take so many times what they take.
        changes: of the pipeline's spec.
    """

    folder: Path
    source: Path
    method: str
    cores: float = 0.5
    misjudged: float = 1.0
    changes: Mapping[str, Any] = field(default_factory=dict)

    @property
    def file(self) -> Path:
        """What is served."""
        return self.folder / "pipeline.yaml"

    def write(self) -> InferencePipeline:
        """Lay the folder out; returns the pipeline."""
        self.folder.mkdir(parents=True, exist_ok=True)
        weights = self.folder / "weights"
        if not weights.exists():
            weights.symlink_to((self.source / "weights").resolve())
        return self._written(self.file, {})

    def asked(self, jobs: Jobs) -> Path:
        """The same pipeline with the annotation that makes the load tester send these jobs."""
        file = self.folder / "asked.yaml"
        self._written(file, {PAYLOADS_ANNOTATION: f"digits-av: {jobs.options}"})
        return file

    def _written(self, file: Path, annotations: Mapping[str, str]) -> InferencePipeline:
        document = yaml.safe_load((self.source / "pipeline.yaml").read_text(encoding="utf-8"))
        document["spec"] |= {"schedulingPolicy": POLICIES[self.method], **self.changes}
        document["metadata"]["annotations"] |= annotations
        file.write_text(yaml.safe_dump(document), encoding="utf-8")
        return load_pipeline(file)


def plan_for(
    setting: Setting,
    pipeline: InferencePipeline,
    profiles: Mapping[str, ModelProfile],
    jobs_rps: float,
    rows: float,
    generation: int,
) -> PipelinePlan:
    """What the adapter plans for a load known beforehand, on one replica; without second looks for who takes none."""
    pin = Pin(variant=VARIANT, replicas=1, batch_size=BATCH)
    pinned = pipeline.model_copy(update={"spec": with_pins(pipeline.spec, {STAGE: pin})})
    forecast = ForecastRecord(peak_rps=jobs_rps, source="static", reason="the load, known beforehand")
    plan = decide(pinned, profiles, PlanningInputs(forecast, 0.0, rows_per_request={STAGE: rows}))
    stages = tuple(plan.spec.stages)
    if setting.method != OURS:
        stages = tuple(with_shadow_price(_without_looks(stage), jobs_rps * rows) for stage in stages)
    return plan.model_copy(update={"spec": plan.spec.model_copy(update={"stages": stages, "generation": generation})})


def _without_looks(stage: StagePlan) -> StagePlan:
    bare: dict[str, Any] = {"escalations": (), "planned_escalation": None}
    for name in ("upgrades", "fallbacks"):
        bare[name] = tuple(point.model_copy(update={"escalations": ()}) for point in getattr(stage, name))
    return stage.model_copy(update=bare)


def slowed(profiles: Mapping[str, ModelProfile], times: float) -> dict[str, ModelProfile]:
    """Profiles of a machine on which everything takes so many times as long."""
    return {name: ModelProfile.model_validate(_slowed(profile, times)) for name, profile in profiles.items()}


def _slowed(profile: ModelProfile, times: float) -> dict[str, Any]:
    document = profile.model_dump(by_alias=False)
    for point in document["spec"]["points"]:
        point["fit"] |= {name: point["fit"][name] * times for name in ("quadratic", "linear", "constant")}
        for one in point["measurements"]:
            one["throughput_rps"] /= times
            one |= {name: one[name] * times for name in one if name.startswith("latency_seconds")}
    return document
