"""Does the simulator tell the truth? The digits pipeline served and simulated, on the same arrivals. Last line: JSON.

Measured first: the profile of what will be served. Then one run goes through the same phases again and again, so that a
moment in which the machine is busy with something else falls on all of them a little. Three phases calibrate and are
not compared: how fast the variants of both plans are beside a router and a load generator, how much replicas slow each
other down, how noisy they are, and how many rows a request fans out to. With that the whole run is simulated, and four
other phases are compared with what was served: p50 and p99 of the answers, and the share that was dropped or refused.
"""

import argparse
import asyncio
import sys
import time
from collections.abc import Callable, Mapping
from dataclasses import dataclass, replace
from pathlib import Path
from tempfile import TemporaryDirectory

import numpy as np
from numpy.typing import NDArray
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
from trimtab_loadtester.outcome import RequestOutcome
from trimtab_loadtester.results import Results
from trimtab_pipelines.documents import write_json
from trimtab_pipelines.outcome import Outcome, bar
from trimtab_pipelines.plan import PipelinePlan
from trimtab_pipelines.profile import ModelProfile
from trimtab_pipelines.spec import InferencePipeline, Pin
from trimtab_profiler.measure import Effort
from trimtab_profiler.profile import ProfileOptions, profile, write_profiles

Floats = NDArray[np.float64]
EFFORT = Effort(seconds=1.5, least_batches=40, most_seconds=6.0)
BEFORE, AFTER = {"locate": "locate-xl", "read": "read-xl"}, {"locate": "locate-l", "read": "read-l"}
BATCH = 8
MOST_SPREAD, MOST_CONTENTION, HALVINGS, ROUNDS = 8.0, 2.0, 7, 2
CALIBRATING_SEED, SEEDS = 0, range(1, 5)
MOST_ERROR, MOST_DROPS = 0.15, 0.02


@dataclass(frozen=True, slots=True)
class Phase:
    """A constant load under one plan; a share of what the first plan's scarcest stage carries."""

    name: str
    share: float
    seconds: int
    variants: Mapping[str, str]


LIGHT, HEAVY, OTHER = "light", "heavy", "other plan"
CYCLE = (
    Phase(LIGHT, 0.12, 15, BEFORE),
    Phase("20% of capacity", 0.2, 20, BEFORE),
    Phase("35% of capacity", 0.35, 20, BEFORE),
    Phase(HEAVY, 0.45, 15, BEFORE),
    Phase("50% of capacity", 0.5, 20, BEFORE),
    # The p99 of these two is then one of the first plan's latencies, the median one of the second plan's.
    Phase("change of plan", 0.4, 10, BEFORE),
    Phase("change of plan", 0.4, 20, AFTER),
    Phase(OTHER, 0.3, 15, AFTER),
)
COMPARED = ("20% of capacity", "35% of capacity", "50% of capacity", "change of plan")
Figures = Mapping[str, Mapping[str, float]]
"""By phase: p50 and p99 in seconds, the share without an answer, the number of requests."""


@dataclass(frozen=True, slots=True)
class Course:
    """The phases of a run, one after the other."""

    phases: tuple[Phase, ...]

    @property
    def ends(self) -> NDArray[np.int64]:
        """Second at which each ends."""
        return np.cumsum([phase.seconds for phase in self.phases])

    def load(self, capacity_rps: float) -> str:
        """Return the load as the load tester reads it."""
        return "steps:" + ",".join(f"{phase.share * capacity_rps:.4g}x{phase.seconds}" for phase in self.phases)

    def changes(self) -> list[tuple[float, Mapping[str, str]]]:
        """Return at which second which variants take over."""
        starts = (float(end) for end in self.ends[:-1])
        pairs = zip(self.phases, self.phases[1:], starts, strict=False)
        return [(at, phase.variants) for before, phase, at in pairs if phase.variants is not before.variants]

    def figures(self, scheduled: Floats, latency: Floats, answered: NDArray[np.bool_]) -> Figures:
        """Sum up the requests of each phase, by when they were due."""
        which = np.minimum(np.searchsorted(self.ends, scheduled, side="right"), len(self.phases) - 1)
        names = np.array([phase.name for phase in self.phases])[which]
        return {name: _summed_up(latency, answered, names == name) for name in dict.fromkeys(names.tolist())}


