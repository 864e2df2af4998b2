"""Frontier of accuracy and cores at one load and SLO, of single variants, mixes, cascades and all.

The heaviest variants carry the load with `HEAVIEST_REPLICAS`, whose cores follow from the speed of the machine. Every
plan is the adapter's for a budget, after what the router measured under the first one. All serve the same pages at the
same times, with the cores that they request.
The last run sends pages on which the digits 0 to 4 are five times as frequent as the others. Another test plans for a
calm load only, and sends bursts.
"""

import time
from dataclasses import dataclass
from math import inf
from pathlib import Path
from typing import Any, Self

import numpy as np
import pytest
import yaml

from benchmarks.harness.serving import Profiles, cached_profiles, serve, slow_down, write_pipeline
from tests.figures import Figures
from trimtab_adapter.controller import Controller
from trimtab_adapter.observation import read_state
from trimtab_adapter.planning import stage_options
from trimtab_adapter.planning.decide import PlanningInputs, decide
from trimtab_adapter.planning.latency import busiest_rps
from trimtab_adapter.planning.mixes import mixes
from trimtab_adapter.planning.option_arrays import OptionArrays
from trimtab_loadtester.load_spec import LoadSpec
from trimtab_loadtester.payloads.interface import Payload
from trimtab_loadtester.payloads.sources import DigitPayloads
from trimtab_loadtester.results import Results
from trimtab_pipelines.documents import load_pipeline
from trimtab_pipelines.plan import ForecastRecord, PipelinePlan, StagePlan
from trimtab_pipelines.request_outcome import RequestOutcome
from trimtab_pipelines.router_state import RouterState
from trimtab_pipelines.spec import InferencePipeline
from trimtab_predictor.forecaster import ReactiveForecaster

pytestmark = [pytest.mark.endurance, pytest.mark.timeout(1500)]

SOURCE = Path(__file__).parents[2] / "pipelines" / "digits"
PROFILED = "profiled"
SLO = "700ms"
LOADS_RPS, CORES = (40.0, 30.0, 20.0, 10.0), tuple(milli / 1000 for milli in range(40, 151, 5))
"""The first load that the heaviest variants carry, with the fewest cores. Twelve replicas and the router, proxy and
client of that load fit on two cores.
"""
SINGLE, MIX, CASCADE, ALL = "single", "mix", "cascade", "all"
SECONDS = {SINGLE: {2: 60, 7: 90, 12: 90}, MIX: {3: 20}, CASCADE: {3: 20}, ALL: {2: 60, 3: 90, 4: 90}}
"""How long each method is served with each budget, the most replicas of both stages together."""
HEAVIEST_REPLICAS = 10
"""Two fewer than the largest budget: service times that the router measures differ from the profile's."""
LEARNING_SECONDS = 12.0
"""Enough rows for shares below thresholds."""
RESOLUTION = 0.003
"""Difference of accuracy that some thousand digits do not resolve."""
SKEW, SKEWED_SECONDS = 5.0, 45.0
BURST_CPU, CALM_RPS, BURST_FACTOR, BURSTS, BURST_SECONDS = 0.4, 20, 4, 10, 5


@dataclass(frozen=True, slots=True)
class Served:
    """What a plan served."""

    cores: float
    expected: float
    results: Results
    drifted: tuple[str, ...]
    """Variants whose accuracy the router reports as changed."""
    mixes: tuple[float, ...]
    """Distances of changed mixes of classes that the router reports."""

    @property
    def missed(self) -> float:
        """Share of requests that were late, dropped, refused or failed."""
        return 1.0 - self.results.count(RequestOutcome.OK) / len(self.results.records)

    def measured(self, requests: int | None = None) -> float:
        """Accuracy of the first requests; by default, of all."""
        first = self.results.records[:requests]
        return float(first["correct"].sum() / first["total"].sum())

    def gain(self, other: Self) -> float:
        """Return the difference of accuracy to another plan, on the pages that both served."""
        both = min(len(served.results.records) for served in (self, other))
        return self.measured(both) - other.measured(both)


class SkewedPages(DigitPayloads):
    """Held-out pages on which digits below 5 are `SKEW` times as frequent as the others."""

    def payload(self, index: int) -> Payload:
        random = np.random.default_rng(index)
        while True:
            payload = super().payload(int(random.integers(2**31)))
            labels = getattr(payload.truth, "labels")  # noqa: B009 - a source's own type
            if (random.random(labels.size) < np.where(labels < 5, 1.0, 1.0 / SKEW)).all():
                return payload


def write(method: str, folder: Path, replicas: int, cpu: float) -> InferencePipeline:
    """Write the pipeline of a method, with a budget of so many replicas of `cpu` cores."""
    stages = yaml.safe_load((SOURCE / "pipeline.yaml").read_text(encoding="utf-8"))["spec"]["stages"]
    for variant in [variant for stage in stages for variant in stage["variants"]]:
        variant["resources"] = variant["resources"] | {"cpu": cpu}
        if method in {SINGLE, MIX}:
            variant.pop("escalations", None)
    spec: dict[str, Any] = {"slo": {"latency": SLO}, "budget": {"cores": cpu * replicas}, "stages": stages}
    if method == SINGLE:
        spec["schedulingPolicy"] = "EarliestDeadlineFirst"
    return write_pipeline(SOURCE, folder, **spec)


