"""Does the simulator tell the truth? The digits pipeline served and simulated, on the same arrivals. Last line: JSON.

Measured first, in the same run: the profile of what will be served; then, under a load that is not compared, how much
slower and noisier the replicas are beside a router and a load generator than alone, what a request costs beside its
batches, and how many rows it fans out to. With these parameters three other loads and a change of plan are simulated,
and compared with what was served: p50 and p99 of the answers, and the share that was dropped or refused.
"""

import argparse
import asyncio
import sys
import time
from collections.abc import Callable, Mapping
from dataclasses import dataclass, field, replace
from pathlib import Path
from tempfile import TemporaryDirectory

import numpy as np
from rich.table import Table

from trimtab.commands import reporting_errors
from trimtab.live import watching
from trimtab.local.loading import LoadOrder
from trimtab.local.supervisor import Setup, Supervisor
from trimtab.options import console
from trimtab.preparation import measuring, prepare
from trimtab.record import save
from trimtab.report.page import write_report
from trimtab.session import RunFolder, Session
from trimtab.simulated import run_of
from trimtab.timeline import Run
from trimtab_adapter.baselines import with_pins
from trimtab_adapter.rivals import plan_for_peak
from trimtab_adapter.simulation.conditions import Conditions
from trimtab_adapter.simulation.outcome import LATE, Simulated
from trimtab_adapter.simulation.simulate import Scenario, simulate
from trimtab_loadtester.results import Results
from trimtab_pipelines.documents import write_json
from trimtab_pipelines.outcome import Outcome, bar
from trimtab_pipelines.plan import PipelinePlan
from trimtab_pipelines.profile import ModelProfile
from trimtab_pipelines.spec import InferencePipeline, Pin
from trimtab_profiler.measure import Effort
from trimtab_profiler.profile import ProfileOptions, profile, write_profiles

EFFORT = Effort(seconds=1.5, least_batches=40, most_seconds=6.0)
BEFORE, AFTER = {"locate": "locate-xl", "read": "read-xl"}, {"locate": "locate-l", "read": "read-l"}
BATCH = 8
SHARES = (0.2, 0.35, 0.5)
CALIBRATED_SHARE, CHANGED_SHARE = 0.3, 0.4
"""Loads, as shares of what the plan's scarcest stage carries."""
CHANGED_AFTER = 1 / 3
"""Of the run: the median is then one of the second plan's latencies, the p99 one of the first plan's."""
MOST_SPREAD, HALVINGS = 16.0, 10
SIMULATED_SEEDS = range(1, 9)
MOST_ERROR, MOST_DROPS = 0.15, 0.02


@dataclass(slots=True)
class Served:
    """A served run: its record, what the router measured meanwhile, and when the plan changed."""

    run: Run
    ratios: dict[str, list[float]] = field(default_factory=dict)
    changed_at: float | None = None

    @property
    def results(self) -> Results:
        """The load tester's record."""
        if self.run.results is None:
            raise RuntimeError(f"{self.run.title}: the load left no record; it was probably interrupted")
        return self.run.results


@dataclass(frozen=True, slots=True)
class Compared:
    """One load, served and simulated."""

    name: str
    served: Mapping[str, float]
    simulated: Mapping[str, float]

    def error(self, figure: str) -> float:
        """Relative error of the simulation."""
        return abs(self.simulated[figure] / self.served[figure] - 1.0)

    @property
    def drops_gap(self) -> float:
        """Distance between the shares without an answer."""
        return abs(self.simulated["dropped"] - self.served["dropped"])


def main() -> int:
    """Run it; 0 where every bar holds."""
    parser = argparse.ArgumentParser(prog="benchmarks.simulator", description=__doc__)
    parser.add_argument("--pipeline", type=Path, default=Path("pipelines/digits"))
    parser.add_argument("--duration", type=float, default=90.0, help="seconds of each load")
    parser.add_argument("--out", type=Path, default=Path("out"))
    given = parser.parse_args()
    return reporting_errors(lambda: bench(given))


def bench(given: argparse.Namespace) -> int:
    """Measure, serve, simulate, compare."""
    pipeline = _narrowed(prepare(given.pipeline))
    with TemporaryDirectory(prefix="trimtab-") as folder, measuring(console) as show:
        found = asyncio.run(profile(pipeline, given.pipeline, ProfileOptions(EFFORT, planned_batches_only=True), show))
        write_profiles(found, Path(folder))
    before, after = _plan(pipeline, found, BEFORE, 1), _plan(pipeline, found, AFTER, 2)
    bench_of = _Bench(given, pipeline, found, before)
    calibrated = bench_of.serve("calibration", CALIBRATED_SHARE, seed=100)
    conditions = bench_of.calibrate(calibrated)
    console.print(f"measured: {conditions}")
    compared: list[Compared] = []
    speeds: list[float] = []
    for seed, share in enumerate(SHARES, 1):
        served = bench_of.serve(f"{share:.0%} of capacity", share, seed)
        compared.append(bench_of.compare(served, conditions, (), speeds))
    served = bench_of.serve("change of plan", CHANGED_SHARE, seed=50, following=after)
    changes = ((served.changed_at or CHANGED_AFTER * given.duration, after),)
    compared.append(bench_of.compare(served, conditions, changes, speeds))
    _print(compared)
    outcome = fidelity_outcome(compared, conditions, float(np.median(speeds)))
    outcome.print()
    return 0 if outcome.holds else 1


