"""The slow loop: each interval observe, forecast, decide, publish. Shell around `decide`.

A decision that took long is followed by a rest in proportion, so that no pipeline takes the solvers from the others.

One fault in one tick costs that tick only: it is logged once, the plan in force stays, and what is told says that it
was held and why. A load that outgrows the plan between two ticks is not waited out: it brings the next tick forward.
"""

import asyncio
import logging
import math
import time
from collections.abc import Callable, Mapping
from concurrent.futures import Executor
from contextlib import suppress
from dataclasses import dataclass, replace

from trimtab_adapter.decide import PlanningError, Situation, decide, first_situation
from trimtab_adapter.documents import Documents
from trimtab_adapter.forecasting import forecast_record
from trimtab_adapter.hysteresis import outgrows
from trimtab_adapter.observation import (
    MOST_ROWS,
    RATIO_RANGE,
    Load,
    Measured,
    ObservationError,
    Served,
    damp,
    seconds_to_ask,
)
from trimtab_adapter.outlets import Outlets
from trimtab_adapter.sharing import Planner
from trimtab_adapter.sources import LoadSource, StateSource
from trimtab_adapter.tick import Tick
from trimtab_pipelines.plan import ForecastRecord, PipelinePlan
from trimtab_pipelines.profile import ModelProfile
from trimtab_pipelines.spec import InferencePipeline
from trimtab_predictor.forecaster import Forecaster

log = logging.getLogger(__name__)

LOOK_SECONDS = 0.5  # how often to look whether the load has outgrown the plan
RESTS = 4.0  # times as long as a decision computed, until the next one


@dataclass(frozen=True, slots=True)
class Senses:
    """Where a loop learns of the load, and of what the routers measured."""

    loads: LoadSource
    routers: StateSource | None
    look_seconds: Callable[[], float] = lambda: LOOK_SECONDS


