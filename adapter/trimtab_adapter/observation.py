"""Observations: parses and validates the router's load and state.

An impossible number must not become a plan: it raises, and the plan in force is held.
"""

import math
from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass, field, replace
from typing import Literal, TypeVar

from pydantic import ValidationError

from trimtab_adapter.planning.drift_correction import AccuracyKey, RegisteredAccuracies, ThresholdKey
from trimtab_pipelines.accuracy_evidence import Accuracy
from trimtab_pipelines.request_outcome import RequestOutcome
from trimtab_pipelines.router_state import (
    HISTORY_SECONDS,
    RecentRequests,
    RegisteredAccuracy,
    RouterLoad,
    RouterState,
    StateModel,
    VariantState,
    reported_rows,
)
from trimtab_pipelines.row_shares import Rows
from trimtab_predictor.context import MEMORY_SECONDS
from trimtab_predictor.load_history import ObservationError

MAX_RPS = 1e7
"""No single router receives more; a larger count is a fault."""
MAX_ROWS = 1e4
"""Rows that one request can fan out to."""
MAX_PROMPT_TOKENS = 1e8
"""No model accepts more."""
MAX_ROUTER_CPU_SECONDS = 10.0
"""CPU time of a router for one request."""
RATIO_RANGE = (0.5, 4.0)
"""A machine farther from its profile needs a new profile, not a correction."""
WEIGHT = 0.3
"""Weight of the newest measurement in the moving average."""
RISE = 0.1
"""Relative increase above which a measurement replaces the value in use."""
MAX_AGE = 60
"""Updates, five minutes or more, after which the ratio of a variant that no longer runs is forgotten.

A variant that the machine was too slow for is tried again after that, which costs two changes.
"""
MIN_SHARE_ROWS = 1000
"""Rows of a minute from which their share below a threshold is a measurement."""
LEAP = 0.5
"""Relative increase above which a measurement replaces it at once."""
FALL = 0.25
"""Relative decrease below which it is replaced; wider, so that noise around one value does not change plans."""
_Model = TypeVar("_Model", bound=StateModel)
_Key = TypeVar("_Key")
_MISSHAPEN = {"missing", "model_type", "dict_type", "is_instance_of", "sequence_str"}
_EXPECTED = {"float_type": "a finite number", "finite_number": "a finite number", "int_type": "a whole number"}


def lookback_seconds(since_seconds: float) -> int:
    """Seconds of load to request, by the time since the last forecast.

    Forecasters keep a history, so ten minutes bring them up to date. At the start, after a longer gap, or if the clock
    went back, all that a forecast can use is requested.
    """
    return HISTORY_SECONDS if 0 <= since_seconds < HISTORY_SECONDS else MEMORY_SECONDS


@dataclass(frozen=True, slots=True)
class Load:
    """Arrivals per second, oldest first, of the whole seconds before `now_seconds` (Unix time); NaN if not measured.

    `missing` names the routers whose arrivals are not included: the sum may be too low, so the plan is not reduced.
    `sliding_rps`: arrivals within one second before `now_seconds`, which need not be whole; 0 if not measured.
    """

    now_seconds: float
    history_rps: tuple[float, ...]
    missing: str = ""
    sliding_rps: float = 0.0

    @property
    def peak_rps(self) -> float:
        """Peak arrivals per second over the last ten seconds."""
        return max((rps for rps in self.history_rps[-10:] if math.isfinite(rps)), default=0.0)

    @property
    def mean_rps(self) -> float:
        newest = [rps for rps in self.history_rps[-10:] if math.isfinite(rps)]
        return math.fsum(newest) / len(newest) if newest else 0.0

    @property
    def newest_rps(self) -> float:
        """Arrivals in the newest whole second or in the second before `now_seconds`; 0 if not measured."""
        newest = self.history_rps[-1] if self.history_rps else 0.0
        return max(newest, self.sliding_rps) if math.isfinite(newest) else self.sliding_rps


@dataclass(frozen=True, slots=True)
class Measured:
    """A smoothed measurement: the moving average, and the value in use, which follows only clear changes."""

    average: float
    used: float
    age: int = 0
    """Updates since the last measurement."""


@dataclass(frozen=True, slots=True)
class State:
    """Routers' measurements: rows per request, service ratios by stage and variant, outcomes of the last minute.

    `prompt_tokens`: mean by generation stage. These and rows per request rise within seconds and fall after twenty or
    more. `accuracies`: those that drifted from the profile. `registered_accuracies`: accuracies on tasks registered at
    run time.
    """

    rows_per_request: Mapping[str, float] = field(default_factory=dict)
    service_ratios: Mapping[tuple[str, str], float] = field(default_factory=dict)
    served: RecentRequests | None = None
    accuracies: Mapping[AccuracyKey, float] = field(default_factory=dict)
    registered_accuracies: RegisteredAccuracies = field(default_factory=dict)
    prompt_tokens: Mapping[str, float] = field(default_factory=dict)
    rejected_replicas: Mapping[str, str] = field(default_factory=dict)
    """Why routers do not use a replica, by its name and stage."""
    router_cpu_seconds: float | None = None
    """CPU time of a router for a request."""
    rows: Mapping[str, Rows] = field(default_factory=dict)
    """Rows of the last minute by stage and the point that answered them."""
    low_confidence: Mapping[ThresholdKey, tuple[float, float]] = field(default_factory=dict)
    """Rows of the last minute whose confidence was compared to a threshold, and those below it."""