@dataclass(frozen=True, slots=True)
class _Bench:
    """What stays the same from run to run."""

    given: argparse.Namespace
    pipeline: InferencePipeline
    profiles: Mapping[str, ModelProfile]
    plan: PipelinePlan

    def serve(self, name: str, share: float, seed: int, following: PipelinePlan | None = None) -> Served:
        """Serve a constant load, and change the plan where another is given."""
        order = LoadOrder(f"constant:{share * self.capacity_rps:.4g}", duration_seconds=self.given.duration, seed=seed)
        changed: list[float] = []
        ratios: dict[str, list[float]] = {}

        async def change(local: Supervisor) -> None:
            if following is not None:
                await asyncio.sleep(CHANGED_AFTER * self.given.duration)
                changed.append(time.time())
                write_json(local.plan_file, following)

        with RunFolder() as where:
            setup = Setup(self.given.pipeline, where, plan=self.plan)
            session = Session(f"served, {name}", setup, order, disturb=change)
            with watching(session, console):
                session.on_sample = _noting(ratios, session.on_sample)
                run = asyncio.run(session.run())
        save(run, self.given.out / "simulator" / name.replace(" ", "-").replace("%", ""))
        at = changed[0] - run.started_at if changed else None
        return Served(run, ratios, at)

    @property
    def capacity_rps(self) -> float:
        """Requests per second the scarcest stage of the plan carries by its profile."""
        rows = self.pipeline.spec.expected_rows
        return min(stage.throughput_rps / rows[stage.name] for stage in self.plan.spec.stages)

    def calibrate(self, served: Served) -> Conditions:
        """Take from a served run what no profile tells."""
        ratios = {
            (stage.name, variant): float(np.median(served.ratios.get(stage.name, [1.0])))
            for stage in self.plan.spec.stages
            for variant in (BEFORE[stage.name], AFTER[stage.name])
        }
        totals = served.results.answered["total"]
        weights = tuple(np.bincount(totals).astype(float).tolist())
        found = Conditions(service_ratios=ratios, fan_out={("locate", "count"): weights})
        for _ in range(2):  # the overhead and the spread each depend a little on the other
            found = self._overhead(served, found)
            found = self._spread(served, found)
        return found

    def _overhead(self, served: Served, conditions: Conditions) -> Conditions:
        """Find what a request costs beside its batches: it explains what is missing of the median."""
        bare = replace(conditions, before_seconds=0.0, after_seconds=0.0)
        missing = _served_figures(served.results)["p50"] - self._simulated(served, bare)["p50"]
        return replace(conditions, before_seconds=max(missing, 0.0) / 2, after_seconds=max(missing, 0.0) / 2)

    def _spread(self, served: Served, conditions: Conditions) -> Conditions:
        """Find by bisection how noisy service times are here: it explains the p99."""
        wanted, low, high = _served_figures(served.results)["p99"], 0.0, MOST_SPREAD
        for _ in range(HALVINGS):
            middle = (low + high) / 2
            reached = self._simulated(served, replace(conditions, spread=middle))["p99"]
            low, high = (middle, high) if reached < wanted else (low, middle)
        return replace(conditions, spread=(low + high) / 2)

    def _simulated(self, served: Served, conditions: Conditions) -> dict[str, float]:
        return _simulated_figures([self.simulate(served, conditions, (), seed) for seed in SIMULATED_SEEDS[:3]])

    def simulate(
        self, served: Served, conditions: Conditions, changes: tuple[tuple[float, PipelinePlan], ...], seed: int
    ) -> Simulated:
        """Simulate the very arrivals that were served."""
        return simulate(self._scenario(served, conditions, changes, seed))

    def compare(
        self,
        served: Served,
        conditions: Conditions,
        changes: tuple[tuple[float, PipelinePlan], ...],
        speeds: list[float],
    ) -> Compared:
        """Simulate several times with other chances, and set the figures beside those served."""
        began = time.perf_counter()
        found = [self.simulate(served, conditions, changes, seed) for seed in SIMULATED_SEEDS]
        speeds.append(len(found) * found[0].duration_seconds / (time.perf_counter() - began))
        scenario = self._scenario(served, conditions, changes, SIMULATED_SEEDS[0])
        load = served.results.facts.load
        again = run_of(f"{served.run.title}, simulated", load, scenario, found[0], served.run.started_at)
        name = served.run.title.removeprefix("served, ")
        write_report(self.given.out / f"simulator-{name.replace(' ', '-').replace('%', '')}.html", [served.run, again])
        return Compared(name, _served_figures(served.results), _simulated_figures(found))

    def _scenario(
        self, served: Served, conditions: Conditions, changes: tuple[tuple[float, PipelinePlan], ...], seed: int
    ) -> Scenario:
        return Scenario(
            pipeline=self.pipeline,
            profiles=self.profiles,
            arrivals_seconds=np.sort(served.results.records["scheduled"]),
            duration_seconds=served.results.facts.duration_seconds,
            plan=self.plan,
            changes=changes,
            conditions=conditions,
            seed=seed,
        )