class Loop:
    """Keeps what one tick hands to the next: the plan in force, recent forecasts, damped measurements."""

    def __init__(
        self,
        documents: Documents,
        outlets: Outlets,
        senses: Senses,
        forecaster: Forecaster,
        solving: Callable[[InferencePipeline], Executor] | None = None,
    ) -> None:
        """Take its surroundings; `solving` says where to decide, so that the event loop stays free meanwhile."""
        self._documents, self._outlets, self._senses = documents, outlets, senses
        self._forecaster, self._solving = forecaster, solving
        self._recent: list[tuple[float, float]] = []
        self._rows: dict[str, Measured] = {}
        self._ratios: dict[tuple[str, str], Measured] = {}
        self._served: Served | None = None
        self._held_for = ""  # the problem of the last held tick
        self._forecast_at = -math.inf
        self.current: PipelinePlan | None = None
        self.planner: Planner = decide  # or one that minds other pipelines too
        self.ticked_at = time.monotonic()
        self._computed_seconds = 0.0  # by the last decision
        self._woken = asyncio.Event()
        self._take_up()

    def wake(self) -> None:
        """Bring the next tick forward: something was changed that is worth a decision."""
        self._woken.set()

    @property
    def interval_seconds(self) -> float:
        """How often it ticks."""
        return self._documents.pipeline.spec.adaptation.interval_seconds

    async def run(self, stop: asyncio.Event, clock: Callable[[], float] = time.time, first: float = 1.0) -> None:
        """Tick until told to stop. An interval that was overrun is followed by the next tick at once.

        `first` is the share of an interval after which the first tick is due: many loops need not all tick together.
        """
        await self._begin(clock())
        loop = asyncio.get_running_loop()
        due = loop.time() + (first - 1.0) * self.interval_seconds
        while not stop.is_set():
            await self._rest(stop)
            due = max(due + self.interval_seconds, loop.time())
            if await self._wait(stop, due):
                due = loop.time()
            if not stop.is_set():
                await self.tick(clock())

    async def _rest(self, stop: asyncio.Event) -> None:
        """Leave the solvers to others for a while, whatever may have changed."""
        seconds, self._computed_seconds = RESTS * self._computed_seconds, 0.0
        with suppress(TimeoutError):
            await asyncio.wait_for(stop.wait(), seconds)

    async def _wait(self, stop: asyncio.Event, due: float) -> bool:
        """Wait until the next tick is due, or the end; True where it was brought forward."""
        loop = asyncio.get_running_loop()
        alarms = [asyncio.ensure_future(stop.wait()), asyncio.ensure_future(self._woken.wait())]
        try:
            while (left := due - loop.time()) > 0:
                look = min(left, self._senses.look_seconds())
                if (await asyncio.wait(alarms, timeout=look, return_when=asyncio.FIRST_COMPLETED))[0]:
                    return not stop.is_set()
                if due > loop.time() and await self._outgrown():
                    return True
        finally:
            for alarm in alarms:
                alarm.cancel()
        return False

    async def _outgrown(self) -> bool:
        """Look at the routers' newest second; whatever is wrong with the answer, the next tick will say."""
        routers, pipeline = self._senses.routers, self._documents.pipeline
        if routers is None or self.current is None or self.current.spec.forecast is None:
            return False
        if pipeline.spec.mode == "Paused":
            return False
        try:
            load = await routers.load(time.time())
        except ObservationError:
            return False
        headroom = pipeline.spec.adaptation.headroom
        return outgrows(load.newest_rps, self.current.spec.forecast.peak_rps, headroom)

    async def tick(self, now_seconds: float) -> None:
        """Decide once; no exception leaves."""
        self.ticked_at = time.monotonic()
        self._woken.clear()
        problem = self._documents.refresh() or ""
        if problem:
            log.warning("%s", problem)
        self._take_up()
        found = await self._tick(now_seconds)
        self.ticked_at = time.monotonic()
        await self._outlets.tell(replace(found, documents_problem=problem, served=self._served))

    async def _tick(self, now_seconds: float) -> Tick:
        pipeline = self._documents.pipeline
        found = Tick(now_seconds, pipeline, "paused", self.current)
        try:
            paused = pipeline.spec.mode == "Paused"  # then nobody forecasts, and nobody would remember hours
            since_seconds = 0.0 if paused else now_seconds - self._forecast_at
            load = await self._senses.loads.load(now_seconds, seconds_to_ask(since_seconds))
            found = replace(found, load=load)
            await self._measure()
            if paused:
                return found
            forecast = self._forecast(load)
            self._forecast_at = now_seconds
            found = replace(found, forecast=forecast)
            plan = await self._decide(forecast, now_seconds)
            changed = self.current is None or plan.spec.generation != self.current.spec.generation
            found = replace(found, decided="changed" if changed else "kept", plan=plan)
            await self._publish(plan)
            self._held_for = ""
        except ObservationError as error:
            return self._held(found, str(error), replace(found, fault=error.fault))
        except PlanningError as error:
            return self._held(found, str(error), found)
        except Exception as error:
            log.exception("plan %s held", self._generation)
            return replace(found, decided="held", plan=self.current, problem=f"{type(error).__name__}: {error}")
        return found

    def _held(self, before: Tick, problem: str, found: Tick) -> Tick:
        if before.pipeline.spec.mode == "Paused":
            return found
        if problem != self._held_for:  # a fault that lasts is told of by the status, not by a line each tick
            log.warning("%s: plan %s held: %s", before.pipeline.name, self._generation, problem)
            self._held_for = problem
        return replace(found, decided="held", plan=self.current, problem=problem)

    @property
    def _generation(self) -> int:
        return 0 if self.current is None else self.current.spec.generation

    def _take_up(self) -> None:
        """Go on from the plan in force, where that is not our own any more."""
        plan = self._outlets.take_up(self._documents.pipeline, self.current)
        if plan is not None and plan is not self.current and plan.spec.forecast is not None:
            self._recent.append((plan.spec.created_at, plan.spec.forecast.peak_rps))
        self.current = plan

    async def _begin(self, now_seconds: float) -> None:
        """Publish a first plan where there is none."""
        pipeline = self._documents.pipeline
        if self.current is not None or pipeline.spec.mode == "Paused":
            return
        try:
            plan = await self._solve(first_situation(now_seconds=now_seconds))
            await self._publish(plan)
        except (PlanningError, OSError) as error:
            log.warning("%s: no first plan: %s", pipeline.name, error)
            return
        await self._outlets.tell(Tick(now_seconds, pipeline, "changed", plan))

    async def _measure(self) -> None:
        """Follow what the routers measured; without it the values so far stay in use."""
        self._served = None
        if self._senses.routers is None:
            return
        try:
            state = await self._senses.routers.state()
        except ObservationError as error:
            log.warning("service times and rows stay as they were: %s", error)
            return
        self._served = state.served
        for stage, rows in state.rows_per_request.items():
            self._rows[stage] = damp(self._rows.get(stage), rows, 0.0, MOST_ROWS)
        for key, ratio in state.service_ratios.items():
            self._ratios[key] = damp(self._ratios.get(key), ratio, *RATIO_RANGE)

    def _forecast(self, load: Load) -> ForecastRecord:
        """Forecast; where part of the load could not be seen, never below what the plan stands on."""
        forecast = forecast_record(self._forecaster, load, self._documents.pipeline.spec.adaptation)
        planned = self.current.spec.forecast if self.current is not None else None
        if not load.missing or planned is None or forecast.peak_rps >= planned.peak_rps:
            return forecast
        reason = f"not below the plan's, for part of the load is not known: {load.missing}"
        return forecast.model_copy(update={"peak_rps": planned.peak_rps, "reason": reason})

    async def _decide(self, forecast: ForecastRecord, now_seconds: float) -> PipelinePlan:
        pipeline = self._documents.pipeline
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
        plan = await self._solve(situation)
        spent = time.perf_counter() - started
        self._recent.append((now_seconds, forecast.peak_rps))
        explanation = plan.spec.explanation
        remark = "; ".join(filter(None, (explanation.change, self._documents.remark)))
        explanation = explanation.model_copy(update={"solve_seconds": spent, "change": remark})
        return plan.model_copy(update={"spec": plan.spec.model_copy(update={"explanation": explanation})})

    async def _solve(self, situation: Situation) -> PipelinePlan:
        pipeline, profiles = self._documents.pipeline, self._documents.profiles
        if self._solving is None:
            return self._compute(pipeline, profiles, situation)
        decide_in = asyncio.get_running_loop().run_in_executor
        return await decide_in(self._solving(pipeline), self._compute, pipeline, profiles, situation)

    def _compute(
        self, pipeline: InferencePipeline, profiles: Mapping[str, ModelProfile], situation: Situation
    ) -> PipelinePlan:
        began = time.thread_time()
        try:
            return self.planner(pipeline, profiles, situation)
        finally:
            self._computed_seconds = time.thread_time() - began

    async def _publish(self, plan: PipelinePlan) -> None:
        """Put the decision into force in Auto mode, propose it in Advisory mode."""
        if self._documents.pipeline.spec.mode != "Auto":
            await self._outlets.advise(plan)
            return
        self.current = plan
        await self._outlets.publish(plan)
