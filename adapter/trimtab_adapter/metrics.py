"""`AdapterMetrics`: every metric name and label of the adapter.

Gauges are built from each pipeline's last tick at scrape time, so no series outlives its pipeline.
"""

from bisect import bisect_left
from collections.abc import Iterable, Iterator
from dataclasses import dataclass, field

from prometheus_client import CollectorRegistry
from prometheus_client.core import CounterMetricFamily, GaugeMetricFamily, HistogramMetricFamily
from prometheus_client.metrics_core import Metric
from prometheus_client.registry import Collector

from trimtab_adapter.controller import Tick
from trimtab_pipelines.plan import PipelinePlan

BASE = ("namespace", "pipeline")
STAGE = (*BASE, "stage", "variant")
SOLVE_EDGES = (0.001, 0.002, 0.005, 0.01, 0.02, 0.05, 0.1, 0.2, 0.5, 1.0, 2.0, 5.0)
OUTCOMES = ("changed", "kept", "held")
MAX_CHANGE_LENGTH = 200
Key = tuple[str, str]


@dataclass(slots=True)
class _LastTick:
    """The last tick of one pipeline, and its counters."""

    tick: Tick
    changed_at_seconds: float | None = None
    change: str = ""
    decisions: dict[str, int] = field(default_factory=lambda: dict.fromkeys(OUTCOMES, 0))
    solve_seconds: list[float] = field(default_factory=lambda: [0.0] * (len(SOLVE_EDGES) + 2))

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
            self.solve_seconds[-1] += explanation.solve_seconds
            self.solve_seconds[bisect_left(SOLVE_EDGES, explanation.solve_seconds)] += 1


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
        yield from _observed(self._last_ticks)
        yield from _planned(self._last_ticks)
        yield from _decided(self._last_ticks)


def _observed(ticks: dict[Key, _LastTick]) -> Iterator[Metric]:
    observed = GaugeMetricFamily(
        "trimtab_observed_load_rps", "Peak requests per second over the last ten seconds", labels=BASE
    )
    forecast = GaugeMetricFamily(
        "trimtab_forecast_load_rps",
        "Forecast peak requests per second over the next 20 seconds",
        labels=(*BASE, "source"),
    )
    error = GaugeMetricFamily("trimtab_forecast_error_ratio", "SMAPE of recent forecasts, 0 to 2", labels=BASE)
    for key, last in ticks.items():
        tick = last.tick
        if tick.load is not None:
            observed.add_metric(key, tick.load.peak_rps)
        if tick.forecast is not None:
            forecast.add_metric((*key, tick.forecast.source), tick.forecast.peak_rps)
            if tick.forecast.recent_error is not None:
                error.add_metric(key, tick.forecast.recent_error)
    yield from (observed, forecast, error)


def _planned(ticks: dict[Key, _LastTick]) -> Iterator[Metric]:
    def gauge(name: str, text: str, labels: tuple[str, ...] = BASE) -> GaugeMetricFamily:
        return GaugeMetricFamily(f"trimtab_{name}", text, labels=labels)

    generation = gauge("planned_generation", "Generation of the latest plan")
    accuracy = gauge("planned_accuracy", "Expected accuracy of the plan")
    latency = gauge("planned_latency_seconds", "Planned latency of the slowest path")
    cores = gauge("planned_cores", "Cores of all planned replicas")
    feasible = gauge("plan_feasible", "1 if the plan satisfies every constraint")
    replicas = gauge("planned_replicas", "Planned replicas", STAGE)
    batch = gauge("planned_batch_size_rows", "Planned batch size", STAGE)
    budget = gauge("budget_cores", "Budget in cores, limited to what the nodes can schedule")
    slo = gauge("slo_seconds", "Latency SLO")
    for key, last in ticks.items():
        spec = last.tick.pipeline.spec
        budget.add_metric(key, spec.budget.cores)
        slo.add_metric(key, spec.slo.latency_seconds)
        plan: PipelinePlan | None = last.tick.plan
        if plan is None:
            continue
        generation.add_metric(key, plan.spec.generation)
        feasible.add_metric(key, float(plan.spec.feasible))
        if plan.spec.expected is not None:
            accuracy.add_metric(key, plan.spec.expected.accuracy)
            latency.add_metric(key, plan.spec.expected.latency_seconds)
            cores.add_metric(key, plan.spec.expected.cores)
        for stage in plan.spec.stages:
            replicas.add_metric((*key, stage.name, stage.variant), stage.replicas)
            batch.add_metric((*key, stage.name, stage.variant), stage.batch_size)
    yield from (generation, accuracy, latency, cores, feasible, replicas, batch, budget, slo)


def _decided(ticks: dict[Key, _LastTick]) -> Iterator[Metric]:
    solve = HistogramMetricFamily("trimtab_solve_seconds", "Duration of a decision", labels=BASE)
    decisions = CounterMetricFamily("trimtab_decisions", "Decisions by outcome", labels=(*BASE, "outcome"))
    changed_at = GaugeMetricFamily(
        "trimtab_plan_changed_timestamp_seconds", "Unix time of the last plan change", labels=BASE
    )
    change = GaugeMetricFamily(
        "trimtab_last_change_info", "The last plan change and its reason", labels=(*BASE, "change")
    )
    for key, last in ticks.items():
        for outcome, count in last.decisions.items():
            decisions.add_metric((*key, outcome), count)
        buckets, total = [], 0.0
        for edge, solved in zip((*map(str, SOLVE_EDGES), "+Inf"), last.solve_seconds[:-1], strict=True):
            total += solved
            buckets.append((edge, total))
        solve.add_metric(key, buckets, last.solve_seconds[-1])
        if last.changed_at_seconds is not None:
            changed_at.add_metric(key, last.changed_at_seconds)
            change.add_metric((*key, last.change), 1.0)
    yield from (solve, decisions, changed_at, change)
