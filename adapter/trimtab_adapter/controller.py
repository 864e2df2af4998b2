"""`Controller`: the decisions of one pipeline and their state; the control loop and the simulator share it."""

import math
from collections.abc import Mapping
from dataclasses import dataclass, field
from typing import Literal

from trimtab_adapter.forecasting import forecast_record, not_below, not_below_rise, not_below_trend
from trimtab_adapter.observation import (
    MAX_PROMPT_TOKENS,
    MAX_ROUTER_CPU_SECONDS,
    MAX_ROWS,
    MIN_SHARE_ROWS,
    RATIO_RANGE,
    Load,
    Measured,
    State,
    aged,
    limit_rate_of_change,
    lookback_seconds,
)
from trimtab_adapter.planning.decide import Planner, PlanningInputs, decide
from trimtab_adapter.planning.drift_correction import AccuracyKey, RegisteredAccuracies, ThresholdKey
from trimtab_adapter.planning.hysteresis import outgrows
from trimtab_adapter.planning.slowdown_estimate import SlowdownEstimate
from trimtab_pipelines.plan import ForecastRecord, PipelinePlan
from trimtab_pipelines.profile import ModelProfile
from trimtab_pipelines.router_state import RecentRequests
from trimtab_pipelines.row_shares import Rows
from trimtab_pipelines.spec import InferencePipeline, InferencePipelineSpec
from trimtab_predictor.forecaster import Forecaster
from trimtab_predictor.load_history import Fault

LOAD_CHECK_SECONDS = 0.5
"""Interval at which the load is compared to the plan."""
Decided = Literal["changed", "kept", "held", "paused"]


@dataclass(frozen=True, slots=True)
class Tick:
    """Observation, forecast and plan of one tick."""

    now_seconds: float
    """Unix time."""
    pipeline: InferencePipeline
    """The pipeline, its budget limited to what is schedulable."""
    decided: Decided
    """Whether the plan changed; `held` if none could be computed; `paused` if the pipeline is paused."""
    plan: PipelinePlan | None
    """The plan decided or held; the proposed one in Advisory mode; None before the first."""
    load: Load | None = None
    """The observed load; None if the observation failed."""
    forecast: ForecastRecord | None = None
    """This tick's forecast, before hysteresis."""
    fault: Fault | None = None
    """The metrics' fault."""
    problem: str = ""
    """The reason why the plan was held."""
    config_problem: str = ""
    """The error of the newest pipeline or profiles; the last valid ones stay in use."""
    served: RecentRequests | None = None
    """Requests of the last minute, if a router reports them."""
    rejected_replicas: Mapping[str, str] = field(default_factory=dict)
    """Why routers do not use a replica, by its name and stage."""
    rows: Mapping[str, Rows] = field(default_factory=dict)
    """Rows of the last minute by stage and the point that answered them."""


def actionable_fields(plan: PipelinePlan) -> tuple[object, ...]:
    spec = plan.spec
    peak_rps = math.nan if spec.forecast is None else spec.forecast.peak_rps
    return spec.generation, spec.stages, spec.feasible, spec.reason, spec.planned_fraction, peak_rps


