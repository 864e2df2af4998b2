"""What the adapter takes from the router's answers, and what it refuses to believe. Pure: parsed JSON in, values out.

A number that cannot be true must not become a plan: it raises, and the plan in force is held.
"""

import math
from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass, field
from typing import Literal

from trimtab_predictor.context import MEMORY_SECONDS
from trimtab_router.load import HISTORY_SECONDS

MOST_RPS = 1e7  # no single router receives more; a larger count is a fault
MOST_ROWS = 1e4  # rows one request can fan out to
RATIO_RANGE = (0.5, 4.0)  # a machine farther from its profile than this needs a new profile, not a correction
WEIGHT = 0.3  # of the newest ratio in the moving average
RISE = 0.1  # relative change above which a greater measurement is used: it asks for more capacity
SERVED = ("received", "ok", "late")
FALL = 0.25  # the same for a smaller one; wider, so that noise around one value does not change plans


Fault = Literal["Missing", "Stale", "Absurd"]


class ObservationError(Exception):
    """Metrics that are missing, stale or absurd; the message says which and what was found."""

    def __init__(self, message: str, fault: Fault = "Absurd") -> None:
        super().__init__(message)
        self.fault: Fault = fault


def seconds_to_ask(since_seconds: float) -> int:
    """Return how much of the load to ask for, so long after the last forecast from it.

    Forecasters remember, so ten minutes bring them up to date. At first, after a longer gap and where the clock went
    back they know nothing to go on from, and all that a forecast can use is asked for.
    """
    return HISTORY_SECONDS if 0 <= since_seconds < HISTORY_SECONDS else MEMORY_SECONDS


@dataclass(frozen=True, slots=True)
class Load:
    """Arrivals per second, oldest first, of the whole seconds before `now_seconds` (Unix time); NaN: not measured.

    `missing` says whose arrivals are not in it: such a sum may be too low, and is no ground to plan for less.
    """

    now_seconds: float
    history_rps: tuple[float, ...]
    missing: str = ""

    @property
    def peak_rps(self) -> float:
        """The most arrivals in one of the last ten seconds."""
        return max((rps for rps in self.history_rps[-10:] if math.isfinite(rps)), default=0.0)

    @property
    def mean_rps(self) -> float:
        """Arrivals per second over the last ten seconds."""
        newest = [rps for rps in self.history_rps[-10:] if math.isfinite(rps)]
        return math.fsum(newest) / len(newest) if newest else 0.0

    @property
    def newest_rps(self) -> float:
        """Arrivals in the newest second; 0 where it was not measured."""
        newest = self.history_rps[-1] if self.history_rps else 0.0
        return newest if math.isfinite(newest) else 0.0


@dataclass(frozen=True, slots=True)
class Measured:
    """A damped measurement: the moving average, and the value in use, which follows only clear changes."""

    average: float
    used: float


@dataclass(frozen=True, slots=True)
class Served:
    """What became of the last minute's requests; p99 and accuracy are None where nothing was answered."""

    received: int = 0
    answered: int = 0
    p99_seconds: float | None = None
    accuracy: float | None = None


@dataclass(frozen=True, slots=True)
class State:
    """What the router measured: rows per request by stage, service ratio by stage and variant, its last minute."""

    rows_per_request: Mapping[str, float] = field(default_factory=dict)
    service_ratios: Mapping[tuple[str, str], float] = field(default_factory=dict)
    served: Served | None = None


def read_load(content: object) -> Load:
    """Read `/trimtab/v1/load`. Zeros before the first arrival are no history, unless all are zero."""
    if not isinstance(content, Mapping) or not isinstance(content.get("rps"), Sequence):
        raise ObservationError(f"load: expected {{'now': seconds, 'rps': [...]}}, got {str(content)[:80]!r}")
    now = _number(content.get("now"), "load.now", 0.0, math.inf)
    rps = [_number(value, f"load.rps[{n}]", 0.0, MOST_RPS) for n, value in enumerate(content["rps"])]
    if not rps:
        raise ObservationError("load.rps is empty; expected the arrivals of each of the last seconds", "Missing")
    first = next((n for n, value in enumerate(rps) if value > 0), 0)
    return Load(now, tuple(rps[first:]))


