"""Does the simulator tell the truth? The digits pipeline served and simulated, on the same arrivals. Last line: JSON.

Measured first: the profile of what will be served. Then one run goes through the same phases again and again, while
probes note how fast the machine is. Three phases calibrate and are not compared: how fast the variants are beside a
router and a load generator, how much replicas slow each other down, how noisy they are. With that the whole run is
simulated, and four other phases are compared with what was served: p50 and p99 of the answers, and the share that was
dropped or refused. Phases for a twentieth of which the host or other processes had the processors are left out; where
that leaves too few, all is served once more. A cycle through the phases takes 145 s.
"""

import argparse
import asyncio
import shutil
import sys
import time
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path

import numpy as np
from numpy.typing import NDArray
from rich.table import Table

from benchmarks.simulator.calibration import calibrate
from benchmarks.simulator.course import AFTER, BEFORE, COMPARED, CYCLE, Course, Figures
from benchmarks.simulator.served import Served, plan_of, recorded, serve
from trimtab.app import run_reporting_errors
from trimtab.options import console
from trimtab.preflight import prepare, profiling_progress
from trimtab.report.page import write_report
from trimtab.simulated_run import simulated_run
from trimtab_adapter.simulation.environment import Environment
from trimtab_adapter.simulation.result import SimulationResult
from trimtab_adapter.simulation.simulator import Scenario, simulate
from trimtab_pipelines.documents import load_profiles
from trimtab_pipelines.profile import ModelProfile
from trimtab_pipelines.request_outcome import LATE
from trimtab_pipelines.result_line import ResultLine, threshold
from trimtab_pipelines.spec import InferencePipeline
from trimtab_profiler.measure import Effort
from trimtab_profiler.profile import ProfileOptions, profile, write_profiles

EFFORT = Effort(seconds=1.5, min_batches=40, max_seconds=6.0)
SEEDS = range(1, 5)
MOST_ERROR, MOST_DROPS, LEAST_SPEED = 0.15, 0.02, 300.0
ATTEMPTS = 2


def main() -> int:
    """Run it; 0 where every bar holds."""
    parser = argparse.ArgumentParser(prog="benchmarks.simulator", description=__doc__)
    parser.add_argument("--pipeline", type=Path, default=Path("pipelines/digits"))
    parser.add_argument(
        "--cycles",
        type=int,
        default=5,
        help="how often to go through the phases; with fewer than five the p99 of the low load is chance",
    )
    parser.add_argument("--out", type=Path, default=Path("out"))
    parser.add_argument("--recorded", action="store_true", help="simulate what an earlier run left in OUT/simulator")
    given = parser.parse_args()
    return run_reporting_errors(lambda: bench(given))


def bench(given: argparse.Namespace) -> int:
    """Measure, serve, simulate, compare."""
    folder: Path = given.out / "simulator"
    pipeline, course = _narrowed(prepare(given.pipeline)), Course(CYCLE * given.cycles)
    served = recorded(folder, course) if given.recorded else _serve(given, pipeline, folder, course)
    profiles = load_profiles(folder / "profile.yaml")
    conditions = calibrate(pipeline, profiles, served.results.answered, served.course, served.pace)
    console.print(_measured(conditions, served))
    simulation = _Simulation(pipeline, profiles, served.course, served, conditions)
    simulated = simulation.run(given.out / "simulator.html")
    _print(served, simulated)
    outcome = fidelity_outcome(served, simulated, conditions)
    outcome.print()
    return 0 if outcome.holds else 1


def _serve(given: argparse.Namespace, pipeline: InferencePipeline, folder: Path, course: Course) -> Served:
    """Measure and serve; once more where the host took the processors away for too much of it."""
    attempt = 0
    while True:
        attempt += 1
        _measure(given.pipeline, pipeline, folder)
        serve(folder, given.pipeline, pipeline, load_profiles(folder / "profile.yaml"), course)
        served = recorded(folder, course)
        if served.is_calm or attempt == ATTEMPTS:
            return served
        console.print(f"{_taken(served)}, too long: once more")


def _measure(given: Path, pipeline: InferencePipeline, folder: Path) -> None:
    """Write the profile of the pipeline given into an empty folder."""
    shutil.rmtree(folder, ignore_errors=True)
    folder.mkdir(parents=True)
    with profiling_progress(console) as show:
        options = ProfileOptions(EFFORT, planned_batches_only=True)
        write_profiles(asyncio.run(profile(pipeline, given, options, show)), folder)


@dataclass(frozen=True, slots=True)
class _Found:
    """What several simulations give together: by phase, by stage the mean rows of a batch, and how fast they were."""

    figures: Figures
    batch_rows: Mapping[str, float]
    times_real_time: float


