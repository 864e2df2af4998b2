"""The slow loop: each interval observe, forecast, decide, publish. Shell around `decide`.

One fault in one tick costs that tick only: it is logged once, the plan in force stays, and the journal says that it was
held and why. A load that outgrows the plan between two ticks is not waited out: it brings the next tick forward.
"""

import asyncio
import logging
import math
import time
from collections.abc import Callable
from contextlib import suppress
from dataclasses import dataclass
from pathlib import Path

from trimtab_adapter.decide import PlanningError, Situation, decide, initial_plan
from trimtab_adapter.documents import Documents
from trimtab_adapter.forecasting import forecast_record
from trimtab_adapter.hysteresis import outgrows
from trimtab_adapter.journal import Journal
from trimtab_adapter.observation import (
    MOST_ROWS,
    RATIO_RANGE,
    Load,
    Measured,
    ObservationError,
    damp,
)
from trimtab_adapter.sources import LoadSource, RouterSource
from trimtab_pipelines.documents import DocumentError, load_plan, write_json
from trimtab_pipelines.plan import PipelinePlan
from trimtab_predictor.forecaster import Forecaster

log = logging.getLogger(__name__)

LOOK_SECONDS = 0.5  # how often to look whether the load has outgrown the plan


@dataclass(frozen=True, slots=True)
class Outlets:
    """Where decisions go."""

    plan: Path
    journal: Journal