def _noting(ratios: dict[str, list[float]], told: Callable[[Session], None]) -> Callable[[Session], None]:
    """Remember at each sample what the router says of its replicas' speed."""

    def note(session: Session) -> None:
        for name, stage in session.local.state.get("stages", {}).items():
            ratios.setdefault(name, []).append(float(stage["service_ratio"]))
        told(session)

    return note


def _narrowed(pipeline: InferencePipeline) -> InferencePipeline:
    """Leave only the variants that will be served: there is nothing else to profile."""
    wanted = {*BEFORE.values(), *AFTER.values()}
    stages = tuple(
        stage.model_copy(update={"variants": tuple(v for v in stage.variants if v.name in wanted)})
        for stage in pipeline.spec.stages
    )
    return pipeline.model_copy(update={"spec": pipeline.spec.model_copy(update={"stages": stages})})


def _plan(
    pipeline: InferencePipeline, profiles: Mapping[str, ModelProfile], variants: Mapping[str, str], generation: int
) -> PipelinePlan:
    """Plan one replica of each variant with a given batch size."""
    pins = {name: Pin(variant=variant, batch_size=BATCH, replicas=1) for name, variant in variants.items()}
    pinned = pipeline.model_copy(update={"spec": with_pins(pipeline.spec, pins)})
    plan = plan_for_peak(pinned, profiles, 1.0)
    return plan.model_copy(update={"spec": plan.spec.model_copy(update={"generation": generation})})


def _served_figures(results: Results) -> dict[str, float]:
    latencies = results.answered["latency_seconds"]
    unanswered = 1.0 - len(results.answered) / len(results.records)
    p50, p99 = np.quantile(latencies, (0.5, 0.99))
    return {"p50": float(p50), "p99": float(p99), "dropped": unanswered, "requests": float(len(results.records))}


def _simulated_figures(found: list[Simulated]) -> dict[str, float]:
    answered = np.concatenate([one.latency_seconds[one.ends <= LATE] for one in found])
    p50, p99 = np.quantile(answered, (0.5, 0.99))
    unanswered = float(np.mean([(one.ends > LATE).mean() for one in found]))
    return {"p50": float(p50), "p99": float(p99), "dropped": unanswered}


def _print(compared: list[Compared]) -> None:
    heads = ("load", "requests", "p50 served", "simulated", "p99 served", "simulated", "dropped served", "simulated")
    table = Table(*heads, box=None, pad_edge=False)
    for one in compared:
        table.add_row(
            one.name,
            f"{one.served['requests']:.0f}",
            *(f"{1000 * side[figure]:.1f} ms" for figure in ("p50", "p99") for side in (one.served, one.simulated)),
            *(f"{100 * side['dropped']:.2f} %" for side in (one.served, one.simulated)),
        )
    console.print(table)


def fidelity_outcome(compared: list[Compared], conditions: Conditions, times_real_time: float) -> Outcome:
    """Judge the simulation by how far it is off."""
    figures: dict[str, float | int | str | None] = {
        "overhead_seconds": conditions.before_seconds + conditions.after_seconds,
        "spread": conditions.spread,
        **{f"service_ratio_{variant}": ratio for (_, variant), ratio in conditions.service_ratios.items()},
        "times_real_time": times_real_time,
    }
    bars = []
    for one in compared:
        for figure in ("p50", "p99"):
            figures[f"{one.name}: {figure} served, seconds"] = one.served[figure]
            figures[f"{one.name}: {figure} simulated, seconds"] = one.simulated[figure]
            bars.append(bar(f"{one.name}: relative error of {figure}", one.error(figure), "<=", MOST_ERROR))
        bars.append(bar(f"{one.name}: gap of dropped share", one.drops_gap, "<=", MOST_DROPS))
    return Outcome(name="bench-simulator", figures=figures, bars=tuple(bars))


if __name__ == "__main__":
    sys.exit(main())
