"""Cost of IPA's pipelines on five priced flavors over a recorded week, against three rivals of equal accuracy and SLO.

Every interval of the week is planned for its busiest second. A sample of intervals is simulated: a rival scales to a
utilisation of 80 %, the default of Kubernetes' HPA, or to a lower one if it misses more of the SLO there than ours.
"""

import argparse
import math
from collections.abc import Callable, Iterable, Mapping, Sequence
from dataclasses import dataclass, field
from functools import partial
from pathlib import Path

import numpy as np
from numpy.typing import NDArray

from benchmarks.harness.report import Report, print_table
from benchmarks.papers import ipa_data
from benchmarks.papers.ipa_cells import PIPELINES, Source, read_pipeline
from benchmarks.papers.planners import Pinned, plan_for_peak
from tests.builders import a_measurement
from trimtab_adapter.controller import Controller
from trimtab_adapter.planning.baselines import with_single_variants
from trimtab_adapter.planning.decide import Planner, PlanningInputs, decide
from trimtab_adapter.simulation.simulator import Scenario, forecaster_of, simulate
from trimtab_loadtester.arrivals import poisson_arrivals
from trimtab_pipelines.plan import ForecastRecord, PipelinePlan
from trimtab_pipelines.profile import LatencyFit, ModelProfile, PointProfile
from trimtab_pipelines.request_outcome import OK
from trimtab_pipelines.spec import InferencePipeline
from trimtab_pipelines.stages import Pin
from trimtab_predictor.trace import read_trace

WEEK_SECONDS, INTERVAL_SECONDS, HOLD_SECONDS = 604800, 300, 300
"""HOLD_SECONDS is the scale-down stabilization window of Kubernetes' HPA, for all systems."""
DEVICES: Mapping[str, tuple[float, float]] = {
    "t4": (0.526, 40.0),
    "l4": (0.8048, 75.0),
    "a10g": (1.006, 77.0),
    "a100": (4.0966, 192.0),
}
"""Dollars an hour and speed, in cores, of a replica with a device: AWS on demand in us-east-1 (g4dn.xlarge, g6.xlarge,
g5.xlarge, an eighth of p4d.24xlarge). Speeds are assumed in proportion to the FP16 peaks of the data sheets (65, 121,
125, 312 TFLOPS), a T4 as fast as 40 cores; half of it at HALF_SPEED_ROWS.
"""
CORE_DOLLARS = 0.0425
"""A quarter of c6i.xlarge."""
HALF_SPEED_ROWS, OVERHEAD_SECONDS = 2, 0.003
BATCHES = (1, 2, 4, 8, 16, 32, 64)
LEVELS = 24
"""Loads that are planned; an interval's load is rounded up to one."""
TARGETS = (0.8, 0.65, 0.5, 0.35)
SAMPLED = (0.1, 0.5, 1.0)
"""Quantiles, by the busiest second, of the intervals that are simulated for SAMPLE_SECONDS."""
WARM_UP_SECONDS, SAMPLE_SECONDS = 60, 180
"""Requests of the warm-up are not counted: every system starts with a plan for the load of its first second."""
SAME_SLO = 0.002
ONE_FLAVOR, HPA, GREEDY = "one flavor", "HPA", "greedy"
MIN_SAVED = {ONE_FLAVOR: 0.20, HPA: 0.35, GREEDY: 0.10}
FLAVORS = ("cpu", *DEVICES)
COLUMNS = ("pipeline", "system", "dollars an hour", "saved", "in SLO", "accuracy", "uses")


@dataclass(frozen=True, slots=True)
class Row:
    """What a system costs in the week, and how it serves the sample."""

    pipeline: str
    system: str
    dollars: float
    in_slo: float
    accuracy: float
    uses: str = ""

    def cells(self, ours: float) -> tuple[str, ...]:
        saved = f"{1 - ours / self.dollars:.1%}"
        quality = (f"{self.in_slo:.2%}", f"{self.accuracy:.3f}")
        return self.pipeline, self.system, f"{self.dollars:.3f}", saved, *quality, self.uses

    def figures(self) -> dict[str, float]:
        name = f"{self.pipeline}_{self.system}".replace("-", "_").replace(" ", "_")
        return {f"{name}_dollars": self.dollars, f"{name}_in_slo": self.in_slo, f"{name}_accuracy": self.accuracy}


def priced(pipeline: InferencePipeline, flavors: Iterable[str], floor: float) -> InferencePipeline:
    """The pipeline at least cost on these flavors: one variant of each model for each flavor."""
    document = pipeline.model_dump(by_alias=True, mode="json")
    spec, chosen = document["spec"], set(flavors)
    prices = {"cpu": {"core": CORE_DOLLARS, "device": 0.0}}
    prices |= {name: {"core": 0.0, "device": dollars} for name, (dollars, _) in DEVICES.items()}
    spec["flavors"] = [{"name": name, "prices": price} for name, price in prices.items()]
    spec["budget"] = {"cores": "100000", "gpus": 10000}
    spec["objective"] = {"goal": "MinCost", "accuracyFloor": floor, "accuracyMetric": "Product"}
    spec["schedulingPolicy"] = "TokenAdaptive"
    spec["adaptation"] |= {"scaleDownStabilization": f"{HOLD_SECONDS}s", "forecaster": "Reactive"}
    for stage in spec["stages"]:
        stage["maxReplicas"] = 1000
        stage["variants"] = [
            {**variant, "name": f"{variant['name']}-{flavor}", "flavor": flavor}
            | ({} if flavor == "cpu" else {"resources": {"cpu": "1", "memory": "3Gi", "gpu": 1}})
            for variant in stage["variants"]
            for flavor in FLAVORS
            if flavor in chosen
        ]
    return InferencePipeline.model_validate(document)