def _summed_up(latency: Floats, answered: NDArray[np.bool_], here: NDArray[np.bool_]) -> dict[str, float]:
    p50, p99 = np.quantile(latency[here & answered], (0.5, 0.99))
    return {"p50": float(p50), "p99": float(p99), "dropped": 1.0 - float(answered[here].mean()), "requests": here.sum()}


@dataclass(frozen=True, slots=True)
class Served:
    """The served run: its record, what the router measured meanwhile, when the plan changed, and its figures."""

    results: Results
    run: Run
    ratios: Mapping[tuple[str, str], float]
    changes: tuple[tuple[float, PipelinePlan], ...]
    figures: Figures
    stolen: float
    """Share of the processors' time that the machine's host gave to others."""


def main() -> int:
    """Run it; 0 where every bar holds."""
    parser = argparse.ArgumentParser(prog="benchmarks.simulator", description=__doc__)
    parser.add_argument("--pipeline", type=Path, default=Path("pipelines/digits"))
    parser.add_argument("--cycles", type=int, default=5, help="how often to go through the phases")
    parser.add_argument("--out", type=Path, default=Path("out"))
    given = parser.parse_args()
    return reporting_errors(lambda: bench(given))


def bench(given: argparse.Namespace) -> int:
    """Measure, serve, simulate, compare."""
    pipeline = _narrowed(prepare(given.pipeline))
    with TemporaryDirectory(prefix="trimtab-") as folder, measuring(console) as show:
        found = asyncio.run(profile(pipeline, given.pipeline, ProfileOptions(EFFORT, planned_batches_only=True), show))
        write_profiles(found, Path(folder))
    bench_of = _Bench(given, pipeline, found, _plan(pipeline, found, BEFORE, 1), Course(CYCLE * given.cycles))
    served = bench_of.serve()
    conditions = bench_of.calibrate(served)
    console.print(f"measured: {conditions}")
    simulated, times_real_time = bench_of.simulate_all(served, conditions)
    _print(served.figures, simulated)
    outcome = fidelity_outcome(served, simulated, conditions, times_real_time)
    outcome.print()
    return 0 if outcome.holds else 1