class Loop:
    """Keeps what one tick hands to the next: the plan in force, recent forecasts, damped measurements."""

    def __init__(
        self,
        documents: Documents,
        outlets: Outlets,
        loads: LoadSource,
        router: RouterSource | None,
        forecaster: Forecaster,
    ) -> None:
        self._documents, self._outlets = documents, outlets
        self._loads, self._router, self._forecaster = loads, router, forecaster
        self._recent: list[tuple[float, float]] = []
        self._rows: dict[str, Measured] = {}
        self._ratios: dict[tuple[str, str], Measured] = {}
        self.current = self._take_up()

    async def run(self, stop: asyncio.Event, clock: Callable[[], float] = time.time) -> None:
        """Tick until told to stop. An interval that was overrun is followed by the next tick at once."""
        self._begin(clock())
        loop = asyncio.get_running_loop()
        due = loop.time()
        while not stop.is_set():
            due = max(due + self._documents.pipeline.spec.adaptation.interval_seconds, loop.time())
            if await self._wait(stop, due):
                due = loop.time()
            if not stop.is_set():
                await self.tick(clock())

    async def _wait(self, stop: asyncio.Event, due: float) -> bool:
        """Wait until the next tick is due, or the end; True where the load outgrew the plan before that."""
        loop = asyncio.get_running_loop()
        while (left := due - loop.time()) > 0:
            with suppress(TimeoutError):
                await asyncio.wait_for(stop.wait(), min(left, LOOK_SECONDS))
                return False
            if due > loop.time() and await self._outgrown():
                return True
        return False

    async def _outgrown(self) -> bool:
        """Look at the router's newest second; whatever is wrong with the answer, the next tick will say."""
        if self._router is None or self.current is None or self.current.spec.forecast is None:
            return False
        try:
            load = await self._router.load(0.0)
        except ObservationError:
            return False
        headroom = self._documents.pipeline.spec.adaptation.headroom
        return outgrows(load.newest_rps, self.current.spec.forecast.peak_rps, headroom)

    async def tick(self, now_seconds: float) -> None:
        """Decide once; no exception leaves."""
        problem = self._documents.refresh()
        if problem is not None:
            log.warning("%s", problem)
        if self._documents.pipeline.spec.mode == "Paused":
            return
        try:
            load = await self._loads.load(now_seconds)
            await self._measure()
            self._publish(self._decide(load, now_seconds))
        except (ObservationError, PlanningError) as error:
            log.warning("plan %s held: %s", self._generation, error)
            self._hold(str(error), now_seconds)
        except Exception as error:
            log.exception("plan %s held", self._generation)
            self._hold(f"{type(error).__name__}: {error}", now_seconds)

    @property
    def _generation(self) -> int:
        return 0 if self.current is None else self.current.spec.generation

    def _take_up(self) -> PipelinePlan | None:
        """Go on from the plan on disk, if it is one of this pipeline."""
        path, pipeline = self._outlets.plan, self._documents.pipeline
        if not path.exists():
            return None
        try:
            plan = load_plan(path)
        except DocumentError as error:
            log.warning("%s; starting from a first plan", error)
            return None
        if plan.spec.pipeline != pipeline.name:
            log.warning("%s is a plan of %s, not of %s; starting anew", path, plan.spec.pipeline, pipeline.name)
            return None
        if plan.spec.forecast is not None:
            self._recent.append((plan.spec.created_at, plan.spec.forecast.peak_rps))
        return plan

    def _begin(self, now_seconds: float) -> None:
        """Publish a first plan where there is none."""
        pipeline = self._documents.pipeline
        if self.current is not None or pipeline.spec.mode == "Paused":
            return
        try:
            self._publish(initial_plan(pipeline, self._documents.profiles, now_seconds=now_seconds))
        except PlanningError as error:
            log.warning("no first plan: %s", error)

    async def _measure(self) -> None:
        """Follow what the router measured; without it the values so far stay in use."""
        if self._router is None:
            return
        try:
            state = await self._router.state()
        except ObservationError as error:
            log.warning("service times and rows stay as they were: %s", error)
            return
        for stage, rows in state.rows_per_request.items():
            self._rows[stage] = damp(self._rows.get(stage), rows, 0.0, MOST_ROWS)
        for key, ratio in state.service_ratios.items():
            self._ratios[key] = damp(self._ratios.get(key), ratio, *RATIO_RANGE)

    def _decide(self, load: Load, now_seconds: float) -> PipelinePlan:
        pipeline = self._documents.pipeline
        forecast = forecast_record(self._forecaster, load, pipeline.spec.adaptation.headroom)
        hold = pipeline.spec.adaptation.hold_seconds
        self._recent = [(at, rps) for at, rps in self._recent if at >= now_seconds - hold]
        situation = Situation(
            forecast=forecast,
            now_seconds=now_seconds,
            current=self.current,
            recent_rps=tuple(self._recent),
            rows_per_request={stage: rows.used for stage, rows in self._rows.items() if rows.used > 0},
            service_ratios={key: ratio.used for key, ratio in self._ratios.items()},
        )
        started = time.perf_counter()
        plan = decide(pipeline, self._documents.profiles, situation)
        spent = time.perf_counter() - started
        self._recent.append((now_seconds, forecast.peak_rps))
        explanation = plan.spec.explanation.model_copy(update={"solve_seconds": spent})
        return plan.model_copy(update={"spec": plan.spec.model_copy(update={"explanation": explanation})})

    def _publish(self, plan: PipelinePlan) -> None:
        """Journal the decision; in Auto mode also put it into force, where it differs from what is."""
        if self._documents.pipeline.spec.mode == "Auto":
            if self.current is None or _essence(plan) != _essence(self.current) or not self._outlets.plan.exists():
                write_json(self._outlets.plan, plan)
                log.info("plan %s: %s", plan.spec.generation, plan.spec.explanation.change)
            self.current = plan
        self._outlets.journal.append(plan)

    def _hold(self, why: str, now_seconds: float) -> None:
        if self.current is None:
            return
        explanation = self.current.spec.explanation.model_copy(update={"change": f"held: {why}"})
        held = self.current.spec.model_copy(update={"explanation": explanation, "created_at": now_seconds})
        try:
            self._outlets.journal.append(self.current.model_copy(update={"spec": held}))
        except OSError as error:
            log.warning("the journal cannot be written: %s", error)


def _essence(plan: PipelinePlan) -> tuple[object, ...]:
    """Return what a reader of the plan acts on."""
    spec = plan.spec
    peak_rps = math.nan if spec.forecast is None else spec.forecast.peak_rps
    return spec.generation, spec.stages, spec.feasible, spec.reason, spec.planned_fraction, peak_rps