def only_cascade(stage: StagePlan) -> StagePlan:
    """Return a stage's plan without points that its planned escalation does not need."""
    planned = stage.planned_escalation
    target = None if planned is None else planned.target(stage.variant)
    kept = {
        name: tuple(p.replace(escalations=()) for p in points if p.key(stage.variant) == target)
        for name, points in (("upgrades", stage.upgrades), ("fallbacks", stage.fallbacks))
    }
    return stage.replace(**kept, escalations=() if planned is None else (planned,))


def no_mixes(*given: Any) -> OptionArrays:
    return mixes(*given).take(np.arange(0))


def busiest_second(pipeline: InferencePipeline, mean_rps: float) -> ForecastRecord:
    """Return the forecast of a constant mean load: the busiest second of the horizon."""
    peak_rps = busiest_rps(mean_rps, pipeline.spec.adaptation.horizon_seconds)
    return ForecastRecord(peak_rps=peak_rps, source="static")


def resize(profiles: Profiles, cores: float) -> Profiles:
    """Return the profiles of replicas with another fraction of a core."""
    measured = next(iter(profiles.values())).spec.points[0].cores
    resized = slow_down(profiles, measured / cores)
    return {
        name: profile.replace(
            spec=profile.spec.replace(points=tuple(point.replace(cores=cores) for point in profile.spec.points))
        )
        for name, profile in resized.items()
    }


def carries(pipeline: InferencePipeline, profiles: Profiles, mean_rps: float) -> bool:
    """Return whether the budget carries a load with the most accurate variants."""
    heaviest = [max(stage.variants, key=lambda variant: variant.accuracy or 0.0).name for stage in pipeline.spec.stages]
    plan = decide(pipeline, profiles, PlanningInputs(busiest_second(pipeline, mean_rps), 0.0))
    return plan.spec.feasible and [stage.variant for stage in plan.spec.stages] == heaviest


def load_and_cores(folder: Path, profiles: Profiles) -> tuple[float, float]:
    """Return the load, and the cores of replicas that carry it with the heaviest variants."""
    return next(
        (mean_rps, cores)
        for mean_rps in LOADS_RPS
        for cores in CORES
        if carries(write(SINGLE, folder / SINGLE, HEAVIEST_REPLICAS, cores), resize(profiles, cores), mean_rps)
    )


@dataclass(frozen=True, slots=True)
class Bench:
    """What all plans share."""

    folder: Path
    cores: float
    """Of each replica."""
    mean_rps: float
    forecast: ForecastRecord
    profiles: Profiles

    @classmethod
    async def of(cls, folder: Path, cores: float | None = None, mean_rps: float = CALM_RPS) -> Self:
        """Plan for a load, by default for what the heaviest variants carry."""
        pipeline = write(ALL, folder / PROFILED, 2, cores or CORES[-1])
        variants = {stage.name: [variant.name for variant in stage.variants] for stage in pipeline.spec.stages}
        profiles = await cached_profiles(folder / PROFILED, folder / "profiles", variants)
        if cores is None:
            mean_rps, cores = load_and_cores(folder, profiles)
            profiles = resize(profiles, cores)
        return cls(folder, cores, mean_rps, busiest_second(pipeline, mean_rps), profiles)

    async def run(self) -> tuple[dict[str, list[Served]], Served]:
        """Serve each method with each budget, and the last plan of `ALL` again, with skewed pages."""
        found: dict[str, list[Served]] = {}
        for method, budgets in SECONDS.items():
            served = found[method] = []
            for replicas, seconds in budgets.items():
                folder = self.folder / f"{method}-{replicas}"
                pipeline = write(method, folder, replicas, self.cores)
                plan = await self._plan_again(method, folder, pipeline)
                served.append(await self._measure(folder, pipeline, plan, seconds, DigitPayloads()))
        return found, await self._measure(folder, pipeline, plan, SKEWED_SECONDS, SkewedPages())

    async def _plan_again(self, method: str, folder: Path, pipeline: InferencePipeline) -> PipelinePlan:
        """Return the plan that follows what the router measured under the first."""
        first = self._plan(method, pipeline, PlanningInputs(self.forecast, 0.0))
        _, state = await self._serve(folder, pipeline, first, LEARNING_SECONDS, DigitPayloads())
        controller = Controller(ReactiveForecaster())
        controller.update(read_state(state))
        return self._plan(method, pipeline, controller.planning_inputs(self.forecast, first, time.time(), 0.0))

    def _plan(self, method: str, pipeline: InferencePipeline, inputs: PlanningInputs) -> PipelinePlan:
        with pytest.MonkeyPatch.context() as patch:
            if method == CASCADE:
                patch.setattr(stage_options, "mixes", no_mixes)
            plan = decide(pipeline, self.profiles, inputs)
        stages = tuple(map(only_cascade, plan.spec.stages)) if method == CASCADE else plan.spec.stages
        return plan.with_spec(stages=stages)

    async def _measure(
        self, folder: Path, pipeline: InferencePipeline, plan: PipelinePlan, seconds: float, source: DigitPayloads
    ) -> Served:
        results, state = await self._serve(folder, pipeline, plan, seconds, source)
        expected = plan.spec.expected
        if expected is None:
            raise RuntimeError("the plan has no expectation")
        variants = [
            named
            for stage in state.stages.values()
            for named in ((stage.variant, stage), *stage.other_variants.items())
        ]
        drifted = tuple(f"{name} {value:.3f}" for name, own in variants for value in own.drifted_accuracies.values())
        mixes = tuple(distance for _, own in variants for distance in own.drifted_outputs.values())
        return Served(expected.cores, expected.accuracy, results, drifted, mixes)

    async def _serve(
        self, folder: Path, pipeline: InferencePipeline, plan: PipelinePlan, seconds: float, source: DigitPayloads
    ) -> tuple[Results, RouterState]:
        async with serve(folder, pipeline, plan) as served:
            results = await served.attack(LoadSpec.parse(f"{self.mean_rps}"), seconds, source)
            return results, await served.supervisor.client.state()


