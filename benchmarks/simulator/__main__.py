"""Fidelity benchmark of the simulator: the digits pipeline served and simulated on the same arrivals.

The benchmark profiles the pipeline, then serves cycles of phases while probes record the machine's speed. Three phases
calibrate the simulated environment: the variants' speed beside a router and a load generator, the slowdown by other
replicas, and the spread of service times. Four other phases are compared: p50 and p99 latency, and the share of dropped
or rejected requests. A phase is excluded if the host or other processes took a twentieth of it; if too few phases
remain, the run is served once more. A cycle takes 145 s.
"""

import argparse
import asyncio
import shutil
import time
from collections.abc import Mapping
from dataclasses import dataclass
from pathlib import Path

import numpy as np
from numpy.typing import NDArray

from benchmarks.harness.report import Report, print_table
from benchmarks.simulator.calibration import calibrate
from benchmarks.simulator.phases import AFTER, BEFORE, COMPARED, CYCLE, Figures, PhaseSequence
from benchmarks.simulator.served import Served, plan_of, recorded, serve
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
from trimtab_pipelines.spec import InferencePipeline
from trimtab_profiler.measure import Effort
from trimtab_profiler.profile import ProfileOptions, profile, write_profiles

EFFORT = Effort(seconds=1.5, min_batches=40, max_seconds=6.0)
SEEDS = range(1, 5)
MAX_ERROR, MAX_DROP_GAP, MIN_SPEED = 0.15, 0.02, 700.0
ATTEMPTS = 2
COLUMNS = ("load", "requests", "p50 served", "simulated", "p99 served", "simulated", "dropped served", "simulated")


def main() -> int:
    """Run the benchmark; the exit code is 0 if every bar holds."""
    parser = argparse.ArgumentParser(prog="python -m benchmarks simulator", description=__doc__)
    parser.add_argument("--pipeline", type=Path, default=Path("pipelines/digits"))
    parser.add_argument(
        "--cycles",
        type=int,
        default=5,
        help="cycles through the phases; with fewer than five the p99 of the low load is noise",
    )
    parser.add_argument("--out", type=Path, default=Path("out"))
    parser.add_argument("--recorded", action="store_true", help="simulate the run recorded in OUT/simulator")
    options = parser.parse_args()
    folder: Path = options.out / "simulator"
    pipeline, phases = _narrowed(prepare(options.pipeline)), PhaseSequence(CYCLE * options.cycles)
    served = recorded(folder, phases) if options.recorded else _serve(options, pipeline, folder, phases)
    profiles = load_profiles(folder / "profile.yaml")
    conditions = calibrate(pipeline, profiles, served.results.answered, served.phases, served.machine)
    console.print(f"{_taken(served)}; {len(served.phases.excluded)} of {len(phases.phases)} phases excluded")
    simulation = _Simulation(pipeline, profiles, served, conditions)
    simulated = simulation.run(options.out / "simulator.html")
    _print(served, simulated)
    return judge(served, simulated, conditions).finish()


def _serve(options: argparse.Namespace, pipeline: InferencePipeline, folder: Path, phases: PhaseSequence) -> Served:
    """Profile and serve, and once more if the host or other processes took too much."""
    attempt = 0
    while True:
        attempt += 1
        _profile(options.pipeline, pipeline, folder)
        serve(folder, options.pipeline, pipeline, load_profiles(folder / "profile.yaml"), phases)
        served = recorded(folder, phases)
        if served.is_undisturbed or attempt == ATTEMPTS:
            return served
        console.print(f"{_taken(served)}: serving once more")


def _profile(source: Path, pipeline: InferencePipeline, folder: Path) -> None:
    """Write the profile of the pipeline at a path into an empty folder."""
    shutil.rmtree(folder, ignore_errors=True)
    folder.mkdir(parents=True)
    with profiling_progress() as show:
        options = ProfileOptions(EFFORT, planned_batches_only=True)
        write_profiles(asyncio.run(profile(pipeline, source, options, show)), folder)


@dataclass(frozen=True, slots=True)
class SimulatedRuns:
    """Figures of several simulations by phase, mean batch rows by stage, and speed."""

    figures: Figures
    batch_rows: Mapping[str, float]
    times_real_time: float


