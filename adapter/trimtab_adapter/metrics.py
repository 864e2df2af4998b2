"""`AdapterMetrics`: every metric name and label of the adapter.

Gauges are built from each pipeline's last tick at scrape time, so no series outlives its pipeline.
"""

from bisect import bisect_left
from collections.abc import Iterable, Iterator
from dataclasses import dataclass, field
from itertools import accumulate

from prometheus_client import CollectorRegistry
from prometheus_client.core import CounterMetricFamily, GaugeMetricFamily, HistogramMetricFamily
from prometheus_client.metrics_core import Metric
from prometheus_client.registry import Collector

from trimtab_adapter.controller import Tick
from trimtab_pipelines.flavors import DEFAULT_FLAVOR, DEFAULT_NAME
from trimtab_pipelines.plan import Expectation
from trimtab_pipelines.spec import InferencePipelineSpec

BASE = ("namespace", "pipeline")
STAGE = ("stage", "variant")
SOLVE_EDGES = (0.001, 0.002, 0.005, 0.01, 0.02, 0.05, 0.1, 0.2, 0.5, 1.0, 2.0, 5.0)
OUTCOMES = ("changed", "kept", "held")
MAX_CHANGE_LENGTH = 200
Key = tuple[str, str]
Sample = tuple[str, float, tuple[str, ...]]
"""Name of a gauge, its value, and the values of its labels besides BASE."""
_GAUGES: dict[str, tuple[str, tuple[str, ...]]] = {
    "observed_load_rps": ("Peak requests per second over the last ten seconds", ()),
    "forecast_load_rps": ("Forecast peak requests per second over the next 20 seconds", ("source",)),
    "forecast_error_ratio": ("SMAPE of recent forecasts, 0 to 2", ()),
    "planned_generation": ("Generation of the latest plan", ()),
    "planned_accuracy": ("Expected accuracy of the plan", ()),
    "planned_latency_seconds": ("Planned latency of the slowest path", ()),
    "planned_cores": ("Cores of all planned replicas", ()),
    "cost_per_hour": ("Cost of all planned replicas at the prices of their resource flavors", ("flavor",)),
    "plan_feasible": ("1 if the plan satisfies every constraint", ()),
    "planned_replicas": ("Planned replicas", STAGE),
    "planned_batch_size_rows": ("Planned batch size", STAGE),
    "planned_row_share": (
        "Expected share of a stage's rows by the point that answers them",
        (*STAGE, "operating_point", "escalated"),
    ),
    "budget_cores": ("Budget in cores, limited to what the nodes can schedule", ()),
    "budget_cost_per_hour": ("Budget of the cost an hour, if there is one", ()),
    "slo_seconds": ("Latency SLO", ()),
    "plan_changed_timestamp_seconds": ("Unix time of the last plan change", ()),
    "last_change_info": ("The last plan change and its reason", ("change",)),
}
"""Help text and labels besides BASE, by name without prefix."""


