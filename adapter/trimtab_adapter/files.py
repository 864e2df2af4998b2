"""Files of one pipeline: `FileConfigSource` reads its documents, `FilePlanPublisher` writes plan and decisions."""

import logging
from collections.abc import Mapping
from pathlib import Path

from trimtab_adapter.controller import Tick, actionable_fields
from trimtab_adapter.forecasting import file_stamp
from trimtab_adapter.planning.pool_allocation import limit_budget
from trimtab_pipelines.documents import (
    DocumentError,
    accept_plan,
    load_pipeline,
    load_profiles,
    load_published_plan,
    write_json,
)
from trimtab_pipelines.jsonl import JsonLinesFile
from trimtab_pipelines.memory_profile import with_measured_memory
from trimtab_pipelines.plan import PipelinePlan
from trimtab_pipelines.profile import ModelProfile, memory_by_stage
from trimtab_pipelines.spec import InferencePipeline

log = logging.getLogger(__name__)

MAX_LOG_BYTES = 32 * 2**20


class FileConfigSource:
    """A pipeline file and a profile file, read again when they change."""

    remark = ""

    def __init__(self, pipeline: Path, profiles: Path, gpus: int | None = None) -> None:
        """`gpus`: most GPUs to plan; None for the whole budget."""
        self._gpus = gpus
        self._paths = (_file(pipeline, "pipeline.yaml"), _file(profiles, "profile.yaml"))
        self._stamps = tuple(file_stamp(path) for path in self._paths)
        document = load_pipeline(self._paths[0])
        self.profiles: Mapping[str, ModelProfile] = load_profiles(self._paths[1])
        self.pipeline: InferencePipeline = self._sized(document)

    def refresh(self) -> str | None:
        stamps = tuple(file_stamp(path) for path in self._paths)
        if stamps == self._stamps:
            return None
        self._stamps = stamps
        try:
            pipeline, profiles = load_pipeline(self._paths[0]), load_profiles(self._paths[1])
        except DocumentError as error:
            return f"{error}; the last valid pipeline and profiles stay in use"
        self.profiles = profiles
        self.pipeline = self._sized(pipeline)
        return None

    def _sized(self, pipeline: InferencePipeline) -> InferencePipeline:
        return with_measured_memory(_on_one_machine(pipeline, self._gpus), memory_by_stage(self.profiles))


def _on_one_machine(pipeline: InferencePipeline, gpus: int | None) -> InferencePipeline:
    """The pipeline as one machine runs it: with its GPUs, and no operator starts further routers there."""
    budget = pipeline.spec.budget
    spec = limit_budget(pipeline.spec, budget.cores, budget.gpus if gpus is None else gpus)
    router = spec.router.replace(replicas=1, max_replicas=1)
    return pipeline.replace(spec=spec.replace(router=router))


def _file(path: Path, name: str) -> Path:
    return path / name if path.is_dir() else path


class FilePlanPublisher:
    """A plan file, replaced atomically, and a log of all decisions, of which the older half is dropped when full."""

    def __init__(self, plan: Path, decision_log: Path) -> None:
        self._path, self._decision_log = plan, JsonLinesFile(decision_log, MAX_LOG_BYTES)
        self._written: PipelinePlan | None = None

    def adopt(self, pipeline: InferencePipeline, own: PipelinePlan | None) -> PipelinePlan | None:
        """Continue from the plan on disk at the start, if it is one of this pipeline."""
        if own is not None or not self._path.exists():
            return own
        try:
            plan = accept_plan(load_published_plan(self._path), pipeline)
        except DocumentError as error:
            log.warning("%s; starting from a first plan", error)
            return None
        self._written = plan
        return plan

    async def publish(self, plan: PipelinePlan) -> None:
        """Write the plan if it differs from the last one written."""
        written = self._written
        if written and actionable_fields(plan) == actionable_fields(written) and self._path.exists():
            return
        write_json(self._path, plan)
        self._written = plan
        log.info("plan %s: %s", plan.spec.generation, plan.spec.explanation.change)

    async def propose(self, plan: PipelinePlan) -> None:
        """Nothing: the decision log reports it."""

    async def report(self, tick: Tick) -> None:
        """Append the decision to the log."""
        if tick.plan is None or tick.decided == "paused":
            return
        plan = tick.plan
        if tick.decided == "held":
            explanation = plan.spec.explanation.replace(change=f"held: {tick.problem}")
            plan = plan.with_spec(explanation=explanation, created_at=tick.now_seconds)
        try:
            self._decision_log.append(plan.model_dump_json(by_alias=True, exclude_none=True))
        except OSError as error:
            log.warning("the decision log cannot be written: %s", error)