@dataclass(frozen=True, slots=True)
class _Bench:
    """What is served and simulated alike."""

    given: argparse.Namespace
    pipeline: InferencePipeline
    profiles: Mapping[str, ModelProfile]
    plan: PipelinePlan
    course: Course

    def serve(self) -> Served:
        """Serve the whole course."""
        order = LoadOrder(self.course.load(self.capacity_rps), duration_seconds=float(self.course.ends[-1]), seed=1)
        written: list[tuple[float, PipelinePlan]] = []
        ratios: dict[tuple[str, str], list[float]] = {}
        before = _processor_ticks()
        with RunFolder() as where:
            setup = Setup(self.given.pipeline, where, plan=self.plan)
            begun = asyncio.Event()
            session = Session(
                "served", setup, order, disturb=lambda local: self._change(session, begun, local, written)
            )
            with watching(session, console):
                session.on_sample = _noting(ratios, begun, session.on_sample)
                run = asyncio.run(session.run())
        save(run, self.given.out / "simulator")
        if run.results is None:
            raise RuntimeError("the load left no record; it was probably interrupted")
        records = run.results.records
        answered = records["outcome"] <= RequestOutcome.LATE
        return Served(
            results=run.results,
            run=run,
            ratios={key: float(np.median(each)) for key, each in ratios.items()},
            changes=tuple((at - run.started_at, plan) for at, plan in written),
            figures=self.course.figures(records["scheduled"], records["latency_seconds"], answered),
            stolen=_stolen(before, _processor_ticks()),
        )

    async def _change(
        self, session: Session, begun: asyncio.Event, local: Supervisor, written: list[tuple[float, PipelinePlan]]
    ) -> None:
        """Write the plans of the course when their phases begin."""
        await begun.wait()
        if session.progress is None:
            raise RuntimeError("the load began without any progress")
        started = time.time() - session.progress.elapsed_seconds
        for generation, (at, variants) in enumerate(self.course.changes(), 2):
            await asyncio.sleep(max(started + at - time.time(), 0.0))
            plan = _plan(self.pipeline, self.profiles, variants, generation)
            written.append((time.time(), plan))
            write_json(local.plan_file, plan)

    @property
    def capacity_rps(self) -> float:
        """Requests per second the scarcest stage of the first plan carries by its profile."""
        rows = self.pipeline.spec.expected_rows
        return min(stage.throughput_rps / rows[stage.name] for stage in self.plan.spec.stages)

    def calibrate(self, served: Served) -> Conditions:
        """Take from the phases that are not compared what no profile tells.

        The light load tells how fast the first plan's variants are, the other plan's phase the second plan's, the heavy
        load how much they slow each other down. Each depends a little on the others, so it is done in rounds.
        """
        totals = served.results.answered["total"]
        found = Conditions(
            service_ratios=served.ratios,
            fan_out={("locate", "count"): tuple(np.bincount(totals).astype(float).tolist())},
        )
        for _ in range(ROUNDS):
            found = self._scaled(served, LIGHT, BEFORE, self._scaled(served, OTHER, AFTER, found))
            found = self._fitted(served, "p50", (HEAVY,), _contended, MOST_CONTENTION, found)
            found = self._fitted(served, "p99", (LIGHT, HEAVY, OTHER), _noisy, MOST_SPREAD, found)
        return found

    def _scaled(self, served: Served, phase: str, variants: Mapping[str, str], conditions: Conditions) -> Conditions:
        """Make variants as much faster or slower as the median of a phase says."""
        simulated = self._figures(self.simulate(served, conditions, CALIBRATING_SEED))
        factor = served.figures[phase]["p50"] / simulated[phase]["p50"]
        ratios = {
            (stage, variant): ratio * (factor if variants[stage] == variant else 1.0)
            for (stage, variant), ratio in conditions.service_ratios.items()
        }
        return replace(conditions, service_ratios=ratios)

    def _fitted(  # noqa: PLR0913, PLR0917 - what to fit to what
        self,
        served: Served,
        figure: str,
        phases: tuple[str, ...],
        changed: Callable[[Conditions, float], Conditions],
        most: float,
        conditions: Conditions,
    ) -> Conditions:
        """Find by bisection the value with which a figure is as it was served, on the mean of the phases."""
        low, high = 0.0, most
        for _ in range(HALVINGS):
            middle = (low + high) / 2
            simulated = self._figures(self.simulate(served, changed(conditions, middle), CALIBRATING_SEED))
            ratio = np.mean([simulated[phase][figure] / served.figures[phase][figure] for phase in phases])
            low, high = (middle, high) if ratio < 1.0 else (low, middle)
        return changed(conditions, (low + high) / 2)

    def simulate(self, served: Served, conditions: Conditions, seed: int) -> Simulated:
        """Simulate the very arrivals that were served."""
        return simulate(self._scenario(served, conditions, seed))

    def simulate_all(self, served: Served, conditions: Conditions) -> tuple[Figures, float]:
        """Return the figures of several simulations with other chances together, and how fast they were."""
        began = time.perf_counter()
        found = [self.simulate(served, conditions, seed) for seed in SEEDS]
        times_real_time = sum(one.duration_seconds for one in found) / (time.perf_counter() - began)
        scenario = self._scenario(served, conditions, SEEDS[0])
        again = run_of("simulated", served.results.facts.load, scenario, found[0], served.run.started_at)
        write_report(self.given.out / "simulator.html", [served.run, again])
        return self._figures(*found), times_real_time

    def _figures(self, *found: Simulated) -> Figures:
        return self.course.figures(
            np.concatenate([one.arrivals_seconds for one in found]),
            np.concatenate([one.latency_seconds for one in found]),
            np.concatenate([one.ends <= LATE for one in found]),
        )

    def _scenario(self, served: Served, conditions: Conditions, seed: int) -> Scenario:
        return Scenario(
            pipeline=self.pipeline,
            profiles=self.profiles,
            arrivals_seconds=np.sort(served.results.records["scheduled"]),
            duration_seconds=served.results.facts.duration_seconds,
            plan=self.plan,
            changes=served.changes,
            conditions=conditions,
            seed=seed,
        )