class Controller:
    """Forecaster, planner, recent forecasts, and smoothed measurements of rows and service times."""

    def __init__(self, forecaster: Forecaster, planner: Planner = decide) -> None:
        self.planner = planner
        self._forecaster = forecaster
        self._forecast_at = -math.inf
        self._recent: list[tuple[float, float]] = []
        self._rows: dict[str, Measured] = {}
        self._tokens: dict[str, Measured] = {}
        self._ratios: dict[tuple[str, str], Measured] = {}
        self._shares: dict[ThresholdKey, Measured] = {}
        self._router_cpu: Measured | None = None
        self._accuracies: dict[AccuracyKey, float] = {}
        self._slowdown = SlowdownEstimate()
        self._registered_accuracies: RegisteredAccuracies = {}

    def lookback_seconds(self, now_seconds: float) -> int:
        return lookback_seconds(now_seconds - self._forecast_at)

    def update(self, state: State) -> None:
        for stage, rows in state.rows_per_request.items():
            self._rows[stage] = limit_rate_of_change(self._rows.get(stage), rows, 0.0, MAX_ROWS)
        for stage, tokens in state.prompt_tokens.items():
            self._tokens[stage] = limit_rate_of_change(self._tokens.get(stage), tokens, 0.0, MAX_PROMPT_TOKENS)
        self._shares = aged(self._shares) | {
            threshold: limit_rate_of_change(self._shares.get(threshold), low_rows / rows, 0.0, 1.0)
            for threshold, (rows, low_rows) in state.low_confidence.items()
            if rows >= MIN_SHARE_ROWS
        }
        self._ratios = aged(self._ratios) | {
            key: limit_rate_of_change(self._ratios.get(key), ratio, *RATIO_RANGE)
            for key, ratio in state.service_ratios.items()
        }
        if state.router_cpu_seconds is not None:
            self._router_cpu = limit_rate_of_change(
                self._router_cpu, state.router_cpu_seconds, 0.0, MAX_ROUTER_CPU_SECONDS
            )
        self._accuracies = {which: round(accuracy, 2) for which, accuracy in state.accuracies.items()}
        self._registered_accuracies = state.registered_accuracies
        if state.served is not None:
            self._slowdown = self._slowdown.after(state.served)

    def forecast(
        self, load: Load, now_seconds: float, spec: InferencePipelineSpec, current: PipelinePlan | None
    ) -> ForecastRecord:
        """The demand to plan for; raise ObservationError if no load was measured."""
        adaptation = spec.adaptation
        forecast = forecast_record(self._forecaster, load, adaptation)
        self._forecast_at = now_seconds
        planned = None if current is None else current.spec.forecast
        if planned is not None and outgrows(load.newest_rps, planned.peak_rps, adaptation.headroom):
            forecast = not_below_rise(forecast, load, planned.peak_rps, adaptation.horizon_seconds)
        forecast = not_below_trend(forecast, load.history_rps, spec.node_startup_seconds, adaptation.horizon_seconds)
        return forecast if current is None else not_below(current.spec.forecast, forecast, load.missing)

    def planning_inputs(
        self, forecast: ForecastRecord, current: PipelinePlan | None, now_seconds: float, hold_seconds: float
    ) -> PlanningInputs:
        """The inputs of a decision; forecasts older than the hold time are dropped."""
        self._recent = [(at, rps) for at, rps in self._recent if at >= now_seconds - hold_seconds]
        return PlanningInputs(
            forecast=forecast,
            now_seconds=now_seconds,
            current=current,
            recent_rps=tuple(self._recent),
            rows_per_request={stage: rows.used for stage, rows in self._rows.items()},
            prompt_tokens={stage: tokens.used for stage, tokens in self._tokens.items()},
            service_ratios={key: ratio.used for key, ratio in self._ratios.items()},
            accuracies=dict(self._accuracies),
            escalated_shares={threshold: share.used for threshold, share in self._shares.items()},
            registered_accuracies=self._registered_accuracies,
            slowdown=self._slowdown.factor,
            router_cpu_seconds=0.0 if self._router_cpu is None else self._router_cpu.used,
        )

    def record_decision(self, at_seconds: float, forecast: ForecastRecord | None) -> None:
        """Record the load of a decision, our own or one we continue from."""
        if forecast is not None:
            self._recent.append((at_seconds, forecast.peak_rps))

    def step(
        self,
        pipeline: InferencePipeline,
        profiles: Mapping[str, ModelProfile],
        current: PipelinePlan,
        load: Load,
        state: State,
    ) -> PipelinePlan:
        """Decide once. Raises ObservationError if the load is unknown, PlanningError if no plan exists."""
        self.update(state)
        spec, now_seconds = pipeline.spec, load.now_seconds
        forecast = self.forecast(load, now_seconds, spec, current)
        hold_seconds = spec.adaptation.scale_down_stabilization_seconds
        inputs = self.planning_inputs(forecast, current, now_seconds, hold_seconds)
        plan = self.planner(pipeline, profiles, inputs)
        self.record_decision(now_seconds, forecast)
        return plan


def outgrows_plan(current: PipelinePlan | None, newest_rps: float, headroom: float) -> bool:
    """Whether the newest second's arrivals trigger the next decision early."""
    forecast = None if current is None else current.spec.forecast
    return forecast is not None and outgrows(newest_rps, forecast.peak_rps, headroom)