def read_state(content: object) -> State:
    """Read `/trimtab/v1/state`; a stage that was not measured yet is left out."""
    stages = content.get("stages") if isinstance(content, Mapping) else None
    if not isinstance(stages, Mapping):
        raise ObservationError(f"state: expected {{'stages': {{...}}}}, got {str(content)[:80]!r}")
    rows: dict[str, float] = {}
    ratios: dict[tuple[str, str], float] = {}
    for name, stage in stages.items():
        if not isinstance(stage, Mapping):
            raise ObservationError(f"state.stages.{name}: expected a mapping, got {str(stage)[:80]!r}")
        if stage.get("rows_per_request") is not None:
            rows[name] = _number(stage["rows_per_request"], f"state.stages.{name}.rows_per_request", 0.0, MOST_ROWS)
        if stage.get("service_ratio") is not None and stage.get("variant") is not None:
            ratio = _number(stage["service_ratio"], f"state.stages.{name}.service_ratio", 0.0, math.inf)
            ratios[name, str(stage["variant"])] = ratio
    return State(rows, ratios, _served(content))


def merge_states(states: Iterable[State]) -> State:
    """Sum up what several routers of one pipeline measured: means, and the worst 99th percentile of any."""
    known = list(states)
    rows: dict[str, list[float]] = {}
    ratios: dict[tuple[str, str], list[float]] = {}
    for state in known:
        for stage, value in state.rows_per_request.items():
            rows.setdefault(stage, []).append(value)
        for key, value in state.service_ratios.items():
            ratios.setdefault(key, []).append(value)
    served = [state.served for state in known if state.served is not None]
    return State(
        {stage: math.fsum(values) / len(values) for stage, values in rows.items()},
        {key: math.fsum(values) / len(values) for key, values in ratios.items()},
        _summed(served) if served else None,
    )


def _summed(parts: list[Served]) -> Served:
    weighed = [(part.accuracy, part.answered) for part in parts if part.accuracy is not None and part.answered]
    answered = sum(count for _, count in weighed)
    return Served(
        received=sum(part.received for part in parts),
        answered=sum(part.answered for part in parts),
        p99_seconds=max((part.p99_seconds for part in parts if part.p99_seconds is not None), default=None),
        accuracy=math.fsum(accuracy * count for accuracy, count in weighed) / answered if answered else None,
    )


def _served(content: object) -> Served | None:
    served = content.get("served") if isinstance(content, Mapping) else None
    if not isinstance(served, Mapping):
        return None
    counts = {name: int(_number(served.get(name, 0), f"state.served.{name}", 0, 1e12)) for name in SERVED}
    p99, accuracy = served.get("p99_seconds"), served.get("accuracy")
    return Served(
        received=counts["received"],
        answered=counts["ok"] + counts["late"],
        p99_seconds=None if p99 is None else _number(p99, "state.served.p99_seconds", 0.0, 1e6),
        accuracy=None if accuracy is None else _number(accuracy, "state.served.accuracy", 0.0, 1.0),
    )


def damp(before: Measured | None, measured: float, low: float, high: float) -> Measured:
    """Follow a measurement: clamped, averaged, and used anew only once it has clearly moved."""
    clamped = min(max(measured, low), high)
    if before is None:
        return Measured(clamped, clamped)
    average = before.average + WEIGHT * (clamped - before.average)
    moved = average > (1.0 + RISE) * before.used or average < (1.0 - FALL) * before.used
    return Measured(average, average if moved else before.used)


def _number(value: object, where: str, low: float, high: float) -> float:
    if isinstance(value, bool) or not isinstance(value, int | float) or not math.isfinite(value):
        raise ObservationError(f"{where} is {str(value)[:40]!r}; expected a finite number")
    if not low <= value <= high:
        raise ObservationError(f"{where} is {value:g}; expected {low:g} to {high:g}")
    return float(value)
