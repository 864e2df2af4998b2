"""`ControlLoop`: observe, forecast, plan and publish, once per interval.

A long decision is followed by a rest in proportion, so that no pipeline monopolises the solver threads. An error in one
tick costs that tick only: it is logged once, the plan in force stays, and the report has the reason. A load that
outgrows the plan between two ticks triggers the next tick early.
"""

import asyncio
import logging
import time
from collections.abc import Callable, Mapping
from concurrent.futures import Executor
from contextlib import suppress
from dataclasses import dataclass, replace
from typing import Protocol

from trimtab_adapter.controller import LOAD_CHECK_SECONDS, Controller, Decided, Tick, outgrows_plan
from trimtab_adapter.load_sources import LoadSource, StateSource
from trimtab_adapter.observation import Load, State
from trimtab_adapter.planning.decide import PlanningInputs, initial_inputs
from trimtab_adapter.planning.planning_problem import PlanningError
from trimtab_pipelines.plan import ForecastRecord, PipelinePlan
from trimtab_pipelines.profile import ModelProfile
from trimtab_pipelines.router_state import HISTORY_SECONDS
from trimtab_pipelines.spec import InferencePipeline
from trimtab_predictor.forecaster import Forecaster
from trimtab_predictor.load_history import ObservationError

log = logging.getLogger(__name__)

REST_FACTOR = 4.0
"""Rest after a decision, as a multiple of its CPU time."""


@dataclass(frozen=True, slots=True)
class LoadSources:
    """Sources of the load and of the routers' measurements."""

    loads: LoadSource
    routers: StateSource | None
    check_seconds: Callable[[], float] = lambda: LOAD_CHECK_SECONDS


class ConfigSource(Protocol):
    """Source of the pipeline and profiles that decisions use."""

    pipeline: InferencePipeline
    """Its budget is limited to what is schedulable."""
    profiles: Mapping[str, ModelProfile]
    """By stage."""
    remark: str
    """How the pipeline differs from the user's document, for the explanation; else empty."""

    def refresh(self) -> str | None:
        """Load changes; return the error, or None."""


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