@dataclass(frozen=True, slots=True)
class _Simulation:
    """Simulation of a served run on its arrivals, at the times when they were sent."""

    pipeline: InferencePipeline
    profiles: Mapping[str, ModelProfile]
    served: Served
    conditions: Environment

    def run(self, page: Path) -> SimulatedRuns:
        """Simulate with several seeds; write the first beside the served run as a page."""
        began = time.process_time()
        results = [simulate(self._scenario(seed)) for seed in SEEDS]
        times_real_time = sum(result.duration_seconds for result in results) / (time.process_time() - began)
        facts, run = self.served.results.facts, self.served.run
        write_report(
            page, [run, simulated_run("simulated", facts.load, self._scenario(SEEDS[0]), results[0], run.started_at)]
        )
        rows = {name: float(np.mean([result.batch_rows[name] for result in results])) for name in results[0].batch_rows}
        return SimulatedRuns(self._figures(results), rows, times_real_time)

    def _figures(self, results: list[SimulationResult]) -> Figures:
        """Count latency from the time a request was due; the load tester's delay is part of both sides."""
        records = self.served.results.records
        due = records["scheduled"][self._order]
        lateness = records["sent"][self._order] - due
        return self.served.phases.figures(
            np.concatenate([due for _ in results]),
            np.concatenate([result.latency_seconds + lateness for result in results]),
            np.concatenate([result.outcomes <= LATE for result in results]),
        )

    @property
    def _order(self) -> NDArray[np.intp]:
        """Indexes in the order of sending; requests due at one moment may change order."""
        return np.argsort(self.served.results.records["sent"], kind="stable")

    def _scenario(self, seed: int) -> Scenario:
        served, plans = self.served, {}
        for generation, (at, (_, variants)) in enumerate(
            zip(served.changed_at, self.served.phases.changes(), strict=True), 2
        ):
            plans[at] = plan_of(self.pipeline, self.profiles, variants, generation)
        return Scenario(
            pipeline=self.pipeline,
            profiles=self.profiles,
            arrivals_seconds=np.maximum(served.results.records["sent"][self._order], 0.0),
            duration_seconds=served.results.facts.duration_seconds,
            plan=plan_of(self.pipeline, self.profiles, self.served.phases.phases[0].variants, 1),
            changes=tuple(plans.items()),
            environment=self.conditions,
            seed=seed,
        )


def _narrowed(pipeline: InferencePipeline) -> InferencePipeline:
    """Keep only the variants that will be served."""
    wanted = {*BEFORE.values(), *AFTER.values()}
    stages = tuple(
        stage.replace(variants=tuple(v for v in stage.variants if v.name in wanted)) for stage in pipeline.spec.stages
    )
    return pipeline.with_spec(stages=stages)


def _taken(served: Served) -> str:
    paused, taken = served.machine.paused_seconds, served.machine.taken(0.0, np.inf)
    return f"its host took the processors for {paused:.2f} s, other processes for {taken - paused:.2f} s"


def _print(served: Served, simulated: SimulatedRuns) -> None:
    rows = []
    for name, figures in served.figures.items():
        sides = (figures, simulated.figures[name])
        rows.append(
            (
                name if name in COMPARED else f"({name})",
                f"{figures['requests']:.0f}",
                *(f"{1000 * side[figure]:.1f} ms" for figure in ("p50", "p99") for side in sides),
                *(f"{100 * side['dropped']:.2f} %" for side in sides),
            )
        )
    print_table(COLUMNS, rows, "in brackets: phases for calibration")
    for stage, batch_rows in simulated.batch_rows.items():
        console.print(f"{stage}: {served.batch_rows(stage):.3f} rows a batch served, {batch_rows:.3f} simulated")


def judge(served: Served, simulated: SimulatedRuns, conditions: Environment) -> Report:
    """Compare the simulation with the served run."""
    machine = served.machine
    report = Report(
        "bench-simulator",
        {
            "contention": conditions.contention,
            "seconds_outside_of_stages": conditions.before_seconds,
            "times_real_time": simulated.times_real_time,
            "machine_slowness_deviation": float(machine.slowness.std()) if machine.slowness.size else None,
            "machine_paused_seconds": machine.paused_seconds,
            "machine_others_seconds": machine.taken(0.0, np.inf) - machine.paused_seconds,
            "phases": len(served.phases.phases),
            "phases_excluded": len(served.phases.excluded),
        },
    )
    for (_, variant), factors in conditions.factors.items():
        report.add({f"p99_over_median_{variant}": float(np.quantile(factors, 0.99) / np.median(factors))})
    report.add({f"service_ratio_{variant}": ratio for (_, variant), ratio in conditions.service_ratios.items()})
    for stage, rows in simulated.batch_rows.items():
        report.add({f"mean_batch_rows_{stage}_served": served.batch_rows(stage)})
        report.add({f"mean_batch_rows_{stage}_simulated": rows})
    report.hold("times real time", simulated.times_real_time, ">=", MIN_SPEED)
    for name in COMPARED:
        observed, predicted = served.figures[name], simulated.figures[name]
        for figure in ("p50", "p99"):
            report.add({f"{name}: {figure} served, seconds": observed[figure]})
            report.add({f"{name}: {figure} simulated, seconds": predicted[figure]})
            error = abs(predicted[figure] / observed[figure] - 1.0)
            report.hold(f"{name}: relative error of {figure}", error, "<=", MAX_ERROR)
        gap = abs(predicted["dropped"] - observed["dropped"])
        report.hold(f"{name}: gap of dropped share", gap, "<=", MAX_DROP_GAP)
    return report