def profile_on_flavors(profile: ModelProfile) -> ModelProfile:
    """The profile with a point for each variant and flavor."""
    points = []
    for point in profile.spec.points:
        points.append(point.replace(variant=f"{point.variant}-cpu"))
        row_seconds = point.cores / point.throughput_rps(1)
        points += [_on_device(point.variant, name, row_seconds / speed) for name, (_, speed) in DEVICES.items()]
    return profile.with_spec(points=tuple(points))


def _on_device(variant: str, flavor: str, row_seconds: float) -> PointProfile:
    constant = OVERHEAD_SECONDS + HALF_SPEED_ROWS * row_seconds
    measurements = tuple(a_measurement(rows, constant + row_seconds * rows, p99_ratio=1.1) for rows in BATCHES)
    fit = LatencyFit(quadratic=0.0, linear=row_seconds, constant=constant, mean_relative_error=0.0)
    return PointProfile(variant=f"{variant}-{flavor}", cores=1.0, measurements=measurements, fit=fit)


@dataclass(slots=True)
class Rival:
    """A planner with fixed variants that scales every stage to a target utilisation; call it as `decide`."""

    variants: Mapping[str, str]
    row_rates: Mapping[str, float]
    """Rows a second of one replica, by stage."""
    target: float = TARGETS[0]
    _plans: dict[tuple[int, ...], Pinned] = field(default_factory=dict, repr=False)

    def replicas(self, pipeline: InferencePipeline, load_rps: float) -> tuple[int, ...]:
        """HPA's rule: the load over the target share of one replica's capacity, rounded up."""
        rows = pipeline.spec.expected_rows
        return tuple(
            max(1, math.ceil(load_rps * rows[name] / (self.target * rate) - 1e-9))
            for name, rate in self.row_rates.items()
        )

    def dollars(self, pipeline: InferencePipeline, load_rps: float) -> float:
        counts = self.replicas(pipeline, load_rps)
        return sum(n * _dollars(pipeline, *chosen) for n, chosen in zip(counts, self.variants.items(), strict=True))

    def __call__(
        self, pipeline: InferencePipeline, profiles: Mapping[str, ModelProfile], inputs: PlanningInputs
    ) -> PipelinePlan:
        load_rps = max((inputs.forecast.peak_rps, *(rps for _, rps in inputs.recent_rps)))
        counts = self.replicas(pipeline, load_rps)
        if counts not in self._plans:
            pairs = zip(self.variants.items(), counts, strict=True)
            pins = {stage: Pin(variant=variant, replicas=count) for (stage, variant), count in pairs}
            self._plans[counts] = Pinned(pins)
        return self._plans[counts](pipeline, profiles, inputs)


def _dollars(pipeline: InferencePipeline, stage: str, variant: str) -> float:
    """Of an hour of a replica."""
    chosen = pipeline.spec.stage(stage).variant(variant)
    return pipeline.spec.flavor(chosen).cost_per_hour(chosen.resources.cpu, 0.0, chosen.resources.gpu)


def rival_of(
    plan: PipelinePlan, pipeline: InferencePipeline, profiles: Mapping[str, ModelProfile], *, greedy: bool
) -> Rival:
    """HPA with a plan's variants and batch sizes; greedy, as WVA, takes its models on other flavors and batch sizes.

    Those have the least cost per capacity of all whose batches end within an equal share of the SLO.
    """
    share = pipeline.spec.slo.latency_seconds / len(plan.spec.stages)
    chosen: dict[str, tuple[str, float]] = {}
    for stage in plan.spec.stages:
        points = {point.variant: point for point in profiles[stage.name].spec.points}
        options = [(points[stage.variant], stage.batch_size)]
        if greedy:
            model, _, _ = stage.variant.rpartition("-")
            same_model = [p for name, p in points.items() if name.rpartition("-")[0] == model]
            options = [(p, n) for p in same_model for n in BATCHES if 2 * p.latency_seconds(n, 0.99) <= share]
        rates = [(point.variant, point.throughput_rps(rows)) for point, rows in options]
        chosen[stage.name] = min(rates, key=lambda each: _dollars(pipeline, stage.name, each[0]) / each[1])
    return Rival({name: variant for name, (variant, _) in chosen.items()}, {n: rate for n, (_, rate) in chosen.items()})