@dataclass(slots=True)
class _LastTick:
    """The last tick of one pipeline, and its counters."""

    tick: Tick
    changed_at_seconds: float | None = None
    change: str = ""
    decisions: dict[str, int] = field(default_factory=lambda: dict.fromkeys(OUTCOMES, 0))
    solves: list[float] = field(default_factory=lambda: [0.0] * (len(SOLVE_EDGES) + 1))
    """Number by bucket."""
    solve_seconds: float = 0.0

    def take(self, tick: Tick) -> None:
        self.tick = tick
        if tick.decided in self.decisions:
            self.decisions[tick.decided] += 1
        if tick.plan is None or tick.decided not in {"changed", "kept"}:
            return
        explanation = tick.plan.spec.explanation
        if tick.decided == "changed" or self.changed_at_seconds is None:
            self.changed_at_seconds = tick.now_seconds if tick.decided == "changed" else tick.plan.spec.created_at
            self.change = explanation.change[:MAX_CHANGE_LENGTH]
        if explanation.solve_seconds > 0:
            self.solve_seconds += explanation.solve_seconds
            self.solves[bisect_left(SOLVE_EDGES, explanation.solve_seconds)] += 1

    def gauges(self) -> Iterator[Sample]:
        tick, spec = self.tick, self.tick.pipeline.spec
        yield from _target_gauges(spec)
        if tick.load is not None:
            yield "observed_load_rps", tick.load.peak_rps, ()
        if tick.forecast is not None:
            yield "forecast_load_rps", tick.forecast.peak_rps, (tick.forecast.source,)
            if tick.forecast.recent_error is not None:
                yield "forecast_error_ratio", tick.forecast.recent_error, ()
        if self.changed_at_seconds is not None:
            yield "plan_changed_timestamp_seconds", self.changed_at_seconds, ()
            yield "last_change_info", 1.0, (self.change,)
        if tick.plan is None:
            return
        plan = tick.plan.spec
        yield "planned_generation", plan.generation, ()
        yield "plan_feasible", float(plan.feasible), ()
        if plan.expected is not None:
            yield from _expected_gauges(plan.expected)
        for stage in plan.stages:
            for group in stage.groups:
                yield "planned_replicas", group.replicas, (stage.name, group.variant)
            yield "planned_batch_size_rows", stage.batch_size, (stage.name, stage.variant)
            for (variant, point, escalated), share in stage.expected_rows.items():
                yield "planned_row_share", share, (stage.name, variant, point, str(escalated).lower())


def _target_gauges(spec: InferencePipelineSpec) -> Iterator[Sample]:
    yield "slo_seconds", spec.slo.latency_seconds, ()
    yield "budget_cores", spec.budget.cores, ()
    if spec.budget.cost_per_hour is not None:
        yield "budget_cost_per_hour", spec.budget.cost_per_hour, ()


def _expected_gauges(expected: Expectation) -> Iterator[Sample]:
    yield "planned_accuracy", expected.accuracy, ()
    yield "planned_latency_seconds", expected.latency_seconds, ()
    yield "planned_cores", expected.cores, ()
    unpriced = {DEFAULT_NAME: DEFAULT_FLAVOR.cost_per_hour(expected.cores, 0.0, expected.gpus)}
    for flavor, cost in (expected.cost_by_flavor or unpriced).items():
        yield "cost_per_hour", cost, (flavor,)


class AdapterMetrics(Collector):
    """Prometheus collector over the last tick of each pipeline."""

    def __init__(self) -> None:
        self._last_ticks: dict[Key, _LastTick] = {}
        self.registry = CollectorRegistry()
        self.registry.register(self)

    def take(self, key: Key, tick: Tick) -> None:
        self._last_ticks.setdefault(key, _LastTick(tick)).take(tick)

    def forget(self, key: Key) -> None:
        self._last_ticks.pop(key, None)

    def describe(self) -> Iterable[Metric]:
        """Nothing: series exist only once there are pipelines."""
        return ()

    def collect(self) -> Iterator[Metric]:
        gauges = {
            name: GaugeMetricFamily(f"trimtab_{name}", text, labels=(*BASE, *labels))
            for name, (text, labels) in _GAUGES.items()
        }
        solves = HistogramMetricFamily("trimtab_solve_seconds", "Duration of a decision", labels=BASE)
        decisions = CounterMetricFamily("trimtab_decisions", "Decisions by outcome", labels=(*BASE, "outcome"))
        edges = (*map(str, SOLVE_EDGES), "+Inf")
        for key, last in self._last_ticks.items():
            for name, value, labels in last.gauges():
                gauges[name].add_metric((*key, *labels), value)
            for outcome, count in last.decisions.items():
                decisions.add_metric((*key, outcome), count)
            solves.add_metric(key, list(zip(edges, accumulate(last.solves), strict=True)), last.solve_seconds)
        yield from (*gauges.values(), solves, decisions)
