"""`PlanPublisher`: writes decisions to a plan file and a decision log, or to the cluster."""

import logging
from pathlib import Path
from typing import Protocol

from trimtab_adapter.tick import Tick, actionable_fields
from trimtab_pipelines.documents import DocumentError, load_published_plan, write_json
from trimtab_pipelines.jsonl import JsonLinesFile
from trimtab_pipelines.plan import PipelinePlan
from trimtab_pipelines.spec import InferencePipeline

log = logging.getLogger(__name__)

MAX_LOG_BYTES = 32 * 2**20


class PlanPublisher(Protocol):
    """Publishes plans and reports ticks."""

    def adopt(self, pipeline: InferencePipeline, own: PipelinePlan | None) -> PipelinePlan | None:
        """The plan to continue from: our own, unless there is none or another writer replaced it."""

    async def publish(self, plan: PipelinePlan) -> None:
        """Put a plan into force if it differs from the current one; a failure is retried at the next tick."""

    async def propose(self, plan: PipelinePlan) -> None:
        """Publish a proposal that nothing acts on."""

    async def report(self, tick: Tick) -> None:
        """Report a tick; never raises."""


class DecisionLog:
    """Appends decisions; when full, drops the older half."""

    def __init__(self, path: Path, max_bytes: int = MAX_LOG_BYTES) -> None:
        self._lines = JsonLinesFile(path, max_bytes)

    def append(self, plan: PipelinePlan) -> None:
        """Append one decision; raises OSError if the write fails."""
        self._lines.append(plan.model_dump_json(by_alias=True, exclude_none=True))


class FilePlanPublisher:
    """A plan file, replaced atomically, and a log of all decisions."""

    def __init__(self, plan: Path, decision_log: DecisionLog) -> None:
        self._path, self._decision_log = plan, decision_log
        self._written: PipelinePlan | None = None

    def adopt(self, pipeline: InferencePipeline, own: PipelinePlan | None) -> PipelinePlan | None:
        """Continue from the plan on disk at the start, if it is one of this pipeline."""
        if own is not None or not self._path.exists():
            return own
        try:
            plan = load_published_plan(self._path)
        except DocumentError as error:
            log.warning("%s; starting from a first plan", error)
            return None
        if plan.spec.pipeline != pipeline.name:
            log.warning(
                "%s is a plan of %s, not of %s; starting from a first plan",
                self._path,
                plan.spec.pipeline,
                pipeline.name,
            )
            return None
        self._written = plan
        return plan

    async def publish(self, plan: PipelinePlan) -> None:
        """Write the plan if it differs from the last one written."""
        if (
            self._written is None
            or actionable_fields(plan) != actionable_fields(self._written)
            or not self._path.exists()
        ):
            write_json(self._path, plan)
            self._written = plan
            log.info("plan %s: %s", plan.spec.generation, plan.spec.explanation.change)

    async def propose(self, plan: PipelinePlan) -> None:
        """Nothing: the decision log reports it."""

    async def report(self, tick: Tick) -> None:
        """Append the decision to the log."""
        if tick.plan is None or tick.decided == "paused":
            return
        plan = with_hold_reason(tick.plan, tick) if tick.decided == "held" else tick.plan
        try:
            self._decision_log.append(plan)
        except OSError as error:
            log.warning("the decision log cannot be written: %s", error)


def with_hold_reason(plan: PipelinePlan, tick: Tick) -> PipelinePlan:
    """The plan in force with the reason why it was held."""
    explanation = plan.spec.explanation.model_copy(update={"change": f"held: {tick.problem}"})
    spec = plan.spec.model_copy(update={"explanation": explanation, "created_at": tick.now_seconds})
    return plan.model_copy(update={"spec": spec})