async def test_no_single_variants_are_above_the_frontier(tmp_path: Path, figures: Figures) -> None:
    bench = await Bench.of(tmp_path)
    found, skewed = await bench.run()

    for method, plans in found.items():
        for served in plans:
            key = f"{method}_{served.cores:.2f}_cores"
            figures.add(
                **{
                    f"{key}_accuracy": served.measured(),
                    f"{key}_planned": served.expected,
                    f"{key}_missed": served.missed,
                }
            )
    figures.add(load_rps=bench.mean_rps, replica_cores=bench.cores)
    figures.add(skewed_accuracy=skewed.measured(), skewed_drifted=", ".join(skewed.drifted))
    heaviest = max(found[SINGLE], key=lambda served: served.cores)
    gains = [
        max(ours.gain(single) for ours in found[ALL] if ours.cores <= single.cores + 1e-9) for single in found[SINGLE]
    ]
    enough = min((ours.cores for ours in found[ALL] if ours.gain(heaviest) >= -RESOLUTION), default=inf)
    gap = max(abs(served.measured() - served.expected) for served in found[ALL])
    figures.require("accuracy of all over single with as many cores, least", min(gains), ">=", -RESOLUTION)
    figures.require("cores of all over single's, at the heaviest accuracy", enough / heaviest.cores, "<=", 0.4)
    figures.require("all: |measured - planned| accuracy, most", gap, "<=", 0.01)
    figures.require("skewed: |measured - planned| accuracy", abs(skewed.measured() - skewed.expected), "<=", 0.025)
    figures.require("skewed: distance of the mix of classes, reported", max(skewed.mixes, default=0.0), ">=", 0.15)
    reported = sum(len(served.drifted) + len(served.mixes) for plans in found.values() for served in plans)
    figures.require("not skewed: drifts reported", reported, "==", 0)
    figures.require("all: fraction missed, most", max(served.missed for served in found[ALL]), "<=", 0.0005)


async def test_bursts_drop_no_request(tmp_path: Path, figures: Figures) -> None:
    """The load rises fourfold within a second, ten times; no plan follows it, so only the scheduler adapts."""
    bench = await Bench.of(tmp_path, BURST_CPU)
    pipeline = load_pipeline(tmp_path / PROFILED / "pipeline.yaml")
    plan = decide(pipeline, bench.profiles, PlanningInputs(bench.forecast, 0.0))
    calm, burst = (f"{rate}x{BURST_SECONDS}" for rate in (CALM_RPS, BURST_FACTOR * CALM_RPS))
    load = LoadSpec.parse("steps:" + ",".join([calm, burst] * BURSTS + [calm]))

    async with serve(tmp_path / PROFILED, pipeline, plan) as served:
        results = await served.attack(load, BURST_SECONDS * (2 * BURSTS + 1), DigitPayloads())

    summary, planned = results.summary(), {stage.name: stage.variant for stage in plan.spec.stages}
    for stage, variant in planned.items():
        lighter = results.answered[results.answered[f"variant:{stage}"] != variant]
        seconds = np.unique(lighter["scheduled"].astype(int)).size
        figures.add(**{f"{stage}_planned": variant}, **{f"{stage}_seconds_with_other_variants": seconds})
    figures.add(measured_accuracy=summary["measured_accuracy"], latency_p99_seconds=summary["latency_seconds_p99"])
    missed = results.count(RequestOutcome.DROPPED) + results.count(RequestOutcome.REFUSED)
    figures.require("dropped and refused requests", missed, "==", 0)
    figures.require("failed requests", results.count(RequestOutcome.FAILED), "==", 0)
    late = results.count(RequestOutcome.LATE) / summary["received"]
    figures.require("late requests, share", late, "<=", 0.005)