@dataclass(frozen=True, slots=True)
class _Simulation:
    """Simulates what was served, on the very same arrivals: as they were sent."""

    pipeline: InferencePipeline
    profiles: Mapping[str, ModelProfile]
    course: Course
    served: Served
    conditions: Environment

    def run(self, page: Path) -> "_Found":
        """Simulate several times with other chances; the first one beside what was served makes the page."""
        began = time.process_time()  # it has one thread, so this is what a clock shows where nobody else computes
        found = [simulate(self._scenario(seed)) for seed in SEEDS]
        times_real_time = sum(one.duration_seconds for one in found) / (time.process_time() - began)
        facts, run = self.served.results.facts, self.served.run
        write_report(
            page, [run, simulated_run("simulated", facts.load, self._scenario(SEEDS[0]), found[0], run.started_at)]
        )
        rows = {name: float(np.mean([one.batch_rows[name] for one in found])) for name in found[0].batch_rows}
        return _Found(self._summed_up(found), rows, times_real_time)

    def _summed_up(self, found: list[SimulationResult]) -> Figures:
        """By when they were due, and from then on: how late the load tester was is part of both sides."""
        records = self.served.results.records
        due = records["scheduled"][self._order]
        lateness = records["sent"][self._order] - due
        return self.course.figures(
            np.concatenate([due for _ in found]),
            np.concatenate([one.latency_seconds + lateness for one in found]),
            np.concatenate([one.outcomes <= LATE for one in found]),
        )

    @property
    def _order(self) -> NDArray[np.intp]:
        """Of the requests as they were sent: those due in one moment may pass each other."""
        return np.argsort(self.served.results.records["sent"], kind="stable")

    def _scenario(self, seed: int) -> Scenario:
        served, plans = self.served, {}
        for generation, (at, (_, variants)) in enumerate(zip(served.changed_at, self.course.changes(), strict=True), 2):
            plans[at] = plan_of(self.pipeline, self.profiles, variants, generation)
        return Scenario(
            pipeline=self.pipeline,
            profiles=self.profiles,
            arrivals_seconds=np.maximum(served.results.records["sent"][self._order], 0.0),
            duration_seconds=served.results.facts.duration_seconds,
            plan=plan_of(self.pipeline, self.profiles, self.course.phases[0].variants, 1),
            changes=tuple(plans.items()),
            environment=self.conditions,
            seed=seed,
        )


def _narrowed(pipeline: InferencePipeline) -> InferencePipeline:
    """Leave only the variants that will be served: there is nothing else to profile."""
    wanted = {*BEFORE.values(), *AFTER.values()}
    stages = tuple(
        stage.model_copy(update={"variants": tuple(v for v in stage.variants if v.name in wanted)})
        for stage in pipeline.spec.stages
    )
    return pipeline.model_copy(update={"spec": pipeline.spec.model_copy(update={"stages": stages})})


def _measured(conditions: Environment, served: Served) -> str:
    """Tell in a few lines under which conditions it was served."""
    slowness = served.pace.slowness
    lines = [
        f"{variant}: {ratio:.2f} × its profiled median, its p99 {_p99(conditions.factors[stage, variant]):.2f} × that"
        for (stage, variant), ratio in conditions.service_ratios.items()
    ]
    lines.append(f"a busy replica slows another one by {conditions.contention:.1%}")
    lines.append(f"requests take {1000 * conditions.before_seconds:.1f} ms outside of the stages")
    if slowness.size:
        lines.append(f"the machine's time for the same work: {slowness.min():.2f} to {slowness.max():.2f} × its mean")
    lines.append(f"{_taken(served)}; {len(served.course.left_out)} of {len(served.course.phases)} phases left out")
    return "\n".join(lines)


def _p99(factors: Sequence[float]) -> float:
    return float(np.quantile(factors, 0.99) / np.median(factors))


def _taken(served: Served) -> str:
    paused, away = served.pace.paused_seconds, served.pace.away(0.0, np.inf)
    return f"its host took the processors for {paused:.2f} s, other processes for {away - paused:.2f} s"


def _print(served: Served, simulated: _Found) -> None:
    heads = ("load", "requests", "p50 served", "simulated", "p99 served", "simulated", "dropped served", "simulated")
    table = Table(*heads, box=None, pad_edge=False)
    for name, figures in served.figures.items():
        sides = (figures, simulated.figures[name])
        table.add_row(
            name if name in COMPARED else f"({name})",
            f"{figures['requests']:.0f}",
            *(f"{1000 * side[figure]:.1f} ms" for figure in ("p50", "p99") for side in sides),
            *(f"{100 * side['dropped']:.2f} %" for side in sides),
        )
    console.print(table)
    console.print("in brackets: calibrated at")
    for stage, rows in simulated.batch_rows.items():
        console.print(f"{stage}: {served.batch_rows(stage):.3f} rows a batch served, {rows:.3f} simulated")


def fidelity_outcome(served: Served, simulated: _Found, conditions: Environment) -> ResultLine:
    """Judge the simulation by how far it is off."""
    figures: dict[str, float | int | str | None] = {
        "contention": conditions.contention,
        **{f"p99_over_median_{variant}": _p99(each) for (_, variant), each in conditions.factors.items()},
        **{f"service_ratio_{variant}": ratio for (_, variant), ratio in conditions.service_ratios.items()},
        **{f"mean_batch_rows_{stage}_served": served.batch_rows(stage) for stage in simulated.batch_rows},
        **{f"mean_batch_rows_{stage}_simulated": rows for stage, rows in simulated.batch_rows.items()},
        "times_real_time": simulated.times_real_time,
        "machine_slowness_deviation": float(served.pace.slowness.std()) if served.pace.slowness.size else None,
        "machine_paused_seconds": served.pace.paused_seconds,
        "machine_others_seconds": served.pace.away(0.0, np.inf) - served.pace.paused_seconds,
        "phases": len(served.course.phases),
        "phases_left_out": len(served.course.left_out),
    }
    bars = [threshold("times real time", simulated.times_real_time, ">=", LEAST_SPEED)]
    for name in COMPARED:
        ours, theirs = served.figures[name], simulated.figures[name]
        for figure in ("p50", "p99"):
            figures[f"{name}: {figure} served, seconds"] = ours[figure]
            figures[f"{name}: {figure} simulated, seconds"] = theirs[figure]
            error = abs(theirs[figure] / ours[figure] - 1.0)
            bars.append(threshold(f"{name}: relative error of {figure}", error, "<=", MOST_ERROR))
        gap = abs(theirs["dropped"] - ours["dropped"])
        bars.append(threshold(f"{name}: gap of dropped share", gap, "<=", MOST_DROPS))
    return ResultLine(name="bench-simulator", figures=figures, bars=tuple(bars))


if __name__ == "__main__":
    sys.exit(main())