def _contended(conditions: Conditions, contention: float) -> Conditions:
    return replace(conditions, contention=contention)


def _noisy(conditions: Conditions, spread: float) -> Conditions:
    return replace(conditions, spread=spread)


def _noting(
    ratios: dict[tuple[str, str], list[float]], begun: asyncio.Event, told: Callable[[Session], None]
) -> Callable[[Session], None]:
    """Remember at each sample what the router says of its replicas' speed, and notice when the load has begun."""

    def note(session: Session) -> None:
        for name, stage in session.local.state.get("stages", {}).items():
            ratios.setdefault((name, stage["variant"]), []).append(float(stage["service_ratio"]))
        if session.progress is not None:
            begun.set()
        told(session)

    return note


def _processor_ticks() -> tuple[int, ...]:
    """Return user, nice, system, idle, iowait, irq, softirq and steal since the start; nothing without /proc."""
    stat = Path("/proc/stat")
    return tuple(map(int, stat.read_text(encoding="ascii").split(maxsplit=9)[1:9])) if stat.exists() else ()


def _stolen(before: tuple[int, ...], after: tuple[int, ...]) -> float:
    spent = [late - early for early, late in zip(before, after, strict=True)]
    return spent[-1] / max(sum(spent), 1) if spent else 0.0


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


def _print(served: Figures, simulated: Figures) -> None:
    heads = ("load", "requests", "p50 served", "simulated", "p99 served", "simulated", "dropped served", "simulated")
    table = Table(*heads, box=None, pad_edge=False)
    for name, figures in served.items():
        sides = (figures, simulated[name])
        table.add_row(
            name if name in COMPARED else f"({name})",
            f"{figures['requests']:.0f}",
            *(f"{1000 * side[figure]:.1f} ms" for figure in ("p50", "p99") for side in sides),
            *(f"{100 * side['dropped']:.2f} %" for side in sides),
        )
    console.print(table)
    console.print("in brackets: calibrated at")


def fidelity_outcome(served: Served, simulated: Figures, conditions: Conditions, times_real_time: float) -> Outcome:
    """Judge the simulation by how far it is off."""
    figures: dict[str, float | int | str | None] = {
        "contention": conditions.contention,
        "spread": conditions.spread,
        **{f"service_ratio_{variant}": ratio for (_, variant), ratio in conditions.service_ratios.items()},
        "times_real_time": times_real_time,
        "stolen_processor_share": served.stolen,
    }
    bars = []
    for name in COMPARED:
        ours, theirs = served.figures[name], simulated[name]
        for figure in ("p50", "p99"):
            figures[f"{name}: {figure} served, seconds"] = ours[figure]
            figures[f"{name}: {figure} simulated, seconds"] = theirs[figure]
            error = abs(theirs[figure] / ours[figure] - 1.0)
            bars.append(bar(f"{name}: relative error of {figure}", error, "<=", MOST_ERROR))
        gap = abs(theirs["dropped"] - ours["dropped"])
        bars.append(bar(f"{name}: gap of dropped share", gap, "<=", MOST_DROPS))
    return Outcome(name="bench-simulator", figures=figures, bars=tuple(bars))


if __name__ == "__main__":
    sys.exit(main())
