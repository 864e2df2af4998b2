"""Where decisions go: a file and a journal, or a cluster."""

import logging
from pathlib import Path
from typing import Protocol

from trimtab_adapter.decision_log import DecisionLog
from trimtab_adapter.tick import Tick, actionable_fields
from trimtab_pipelines.documents import DocumentError, load_published_plan, write_json
from trimtab_pipelines.plan import PipelinePlan
from trimtab_pipelines.spec import InferencePipeline

log = logging.getLogger(__name__)


class PlanPublisher(Protocol):
    """Whoever keeps the plan in force and tells of each tick."""

    def adopt(self, pipeline: InferencePipeline, own: PipelinePlan | None) -> PipelinePlan | None:
        """The plan to go on from: our own, unless there is none yet or somebody else wrote one since."""

    async def publish(self, plan: PipelinePlan) -> None:
        """Put a plan into force, where it differs from what is; a failure is the next tick's to mend."""

    async def propose(self, plan: PipelinePlan) -> None:
        """Propose a plan that nothing acts on."""

    async def report(self, tick: Tick) -> None:
        """Report a tick; no exception leaves."""


class FilePlanPublisher:
    """A plan file, replaced in one step, and a journal of all decisions."""

    def __init__(self, plan: Path, journal: DecisionLog) -> None:
        self._path, self._journal = plan, journal
        self._written: PipelinePlan | None = None

    def adopt(self, pipeline: InferencePipeline, own: PipelinePlan | None) -> PipelinePlan | None:
        """Go on from the plan on disk at the start, if it is one of this pipeline."""
        if own is not None or not self._path.exists():
            return own
        try:
            plan = load_published_plan(self._path)
        except DocumentError as error:
            log.warning("%s; starting from a first plan", error)
            return None
        if plan.spec.pipeline != pipeline.name:
            log.warning("%s is a plan of %s, not of %s; starting anew", self._path, plan.spec.pipeline, pipeline.name)
            return None
        self._written = plan
        return plan

    async def publish(self, plan: PipelinePlan) -> None:
        """Write the plan, where it differs from what was written last."""
        if (
            self._written is None
            or actionable_fields(plan) != actionable_fields(self._written)
            or not self._path.exists()
        ):
            write_json(self._path, plan)
            self._written = plan
            log.info("plan %s: %s", plan.spec.generation, plan.spec.explanation.change)

    async def propose(self, plan: PipelinePlan) -> None:
        """Nothing but the journal tells of it."""

    async def report(self, tick: Tick) -> None:
        """Write what was decided on a line of its own."""
        if tick.plan is None or tick.decided == "paused":
            return
        plan = with_hold_reason(tick.plan, tick) if tick.decided == "held" else tick.plan
        try:
            self._journal.append(plan)
        except OSError as error:
            log.warning("the journal cannot be written: %s", error)


def with_hold_reason(plan: PipelinePlan, tick: Tick) -> PipelinePlan:
    """The plan in force, saying why it was held."""
    explanation = plan.spec.explanation.model_copy(update={"change": f"held: {tick.problem}"})
    spec = plan.spec.model_copy(update={"explanation": explanation, "created_at": tick.now_seconds})
    return plan.model_copy(update={"spec": spec})