def read_load(content: object) -> Load:
    """Parse a router's load. Zeros before the first arrival are not history, unless all are zero."""
    document = _read(RouterLoad, content, "load", "{'now': seconds, 'rps': [...]}")
    if not document.rps:
        raise ObservationError("load.rps is empty; expected the arrivals of each of the last seconds", "Missing")
    now = _within(document.now, "load.now", 0.0, math.inf)
    rps = [_within(value, f"load.rps[{n}]", 0.0, MAX_RPS) for n, value in enumerate(document.rps)]
    current = _within(document.current, "load.current", 0.0, MAX_RPS)
    first = next((n for n, value in enumerate(rps) if value > 0), 0)
    return Load(now, tuple(rps[first:]), sliding_rps=sliding_rps(rps, current, now))


def sliding_rps(rps: Sequence[float], current: float, now_seconds: float) -> float:
    """Arrivals of the last second, from those of whole seconds and of the current one: the former counts by overlap."""
    elapsed = now_seconds - math.floor(now_seconds)
    return current + (1.0 - elapsed) * (rps[-1] if rps else 0.0)


def read_state(content: object) -> State:
    """Parse a router's state; unmeasured stages are left out."""
    document = _read(RouterState, content, "state", "{'stages': {...}}")
    rows: dict[str, float] = {}
    tokens: dict[str, float] = {}
    ratios: dict[tuple[str, str], float] = {}
    accuracies: dict[AccuracyKey, float] = {}
    registered_accuracies: dict[tuple[str, str, str], Mapping[str, Accuracy]] = {}
    for name, stage in document.stages.items():
        where = f"state.stages.{name}"
        if stage.rows_per_request is not None:
            rows[name] = _within(stage.rows_per_request, f"{where}.rows_per_request", 0.0, MAX_ROWS)
        if stage.prompt_tokens is not None:
            tokens[name] = _within(stage.prompt_tokens, f"{where}.prompt_tokens", 0.0, MAX_PROMPT_TOKENS)
        for running, learned in {stage.variant: stage, **stage.other_variants}.items():
            within = where if learned is stage else f"{where}.other_variants.{running}"
            if learned.service_ratio is not None and running:
                ratios[name, running] = _within(learned.service_ratio, f"{within}.service_ratio", 0.0, math.inf)
            accuracies |= {(name, running, *key): now for key, now in _drifted(learned, within).items()}
        for variant, by_point in stage.registered_accuracies.items():
            for point, by_task in by_point.items():
                field = f"{where}.registered_accuracies.{variant}.{point}"
                accuracy_by_task = {task: _accuracy(reported, f"{field}.{task}") for task, reported in by_task.items()}
                registered_accuracies[name, variant, point] = accuracy_by_task
    if document.served is not None:
        _within(document.served.p99_seconds or 0.0, "state.served.p99_seconds", 0.0, 1e6)
        _within(document.served.accuracy or 0.0, "state.served.accuracy", 0.0, 1.0)
    if document.cpu_seconds_per_request is not None:
        _within(document.cpu_seconds_per_request, "state.cpu_seconds_per_request", 0.0, MAX_ROUTER_CPU_SECONDS)
    rejected = {
        f"{replica} of stage {name}": endpoint.rejection
        for name, stage in document.stages.items()
        for replica, endpoint in stage.endpoints.items()
        if endpoint.rejection
    }
    low_confidence: dict[ThresholdKey, tuple[float, float]] = {
        (name, low.variant, low.operating_point, low.confidence_below): (low.rows, min(low.low_rows, low.rows))
        for name, stage in document.stages.items()
        for low in stage.low_confidence
    }
    return State(
        rows_per_request=rows,
        service_ratios=ratios,
        served=document.served,
        accuracies=accuracies,
        registered_accuracies=registered_accuracies,
        prompt_tokens=tokens,
        rejected_replicas=rejected,
        router_cpu_seconds=document.cpu_seconds_per_request,
        rows={name: found for name, stage in document.stages.items() if (found := reported_rows(stage.recent_rows))},
        low_confidence=low_confidence,
    )


def _drifted(learned: VariantState, where: str) -> dict[tuple[str, str], float]:
    """Observed accuracies of a variant by operating point and task."""
    drifted = {}
    for point, accuracy in learned.drifted_accuracies.items():
        drifted[point, ""] = _within(accuracy, f"{where}.drifted_accuracies.{point}", 0.0, 1.0)
    for point, by_task in learned.drifted_by_task.items():
        for task, accuracy in by_task.items():
            field = f"{where}.drifted_by_task.{point}.{task}"
            drifted[point, task] = _within(accuracy, field, 0.0, 1.0)
    return drifted