@dataclass(frozen=True, slots=True)
class Sample:
    """Seconds of the recording that are simulated."""

    seconds: tuple[NDArray[np.float64], ...]
    profiles: Mapping[str, ModelProfile]

    def served(self, pipeline: InferencePipeline, planner: Planner) -> tuple[float, float]:
        """Share of the requests within the SLO, and their mean accuracy."""
        in_time, accuracies = [], []
        for seed, rates in enumerate(self.seconds):
            arrivals = poisson_arrivals(rates, seed)
            inputs = PlanningInputs(ForecastRecord(peak_rps=float(rates[0]), source="static"), 0.0)
            plan = planner(pipeline, self.profiles, inputs)
            controller = Controller(forecaster_of(pipeline.spec.adaptation, arrivals, len(rates)), planner)
            scenario = Scenario(pipeline, self.profiles, arrivals, float(len(rates)), plan, controller, seed=seed)
            result = simulate(scenario)
            counted = arrivals >= WARM_UP_SECONDS
            in_time.append(float(np.mean(result.outcomes[counted] == OK)))
            accuracies.append(float(np.nanmean(result.accuracy[counted])))
        return float(np.mean(in_time)), float(np.mean(accuracies))


def compare(name: str, source: Source, loads: NDArray[np.float64], sample: Sequence[NDArray[np.float64]]) -> list[Row]:
    """Rows of a pipeline: ours first, then the best of each rival."""
    base, on_cores = read_pipeline(source, name)
    profiles = {stage: profile_on_flavors(profile) for stage, profile in on_cores.items()}
    floor = float(np.prod([np.median([v.accuracy for v in stage.variants]) for stage in base.spec.stages]))
    levels, counts = np.unique(loads, return_counts=True)
    simulated = Sample(tuple(sample), profiles)

    def week(dollars: Callable[[float], float]) -> float:
        return float(np.average([dollars(level) for level in levels], weights=counts))

    def planned(pipeline: InferencePipeline) -> float:
        return week(lambda level: _cost(plan_for_peak(pipeline, profiles, level)))

    ours = priced(base, FLAVORS, floor)
    slo, accuracy = simulated.served(ours, decide)
    rows = [Row(name, "trimtab", planned(ours), slo, accuracy)]
    alone = {flavor: priced(base, [flavor], floor) for flavor in FLAVORS}
    cheapest = min(alone, key=lambda flavor: planned(alone[flavor]))
    rows.append(Row(name, ONE_FLAVOR, planned(alone[cheapest]), *simulated.served(alone[cheapest], decide), cheapest))
    single = with_single_variants(ours)
    fixed = [plan_for_peak(single, profiles, level) for level in levels]
    for label in (HPA, GREEDY):
        rivals = [rival_of(plan, single, profiles, greedy=label == GREEDY) for plan in fixed]
        rival = min(rivals, key=lambda each: week(partial(each.dollars, single)))
        for rival.target in TARGETS:
            served = simulated.served(single, rival)
            if served[0] >= slo - SAME_SLO:
                break
        used = f"{' '.join(rival.variants.values())} at {rival.target:.0%}"
        rows.append(Row(name, label, week(partial(rival.dollars, single)), *served, used))
    return rows


def _cost(plan: PipelinePlan) -> float:
    return plan.spec.expected.cost_per_hour if plan.spec.feasible and plan.spec.expected else math.inf


def main() -> int:
    parser = argparse.ArgumentParser(prog="benchmarks money", description=__doc__)
    parser.add_argument("--data", type=Path, default=Path("../shared/data"), help="folder of the trace and profiles")
    data = parser.parse_args().data
    seconds = read_trace(data / ipa_data.TRACE).rps[:WEEK_SECONDS]
    intervals = seconds[: len(seconds) // INTERVAL_SECONDS * INTERVAL_SECONDS].reshape(-1, INTERVAL_SECONDS)
    intervals = intervals[~np.isnan(intervals).any(axis=1)]
    peaks = intervals.max(axis=1)
    levels = np.geomspace(peaks.min(), peaks.max(), LEVELS)
    loads = levels[np.minimum(np.searchsorted(levels, peaks * (1 - 1e-9)), LEVELS - 1)]
    sample = intervals[np.argsort(peaks)[[int(q * (len(peaks) - 1)) for q in SAMPLED]], :SAMPLE_SECONDS]
    source = Source(data, Path("pipelines"), data / ipa_data.TRACE)
    return judge(compare(name, source, loads, list(sample)) for name in PIPELINES)


def judge(pipelines: Iterable[Sequence[Row]]) -> int:
    """Report the rows of each pipeline, ours first; return the exit code."""
    report = Report("bench-money")
    saved: dict[str, list[float]] = {label: [] for label in MIN_SAVED}
    for ours, *rivals in pipelines:
        print_table(COLUMNS, [row.cells(ours.dollars) for row in (ours, *rivals)])
        for row in (ours, *rivals):
            report.add(row.figures())
            if row is not ours:
                saved[row.system].append(1 - ours.dollars / row.dollars)
    for label, least in MIN_SAVED.items():
        report.hold(f"mean share saved against {label}", float(np.mean(saved[label])), ">=", least)
    return report.finish()