class ControlLoop:
    """The control loop of one pipeline, with the plan in force and the controller's state."""

    def __init__(
        self,
        config: ConfigSource,
        publisher: PlanPublisher,
        sources: LoadSources,
        forecaster: Forecaster,
        executors: Callable[[InferencePipeline], Executor] | None = None,
    ) -> None:
        self._config, self._publisher, self._sources = config, publisher, sources
        self._executors = executors
        self.controller = Controller(forecaster)
        self._state = State()
        self._logged_problem = ""  # the last problem logged
        self.current: PipelinePlan | None = None
        self.record_usage: Callable[[InferencePipeline, PipelinePlan | None], None] = lambda *_: None
        self.ticked_at = time.monotonic()
        self._computed_seconds = 0.0
        self._woken = asyncio.Event()
        self._adopt_plan()

    def wake(self) -> None:
        self._woken.set()

    @property
    def interval_seconds(self) -> float:
        return self._config.pipeline.spec.adaptation.interval_seconds

    async def run(self, stop: asyncio.Event, clock: Callable[[], float] = time.time, first: float = 1.0) -> None:
        """Tick until stopped; an overrun interval is followed by the next tick at once.

        `first` is the share of an interval until the first tick, so that many loops do not tick together.
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
        """Leave the solver threads to other pipelines for a while."""
        seconds, self._computed_seconds = REST_FACTOR * self._computed_seconds, 0.0
        with suppress(TimeoutError):
            async with asyncio.timeout(seconds):
                await stop.wait()

    async def _wait(self, stop: asyncio.Event, due: float) -> bool:
        """Wait until the next tick is due or the loop stops; True if the tick was triggered early."""
        loop = asyncio.get_running_loop()
        alarms = [asyncio.ensure_future(stop.wait()), asyncio.ensure_future(self._woken.wait())]
        try:
            while (left := due - loop.time()) > 0:
                timeout = min(left, self._sources.check_seconds())
                if (await asyncio.wait(alarms, timeout=timeout, return_when=asyncio.FIRST_COMPLETED))[0]:
                    return not stop.is_set()
                if due > loop.time() and await self._outgrown():
                    return True
        finally:
            for alarm in alarms:
                alarm.cancel()
        return False

    async def _outgrown(self) -> bool:
        """Compare the routers' newest second to the plan; errors are left to the next tick."""
        routers = self._sources.routers
        if routers is None or self._paused or self.current is None or self.current.spec.forecast is None:
            return False
        try:
            load = await routers.load(time.time())
            return outgrows_plan(self.current, load.newest_rps, self._config.pipeline.spec.adaptation.headroom)
        except ObservationError:
            return False
        except Exception:
            log.exception("%s: the newest second cannot be read", self._config.pipeline.name)
            return False

    async def tick(self, now_seconds: float) -> None:
        """Decide once; never raises."""
        self.ticked_at = time.monotonic()
        self._woken.clear()
        problem = self._config.refresh() or ""
        if problem:
            log.warning("%s", problem)
        self._adopt_plan()
        tick = await self._tick(now_seconds)
        self.ticked_at = time.monotonic()
        state = self._state
        observed = replace(tick, served=state.served, rejected_replicas=state.rejected_replicas, rows=state.rows)
        await self._publisher.report(replace(observed, config_problem=problem))

    async def _tick(self, now_seconds: float) -> Tick:
        """Observe, plan and publish; an error holds the plan in force."""
        decided: Decided = "paused" if self._paused else "held"
        pipeline, plan = self._config.pipeline, self.current
        load: Load | None = None
        forecast: ForecastRecord | None = None
        problem, fault = "", None
        try:
            if pipeline.spec.mode != "Auto":
                self.record_usage(pipeline, plan)
            load = await self._observe(now_seconds)
            if not self._paused:
                forecast = self.controller.forecast(load, now_seconds, pipeline.spec, self.current)
                chosen = await self._decide(forecast, now_seconds)
                await self._publish(chosen)
                changed = plan is None or plan.spec.generation != chosen.spec.generation
                decided, plan = "changed" if changed else "kept", chosen
                self._logged_problem = ""
        except ObservationError as error:
            problem, fault = self._held(str(error)), error.fault
        except PlanningError as error:
            problem = self._held(str(error))
        except Exception as error:
            log.exception("plan %s held", self._generation)
            decided, plan, problem = "held", self.current, f"{type(error).__name__}: {error}"
        return Tick(now_seconds, pipeline, decided, plan, load, forecast, fault, problem)

    def _held(self, problem: str) -> str:
        """The reason why the plan in force is held; empty if the pipeline is paused."""
        if self._paused:
            return ""
        if problem != self._logged_problem:  # log a lasting problem once; the status keeps reporting it
            log.warning("%s: plan %s held: %s", self._config.pipeline.name, self._generation, problem)
            self._logged_problem = problem
        return problem

    @property
    def _paused(self) -> bool:
        return self._config.pipeline.spec.mode == "Paused"

    @property
    def _generation(self) -> int:
        return 0 if self.current is None else self.current.spec.generation

    def _adopt_plan(self) -> None:
        """Continue from the plan in force if another writer replaced ours."""
        plan = self._publisher.adopt(self._config.pipeline, self.current)
        if plan is not None and plan is not self.current:
            self.controller.record_decision(plan.spec.created_at, plan.spec.forecast)
        self.current = plan

    async def _begin(self, now_seconds: float) -> None:
        pipeline = self._config.pipeline
        if self.current is not None or self._paused:
            return
        try:
            plan = await self._solve(initial_inputs(now_seconds=now_seconds))
            await self._publish(plan)
        except (PlanningError, OSError) as error:
            log.warning("%s: no first plan: %s", pipeline.name, error)
            return
        except Exception:
            log.exception("%s: no first plan", pipeline.name)
            return
        await self._publisher.report(Tick(now_seconds, pipeline, "changed", plan))

    async def _observe(self, now_seconds: float) -> Load:
        # A paused pipeline is not forecast, so it needs no long history.
        seconds = HISTORY_SECONDS if self._paused else self.controller.lookback_seconds(now_seconds)
        load = await self._sources.loads.load(now_seconds, seconds)
        self._state = State()
        if self._sources.routers is not None:
            try:
                state = await self._sources.routers.state()
                self._state = state
                self.controller.update(state)
            except ObservationError as error:
                log.warning("service times and rows are not updated: %s", error)
        return load

    async def _decide(self, forecast: ForecastRecord, now_seconds: float) -> PipelinePlan:
        hold_seconds = self._config.pipeline.spec.adaptation.scale_down_stabilization_seconds
        inputs = self.controller.planning_inputs(forecast, self.current, now_seconds, hold_seconds)
        started = time.perf_counter()
        plan = await self._solve(inputs)
        spent = time.perf_counter() - started
        self.controller.record_decision(now_seconds, forecast)
        explanation = plan.spec.explanation
        remark = "; ".join(filter(None, (explanation.change, self._config.remark)))
        explanation = explanation.replace(solve_seconds=spent, change=remark)
        return plan.with_spec(explanation=explanation)

    async def _solve(self, inputs: PlanningInputs) -> PipelinePlan:
        pipeline, profiles = self._config.pipeline, self._config.profiles
        if self._executors is None:
            return self._compute(pipeline, profiles, inputs)
        decide_in = asyncio.get_running_loop().run_in_executor
        return await decide_in(self._executors(pipeline), self._compute, pipeline, profiles, inputs)

    def _compute(
        self, pipeline: InferencePipeline, profiles: Mapping[str, ModelProfile], inputs: PlanningInputs
    ) -> PipelinePlan:
        began = time.thread_time()
        try:
            return self.controller.planner(pipeline, profiles, inputs)
        finally:
            self._computed_seconds = time.thread_time() - began

    async def _publish(self, plan: PipelinePlan) -> None:
        """Put the decision into force in Auto mode, propose it in Advisory mode."""
        if self._config.pipeline.spec.mode != "Auto":
            await self._publisher.propose(plan)
            return
        self.current = plan
        await self._publisher.publish(plan)