def _accuracy(document: RegisteredAccuracy, where: str) -> Accuracy:
    """The accuracy on a registered task; an unknown source counts as declared."""
    value = _within(document.value, f"{where}.value", 0.0, 1.0)
    low = None if document.low is None else _within(document.low, f"{where}.low", 0.0, value)
    high = None if document.high is None else _within(document.high, f"{where}.high", value, 1.0)
    source: Literal["Measured", "Declared"] = "Measured" if document.source == "Measured" else "Declared"
    return Accuracy(value=value, source=source, samples=document.samples or None, low=low, high=high)


def merge_states(states: Iterable[State]) -> State:
    """Combine the states of several routers of one pipeline: means, and the worst 99th percentile."""
    known = list(states)
    served = [state.served for state in known if state.served is not None]
    registered: dict[tuple[str, str, str], dict[str, Accuracy]] = {}
    for state in known:
        for which, by_task in state.registered_accuracies.items():
            registered.setdefault(which, {}).update(by_task)
    cpu_seconds = [state.router_cpu_seconds for state in known if state.router_cpu_seconds is not None]
    return State(
        rows_per_request=_means(state.rows_per_request for state in known),
        service_ratios=_means(state.service_ratios for state in known),
        served=_summed(served) if served else None,
        accuracies=_means(state.accuracies for state in known),
        registered_accuracies=registered,
        prompt_tokens=_means(state.prompt_tokens for state in known),
        rejected_replicas={name: why for state in known for name, why in state.rejected_replicas.items()},
        router_cpu_seconds=math.fsum(cpu_seconds) / len(cpu_seconds) if cpu_seconds else None,
        rows={stage: _sums(state.rows.get(stage, {}) for state in known) for state in known for stage in state.rows},
        low_confidence={
            threshold: (math.fsum(rows), math.fsum(low_rows))
            for threshold in {threshold for state in known for threshold in state.low_confidence}
            for rows, low_rows in [
                zip(*(s.low_confidence[threshold] for s in known if threshold in s.low_confidence), strict=True)
            ]
        },
    )


def _sums(counts: Iterable[Mapping[_Key, float]]) -> dict[_Key, float]:
    sums: dict[_Key, float] = {}
    for by_key in counts:
        for key, count in by_key.items():
            sums[key] = sums.get(key, 0.0) + count
    return sums


def _means(reports: Iterable[Mapping[_Key, float]]) -> dict[_Key, float]:
    values: dict[_Key, list[float]] = {}
    for report in reports:
        for key, value in report.items():
            values.setdefault(key, []).append(value)
    return {key: math.fsum(reported) / len(reported) for key, reported in values.items()}


def _summed(parts: list[RecentRequests]) -> RecentRequests:
    weighed = [(part.accuracy, part.answered) for part in parts if part.accuracy is not None and part.answered]
    answered = sum(count for _, count in weighed)
    counts = ("received", "dropped_by_client", *(outcome.word for outcome in RequestOutcome))
    return RecentRequests(
        **{name: sum(getattr(part, name) for part in parts) for name in counts},
        p99_seconds=max((part.p99_seconds for part in parts if part.p99_seconds is not None), default=None),
        accuracy=math.fsum(accuracy * count for accuracy, count in weighed) / answered if answered else None,
    )


def limit_rate_of_change(before: Measured | None, measured: float, low: float, high: float) -> Measured:
    """Smooth a measurement: clamp and average it, and change the value in use only after a clear move.

    A leap of the value in use applies at once: more work and slower machines need capacity before an average has moved,
    while a decrease can wait.
    """
    clamped = min(max(measured, low), high)
    if before is None or clamped > (1.0 + LEAP) * before.used:
        return Measured(clamped, clamped)
    average = before.average + WEIGHT * (clamped - before.average)
    moved = average > (1.0 + RISE) * before.used or average < (1.0 - FALL) * before.used
    return Measured(average, average if moved else before.used)


def aged(measured: Mapping[_Key, Measured]) -> dict[_Key, Measured]:
    """The measurements, one update older, without those that are too old."""
    return {key: replace(value, age=value.age + 1) for key, value in measured.items() if value.age < MAX_AGE}


def _read(model: type[_Model], content: object, where: str, shape: str) -> _Model:
    """Parse one document; the error names the first invalid value."""
    try:
        return model.model_validate(content)
    except ValidationError as error:
        problem = error.errors(include_url=False)[0]
        path = where + "".join(f"[{step}]" if isinstance(step, int) else f".{step}" for step in problem["loc"])
        shown, kind = str(problem["input"]), problem["type"]
        if len(problem["loc"]) <= 1 and kind in _MISSHAPEN:
            raise ObservationError(f"{where}: expected {shape}, got {str(content)[:80]!r}") from None
        if kind in _MISSHAPEN:
            raise ObservationError(f"{path}: expected a mapping, got {shown[:80]!r}") from None
        raise ObservationError(f"{path} is {shown[:40]!r}; expected {_EXPECTED.get(kind, problem['msg'])}") from None


def _within(value: float, where: str, low: float, high: float) -> float:
    if not low <= value <= high:
        raise ObservationError(f"{where} is {value:g}; expected {low:g} to {high:g}")
    return value
